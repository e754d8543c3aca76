"""Where each element of a Megatron shard lies in the checkpoint, learned from the conversion itself (paper 4.2).

Two runs of the trainer's own conversion, streamed, one task's stand-ins alive at a time.  In the first every tensor is
replaced by integer ids, each naming task, rank and flat position; where they come out, boxes are fitted and compared
with them exactly.  In the second every tensor is replaced by random stored bits, and those that the first run cannot
see, adapters for one, by other values; every bit must come out where the ids did.  A task that passes both is *direct*.
Every other one is *residual*, with the reason: it casts, computes, joins tensors that change its values, repeats or
drops into padding, or fails on ids.  Tasks that share a canonical tensor with a residual one are residual too.

In the second run, and in two more of residual tasks, the bits of all live tensors are flipped: what a task reads beside
the tensor that it is given shows in what comes out of it.

Learning needs host memory for the ids of the largest canonical tensor, int64, and some ten int64 for each of
``FIT_ELEMENTS``, whatever the model's size.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from dcr.data_plane.bits import bit_view
from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.conversion import Conversion, Replace, Task
from dcr.trainer.megatron.disturbance import Mask, enlarged, flip, flipped, others_changed, scrambled
from dcr.trainer.megatron.lockstep import Lockstep, Take
from dcr.trainer.random_bits import random_bits
from dcr.trainer.torch.ranks import Ranks

FIT_ELEMENTS = 1 << 24
"""Elements of a canonical tensor that are fitted at a time."""

_INDEX_BITS = 33
_RANK_BITS = 13
_TASK_BITS = 17
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_RANK_MASK = (1 << _RANK_BITS) - 1

_READS_LIVE = "; it reads live weights beside its own, so any change converts it"

Pieces = dict[int, dict[str, IndexMap]]
"""By task and canonical tensor, from flat position in this rank's shard to flat index in the canonical tensor."""


