"""What the data plane's scripts measure: BF16 weights before and after an update, and what others make of them."""

import math
import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from dcr.data_plane.bucket import pack
from dcr.data_plane.encode import to_item
from dcr.data_plane.item import Change, Item, Operation, TensorSpec
from dcr.data_plane.kernels.stream_kernels import StreamKernels
from dcr.data_plane.payload import encode_payload
from dcr.protocol.identity import Base, Kind, PayloadIdentity

Words = npt.NDArray[np.uint16]

IDENTITY = PayloadIdentity("bench", 1, 1, "rank-0", time.time_ns(), 0)
BASE = Base(Kind.RELATIVE, 0, "0" * 32, "bench-1-1")
CHUNK_ELEMENTS, BUCKET_BYTES = 1 << 22, 8 << 20
"""As the settings have them by default."""
ROW = 4096
"""Elements of a row of the matrices here."""
ROW_RATE = 0.3
"""Share of a row that changes, where whole rows change or do not."""
_DRAWS = 40


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """BF16 as int16."""
    return tensor.view(torch.int16)


def words(stored: torch.Tensor) -> Words:
    """Stored bits as unsigned words."""
    return stored.numpy().view(np.uint16)


def table2(noise: float, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new bits as in the paper's Table 2: standard-normal BF16, FP32 noise added, rounded back."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(elements, generator=g).to(torch.bfloat16)
    new = (old.float() + torch.randn(elements, generator=g) * noise).to(torch.bfloat16)
    return bits(old), bits(new)


def relative(rate: float, elements: int, *, noise: str, rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new bits where a share of the elements was scaled by 1 + 0.01 x.

    Args:
        rate: share that changes; what rounding leaves alone is drawn again.
        elements: a multiple of ROW.
        noise: of x: ``uniform`` within -1 and 1, or ``gaussian``.
        rows: whether the changes lie in few rows, ROW_RATE of each, or anywhere.
    """
    g = torch.Generator().manual_seed(1)
    old = (torch.randn(elements, generator=g) * 0.02).to(torch.bfloat16)
    chosen = torch.rand(elements, generator=g) < (ROW_RATE if rows else rate)
    if rows:
        chosen.view(-1, ROW).logical_and_((torch.rand(elements // ROW, generator=g) < rate / ROW_RATE)[:, None])
    new, left = old.clone(), chosen.nonzero().flatten()
    for _ in range(_DRAWS):
        x = (
            torch.randn(left.numel(), generator=g)
            if noise == "gaussian"
            else torch.rand(left.numel(), generator=g) * 2 - 1
        )
        new[left] = (old[left].float() * (1 + 0.01 * x)).to(torch.bfloat16)
        left = left[bits(new)[left] == bits(old)[left]]
    return bits(old), bits(new)


def adam(rate: float, elements: int, steps: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 bits around the last of some Adam steps of FP32 masters, gradients independent of each other."""
    g = torch.Generator().manual_seed(2)
    master = torch.randn(elements, generator=g) * 0.02
    first, second = torch.zeros(elements), torch.zeros(elements)
    old = master
    for step in range(1, steps + 1):
        gradient = torch.randn(elements, generator=g)
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        old = master.to(torch.bfloat16)
        master.add_((first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8), alpha=-rate)
    return bits(old), bits(master.to(torch.bfloat16))


def spec_of(elements: int) -> TensorSpec:
    """A BF16 tensor."""
    return TensorSpec("model.layers.0.mlp.gate_proj.weight", (elements,), torch.bfloat16)


def items(
    old: torch.Tensor, new: torch.Tensor, kernels: StreamKernels, operation: Operation = Operation.ADD
) -> Iterator[Item]:
    """What changed between two flat tensors of bits, chunk by chunk as an owner finds it."""
    spec = spec_of(old.numel())
    for start in range(0, old.numel(), CHUNK_ELEMENTS):
        stop = start + CHUNK_ELEMENTS
        found = kernels.differences(old[start:stop], new[start:stop], start)
        change = Change(spec, found.positions, found.old, found.new)
        yield to_item(change, Kind.RELATIVE, preserving=True, relative=operation)


def payloads(old: torch.Tensor, new: torch.Tensor, kernels: StreamKernels) -> list[bytes]:
    """The whole way from two tensors to payloads, as an owner goes it."""
    return [encode_payload(IDENTITY, BASE, bucket, kernels) for bucket in pack(items(old, new, kernels), BUCKET_BYTES)]


def squeezed(raw: bytes | memoryview | npt.NDArray[np.generic]) -> bytes:
    """One zstd frame of level 1, as the paper and its peers have it."""
    return zstandard.ZstdCompressor(level=1).compress(raw.tobytes() if isinstance(raw, np.ndarray) else raw)


def peer_payload(old: torch.Tensor, new: torch.Tensor) -> list[bytes]:
    """The layout of NeMo-RL's public codec, in torch: u16 gaps and XOR words as they are, in one zstd frame a chunk.

    A gap that does not fit into 16 bits is cut, which only ever makes it smaller.
    """
    made = []
    for start in range(0, old.numel(), CHUNK_ELEMENTS):
        ours, theirs = old[start : start + CHUNK_ELEMENTS], new[start : start + CHUNK_ELEMENTS]
        where = ours.ne(theirs).nonzero().squeeze(1)
        mask = ours.index_select(0, where) ^ theirs.index_select(0, where)
        gaps = (torch.diff(where, prepend=where.new_full((1,), -1)) - 1).clamp_(max=65_535).to(torch.uint16)
        made.append(squeezed(gaps.numpy().tobytes() + mask.numpy().tobytes()))
    return made


def entropy(symbols: npt.NDArray[np.integer]) -> float:
    """Order-0 entropy, in bits a symbol."""
    count = np.bincount(symbols.astype(np.int64)).astype(np.float64)
    share = count[count > 0] / max(symbols.size, 1)
    return float(-(share * np.log2(share)).sum())


def location_entropy(rate: float) -> float:
    """Of positions at a uniform rate, in bits a changed element."""
    return -(rate * math.log2(rate) + (1 - rate) * math.log2(1 - rate)) / rate


class Race:
    """Several ways to do the same, one after the other in every round, so that a busy machine slows all of them.

    Args:
        ways: what to call, by name.
        warmups: rounds that are not counted.
        rounds: rounds that are.
    """

    def __init__(self, ways: dict[str, Callable[[], object]], *, warmups: int, rounds: int) -> None:
        self.wall: dict[str, list[float]] = {name: [] for name in ways}
        self.processor: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(warmups + rounds):
            for name, way in ways.items():
                wall, processor = time.perf_counter(), time.process_time()
                way()
                if number >= warmups:
                    self.wall[name].append(time.perf_counter() - wall)
                    self.processor[name].append(time.process_time() - processor)

    def seconds(self, name: str, *, processor: bool) -> float:
        """Median of a way's rounds."""
        return median((self.processor if processor else self.wall)[name])

    def ratio(self, slow: str, fast: str, *, processor: bool) -> float:
        """Median over the rounds of how much longer one way took than another."""
        times = self.processor if processor else self.wall
        return median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def cores() -> int:
    """How many the process may use."""
    return len(os.sched_getaffinity(0))
