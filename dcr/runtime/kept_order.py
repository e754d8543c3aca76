"""An operator's word about the open transition, kept beside the record until K says so (D14, D17).

To the protocol a word is input, which a leader that dies before its write of K takes with it.  So it is written into
the control plane's registry before the operator is answered, and the next leader obeys it::

    the one that is asked    register the order; read K: it leads still; answer; write K
    the next one             take K over; look the order up; write K as the order says

A leader answers only once it has read, after the order was registered, that K is still its own.  Whoever takes K over
later looks later still, and finds it.

A word that a stopped transition goes on belongs to one stop of one candidate: the attempt that follows raises the count
in K, and the entry means nothing any more.  A word that it is given up belongs to the candidate, whose name no other
push bears: that candidate does not go forward under any leader.
"""

import logging

import msgspec

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.intervention import intervene
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Intervene, Intervention
from dcr.protocol.record import Direction, OpenTransition

_log = logging.getLogger("dcr.coordinator")
_KIND, _NAME = "operator", "order"
_GOES_ON = (Intervention.RESUME, Intervention.DENSE)
_GIVEN_UP = (Intervention.ABANDON, Intervention.ROLL_BACK)


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which stop of which candidate an order was given in, and the order."""

    candidate: str
    attempts: int
    what: Intervention
    order_id: str

    def about(self, tr: OpenTransition) -> bool:
        """Whether it has still something to say of the open transition."""
        if self.candidate != tr.candidate:
            return False
        if self.what in _GIVEN_UP:
            return tr.direction is Direction.FORWARD
        return self._in_the_same_stop(tr)

    def now(self, tr: OpenTransition) -> Intervention:
        """What it comes to as the transition stands; one that goes on again can only be turned back."""
        abandon = self.what is Intervention.ABANDON and self._in_the_same_stop(tr)
        return Intervention.ROLL_BACK if self.what in _GIVEN_UP and not abandon else self.what

    def _in_the_same_stop(self, tr: OpenTransition) -> bool:
        return tr.stopped and self.attempts == tr.attempts


class NotNowError(RefusedError):
    """An order cannot be kept in this moment; this leader, or its successor, may be asked again."""


class KeptOrder:
    """One leader's; everything is called from the thread of its role.

    Args:
        control: where it is kept.
        record_id: the record.
    """

    def __init__(self, control: ControlPlane, record_id: str) -> None:
        self._control = control
        self._record_id = record_id
        self._looked = False  # for what an earlier leader was given
        self._kept: Kept | None = None  # the last one, whoever was given it
        self._obeyed: Kept | None = None
        self._waited = False  # a look long for owners that may not have offered their candidate again yet

    def look(self) -> None:
        """Look once for what an earlier leader was given; due before this one opens its first attempt.

        Raises:
            ControlPlaneUnavailableError: it could not be asked.
        """
        if not self._looked:
            self._kept = kept_order(self._control, self._record_id)
            self._looked = True

    def knows(self, order: Intervene) -> bool:
        """Whether this very order is kept: it was given before, to this leader or an earlier one.

        Raises:
            NotNowError: it cannot be told.
        """
        if order.what is Intervention.SHOW or not order.order_id:
            return False
        try:
            self.look()
        except ControlPlaneUnavailableError as e:
            raise NotNowError(f"the control plane is away, so that nothing can be ordered; ask again: {e}") from e
        return self._kept is not None and self._kept.order_id == order.order_id

    def keep(self, role: Coordinator, order: Intervene) -> None:
        """Keep an order that can be obeyed, if it is one to keep; it replaces the one before.

        Raises:
            NotNowError: this leader leads no more, and nothing was done; or the control plane did not answer: if the
                order is kept all the same it is obeyed once that is back.
        """
        tr = None if role.record is None else role.record.open
        if tr is None or not (order.what in _GIVEN_UP or (order.what in _GOES_ON and role.held)):
            return
        kept = Kept(tr.candidate, tr.attempts, order.what, order.order_id)
        self._looked = False  # until it is known what is kept
        try:
            self._control.register(self._record_id, _KIND, _NAME, msgspec.msgpack.encode(kept))
            stored = self._control.read(self._record_id)
        except ControlPlaneUnavailableError as e:
            raise NotNowError(f"the control plane is away, so that nothing can be ordered; ask again: {e}") from e
        self._looked = True
        if stored is None or stored.revision != role.revision:
            self._forget(kept)
            raise NotNowError(f"{role.leader} leads no more: ask again, its successor will answer")
        self._kept = self._obeyed = kept

    def due(self, role: Coordinator) -> list[Effect]:
        """What follows from an order that another leader was given and did not come to.

        Raises:
            ControlPlaneUnavailableError: it could not be asked.
        """
        self.look()
        kept, tr = self._kept, _open(role)
        if kept is None or tr is None or not kept.about(tr):
            return []
        if kept.what in _GOES_ON:
            return self._go_on(role, kept)
        if role.phase is Phase.IDLE and role.seats.waiting(tr.owners, tr.pushes) != role.seats.names:
            # Whoever still waits with its push is to be told how it ended; owners say so as soon as they are back.
            self._waited, waited = True, self._waited
            if not waited:
                return []
        return self._obey(role, kept, kept.now(tr))

    def _go_on(self, role: Coordinator, kept: Kept) -> list[Effect]:
        if role.resumed:
            return []
        if kept == self._obeyed:  # here, and in vain: nobody came whom it needed, and it ends there
            self._forget(kept)
            return []
        return self._obey(role, kept, kept.what) if role.held else []

    def _obey(self, role: Coordinator, kept: Kept, what: Intervention) -> list[Effect]:
        try:
            effects = intervene(role, what)
        except RefusedError:
            return []  # not every rank is back yet
        if kept != self._obeyed:
            self._obeyed = kept
            how = "goes on" if what in _GOES_ON else "is given up"
            _log.info("record %r %s: an operator ordered %s of the last leader", self._record_id, how, kept.what)
        return effects

    def _forget(self, kept: Kept) -> None:
        self._kept = None
        try:
            if kept_order(self._control, self._record_id) == kept:
                self._control.unregister(self._record_id, _KIND, _NAME)
        except DcrError as e:
            _log.warning("record %r: an order that came to nothing could not be removed: %s", self._record_id, e)


def kept_order(control: ControlPlane, record_id: str) -> Kept | None:
    """The order that was given last, if it is kept.

    Raises:
        ControlPlaneUnavailableError: it could not be asked.
    """
    entry = control.lookup(record_id, _KIND, _NAME)
    try:
        return None if entry is None else msgspec.msgpack.decode(entry, type=Kept)
    except msgspec.MsgspecError:
        return None  # of another version of dcr: the operator says it again


def _open(role: Coordinator) -> OpenTransition | None:
    """The open transition, if nothing is being written."""
    between = role.phase in (Phase.IDLE, Phase.ATTEMPT)
    return role.record.open if between and role.record is not None else None
