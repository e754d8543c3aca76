"""Peak resident memory of an owner and of a receiver, stage by stage, against the memory model (design, section 5).

Every owner and every receiver is a process of its own.  A stage's figure is the highest resident size during it, less
the size at its beginning: what the stage adds to what must be held anyway, which is live weights and their committed
copy at an owner, and the served weights at a receiver.  The first is a row of its own.  Bounds depend on the settings
``chunk_elements`` and ``bucket_bytes`` alone, so that they must hold for any size of model and tensor.  Both sides do
real work: what the receiver holds in the end is compared with the owner's weights by content digest.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from table import Row, gathered, parser, report
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.header import DEFAULT_LIMITS
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.payload import decode_payload
from dcr.data_plane.placement.placement import Placement
from dcr.delivery.folder import FolderDelivery
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Emit
from dcr.runtime.emission import Emission
from dcr.runtime.settings import Settings
from dcr.trainer.torch.source import TorchSource

NAME = "memory"
MEGABYTE = 1_000_000
MODELS = (
    (64, "small", 0.01),
    (64, "small", 0.05),
    (256, "small", 0.05),
    (1024, "small", 0.05),
    (16, "one", 0.05),
    (64, "one", 0.05),
    (64, "transposed", 0.05),
)
"""Megabytes of BF16 weights, layout, and share that changes.

One tensor is not larger, since learning its projection takes long; its memory follows ``LEARN_BYTES``."""
DENSE_MAX = 64
"""Megabytes of weights that are also sent whole, which takes the longest."""
SMALL = 1 << 20
"""Elements of a tensor, where they are small."""
CHUNK_ELEMENTS, BUCKET_BYTES = 1 << 20, 2 << 20
"""A quarter of the defaults, so that a bound is far below the sizes measured."""
CHUNK_BYTES = 72
"""An element of a chunk, as ``TorchSource`` has it."""
BUCKETS = 4
"""Buckets' worth of memory around one bucket: its entries, its streams before and after compression, its payload."""
NOISE = 8 * MEGABYTE
"""What an interpreter and its threads take and give back meanwhile."""
LEARN_BYTES = 8 + 1 / 8
"""An element of the largest tensor, as ``projection`` has it where the save path copies; and a bit that it was seen."""
REHEARSAL = 8
"""Megabytes."""
LAYOUTS = {
    "small": "tensors of 2 MB",
    "one": "in one tensor",
    "transposed": "in one tensor, transposed by the save path",
}
STAGES = {
    "construct": "construction: the committed copy, and learning the projection",
    "dense": "a dense emission",
    "restore": "a restore from the baseline",
    "detect": "detection",
    "encode": "detection and encoding",
    "deliver": "detection, encoding and delivery",
    "fold": "fold",
    "copy": "the copy of a candidate (begin_push), made first",
    "copy again": "the copy of the next one, into the same memory",
    "copied": "detection, encoding and delivery of the copy",
    "prewarm": "prewarm",
    "receive": "reception",
    "decode": "reception and decoding",
    "place": "reception, decoding and placement",
    "read back": "readback",
}
NOT_MEASURED = (
    "a GPU, and the pinned host memory that copies from it need, for a snapshot a chunk's",
    "the node agent's shared memory (receive_bytes_max) and staged payloads (stage_bytes_max), which have bounds",
    "several ranks, whose projection is learned from gathered tensors",
    "memory that numba's compiler takes once in a process; kernels are compiled before the first stage",
)


# ---------------------------------------------------------------- the processes


class Peaks:
    """Highest resident memory of stages of this process, above what was resident when they began."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one; what earlier ones left to the allocator is given back to the system first."""
        before = settled()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        yield
        self.found[name] = status("VmHWM") - before


