"""Runs of a conversion with stand-ins for its tensors, and what they show of where elements go."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from dcr.data_plane.bits import bit_view, bits_dtype
from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.conversion import Conversion, Replace, Task
from dcr.trainer.megatron.lockstep import Lockstep, Take
from dcr.trainer.random_bits import random_bits
from dcr.trainer.torch.ranks import Ranks

FIT_ELEMENTS = 1 << 24
"""Elements of a canonical tensor that are fitted at a time."""

_INDEX_BITS = 33
RANK_BITS = 13
TASK_BITS = 17
INDEX_MASK = (1 << _INDEX_BITS) - 1
_RANK_MASK = (1 << RANK_BITS) - 1

Pieces = dict[int, dict[str, IndexMap]]
"""By task and canonical tensor, from flat position in this rank's shard to flat index in the canonical tensor."""


@dataclass
class Learner:
    """What the runs have shown so far on this rank."""

    conversion: Conversion
    tasks: Sequence[Task]
    lockstep: Lockstep
    reasons: dict[int, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    origins: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    pieces: Pieces = field(default_factory=dict)
    links: set[tuple[int, ...]] = field(default_factory=set)  # tasks that make what is not in origins

    @property
    def ranks(self) -> Ranks:
        """Those that learn together."""
        return self.lockstep.ranks

    def run(self, numbers: Iterable[int], replace_by: Replace, take: Take, what: str) -> dict[int, str]:
        """Convert tasks and take what comes out; past one that fails the rest goes on.  Those that failed, and why."""
        left, failed = list(numbers), {}
        while failure := self.lockstep.run(self.conversion, self.tasks, left, replace_by, take):
            where = f" on rank {failure.rank}" if self.ranks.count > 1 else ""
            failed[failure.number] = f"its conversion fails on {what}{where}: {failure.reason}"
            left = left[left.index(failure.number) + 1 :]
        return failed

    def run_ids(self) -> None:
        """The first run."""
        failed = self.run(range(len(self.tasks)), self.ids, self.take_ids, "integer ids")
        for number, reason in failed.items():
            self.blame((number,), reason)
            for name in [name for name, origins in self.origins.items() if number in origins]:
                del self.shapes[name]  # it need not have come out on every rank
                self.links.add(self.origins.pop(name))
                for piece in self.pieces.values():
                    piece.pop(name, None)
        for link in self.links:
            self.blame(link, "it makes a canonical tensor together with a task whose conversion fails on integer ids")

    def run_values(self, made_by: Replace) -> None:
        """Compare where values come out, on tasks that are direct so far, with what ids said."""
        direct = [n for n in range(len(self.tasks)) if n not in self.reasons]
        self.dtypes = {}
        last: dict[int, torch.Tensor] = {}  # what a task was given is mostly what its canonical tensors are made of

        def made(number: int, live: torch.Tensor) -> torch.Tensor:
            if number not in last:
                last.clear()
                last[number] = made_by(number, live)
            return last[number]

        def take(number: int, name: str, tensor: torch.Tensor) -> None:
            self.take_values(number, name, tensor, made)

        # A copy is handed over: a conversion may write into what it is given.
        failed = self.run(direct, lambda n, live: made(n, live).to(live.device, copy=True), take, "random bits")
        for number, reason in failed.items():
            self.blame((number,), reason)
        for name, origins in self.origins.items():
            if name not in self.dtypes:
                self.blame(origins, f"canonical {name}: whether it comes out depends on values or dtypes")

    def blame(self, numbers: Iterable[int], reason: str) -> None:
        """Make tasks residual; the first reason stays."""
        for number in numbers:
            self.reasons.setdefault(number, reason)

    def ids(self, number: int, live: torch.Tensor) -> torch.Tensor:
        """Integers that name task, rank and position."""
        first = ((number + 1) << (_INDEX_BITS + RANK_BITS)) | (self.ranks.rank << _INDEX_BITS)
        return torch.arange(first, first + live.numel(), device=live.device).view(live.shape)

    def take_ids(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """Fit what came out of ids as one canonical tensor."""
        if name in self.shapes:
            self.blame((number, *self.origins[name]), f"canonical {name} comes out more than once")
            return
        self.shapes[name], self.origins[name] = tuple(tensor.shape), (number,)
        if tensor.dtype != torch.int64:
            self.blame((number,), f"canonical {name}: it casts integer ids to {tensor.dtype}")
            return
        flat = tensor.reshape(-1)
        boxes: dict[int, list[Box]] = {}
        drawn: set[int] = set()
        problem = None
        for start in range(0, flat.numel(), FIT_ELEMENTS):
            part = flat[start : start + FIT_ELEMENTS]
            named = _distinct((part >> (_INDEX_BITS + RANK_BITS)) - 1)
            drawn.update(named)
            if not all(0 <= n < len(self.tasks) for n in named):
                break
            for origin in named:
                problem = problem or self._fit(origin, part, start, boxes.setdefault(origin, []), alone=len(named) == 1)
        if flat.numel() and (number not in drawn or not all(0 <= n < len(self.tasks) for n in drawn)):
            self.blame((number,), f"canonical {name}: it has elements that are no source's: computed, or padding")
            return
        self.origins[name] = tuple(sorted({number, *drawn}))
        try:
            pieces = {origin: _union(found) for origin, found in boxes.items() if found}
        except RefusedError as error:
            problem = problem or str(error)
        if problem is not None:
            self.blame(self.origins[name], f"canonical {name}: {problem}")
            return
        for origin, piece in pieces.items():
            self.pieces.setdefault(origin, {})[name] = piece

    def _fit(self, origin: int, flat: torch.Tensor, start: int, boxes: list[Box], *, alone: bool) -> str | None:
        """Fit the elements that this rank holds of one task; what is wrong with them, if anything."""
        held = (flat >> _INDEX_BITS) & _RANK_MASK == self.ranks.rank
        if not alone:
            held &= flat >> (_INDEX_BITS + RANK_BITS) == origin + 1
        target = held.nonzero().view(-1)
        if not target.numel():
            return None
        source = flat[target] & INDEX_MASK
        tensor = self.tasks[origin].tensor
        if tensor is None or int(source.max()) >= tensor.numel():
            return "ids come out changed: it computes"
        try:
            boxes.extend(box.moved(0, start) for box in _run_or_fit(source, target).boxes)
        except RefusedError as error:
            return str(error)
        return None

    def random(self, number: int, live: torch.Tensor) -> torch.Tensor:
        """Random stored bits, NaN and -0.0 among them."""
        return random_bits(live, (number << RANK_BITS) | self.ranks.rank)

    def digits_needed(self) -> int:
        """How many digits of a position it takes to tell all elements of any direct shard of this rank apart."""
        return max(
            (
                -(-(task.tensor.numel() - 1).bit_length() // _digit_bits(task.tensor.dtype))
                for number, task in enumerate(self.tasks)
                if number not in self.reasons and task.tensor is not None and task.tensor.numel()
            ),
            default=0,
        )

    def digits(self, number: int, live: torch.Tensor, *, digit: int, salt: int) -> torch.Tensor:
        """A digit of each position as stored bits, the lowest first, under a key of task, rank and salt."""
        width = _digit_bits(live.dtype)
        key = xxhash.xxh3_64_intdigest(f"{salt} {digit} {number} {self.ranks.rank}".encode()) >> 1
        narrow = live.numel() < 1 << 31 and width < 32  # noqa: PLR2004 - bits of an int32
        positions = torch.arange(live.numel(), dtype=torch.int32 if narrow else torch.int64)
        shifted = (positions >> min(digit * width, 31 if narrow else _INDEX_BITS)) ^ (
            key & 0x7FFFFFFF if narrow else key
        )
        if live.dtype == torch.bool:
            return (shifted & 1).to(torch.bool).view(live.shape)
        return shifted.to(bits_dtype(live.dtype)).view(live.dtype).view(live.shape)

    def take_values(self, number: int, name: str, tensor: torch.Tensor, made_by: Replace) -> None:
        """Compare what came out of known bits with what ids said of it."""
        if self.shapes.get(name) != tuple(tensor.shape) or name in self.dtypes:
            self.blame((number,), f"canonical {name}: whether it comes out, and its shape, depend on values or dtypes")
            return
        self.dtypes[name] = tensor.dtype
        for origin in self.origins[name]:
            index_map = self.pieces.get(origin, {}).get(name)
            if index_map is None:
                continue
            live = self.tasks[origin].tensor
            assert live is not None, "a piece is of a tensor that this rank holds"
            if tensor.dtype != live.dtype:
                self.blame((origin,), f"canonical {name}: it casts {live.dtype} to {tensor.dtype}")
                return
            if not _moved(index_map, bit_view(made_by(origin, live)), bit_view(tensor)):
                self.blame(
                    (origin,),
                    f"canonical {name}: random bits do not come out where ids do: it computes, or joins other tensors",
                )


def _digit_bits(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else 8 * dtype.itemsize


def _distinct(numbers: torch.Tensor) -> list[int]:
    low, high = (int(value) for value in numbers.aminmax())
    return [low] if low == high else torch.unique(numbers).tolist()  # sorted


def _union(boxes: list[Box]) -> IndexMap:
    """The map of boxes that were fitted part by part; runs that go on from one part to the next are one."""
    joined: list[Box] = []
    for box in boxes:
        last = joined[-1] if joined else box
        ends = (last.source_bounds[1] + 1, last.target_bounds[1] + 1)
        runs = all(b.sizes == (b.numel,) and b.source_strides == b.target_strides == (1,) for b in (last, box))
        if joined and runs and ends == (box.source_offset, box.target_offset):
            joined[-1] = Box.of((last.numel + box.numel,), (1,), (1,), last.source_offset, last.target_offset)
        else:
            joined.append(box)
    return IndexMap.union(joined)


def _run_or_fit(source: torch.Tensor, target: torch.Tensor) -> IndexMap:
    """A fit; what is a single run of elements needs no table of pairs."""
    first, start, count = int(source[0]), int(target[0]), source.numel()
    if int(target[-1]) - start == count - 1 and torch.equal(source, torch.arange(first, first + count)):
        return IndexMap((Box.of((count,), (1,), (1,), first, start),))
    return fit(source, target)


def _moved(index_map: IndexMap, source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether bits are where a map says."""
    source, target = source.reshape(-1), target.reshape(-1)
    for box in index_map.boxes:
        if any(stride < 0 for stride in box.target_strides):
            there, here = box.expand()
            equal = torch.equal(source[there], target[here])
        else:
            equal = torch.equal(
                source[box.source_offset :].as_strided(box.sizes, box.source_strides),
                target[box.target_offset :].as_strided(box.sizes, box.target_strides),
            )
        if not equal:
            return False
    return True
