"""Entry of the `dcr` command.

Every command takes `--json`: one JSON object, with at least `command` and `ok`, on the last line of standard output.
Exit status: 0 all is as it should be; 1 something is not; 2 the command line is wrong; 3 the command could not do its
work (a missing tool, an input that was refused), which proves nothing; 130 it was interrupted (SIGINT).
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from dcr.cli import certs, chaos, coordinator, inspect, record, simulate, spec, transition, verify
from dcr.cli.report import UndecidedError
from dcr.protocol.errors import DcrError

FAILED = 1
IMPOSSIBLE = 3
INTERRUPTED = 128 + signal.SIGINT


def parser() -> argparse.ArgumentParser:
    """The command line of `dcr`."""
    root = argparse.ArgumentParser(
        prog="dcr",
        description="Delta-compressed, bit-exact refit of running rollout engines.",
        epilog="`dcr COMMAND --help` explains a command.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    certs.add(commands)
    chaos.add(commands)
    coordinator.add(commands)
    inspect.add(commands)
    record.add(commands)
    simulate.add(commands)
    spec.add(commands)
    transition.add(commands)
    verify.add(commands)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status, see the head of this file.
    """
    options = parser().parse_args(arguments)
    name = options.command_name
    try:
        report = options.run(options)
    except DcrError as error:
        print(f"dcr {name}: {error}", file=sys.stderr)  # noqa: T201 -- what a command says
        found = error.report if isinstance(error, UndecidedError) else {}
        report = {"ok": False, "error": str(error), **found}
        status = IMPOSSIBLE
    except KeyboardInterrupt:
        print(f"dcr {name}: interrupted", file=sys.stderr)  # noqa: T201 -- what a command says
        report = {"ok": False, "error": "interrupted"}
        status = INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; nobody is left to tell anything.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 -- for the interpreter's last flush
        return FAILED
    else:
        status = 0 if report["ok"] else FAILED
    if options.json:
        line = msgspec.json.encode({"command": name, **report}).decode()
        print(line, flush=True)  # noqa: T201 -- what a command says
    return status


if __name__ == "__main__":
    sys.exit(main())
