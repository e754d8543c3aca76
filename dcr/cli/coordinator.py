"""`dcr coordinator`: a coordinator in a process of its own, which leads when no other one does."""

import argparse
import json
import logging
import re
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcr.cli.record_options import add_control, add_record_id
from dcr.cli.report import say
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import check_text
from dcr.delivery.address import open_delivery
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.errors import RefusedError
from dcr.runtime.event_log import event_folder
from dcr.runtime.registry import RelayDirectory
from dcr.runtime.secret import record_secret
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import Settings

if TYPE_CHECKING:
    from dcr.runtime.standby import Standby

_DESCRIPTION = """\
Runs the coordinator of a trainer whose setting coordinator is "elsewhere".  Start as many as you like, on machines of
their own: one leads, the others stand by.  When the leader dies, is cut off or held still, its lease runs out
(leader_lease_s), one of the others takes over, and a push in progress goes on.

  dcr coordinator --control sqlite:///tmp/run/record.db --delivery file:///tmp/run/payloads
  dcr coordinator --control 'etcd://10.0.0.9:2379/dcr?ca=/etc/dcr/etcd/ca.pem&secret=/etc/dcr/run.secret' \\
      --delivery 's3://bucket/prefix?region=us-east-1' --settings /etc/dcr/settings.json \\
      --settings 'channel=tls:///etc/dcr/coordinator-b?listen=10.0.0.5:7100' --name coordinator-b

Give each the trainer's delivery, record id and settings: gate_mode, members_min, attempts_max and the time-outs are the
leader's to keep, and one that has others than the trainer's does not lead, and says in what.  It needs no GPU and holds
no weight.  SIGTERM and SIGINT end it: a leader gives its lease back, and the next one need not wait.  What it waits for
and does, it tells on standard error.  docs/coordinator.md says when to use it, and what a failover costs.

Exit status: 0 ended by a signal; 1 it led and failed by itself, as it would again; 3 an argument was refused, or what
it needs could not be opened.  Losing the lease ends nothing: it stands by again."""

_KEY = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)
_LOOK_S = 0.5


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "coordinator",
        help="lead a record from a process of its own, or stand by",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name="coordinator")
    add_control(parser)
    parser.add_argument("--delivery", required=True, metavar="ADDRESS", help="delivery, as the trainer has it")
    add_record_id(parser)
    parser.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="FILE|KEY=VALUE",
        help="settings: a file with a JSON object, or one of them; may be repeated, and the last one counts",
    )
    parser.add_argument(
        "--name", default=None, metavar="NAME", help="begins the names under which it leads (coordinator-HOST)"
    )
    parser.add_argument(
        "--event-log", default=None, metavar="PLACE", help="setting event_log: beside, off, or a folder"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Stand by and lead until a signal comes.

    Raises:
        DcrError: an argument was refused, or something could not be opened.
    """
    settings = _settings([*options.settings, *([f"event_log={options.event_log}"] if options.event_log else [])])
    name = f"coordinator-{socket.gethostname()}" if options.name is None else options.name
    check_text("name", name, 100)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("dcr.coordinator").info("coordinator %s starts, for record %r", name, options.record_id)
    from dcr.runtime.standby import CoordinatorFailedError, Standby  # noqa: PLC0415 - it takes a second to import

    with ExitStack() as opened:
        control = open_control_plane(options.control)
        opened.callback(control.close)
        secret = run_secret(options.control)
        store = open_delivery(options.delivery, RelayDirectory(control, options.record_id))
        delivery = SealedDelivery(store, record_secret(secret, options.record_id))
        opened.callback(delivery.close)
        standby = Standby(
            record_id=options.record_id,
            name=name,
            control=control,
            delivery=delivery,
            secret=secret,
            settings=settings,
            events=event_folder(settings.event_log, options.control),
        )
        try:
            why = _until_signalled(standby)
        except CoordinatorFailedError as e:
            say(str(e))
            return {"ok": False, "name": name, "terms": standby.terms, "error": str(e)}
    say(f"ended by {why}, after leading {standby.terms} times")
    return {"ok": True, "name": name, "terms": standby.terms, "error": ""}


def _until_signalled(standby: "Standby") -> str:
    """Run it in a thread; returns the name of the signal that ended it, and raises what it raised."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            standby.run()
        except BaseException as e:  # noqa: BLE001 - raised again below
            raised.append(e)

    ends = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        thread = threading.Thread(target=work, name="dcr-standby")
        thread.start()
        got = None
        while thread.is_alive() and got is None:
            got = signal.sigtimedwait(ends, _LOOK_S)
            if got is not None and got.si_signo not in ends:
                got = None  # interrupted, by being held still and let go: Python 3.11 then returns what is no signal
        standby.stop()
        thread.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if raised:
        raise raised[0]
    return "nothing" if got is None else signal.Signals(got.si_signo).name


def _settings(given: list[str]) -> Settings:
    """Files and single values, the last one of each key."""
    values: dict[str, object] = {}
    for one in given:
        found = _KEY.fullmatch(one)
        values |= _file(Path(one)) if found is None else {found[1]: _value(found[2])}
    return Settings.of(values)


def _value(text: str) -> object:
    """A number as a number, and everything else as the text that it is."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float) else text


def _file(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text())
    except OSError as e:
        raise RefusedError(f"--settings {path}: {e.strerror}; give a file, or key=value") from e
    except ValueError as e:
        raise RefusedError(f"--settings {path}: no JSON: {e}") from e
    if not isinstance(values, dict):
        raise RefusedError(f"--settings {path}: must hold one JSON object with settings by name")
    return values
