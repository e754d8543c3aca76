"""In a child process: notices that an armed point is reached, and does there what the fault says."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dcr.chaos.journal import Journal
from dcr.chaos.point import ACTIONS
from dcr.protocol.step import Step

GO_TIMEOUT_S = 60.0
"""How long a child waits at a point for the harness to strike somebody else."""


class Armed(msgspec.Struct, frozen=True):
    """A fault whose point is a moment of this process."""

    number: int
    """Of the fault in its scenario."""
    role: str
    index: int
    kind: str
    action: str
    count: int
    items: int
    payload: int
    epoch_min: int
    """Earlier epochs are let pass."""
    do: str
    for_s: float
    own: bool
    """Whether it strikes this very process."""


class Trigger:
    """Watches every moment of a process; from any of its threads.

    Args:
        journal: of the process.
        tell: sends a message to the harness.
        coordinator: what the journal calls a coordinator of this process.
    """

    def __init__(self, journal: Journal, tell: Callable[..., None], coordinator: str = "coordinator") -> None:
        self._journal = journal
        self._tell = tell
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._armed: dict[int, Armed] = {}
        self._seen: dict[int, int] = {}
        self._go: dict[int, threading.Event] = {}
        self.acts: dict[str, Callable[[], None]] = {}
        """What a process can do to itself where a fault says so, by the fault's ``do``."""

    def arm(self, armed: list[Armed]) -> None:
        """Strike at these points, each once, and at no others."""
        with self._lock:
            self._armed = {a.number: a for a in armed}
            self._seen = {}

    def disarm(self, number: int) -> None:
        """Another process came to this point first."""
        with self._lock:
            self._armed.pop(number, None)

    def go(self, number: int) -> None:
        """The harness has struck: go on."""
        with self._lock:
            self._go.setdefault(number, threading.Event()).set()

    def observer(self, role: str, index: int) -> Callable[[Step], None]:
        """For the steps of a role; those of a coordinator, who has the same observer as an owner, are told apart."""

        def observe(step: Step) -> None:
            taker = "coordinator" if role == "owner" and step.action not in ACTIONS["owner"] else role
            who = self._coordinator if taker == "coordinator" else f"{taker}[{index}]"
            self._journal.say("step", who=who, action=step.action, epoch=step.epoch, detail=step.detail[:200])
            self.reached(taker, index, "step", action=step.action, epoch=step.epoch)

        return observe

    def reached(self, role: str, index: int, kind: str, *, action: str = "", epoch: int, payload: int = 0) -> str:
        """A moment has come.  What the caller has to do: ``error``, ``duplicate``, or nothing."""
        with self._lock:
            due = self._due(role, index, kind, action=action, epoch=epoch, payload=payload)
        if due is None:
            return ""
        return self._strike(due, epoch)

    def items(self, index: int, payload: int, epoch: int, there: int) -> Armed | None:
        """The armed fault within this payload's items, which is then the caller's to strike.

        One that wants more items than are ``there`` stays armed, for another attempt's payload may have them; the
        harness is told why it did not come.
        """
        with self._lock:
            due = self._due("receiver", index, "items", action="", epoch=epoch, payload=payload, items=there)
            here = self._here("receiver", index, "items", action="", epoch=epoch, payload=payload)
            short = [a.number for a in here if a.items > there]
        for number in short:
            self._tell("short", number=number, items=there)
        return due

    def strike(self, armed: Armed, epoch: int) -> str:
        """Strike now; as ``reached``."""
        return self._strike(armed, epoch)

    def _due(
        self, role: str, index: int, kind: str, *, action: str, epoch: int, payload: int, items: int = 0
    ) -> Armed | None:
        for a in self._here(role, index, kind, action=action, epoch=epoch, payload=payload):
            if a.items > items:
                continue
            self._seen[a.number] = self._seen.get(a.number, 0) + 1
            if self._seen[a.number] == a.count:
                return self._armed.pop(a.number)
        return None

    def _here(self, role: str, index: int, kind: str, *, action: str, epoch: int, payload: int) -> list[Armed]:
        """The armed faults whose moment this is, but for how often it came, and for how many items there are."""
        of = (role, 0 if role == "coordinator" else index, kind, payload)
        return [
            a
            for a in self._armed.values()
            if (a.role, a.index, a.kind, a.payload) == of and a.action in ("", action) and epoch >= a.epoch_min
        ]

    def _strike(self, a: Armed, epoch: int) -> str:
        who = self._coordinator if a.role == "coordinator" else a.role
        self._journal.say("fault", who=who, action=a.do, epoch=epoch, detail=str(a.number))
        self._tell("fault", number=a.number)
        if a.own and a.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif a.own and a.do in ("stall", "replace"):
            # To this thread: one that is sent to the process lets the thread run on for a moment, and write.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # the harness ends that
        elif a.do == "slow":
            time.sleep(a.for_s)
        elif a.do in self.acts:
            self.acts[a.do]()
        elif a.do in ("error", "duplicate"):
            return a.do
        else:
            self._wait(a.number)
        return ""

    def _wait(self, number: int) -> None:
        with self._lock:
            event = self._go.setdefault(number, threading.Event())
        if not event.wait(GO_TIMEOUT_S):
            self._journal.say("error", detail=f"fault {number}: the harness did not answer in {GO_TIMEOUT_S:g} s")

    @staticmethod
    def decode(data: list[dict[str, Any]]) -> list[Armed]:
        """From the harness's message."""
        return msgspec.convert(data, list[Armed])
