"""The engines that a coordinator knows: what each one's storage holds, and what may be asked of it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import CONTROL_VERSION, Join, StorageState, cut
from dcr.protocol.receiver import admits
from dcr.protocol.record import CommitRecord, Member

ATTEMPT_FAILURES_MAX = 2
"""An engine that fails so many attempts of one push is left out of the next, if enough others are left."""

FAILURE_CHARS_MAX = 400
"""Of what an engine failed at, so much is remembered."""

ENGINES_MAX = 4096
"""So many engines are remembered; of more, those are forgotten that nobody needs and that were lost first."""


@dataclass
class Engine:
    """One engine, as its last report left it."""

    join: Join
    state: StorageState
    connected: bool = True
    silent: bool = False
    """It let a time-out pass and has not been heard of since."""
    refused: str = ""
    """Why it is not taken in, as it is."""
    unrestorable: bool = False
    """That is because its restores failed, so it is forgiven once one has not."""
    restore_failures: int = 0
    attempt_failures: int = 0
    """Attempts of the push under way that it failed."""
    engaged: int = 0
    """The epoch that it was last ordered to prepare, until it acknowledges or fails it."""
    failure: str = ""
    """What it failed last, or let pass, and why; empty if it has come through something since."""
    evicted: int = 0
    """The epoch of the attempt that was opened without it though it was a member; 0 if none was."""

    @property
    def member(self) -> Member:
        """The engine as this incarnation."""
        return Member(self.join.engine, self.join.incarnation)

    @property
    def standing(self) -> str:
        """What keeps it from taking part, or what it holds; for people."""
        if self.refused:
            return f"refused: {self.refused}"
        if not self.connected:
            return "not connected"
        return "at fault" if self.at_fault else f"holds {self.held}"

    @property
    def held(self) -> str:
        """What its storage holds; for people."""
        return _held(self.state)

    @property
    def at_fault(self) -> bool:
        """True if attempts had better go on without it: it is silent, or failed one attempt after another."""
        return self.silent or self.attempt_failures >= ATTEMPT_FAILURES_MAX

    def failed(self, what: str) -> None:
        """It failed this, or let a time-out pass, as is said here with the reason."""
        self.failure = what if len(what) <= FAILURE_CHARS_MAX else f"{what[:FAILURE_CHARS_MAX]} ..."

    def fell_silent(self, reason: str) -> None:
        """It let a time-out pass."""
        self.silent = True
        self.failed(reason)

    def restore_failed(self, reason: str, failures_max: int) -> None:
        """A restore of it failed; it is refused once that has happened so often."""
        self.failed(f"its restore failed: {reason}")
        self.restore_failures += 1
        if self.restore_failures >= failures_max:
            self.refused = f"its restore failed {self.restore_failures} times, last: {reason}"
            self.unrestorable = True

    def restored(self, record: CommitRecord) -> None:
        """Its storage is clean at the committed version."""
        self.state = StorageState(record.version, record.baseline_id, ())
        self.restore_failures, self.failure = 0, ""
        if self.unrestorable:
            self.refused, self.unrestorable = "", False

    def seen(self, record: CommitRecord) -> StorageState:
        """Its state, with the version filled in where the content digest tells it (DESIGN D2)."""
        s = self.state
        if s.version is None and s.clean and s.content_digest == record.baseline_id:
            return StorageState(record.version, s.content_digest, ())
        return s

    def clean_at(self, record: CommitRecord) -> bool:
        """True if its storage is clean at the committed version."""
        s = self.seen(record)
        return s.clean and s.version == record.version

    def holds_committed(self, record: CommitRecord) -> bool:
        """True if its storage is clean at the committed version, and no order of K's epoch may yet write to it.

        An engine that was prepared for a restore, even if it needs none, keeps its gate closed until the epoch moves
        or it has acknowledged: it has to be restored again if that session came to nothing.
        """
        return self.clean_at(record) and (self.engaged == 0 or self.engaged != record.epoch)


def _held(s: StorageState) -> str:
    version = "no known version" if s.version is None else f"version {s.version}"
    return f"{version}, torn by {', '.join(s.torn_by)}" if s.torn_by else version


@dataclass
class Fleet:
    """Every engine by name, whether a member or not.

    Args:
        wire_version: version of the payload format that the owners write.
        operations: relative operations that the owners can emit, the preferred one first.
    """

    wire_version: int
    operations: tuple[str, ...]
    engines: dict[str, Engine] = field(default_factory=dict)

    def join(self, report: Join) -> Engine:
        """Take a first or repeated ``Join``; the engine returned may be a refused one."""
        old = self.engines.get(report.engine)
        same = old is not None and old.join.incarnation == report.incarnation
        e = Engine(report, report.state)
        if old is not None and same:
            e.restore_failures, e.engaged = old.restore_failures, old.engaged
            e.failure, e.evicted = old.failure, old.evicted
            e.refused, e.unrestorable = old.refused, old.unrestorable  # what was refused stays so until it restarts
        why = self._why_refused(report)
        if why:
            e.refused, e.unrestorable = why, False
        self._heard_of(e)
        return e

    def lost(self, e: Engine) -> None:
        """The connection of this engine ended."""
        e.connected = False
        self._heard_of(e)

    def forget(self, needed: Iterable[Member]) -> None:
        """Forget engines without a connection beyond ENGINES_MAX, those that were heard of first, first.

        Args:
            needed: members of K and of the session; they are never forgotten.
        """
        surplus = len(self.engines) - ENGINES_MAX
        if surplus <= 0:
            return
        names = {m.engine for m in needed}
        gone = [name for name, e in self.engines.items() if not e.connected and name not in names]
        for name in gone[:surplus]:
            del self.engines[name]

    def of(self, m: Member) -> Engine | None:
        """The engine of this member, if it still is that incarnation."""
        e = self.engines.get(m.engine)
        return e if e is not None and e.join.incarnation == m.incarnation else None

    def present(self, leave_out: Collection[str] = ()) -> list[Engine]:
        """Engines that are connected and not refused, by name, but for some."""
        known = sorted(self.engines.items())
        return [e for name, e in known if e.connected and not e.refused and name not in leave_out]

    @property
    def at_fault(self) -> frozenset[str]:
        """Names of engines that attempts had better go on without."""
        return frozenset(name for name, e in self.engines.items() if e.at_fault)

    def describe(self) -> str:
        """Every engine heard of, and what keeps it from taking part; for people."""
        known = [f"{name} ({e.standing})" for name, e in sorted(self.engines.items())]
        return ", ".join(known) or (
            "none asks to take part: start one; if one runs, its log says what it waits for (control, record_id and "
            "delivery must be the same on both sides)"
        )

    def forgive(self) -> bool:
        """Count connected engines that are at fault as usable again; True if there were any."""
        at_fault = [e for e in self.engines.values() if e.at_fault and e.connected]
        for e in at_fault:
            e.silent, e.attempt_failures = False, 0
        return bool(at_fault)

    def admitting(self, record: CommitRecord, base: Base, leave_out: Collection[str] = ()) -> list[Engine]:
        """Engines present, but for some, whose storage admits payloads against this base (DESIGN D4)."""
        found = [e for e in self.present(leave_out) if admits(e.seen(record), base)]
        if base.kind is Kind.RELATIVE and not self.common_operations(found):
            return []
        return found

    def common_operations(self, engines: Iterable[Engine]) -> tuple[str, ...]:
        """Relative operations that all of them offer, in the owners' order of preference."""
        offers = [set(e.join.operations) for e in engines]
        return tuple(o for o in self.operations if all(o in offer for offer in offers))

    def _heard_of(self, e: Engine) -> None:
        """Keep the engines in the order in which they came or went."""
        self.engines.pop(e.join.engine, None)
        self.engines[e.join.engine] = e

    def _why_refused(self, j: Join) -> str:
        return cut(self._why(j))

    def _why(self, j: Join) -> str:
        if j.control_version != CONTROL_VERSION:
            return f"it speaks control version {j.control_version}, the leader speaks {CONTROL_VERSION}"
        if j.wire_version != self.wire_version:
            return f"it reads wire version {j.wire_version}, the owners write {self.wire_version}"
        if j.refused:
            name, why = min(j.refused.items())
            return f"its loader cannot take {len(j.refused)} canonical tensor(s), first {name}: {why}"
        return ""
