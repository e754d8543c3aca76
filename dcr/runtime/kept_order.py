"""An operator's word that a stopped transition goes on, kept beside the record until an attempt says so in K (D14).

To the protocol a word is input, which a leader that dies before the attempt is opened takes with it.  So it is written
into the control plane's registry before the operator is answered, and the next leader obeys it.  It belongs to one stop
of one candidate: the attempt that follows raises the count in K, and the entry means nothing any more.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.intervention import intervene
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Intervention
from dcr.protocol.record import OpenTransition

_log = logging.getLogger("dcr.coordinator")
_KIND, _NAME = "operator", "goes-on"
_KEPT = (Intervention.RESUME, Intervention.DENSE)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which stop the order is about, and the order."""

    candidate: str
    attempts: int
    what: Intervention


class KeptOrder:
    """One leader's; everything is called from the thread of its role.

    Args:
        control: where it is kept.
        record_id: the record.
    """

    def __init__(self, control: ControlPlane, record_id: str) -> None:
        self._control = control
        self._record_id = record_id
        self._obeyed: _Kept | None = None

    @contextmanager
    def keeping(self, role: Coordinator, what: Intervention) -> Iterator[None]:
        """Keep an order, if it is one to keep; not if it is refused within.

        Raises:
            RefusedError: it could not be kept; nothing was done.
        """
        tr = _stopped(role)
        if tr is None or what not in _KEPT or not role.held:
            yield
            return
        kept = _Kept(tr.candidate, tr.attempts, what)
        try:
            self._control.register(self._record_id, _KIND, _NAME, msgspec.msgpack.encode(kept))
        except ControlPlaneUnavailableError as e:
            raise RefusedError(f"the control plane is away, so that nothing can go on; ask again: {e}") from e
        try:
            yield
        except RefusedError:
            self._forget()
            raise
        self._obeyed = kept

    def due(self, role: Coordinator) -> list[Effect]:
        """What follows from an order that another leader was given and did not come to.

        Raises:
            ControlPlaneUnavailableError: it could not be asked.
        """
        tr = _stopped(role)
        if tr is None or role.resumed:
            return []
        entry = self._control.lookup(self._record_id, _KIND, _NAME)
        kept = None if entry is None else _decoded(entry)
        if kept is None or (kept.candidate, kept.attempts) != (tr.candidate, tr.attempts):
            return []
        if kept == self._obeyed:  # here, and in vain: nobody came whom it needed, and it ends there
            self._forget()
            return []
        try:
            effects = intervene(role, kept.what) if role.held else []
        except RefusedError:
            return []
        if effects or role.resumed:
            self._obeyed = kept
            _log.info("record %r goes on: an operator ordered %s of the last leader", self._record_id, kept.what)
        return effects

    def _forget(self) -> None:
        try:
            self._control.unregister(self._record_id, _KIND, _NAME)
        except DcrError as e:
            _log.warning("record %r: an order that came to nothing could not be removed: %s", self._record_id, e)


def _stopped(role: Coordinator) -> OpenTransition | None:
    """The open transition, if it has stopped and nothing is being written."""
    tr = None if role.record is None or role.phase is not Phase.IDLE else role.record.open
    return tr if tr is not None and tr.stopped else None


def _decoded(entry: bytes) -> _Kept | None:
    try:
        return msgspec.msgpack.decode(entry, type=_Kept)
    except msgspec.MsgspecError:
        return None  # of another version of dcr: the operator says it again
