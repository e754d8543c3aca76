"""The receiver: one rollout rank that holds resident storage.  Its memory lives and dies with that storage (D7)."""

from dataclasses import dataclass

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, manifest_root
from dcr.protocol.messages import Prepare, StorageState, cut
from dcr.protocol.rank_attempt import RankAttempt, name_of
from dcr.protocol.record import CommitRecord, OwnerRef
from dcr.protocol.step import Step

RESTORE = "restore"
"""Stands in ``torn_by`` for the writes of a restore session."""
DENSE = "dense"
"""Stands in ``torn_by`` for the writes of a dense attempt: they touch elements that no changed set repairs."""
UNKNOWN = "unknown"
"""Stands in ``torn_by`` for storage of which nothing is known: nothing was loaded, or not what a version holds."""

_TEARS = {Kind.RESTORE: RESTORE, Kind.DENSE: DENSE}


class PrepareRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The node's order to a rank: the leader's order to prepare, and K as it was read after that order came (D6)."""

    order: Prepare
    record: CommitRecord


# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class Hold:
    """Keep this payload's bytes in host memory: they are written when the stage is applied (DESIGN D18)."""

    identity: PayloadIdentity


@dataclass(frozen=True)
class ApplyStaged:
    """Hand every payload that is held for this epoch to ``payload`` again: now they are written."""

    epoch: int


@dataclass(frozen=True)
class DropStage:
    """Let go of what is held for this epoch and the ones before."""

    epoch: int


@dataclass(frozen=True)
class BeginWrite:
    """Write this payload into resident storage now; answer with ``write_ended`` or ``write_failed``."""

    identity: PayloadIdentity


@dataclass(frozen=True)
class Synchronise:
    """Wait until every write has reached storage, run the checks that were asked for, answer ``synchronised``."""

    epoch: int


class RankPrepared(msgspec.Struct, frozen=True, tag=True):
    """The fence is up and no older write can take effect."""

    epoch: int
    state: StorageState


class RankStaged(msgspec.Struct, frozen=True, tag=True):
    """Everything of this epoch is held in host memory."""

    epoch: int


class RankAcknowledged(msgspec.Struct, frozen=True, tag=True):
    """Everything of this epoch is applied and synchronised."""

    epoch: int
    root: str


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """This epoch cannot be acknowledged any more."""

    epoch: int
    reason: str


