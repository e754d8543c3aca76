"""The paper's Table 3 on a real Megatron model over gloo: what direct projection and relative operations are worth.

Modes, taken in turn in every round, on the same weights before and after:

  X xor   direct projection, XOR                F   full conversion: all tensors assembled and converted by the
  X add   direct projection, our default            Bridge's own export, compared with the committed checkpoint at
  P       direct projection, overwrites only        one owner each, overwrites only

A Qwen3-MoE with random weights, experts spread over all processes and everything else replicated, in 1, 2 and 4
processes.  3 and 5 % of the elements change as in the paper's stress cases; and one AdamW step of FP32 masters, after
some on real text.  Every mode ends with payloads; a round takes as long as its slowest process.  That all modes find
the same candidate, by its content digest, is checked.
"""

import importlib
import json
import logging
import sysconfig
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from table import Row, gathered, parser, report
from workload import BASE, BUCKET_BYTES, CHUNK_ELEMENTS, IDENTITY, cores

from dcr.data_plane.bucket import pack
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.encode import to_item
from dcr.data_plane.index_map import Box, IndexMap
from dcr.data_plane.item import Change, Operation
from dcr.data_plane.kernels.numba_streams import NumbaStreamKernels
from dcr.data_plane.payload import encode_payload
from dcr.data_plane.tracker import Tracker
from dcr.protocol.identity import Kind
from dcr.trainer import cpu_megatron
from dcr.trainer.megatron.conversion import BridgeConversion
from dcr.trainer.megatron.source import MegatronSource
from dcr.trainer.share import OwnedShard, Share
from dcr.trainer.torch.ownership import Shard, assign
from dcr.trainer.torch.ranks import Ranks

NAME = "construct_modes"
PROCESSES = (1, 2, 4)
RATES = {"3 % changed": 0.03, "5 % changed": 0.05}
STEP = "one AdamW step"
AIM = 2.0
PAPER_TIME = {"F": 1.16, "X xor": 1.13}
PAPER_SAVED = 0.40
NOT_MEASURED = (
    "a GPU, NCCL, and sizes at which tensors do not fit into caches many times over",
    "tensor and pipeline parallelism: Mixture-of-Experts training with them wants norms that need a GPU",
    "residual tensors: this model has none",
    "the store or the relay tree, which take payloads while the next ones are made",
)
NOTES = (
    "the paper's ranges: F / P 1.08-1.16, X / P 1.07-1.13, payload bytes saved 0.38-0.40; the columns have their ends",
    "with more processes than cores the slowest process waits for the others' work: compare processor time then",
)
_WINDOW, _BATCH, _RATE = 64, 2, 3e-6
_DRAWS = 40

Mode = Callable[[], tuple[int, ContentDigest]]
"""Makes payloads; their bytes, and this rank's share of the candidate's content digest."""


