"""The training ranks that own one model together: a torch.distributed group, or a single process without one."""

from typing import TypeVar

import torch.distributed as dist

from dcr.protocol.errors import RefusedError

T = TypeVar("T")


class Ranks:
    """The group's ranks, numbered from 0.

    Args:
        group: a process group; None is the default group, or this process alone where none was initialised.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self._group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.count = 1 if self._alone else dist.get_world_size(group)
        if self.rank < 0:
            raise RefusedError("this process is not a rank of the process group it was given")

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank; collective."""
        if self._alone:
            return [value]
        values: list[T | None] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # every slot was filled

    def refuse_together(self, problem: str | None) -> None:
        """Raise RefusedError on every rank if any has a problem, so that none waits for one that left; collective."""
        problems = self.gather(problem)
        for rank, found in enumerate(problems):
            if found is not None:
                raise RefusedError(f"rank {rank}: {found}")
