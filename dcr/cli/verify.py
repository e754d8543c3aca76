"""`dcr verify`: that every serving engine holds what the trainer has committed, bit for bit."""

import argparse
from typing import Any

import msgspec

from dcr.cli.report import say
from dcr.control_plane.address import open_existing
from dcr.protocol.messages import ContentsCompared
from dcr.runtime.channel_address import LOOPBACK
from dcr.runtime.operator import verify
from dcr.runtime.secret_path import run_secret

_DESCRIPTION = """\
Every training rank delivers the content digests of what it has committed, tensor by tensor; every admitted engine reads
its storage back, on all its ranks, and compares.  No weight travels, nothing is written, and requests are served
meanwhile; an engine that turns out to hold something else closes its gate.  The trainer must be running, and no
transition be under way.

  dcr verify --control sqlite:///tmp/run/record.db
  dcr verify --control sqlite:///tmp/run/record.db --json

Exit status: 0 every engine holds the committed version; 1 one does not, or could not compare; 3 nobody could
be asked."""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="compare what engines hold with what is committed",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name="verify")
    parser.add_argument(
        "--control", required=True, metavar="ADDRESS", help="control plane, as trainer and nodes have it"
    )
    parser.add_argument("--record", default="default", metavar="ID", help="commit record (default)")
    parser.add_argument(
        "--channel",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="setting channel, as trainer and nodes have it: loopback (default) or tls:///folder/of/credentials",
    )
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
        DcrError: nobody could be asked.
    """
    control = open_existing(options.control)  # first: beside what is no record there is no secret to make
    try:
        secret = run_secret(options.control)
        engines: list[ContentsCompared] = []
        version = 0
        for answer in verify(
            control,
            options.record,
            secret,
            channel=options.channel,
            connect_s=options.connect_s,
            answer_s=options.timeout_s,
        ):
            version = answer.version
            if answer.engine is not None:
                engines.append(answer.engine)
                say(_line(answer.engine, version))
                for name, why in answer.engine.different.items():
                    say(f"    {name}: {why}")
                more = answer.engine.different_count - len(answer.engine.different)
                if more:
                    say(f"    and {more} more")
            if answer.error:
                say(f"ended: {answer.error}")
                return {"ok": False, "version": version, "engines": _plain(engines), "error": answer.error}
    finally:
        control.close()
    good = sum(_equal(e) for e in engines)
    say(f"{good} of {len(engines)} engines hold version {version}")
    return {"ok": good == len(engines), "version": version, "engines": _plain(engines), "error": ""}


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