def model_of(width: int, layers: int, ranks: int) -> tuple[Any, list[torch.nn.Module]]:
    """The Bridge, and this rank's part of a model of random weights."""
    from megatron.bridge import AutoBridge  # noqa: PLC0415 - after install()
    from megatron.core import parallel_state  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = AutoConfig.for_model(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    bridge = AutoBridge.from_hf_config(config)
    torch.manual_seed(1)
    provider = cpu_megatron.provider_of(bridge, expert_model_parallel_size=ranks)
    return bridge, [provider.provide(pre_process=True, post_process=True).bfloat16()]


class FullConversion:
    """Mode F: each canonical tensor's committed bits at one owner; everything is converted before it is compared."""

    def __init__(self, conversion: BridgeConversion, source: MegatronSource, ranks: Ranks) -> None:
        self._conversion = conversion
        self._numbers = range(len(conversion.tasks()))
        everyone = tuple(range(ranks.count))
        sizes = [Shard(spec.name, "", spec.numel * spec.dtype.itemsize, everyone) for spec in source.specs]
        owner = assign(sizes, ranks.count).owner
        self._owned = {s.name: n for n, s in enumerate(source.specs) if owner[s.name, ""] == ranks.rank}
        bases = [0, *np.cumsum([spec.numel for spec in source.specs]).tolist()]
        shards = [
            OwnedShard(
                n,
                Tracker(source.specs[n].name, tensor, chunk_elements=CHUNK_ELEMENTS),
                (IndexMap((_run(tensor.numel(), bases[n]),)),),
            )
            for n, tensor in self._converted().items()
        ]
        self.share = Share(source.owner, source.specs, bases[:-1], shards)

    def changes(self) -> Iterator[Change]:
        """Convert, then compare."""
        converted = self._converted()
        return self.share.changes(Kind.ABSOLUTE, lambda: converted.get)

    def _converted(self) -> dict[int, torch.Tensor]:
        out = self._conversion.convert(self._numbers, lambda _, live: live, lambda _: None)
        return {self._owned[name]: tensor.contiguous() for name, tensor in out if name in self._owned}


def _run(numel: int, base: int) -> Box:
    return Box.of((numel,), (1,), (1,), 0, base)


class Training:
    """AdamW over FP32 masters on real text; every rank sees the same, so that replicas stay equal."""

    def __init__(self, model: torch.nn.Module, steps: int) -> None:
        self._model = model
        self._live = list(model.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._live]
        self._adamw = torch.optim.AdamW(self._masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
        self._text = torch.tensor(np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8).astype(np.int64))
        self._random = torch.Generator().manual_seed(3)
        for _ in range(steps):
            self.step()
        self._adamw.param_groups[0]["lr"] = _RATE

    def step(self) -> None:
        """One step; the model's BF16 weights are rounded from the masters."""
        starts = torch.randint(0, self._text.numel() - _WINDOW - 1, (_BATCH,), generator=self._random).tolist()
        windows = torch.stack([self._text[start : start + _WINDOW + 1] for start in starts])
        mask = torch.triu(torch.ones(_WINDOW, _WINDOW, dtype=torch.bool), 1).view(1, 1, _WINDOW, _WINDOW)
        loss = self._model(
            input_ids=windows[:, :-1],
            position_ids=torch.arange(_WINDOW).expand(_BATCH, -1),
            attention_mask=mask,
            labels=windows[:, 1:],
        )
        loss.float().mean().backward()
        for master, live in zip(self._masters, self._live, strict=True):
            master.grad = None if live.grad is None else live.grad.float()
            live.grad = None
        self._adamw.step()
        with torch.no_grad():
            for master, live in zip(self._masters, self._live, strict=True):
                live.copy_(master)


def scaled(tensor: torch.Tensor, rate: float, seed: int) -> torch.Tensor:
    """A share of the elements times 1 + 0.01 x, x uniform within +-1; what rounding leaves alone is drawn again."""
    random = torch.Generator().manual_seed(seed)
    old = tensor.reshape(-1)
    left = (torch.rand(old.numel(), generator=random) < rate).nonzero().view(-1)
    new = old.clone()
    for _ in range(_DRAWS):
        x = torch.rand(left.numel(), generator=random) * 2 - 1
        new[left] = (old[left].float() * (1 + 0.01 * x)).to(old.dtype)
        left = left[new[left] == old[left]]
    return new.view(tensor.shape)


def modes_of(source: MegatronSource, full: FullConversion) -> dict[str, Mode]:
    """What is raced."""
    kernels = NumbaStreamKernels(1)

    def bytes_of(changes: Iterator[Change], kind: Kind, operation: Operation) -> int:
        items = (to_item(change, kind, preserving=True, relative=operation) for change in changes)
        base = msgspec.structs.replace(BASE, kind=kind)
        return sum(len(encode_payload(IDENTITY, base, bucket, kernels)) for bucket in pack(items, BUCKET_BYTES))

    def direct(kind: Kind, operation: Operation) -> tuple[int, ContentDigest]:
        source.prepare()
        size = bytes_of(source.changes(kind), kind, operation)
        assert source.candidate_digest is not None, "all changes were taken"
        return size, source.candidate_digest

    def whole() -> tuple[int, ContentDigest]:
        size = bytes_of(full.changes(), Kind.ABSOLUTE, Operation.SET)
        assert full.share.candidate_digest is not None, "all changes were taken"
        return size, full.share.candidate_digest

    return {
        "X xor": lambda: direct(Kind.RELATIVE, Operation.XOR),
        "X add": lambda: direct(Kind.RELATIVE, Operation.ADD),
        "P": lambda: direct(Kind.ABSOLUTE, Operation.SET),
        "F": whole,
    }


def race(modes: dict[str, Mode], ranks: Ranks, rounds: tuple[int, int]) -> dict[str, dict[str, list[float]]]:
    """Seconds of the slowest process, processor seconds of all, and bytes of all, by mode and round."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "processor": [], "bytes": []} for name in modes}
    for number in range(sum(rounds)):
        candidates = []
        for name, mode in modes.items():
            ranks.gather(None)  # all begin together
            wall, processor = time.perf_counter(), time.process_time()
            size, digest = mode()
            took = (time.perf_counter() - wall, time.process_time() - processor, size, digest)
            walls, processors, sizes, digests = zip(*ranks.gather(took), strict=True)
            candidates.append(sum(digests, ContentDigest()))
            if number >= rounds[0]:
                for key, value in (("wall", max(walls)), ("processor", sum(processors)), ("bytes", sum(sizes))):
                    found[name][key].append(value)
        if len(set(candidates)) > 1:
            raise RuntimeError("the modes do not find the same candidate")
    return found


def measure(rank: int, count: int, folder: str, sizes: tuple[int, int], rounds: tuple[int, int]) -> None:
    """Run on every process; the first writes what was found."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{count}", rank=rank, world_size=count)
    bridge, model = model_of(*sizes, count)
    training = Training(model[0], steps=6)
    conversion, ranks = BridgeConversion(bridge, model), Ranks()
    source = MegatronSource(conversion)
    if source.residual:
        raise RuntimeError(f"not all is projected directly: {source.residual[0]}")
    modes = modes_of(source, FullConversion(conversion, source, ranks))
    live = [(task.name, task.tensor) for task in conversion.tasks() if task.tensor is not None]
    before = [tensor.clone() for _, tensor in live]
    found: dict[str, Any] = {"elements": sum(spec.numel for spec in source.specs), "cases": {}}
    for case, rate in {**RATES, STEP: 0.0}.items():
        if case == STEP:
            training.step()
        else:
            for (name, tensor), old in zip(live, before, strict=True):
                tensor.copy_(scaled(old, rate, zlib.crc32(name.encode())))  # alike on replicas
        found["cases"][case] = race(modes, ranks, rounds)
        found["cases"][case]["changed"] = sum(ranks.gather(sum(c.changed for c in source.changes_found.values())))
        for (_, tensor), old in zip(live, before, strict=True):
            tensor.copy_(old)
    if rank == 0:
        (Path(folder) / f"{count}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rows_of(count: int, found: dict[str, Any]) -> Iterator[Row]:
    """Rows of one number of processes."""
    for case, modes in found["cases"].items():
        claim = f"{count} {'process' if count == 1 else 'processes'}, {case}"
        aim = AIM if case != STEP and count > 1 else None  # one process has nothing to assemble

        def ratio(slow: str, fast: str, what: str, modes: dict[str, Any] = modes) -> float:
            return median(a / b for a, b in zip(modes[slow][what], modes[fast][what], strict=True))

        yield Row(f"{claim}: construction F / P", ratio("F", "P", "wall"), "x", paper=PAPER_TIME["F"], aim=aim)
        yield Row(f"{claim}: the same in processor time of all", ratio("F", "P", "processor"), "x")
        for mode in ("X xor", "X add"):
            yield Row(
                f"{claim}: construction {mode} / P", ratio(mode, "P", "wall"), "x", PAPER_TIME.get(mode), at_least=False
            )
            paper = PAPER_SAVED if mode == "X xor" and case != STEP else None
            yield Row(f"{claim}: payload bytes that {mode} saves of P's", 1 - ratio(mode, "P", "bytes"), "", paper)
        yield Row(f"{claim}: construction X add", 1e3 * median(modes["X add"]["wall"]), "ms")
        yield Row(f"{claim}: elements changed", 100 * modes["changed"] / found["elements"], "%")


def main() -> None:
    """Measure with each number of processes."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--width", type=int, default=512, help="of the model, a multiple of 128 (default: 512)")
    arguments.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    arguments.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    arguments.add_argument("--warmups", type=int, default=2, help="rounds before (default: 2)")
    asked = arguments.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # no pool of threads exists when processes are forked
    cpu_megatron.install()
    for module in ("megatron.bridge", "megatron.bridge.models.gpt_provider"):
        importlib.import_module(module)
    rows = [Row("cores", float(cores()), "")]
    with tempfile.TemporaryDirectory() as folder:
        for count in PROCESSES:
            sizes, rounds = (asked.width, asked.layers), (asked.warmups, asked.rounds)
            torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
                measure, (count, folder, sizes, rounds), nprocs=count, start_method="fork"
            )
            rows += gathered(rows_of(count, json.loads((Path(folder) / f"{count}.json").read_text())))
    report(NAME, rows, NOT_MEASURED, as_json=asked.json, notes=NOTES)


if __name__ == "__main__":
    main()
