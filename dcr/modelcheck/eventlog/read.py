"""The event logs of a run, as their files have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.event import Event

SUFFIX = ".ndjson"
FILE_BYTES_MAX = 1 << 30
LINES_MAX = 2_000_000


class RejectedError(DcrError):
    """A line is no step that the specification allows there.

    Attributes:
        line: which.
    """

    def __init__(self, line: "Line", why: str) -> None:
        super().__init__(f"{line.place}: {line.event.action} of {line.who}: {why}")
        self.line = line
        self.why = why


@dataclass(frozen=True, eq=False)
class Line:
    """One event, and where it stands.  A line is like no other, whatever it says."""

    path: Path
    number: int
    """1-based."""
    event: Event
    unlogged: str = ""
    """How it is known, for a step that was taken and not written down."""

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.path.name}:{self.number}" + (f" ({self.unlogged})" if self.unlogged else "")

    @property
    def who(self) -> str:
        """The actor, for people."""
        e = self.event
        return f"{e.role} {e.name}" + (f" ({e.incarnation})" if e.incarnation else "")


@dataclass(frozen=True)
class Logs:
    """Every line of a folder, file by file."""

    chains: tuple[tuple[Line, ...], ...]
    """One for each actor, in the order in which it wrote."""
    record_id: str
    notes: tuple[str, ...]
    """What is to be said about the files: half-written lines, logs that were full."""

    @property
    def lines(self) -> int:
        """How many there are."""
        return sum(map(len, self.chains))


def read_logs(folder: Path) -> Logs:
    """Read every log of a folder.

    Raises:
        RefusedError: there is no such folder, no log in it, one that is too large or no regular file, or logs of
            several records.
        RejectedError: lines are missing, or one is damaged, where no kill can have done it.
    """
    if not folder.is_dir():
        raise RefusedError(
            f"{folder}: no such folder; processes write their events beside the record, in RECORD.events"
        )
    notes: list[str] = []
    found = [(path, _read(path, notes)) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    chains = tuple(lines for _, lines in found if lines)
    if not chains:
        raise RefusedError(f"{folder}: no event in any *{SUFFIX} file there; was event_log off?")
    records = sorted({line.event.start.record_id for lines in chains for line in lines if line.event.start is not None})
    if len(records) != 1:
        raise RefusedError(f"{folder}: logs of the records {', '.join(records)}; keep one record's logs in a folder")
    if sum(map(len, chains)) > LINES_MAX:
        raise RefusedError(f"{folder}: more than {LINES_MAX} lines")
    return Logs(chains, records[0], tuple(notes))


def _read(path: Path, notes: list[str]) -> tuple[Line, ...]:
    if not path.is_file():
        raise RefusedError(f"{path}: not a regular file, and so no event log")
    if path.stat().st_size > FILE_BYTES_MAX:
        raise RefusedError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    data = path.read_bytes()
    texts = data.split(b"\n")
    lines: list[Line] = []
    damaged: tuple[int, str] | None = None
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            event = Event.decode(text)
        except RefusedError as e:
            _only_one(path, damaged)
            damaged = (number, str(e))
            continue
        line = Line(path, number, event)
        if damaged is not None:
            if event.start is None:
                _only_one(path, damaged)
            notes.append(f"{path.name}:{damaged[0]}: half a line, of a process that was killed")
            damaged = None
        _check_follows(lines, line)
        if event.full:
            notes.append(f"{path.name}:{number}: the log was full; what came after it is not known")
            break
        lines.append(line)
    if damaged is not None:
        if damaged[0] != len(texts):
            _only_one(path, damaged)
        notes.append(f"{path.name}:{damaged[0]}: half a line at the end, of a process that was killed")
    return tuple(lines)


def _only_one(path: Path, damaged: tuple[int, str] | None) -> None:
    if damaged is not None:
        raise RefusedError(f"{path.name}:{damaged[0]}: {damaged[1]}; only the last line of a process may be cut short")


def _check_follows(lines: Sequence[Line], line: Line) -> None:
    e = line.event
    if not lines or e.start is not None:
        if e.start is None:
            raise RejectedError(line, "the first event of a log is a start: lines before it are missing")
        if e.seq:
            raise RejectedError(line, f"a start is event 0 of its process, not {e.seq}")
    if lines:
        last = lines[-1].event
        if (e.role, e.name, e.incarnation) != (last.role, last.name, last.incarnation):
            raise RejectedError(line, f"a log is one actor's, and this one is of {lines[-1].who}")
        if e.start is None and e.seq != last.seq + 1:
            raise RejectedError(line, f"event {e.seq} follows event {last.seq}: lines are missing, or twice there")
