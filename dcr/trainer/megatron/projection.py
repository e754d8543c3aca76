"""Where each element of a Megatron shard lies in the checkpoint, learned from the conversion itself (paper 4.2).

Two runs of the trainer's own conversion, streamed, one task's stand-ins alive at a time.  In the first every tensor is
replaced by integer ids, each naming task, rank and flat position; where they come out, boxes are fitted and compared
with them exactly.  In the second every tensor is replaced by random stored bits, and those that the first run cannot
see, adapters for one, by other values; every bit must come out where the ids did.  A task that passes both is *direct*.
Every other one is *residual*, with the reason: it casts, computes, joins tensors that change its values, repeats or
drops into padding, or fails on ids.  Tasks that share a canonical tensor with a residual one are residual too.

Learning needs host memory for the ids of the largest canonical tensor, int64, and some ten int64 for each of
``FIT_ELEMENTS``, whatever the model's size.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import xxhash

from dcr.data_plane.bits import bit_view
from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.conversion import Conversion, Task
from dcr.trainer.random_bits import random_bits
from dcr.trainer.torch.ranks import Ranks

FIT_ELEMENTS = 1 << 24
"""Elements of a canonical tensor that are fitted at a time."""

_INDEX_BITS = 33
_RANK_BITS = 13
_TASK_BITS = 17
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_RANK_MASK = (1 << _RANK_BITS) - 1

Pieces = dict[int, dict[str, IndexMap]]
"""By task and canonical tensor, from flat position in this rank's shard to flat index in the canonical tensor."""


@dataclass(frozen=True)
class Residual:
    """A task that is converted whole, and why."""

    task: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Projection:
    """What was learned of a conversion; the same on every rank but for ``pieces``.

    Attributes:
        specs: all canonical tensors, in order of name.
        pieces: this rank's maps of direct tasks.
        residual: residual tasks by number.
        groups: residual tasks that have to be converted together, each with the canonical tensors that they make.
    """

    specs: tuple[TensorSpec, ...]
    pieces: Pieces
    residual: dict[int, Residual]
    groups: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]


