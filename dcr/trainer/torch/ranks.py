"""The training ranks that own one model together: a torch.distributed group, or a single process without one."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from dcr.protocol.errors import DcrError, RefusedError

T = TypeVar("T")


class RanksLostError(DcrError):
    """The ranks cannot meet any more; the trainer has to be started again."""


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
        """Every rank's value, in order of rank; collective.

        Raises:
            RanksLostError: a rank is gone, or did not come within the timeout of the process group.
        """
        if self._alone:
            return [value]
        values: list[T | None] = [None] * self.count
        try:
            dist.all_gather_object(values, value, group=self._group)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise RanksLostError(
                f"rank {self.rank} of {self.count}: the ranks cannot meet any more, one of them is gone, did not come "
                f"in time or is somewhere else: {error}; every rank has to make and push its refit together: see what "
                "the others say, end all ranks and start the trainer again"
            ) from error
        return values  # type: ignore[return-value]  # every slot was filled

    def together(self, act: Callable[[], T]) -> T:
        """What ``act`` returns on this rank; collective.

        Where it raises on any rank, every rank raises, so that none waits for one that left: the same error, that of
        the first rank that has one, with the rank's number in front; a RefusedError if it is none of dcr's.

        Args:
            act: called once on each rank.
        """
        if self._alone:
            try:
                return act()
            except DcrError:
                raise
            except Exception as error:
                raise _error(_kind(error), f"rank 0: {_text(error)}") from error
        failure: Exception | None = None
        try:
            value = act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks hear of it first
            failure = error
        failures = self.gather(None if failure is None else (_kind(failure), _text(failure)))
        for rank, failed in enumerate(failures):
            if failed is not None:
                kind, text = failed
                raise _error(kind, f"rank {rank}: {text}") from failure
        return value

    def refuse_differing(self, **said: object) -> None:
        """Raise RefusedError on every rank if ranks were given different arguments; collective.

        Args:
            said: arguments by name, plain values.
        """
        everyone = self.gather(said)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    raise RefusedError(
                        f"{name} is {value!r} on rank 0 and {theirs[name]!r} on rank {rank}: give all ranks the same"
                    )

    def refuse_together(self, problem: str | None) -> None:
        """Raise RefusedError on every rank if any has a problem, so that none waits for one that left; collective."""
        problems = self.gather(problem)
        for rank, found in enumerate(problems):
            if found is not None:
                raise RefusedError(f"rank {rank}: {found}")


def _kind(error: Exception) -> type[DcrError]:
    return type(error) if isinstance(error, DcrError) else RefusedError


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, DcrError) else f"{type(error).__name__}: {error}"


def _error(kind: type[DcrError], text: str) -> DcrError:
    try:
        return kind(text)
    except TypeError:  # it wants more than a text, which the other ranks do not have
        return DcrError(f"{kind.__name__}: {text}")
