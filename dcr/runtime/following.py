"""How an owner whose coordinator runs elsewhere finds the one that leads, and that its own trainer is still meant."""

import logging

from dcr.control_plane.interface import ControlPlane
from dcr.protocol.errors import DcrError
from dcr.protocol.record import OwnerRef
from dcr.runtime.roster import roster
from dcr.runtime.spoke import Spoke

_log = logging.getLogger("dcr.owner")


class Following:
    """Looks at the registry now and then.

    Args:
        control: where the leader's address and the trainer's roster are.
        record_id: the record.
        owner: who follows.
        spoke: its connection, which resolves the leader's address by itself.
    """

    def __init__(self, control: ControlPlane, record_id: str, owner: OwnerRef, spoke: Spoke) -> None:
        self._control = control
        self._record_id = record_id
        self._owner = owner
        self._spoke = spoke
        self._warned = ""

    def look(self) -> str:
        """Leave a leader that is not it any more; or, without one, say why none will come, empty while one may."""
        try:
            if self._spoke.connected:  # to one that leads this very trainer: no other lets this owner in
                self._spoke.follow()
                return ""
            found = roster(self._control, self._record_id)
        except DcrError as e:
            if str(e) != self._warned:
                self._warned = str(e)
                _log.warning("%s could not look for the leader, and tries again: %s", self._owner.owner, e)
            return ""
        if found is not None and self._owner in found.owners:
            return ""
        other = "with a coordinator of its own" if found is None else "which asks for a coordinator too"
        return (
            f"another trainer, {other}, was started on record {self._record_id!r} after this one and takes its place; "
            f"stop one of the two, or give each its own record_id"
        )
