"""K's writes as a run makes them: read on while it goes, kept in a file, and each held to what may follow the last."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dcr.control_plane.interface import ControlPlaneSettings, HistoryEntry
from dcr.protocol.record import CommitRecord

KEPT = ControlPlaneSettings().history_max
"""So many writes a control plane keeps: who reads them more rarely loses some."""
FILE = "history.ndjson"


class History:
    """The writes of K that were read so far, judged one after the other.

    Revisions and versions rise by one, an operation makes one revision, and a leader that another one has replaced
    writes nothing more.  A commit that keeps a version, and its content, is that of a rollback.  Of a write nothing is
    kept in memory but 16 bytes of its operation's digest; all of it is in the file.

    Args:
        path: takes the writes, a JSON line each.
        problems: takes what is wrong, a sentence each.
        commit: is told each commit, judges who won the version, and says whether the version's content is the same as
            it was before.
    """

    def __init__(self, path: Path, problems: list[str], commit: Callable[[HistoryEntry], bool]) -> None:
        self.revision = 0
        """Of the last write that was read."""
        self.version = 0
        self._path = path
        self._problems = problems
        self._commit = commit
        self._leader = ""
        self._replaced: set[str] = set()
        self._operations: set[bytes] = set()

    def read(self, entries: Sequence[HistoryEntry]) -> None:
        """Judge the writes that follow those before, oldest first; with a gap if some of them could not be read."""
        if entries:
            with self._path.open("ab") as out:
                out.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)
        for number, entry in enumerate(entries):
            if entry.revision != self.revision + 1:
                self._gap(entry, lost=not number and len(entries) >= KEPT)
            self._judge(entry)

    def end(self, record: CommitRecord) -> None:
        """The record is what was written last."""
        if record.version != self.version:
            self._problems.append(f"the record is at version {record.version}, and its history at {self.version}")

    def _gap(self, entry: HistoryEntry, *, lost: bool) -> None:
        """Writes that were forgotten before they could be read are not checked; others must not be missing."""
        if not lost:
            self._problems.append(f"the record's history goes from revision {self.revision} to {entry.revision}")
            return
        self._problems.append(
            f"revisions {self.revision + 1} to {entry.revision - 1} of the record were not checked: the control plane "
            f"keeps {KEPT} writes, and these were forgotten before they were read"
        )
        if entry.version is not None:
            self.version = entry.version - (entry.reason == "Commit")

    def _judge(self, entry: HistoryEntry) -> None:
        if self._leader not in ("", entry.actor):
            self._replaced.add(self._leader)
        if entry.actor in self._replaced:
            self._problems.append(
                f"revision {entry.revision} ({entry.reason}) is of {entry.actor}, which was replaced before it"
            )
        self._leader = entry.actor
        committed = entry.reason == "Commit"
        at = entry.version if entry.version is not None else self.version
        same = committed and entry.version is not None and self._commit(entry)
        if at != self.version + committed and not (same and at == self.version):
            self._problems.append(
                f"revision {entry.revision} ({entry.reason} by {entry.actor}) makes version {at} of {self.version}"
            )
        operation = hashlib.blake2b(entry.operation_id.encode(), digest_size=16).digest()
        if operation in self._operations:
            self._problems.append(f"operation {entry.operation_id} made revision {entry.revision}, and one before it")
        self._operations.add(operation)
        self.revision, self.version = entry.revision, at