def settled() -> int:
    """Resident bytes once everything that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this needs Linux")


class Weights(nn.Module):
    """Flat or square BF16 tensors; its state dict is the checkpoint, and its loader copies."""

    def __init__(self, megabytes: int, layout: str) -> None:
        super().__init__()
        elements = megabytes * MEGABYTE // 2
        count = max(1, elements // SMALL) if layout == "small" else 1
        size = elements // count // 1024 * 1024
        for number in range(count):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(size // 1024, 1024, dtype=torch.bfloat16), requires_grad=False)
            self.add_module(f"layers_{number}", layer)
        for tensor in self.parameters():
            for part in tensor.view(-1).split(SMALL):
                part.copy_(torch.randn(part.numel()) * 0.02)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.parameters())

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(tensor.numel() for tensor in self.parameters())

    def step(self, rate: float) -> None:
        """Change about this share of the elements by the smallest difference there is, or the second smallest."""
        for tensor in self.parameters():
            for part in bit_view(tensor).view(-1).split(SMALL):
                part.add_((torch.rand(part.numel()) < rate) * torch.randint(1, 3, (part.numel(),), dtype=torch.int16))


def transposed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A save path that turns every tensor, so that no element stays beside its neighbour."""
    return {name: tensor.T.contiguous() for name, tensor in state.items()}


class Dropped:
    """A delivery store that keeps nothing."""

    def put(self, key: str, data: bytes) -> None:
        """Forget it."""


def order(source: TorchSource, kind: Kind, epoch: int) -> Emit:
    """What a leader would order."""
    digest = source.baseline_digest
    assert digest is not None
    base = Base(kind, 0, digest.hex(), "" if kind is Kind.RESTORE else "c")
    return Emit("memory", epoch, 0 if kind is Kind.RESTORE else 1, base, "add", (), 1)


def emit(source: TorchSource, kind: Kind, epoch: int, store: Any) -> None:
    """A whole emission, manifest apart."""
    Emission(order(source, kind, epoch), source, 1, store, Settings(bucket_bytes=BUCKET_BYTES)).run()


def lead(model: Weights, layout: str, rate: float, folder: Path) -> dict[str, Any]:
    """Everything that an owner does; the weights are another version afterwards."""
    peaks = Peaks()
    before = settled()
    with peaks.stage("construct"):
        save_path = transposed if layout == "transposed" else dict
        source = TorchSource(model, save_path=save_path, chunk_elements=CHUNK_ELEMENTS)
    held = settled() - before
    store, dropped = FolderDelivery(folder), Dropped()
    model.step(rate)
    if model.bytes <= DENSE_MAX * MEGABYTE:
        with peaks.stage("dense"):
            emit(source, Kind.DENSE, 1, dropped)
        with peaks.stage("restore"):
            emit(source, Kind.RESTORE, 2, dropped)
    with peaks.stage("detect"):
        for _ in source.changes(Kind.RELATIVE):
            pass
    with peaks.stage("encode"):
        emit(source, Kind.RELATIVE, 3, dropped)
    with peaks.stage("deliver"):
        emit(source, Kind.RELATIVE, 4, store)
    digest = source.candidate_digest
    assert digest is not None
    with peaks.stage("fold"):
        source.fold(digest)
    model.step(rate)
    with peaks.stage("copy"):
        source.snapshot()
    with peaks.stage("copy again"):
        source.snapshot()
    with peaks.stage("copied"):
        emit(source, Kind.RELATIVE, 5, dropped)
    source.hold()
    specs = [(spec.name, list(spec.shape)) for spec in source.specs]
    return {"peaks": peaks.found, "held": held, "digest": digest.hex(), "specs": specs}


