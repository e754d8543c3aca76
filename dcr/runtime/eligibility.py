"""Whether a coordinator may lead the trainer that asks for one; what stands against it, the trainer is told (D16)."""

import contextlib
import time

import msgspec

from dcr.control_plane.interface import ControlPlane
from dcr.delivery.interface import Delivery
from dcr.delivery.meeting import missed
from dcr.protocol.errors import DcrError
from dcr.protocol.messages import cut
from dcr.runtime.registry import meeting
from dcr.runtime.roster import Roster
from dcr.runtime.settings import Settings
from dcr.runtime.terms import another_secret, differences

_KIND = "unfit"
_AGAIN_S = 5.0
"""Between two looks at a delivery where the trainer's sign was not to be seen."""


class _Unfit(msgspec.Struct, frozen=True):
    """What one coordinator says of itself; fields that a later version adds are passed over."""

    start: str
    """Of the trainer that it may not lead."""
    why: str


class Eligibility:
    """One coordinator's; asked from one thread, now and again.

    Args:
        record_id: the record.
        name: the coordinator's.
        control: where the trainer says what it has, and is told what stands against this coordinator.
        delivery: the coordinator's.
        secret: the coordinator's, of the run.
        settings: the coordinator's.
    """

    def __init__(
        self,
        record_id: str,
        name: str,
        *,
        control: ControlPlane,
        delivery: Delivery,
        secret: bytes,
        settings: Settings,
    ) -> None:
        self._record_id = record_id
        self._name = name
        self._control = control
        self._delivery = delivery
        self._secret = secret
        self._settings = settings
        self._looked = ("", "", 0.0)  # at whose sign, what was missed, and when it is looked for again
        self._said: _Unfit | None = None
        self._first = True  # a process of this name that was killed may have said something

    def problem(self, asked: Roster) -> str:
        """Why it must not lead this trainer; empty if it may.

        Raises:
            DcrError: what the trainer has could not be read, or be told what stands against this coordinator.
        """
        why = another_secret(asked.terms, self._secret, self._record_id)
        if not why:  # else nothing that the trainer has delivered could be read either
            why = "; ".join(filter(None, (differences(asked.terms, self._settings), self._missed(asked))))
        unfit = _Unfit(asked.start, cut(why)) if why else None
        if self._first or unfit != self._said:
            self._say(unfit)
            self._first = False
        return why

    def withdraw(self) -> None:
        """Say nothing any more; if that cannot be written, it goes with the next trainer."""
        if self._said is not None:
            with contextlib.suppress(DcrError):
                self._say(None)

    def _missed(self, asked: Roster) -> str:
        """Why what this trainer delivers cannot be seen; where it was seen once, that counts."""
        start, problem, due = self._looked
        if start == asked.start and (not problem or time.monotonic() < due):
            return problem
        entry = meeting(self._control, self._record_id)
        problem = "" if entry is None else missed(self._delivery, entry, "this coordinator")
        self._looked = (asked.start, problem, time.monotonic() + _AGAIN_S)
        return problem

    def _say(self, unfit: _Unfit | None) -> None:
        if unfit is None:
            self._control.unregister(self._record_id, _KIND, self._name)
        else:
            self._control.register(self._record_id, _KIND, self._name, msgspec.msgpack.encode(unfit))
        self._said = unfit


def unfit_coordinators(control: ControlPlane, record_id: str, asked: Roster) -> dict[str, str]:
    """Coordinators that stand by and must not lead this trainer, and why; one that was killed since may be among them.

    Raises:
        ControlPlaneUnavailableError: it could not be read.
    """
    found = {}
    for name, entry in sorted(control.registered(record_id, _KIND).items()):
        # One of another version of dcr says so itself; one that is damaged says nothing.
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            unfit = msgspec.msgpack.decode(entry, type=_Unfit)
            if unfit.start == asked.start:
                found[name] = unfit.why
    return found
