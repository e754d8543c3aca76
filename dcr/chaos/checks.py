"""What must hold after every run, each judged by what shares nothing with what it judges (docs/chaos.md, *Checks*)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dcr.chaos.bits import CHECKPOINT, Twins, combined
from dcr.chaos.journal import REQUESTS, Answer, answers
from dcr.control_plane.interface import HistoryEntry
from dcr.protocol.record import CommitRecord
from dcr.rollout.node import describe

NAMED_MAX = 3
"""How many of the same kind of problem are told."""


class Checks:
    """Collects what was compared, and what was wrong.

    Args:
        folder: of the run.
        twins: untouched ones of the engine's model.

    Attributes:
        problems: what was wrong, one sentence each.
        bytes: resident bytes that were compared with a twin's.
        answers: requests whose storage was compared with a twin's.
        versions: the checkpoint of each committed version.
    """

    def __init__(self, folder: Path, twins: Twins) -> None:
        self.problems: list[str] = []
        self.bytes = 0
        self.answers = 0
        self.versions: dict[int, Path] = {}
        self._folder = folder
        self._twins = twins
        self._digests: dict[Path, str] = {}

    def committed(self, record: CommitRecord) -> Path | None:
        """The checkpoint whose bits the record's version is said to be; None, and a problem, if it is none of ours."""
        found = self._checkpoint(record.baseline_id)
        if found is None:
            self.problems.append(f"version {record.version} is none of the trainer's checkpoints: {record.baseline_id}")
        else:
            self.versions[record.version] = found
        return found

    def bits(self, engines: Mapping[str, Mapping[str, Any]], version: int) -> None:
        """Every engine serves the version, and holds what a fresh model holds that loaded its checkpoint densely."""
        checkpoint = self.versions.get(version)
        if checkpoint is None:
            return
        expected = self._twins.bits(checkpoint)
        for name, engine in engines.items():
            if engine["version"] != version:
                self.problems.append(f"{name} serves version {engine['version']}, and {version} is committed")
            found: dict[str, str] = engine["bits"]
            wrong = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
            if wrong:
                self.problems.append(f"{name}: other bits than version {version} in {', '.join(wrong[:NAMED_MAX])}")
            self.bytes += engine["bytes"]

    def requests(self) -> None:
        """No engine answered from storage that is not the committed version on the answer's label."""
        whole = {v: combined(self._twins.bits(c)) for v, c in self.versions.items()}
        for path in sorted(self._folder.glob(f"*{REQUESTS}")):
            self._requests(path.stem, answers(path), whole)

    def _requests(self, name: str, given: Iterable[Answer], whole: Mapping[int, str]) -> None:
        wrong: Counter[str] = Counter()
        last = -1
        for a in given:
            self.answers += 1
            if a.version not in whole:
                wrong[f"answered with version {a.version}, which was never committed"] += 1
            elif a.digest != whole[a.version]:
                wrong[f"answered from storage that is not version {a.version}"] += 1
            if a.version < last:
                wrong[f"answered with version {a.version} after {last}"] += 1
            last = a.version
        self.problems += [f"{name}: {what}, {count} times" for what, count in wrong.most_common(NAMED_MAX)]

    def history(self, entries: list[HistoryEntry], record: CommitRecord) -> None:
        """Revisions and versions rise by one, and each version has one winner; the record is what was written last.

        A commit that keeps a version, and its content, is that of a rollback.  A leader that another one has replaced
        writes nothing more.
        """
        version = 0
        replaced: set[str] = set()
        for before, entry in zip([None, *entries], entries, strict=False):
            if before is not None and entry.revision != before.revision + 1:
                self.problems.append(f"the record's history goes from revision {before.revision} to {entry.revision}")
            if before is not None and entry.actor != before.actor:
                replaced.add(before.actor)
            if entry.actor in replaced:
                self.problems.append(
                    f"revision {entry.revision} ({entry.reason}) is of {entry.actor}, which was replaced before it"
                )
            at = entry.version if entry.version is not None else version
            committed = entry.reason == "Commit"
            back = committed and at == version and self._checkpoint(entry.digest) == self.versions.get(at)
            if at != version + committed and not back:
                self.problems.append(
                    f"revision {entry.revision} ({entry.reason} by {entry.actor}) makes version {at} of {version}"
                )
            version = at
            if committed and entry.version is not None:
                self._winner(entry)
        if record.version != version:
            self.problems.append(f"the record is at version {record.version}, and its history at {version}")
        ids = Counter(e.operation_id for e in entries)
        self.problems += [f"operation {i} made {n} revisions" for i, n in ids.items() if n > 1]

    def _winner(self, entry: HistoryEntry) -> None:
        checkpoint = self._checkpoint(entry.digest)
        if checkpoint is None:
            self.problems.append(f"version {entry.version} is none of the trainer's checkpoints: {entry.digest}")
        elif self.versions.setdefault(entry.version or 0, checkpoint) != checkpoint:
            was = self.versions[entry.version or 0].name
            self.problems.append(f"version {entry.version} has two winners: {was} and {checkpoint.name}")

    def _checkpoint(self, digest: str) -> Path | None:
        for folder in sorted((self._folder / "checkpoints").iterdir()):
            if folder.name.startswith("."):
                continue
            if folder not in self._digests:
                self._digests[folder] = describe(iter(load_file(folder / CHECKPOINT).items()))[1]
            if self._digests[folder] == digest:
                return folder
        return None