@dataclass(frozen=True)
class Residual:
    """A task that is converted whole, and why."""

    task: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Group:
    """Residual tasks that have to be converted together.

    Attributes:
        numbers: the tasks.
        names: the canonical tensors that they make.
        reads_live: whether what they make depends on live tensors of tasks beside what they are given.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    reads_live: bool


@dataclass(frozen=True)
class Projection:
    """What was learned of a conversion; the same on every rank but for ``pieces``.

    Attributes:
        specs: all canonical tensors, in order of name.
        pieces: this rank's maps of direct tasks.
        residual: residual tasks by number.
        groups: the same tasks, and what they make.
    """

    specs: tuple[TensorSpec, ...]
    pieces: Pieces
    residual: dict[int, Residual]
    groups: tuple[Group, ...]


@dataclass
class _Learner:
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
        failed = self.run(
            direct,
            lambda n, live: made_by(n, live).to(live.device),
            lambda n, name, tensor: self.take_values(n, name, tensor, made_by),
            "random bits",
        )
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
        first = ((number + 1) << (_INDEX_BITS + _RANK_BITS)) | (self.ranks.rank << _INDEX_BITS)
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
        held = (flat >> _INDEX_BITS) & _RANK_MASK == self.ranks.rank
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
        return random_bits(live, (number << _RANK_BITS) | self.ranks.rank)

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


def learn(conversion: Conversion, lockstep: Lockstep) -> Projection:
    """Learn which tasks are direct and their maps; collective.  Live weights must not change meanwhile.

    Live tensors are changed and put back, bit for bit.

    Raises:
        RefusedError: on every rank alike: a conversion that differs among ranks, or does not fit its live weights.
        OutOfStepError: on every rank alike; see ``Lockstep``.
    """
    tasks = conversion.tasks()
    _check_sizes(tasks, lockstep.ranks)
    learner = _Learner(conversion, tasks, lockstep)
    learner.run_ids()
    _agree(learner)
    _check_values(learner)
    specs = {
        name: TensorSpec(name, shape, learner.dtypes[name])
        for name, shape in learner.shapes.items()
        if not any(n in learner.reasons for n in learner.origins[name])
    }
    residual_specs, groups = _outline(learner, specs)
    kept = {n: piece for n, piece in learner.pieces.items() if n not in learner.reasons}
    residual = {
        n: Residual(tasks[n].name, tasks[n].kind, learner.reasons[n] + (_READS_LIVE if group.reads_live else ""))
        for group in groups
        for n in group.numbers
    }
    everything = {**specs, **residual_specs}
    return Projection(
        tuple(everything[name] for name in sorted(everything)), kept, dict(sorted(residual.items())), groups
    )


def _check_values(learner: _Learner) -> None:
    """The second run, and what it takes to own what passes it; collective."""
    live = [task.tensor for task in learner.tasks if task.tensor is not None]
    with others_changed(learner.conversion.others()), flipped(live, scrambled):
        learner.run_values(learner.random)
    _agree(learner)
    _refuse_overlaps(learner)
    _agree(learner)


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


def _agree(learner: _Learner) -> None:
    """Bring reasons together over ranks and over shared canonical tensors; collective.

    Raises:
        RefusedError: ranks do not see the same canonical tensors.
    """
    outlines = learner.ranks.gather({name: (learner.shapes[name], learner.origins[name]) for name in learner.shapes})
    for rank, outline in enumerate(outlines):
        for name in sorted(outlines[0].keys() | outline.keys()):
            if outline.get(name) != outlines[0].get(name):
                raise RefusedError(
                    f"canonical {name} comes out of the conversion otherwise on rank {rank} than on rank 0: every rank "
                    "must export the whole checkpoint"
                )
    merged: dict[int, str] = {}
    for reasons in learner.ranks.gather(learner.reasons):
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


def _refuse_overlaps(learner: _Learner) -> None:
    """Make tasks residual whose shards, replicas apart, do not hold each canonical element once; collective."""
    ranks = learner.ranks
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


def _outline(learner: _Learner, direct: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], tuple[Group, ...]]:
    """What residual tasks make of the live weights, and which of them belong together; collective."""
    numbers = sorted(learner.reasons)
    specs: dict[str, TensorSpec] = {}
    digests: dict[str, str] = {}
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
        digests[name] = digest_of(tensor)
        join({number, makers.setdefault(name, number), *(n for n in learner.origins.get(name, ()) if n in leader)})

    failed = learner.run(numbers, lambda _, live: live, take, "its live weights")
    if failed:
        number, reason = min(failed.items())
        problem = f"{learner.tasks[number].name}: {reason}"
    learner.ranks.refuse_together(problem)
    for link in set().union(*learner.ranks.gather(learner.links)):
        join(link)
    made_by = {leader[n] for n in makers.values()}
    silent = [n for n in numbers if leader[n] not in made_by]
    later = [n for n in makers.values() if silent and n >= silent[0]]
    if later:  # what came out later may have been gathered from them
        join({*silent, *later})
    reading = _reading_live(learner, numbers, digests)
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(leader[number], []).append(number)
    made: dict[int, list[str]] = {}
    for name, number in makers.items():
        made.setdefault(leader[number], []).append(name)
    return specs, tuple(
        Group(tuple(groups[key]), tuple(names := sorted(made[key])), not reading.isdisjoint({*groups[key], *names}))
        for key in sorted(made)
    )


def _reading_live(learner: _Learner, numbers: Sequence[int], digests: Mapping[str, str]) -> set[int | str]:
    """Tasks, and canonical tensors, that depend on live tensors of tasks beside what they are given; collective."""
    live = [task.tensor for task in learner.tasks if task.tensor is not None]
    reading: set[int | str] = set()
    for mask in (scrambled, enlarged):

        def as_before(_: int, tensor: torch.Tensor, mask: Mask = mask) -> torch.Tensor:
            copy = tensor.clone()
            flip(copy, mask)
            return copy

        seen: dict[str, str] = {}

        def take(_: int, name: str, tensor: torch.Tensor, seen: dict[str, str] = seen) -> None:
            seen[name] = digest_of(tensor)

        with flipped(live, mask):
            failed = learner.run(numbers, as_before, take, "other weights")
        reading |= {*failed, *(name for name, digest in digests.items() if seen.get(name) != digest)}
    return set().union(*learner.ranks.gather(reading))


def digest_of(tensor: torch.Tensor) -> str:
    """Of the stored bits; not of shape and dtype."""
    return xxhash.xxh3_128_hexdigest(bit_view(tensor.reshape(-1)).cpu().numpy().data)
