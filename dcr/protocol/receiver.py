"""The receiver: one rollout rank that holds resident storage.  Its memory lives and dies with that storage (D7)."""

from dataclasses import dataclass, field

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, manifest_root
from dcr.protocol.messages import Prepare, StorageState, cut
from dcr.protocol.record import CommitRecord
from dcr.protocol.step import Step

RESTORE = "restore"
"""Stands in ``torn_by`` for the writes of a restore session."""
DENSE = "dense"
"""Stands in ``torn_by`` for the writes of a dense attempt: they touch elements that no changed set repairs."""
UNKNOWN = "unknown"
"""Stands in ``torn_by`` for storage of which nothing is known: nothing was loaded, or not what a version holds."""

_TEARS = {Kind.RESTORE: RESTORE, Kind.DENSE: DENSE}

# ---------------------------------------------------------------- effects


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


Effect = Step | BeginWrite | Synchronise | RankPrepared | RankAcknowledged | RankFailed | RankState


# ---------------------------------------------------------------- the role


@dataclass
class _Attempt:
    order: Prepare
    armed: bool
    """Storage admits this kind of payload."""
    applying: bool = False
    manifests: dict[str, Manifest] = field(default_factory=dict)
    seen: dict[PayloadIdentity, str] = field(default_factory=dict)
    entries: dict[PayloadIdentity, int] = field(default_factory=dict)
    written: set[PayloadIdentity] = field(default_factory=set)
    failed: str = ""
    synchronising: bool = False
    root: str = ""


