"""The leader's part of ``dcr verify``: owners show digests, engines compare, an operator is told (DESIGN D2).

Nothing of the protocol's state is changed, and no weight travels: owners put a table of content digests into the
delivery store, engines read these, read their storage back, and answer with what differs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Never

from dcr.data_plane.content_digest import ContentDigest
from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import (
    CompareContents,
    ContentsCompared,
    ContentsShown,
    Order,
    ShowContents,
    TableRef,
    Verified,
    Verify,
)
from dcr.protocol.record import CommitRecord, Member
from dcr.runtime.channel import Peer
from dcr.runtime.operator import NOT_ADMITTED

Send = Callable[[str, str, Order], bool]
"""To the peer of this role and name; False if it is not connected."""
NotAdmitted = Callable[[], Mapping[Member, str]]


@dataclass
class _Conversation:
    operator: str
    record: CommitRecord
    deadline_s: float
    tables: dict[str, TableRef] = field(default_factory=dict)
    total: ContentDigest = field(default_factory=ContentDigest)
    waiting: dict[str, int] = field(default_factory=dict)
    """Engines that have not answered, and their incarnations; empty while owners are being asked."""


class Verification:
    """One verification at a time; further operators are told to come again.

    Args:
        record_id: the record.
        owners: names of all owners.
        send: sends an order without waiting.
        not_admitted: engines that are connected and not admitted now, and why; the operator is told.
        timeout_s: after so many seconds without an answer that is waited for, whoever is silent is named.
    """

    def __init__(
        self, record_id: str, owners: Sequence[str], send: Send, not_admitted: NotAdmitted, timeout_s: float
    ) -> None:
        self._record_id = record_id
        self._owners = tuple(owners)
        self._send = send
        self._not_admitted = not_admitted
        self._timeout_s = timeout_s
        self._now: _Conversation | None = None

    def begin(self, operator: Peer, order: Verify, record: CommitRecord | None) -> None:
        """An operator asks."""
        if order.record_id != self._record_id:
            self._refuse(operator.name, f"this leader leads record {self._record_id!r}, not {order.record_id!r}")
        elif record is None:
            self._refuse(operator.name, "the leader has not read the record yet; ask again")
        elif self._now is not None:
            self._refuse(operator.name, "another verification is under way; ask again when it is over")
        elif record.open is not None and not record.open.stopped:
            self._refuse(
                operator.name, f"a transition to version {record.open.target} is under way; ask again when it is over"
            )
        elif not record.members:
            self._refuse(
                operator.name, f"no engine is admitted at version {record.version}: there is nothing to compare"
            )
        else:
            self._now = _Conversation(operator.name, record, time.monotonic() + self._timeout_s)
            silent = [
                o for o in self._owners if not self._send("owner", o, ShowContents(self._record_id, record.epoch))
            ]
            if silent:
                self._end(f"not connected: owner {', '.join(silent)}")

    def shown(self, answer: ContentsShown) -> None:
        """An owner answered."""
        now = self._now
        if now is None or now.waiting or answer.epoch != now.record.epoch or answer.owner in now.tables:
            return
        if answer.table is None:
            self._end(answer.reason)
            return
        now.tables[answer.owner] = answer.table
        now.total += _digest(answer)
        if len(now.tables) < len(self._owners):
            return
        if now.total.hex() != now.record.baseline_id:
            self._end(
                f"the owners' baselines digest to {now.total.hex()}, version {now.record.version} of the record to "
                f"{now.record.baseline_id}: an owner has not folded yet, or holds another version; ask again"
            )
            return
        order = CompareContents(self._record_id, now.record.epoch, now.record.version, tuple(now.tables.values()))
        now.deadline_s = time.monotonic() + self._timeout_s
        now.waiting = {m.engine: m.incarnation for m in now.record.members}
        for m, why in self._not_admitted().items():
            self._tell(now, _not_compared(m.engine, m.incarnation, now.record.epoch, f"{NOT_ADMITTED}: {why}"))
        for engine, incarnation in list(now.waiting.items()):
            if not self._send("node", engine, order):
                self._left_out(engine, incarnation, "not connected")

    def compared(self, answer: ContentsCompared) -> None:
        """An engine answered."""
        now = self._now
        if now is None or answer.epoch != now.record.epoch or now.waiting.get(answer.engine) != answer.incarnation:
            return
        del now.waiting[answer.engine]
        now.deadline_s = time.monotonic() + self._timeout_s
        self._tell(now, answer)

    def lost(self, peer: Peer) -> None:
        """A peer is not connected any more."""
        now = self._now
        if now is None:
            return
        if peer.role == "node" and now.waiting.get(peer.name) == peer.incarnation:
            self._left_out(peer.name, peer.incarnation, "its connection was lost while it compared")
        elif peer.role == "owner" and not now.waiting and peer.name not in now.tables:
            self._end(f"the connection of owner {peer.name} was lost")
        elif peer.role == "operator" and peer.name == now.operator:
            self._now = None

    def look(self) -> list[Never]:
        """Time goes by; no effect of the protocol's comes of it."""
        now = self._now
        if now is not None and time.monotonic() >= now.deadline_s:
            silent = [f"engine {e}" for e in now.waiting] or [f"owner {o}" for o in self._owners if o not in now.tables]
            bound = f"{self._timeout_s:g} s (the coordinator's verify_timeout_s)"
            self._end(f"no answer within {bound} of: {', '.join(silent)}")
        return []

    def _left_out(self, engine: str, incarnation: int, reason: str) -> None:
        now = self._now
        if now is not None:
            self.compared(_not_compared(engine, incarnation, now.record.epoch, reason))

    def _tell(self, now: _Conversation, answer: ContentsCompared) -> None:
        told = Verified(self._record_id, now.record.version, len(self._owners), answer, len(now.waiting), "")
        self._send("operator", now.operator, told)
        if not now.waiting:
            self._now = None

    def _end(self, error: str) -> None:
        now, self._now = self._now, None
        if now is not None:
            self._send(
                "operator",
                now.operator,
                Verified(self._record_id, now.record.version, len(self._owners), None, len(now.waiting), error),
            )

    def _refuse(self, operator: str, error: str) -> None:
        self._send("operator", operator, Verified(self._record_id, 0, len(self._owners), None, 0, error))


def _not_compared(engine: str, incarnation: int, epoch: int, reason: str) -> ContentsCompared:
    return ContentsCompared(engine, incarnation, epoch, 0, 0, {}, 0, {}, 0, reason, 0.0)


def _digest(answer: ContentsShown) -> ContentDigest:
    try:
        return ContentDigest.from_hex(answer.baseline_digest)
    except ValueError as e:
        raise RefusedError(f"owner {answer.owner}: {e}") from e
