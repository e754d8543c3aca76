"""The node agent's part for one engine: the fence of its gate, and when that gate may open (DESIGN D9, D12)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import OpenApply, Prepare, Published, Refuse, StorageState, cut
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, RankState
from dcr.protocol.record import CommitRecord, Member
from dcr.protocol.step import Step

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class CloseGate:
    """Keep new requests out and let running ones leave storage; answer ``gate_closed`` or ``gate_stuck``."""

    epoch: int


@dataclass(frozen=True)
class OpenGate:
    """Reset the caches, then ask ``gate_ready`` whether requests may still be let in; or answer ``gate_stuck``."""

    epoch: int
    version: int


@dataclass(frozen=True)
class LetIn:
    """Let requests in, served by this version."""

    version: int


@dataclass(frozen=True)
class ReadRecord:
    """Read K and hand it in here (``read``), then to every rank (``learn``), then here again (``learned``)."""


@dataclass(frozen=True)
class ToRank:
    """Hand this order to the rank, once no write is under way there."""

    rank: str
    order: PrepareRank | OpenApply


@dataclass(frozen=True)
class StartFetch:
    """Fetch payloads and manifests of this attempt and feed them to every rank until told otherwise."""

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
class ReportStaged:
    """Send ``Staged`` to the leader."""

    epoch: int


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
    | LetIn
    | ReadRecord
    | ToRank
    | StartFetch
    | StopFetch
    | ReportPrepared
    | ReportStaged
    | ReportAcknowledged
    | ReportFailed
    | ReportServing
    | AskToJoin
    | GiveUp
)


# ---------------------------------------------------------------- the role

_BUSY = frozenset({"handed", "fenced", "staged", "applying"})
"""Stages from which a rank may come to write: its gate is not opened meanwhile."""


@dataclass
class _Work:
    """The order that was handed to the ranks last, and how far each of them is with it."""

    order: Prepare
    stages: dict[str, str]
    """``handed``, then as ``RankState.stage`` says."""
    states: dict[str, StorageState] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    """The leader was told so."""

    def all_are(self, stage: str) -> bool:
        return set(self.stages.values()) == {stage}


class Node:
    """One engine's gate and its orders; the storage behind it is its ranks', each a ``Receiver``.

    The gate::

        closed --(K says so, storage is clean: a gate order, ``opening``)--> open --(prepare, or a newer K)--> closing
               --(nobody is inside)--> closed

    A gate starts closed.  Synchronously no order reaches a rank before the gate is confirmed closed for its epoch;
    asynchronously ranks prepare and stage behind an open gate, which closes for ``OpenApply`` (DESIGN D9, D18).

    Args:
        engine: the engine's name.
        incarnation: of the engine: new with every start of any of its ranks.
        record_id: the record whose orders it obeys.
        ranks: names of the engine's ranks.
    """

    def __init__(self, engine: str, incarnation: int, record_id: str, ranks: tuple[str, ...] = ("0",)) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self.record_id = record_id
        self.ranks = ranks
        self.gate = "closed"
        self.fence = 0
        self.serving: int | None = None
        self.opening: tuple[int, int] | None = None
        """The gate order on its way: (epoch, version)."""
        self.applying: int | None = None
        """The epoch that the ranks may write for, once the gate is closed."""
        self._pending: Prepare | None = None  # noted; waits for K, or for the gate to close
        self._work: _Work | None = None
        self._reported = 0  # the epoch of K when the leader was last told what is being served
        self._asked_at: tuple[int, int] | None = None  # (epoch, version) of K when a join was last asked for

    # ------------------------------------------------------------ orders of the leader

    def order(self, order: Prepare | OpenApply | Published | Refuse) -> list[Effect]:
        """Take an order.  One to prepare is only noted: ``read`` carries it out once K is known to be as new (D6).

        Raises:
            RefusedError: it is of another record, below the fence of the gate, for another incarnation, or not one
                that every rank is ready for; nothing is changed (DESIGN D6, D15).
        """
        self._check_record(order.record_id, "order")
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
        if order.incarnation != self.incarnation:
            raise RefusedError(
                f"{self.engine}: order for incarnation {order.incarnation} of this engine, which is {self.incarnation}"
            )
        known = self._pending or (None if self._work is None else self._work.order)
        if known is not None and known.epoch == order.epoch and known != order:
            raise RefusedError(f"{self.engine}: two different prepare orders for epoch {order.epoch}")
        if known is not None and known.epoch >= order.epoch:
            return []  # repeated, or late
        self._pending = order
        return [ReadRecord()]

    def _open_apply(self, order: OpenApply) -> list[Effect]:
        self._check_fence(order.epoch)
        w = self._work
        if w is None or w.order.epoch != order.epoch:
            raise RefusedError(f"{self.engine}: open_apply for epoch {order.epoch}, which was not prepared here")
        if self.applying == order.epoch:
            return []
        needed = "staged" if w.order.stage else "fenced"
        if not w.all_are(needed):
            found = ", ".join(f"rank {r} is {s}" for r, s in w.stages.items())
            raise RefusedError(
                f"{self.engine}: open_apply for epoch {order.epoch}, for which not every rank is {needed}: {found}"
            )
        self.applying = order.epoch
        w.stages = dict.fromkeys(self.ranks, "applying")
        if self.gate == "closed":
            return self._apply(w)
        if self.gate == "open":
            self.gate = "closing"
            return [CloseGate(order.epoch)]
        return []

    def _apply(self, w: _Work) -> list[Effect]:
        order = OpenApply(self.record_id, w.order.epoch)
        fetch: list[Effect] = [] if w.order.stage else [StartFetch(w.order)]
        return [*(ToRank(r, order) for r in self.ranks), *fetch]

    # ------------------------------------------------------------ the record

    def read(self, record: CommitRecord) -> list[Effect]:
        """CloseGate, if K asks for it; or a noted order goes to the ranks, with the K that it was waiting for (D6).

        Raises:
            RefusedError: it is another record; or the noted order is not of this K, or comes to a gate that was opened
                in its own epoch.  Then the order is dropped, and nothing else is changed.
        """
        self._check_record(record.record_id, "record")
        p = self._pending
        if p is not None and record.epoch < p.epoch:
            self._pending = None  # an order follows its write of K, and K was read after the order came
            raise RefusedError(
                f"{self.engine}: order to prepare epoch {p.epoch}, but the record is at epoch {record.epoch}: dropped"
            )
        if p is not None and record.epoch == p.epoch:
            return self._carry_out(p, record)
        self._pending = None
        if self.gate == "open" and self.serving != record.version and record.epoch >= self.fence:
            # A commit happened without this engine: what it serves is a committed version, but no longer the last.
            self.fence = record.epoch
            return self._close()
        if self.gate == "open" and self.serving == record.version and record.epoch > self._reported:
            self._reported = record.epoch
            return [ReportServing(record.epoch, record.version)]  # or a leader that missed it holds it for silent
        return []

    def _carry_out(self, order: Prepare, record: CommitRecord) -> list[Effect]:
        if self.gate != "closed" and not order.stage:
            if self.gate == "closing":
                return []
            if order.epoch <= self.fence:
                self._pending = None
                raise RefusedError(
                    f"{self.engine}: order to prepare epoch {order.epoch}, in which the gate was opened: dropped"
                )
            self.fence = order.epoch
            return self._close()
        self.fence = order.epoch
        self.applying, self._pending = None, None
        self._work = _Work(order, dict.fromkeys(self.ranks, "handed"))
        return [StopFetch(order.epoch - 1), *(ToRank(r, PrepareRank(order, record)) for r in self.ranks)]

    def learned(self, record: CommitRecord, states: Mapping[str, RankState]) -> list[Effect]:
        """LearnCommit: every rank has learned this K.  Orders the gate to open if it may, or asks to join (D12, D15).

        Args:
            record: K as it was read.
            states: what each rank answered.
        """
        assert set(states) == set(self.ranks)
        if self._work is not None and record.epoch > self._work.order.epoch:
            self._work, self.applying = None, None  # every rank has dropped it
        ranks = list(states.values())
        if self.gate != "closed" or record.epoch < max(self.fence, *(s.fence for s in ranks)):
            return []
        under_way = record.open is not None and not record.open.stopped
        here = all(s.committed_here for s in ranks)
        admitted = Member(self.engine, self.incarnation) in record.members and not under_way
        clean = all(s.state.clean and s.state.version == record.version for s in ranks)
        busy = any(s.epoch == record.epoch and (under_way or s.stage in _BUSY) for s in ranks)
        if clean and (here or admitted) and not busy:
            # What was acknowledged may be served while the next attempt is opened without this engine.
            epoch = record.committed.epoch if under_way and record.committed is not None else record.epoch
            if self.opening == (epoch, record.version):
                return []
            self.opening = (epoch, record.version)
            return [StopFetch(epoch), OpenGate(epoch, record.version)]
        ordered = self._pending is not None or (self._work is not None and not here)
        if under_way or busy or ordered or self._asked_at == (record.epoch, record.version):
            return []
        self._asked_at = (record.epoch, record.version)
        return [AskToJoin()]

    def record_lost(self) -> list[Effect]:
        """LoseRecord: K was not reached for ``serve_lease_s``: what is served may be stale for all one knows (D16)."""
        if self.gate != "open":
            return []
        self.gate = "closing"
        return [Step(self.engine, "LoseRecord", self.fence), CloseGate(self.fence)]

    # ------------------------------------------------------------ the gate

    def gate_closed(self, epoch: int) -> list[Effect]:
        """GateClosed: no request is inside; what waited for it goes on."""
        if self.gate != "closing" or epoch > self.fence:
            return []
        self.gate, self.serving = "closed", None
        apply = self._apply(self._work) if self._work is not None and self.applying is not None else []
        return [Step(self.engine, "GateClosed", epoch), *apply, ReadRecord()]

    def gate_ready(self, epoch: int) -> list[Effect]:
        """OpenGate: the caches are reset; requests are let in if nothing was ordered since that forbids it.

        Raises:
            RefusedError: the fence has passed the gate order, or a rank was prepared since, be it for the very epoch of
                the gate order: it may come to write.  Then the gate order is forgotten and the gate stays closed.  Also
                if it is no gate order that is on its way; then nothing is changed (DESIGN D6, D9, D12).
        """
        opening = self.opening
        if opening is None or opening[0] != epoch:
            raise RefusedError(f"{self.engine}: the gate was not ordered to open for epoch {epoch}")
        self.opening = None
        if epoch < self.fence:
            raise RefusedError(
                f"{self.engine}: gate order of epoch {epoch} refused: the gate's fence is at {self.fence}"
            )
        if self._work is not None and not _BUSY.isdisjoint(self._work.stages.values()):
            raise RefusedError(
                f"{self.engine}: gate order of epoch {epoch} refused: a rank was prepared for epoch "
                f"{self._work.order.epoch} since"
            )
        self.gate, self.serving, self._reported = "open", opening[1], epoch
        step = Step(self.engine, "OpenGate", epoch, str(opening[1]), version=opening[1])
        return [step, LetIn(opening[1]), ReportServing(*opening)]

    def gate_stuck(self, reason: str) -> list[Effect]:
        """The gate would not close, or caches would not reset: this engine cannot go on in this epoch."""
        reason = cut(reason)
        if self.opening is not None:
            self.opening = None
            return [GiveUp(reason)]
        if self.gate != "closing":
            return []
        self.gate = "open"  # nothing was written: the engine goes on serving what it served
        order, self._pending = self._pending, None
        if self.applying is not None and self._work is not None:
            self.applying, self._work.failed = None, True
            order = order or self._work.order
        if order is None:
            return []
        return [Step(self.engine, "FailAttempt", order.epoch, reason), ReportFailed(order.epoch, reason)]

    # ------------------------------------------------------------ answers of the ranks

    def rank_prepared(self, rank: str, answer: RankPrepared) -> list[Effect]:
        """Prepare: with the last rank's fence the engine is prepared (DESIGN D6, D9)."""
        w = self._move(rank, answer.epoch, "handed", "fenced")
        if w is None:
            return []
        w.states[rank] = answer.state
        if not w.all_are("fenced"):
            return []
        fetch: list[Effect] = [StartFetch(w.order)] if w.order.stage else []
        report = ReportPrepared(answer.epoch, engine_state(w.states.values()))
        return [Step(self.engine, "Prepare", answer.epoch), report, *fetch]

    def rank_staged(self, rank: str, answer: RankStaged) -> list[Effect]:
        """With the last rank's stage the engine is staged (DESIGN D18)."""
        w = self._move(rank, answer.epoch, "fenced", "staged")
        return [ReportStaged(answer.epoch)] if w is not None and w.all_are("staged") else []

    def rank_acknowledged(self, rank: str, answer: RankAcknowledged) -> list[Effect]:
        """With the last rank's acknowledgement the engine holds everything of the epoch (DESIGN D9)."""
        w = self._move(rank, answer.epoch, "applying", "acknowledged")
        if w is None:
            return []
        w.roots[rank] = answer.root
        if not w.all_are("acknowledged"):
            return []
        self.applying = None
        stop = StopFetch(answer.epoch)
        if len(set(w.roots.values())) > 1:
            w.failed = True
            found = ", ".join(f"rank {r}: {root}" for r, root in w.roots.items())
            reason = cut(f"the ranks acknowledged different manifests, so that they hold different weights: {found}")
            return [Step(self.engine, "FailAttempt", answer.epoch, reason), stop, ReportFailed(answer.epoch, reason)]
        return [stop, ReportAcknowledged(answer.epoch, answer.root)]

    def rank_failed(self, rank: str, answer: RankFailed) -> list[Effect]:
        """The first rank that cannot acknowledge the epoch fails it for the engine (DESIGN D9)."""
        w = self._work
        if w is None or w.order.epoch != answer.epoch:
            return []
        w.stages[rank] = "failed"
        if w.failed:
            return []
        w.failed, self.applying = True, None
        where = f"rank {rank}: " if len(self.ranks) > 1 else ""
        return [StopFetch(answer.epoch), ReportFailed(answer.epoch, cut(where + answer.reason))]

    # ------------------------------------------------------------ inside

    def _check_record(self, record_id: str, what: str) -> None:
        if record_id != self.record_id:
            raise RefusedError(f"{self.engine}: {what} of record {record_id!r}, this one obeys {self.record_id!r}")

    def _check_fence(self, epoch: int) -> None:
        if epoch < self.fence:
            raise RefusedError(f"{self.engine}: order of epoch {epoch} refused: the gate's fence is at {self.fence}")

    def _close(self) -> list[Effect]:
        self.gate = "closing"
        return [Step(self.engine, "CloseGate", self.fence), CloseGate(self.fence)]

    def _move(self, rank: str, epoch: int, before: str, after: str) -> _Work | None:
        """Note a rank's answer; None if it is not one that was waited for."""
        w = self._work
        if w is None or w.order.epoch != epoch or w.stages[rank] != before:
            return None
        w.stages[rank] = after
        return w


def engine_state(states: Iterable[StorageState]) -> StorageState:
    """What an engine's storage holds: what all its ranks hold, and what any of them is torn by (DESIGN D9)."""
    ranks = list(states)
    versions, digests = {s.version for s in ranks}, {s.content_digest for s in ranks}
    torn = {mark for s in ranks for mark in s.torn_by}
    return StorageState(
        versions.pop() if len(versions) == 1 else None,
        digests.pop() if len(digests) == 1 else "",
        tuple(sorted(torn)),
    )
