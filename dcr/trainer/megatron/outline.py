"""What residual tasks make of the live weights: which canonical tensors, of which tasks, and what else they read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcr.data_plane.item import TensorSpec
from dcr.trainer.megatron.digest import digest_of
from dcr.trainer.megatron.disturbance import Mask, enlarged, flip, flipped, scrambled
from dcr.trainer.megatron.learner import Learner


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


def outline(learner: Learner, direct: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], tuple[Group, ...]]:
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


def _reading_live(learner: Learner, numbers: Sequence[int], digests: Mapping[str, str]) -> set[int | str]:
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