class Receiver:
    """The storage of one rank, as the protocol sees it.

    Between prepare and acknowledge::

        prepare -> [Fence] -> open_apply -> (payload -> [BeginWrite] -> write_ended)* , manifest* -> [Synchronise]
                -> synchronised -> [Acknowledge] -> learn(K) -> clean at the target

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
        self._attempt: _Attempt | None = None
        self._writing: PayloadIdentity | None = None
        self._acknowledged: dict[int, tuple[int, str]] = {}  # epoch -> (target, root)

    @property
    def state(self) -> StorageState:
        """What storage holds (DESIGN D5)."""
        return StorageState(self.version, self.content_digest, tuple(sorted(self.torn_by)))

    @property
    def writing(self) -> bool:
        """True while a payload is being written."""
        return self._writing is not None

    # ------------------------------------------------------------ orders

    def prepare(self, order: Prepare) -> list[Effect]:
        """Fence: refuse older epochs from here on; drop what was staged for them (DESIGN D6).

        The caller must not call this while a write is under way: it lets the write end first.

        Raises:
            RefusedError: the order is of another record, or below the fence.
        """
        self._check_order(order.record_id, order.epoch)
        assert self._writing is None, "prepare while a write is under way"
        a = self._attempt
        if a is not None and a.order.epoch == order.epoch:
            if a.order != order:
                raise RefusedError(f"{self.name}: two different prepare orders for epoch {order.epoch}")
            return [RankPrepared(order.epoch, self.state)]
        self.fence = order.epoch
        if (
            self.version is None
            and not self.torn_by
            and order.base.baseline_id
            and self.content_digest == order.base.baseline_id
        ):
            # What the loader was fed is the very version that the leader names (DESIGN D2).
            self.version = order.base.version
        self._attempt = _Attempt(order, armed=admits(self.state, order.base))
        return [Step(self.name, "Fence", order.epoch, order.base.kind.value), RankPrepared(order.epoch, self.state)]

    def raise_fence(self, epoch: int) -> None:
        """Fence without an attempt: what a member does on reading an epoch that it was not told of."""
        assert self._writing is None, "fence while a write is under way"
        if epoch > self.fence:
            self.fence = epoch
            self._attempt = None

    def open_apply(self, record_id: str, epoch: int) -> list[Effect]:
        """OpenApply: payloads of the prepared epoch may be written.

        Raises:
            RefusedError: another record, below the fence, or an epoch that was never prepared.
        """
        self._check_order(record_id, epoch)
        a = self._attempt
        if a is None or a.order.epoch != epoch:
            raise RefusedError(f"{self.name}: open_apply for epoch {epoch}, which was not prepared here")
        if a.applying:
            return []
        a.applying = True
        steps: list[Effect] = [Step(self.name, "OpenApply", epoch)]
        if not a.armed:
            return steps + self._fail(a, self._why_not_armed(a.order.base))
        return steps + self._complete(a)

    # ------------------------------------------------------------ payloads

    def payload(self, identity: PayloadIdentity, base: Base, digest: str, entries: int) -> list[Effect]:
        """Deliver: a payload whose bytes are intact arrived.

        Duplicates and payloads of fenced epochs change nothing and give no effects.

        Raises:
            RefusedError: a payload that no open attempt of this receiver expects; nothing is changed.
        """
        if identity.record_id != self.record_id:
            raise RefusedError(f"{self.name}: payload {_text(identity)} is of record {identity.record_id!r}")
        if identity.epoch < self.fence:
            return []
        a = self._attempt
        if a is None or identity.epoch != a.order.epoch or not a.applying:
            raise RefusedError(f"{self.name}: payload {_text(identity)} came before its epoch was opened for applying")
        if a.failed:
            return []
        wrong = self._mismatch(a.order, identity.target, identity.owner, identity.owner_incarnation, base)
        if wrong:
            return self._fail(a, f"payload {_text(identity)}: {wrong}")
        if identity in a.seen:
            if a.seen[identity] != digest:
                return self._fail(a, f"payload {_text(identity)} came twice with different bytes")
            return []
        if len(a.seen) >= self.payloads_max:
            return self._fail(a, f"more than {self.payloads_max} payloads in one attempt")
        m = a.manifests.get(identity.owner)
        if m is not None and not _lists(m, identity, digest, entries):
            return self._fail(a, f"payload {_text(identity)} is not the one that its owner's manifest lists")
        assert self._writing is None, "one payload is written at a time"
        a.seen[identity] = digest
        a.entries[identity] = entries
        self._writing = identity
        # Marked unclean before the first byte, so that no crash or error can leave torn storage that looks clean (D5).
        self.torn_by |= {_TEARS.get(base.kind, base.candidate)}
        # What earlier epochs left here is gone: no later reading of K may take storage for one of them.
        self._acknowledged.clear()
        return [Step(self.name, "BeginWrite", identity.epoch, _text(identity)), BeginWrite(identity)]

    def write_ended(self, identity: PayloadIdentity) -> list[Effect]:
        """EndWrite: every entry of the payload is in place."""
        a = self._write_is_over(identity)
        a.written.add(identity)
        return [Step(self.name, "EndWrite", identity.epoch, _text(identity)), *self._complete(a)]

    def write_failed(self, identity: PayloadIdentity, reason: str) -> list[Effect]:
        """FailWrite: the payload may be in part in place; it is never tried again in its epoch (DESIGN D5)."""
        a = self._write_is_over(identity)
        return [
            Step(self.name, "FailWrite", identity.epoch, _text(identity)),
            *self._fail(a, f"payload {_text(identity)}: {reason}"),
        ]

    def manifest(self, m: Manifest) -> list[Effect]:
        """DeliverManifest: an owner's seal arrived.

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
        if a.failed:
            return []
        wrong = self._mismatch(a.order, m.target, m.owner, m.owner_incarnation, m.base)
        if not wrong and [p.sequence for p in m.payloads] != list(range(len(m.payloads))):
            wrong = "its payloads are not numbered 0, 1, 2, ..."
        if wrong:
            return self._fail(a, f"manifest of {m.owner}: {wrong}")
        if m.owner in a.manifests:
            if a.manifests[m.owner] != m:
                return self._fail(a, f"{m.owner} sealed epoch {m.epoch} twice with different manifests")
            return []
        for identity, digest in a.seen.items():
            if identity.owner == m.owner and not _lists(m, identity, digest, a.entries[identity]):
                return self._fail(a, f"payload {_text(identity)} is not the one that its owner's manifest lists")
        a.manifests[m.owner] = m
        return [Step(self.name, "DeliverManifest", m.epoch, m.owner), *self._complete(a)]

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
        self._acknowledged[epoch] = (a.order.target, a.root)
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
        """LearnCommit: the node read K.  What was acknowledged and is committed is what storage now holds (D12)."""
        if record.record_id != self.record_id:
            raise RefusedError(f"{self.name}: record {record.record_id!r} is not {self.record_id!r}")
        effects: list[Effect] = []
        c = record.committed
        here = c is not None and self._acknowledged.get(c.epoch) == (c.version, c.manifest_root)
        if c is not None and here and (self.version != c.version or self.torn_by):
            self.version, self.content_digest, self.torn_by = c.version, record.baseline_id, frozenset()
            effects.append(Step(self.name, "LearnCommit", c.epoch))
        if (
            self.version is None
            and not self.torn_by
            and self.content_digest == record.baseline_id
            and record.open is None
        ):
            self.version = record.version
        # An older attempt than K's is dead: what is late of it must find the fence up, for the gate may open now.
        self.raise_fence(record.epoch)
        return [*effects, RankState(self.state, self.fence, here)]

    # ------------------------------------------------------------ inside

    def _check_order(self, record_id: str, epoch: int) -> None:
        if record_id != self.record_id:
            raise RefusedError(f"{self.name}: order of record {record_id!r}; this engine obeys {self.record_id!r}")
        if epoch < self.fence:
            raise RefusedError(f"{self.name}: order of epoch {epoch} refused: the fence is at {self.fence}")

    def _mismatch(self, order: Prepare, target: int, owner: str, incarnation: int, base: Base) -> str:
        if target != order.target:
            return f"it is for version {target}, this attempt for {order.target}"
        if base != order.base:
            return f"it was made against {base}, this attempt is against {order.base}"
        known = {o.owner: o.incarnation for o in order.owners}
        if known.get(owner) != incarnation:
            return f"{owner} (incarnation {incarnation}) is not an owner of this attempt"
        return ""

    def _why_not_armed(self, base: Base) -> str:
        held = "no known version" if self.version is None else f"version {self.version}"
        torn = f", torn by {', '.join(sorted(self.torn_by))}" if self.torn_by else ""
        return f"a {base.kind.value} payload against version {base.version} was refused: storage holds {held}{torn}"

    def _write_is_over(self, identity: PayloadIdentity) -> _Attempt:
        assert self._writing == identity, "a write ended that had not begun"
        self._writing = None
        a = self._attempt
        assert a is not None
        assert a.order.epoch == identity.epoch, "the fence passed a write that was under way"
        return a

    def _fail(self, a: _Attempt, reason: str) -> list[Effect]:
        if a.failed or a.root:
            return []
        a.failed = cut(reason)
        return [Step(self.name, "FailAttempt", a.order.epoch, a.failed), RankFailed(a.order.epoch, a.failed)]

    def _complete(self, a: _Attempt) -> list[Effect]:
        if a.failed or a.root or a.synchronising or not a.applying or self._writing is not None:
            return []
        if set(a.manifests) != {o.owner for o in a.order.owners}:
            return []
        if any(m.identity(p.sequence) not in a.written for m in a.manifests.values() for p in m.payloads):
            return []
        base = a.order.base
        if base.kind is Kind.RESTORE:
            total = sum(int(m.content_digest, 16) for m in a.manifests.values()) % (1 << 128)
            if f"{total:032x}" != base.baseline_id:
                return self._fail(a, f"the restored content is not that of version {base.version}: digest {total:032x}")
        elif base.kind is not Kind.DENSE and not a.armed:
            return self._fail(a, self._why_not_armed(base))
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


def _lists(m: Manifest, identity: PayloadIdentity, digest: str, entries: int) -> bool:
    if identity != m.identity(identity.sequence) or not 0 <= identity.sequence < len(m.payloads):
        return False
    p = m.payloads[identity.sequence]
    return p.digest == digest and p.entries == entries


def _text(i: PayloadIdentity) -> str:
    return f"{i.owner}/{i.sequence} of epoch {i.epoch}"
