"""What the data plane's scripts measure: BF16 weights before and after an update, and what others make of them."""

import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
import zstandard
from torch import nn

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


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallPolicy(nn.Module):
    """A byte-level transformer of 3.3 million weights."""

    def __init__(self, width: int = 256, layers: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte, from int64 of shape [windows, length]."""
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


class RealTraining:
    """AdamW steps of FP32 masters on real text; the model computes with the BF16 weights that are rounded from them.

    Args:
        steps: at a high rate first, so that gradients are those of a model which has learned something.
    """

    def __init__(self, steps: int) -> None:
        torch.manual_seed(3)
        torch.set_num_threads(1)  # so small a model gains nothing by more, and loses much where cores are shared
        self._model = SmallPolicy()
        self._masters = [p.detach().clone().requires_grad_() for p in self._model.parameters()]
        self._adamw = torch.optim.AdamW(self._masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = torch.tensor(np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8).astype(np.int64))
        self._round()
        for _ in range(steps):
            self._step()

    def steps(self, rate: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 bits of all weights, flat, around the last of some more steps at this rate."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for _ in range(steps - 1):
            self._step()
        old = self._stored()
        self._step()
        return old, self._stored()

    def _step(self) -> None:
        starts = torch.randint(0, self._text.numel() - 65, (8,))
        windows = torch.stack([self._text[start : start + 65] for start in starts.tolist()])
        loss = F.cross_entropy(self._model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        self._model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for master, weight in zip(self._masters, self._model.parameters(), strict=True):
            master.grad = weight.grad
        self._adamw.step()
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for master, weight in zip(self._masters, self._model.parameters(), strict=True):
                weight.copy_(master.to(torch.bfloat16))

    def _stored(self) -> torch.Tensor:
        return torch.cat([bits(p.detach().to(torch.bfloat16).flatten()) for p in self._model.parameters()])


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

    def __init__(self, ways: Mapping[str, Callable[[], object]], *, warmups: int, rounds: int) -> None:
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
