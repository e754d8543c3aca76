"""What a node agent tells the leader: the node role's reports as messages of the control channel."""

from collections.abc import Callable

from dcr.data_plane.payload import WIRE_VERSION
from dcr.protocol import node as role
from dcr.protocol.messages import (
    CONTROL_VERSION,
    Acknowledged,
    AttemptFailed,
    Join,
    Prepared,
    Report,
    Serving,
    Staged,
)
from dcr.runtime.rank_messages import Attached
from dcr.runtime.ranks import Ranks

OPERATIONS = ("add", "xor")

Reported = role.ReportPrepared | role.ReportStaged | role.ReportAcknowledged | role.ReportFailed | role.ReportServing


class NodeReports:
    """One engine's reports.

    Args:
        engine: its name.
        attached: what it is.
        ranks: its ranks.
        send: sends one; a lost report is made up for: on the next connection the leader hears of the state anew.
    """

    def __init__(self, engine: str, attached: Attached, ranks: Ranks, send: Callable[[Report], None]) -> None:
        self._engine = engine
        self._attached = attached
        self._ranks = ranks
        self._send = send

    def report(self, effect: Reported) -> None:
        """Send what the role reports."""
        name, incarnation = self._engine, self._attached.incarnation
        match effect:
            case role.ReportPrepared():
                self._send(Prepared(name, incarnation, effect.epoch, effect.state))
            case role.ReportStaged():
                self._send(Staged(name, incarnation, effect.epoch))
            case role.ReportAcknowledged():
                self._send(Acknowledged(name, incarnation, effect.epoch, effect.root, self._ranks.seconds))
            case role.ReportFailed():
                self._send(AttemptFailed(name, incarnation, effect.epoch, effect.reason, self._ranks.state))
            case role.ReportServing():
                self._send(Serving(name, incarnation, effect.epoch, effect.version))

    def join(self) -> None:
        """Ask to be let in."""
        a = self._attached
        state = self._ranks.state
        self._send(
            Join(self._engine, a.incarnation, CONTROL_VERSION, WIRE_VERSION, OPERATIONS, state, a.set_only, a.refused)
        )