def follow(model: Weights, layout: str, folder: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Everything that a receiver does with what the owner has delivered; RuntimeError if it ends up with other bits."""
    peaks = Peaks()
    known = {name: TensorSpec(name, tuple(shape), torch.bfloat16) for name, shape in said["specs"]}
    place = Placement(model, native_loader(model, layout), list(known.values()))
    with peaks.stage("prewarm"):
        place.prewarm().raise_if_refused()
    store = FolderDelivery(folder)
    keys = store.keys("memory/")

    def payloads() -> Iterator[bytes]:
        for key in keys:
            data = store.get(key, DEFAULT_LIMITS.payload_bytes_max)
            assert data is not None
            yield data

    with peaks.stage("receive"):
        for _ in payloads():
            pass
    with peaks.stage("decode"):
        for data in payloads():
            decode_payload(data, known=known)
    with peaks.stage("place"):
        for data in payloads():
            place.apply(decode_payload(data, known=known)[1])
    with peaks.stage("read back"):
        held = place.readback().held
    digest = sum((one.digest for extents in held.values() for one in extents), ContentDigest())
    if digest.hex() != said["digest"]:
        raise RuntimeError("the receiver does not hold the owner's weights")
    return {"peaks": peaks.found}


def process(asked: argparse.Namespace) -> None:
    """What a process does: a small rehearsal, which compiles every kernel and starts every thread; then its part."""
    layout, folder = asked.layout, Path(asked.folder)
    with tempfile.TemporaryDirectory() as elsewhere:
        small, twin = Weights(REHEARSAL, layout), Weights(REHEARSAL, layout)
        twin.load_state_dict(small.state_dict())
        said = lead(small, layout, asked.rate, Path(elsewhere))
        follow(twin, layout, Path(elsewhere), said)
        del small, twin
    torch.manual_seed(0)
    model = Weights(asked.megabytes, layout)
    if asked.process == "owner":
        found = {**lead(model, layout, asked.rate, folder), "bytes": model.bytes, "largest": model.largest}
    else:
        found = follow(model, layout, folder, json.loads(sys.stdin.read()))
    print(json.dumps(found))


def native_loader(model: Weights, layout: str) -> Callable[[Iterable[tuple[str, torch.Tensor]]], set[str]]:
    """Copies canonical tensors where they belong."""
    state = model.state_dict()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            state[name].copy_(tensor.T if layout == "transposed" else tensor)
            names.add(name)
        return names

    return load


# ---------------------------------------------------------------- the figures


def run(which: str, model: tuple[int, str, float], folder: str, said: str = "") -> str:
    """A process of its own; returns the JSON that it prints last."""
    megabytes, layout, rate = model
    asked = ["--process", which, "--megabytes", str(megabytes), "--layout", layout, "--rate", str(rate)]
    # What is freed goes back to the system at once: kept for the next allocation it would hide what that needs.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    command = [sys.executable, __file__, *asked, "--folder", folder]
    done = subprocess.run(command, input=said, env=environment, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return done.stdout.splitlines()[-1]


def rows_of(megabytes: int, layout: str, rate: float) -> Iterator[Row]:
    """Rows of one model: each stage beside what the memory model allows it, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        model = (megabytes, layout, rate)
        text = run("owner", model, folder)
        owner, receiver = json.loads(text), json.loads(run("receiver", model, folder, text))
    claim = f"{megabytes} MB, {LAYOUTS[layout]}, {100 * rate:g} % changed"
    chunk, bucket = CHUNK_BYTES * min(CHUNK_ELEMENTS, owner["largest"]), BUCKETS * BUCKET_BYTES
    changed = int(2 * rate * chunk)  # twice, for not every chunk changes alike
    bounds = {
        "construct": owner["bytes"] + int(LEARN_BYTES * owner["largest"]) + chunk,
        "dense": chunk + bucket,
        "restore": chunk + bucket,
        "detect": changed,
        "encode": changed + bucket,
        "deliver": changed + bucket,
        "fold": changed,
        "copy": owner["bytes"],
        "copy again": 0,
        "copied": changed + bucket,
        "prewarm": 0,
        "receive": BUCKET_BYTES,
        "decode": bucket,
        "place": bucket,
        "read back": 0,
    }

    def row(what: str, measured: int, bound: int) -> Row:
        return Row(f"{claim}: {what}", measured / MEGABYTE, "MB", aim=(bound + NOISE) / MEGABYTE, at_least=False)

    yield row("owner holds, beside the live weights", owner["held"], owner["bytes"])
    peaks = owner["peaks"]
    more = peaks["copy"] + peaks["copied"] - max(peaks["deliver"], peaks["fold"])
    yield row("owner, what a push by begin_push needs beyond one by push", more, owner["bytes"])
    for side, found in (("owner", owner), ("receiver", receiver)):
        for stage, peak in found["peaks"].items():
            yield row(f"{side}, {STAGES[stage]}", peak, bounds[stage])


def main() -> None:
    """Measure every model."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--largest", type=int, default=1024, help="leave larger models out (megabytes)")
    arguments.add_argument("--process", choices=("owner", "receiver"), help=argparse.SUPPRESS)
    for name, kind in (("--megabytes", int), ("--layout", str), ("--rate", float), ("--folder", str)):
        arguments.add_argument(name, type=kind, help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    with torch.no_grad():
        if asked.process:
            process(asked)
            return
    rows = gathered(row for model in MODELS if model[0] <= asked.largest for row in rows_of(*model))
    report(NAME, rows, NOT_MEASURED, as_json=asked.json)


if __name__ == "__main__":
    main()
