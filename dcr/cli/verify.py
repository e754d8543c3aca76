"""`dcr verify`: that every serving engine holds what the trainer has committed, bit for bit."""

import argparse
from typing import Any

import msgspec

from dcr.cli.record_options import add_channel, add_control, add_record_id
from dcr.cli.report import UndecidedError, say
from dcr.control_plane.address import open_existing
from dcr.protocol.messages import ContentsCompared
from dcr.runtime.operator import OperatorError, verify
from dcr.runtime.secret_path import run_secret

_DESCRIPTION = """\
Every training rank delivers the content digests of what it has committed, tensor by tensor; every admitted engine reads
its storage back, on all its ranks, and compares.  No weight travels, nothing is written, and requests are served
meanwhile; an engine that turns out to hold something else closes its gate.  The trainer must be running, and no
transition be under way.

  dcr verify --control sqlite:///tmp/run/record.db
  dcr verify --control sqlite:///tmp/run/record.db --json

Exit status: 0 every engine holds the committed version; 1 one holds something else (DIFFERS), whatever is known of
the others; 3 none is known to, and of one at least, or of all, it could not be told now (UNKNOWN, or why in the last
line): ask again."""


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
        "--connect-s", type=_seconds, default=20.0, metavar="S", help="how long to look for the trainer (20)"
    )
    parser.add_argument(
        "--timeout-s", type=_seconds, default=900.0, metavar="S", help="how long to wait for each answer (900)"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:  # noqa: PLR2004 -- what clocks take
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Ask, and print every engine's answer as it comes.

    Raises:
        UndecidedError: no engine is known to differ, and one at least could not be compared.
        DcrError: nobody could be asked.
    """
    control = open_existing(options.control)  # first: beside what is no record there is no secret to make
    engines: list[ContentsCompared] = []
    version, error = 0, ""
    try:
        for answer in verify(
            control,
            options.record_id,
            run_secret(options.control),
            channel=options.channel,
            connect_s=options.connect_s,
            answer_s=options.timeout_s,
        ):
            version, error = answer.version, answer.error
            if answer.engine is not None:
                engines.append(answer.engine)
                _tell(answer.engine, version)
    except OperatorError as e:  # of a leader that is lost half-way too: what it said before stands
        if not engines:
            raise
        error = str(e)
    finally:
        control.close()
    return _concluded(engines, version, error)


def _concluded(engines: list[ContentsCompared], version: int, error: str) -> dict[str, Any]:
    good = sum(_equal(e) for e in engines)
    differ = sum(e.different_count > 0 for e in engines)
    say(f"ended: {error}" if error else f"{good} of {len(engines)} engines hold version {version}")
    found = {"ok": good == len(engines) and not error, "version": version, "engines": _plain(engines), "error": error}
    if found["ok"] or differ:
        return found
    why = error or f"{len(engines) - good} of {len(engines)} engines could not be compared"
    raise UndecidedError(f"not known now whether every engine holds what is committed: {why}", found)


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
