"""The node agent's part for one engine: the fence of its gate, and when that gate may open (DESIGN D9, D12)."""

from dataclasses import dataclass

from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import OpenApply, Prepare, Published, Refuse, StorageState, cut
from dcr.protocol.receiver import RankAcknowledged, RankFailed, RankPrepared, RankState
from dcr.protocol.record import CommitRecord, Member
from dcr.protocol.step import Step

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class CloseGate:
    """Keep new requests out and let running ones leave storage; answer ``gate_closed`` or ``gate_stuck``."""

    epoch: int


@dataclass(frozen=True)
class OpenGate:
    """Reset the caches, then let requests in at this version; answer ``gate_opened`` or ``gate_stuck``."""

    epoch: int
    version: int


@dataclass(frozen=True)
class ReadRecord:
    """Read K and hand it to the rank (``learn``), then here (``learned``)."""


@dataclass(frozen=True)
class ToRank:
    """Hand this order to the rank, once no write is under way there."""

    order: Prepare | OpenApply


@dataclass(frozen=True)
class StartFetch:
    """Fetch payloads and manifests of this attempt and feed them to the rank until told otherwise."""

    order: Prepare


@dataclass(frozen=True)
class StopFetch:
    """Fetch nothing more for any epoch up to this one."""

    epoch: int


@dataclass(frozen=True)
class ReportPrepared:
    """Send ``Prepared`` to the leader."""

    epoch: int
    state: StorageState


@dataclass(frozen=True)
class ReportAcknowledged:
    """Send ``Acknowledged`` to the leader."""

    epoch: int
    root: str


