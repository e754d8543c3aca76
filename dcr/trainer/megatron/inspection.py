"""What the refit of a model costs, one without weights or a live one: classes of tensors, shares, balance, memory.

Of a live model every rank says what it owns.  Of one without weights, tensors whose names differ in numbers alone, of
one shape and dtype and converted alike, are a class; one of each is put through the same learning as in a trainer, and
the rest is counting.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.conversion import Conversion, Replace, Task
from dcr.trainer.megatron.learner import INDEX_MASK, RANK_BITS
from dcr.trainer.megatron.lockstep import Lockstep
from dcr.trainer.megatron.projection import Projection, learn
from dcr.trainer.torch.ownership import Shard, assign
from dcr.trainer.torch.ranks import Ranks

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_RANKS_A_LINE = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|\d+$")


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, in Megatron's order: tensor, then expert or data, then pipeline parallel.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of experts.
        ranks: all ranks; what is left over is data parallel.

    Raises:
        RefusedError: the sizes do not divide the ranks.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    ranks: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep, self.etp, self.ranks) < 1:
            raise RefusedError(f"{self}: every size must be at least 1")
        if self.ranks > 1 << RANK_BITS:
            raise RefusedError(f"{self}: there can be {1 << RANK_BITS} ranks at most")
        for what, size in (("tp * pp", self.tp * self.pp), ("etp * ep * pp", self.etp * self.ep * self.pp)):
            if self.ranks % size:
                raise RefusedError(f"{self}: ranks must be a multiple of {what} = {size}")

    def holders(self, *, stage: int, shard: int, expert_rank: int | None) -> tuple[int, ...]:
        """The ranks that hold a shard.

        Args:
            stage: its pipeline stage.
            shard: its number among tensor-parallel ranks.
            expert_rank: the expert-parallel rank of an expert; None for anything else.
        """
        stage_ranks = self.ranks // self.pp
        first = stage * stage_ranks
        if expert_rank is None:
            return tuple(range(first + shard, first + stage_ranks, self.tp))
        inside = expert_rank * self.etp + shard
        return tuple(range(first + inside, first + stage_ranks, self.etp * self.ep))


@dataclass(frozen=True)
class TensorClass:
    """Source tensors that are converted alike.

    Attributes:
        name: their name with * for numbers.
        kind: what converts them.
        tasks: how many there are.
        tensors: canonical tensors that they make.
        size_bytes: bytes of those.
        residual: why they are residual; empty for direct ones.
    """

    name: str
    kind: str
    tasks: int
    tensors: int
    size_bytes: int
    residual: str


@dataclass(frozen=True)
class Inspection:
    """What was found; printing it shows a table.

    Attributes:
        classes: biggest first.
        owned_bytes: bytes each rank answers for.
        memory_bytes: host memory each rank keeps them in.
        imbalance: the fullest rank over the mean, of owned bytes.
    """

    classes: tuple[TensorClass, ...]
    owned_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    imbalance: float

    @classmethod
    def of(cls, classes: Iterable[TensorClass], owned: Sequence[int], memory: Sequence[int]) -> "Inspection":
        """Sort classes, and weigh owners against each other."""
        mean = sum(owned) / len(owned)
        ordered = sorted(classes, key=lambda c: (-c.size_bytes, c.name, c.residual))
        return cls(tuple(ordered), tuple(owned), tuple(memory), max(owned) / mean if mean else 1.0)

    @property
    def size_bytes(self) -> int:
        """Bytes of the checkpoint."""
        return sum(c.size_bytes for c in self.classes)

    @property
    def direct_share(self) -> float:
        """Share of the bytes that are projected directly, 0 to 1."""
        return sum(c.size_bytes for c in self.classes if not c.residual) / self.size_bytes if self.size_bytes else 1.0

    def __str__(self) -> str:
        unit, scale = ("GB", 1e9) if self.size_bytes >= 1e9 else ("MB", 1e6)  # noqa: PLR2004 - where they change
        tensors = sum(c.tensors for c in self.classes)
        lines = [
            f"{self.size_bytes / scale:,.2f} {unit} in {tensors:,} canonical tensors",
            f"{'':8}{'share':>9}{unit:>10}{'tensors':>9}  class",
        ]
        for one in self.classes:
            state = "residual" if one.residual else "direct"
            share, size = one.size_bytes / max(self.size_bytes, 1), one.size_bytes / scale
            lines.append(f"{state:8}{share:>9.4%}{size:>10.3f}{one.tensors:>9,}  {one.name} ({one.kind})")
            if one.residual:
                lines.append(f"{'':8}{one.residual}")
        lines.append(f"direct: {self.direct_share:.4%} of the bytes; residual: {1 - self.direct_share:.4%}")
        low, high = min(self.owned_bytes) / scale, max(self.owned_bytes) / scale
        lines.append(
            f"owners: {len(self.owned_bytes)} ranks, {low:,.3f} to {high:,.3f} {unit} each, fullest over mean "
            f"{self.imbalance:.3f}"
        )
        for first in range(0, len(self.memory_bytes), _RANKS_A_LINE):
            sizes = " ".join(f"{size / scale:,.3f}" for size in self.memory_bytes[first : first + _RANKS_A_LINE])
            lines.append(f"host memory in {unit}, from rank {first}: {sizes}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Portion:
    """What a rank says of one task of a live model.

    Attributes:
        task: its name.
        kind: what converts it.
        residual: why it is residual; empty if it is direct.
        tensors: the canonical tensors that this rank answers for, with the bytes of its share in each.
    """

    task: str
    kind: str
    residual: str
    tensors: Mapping[str, int]


def inspect_live(
    portions: Iterable[Portion], owned_bytes: Sequence[int], memory_bytes: int, ranks: Ranks
) -> Inspection:
    """Put together what all ranks say of a model that is being refitted; collective, the same on every rank.

    Args:
        portions: of this rank.
        owned_bytes: of all ranks.
        memory_bytes: of this rank.
        ranks: those that hold the model.
    """
    mine: dict[tuple[str, str, str], tuple[set[str], set[str], int]] = {}
    for portion in portions:
        key = (_NUMBER.sub("*", portion.task), portion.kind, portion.residual)
        tasks, tensors, size = mine.get(key, (set(), set(), 0))
        mine[key] = (tasks | {portion.task}, tensors | portion.tensors.keys(), size + sum(portion.tensors.values()))
    everyone: dict[tuple[str, str, str], tuple[set[str], set[str], int]] = {}
    memory = []
    for theirs, theirs_bytes in ranks.gather((mine, memory_bytes)):
        memory.append(theirs_bytes)
        for key, (tasks, tensors, size) in theirs.items():
            before = everyone.get(key, (set(), set(), 0))
            everyone[key] = (before[0] | tasks, before[1] | tensors, before[2] + size)
    classes = [
        TensorClass(name, kind, len(tasks), len(tensors), size, reason)
        for (name, kind, reason), (tasks, tensors, size) in everyone.items()
    ]
    return Inspection.of(classes, owned_bytes, memory)


class _Sample:
    """Some tasks of a conversion, with host tensors in the place of tensors without storage."""

    def __init__(self, conversion: Conversion, chosen: Mapping[int, Task]) -> None:
        self._conversion = conversion
        self._numbers = list(chosen)
        self._tasks = []
        for task in chosen.values():
            assert task.tensor is not None, "one rank holds every tensor"
            if task.tensor.numel() > INDEX_MASK:  # before there is memory for it
                raise RefusedError(f"{task.name}: {task.tensor.numel()} elements are more than ids can name")
            stand_in = torch.empty(task.tensor.shape, dtype=task.tensor.dtype)  # its values do not matter
            self._tasks.append(Task(task.name, task.kind, stand_in))

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def state(self) -> object:
        return None

    def others(self) -> Mapping[str, torch.Tensor]:
        return {}

    def identity(self) -> str:
        return self._conversion.identity()

    def convert(
        self, numbers: Sequence[int], replace_by: Replace, begin: Callable[[int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        position = {number: n for n, number in enumerate(self._numbers)}

        def stand_in(number: int, _: torch.Tensor) -> torch.Tensor:
            tensor = self._tasks[position[number]].tensor
            assert tensor is not None
            return replace_by(position[number], tensor)

        yield from self._conversion.convert(
            [self._numbers[n] for n in numbers], stand_in, lambda number: begin(position[number])
        )


def inspect(conversion: Conversion, layout: Layout) -> Inspection:
    """Inspect a model that is whole on one rank, on the meta device or not.

    Layers are taken to be spread evenly over pipeline stages, and experts over expert-parallel ranks.

    Args:
        conversion: of the whole model.
        layout: what balance and memory are for.

    Raises:
        RefusedError: the model cannot be refitted at all, or not be laid out so.
    """
    classes: dict[tuple[object, ...], list[int]] = {}
    tasks = conversion.tasks()
    for number, task in enumerate(tasks):
        assert task.tensor is not None, "one rank holds every tensor"
        _refuse_split(task, layout)
        name = _NUMBER.sub("*", task.name)
        key = (name, task.kind, tuple(task.tensor.shape), task.tensor.dtype, task.split, task.expert)
        classes.setdefault(key, []).append(number)
    _refuse_spread(tasks, layout)
    chosen = [numbers[0] for numbers in classes.values()]
    projection = learn(_Sample(conversion, {n: tasks[n] for n in chosen}), Lockstep(Ranks()))
    found = [
        _class_of(tasks[numbers[0]], len(numbers), projection, sample)
        for sample, numbers in enumerate(classes.values())
    ]
    owned = _owned_bytes(tasks, list(zip(classes.values(), found, strict=True)), layout)
    return Inspection.of(found, owned, owned)


def _refuse_split(task: Task, layout: Layout) -> None:
    size = layout.etp if task.expert else layout.tp
    # What is outside of layers is as big as the vocabulary, which Megatron pads.
    if task.tensor is not None and task.split and _LAYER.search(task.name) and task.tensor.numel() % size:
        what = "etp" if task.expert else "tp"
        raise RefusedError(
            f"{layout}: {task.name} of shape {tuple(task.tensor.shape)} cannot be split by {what} {size}"
        )


def _refuse_spread(tasks: Sequence[Task], layout: Layout) -> None:
    layers, experts = _layers(tasks), _experts(tasks)
    if layout.pp > layers:
        raise RefusedError(f"{layout}: the model has {layers} layers, fewer than pipeline stages")
    if experts % layout.ep:
        raise RefusedError(f"{layout}: the model has {experts} experts, which ep {layout.ep} does not divide")
    if layout.ep > 1 and not experts:
        raise RefusedError(f"{layout}: the model has no experts: ep has to be 1")


def _layers(tasks: Sequence[Task]) -> int:
    return 1 + max((int(m[1]) for task in tasks if (m := _LAYER.search(task.name))), default=0)


def _experts(tasks: Sequence[Task]) -> int:
    return max((1 + _expert(task.name) for task in tasks if task.expert), default=0)


def _class_of(task: Task, count: int, projection: Projection, sample: int) -> TensorClass:
    specs = {spec.name: spec for spec in projection.specs}
    names = set(projection.pieces.get(sample, {}))
    reason = ""
    if sample in projection.residual:
        reason = projection.residual[sample].reason
        names = {name for group in projection.groups if sample in group.numbers for name in group.names}
    size_bytes = sum(specs[name].numel * specs[name].dtype.itemsize for name in names)
    if not names:
        assert task.tensor is not None, "one rank holds every tensor"
        reason = "nothing comes out of one alone: not looked into"
        size_bytes = task.tensor.numel() * task.tensor.element_size()
    return TensorClass(_NUMBER.sub("*", task.name), task.kind, count, count * len(names), count * size_bytes, reason)


def _owned_bytes(
    tasks: Sequence[Task], classes: Sequence[tuple[Sequence[int], TensorClass]], layout: Layout
) -> tuple[int, ...]:
    """Bytes each rank owns: direct shards among their holders, residual tensors among all ranks."""
    layers, experts = _layers(tasks), _experts(tasks)
    everyone = tuple(range(layout.ranks))
    shards = []
    for numbers, found in classes:
        size_bytes = found.size_bytes // len(numbers)
        for number in numbers:
            task = tasks[number]
            if found.residual:
                shards.append(Shard(task.name, "residual", size_bytes, everyone))
                continue
            match = _LAYER.search(task.name)
            # Without a layer: what comes before the layers, or after them.
            outside = 0 if task.name.startswith("embedding") else layout.pp - 1
            stage = int(match[1]) * layout.pp // layers if match else outside
            expert_rank = _expert(task.name) * layout.ep // experts if task.expert else None
            split = (layout.etp if task.expert else layout.tp) if task.split else 1
            replicas = 1 if task.split else (layout.etp if task.expert else layout.tp)
            for shard in range(split):
                holders = [
                    rank
                    for replica in range(replicas)
                    for rank in layout.holders(stage=stage, shard=shard + replica, expert_rank=expert_rank)
                ]
                shards.append(Shard(task.name, f"shard {shard}", size_bytes // split, tuple(holders)))
    return assign(shards, layout.ranks).bytes_by_rank


def _expert(name: str) -> int:
    """The expert's number: the first number after the word, or at the end where experts are one module."""
    match = re.search(r"experts\.\D*(\d+)\.", name) or re.search(r"(\d+)$", name)
    return int(match[1]) if match else 0
