r"""The learned projection on disk, so that a trainer that starts again does not learn it again.

A file a rank, named by a fingerprint of everything that decides the projection: the tensors, the Bridge's mappings and
their settings, the model's configuration, the layout over ranks and this rank's place in it, library versions.
::

    "dcr projection 1\n"  SHA-256 of the rest (32 bytes)  MessagePack of ``Learned``

Nothing that is read is believed: the file has a bounded size, its digest and every field are checked, and the caller
converts known values before it relies on the maps.  What cannot be used is told to the log, and learned anew.
"""

import contextlib
import hashlib
import itertools
import logging
import math
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dcr.data_plane.header import TEXT_MAX
from dcr.data_plane.index_map import Box, IndexMap
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.conversion import Task
from dcr.trainer.megatron.learner import Learner, Pieces

FORMAT = 1
"""Of the file; to be raised whenever ``Learned``, or what learning finds, changes."""

FILE_BYTES_MAX = 256 << 20
FILES_MAX = 8
"""Files kept for a rank; the oldest go first."""

_MAGIC = f"dcr projection {FORMAT}\n".encode()
_INT64_MAX = (1 << 63) - 1
_DIMENSIONS_MAX = 64

BoxRow = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]
"""Sizes, source strides, target strides, source offset, target offset."""

_LOG = logging.getLogger(__name__)


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the runs have shown; see ``Learner``.

    Attributes:
        fingerprint: what it holds for.
        reasons: of residual tasks.
        shapes: of canonical tensors.
        origins: by canonical tensor, the tasks that make it.
        pieces: this rank's maps.
        links: residual tasks that belong together, and make what is not in ``origins``.
    """

    fingerprint: str
    reasons: dict[int, str]
    shapes: dict[str, tuple[int, ...]]
    origins: dict[str, tuple[int, ...]]
    pieces: dict[int, dict[str, tuple[BoxRow, ...]]]
    links: tuple[tuple[int, ...], ...]


class ProjectionCache:
    """One rank's file in a folder, which ranks and trainers may share.

    Args:
        folder: made when something is stored.
        fingerprint: of what decides this rank's projection.
        rank: this rank.
    """

    def __init__(self, folder: Path, fingerprint: str, rank: int) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._prefix = f"rank-{rank}-"
        self.path = folder / f"{self._prefix}{fingerprint[:32]}.projection"

    def recall(self, learner: Learner) -> bool:
        """Put what is stored into a learner, if there is anything that could be right; else it is left alone."""
        try:
            data = _read(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self.refuse(f"it cannot be read: {error}")
        try:
            learned = _decoded(data)
            pieces = _checked(learned, learner.tasks)
        except RefusedError as error:
            return self.refuse(str(error))
        if learned.fingerprint != self._fingerprint:
            return self.refuse("it was stored for something else")
        learner.reasons = dict(learned.reasons)
        learner.shapes, learner.origins = dict(learned.shapes), dict(learned.origins)
        learner.pieces, learner.links = pieces, set(learned.links)
        return True

    def refuse(self, problem: str) -> bool:
        """Say why the file is not used; False."""
        _LOG.warning("projection cache %s: %s; the projection is learned anew", self.path, problem)
        return False

    def confirm(self) -> None:
        """Say that the file is used."""
        _LOG.info("projection cache %s: the projection was taken from it, and has been checked", self.path)

    def store(self, learner: Learner) -> None:
        """Store what was learned, all of it or nothing; a failure is told to the log and changes nothing else."""
        pieces = {
            number: {name: tuple(_row(box) for box in index_map.boxes) for name, index_map in piece.items()}
            for number, piece in learner.pieces.items()
            if number not in learner.reasons
        }
        body = msgspec.msgpack.encode(
            Learned(
                fingerprint=self._fingerprint,
                reasons=learner.reasons,
                shapes=learner.shapes,
                origins=learner.origins,
                pieces=pieces,
                links=tuple(sorted(learner.links)),
            )
        )
        data = _MAGIC + hashlib.sha256(body).digest() + body
        if len(data) > FILE_BYTES_MAX:
            _LOG.warning(
                "projection cache %s: %d bytes are more than %d: not stored", self.path, len(data), FILE_BYTES_MAX
            )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(self.path, data)
            self._prune()
        except OSError as error:
            _LOG.warning("projection cache %s: cannot be written: %s; the next start learns again", self.path, error)

    def _prune(self) -> None:
        files = [path for path in self._folder.glob(f"{self._prefix}*.projection") if path != self.path]
        files.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
        for path in files[FILES_MAX - 1 :]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    # A pipe or a device is not opened for long.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 - a file handle
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no file")
        if found.st_size > FILE_BYTES_MAX:
            raise OSError(f"its {found.st_size} bytes are more than {FILE_BYTES_MAX}")
        return file.read(FILE_BYTES_MAX)


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".projection-")
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - a file handle
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _decoded(data: bytes) -> Learned:
    head = len(_MAGIC) + hashlib.sha256().digest_size
    if len(data) < head or not data.startswith(_MAGIC):
        raise RefusedError(f"it does not begin as a file of format {FORMAT}")
    if hashlib.sha256(data[head:]).digest() != data[len(_MAGIC) : head]:
        raise RefusedError("its digest is wrong: it was damaged")
    try:
        return msgspec.msgpack.decode(data[head:], type=Learned)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedError(f"it is not what this version stores: {error}") from error


def _row(box: Box) -> BoxRow:
    return box.sizes, box.source_strides, box.target_strides, box.source_offset, box.target_offset


def _checked(learned: Learned, tasks: Sequence[Task]) -> Pieces:
    """The maps, if everything fits to the tasks and to each other; RefusedError if not."""
    named = itertools.chain(learned.reasons, learned.pieces, *learned.origins.values(), *learned.links)
    if any(not 0 <= number < len(tasks) for number in named):
        raise RefusedError(f"it names tasks beyond the {len(tasks)} that there are")
    if learned.shapes.keys() != learned.origins.keys():
        raise RefusedError("its canonical tensors do not have one shape and one origin each")
    for name, shape in learned.shapes.items():
        if not 0 < len(name.encode()) <= TEXT_MAX or len(shape) > _DIMENSIONS_MAX or min(shape, default=0) < 0:
            raise RefusedError(f"canonical {name[:100]!r} has no proper name or shape")
        if math.prod(shape) > _INT64_MAX:
            raise RefusedError(f"canonical {name}: its shape {shape} is too big")
    if any(not origins for origins in learned.origins.values()):
        raise RefusedError("a canonical tensor is made of no task")
    return {number: _piece(learned, number, tasks[number], stored) for number, stored in learned.pieces.items()}


def _piece(learned: Learned, number: int, task: Task, stored: Mapping[str, Sequence[BoxRow]]) -> dict[str, IndexMap]:
    if task.tensor is None or number in learned.reasons or not stored:
        raise RefusedError(f"it has a map of {task.name}, which this rank does not project")
    piece = {}
    for name, rows in stored.items():
        if number not in learned.origins.get(name, ()):
            raise RefusedError(f"it maps {task.name} to {name[:100]!r}, which is made of other tasks")
        boxes = [Box(*row) for row in rows]
        source, target = task.tensor.numel(), math.prod(learned.shapes[name])
        # Before anything is expanded.
        if sum(box.numel for box in boxes) > min(source, target) or any(
            box.source_bounds[1] >= source or box.target_bounds[1] >= target for box in boxes
        ):
            raise RefusedError(f"its map of {task.name} to {name} goes beyond them")
        piece[name] = IndexMap.union(boxes)
    return piece