@dataclass(frozen=True)
class ReportFailed:
    """Send ``AttemptFailed`` to the leader."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class ReportServing:
    """Send ``Serving`` to the leader."""

    epoch: int
    version: int


@dataclass(frozen=True)
class AskToJoin:
    """Send ``Join`` again: storage is not a version that the record admits, so only a restore helps."""


@dataclass(frozen=True)
class GiveUp:
    """The leader will not take this engine; its gate stays closed."""

    reason: str


Effect = (
    Step
    | CloseGate
    | OpenGate
    | ReadRecord
    | ToRank
    | StartFetch
    | StopFetch
    | ReportPrepared
    | ReportAcknowledged
    | ReportFailed
    | ReportServing
    | AskToJoin
    | GiveUp
)


# ---------------------------------------------------------------- the role


class Node:
    """One engine's gate and its orders; the storage behind it is a ``Receiver``'s.

    The gate::

        closed --(K says so, storage is clean)--> opening --> open --(prepare)--> closing --> closed

    A gate starts closed.  No order reaches the rank before the gate is confirmed closed for its epoch.
    """

    def __init__(self, engine: str, incarnation: int, record_id: str) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self.record_id = record_id
        self.gate = "closed"
        self.fence = 0
        self.serving: int | None = None
        self._pending: Prepare | None = None  # waits for the gate to close
        self._order: Prepare | None = None
        self._applying: int | None = None  # the epoch that the rank may write for
        self._reported = 0  # the epoch of K when the leader was last told what is being served
        self._asked_at: tuple[int, int] | None = None  # (epoch, version) of K when a join was last asked for

    # ------------------------------------------------------------ orders of the leader

    def order(self, order: Prepare | OpenApply | Published | Refuse) -> list[Effect]:
        """Take an order.

        Raises:
            RefusedError: it is of another record, or below the fence of the gate (DESIGN D6).
        """
        if order.record_id != self.record_id:
            raise RefusedError(f"{self.engine}: order of record {order.record_id!r}, this one obeys {self.record_id!r}")
        match order:
            case Published():
                return [ReadRecord()]
            case Refuse():
                return [GiveUp(order.reason)]
            case Prepare():
                return self._prepare(order)
            case OpenApply():
                return self._open_apply(order)

    def _prepare(self, order: Prepare) -> list[Effect]:
        self._check_fence(order.epoch)
        self.fence = order.epoch
        self._order = None
        self._pending = order
        effects: list[Effect] = [StopFetch(order.epoch - 1)]
        if self.gate == "closed":
            # K is read first: what was committed since must be known before the rank judges whether it is clean.
            return [*effects, ReadRecord()]
        if self.gate in ("open", "opening"):
            self.gate = "closing"
            effects += [Step(self.engine, "CloseGate", order.epoch), CloseGate(order.epoch)]
        return effects

    def _open_apply(self, order: OpenApply) -> list[Effect]:
        self._check_fence(order.epoch)
        if self._order is None or self._order.epoch != order.epoch or self.gate != "closed":
            raise RefusedError(f"{self.engine}: open_apply for epoch {order.epoch}, which was not prepared here")
        self._applying = order.epoch
        return [ToRank(order), StartFetch(self._order)]

    # ------------------------------------------------------------ the gate

    def gate_closed(self, epoch: int) -> list[Effect]:
        """The gate is closed and no request is inside."""
        if self.gate != "closing" or epoch > self.fence:
            return []
        self.gate, self.serving = "closed", None
        return [Step(self.engine, "GateClosed", epoch), ReadRecord()]

    def gate_opened(self, epoch: int, version: int) -> list[Effect]:
        """The gate is open; requests may already be inside."""
        if self.gate != "opening":
            return []
        self.gate, self.serving, self._reported = "open", version, epoch
        return [Step(self.engine, "OpenGate", epoch, str(version)), ReportServing(epoch, version)]

    def gate_stuck(self, reason: str) -> list[Effect]:
        """The gate would not close, or caches would not reset: this engine cannot go on in this epoch."""
        reason = cut(reason)
        if self.gate == "opening":
            self.gate = "closed"
            return [GiveUp(reason)]
        if self.gate != "closing":
            return []
        self.gate = "open"  # nothing was written: the engine goes on serving what it served
        if self._pending is None:
            return []
        order, self._pending = self._pending, None
        return [Step(self.engine, "FailAttempt", order.epoch, reason), ReportFailed(order.epoch, reason)]

    # ------------------------------------------------------------ answers of the rank

    def learned(self, record: CommitRecord, rank: RankState) -> list[Effect]:
        """K was read, and the rank has answered what it holds."""
        if self._pending is not None:
            if self.gate != "closed":
                return []
            if record.epoch < self._pending.epoch:
                return [ReadRecord()]  # read before the order came: it may miss a commit that the rank must know of
            order, self._pending = self._pending, None
            self._order = order
            return [ToRank(order)]
        if self.gate == "open" and self.serving != record.version and record.epoch >= self.fence:
            # A commit happened without this engine: what it serves is a committed version, but no longer the last.
            self.fence = record.epoch
            self.gate = "closing"
            return [Step(self.engine, "CloseGate", record.epoch), CloseGate(record.epoch)]
        if self.gate == "open" and self.serving == record.version and record.epoch > self._reported:
            self._reported = record.epoch
            return [ReportServing(record.epoch, record.version)]  # or a leader that missed it holds it for silent
        if self.gate != "closed" or record.epoch < self.fence or record.epoch < rank.fence:
            return []
        under_way = record.open is not None and not record.open.stopped
        if self._order is not None and self._order.epoch == record.epoch and under_way:
            return []  # the attempt that this node takes part in
        if self._applying == record.epoch:
            return []  # a restore: the rank may write at any moment, even if it needs none
        clean = rank.state.clean and rank.state.version == record.version
        admitted = Member(self.engine, self.incarnation) in record.members and not under_way
        restoring = self._order is not None and self._order.epoch == record.epoch and not rank.committed_here
        if clean and (rank.committed_here or admitted):
            self.gate = "opening"
            self._order = None
            return [StopFetch(record.epoch), OpenGate(record.epoch, record.version)]
        if under_way or restoring or self._asked_at == (record.epoch, record.version):
            return []
        self._asked_at = (record.epoch, record.version)
        return [AskToJoin()]

    def rank_prepared(self, answer: RankPrepared) -> list[Effect]:
        """The rank's fence is up: the engine (of one rank) is prepared."""
        if self._order is None or self._order.epoch != answer.epoch:
            return []
        return [Step(self.engine, "Prepare", answer.epoch), ReportPrepared(answer.epoch, answer.state)]

    def rank_acknowledged(self, answer: RankAcknowledged) -> list[Effect]:
        """The rank holds everything of the epoch."""
        self._applying = None
        return [StopFetch(answer.epoch), ReportAcknowledged(answer.epoch, answer.root)]

    def rank_failed(self, answer: RankFailed) -> list[Effect]:
        """The rank cannot acknowledge the epoch."""
        self._applying = None
        return [StopFetch(answer.epoch), ReportFailed(answer.epoch, answer.reason)]

    # ------------------------------------------------------------ inside

    def _check_fence(self, epoch: int) -> None:
        if epoch < self.fence:
            raise RefusedError(f"{self.engine}: order of epoch {epoch} refused: the gate's fence is at {self.fence}")