class RankState(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``learn``: what storage holds, seen through the record that was read."""

    state: StorageState
    fence: int
    committed_here: bool
    """The record's committed epoch is one that this incarnation acknowledged (DESIGN D12)."""
    epoch: int
    """Of the attempt that the rank is prepared for; 0 if there is none."""
    stage: str
    """How far that attempt is: ``idle``, ``fenced``, ``staged``, ``applying``, ``acknowledged`` or ``failed``."""


Effect = (
    Step
    | Hold
    | ApplyStaged
    | DropStage
    | BeginWrite
    | Synchronise
    | RankPrepared
    | RankStaged
    | RankAcknowledged
    | RankFailed
    | RankState
)


# ---------------------------------------------------------------- the role


class Receiver:
    """The storage of one rank, as the protocol sees it.

    Between prepare and acknowledge::

        prepare -> [Fence] -> open_apply -> (payload -> [BeginWrite] -> write_ended)* , manifest* -> [Synchronise]
                -> synchronised -> [Acknowledge] -> learn(K) -> clean at the target

    With an order to stage (DESIGN D18)::

        prepare -> [Fence] -> (payload -> [Hold])* , manifest* -> [Stage] -> open_apply -> [ApplyStaged]
                -> (payload -> [BeginWrite] -> write_ended)* -> [Synchronise] ...

    Args:
        name: the engine's name, for messages and steps.
        record_id: the record whose orders this receiver obeys.
        loaded_digest: content digest of what the loader was fed before this receiver existed; empty if unknown.
        payloads_max: how many payloads one attempt may hold.
    """

    def __init__(self, name: str, record_id: str, loaded_digest: str, payloads_max: int = 1_000_000) -> None:
        self.name = name
        self.record_id = record_id
        self.payloads_max = payloads_max
        self.fence = 0
        self.version: int | None = None
        self.content_digest = loaded_digest
        self.torn_by: frozenset[str] = frozenset() if loaded_digest else frozenset({UNKNOWN})
        self._attempt: RankAttempt | None = None
        self._writing: PayloadIdentity | None = None
        self._acknowledged: tuple[int, int, str] | None = None  # the last one: (epoch, target, root)

    @property
    def state(self) -> StorageState:
        """What storage holds (DESIGN D5)."""
        return StorageState(self.version, self.content_digest, tuple(sorted(self.torn_by)))

    @property
    def writing(self) -> bool:
        """True while a payload is being written."""
        return self._writing is not None

    @property
    def epoch(self) -> int:
        """Of the attempt that this rank is prepared for; 0 if there is none."""
        return 0 if self._attempt is None else self._attempt.order.epoch

    @property
    def acknowledged_epoch(self) -> int:
        """The epoch that was acknowledged last, if nothing was written since; 0 if there is none (DESIGN D12)."""
        return 0 if self._acknowledged is None else self._acknowledged[0]

    @property
    def seen(self) -> frozenset[PayloadIdentity]:
        """Payloads of the attempt that were begun to be written (DESIGN D7)."""
        return frozenset() if self._attempt is None else frozenset(self._attempt.seen)

    @property
    def stage(self) -> str:
        """How far that attempt is: idle, fenced, staged, applying, acknowledged or failed."""
        return "idle" if self._attempt is None else self._attempt.stage

    # ------------------------------------------------------------ orders

    def prepare(self, order: Prepare, record: CommitRecord) -> list[Effect]:
        """Fence: refuse older epochs from here on; drop what was staged for them (DESIGN D5, D6).

        K was read after the order came, so that what was committed since is known before storage is judged.  The
        caller must not call this while a write is under way: it lets the write end first.

        Args:
            order: the leader's; a repeated one is answered again.
            record: K at the order's epoch.

        Raises:
            RefusedError: the order is of another record, below the fence, or not the one that was given for its epoch;
                or K is older or newer than the order.
        """
        self._check_order(order.record_id, order.epoch)
        self._check_record(record)
        if record.epoch != order.epoch:
            age = "older" if record.epoch < order.epoch else "newer"
            raise RefusedError(
                f"{self.name}: order to prepare epoch {order.epoch} with a record at epoch {record.epoch}, which is "
                f"{age}: read the record after the order came, and drop an order that it has passed"
            )
        assert self._writing is None, "prepare while a write is under way"
        if self._attempt is not None and self.epoch == order.epoch:
            if self._attempt.order != order:
                raise RefusedError(f"{self.name}: two different prepare orders for epoch {order.epoch}")
            return [self._prepared(self._attempt)]
        dropped = self._drop()
        self._hold(self.seen_through(record))
        self.fence = order.epoch
        a = self._attempt = RankAttempt(order, armed=admits(self.state, order.base))
        if not a.armed:
            a.failed = cut(self._why_not_armed(order.base))
        fence = Step(self.name, "Fence", order.epoch, order.base.kind.value, armed=a.armed)
        return [fence, *dropped, self._prepared(a)]

    def open_apply(self, record_id: str, epoch: int) -> list[Effect]:
        """OpenApply: payloads of the prepared epoch may be written; those that are held are handed in again.

        Raises:
            RefusedError: another record, below the fence, or an epoch that was never prepared, has failed here, or is
                to be staged and is not yet (DESIGN D18).
        """
        self._check_order(record_id, epoch)
        a = self._attempt
        if a is None or a.order.epoch != epoch:
            raise RefusedError(f"{self.name}: open_apply for epoch {epoch}, which was not prepared here")
        if a.failed:
            raise RefusedError(f"{self.name}: open_apply for epoch {epoch}, which has failed here: {a.failed}")
        if a.applying:
            return []
        if a.order.stage and not a.staged:
            raise RefusedError(f"{self.name}: open_apply for epoch {epoch}, which is not staged here yet")
        a.applying = True
        staged: list[Effect] = [ApplyStaged(epoch)] if a.order.stage else []
        return [Step(self.name, "OpenApply", epoch), *staged, *self._complete(a)]

    # ------------------------------------------------------------ payloads

    def payload(self, identity: PayloadIdentity, base: Base, digest: str, entries: int) -> list[Effect]:
        """Deliver: a payload whose bytes are intact arrived, or is handed in again after it was held.

        Duplicates and payloads of fenced epochs change nothing and give no effects.  Before a stage is applied a
        payload is only held; storage is neither written nor marked (DESIGN D18).

        Raises:
            RefusedError: a payload that no open attempt of this receiver expects; nothing is changed.
        """
        if identity.record_id != self.record_id:
            raise RefusedError(f"{self.name}: payload {name_of(identity)} is of record {identity.record_id!r}")
        if identity.epoch < self.fence:
            return []
        a = self._attempt
        if a is None or identity.epoch != a.order.epoch or not (a.applying or a.order.stage):
            raise RefusedError(
                f"{self.name}: payload {name_of(identity)} came before its epoch was opened for applying"
            )
        if not a.expects(identity.owner, identity.owner_incarnation):
            raise RefusedError(
                f"{self.name}: payload {name_of(identity)} of {identity.owner} (incarnation "
                f"{identity.owner_incarnation}), which is not an owner of this attempt"
            )
        if a.failed:
            return []
        wrong = a.wrong_payload(identity, base, digest, entries)
        if wrong:
            return self._fail(a, wrong)
        arrived = a.seen if a.applying else a.held
        if identity in arrived:
            return []
        if len(arrived) >= self.payloads_max:
            return self._fail(a, f"more than {self.payloads_max} payloads in one attempt")
        a.entries[identity] = entries
        arrived[identity] = digest
        if not a.applying:
            return [Hold(identity), *self._staged(a)]
        assert a.armed
        assert self._writing is None, "one payload is written at a time"
        self._writing = identity
        # Marked unclean before the first byte, so that no crash or error can leave torn storage that looks clean (D5).
        self.torn_by |= {_TEARS.get(base.kind, base.candidate)}
        # What an earlier epoch left here is gone: no later reading of K may take storage for it.
        self._acknowledged = None
        begin = Step(self.name, "BeginWrite", identity.epoch, name_of(identity), payload=identity)
        return [begin, BeginWrite(identity)]

    def write_ended(self, identity: PayloadIdentity) -> list[Effect]:
        """EndWrite: every entry of the payload is in place."""
        a = self._write_is_over(identity)
        a.written.add(identity)
        end = Step(self.name, "EndWrite", identity.epoch, name_of(identity), payload=identity)
        return [end, *self._complete(a)]

    def write_failed(self, identity: PayloadIdentity, reason: str) -> list[Effect]:
        """FailWrite: the payload may be in part in place; it is never tried again in its epoch (DESIGN D5)."""
        a = self._write_is_over(identity)
        return [
            Step(self.name, "FailWrite", identity.epoch, name_of(identity), payload=identity),
            *self._fail(a, f"payload {name_of(identity)}: {reason}"),
        ]

    def manifest(self, m: Manifest) -> list[Effect]:
        """DeliverManifest: an owner's seal arrived; it may complete the stage, or the attempt.

        Raises:
            RefusedError: a manifest that no open attempt of this receiver expects; nothing is changed.
        """
        if m.record_id != self.record_id:
            raise RefusedError(f"{self.name}: manifest of {m.owner} is of record {m.record_id!r}")
        if m.epoch < self.fence:
            return []
        a = self._attempt
        if a is None or m.epoch != a.order.epoch:
            raise RefusedError(f"{self.name}: manifest of {m.owner} for epoch {m.epoch}, which was not prepared here")
        if not a.expects(m.owner, m.owner_incarnation):
            raise RefusedError(
                f"{self.name}: manifest of {m.owner} (incarnation {m.owner_incarnation}), which is not an owner of "
                "this attempt"
            )
        if a.failed:
            return []
        wrong = a.wrong_manifest(m)
        if wrong:
            return self._fail(a, wrong)
        if m.owner in a.manifests:
            return []
        a.manifests[m.owner] = m
        sealed = OwnerRef(m.owner, m.owner_incarnation)
        deliver = Step(self.name, "DeliverManifest", m.epoch, m.owner, owner=sealed)
        return [deliver, *self._staged(a), *self._complete(a)]

    def undeliverable(self, epoch: int, reason: str) -> list[Effect]:
        """FailDelivery: something of this epoch cannot be had or read; the epoch fails here, storage stays as it is."""
        a = self._attempt
        if a is None or a.order.epoch != epoch:
            return []
        return self._fail(a, reason)

    def synchronised(self, epoch: int) -> list[Effect]:
        """Acknowledge: everything is applied and has reached storage."""
        a = self._attempt
        if a is None or a.order.epoch != epoch or a.failed or a.root:
            return []
        assert a.synchronising
        assert self._writing is None
        a.root = manifest_root({o: m.digest() for o, m in a.manifests.items()})
        self._acknowledged = (epoch, a.order.target, a.root)
        a.held = {}  # all of it is written
        if a.order.base.kind is Kind.RESTORE:
            # The owners' baseline of a committed version, whole: checked against its digest in _complete.
            self.version = a.order.target
            self.content_digest = a.order.base.baseline_id
            self.torn_by = frozenset()
        return [Step(self.name, "Acknowledge", epoch), RankAcknowledged(epoch, a.root)]

    def synchronise_failed(self, epoch: int, reason: str) -> list[Effect]:
        """FailWrite: synchronisation or the checks after it found an error; this epoch cannot be acknowledged."""
        a = self._attempt
        if a is None or a.order.epoch != epoch:
            return []
        return self._fail(a, reason)

    # ------------------------------------------------------------ the record

    def learn(self, record: CommitRecord) -> list[Effect]:
        """LearnCommit: the node read K.  What was acknowledged and is committed is what storage now holds (D12).

        An attempt that is older than K is dropped: nothing of it can be committed any more.

        Raises:
            RefusedError: it is another record; nothing is changed.
        """
        state, here = self.seen_through(record), self._committed_here(record)
        effects: list[Effect] = []
        if here and state != self.state:
            assert record.committed is not None
            effects.append(Step(self.name, "LearnCommit", record.committed.epoch))
        self._hold(state)
        if record.epoch > self.fence:
            # What is late of an older attempt must find the fence up, for the gate may open now.
            assert self._writing is None, "fence while a write is under way"
            self.fence = record.epoch
            effects += self._drop()
        return [*effects, RankState(state, self.fence, here, self.epoch, self.stage)]

    def seen_through(self, record: CommitRecord) -> StorageState:
        """What ``learn`` would find storage to hold; nothing is changed (DESIGN D2, D12).

        Raises:
            RefusedError: it is another record.
        """
        self._check_record(record)
        if self._committed_here(record):
            return StorageState(record.version, record.baseline_id, ())
        if self.version is None and not self.torn_by and self.content_digest == record.baseline_id:
            return StorageState(record.version, record.baseline_id, ())
        return self.state

    # ------------------------------------------------------------ inside

    def _check_order(self, record_id: str, epoch: int) -> None:
        if record_id != self.record_id:
            raise RefusedError(f"{self.name}: order of record {record_id!r}; this engine obeys {self.record_id!r}")
        if epoch < self.fence:
            raise RefusedError(f"{self.name}: order of epoch {epoch} refused: the fence is at {self.fence}")

    def _check_record(self, record: CommitRecord) -> None:
        if record.record_id != self.record_id:
            raise RefusedError(f"{self.name}: record {record.record_id!r} is not {self.record_id!r}")

    def _committed_here(self, record: CommitRecord) -> bool:
        c = record.committed
        return c is not None and self._acknowledged == (c.epoch, c.version, c.manifest_root)

    def _hold(self, state: StorageState) -> None:
        self.version, self.content_digest, self.torn_by = state.version, state.content_digest, frozenset(state.torn_by)

    def _drop(self) -> list[Effect]:
        a, self._attempt = self._attempt, None
        return [DropStage(a.order.epoch)] if a is not None and a.held else []

    def _prepared(self, a: RankAttempt) -> Effect:
        return RankFailed(a.order.epoch, a.failed) if a.failed else RankPrepared(a.order.epoch, self.state)

    def _why_not_armed(self, base: Base) -> str:
        held = "no known version" if self.version is None else f"version {self.version}"
        torn = f", torn by {', '.join(sorted(self.torn_by))}" if self.torn_by else ""
        return f"a {base.kind.value} payload against version {base.version} was refused: storage holds {held}{torn}"

    def _write_is_over(self, identity: PayloadIdentity) -> RankAttempt:
        assert self._writing == identity, "a write ended that had not begun"
        self._writing = None
        a = self._attempt
        assert a is not None
        assert a.order.epoch == identity.epoch, "the fence passed a write that was under way"
        return a

    def _fail(self, a: RankAttempt, reason: str) -> list[Effect]:
        if a.failed or a.root:
            return []
        a.failed = cut(reason)
        epoch = a.order.epoch
        dropped: list[Effect] = [DropStage(epoch)] if a.held else []
        a.held = {}  # never to be applied: its memory is free at once
        return [Step(self.name, "FailAttempt", epoch, a.failed), *dropped, RankFailed(epoch, a.failed)]

    def _staged(self, a: RankAttempt) -> list[Effect]:
        if not a.order.stage or a.applying or a.lacks(a.held):
            return []
        a.staged = True
        return [Step(self.name, "Stage", a.order.epoch), RankStaged(a.order.epoch)]

    def _complete(self, a: RankAttempt) -> list[Effect]:
        if a.failed or a.root or a.synchronising or not a.applying or self._writing is not None:
            return []
        if a.lacks(a.written):
            return []
        base = a.order.base
        if base.kind is Kind.RESTORE:
            total = sum(int(m.content_digest, 16) for m in a.manifests.values()) % (1 << 128)
            if f"{total:032x}" != base.baseline_id:
                return self._fail(a, f"the restored content is not that of version {base.version}: digest {total:032x}")
        a.synchronising = True
        return [Synchronise(a.order.epoch)]


def admits(state: StorageState, base: Base) -> bool:
    """Whether storage in this state may take payloads of this kind (DESIGN D4, D5)."""
    at_base = state.version is not None and state.version == base.version
    if base.kind is Kind.RELATIVE:
        return at_base and state.clean
    if base.kind is Kind.ABSOLUTE:
        return at_base and set(state.torn_by) <= {base.candidate}
    return True
