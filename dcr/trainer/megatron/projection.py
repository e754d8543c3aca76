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
``learner.FIT_ELEMENTS``, whatever the model's size.
"""

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from dcr.data_plane.index_map import Box, IndexMap
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.cache import FORMAT, ProjectionCache
from dcr.trainer.megatron.conversion import Conversion, Task
from dcr.trainer.megatron.disturbance import flipped, others_changed, scrambled
from dcr.trainer.megatron.identity import fingerprint
from dcr.trainer.megatron.learner import INDEX_MASK, RANK_BITS, TASK_BITS, Learner, Pieces
from dcr.trainer.megatron.listing import list_tasks
from dcr.trainer.megatron.lockstep import Lockstep
from dcr.trainer.megatron.outline import Group, outline
from dcr.trainer.torch.ranks import Ranks

_READS_LIVE = "; it reads live weights beside its own, so any change converts it"


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
        groups: the same tasks, and what they make.
    """

    specs: tuple[TensorSpec, ...]
    pieces: Pieces
    residual: dict[int, Residual]
    groups: tuple[Group, ...]


def learn(conversion: Conversion, lockstep: Lockstep, folder: Path | None = None) -> Projection:
    """Learn which tasks are direct and their maps; collective.  Live weights must not change meanwhile.

    Live tensors are changed and put back, bit for bit.

    Args:
        conversion: the trainer's own.
        lockstep: of the ranks that hold the model.
        folder: where what the first run shows is kept; see ``cache``.  None keeps nothing.

    Raises:
        RefusedError: on every rank alike: a conversion that differs among ranks, or does not fit its live weights.
        OutOfStepError: on every rank alike; see ``Lockstep``.
    """
    tasks = list_tasks(conversion, lockstep.ranks)
    _check_sizes(tasks, lockstep.ranks)
    if len(set(lockstep.ranks.gather(folder is None))) > 1:
        raise RefusedError("some ranks have a folder for the projection cache and others none: give all of them one")
    cache = None
    if folder is not None:
        cache = ProjectionCache(folder, _fingerprint(conversion, tasks, lockstep.ranks), lockstep.ranks.rank)
    learner = _recalled(Learner(conversion, tasks, lockstep), cache)
    if learner is None:
        learner = Learner(conversion, tasks, lockstep)
        learner.run_ids()
        _agree(learner)
        _check_values(learner)
        if cache is not None:
            cache.store(learner)
    specs = {
        name: TensorSpec(name, shape, learner.dtypes[name])
        for name, shape in learner.shapes.items()
        if not any(n in learner.reasons for n in learner.origins[name])
    }
    residual_specs, groups = outline(learner, specs)
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


def _fingerprint(conversion: Conversion, tasks: Sequence[Task], ranks: Ranks) -> str:
    others = [f"{name}: {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in conversion.others().items()]
    layouts = [task.layout for task in tasks]
    return fingerprint([FORMAT, conversion.identity(), layouts, others, ranks.rank, ranks.count])


def _recalled(learner: Learner, cache: ProjectionCache | None) -> Learner | None:
    """The learner with what was stored, if every rank has it and values come out where it says; collective.

    What it says of a position is compared digit by digit, in as many runs as an element's bits need to hold it, under
    keys that nobody knows when a file is written; then as if it had just been learned.
    """
    ranks = learner.ranks
    held = cache is not None and cache.recall(learner)
    said = (sorted(learner.shapes.items()), sorted(learner.origins.items()), sorted(learner.reasons.items()))
    digest = xxhash.xxh3_128_hexdigest(repr((said, sorted(learner.links))).encode()) if held else ""
    everywhere = ranks.gather((digest, learner.digits_needed(), secrets.randbits(63)))
    digests = {digest for digest, _, _ in everywhere}
    if cache is None or digests != {digest} or not held:
        if cache is not None and held:
            cache.refuse("other ranks have none, or another one")
        return None
    reasons, salt = dict(learner.reasons), everywhere[0][2]
    for digit in range(max(needed for _, needed, _ in everywhere)):
        learner.run_values(partial(learner.digits, digit=digit, salt=salt))
        if any(ranks.gather(learner.reasons != reasons)):
            break
    else:
        _check_values(learner)
    if any(ranks.gather(learner.reasons != reasons)):
        wrong = next((reason for number, reason in learner.reasons.items() if number not in reasons), "on another rank")
        cache.refuse(f"the conversion does not do what it says: {wrong}")
        return None
    cache.confirm()
    return learner


def _check_values(learner: Learner) -> None:
    """The second run, and what it takes to own what passes it; collective."""
    live = [task.tensor for task in learner.tasks if task.tensor is not None]
    with others_changed(learner.conversion.others()), flipped(live, scrambled):
        learner.run_values(learner.random)
    _agree(learner)
    _refuse_overlaps(learner)
    _agree(learner)


def _check_sizes(tasks: Sequence[Task], ranks: Ranks) -> None:
    problem = None
    if len(tasks) >= 1 << TASK_BITS or ranks.count > 1 << RANK_BITS:
        problem = f"{len(tasks)} tasks on {ranks.count} ranks are more than ids can name"
    for task in tasks:
        if task.tensor is not None and task.tensor.numel() > INDEX_MASK:
            problem = f"{task.name}: {task.tensor.numel()} elements are more than ids can name"
    ranks.refuse_together(problem)
    counts = ranks.gather(len(tasks))
    if len(set(counts)) > 1:
        raise RefusedError(f"ranks have {counts} conversion tasks: every rank must list the tasks of the whole model")


def _agree(learner: Learner) -> None:
    """Bring reasons together over ranks and over shared canonical tensors; collective.

    Raises:
        RefusedError: ranks do not see the same canonical tensors.
    """
    outlines = learner.ranks.gather({name: (learner.shapes[name], learner.origins[name]) for name in learner.shapes})
    for rank, theirs in enumerate(outlines):
        for name in sorted(outlines[0].keys() | theirs.keys()):
            if theirs.get(name) != outlines[0].get(name):
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


def _refuse_overlaps(learner: Learner) -> None:
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
