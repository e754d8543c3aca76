"""An engine asks to be let in once what the leader's owners deliver can be seen from here; and not before.

An engine that looks elsewhere would be admitted, ordered to take part, and hold the fleet up until it is timed out.
"""

import logging
import time
from collections.abc import Callable

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.runtime.reception import Inbox
from dcr.runtime.registry import meeting

_log = logging.getLogger("dcr.node")

PATIENCE_S = 5.0
"""So long what was stored may take to be seen, on a network's file system for one."""
_SOON_S, _LATER_S = 0.3, 5.0


class Meeting:
    """Whether an engine may join; everything is called from its agent's thread.

    Args:
        engine: its name, for the log.
        record_id: the record that it obeys.
        control: where the leader says where its owners deliver.
        inbox: looks there.
        answer: hands what the inbox found to the agent's thread, which calls ``found`` with it.
        join: asks the leader to let the engine in.
    """

    def __init__(  # noqa: PLR0917 - what it stands between
        self,
        engine: str,
        record_id: str,
        control: ControlPlane,
        inbox: Inbox,
        answer: Callable[[str], None],
        join: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._record_id = record_id
        self._control = control
        self._inbox = inbox
        self._answer = answer
        self._join = join
        self._began: float | None = None  # None: it has met the leader, or there is none
        self._due = 0.0
        self._asked = False
        self._told = ""
        self.problem = ""
        """Why the engine does not join; empty if that is not the reason."""
        self.last_problem: tuple[float, str] | None = None
        """When (wall clock, seconds) and why it last did not; it stays."""

    def ask(self) -> None:
        """Ask to be let in, once the leader is met: at once, if it was."""
        if self._began is None:
            self._join()

    def begin(self) -> None:
        """The leader was reached, perhaps another one."""
        self._began, self._due, self._asked = time.monotonic(), 0.0, False
        self.look()

    def look(self) -> None:
        """Look for what the leader left, if that is due."""
        now = time.monotonic()
        if self._began is None or now < self._due:
            return
        if self._asked:  # the store does not answer: nobody knows, and the attempt will tell
            self._met()
            return
        try:
            entry = meeting(self._control, self._record_id)
        except ControlPlaneUnavailableError:
            self._due = now + _SOON_S
            return
        if entry is None:
            self._met()
            return
        self._asked, self._due = True, now + PATIENCE_S
        self._inbox.meet(entry, self._answer)

    def found(self, problem: str) -> None:
        """What a look found: why nothing is to be seen, or nothing against it."""
        if self._began is None:
            return
        self._asked = False
        if not problem:
            self._met()
        elif time.monotonic() - self._began < PATIENCE_S:
            self._due = time.monotonic() + _SOON_S
        else:
            self._due = time.monotonic() + _LATER_S
            self.problem = problem
            self.last_problem = time.time(), f"it does not ask to be let in: {problem}"
            if problem != self._told:
                self._told = problem
                _log.warning("engine %s does not ask to be let in: %s", self._engine, problem)

    def _met(self) -> None:
        self._began, self.problem = None, ""
        self._join()
