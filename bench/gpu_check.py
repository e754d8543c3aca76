"""What a CPU cannot show: Triton's kernels, and whole refits, on one GPU; under eight minutes.

Exactness comes first, against the torch reference on the host.  Speeds follow: construction and application beside a
copy on the device, a baseline in host memory beside a plain copy from pinned memory, and whole refits between tensors
on the device.  What the time does not suffice for is named and left out.

Ends with 0 if every bit was right, 1 if one was not, and 3 where there is no GPU.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import gpu_exactness
import gpu_refit
import torch
from table import Row, parser, report
from workload import payloads, relative, spec_of

from dcr.data_plane.index_map import Box
from dcr.data_plane.item import Item
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.choice import kernels_for
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.payload import decode_payload
from dcr.data_plane.resident import Span
from dcr.data_plane.staging import host_room
from dcr.data_plane.tracker import Tracker

NAME = "gpu_check"
WRONG, NO_GPU = 1, 3
SECONDS_MAX = 360.0
"""After so many nothing new is begun; what was begun takes a minute at most."""
COPIES, ELEMENTS = 8, 1 << 29
"""Of the shard that speeds are measured on: 1 GiB in BF16, an eighth of it over and over, far beyond any cache."""
LAYERS = 32
"""Of the model that is refitted: 2 GiB."""
RATES = (0.01, 0.03, 0.05)
ROUNDS = 5
CHUNK_ELEMENTS = 1 << 24
"""Elements that visit the device at once."""
PAPER_GB_S = {0.03: 61.1 / 2.96, 0.05: 61.1 / 3.23}
"""The paper's Table 3, mode X, Qwen3-30B: the whole checkpoint over the time, all training GPUs together."""
NOT_MEASURED = (
    "more than one GPU, DTensors, vLLM on a GPU, CUDA graphs",
    "layouts other than plain, and fused and transposed",
    "transports other than a folder on this machine",
    "GPUs other than this one: Triton compiles for each",
)


