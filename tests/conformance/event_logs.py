"""The golden event logs, and how they are falsified: each change keeps every line well-formed and numbered in turn."""

import json
import shutil
from pathlib import Path

from dcr.modelcheck.eventlog.validate import validate

SPEC = Path(__file__).parents[2] / "spec" / "tla"
GOLDEN = Path(__file__).parents[1] / "golden" / "event_log"
"""Written by a trainer and two engines in threads of one process: three refits, five payloads each."""


class Logs:
    """A copy of the golden logs to be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "events"
        shutil.copytree(GOLDEN, self.folder)

    def path(self, role: str, name: str = "") -> Path:
        (path,) = self.folder.glob(f"{role}-{name}*")
        return path

    def read(self, path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def write(self, path: Path, events: list[dict]) -> None:
        path.write_text("".join(json.dumps({**e, "seq": n}) + "\n" for n, e in enumerate(events)))

    def find(self, path: Path, action: str, count: int = 1) -> int:
        """The index of the count-th event with this action."""
        return [n for n, e in enumerate(self.read(path)) if e.get("step", {}).get("action") == action][count - 1]

    def validate(self):
        return validate(self.folder, SPEC, heap="1g")


def rejected_at(found, path: Path, line: int) -> bool:
    """Whether this line, 1-based, is the one that was rejected."""
    return found.rejected.startswith(f"{path.name}:{line}: ")
