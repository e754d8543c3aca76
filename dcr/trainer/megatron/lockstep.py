"""All ranks convert task by task, and all stop where one of them fails.

A conversion has collectives in every task, so a rank that fails alone would leave the others waiting.  Before each task
and after the last the ranks agree, in a gloo group of their own, that none has failed::

    rank 0   task 0 | agree | task 1 | agree: rank 1 failed in task 1
    rank 1   task 0 | agree | task 1 fails: tell the store, agree

A rank that failed after the task's collectives, in an export hook for one, meets the others at the next agreement, and
everything can go on.  One that failed before them leaves the others inside: those find its note in the store, wait
``peer_grace_s``, and then give up as well.  For that the conversion runs in a thread beside the caller, which can be
left where it waits; the trainer's process groups are out of step then, and every rank raises ``OutOfStepError``.
"""

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from dcr.protocol.errors import DcrError
from dcr.runtime.seconds import seconds
from dcr.trainer.megatron.conversion import Conversion, Replace, Task
from dcr.trainer.torch.ranks import Ranks

Take = Callable[[int, str, torch.Tensor], None]
"""Called with a task's number and each canonical tensor that came out since it began."""

PEER_GRACE_S = 30.0
"""How long a rank may still be inside a task that another rank has failed in."""

AGREE_TIMEOUT_S = 1800.0
"""How long a task may take on another rank; as the default of torch's own groups."""

_POLL_S = 0.5
_REASON_MAX = 4000
_FINE, _FAILED, _LEFT_INSIDE = 0, 1, 2


class OutOfStepError(DcrError):
    """A rank failed inside a conversion task that others still wait in; the trainer has to be started again."""


@dataclass(frozen=True)
class Failure:
    """What stopped a conversion, the same on every rank.

    Attributes:
        rank: who failed; the first if there are several.
        number: the task.
        task: its name there.
        reason: why.
    """

    rank: int
    number: int
    task: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}: the conversion of {self.task} failed: {self.reason}"


class _StoppedError(Exception):
    """Ends a conversion that has stopped at an agreement, or that its caller no longer waits for."""


class Lockstep:
    """Runs conversions on all ranks together; collective, the construction too.

    Args:
        ranks: who converts.
        peer_grace_s: how long a rank may still be inside a task that another rank has failed in.
    """

    def __init__(self, ranks: Ranks, *, peer_grace_s: float = PEER_GRACE_S) -> None:
        self.ranks = ranks
        self._grace_s = seconds(peer_grace_s, "peer_grace_s")
        self._runs = 0
        self._channel: _Channel | None = None
        if ranks.count > 1:
            # Not one of torch's numbered groups: those have to be made by ranks that do not convert too.
            name, *_ = ranks.gather(secrets.token_hex(8))
            default = distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way
            store = distributed_c10d.PrefixStore(f"dcr/{name}", default)
            self._channel = _Channel(store, ranks)

    def run(
        self, conversion: Conversion, tasks: Sequence[Task], numbers: Sequence[int], replace_by: Replace, take: Take
    ) -> Failure | None:
        """Convert some tasks; collective.

        Args:
            conversion: the trainer's own.
            tasks: its tasks, for their names.
            numbers: increasing, the same on all ranks.
            replace_by: see ``Conversion.convert``.
            take: called on the thread that converts; may raise, which is a failure too.

        Returns:
            What stopped it, on every rank alike; None if every task was converted on every rank.

        Raises:
            OutOfStepError: ranks were left inside a task's collectives.
        """
        if not numbers:
            return None
        if self._channel is None:
            return _alone(conversion, tasks, numbers, replace_by, take)
        self._runs += 1
        return _Run(self._channel, str(self._runs), tasks, self._grace_s).convert(conversion, numbers, replace_by, take)


def _alone(
    conversion: Conversion, tasks: Sequence[Task], numbers: Sequence[int], replace_by: Replace, take: Take
) -> Failure | None:
    current = numbers[0]

    def begin(number: int) -> None:
        nonlocal current
        current = number

    try:
        for name, tensor in conversion.convert(numbers, replace_by, begin):
            take(current, name, tensor)
    except Exception as error:  # noqa: BLE001  a conversion may raise anything on tensors it was not made for
        return Failure(0, current, tasks[current].name, _told(error))
    return None