def settle() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """Median time of some rounds after one that compiles; the device is waited for."""
    times = []
    for _ in range(1 + ROUNDS):
        settle()
        started = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def exactness(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Count the cases that are not as the reference has them, and name them."""
    sizes = gpu_exactness.TINY if tiny else gpu_exactness.FULL
    dtypes = gpu_exactness.DTYPES[:2] if tiny else gpu_exactness.DTYPES
    for what, cases in (
        ("finding, hashing and writing changes", gpu_exactness.of_streams(device, sizes, dtypes)),
        ("placing entries and reading boxes", gpu_exactness.of_boxes(device, sizes, dtypes)),
    ):
        done, wrong = 0, 0
        for case, same in cases:
            done += 1
            if not same:
                wrong += 1
                print(f"WRONG: {case}", file=sys.stderr)
        yield Row(f"{what}: of {done} cases, other than the reference", float(wrong), "", aim=0.0, at_least=False)


def shards(device: torch.device, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored bits before and after an update, on the device."""
    before, after = relative(rate, ELEMENTS // COPIES, noise="uniform", rows=False)
    return before.to(device).repeat(COPIES), after.to(device).repeat(COPIES)


@dataclass(frozen=True)
class Copies:
    """GB/s of a copy on the device, read and written, and of one from pinned memory to the device."""

    inside: float
    to: float

    @classmethod
    def of(cls, device: torch.device) -> "Copies":
        """Measure them."""
        one, other = (torch.zeros(ELEMENTS, dtype=torch.int16, device=device) for _ in range(2))
        part = ELEMENTS // COPIES
        pinned = host_room(part, torch.int16, device).zero_()
        return cls(
            4 * ELEMENTS / 1e9 / seconds(lambda: one.copy_(other)),
            2 * part / 1e9 / seconds(lambda: one[:part].copy_(pinned, non_blocking=True)),
        )


def speeds(device: torch.device) -> Iterator[Row]:
    """What owners and receivers do with one shard, beside copies of it."""
    copies = Copies.of(device)
    yield Row("copy on the device, read and written", copies.inside, "GB/s")
    yield Row("copy from pinned memory to the device", copies.to, "GB/s")
    for rate in RATES:
        before, after = shards(device, rate)
        yield from owner(rate, before, after, copies)
        yield from receiver(rate, before, after, copies)


def owner(rate: float, before: torch.Tensor, after: torch.Tensor, copies: Copies) -> Iterator[Row]:
    """Find changes and write payloads, of a baseline on the device and of one in host memory."""
    what, size = f"{100 * rate:g} % changed", before.nbytes / 1e9
    kernels = stream_kernels([after])

    def chunks() -> None:
        for start in range(0, ELEMENTS, CHUNK_ELEMENTS):
            kernels.differences(before[start : start + CHUNK_ELEMENTS], after[start : start + CHUNK_ELEMENTS])

    detect = 2 * size / seconds(chunks)
    yield Row(f"{what}: compare and compact, both arrays", detect, "GB/s")
    yield Row(f"{what}: compare and compact / copy on the device", detect / copies.inside, "")
    made = size / seconds(lambda: payloads(before, after, kernels))
    yield Row(f"{what}: to payloads (paper: all GPUs of the job)", made, "GB/s of shard", paper=PAPER_GB_S.get(rate))
    tracker = Tracker("bench", before, chunk_elements=CHUNK_ELEMENTS)
    streamed = size / seconds(lambda: [None for _ in tracker.differences(after)])
    yield Row(f"{what}: compare and compact, baseline in host memory", streamed, "GB/s of shard")
    yield Row(f"{what}: the same / copy from pinned memory", streamed / copies.to, "")


def receiver(rate: float, before: torch.Tensor, after: torch.Tensor, copies: Copies) -> Iterator[Row]:
    """Read payloads and place them, in a plain box and in a transposed one; then read the boxes."""
    what, size = f"{100 * rate:g} % changed", before.nbytes / 1e9
    spec, storage = spec_of(ELEMENTS), before.untyped_storage()
    kernels = kernels_for([Span(storage.data_ptr(), storage.nbytes(), storage, ())])
    sealed = payloads(before, after, stream_kernels([after]))
    read = [decode_payload(data)[1] for data in sealed]
    decoded = size / seconds(lambda: [decode_payload(data) for data in sealed])
    yield Row(f"{what}: payloads to items, on the host", decoded, "GB/s of shard")
    side = 1 << ELEMENTS.bit_length() // 2
    for how, sizes, strides in (
        ("as it is", [ELEMENTS], [2]),
        ("transposed", [side, ELEMENTS // side], [2, 2 * side]),
    ):
        sources = [1] if len(sizes) == 1 else [ELEMENTS // side, 1]
        box = PlacedBox(Box.of(sizes, sources, strides, 0, storage.data_ptr()))
        table = BoxTable.of([PlacedTensor(ELEMENTS, 2, (box,))])

        def place(table: BoxTable = table) -> None:
            for bucket in read:
                records = Records.of([0] * len(bucket), [Item(spec, i.operation, i.indices, i.values) for i in bucket])
                assert kernels.first_disordered(table, records) is None
                kernels.place(table, records)

        yield Row(f"{what}: items into a shard {how}", size / seconds(place), "GB/s of shard")

        def contents(table: BoxTable = table) -> None:
            kernels.contents(table, [spec])

        held = size / seconds(contents)
        yield Row(f"{what}: digest of a shard {how}", held, "GB/s")
        yield Row(f"{what}: digest of a shard {how} / copy on the device", held / copies.inside, "")


def main() -> int:
    """Check, then measure; returns the exit code."""
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--interpret", action="store_true", help="no GPU: a tiny part of the exactness, in Triton's interpreter"
    )
    asked = arguments.parse_args()
    started = time.perf_counter()
    left: tuple[str, ...]
    if asked.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which is done where kernels are made
        rows, left = (
            list(exactness(torch.device("cpu"), tiny=True)),
            ("any speed, and any GPU: this was an interpreter",),
        )
    elif not torch.cuda.is_available():
        print(f"{NAME}: torch {torch.__version__} sees no GPU here, so nothing was checked; --interpret needs none")
        return NO_GPU
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        rows, left = measured(device, started)
    report(NAME, rows, left, as_json=asked.json)
    return WRONG if any(row.met is False for row in rows) else 0


def measured(device: torch.device, started: float) -> tuple[list[Row], tuple[str, ...]]:
    """All rows for which the time sufficed, and what was left out."""
    rows = [Row(f"{torch.cuda.get_device_name(device)}: memory", torch.cuda.mem_get_info(device)[1] / 1e9, "GB")]
    left = list(NOT_MEASURED)
    for what, part in (
        ("exactness", exactness(device, tiny=False)),
        ("whole refits", gpu_refit.rows(device, LAYERS, gpu_refit.WIDE, RATES)),
        ("speeds", speeds(device)),
    ):
        for row in part:
            rows.append(row)
            print(f"{time.perf_counter() - started:6.1f} s  {row.claim}", file=sys.stderr)
            if time.perf_counter() - started > SECONDS_MAX:
                left.append(f"{what} after '{row.claim}', and all that comes after: {SECONDS_MAX:g} s were over")
                return rows, tuple(left)
    return rows, tuple(left)


if __name__ == "__main__":
    sys.exit(main())
