"""How an owner whose coordinator runs elsewhere finds the one that leads, and that its own trainer is still meant."""

import logging

from dcr.control_plane.interface import ControlPlane
from dcr.protocol.errors import DcrError
from dcr.protocol.record import OwnerRef
from dcr.runtime.frame import ChannelTimeoutError
from dcr.runtime.leader_wait import LeaderWait, why_unled
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
        self._wait = LeaderWait(_log, control, record_id)

    def wait_connected(self, timeout_s: float) -> None:
        """As ``Spoke.wait_connected``, whose error also tells who does not lead, and why."""
        try:
            self._spoke.wait_connected(timeout_s)
        except ChannelTimeoutError as e:
            raise ChannelTimeoutError(f"{e}; {why_unled(self._control, self._record_id)}") from e

    def tell(self, waits: str, at_most_s: float) -> None:
        """Tell the log of a wait for a leader, if there is one.

        Args:
            waits: what waits for it; empty if nothing does.
            at_most_s: how long it waits in all.
        """
        if waits and not self._spoke.connected:
            self._wait.look(f"{self._owner.owner}, {waits},", f"at most {at_most_s:g} s in all")
        else:
            self._wait.over(self._owner.owner)

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
            closed = "this trainer's refit was closed on its first rank: nothing can be pushed through it any more"
            return closed if found.closed else ""
        other = "with a coordinator of its own" if found is None else "which asks for a coordinator too"
        return (
            f"another trainer, {other}, was started on record {self._record_id!r} after this one and takes its place; "
            f"stop one of the two, or give each its own record_id"
        )