class _Channel:
    """How ranks agree, whatever state the trainer's own groups are in."""

    def __init__(self, store: distributed_c10d.Store, ranks: Ranks) -> None:
        self.store = store
        self.rank = ranks.rank
        self._count = ranks.count
        timeout = timedelta(seconds=AGREE_TIMEOUT_S)
        # Its type does not tell what it inherits.
        self._group: Any = distributed_c10d.ProcessGroupGloo(store, ranks.rank, ranks.count, timeout)

    def note(self, key: str, failure: Failure) -> None:
        """Leave a failure where every rank finds it."""
        self.store.set(f"{key}/{self.rank}", json.dumps([failure.number, failure.task, failure.reason[:_REASON_MAX]]))
        self.store.set(key, "failed")

    def agree(self, key: str, state: int) -> tuple[int, Failure | None]:
        """The worst state of all ranks, and the failure of the first that has one; collective."""
        worst = torch.tensor([state, self._count - self.rank if state == _FAILED else 0])
        self._group.allreduce([worst], distributed_c10d.ReduceOp.MAX).wait()
        found, first = worst.tolist()
        if found == _FINE:
            return found, None
        rank = self._count - first
        return found, Failure(rank, *json.loads(self.store.get(f"{key}/{rank}")))


class _Run:
    """One conversion on this rank, in a thread of its own, and the caller that waits for it."""

    def __init__(self, channel: _Channel, key: str, tasks: Sequence[Task], grace_s: float) -> None:
        self._channel = channel
        self._key = key
        self._tasks = tasks
        self._grace_s = grace_s
        self._lock = threading.Lock()  # over the two marks below: only one thread of a rank agrees
        self._agreeing = False
        self._left = False
        self._done = threading.Event()
        self._current = 0
        self._end: Failure | Exception | None = None

    def convert(
        self, conversion: Conversion, numbers: Sequence[int], replace_by: Replace, take: Take
    ) -> Failure | None:
        """See ``Lockstep.run``."""
        self._current = numbers[0]
        device, stream = None, None  # a thread has its own
        if torch.accelerator.is_available():
            device, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()

        def work() -> None:
            try:
                if device is not None and stream is not None:
                    torch.accelerator.set_device_index(device)
                    torch.accelerator.set_stream(stream)
                self._work(conversion, numbers, replace_by, take)
            except _StoppedError:
                pass
            except Exception as error:  # noqa: BLE001  the caller raises it
                self._end = error
            finally:
                self._done.set()

        threading.Thread(target=work, name="dcr-conversion", daemon=True).start()
        while not self._left and not self._done.wait(_POLL_S):
            if self._channel.store.check([self._key]) and not self._done.wait(self._grace_s) and self._leave():
                with suppress(_StoppedError):
                    self._agree(_LEFT_INSIDE)
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    def _work(self, conversion: Conversion, numbers: Sequence[int], replace_by: Replace, take: Take) -> None:
        first = True

        def begin(number: int) -> None:
            nonlocal first
            if not first:
                self._meet(_FINE)
            first = False
            self._current = number

        state = _FINE
        try:
            for name, tensor in conversion.convert(numbers, replace_by, begin):
                take(self._current, name, tensor)
        except Exception as error:
            if self._end is not None or self._left:
                raise _StoppedError from error
            state = _FAILED
            failure = Failure(self._channel.rank, self._current, self._tasks[self._current].name, _told(error))
            self._channel.note(self._key, failure)
        self._meet(state)

    def _meet(self, state: int) -> None:
        """Agree, unless the caller has done so instead."""
        with self._lock:
            if self._left:
                raise _StoppedError
            self._agreeing = True
        self._agree(state)
        with self._lock:
            self._agreeing = False

    def _leave(self) -> bool:
        """Give the thread up, unless it agrees at last."""
        with self._lock:
            self._left = not self._agreeing and not self._done.is_set()
            return self._left

    def _agree(self, state: int) -> None:
        try:
            worst, failure = self._channel.agree(self._key, state)
        except RuntimeError as error:
            self._end = OutOfStepError(
                f"rank {self._channel.rank}, at {self._tasks[self._current].name}: the ranks cannot agree any more, "
                f"one of them is gone: {error}; end all ranks and start the trainer again"
            )
            raise _StoppedError from error
        if worst == _FINE:
            return
        self._end = failure
        if worst == _LEFT_INSIDE:
            self._end = OutOfStepError(
                f"{failure}; other ranks were left waiting in its collectives, so the trainer's process groups are out "
                "of step: end all ranks and start the trainer again"
            )
        raise _StoppedError


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