@dataclass
class _Learner:
    """What the runs have shown so far on this rank."""

    conversion: Conversion
    tasks: Sequence[Task]
    rank: int
    reasons: dict[int, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    origins: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    pieces: Pieces = field(default_factory=dict)

    def run(
        self,
        numbers: Iterable[int],
        replace_by: Callable[[int, torch.Tensor], torch.Tensor],
        take: Callable[[int, str, torch.Tensor], None],
        what: str,
    ) -> None:
        """Convert tasks and take what comes out; one that fails becomes residual, and the rest goes on without it."""
        left = list(numbers)
        current = [0]
        while left:
            current[0] = left[0]
            try:
                for name, tensor in self.conversion.convert(left, replace_by, lambda n: current.__setitem__(0, n)):
                    take(current[0], name, tensor)
            except Exception as error:  # noqa: BLE001  a conversion may raise anything on tensors it was not made for
                self.blame((current[0],), f"its conversion fails on {what}: {type(error).__name__}: {error}")
                left = left[left.index(current[0]) + 1 :]
            else:
                return

    def blame(self, numbers: Iterable[int], reason: str) -> None:
        """Make tasks residual; the first reason stays."""
        for number in numbers:
            self.reasons.setdefault(number, reason)

    def ids(self, number: int, live: torch.Tensor) -> torch.Tensor:
        first = ((number + 1) << (_INDEX_BITS + _RANK_BITS)) | (self.rank << _INDEX_BITS)
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
            named = _distinct((part >> (_INDEX_BITS + _RANK_BITS)) - 1)
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
        held = (flat >> _INDEX_BITS) & _RANK_MASK == self.rank
        if not alone:
            held &= flat >> (_INDEX_BITS + _RANK_BITS) == origin + 1
        target = held.nonzero().view(-1)
        if not target.numel():
            return None
        source = flat[target] & _INDEX_MASK
        tensor = self.tasks[origin].tensor
        if tensor is None or int(source.max()) >= tensor.numel():
            return "ids come out changed: it computes"
        try:
            boxes.extend(box.moved(0, start) for box in _run_or_fit(source, target).boxes)
        except RefusedError as error:
            return str(error)
        return None

    def random(self, number: int, live: torch.Tensor) -> torch.Tensor:
        return random_bits(live, (number << _RANK_BITS) | self.rank)

    def take_random(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """Compare what came out of random bits with what ids said of it."""
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
            if not _moved(index_map, bit_view(self.random(origin, live)), bit_view(tensor)):
                self.blame(
                    (origin,),
                    f"canonical {name}: random bits do not come out where ids do: it computes, or joins other tensors",
                )


def learn(conversion: Conversion, ranks: Ranks) -> Projection:
    """Learn which tasks are direct and their maps; collective.  Live weights must not change meanwhile.

    Tensors of the model that are no task's are changed and put back in the second run.

    Raises:
        RefusedError: on every rank alike: a conversion that differs among ranks, or does not fit its live weights.
    """
    tasks = conversion.tasks()
    _check_sizes(tasks, ranks)
    learner = _Learner(conversion, tasks, ranks.rank)
    everything = range(len(tasks))
    learner.run(everything, learner.ids, learner.take_ids, "integer ids")
    _agree(learner, ranks)
    direct = [n for n in everything if n not in learner.reasons]
    with _others_changed(conversion.others()):
        learner.run(direct, lambda n, t: learner.random(n, t).to(t.device), learner.take_random, "random bits")
    for name, origins in learner.origins.items():
        if name not in learner.dtypes:
            learner.blame(origins, f"canonical {name}: whether it comes out depends on values or dtypes")
    _agree(learner, ranks)
    _refuse_overlaps(learner, ranks)
    _agree(learner, ranks)
    specs = {
        name: TensorSpec(name, shape, learner.dtypes[name])
        for name, shape in learner.shapes.items()
        if not any(n in learner.reasons for n in learner.origins[name])
    }
    residual_specs, groups = _outline(learner, specs, ranks)
    kept = {n: piece for n, piece in learner.pieces.items() if n not in learner.reasons}
    made = {number for numbers, _ in groups for number in numbers}
    residual = {n: Residual(tasks[n].name, tasks[n].kind, learner.reasons[n]) for n in sorted(made)}
    everything_made = {**specs, **residual_specs}
    return Projection(tuple(everything_made[name] for name in sorted(everything_made)), kept, residual, groups)


def _check_sizes(tasks: Sequence[Task], ranks: Ranks) -> None:
    problem = None
    if len(tasks) >= 1 << _TASK_BITS or ranks.count > 1 << _RANK_BITS:
        problem = f"{len(tasks)} tasks on {ranks.count} ranks are more than ids can name"
    for task in tasks:
        if task.tensor is not None and task.tensor.numel() > _INDEX_MASK:
            problem = f"{task.name}: {task.tensor.numel()} elements are more than ids can name"
    ranks.refuse_together(problem)
    counts = ranks.gather(len(tasks))
    if len(set(counts)) > 1:
        raise RefusedError(f"ranks have {counts} conversion tasks: every rank must list the tasks of the whole model")


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


@contextmanager
def _others_changed(others: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give tensors other values for a while; integers stay."""
    saved = [(tensor, tensor.clone()) for tensor in others.values() if tensor.is_floating_point()]
    random = torch.Generator().manual_seed(0)
    try:
        for tensor, _ in saved:
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        yield
    finally:
        for tensor, copy in saved:
            tensor.copy_(copy)


def _agree(learner: _Learner, ranks: Ranks) -> None:
    """Bring reasons together over ranks and over shared canonical tensors; collective.

    Raises:
        RefusedError: ranks do not see the same canonical tensors.
    """
    outlines = ranks.gather({name: (learner.shapes[name], learner.origins[name]) for name in learner.shapes})
    for rank, outline in enumerate(outlines):
        for name in sorted(outlines[0].keys() | outline.keys()):
            if outline.get(name) != outlines[0].get(name):
                raise RefusedError(
                    f"canonical {name} comes out of the conversion otherwise on rank {rank} than on rank 0: every rank "
                    "must export the whole checkpoint"
                )
    merged: dict[int, str] = {}
    for reasons in ranks.gather(learner.reasons):
        for number, reason in reasons.items():
            merged.setdefault(number, reason)
    made = {n for origins in learner.origins.values() for n in origins}
    for number in range(len(learner.tasks)):
        if number not in made:
            merged.setdefault(number, "nothing comes out of it alone")
    learner.reasons = merged
    spread = True
    while spread:
        spread = False
        for name, origins in learner.origins.items():
            because = next((n for n in origins if n in merged), None)
            if because is None or all(n in merged for n in origins):
                continue
            learner.blame(origins, f"it makes canonical {name} together with {learner.tasks[because].name}, a residual")
            spread = True


def part_of(piece: Mapping[str, IndexMap]) -> str:
    """A digest of which canonical elements a shard holds, in which order: equal on replicas."""
    digest = xxhash.xxh3_128()
    for name in sorted(piece):
        digest.update(repr((name, piece[name].boxes)).encode())
    return digest.hexdigest()


def _refuse_overlaps(learner: _Learner, ranks: Ranks) -> None:
    """Make tasks residual whose shards, replicas apart, do not hold each canonical element once; collective."""
    mine = {part_of(piece): piece for n, piece in learner.pieces.items() if n not in learner.reasons}
    unique: dict[str, Mapping[str, IndexMap]] = {}
    for pieces in ranks.gather(mine):
        unique |= pieces
    boxes: dict[str, list[Box]] = {}
    for piece in unique.values():
        for name, index_map in piece.items():
            boxes.setdefault(name, []).extend(index_map.boxes)
    names = [name for name, origins in learner.origins.items() if not any(n in learner.reasons for n in origins)]
    for name in sorted(names)[ranks.rank :: ranks.count]:  # shared out: each name is looked at by one rank
        numel = torch.Size(learner.shapes[name]).numel()
        if not _covers(boxes.get(name, []), numel):
            learner.blame(
                learner.origins[name], f"canonical {name}: shards on different ranks overlap in part, or leave a gap"
            )


def _covers(boxes: list[Box], numel: int) -> bool:
    """Whether boxes hold each target index below ``numel`` exactly once."""
    if sum(box.numel for box in boxes) != numel:
        return False
    bounds = sorted(box.target_bounds for box in boxes)
    if all(left[1] < right[0] for left, right in itertools.pairwise(bounds)):
        return not bounds or bounds[-1][1] < numel
    if any(box.target_bounds[1] >= numel for box in boxes):
        return False
    seen = torch.zeros(numel, dtype=torch.bool)
    for box in boxes:
        seen[box.expand()[1]] = True
    return bool(seen.all())


def _outline(
    learner: _Learner, direct: Mapping[str, TensorSpec], ranks: Ranks
) -> tuple[dict[str, TensorSpec], tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]]:
    """What residual tasks make of the live weights, and which of them belong together; collective."""
    numbers = sorted(learner.reasons)
    specs: dict[str, TensorSpec] = {}
    leader = {n: n for n in numbers}

    def join(one: Iterable[int]) -> None:
        joined = {leader[n] for n in one}
        for n in numbers:
            if leader[n] in joined:
                leader[n] = min(joined)

    makers: dict[str, int] = {}
    problem = None

    def take(number: int, name: str, tensor: torch.Tensor) -> None:
        nonlocal problem
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        if name in direct or specs.setdefault(name, spec) != spec:
            problem = f"canonical {name} comes out more than once, of another task, shape or dtype"
        join({number, makers.setdefault(name, number), *(n for n in learner.origins.get(name, ()) if n in leader)})

    failed = dict(learner.reasons)
    learner.reasons = {}
    learner.run(numbers, lambda _, live: live, take, "its live weights")
    if learner.reasons:
        number, reason = min(learner.reasons.items())
        problem = f"{learner.tasks[number].name}: {reason}"
    learner.reasons = failed
    ranks.refuse_together(problem)
    made_by = {leader[n] for n in makers.values()}
    silent = [n for n in numbers if leader[n] not in made_by]
    later = [n for n in makers.values() if silent and n >= silent[0]]
    if later:  # what came out later may have been gathered from them
        join({*silent, *later})
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(leader[number], []).append(number)
    made: dict[int, list[str]] = {}
    for name, number in makers.items():
        made.setdefault(leader[number], []).append(name)
    return specs, tuple((tuple(groups[key]), tuple(sorted(made[key]))) for key in sorted(made))
