"""`dcr certs`: an authority of one's own, certificates for the peers of a run, and its secret."""

import argparse
from pathlib import Path
from typing import Any

from dcr.cli.report import say
from dcr.runtime.secret import create_secret

_DESCRIPTION = """\
Peers of the relay, and of a control channel that leaves the machine, prove who they are by certificates of one
authority.  Where none is at hand, make one:

  dcr certs authority /safe/place/authority
  dcr certs issue --authority /safe/place/authority trainer /etc/dcr/trainer
  dcr certs issue --authority /safe/place/authority node-a /etc/dcr/node-a

and bring each folder to its machine: it is the path in relay:///etc/dcr/node-a?listen=10.0.0.5:7000, and in the setting
channel, tls:///etc/dcr/node-a.  Every node needs a name of its own; owners may share theirs.  ca.key, which signs,
stays where it was made.  Nothing is ever overwritten; certificates end after --days.  To replace them, issue new ones
of the same name into a new folder and move its files over the old ones: connections made from then on use them.

A run whose record is in etcd or in a bucket has its secret, besides, in a file that every machine gets:

  dcr certs secret /etc/dcr/run.secret"""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "certs",
        help="make certificates for relay and control channel, and the secret of a run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="authority|issue|secret")
    authority = kinds.add_parser("authority", help="make ca.pem and ca.key")
    authority.add_argument("folder", type=Path, help="made here, if it is missing")
    issue = kinds.add_parser("issue", help="make a peer's ca.pem, cert.pem and key.pem")
    issue.add_argument("--authority", type=Path, required=True, metavar="FOLDER", help="of dcr certs authority")
    issue.add_argument("name", help="of the peer: letters, digits, dots and hyphens")
    issue.add_argument("folder", type=Path, help="made here, if it is missing")
    secret = kinds.add_parser("secret", help="make the file of a run's secret")
    secret.add_argument("file", type=Path, help="made here; its folder must exist")
    for one in (authority, issue):
        one.add_argument("--days", type=_days, default=365, metavar="N", help="until it expires (365)")
    for one in (authority, issue, secret):
        one.set_defaults(run=run, command_name="certs")
        one.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def _days(text: str) -> int:
    days = int(text)
    if not 0 < days <= 36500:  # noqa: PLR2004 - what dates take
        raise argparse.ArgumentTypeError("must be 1 to 36500")
    return days


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Carry the command out."""
    if options.kind == "secret":
        create_secret(options.file)
        say(f"{options.file}: bring it to every machine of the run, mode 0600, and show it to nobody else")
        return {"ok": True, "file": str(options.file)}
    from dcr.credentials import authority  # noqa: PLC0415 - other commands need no cryptography

    if options.kind == "authority":
        authority.create_authority(options.folder, options.days)
        say(f"{options.folder}: ca.pem for every peer, ca.key for nobody")
    else:
        authority.issue(options.authority, options.folder, options.name, options.days)
        say(f"{options.folder}: credentials of {options.name}")
    return {"ok": True, "folder": str(options.folder)}
