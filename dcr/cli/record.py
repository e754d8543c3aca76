"""`dcr record`: what the commit record says, how it came to it, and both in one document."""

import argparse
import datetime as dt
from typing import Any

import msgspec

from dcr.cli.record_options import add_control, add_record_id
from dcr.cli.report import say
from dcr.control_plane.address import open_existing
from dcr.control_plane.interface import ControlPlane, HistoryEntry, Stored
from dcr.protocol.record import CommitRecord, decode_record
from dcr.runtime.registry import catching_up

DOCUMENT_VERSION = 1
"""Of what `dcr record export` prints."""

_HISTORY_MAX = 1_000_000
_DESCRIPTION = """\
Looks at a commit record where it is kept, and changes nothing; neither trainer nor engines need to run.

  dcr record show --control sqlite:///tmp/run/record.db
  dcr record history --control 'etcd://10.0.0.9:2379/dcr?ca=/etc/dcr/etcd/ca.pem' --commits
  dcr record export --control 's3://bucket/prefix?endpoint=http://10.0.0.9:8333' > record.json

show is for people; history lists the writes of the record, newest first, as many as the control plane kept, each with
the version that was committed once it had taken effect: an attempt to reach version 8 is opened at version 7; export
prints one JSON document with both (docs/control-plane.md says what is in it).

Exit status: 0 the record was read; 1 there is no such record; 3 it could not be read."""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "record",
        help="show a commit record, its history, or both as one document",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="show|history|export")
    show = kinds.add_parser("show", help="what the record says, and who leads")
    history = kinds.add_parser("history", help="who wrote it, when and why, newest first")
    history.add_argument("--limit", type=_limit, default=50, metavar="N", help="at most so many (50)")
    history.add_argument("--commits", action="store_true", help="commits alone")
    export = kinds.add_parser("export", help="one JSON document with the record and its history")
    for one in (show, history, export):
        one.set_defaults(run=run, command_name="record")
        add_control(one)
        add_record_id(one)
        one.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def _limit(text: str) -> int:
    limit = int(text)
    if not 0 < limit <= _HISTORY_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {_HISTORY_MAX}")
    return limit


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Read, and print.

    Raises:
        DcrError: the control plane could not be asked, or holds what this dcr cannot read.
    """
    control = open_existing(options.control)
    try:
        stored = control.read(options.record_id)
        if stored is None:
            error = f"there is no record {options.record_id!r} at this address"
            say(error)
            return {"ok": False, "kind": options.kind, "record_id": options.record_id, "error": error}
        if options.kind == "history":
            return {"ok": True, "kind": "history", **_history(control, options)}
        document = _document(control, stored, options.record_id)
        if options.kind == "show":
            lease = control.leader(options.record_id)
            holder = f"{lease.holder}, token {lease.token}" if lease else "nobody holds one"
            _show(stored, decode_record(stored.body), holder if control.leases else "none are kept here")
            for engine, how_far in sorted(catching_up(control, options.record_id).items()):
                say(f"  catches up {engine}, {how_far}")
        elif not options.json:
            say(msgspec.json.encode(document).decode())
        return {"ok": True, "kind": options.kind, **document}
    finally:
        control.close()


def _document(control: ControlPlane, stored: Stored, record_id: str) -> dict[str, Any]:
    lease = control.leader(record_id)
    entries = control.history(record_id, _HISTORY_MAX)
    return {
        "document_version": DOCUMENT_VERSION,
        "record_id": record_id,
        "revision": stored.revision,
        "operation_id": stored.operation_id,
        "record": msgspec.to_builtins(decode_record(stored.body)),
        "lease": None if lease is None else {"holder": lease.holder, "token": lease.token, "lease_s": lease.lease_s},
        # Written after the record was read: not of the state that this document shows.
        "history": [msgspec.to_builtins(e) for e in entries if e.revision <= stored.revision],
    }


def _history(control: ControlPlane, options: argparse.Namespace) -> dict[str, Any]:
    entries = control.history(options.record_id, _HISTORY_MAX if options.commits else options.limit)
    if options.commits:
        entries = [e for e in entries if e.reason == "Commit"][: options.limit]
    for entry in entries:
        say(_line(entry))
    if not entries:
        say("no commits among the writes that were kept" if options.commits else "no writes were kept")
    return {"record_id": options.record_id, "history": msgspec.to_builtins(entries)}


def _line(entry: HistoryEntry) -> str:
    at = dt.datetime.fromtimestamp(entry.time_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    version = "?" if entry.version is None else str(entry.version)
    digest = f", digest {entry.digest}" if entry.digest else ""
    return (
        f"{entry.revision:8}  {at} UTC  {entry.reason:16} then at version {version}{digest}  by {entry.actor}, "
        f"operation {entry.operation_id}"
    )


def _show(stored: Stored, k: CommitRecord, lease: str) -> None:
    say(f"record {k.record_id}: version {k.version}, epoch {k.epoch}, revision {stored.revision}")
    say(f"  baseline   {k.baseline_id}")
    say(f"  leader     {k.leader}, fencing token {k.fencing_token} in the record")
    say(f"  lease      {lease}")
    say(f"  members    {', '.join(m.engine for m in k.members) or 'none'}")
    if k.open is None:
        say("  open       no transition")
    else:
        what = "stopped" if k.open.stopped else f"{k.open.kind}, {k.open.direction}"
        say(f"  open       to version {k.open.target}, {k.open.attempts} attempts, {what}")
    if k.committed is None:
        say("  committed  nothing yet")
    else:
        c = k.committed
        engines = ", ".join(m.engine for m in c.members)
        say(f"  committed  version {c.version} in epoch {c.epoch}, operation {c.operation_id}, by {engines}")
