"""K, write by write, as leaders wrote it down, and the one write that a leader may have died with."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from dcr.modelcheck.eventlog.read import Line, RejectedError
from dcr.protocol.errors import RefusedError
from dcr.protocol.event import Event
from dcr.protocol.record import CommitRecord
from dcr.protocol.step import Step

WRITES = ("CreateRecord", "TakeOver", "OpenAttempt", "Commit", "OpenRestore", "Admit", "Stop", "Abandon")


@dataclass(frozen=True)
class Write:
    """One compare-and-set."""

    line: Line
    revision: int
    record: CommitRecord


def write_of(line: Line) -> Write | None:
    """The write of K that a line tells of; None if it tells of none."""
    step = line.event.step
    if line.event.role != "coordinator" or step is None or step.action not in WRITES:
        return None
    if step.record is None or step.revision < 1:
        raise RejectedError(line, "a write of K without K and its revision")
    return Write(line, step.revision, step.record)


class History:
    """K from the first write that the logs have, in the order of its revisions.

    Args:
        lines: of all leaders.

    Attributes:
        first: K before the first line; the record that was created, or what the first leader found.
        first_revision: its revision.
        writes: what followed.
        created: the line that created K, if the logs have it.
        wrong: what is wrong with a line that does not follow, by its id.

    Raises:
        RefusedError: no leader wrote K.
        RejectedError: K cannot have become what a line says.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        found = sorted((w for line in lines if (w := write_of(line))), key=lambda w: (w.revision, _rank(w)))
        if not found:
            raise RefusedError("no leader wrote K in these logs: there is nothing that a run could be held to")
        first, *rest = found
        self.created: Line | None = None
        if first.line.event.action == "CreateRecord":
            self.first, self.first_revision, self.created = first.record, first.revision, first.line
        elif first.line.event.action == "TakeOver":
            self.first, self.first_revision = _before(first.record, "(before)", 1), first.revision - 1
            rest = found
        else:
            raise RejectedError(first.line, "the log of the leader that wrote K before this is not there")
        self.writes: list[Write] = []
        self.wrong: dict[int, str] = {}
        self._fill(rest)
        self._index()

    def _fill(self, found: list[Write]) -> None:
        record, revision = self.first, self.first_revision
        for w in found:
            if w.revision == revision + 2 and w.line.event.action == "TakeOver":
                unlogged = _between(record, w)
                self.writes.append(unlogged)
                record, revision = unlogged.record, unlogged.revision
            elif w.revision > revision + 1:
                missing = f"revision {revision + 1}" + (f" to {w.revision - 1}" if w.revision > revision + 2 else "")
                self.wrong[id(w.line)] = f"K was written at {missing} before, and no log says by whom"
            self.writes.append(w)
            record, revision = w.record, max(w.revision, revision)

    @property
    def last_revision(self) -> int:
        """Of the last write."""
        return self.writes[-1].revision if self.writes else self.first_revision

    def _index(self) -> None:
        """What is asked of every line is looked up: a night's logs have a hundred thousand writes."""
        self._revisions = [w.revision for w in self.writes]
        self._epochs = list(accumulate((w.record.epoch for w in self.writes), max))
        self._opened: dict[int, Write] = {}
        self._committed: dict[int, Write] = {}
        self._commit_after: dict[int, Write | None] = {}
        for w in self.writes:
            self._opened.setdefault(w.record.epoch, w)
            if w.line.event.action == "Commit" and w.record.committed is not None:
                self._committed.setdefault(w.record.committed.epoch, w)
        later: Write | None = None
        for w in reversed(self.writes):
            self._commit_after[id(w)] = later
            later = w if w.line.event.action == "Commit" else later

    def at(self, revision: int) -> Write | None:
        """The write that whoever read this revision saw; None for K as it was at first."""
        return self._write(bisect_right(self._revisions, revision) - 1)

    def after(self, revision: int) -> Write | None:
        """The next write."""
        return self._write(bisect_right(self._revisions, revision))

    def _write(self, number: int) -> Write | None:
        return self.writes[number] if 0 <= number < len(self.writes) else None

    def opened(self, epoch: int) -> Write | None:
        """The write with which an epoch began."""
        return self._opened.get(epoch)

    def passed(self, epoch: int) -> Write | None:
        """The write with which an epoch ended."""
        if epoch not in self._opened and epoch != self.first.epoch:
            return None
        return self._write(bisect_right(self._epochs, epoch))

    def committed(self, epoch: int) -> Write | None:
        """The write that committed an epoch."""
        return self._committed.get(epoch)

    def commit_after(self, write: Write) -> Write | None:
        """The next commit."""
        return self._commit_after[id(write)]


def _rank(w: Write) -> int:
    """Of two writes that claim one revision the take-over comes first: it is what made the other's leader a zombie."""
    return 0 if w.line.event.action in ("TakeOver", "CreateRecord") else 1


def _before(after: CommitRecord, leader: str, token: int) -> CommitRecord:
    """K before a take-over."""
    return msgspec.structs.replace(after, leader=leader, fencing_token=token, epoch=after.epoch - 1)


def _between(before: CommitRecord, taken_over: Write) -> Write:
    """The write that a leader died with, before it could write it down: the next leader found it in K."""
    after = _before(taken_over.record, before.leader, before.fencing_token)
    changed = {f for f in after.__struct_fields__ if getattr(after, f) != getattr(before, f)}
    was, now = before.open, after.open
    if "committed" in changed:
        reason = "Commit"
    elif now is not None and (was is None or now.attempts != was.attempts):
        reason = "OpenAttempt"
    elif now is None and was is not None:
        reason = "Abandon"
    elif was is not None and now is not None and now.stopped and not was.stopped:
        reason = "Stop"
    elif changed == {"members"}:
        reason = "Admit"
    elif changed == {"epoch"}:
        reason = "OpenRestore"
    else:
        raise RejectedError(taken_over.line, f"it found K with {', '.join(sorted(changed))} as no write leaves them")
    revision = taken_over.revision - 1
    # Whom a restore was to take in stands in no K, and nobody was told: whoever is there stands for them.
    members = after.members if reason == "OpenRestore" else ()
    step = Step(before.leader, reason, after.epoch, record=after, revision=revision, members=members)
    event = Event(0, "coordinator", before.leader, 0, step=step)
    why = f"not written down: {before.leader} wrote revision {revision} and was gone"
    line = Line(taken_over.line.path, taken_over.line.number, event, unlogged=why)
    return Write(line, revision, after)
