"""`dcr verify`: that every serving engine holds what the trainer has committed, bit for bit."""

import argparse
from typing import Any

import msgspec

from dcr.cli.record_options import add_channel, add_control, add_record_id
from dcr.cli.report import UndecidedError, say, waiting
from dcr.cli.seconds import seconds
from dcr.control_plane.address import open_existing
from dcr.control_plane.interface import ControlPlane
from dcr.protocol.messages import ContentsCompared
from dcr.protocol.record import CommitRecord, decode_record
from dcr.runtime.operator import NOT_ADMITTED, OperatorError, verify
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import Settings

_DESCRIPTION = """\
Every training rank delivers the content digests of what it has committed, tensor by tensor; every admitted engine reads
its storage back, on all its ranks, and compares.  No weight travels, nothing is written, and requests are served
meanwhile; an engine that turns out to hold something else closes its gate.  The trainer must be running, and no
transition be under way.  Engines that are connected and not admitted, as one that was evicted, serve nothing and are
not compared: the report names them, and a transition that has stopped.

  dcr verify --control sqlite:///tmp/run/record.db
  dcr verify --control sqlite:///tmp/run/record.db --json

Exit status: 0 every admitted engine holds the committed version; 1 one holds something else (DIFFERS), whatever is
known of the others; 3 none is known to, and of one at least, or of all, it could not be told now (UNKNOWN, or why in
the last line): ask again."""


_COORDINATOR_S = Settings().verify_timeout_s


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="compare what engines hold with what is committed",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name="verify")
    add_control(parser)
    add_record_id(parser)
    add_channel(parser)
    parser.add_argument(
        "--connect-s", type=seconds, default=20.0, metavar="S", help="how long to look for the trainer (20)"
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=900.0,
        metavar="S",
        help=f"how long to wait for each answer (900); "
        f"the coordinator ends the wait before that, after its setting verify_timeout_s ({_COORDINATOR_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Ask, and print every engine's answer as it comes.

    Raises:
        UndecidedError: no engine is known to differ, and one at least could not be compared.
        DcrError: nobody could be asked.
    """
    control = open_existing(options.control)  # first: beside what is no record there is no secret to make
    found = _Found(control, options)
    try:
        with waiting("verify", found.waits_for):
            for answer in verify(
                control,
                options.record_id,
                run_secret(options.control),
                channel=options.channel,
                connect_s=options.connect_s,
                answer_s=options.timeout_s,
                asked=found.asked,
            ):
                found.version, found.error = answer.version, answer.error
                if answer.engine is not None:
                    found.take(answer.engine)
    except OperatorError as e:  # of a leader that is lost half-way too: what it said before stands
        if not found.engines:
            raise
        found.error = str(e)
    finally:
        control.close()
    return found.concluded()


class _Found:
    """What was said so far."""

    def __init__(self, control: ControlPlane, options: argparse.Namespace) -> None:
        self._options = options
        stored = control.read(options.record_id)
        self._record: CommitRecord | None = None if stored is None else decode_record(stored.body)
        self._asked = False
        self.version = 0
        self.error = ""
        self.engines: list[ContentsCompared] = []
        self.not_compared: dict[str, str] = {}
        """Engines that are connected and not admitted, and why."""

    def asked(self) -> None:
        """The leader was found, and asked."""
        self._asked = True

    def take(self, engine: ContentsCompared) -> None:
        """An engine's answer."""
        if engine.reason.startswith(NOT_ADMITTED):
            self.not_compared[engine.engine] = engine.reason
            say(f"         {engine.engine} was not compared: {engine.reason}")
            return
        self.engines.append(engine)
        _tell(engine, self.version)

    def waits_for(self) -> str:
        """Who has not answered yet, as far as that is known here, and how long that may last."""
        if not self._asked:
            return f"the leader of record {self._options.record_id!r}, at most {self._options.connect_s:g} s in all"
        known = () if self._record is None else self._record.members
        answered = {e.engine for e in self.engines}
        left = ", ".join(m.engine for m in known if m.engine not in answered)
        owners = "" if self.engines else "the owners' digests, then "
        return (
            f"{owners}engine {left}, at most {self._options.timeout_s:g} s for each answer, or the coordinator's "
            f"verify_timeout_s ({_COORDINATOR_S:g}, unless it was set)"
        )

    def concluded(self) -> dict[str, Any]:
        """Say what it came to; UndecidedError if no engine differs, and one at least could not be compared."""
        good, all_ = sum(_equal(e) for e in self.engines), len(self.engines)
        say(f"ended: {self.error}" if self.error else f"{good} of {all_} admitted engines hold version {self.version}")
        stopped = self._stopped()
        if stopped:
            say(f"{stopped}: dcr transition show --control ... --record-id {self._options.record_id}")
        found = {
            "ok": good == all_ and not self.error,
            "version": self.version,
            "engines": _plain(self.engines),
            "not_compared": self.not_compared,
            "transition": stopped,
            "error": self.error,
        }
        if found["ok"] or any(e.different_count for e in self.engines):
            return found
        why = self.error or f"{all_ - good} of {all_} engines could not be compared"
        raise UndecidedError(f"not known now whether every engine holds what is committed: {why}", found)

    def _stopped(self) -> str:
        """The open transition as the record had it before; empty if none was open."""
        tr = None if self._record is None else self._record.open
        if tr is None:
            return ""
        return f"the transition to version {tr.target} {'has stopped' if tr.stopped else 'is open'}"


def _tell(engine: ContentsCompared, version: int) -> None:
    say(_line(engine, version))
    for name, why in engine.different.items():
        say(f"    {name}: {why}")
    if more := engine.different_count - len(engine.different):
        say(f"    and {more} more")


def _equal(e: ContentsCompared) -> bool:
    return not e.reason and not e.different_count


def _line(e: ContentsCompared, version: int) -> str:
    if e.different_count:
        return f"DIFFERS  {e.engine}: {e.different_count} tensors are not those of version {version}"
    if e.reason:
        return f"UNKNOWN  {e.engine}: {e.reason}"
    unread = f", {e.unread_count} have no way back" if e.unread_count else ""
    read = f"{e.tensors} tensors, {e.elements:,} elements in {e.seconds:.2f} s"
    return f"ok       {e.engine}: version {version}, {read}{unread}"


def _plain(engines: list[ContentsCompared]) -> list[Any]:
    plain: list[Any] = msgspec.to_builtins(engines)
    return plain
