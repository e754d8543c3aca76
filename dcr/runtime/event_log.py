"""The protocol event log: every actor appends what it does to a file of its own; docs/event-log.md."""

import hashlib
import logging
import os
import threading
from pathlib import Path
from urllib.parse import quote

from dcr.control_plane.address import beside
from dcr.protocol.event import Event, Start
from dcr.protocol.step import Step
from dcr.runtime.observer import Observer, guarded

BESIDE = "beside"
"""The value of the setting that puts the log beside the record."""
OFF = "off"
_NAME_CHARS_MAX = 100

_log = logging.getLogger("dcr")


def event_folder(setting: str, control: str) -> str:
    """Where the actors of a run write their events; empty if they write none.

    Args:
        setting: ``event_log`` of the settings: ``beside``, ``off``, or a folder.
        control: address of the control plane; for ``sqlite:///tmp/run/record.db`` the folder that is meant by
            ``beside`` is ``/tmp/run/record.db.events``; a record in etcd or in a bucket has no folder beside it.

    Raises:
        RefusedError: the address has another form.
    """
    if setting == OFF:
        return ""
    if setting != BESIDE:
        return setting
    folder = beside(control, ".events")
    if folder is None:
        _log.info("no event log is written, for the record is in no file: name a folder in the setting event_log")
        return ""
    return str(folder)


class EventLog:
    """One actor's file ``<role>-<name>-<incarnation>.ndjson``.  A second process of the same actor appends to it.

    Each event is one ``write`` of one line, with nothing kept back: a process that is killed has lost nothing that it
    said, but for what was being written.  A log that cannot be written, or is full, ends with a warning, and disturbs
    nothing.

    Args:
        folder: of the run; made if it is missing.  Empty to write nothing.
        role: ``coordinator``, ``owner``, ``node`` or ``rank``.
        name: of the leader, owner or engine.
        incarnation: of the actor.
        bytes_max: the file grows no longer than this.

    Attributes:
        k: revision of K that was read last; it is written down with every event.
    """

    def __init__(self, folder: str, role: str, name: str, incarnation: int, bytes_max: int) -> None:
        self.k = 0
        self._actor = (role, name, incarnation)
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._seq = 0
        self._file = -1
        if folder:
            self._open(Path(folder))

    def start(self, start: Start) -> None:
        """Write down who this is: before anything else."""
        self._append(start=start)

    def observe(self, step: Step) -> None:
        """Write a step down."""
        self._append(step=step)

    def before(self, observe: Observer) -> Observer:
        """An observer that writes a step down and then calls another, neither of which can disturb the role."""
        watch = guarded(observe)

        def both(step: Step) -> None:
            self._append(step=step)
            watch(step)

        return both

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _open(self, folder: Path) -> None:
        role, name, incarnation = self._actor
        path = folder / f"{role}-{_in_a_path(name)}-{incarnation}.ndjson"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._file).st_size
            if self._size:
                self._write(b"\n")  # ends the line that a killed process may have left half-written
        except OSError as e:
            self._give_up(f"{path}: {e.strerror}")

    def _append(self, start: Start | None = None, step: Step | None = None) -> None:
        with self._lock:
            if self._file < 0:
                return
            event = Event(self._seq, *self._actor, k=self.k, start=start, step=step)
            self._seq += 1
            try:
                line = event.encode()
                if self._size + len(line) > self._bytes_max:
                    self._write(Event(event.seq, *self._actor, full=True).encode())
                    self._give_up(f"event_log_bytes_max = {self._bytes_max} is reached")
                else:
                    self._write(line)
            except OSError as e:
                self._give_up(e.strerror or str(e))

    def _write(self, line: bytes) -> None:
        """One line, in one call."""
        written = os.write(self._file, line)
        self._size += written
        if written != len(line):
            raise OSError(0, "a line was written in part: the disk is full")

    def _give_up(self, why: str) -> None:
        role, name, _ = self._actor
        _log.warning("%s %s writes its events down no more, and goes on without: %s", role, name, why)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _in_a_path(name: str) -> str:
    """A name as part of a file's name; a long one is cut, and told from others by its digest."""
    plain = quote(name, safe=" +,=@").lstrip(".")
    if plain == name and len(plain) <= _NAME_CHARS_MAX:
        return plain
    return f"{plain[:_NAME_CHARS_MAX]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
