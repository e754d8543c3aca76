"""What must hold after every run, each judged by what shares nothing with what it judges (docs/chaos.md, *Checks*)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dcr.chaos.bits import CHECKPOINT, Twins, combined
from dcr.chaos.journal import REQUESTS, Answer, answers
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
        self._whole: dict[int, str] = {}  # by version, what a request must see of all of storage
        self._by_digest: dict[str, Path] = {}
        self._seen: set[str] = set()  # names of checkpoints whose digest is known

    @property
    def latest(self) -> int:
        """The last committed version."""
        return max(self.versions)

    def begin(self, checkpoint: Path) -> None:
        """Version 0 has the bits of this checkpoint."""
        self.versions[0] = checkpoint
        self._whole[0] = combined(self._twins.bits(checkpoint))

    def won(self, version: int, digest: str) -> bool:
        """A version was committed with this content: whether it is the one and only checkpoint that was.

        It is a problem if it is none of the trainer's checkpoints, or another one was committed as this version.
        """
        checkpoint = self._checkpoint(digest)
        if checkpoint is None:
            self.problems.append(f"version {version} is none of the trainer's checkpoints: {digest}")
            return False
        winner = self.versions.setdefault(version, checkpoint)
        if winner != checkpoint:
            self.problems.append(f"version {version} has two winners: {winner.name} and {checkpoint.name}")
            return False
        if version not in self._whole:
            self._whole[version] = combined(self._twins.bits(checkpoint))
        return True

    def bits(self, engines: Mapping[str, Mapping[str, Any]], version: int) -> None:
        """Every engine serves the version, and holds what a fresh model holds that loaded its checkpoint densely."""
        checkpoint = self.versions.get(version)
        if checkpoint is None:
            return
        self.same(engines, version, self._twins.bits(checkpoint))

    def same(self, engines: Mapping[str, Mapping[str, Any]], version: int, expected: Mapping[str, str]) -> None:
        """Every engine serves the version and holds these bits, by name of the parameter or buffer."""
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
        for path in sorted(self._folder.glob(f"*{REQUESTS}")):
            self._requests(path.stem, answers(path))

    def _requests(self, name: str, given: Iterable[Answer]) -> None:
        wrong: Counter[str] = Counter()
        last = -1
        for a in given:
            self.answers += 1
            if a.version not in self._whole:
                wrong[f"answered with version {a.version}, which was never committed"] += 1
            elif a.digest != self._whole[a.version]:
                wrong[f"answered from storage that is not version {a.version}"] += 1
            if a.version < last:
                wrong[f"answered with version {a.version} after {last}"] += 1
            last = a.version
        self.problems += [f"{name}: {what}, {count} times" for what, count in wrong.most_common(NAMED_MAX)]

    def _checkpoint(self, digest: str) -> Path | None:
        """The checkpoint with this content; each is read once."""
        if digest not in self._by_digest:
            for folder in sorted((self._folder / "checkpoints").iterdir()):
                if not folder.name.startswith(".") and folder.name not in self._seen:
                    self._seen.add(folder.name)
                    self._by_digest.setdefault(describe(iter(load_file(folder / CHECKPOINT).items()))[1], folder)
        return self._by_digest.get(digest)
