"""`dcr spec validate`: whether the event logs of a run are a behaviour of the specification."""

import argparse
from typing import Any

import msgspec

from dcr.cli.report import say
from dcr.modelcheck.eventlog.validate import validate


def validate_logs(options: argparse.Namespace) -> dict[str, Any]:
    """Validate the logs of a folder; see `dcr spec validate --help`."""

    def tell(taken: int, of: int) -> None:
        say(f"       {taken:,} of {of:,} steps are taken")

    found = validate(options.folder, options.spec, heap=options.heap, timeout_s=options.timeout_s, tell=tell)
    for note in found.notes:
        say(f"note   {note}")
    if found.ok:
        say(
            f"ok     {found.lines:,} lines are a behaviour of the specification: {found.steps:,} steps, "
            f"{found.transitions} commits, {found.seconds:.1f} s"
        )
    else:
        say(f"WRONG  {found.rejected}")
        for why in found.why:
            say(f"       {why}")
        if found.story:
            say(f"       {found.steps:,} steps were taken before it; the last lines were")
        for told in found.story:
            say(f"         {told}")
    return {"folder": str(options.folder), **msgspec.to_builtins(found)}
