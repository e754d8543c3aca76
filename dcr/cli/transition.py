"""`dcr transition`: how the open transition stands, and the operator's ways out of one that stopped."""

import argparse
from typing import Any

import msgspec

from dcr.cli.record_options import add_channel, add_control, add_record_id
from dcr.cli.report import UndecidedError, say, waiting
from dcr.cli.seconds import seconds
from dcr.control_plane.address import open_existing
from dcr.control_plane.interface import ControlPlane
from dcr.control_plane.lease import Lease
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Intervened, Intervention
from dcr.protocol.record import Direction, OpenTransition, decode_record
from dcr.runtime.operator import NoRecordError, OperatorError, intervene
from dcr.runtime.secret_path import run_secret

_DESCRIPTION = """\
Asks the leader of a record how the open transition stands, or orders what becomes of one that stopped because
attempts_max attempts have failed.  Clean engines serve the committed version meanwhile, torn ones stay gated.

  dcr transition show --control sqlite:///tmp/run/record.db
  dcr transition resume --control sqlite:///tmp/run/record.db

show       what is open, what the leader waits for, whose push waits, why attempts failed, and which engines do not
           serve and why; where no leader answers, what the record alone says, and what is not known
resume     attempts_max more attempts, with the weights of the push that waits (setting stopped_push = wait); where none
           does, push() in the trainer resumes, with the same weights
dense      the same, and every element is sent; where no push waits, the next one sends every element
abandon    give the candidate up; engines that it tore are restored to the committed version
roll-back  the same in place, without a restore, also while attempts are under way

A push that waits ends with an error that says so after abandon and roll-back.

An order outlives the leader that it is given to: its successor obeys it, and is asked if no answer came.

Exit status: 0 shown, or ordered; 1 it makes no sense as things stand, or there is no such record, and nothing was
changed; 3 no leader answered: what was shown is from the record alone, and nothing is ordered, unless it says that the
order was taken."""

_HELP = {
    Intervention.SHOW: "how it stands",
    Intervention.RESUME: "go on with a stopped transition",
    Intervention.DENSE: "go on with it, and send every element",
    Intervention.ABANDON: "give a stopped transition up",
    Intervention.ROLL_BACK: "turn the open transition back",
}
_ORDERED = {
    Intervention.RESUME: "ordered: it goes on",
    Intervention.DENSE: "ordered: the next attempt sends every element",
    Intervention.ABANDON: "ordered: it is abandoned, and engines that it tore are restored",
    Intervention.ROLL_BACK: "ordered: it is turned back",
}


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "transition",
        help="show the open transition; resume, abandon or turn back one that stopped",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="what", required=True, metavar="|".join(_HELP))
    for what, explained in _HELP.items():
        one = kinds.add_parser(what.value, help=explained)
        one.set_defaults(run=run, command_name="transition")
        add_control(one)
        add_record_id(one)
        add_channel(one)
        one.add_argument(
            "--timeout-s",
            type=seconds,
            default=30.0,
            metavar="S",
            help="how long to look for the leader, and then for its answer (30); where nobody leads and no trainer "
            "asks for a coordinator, as after a trainer was closed, none is waited for",
        )
        one.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Ask, and print the answer.

    Raises:
        DcrError: nobody could be asked.
    """
    what = Intervention(options.what)
    control = open_existing(options.control)
    try:
        bound = f"at most {options.timeout_s:g} s until it is found, and as long for its answer"
        with waiting("transition", lambda: f"the leader of record {options.record_id!r}, {bound}"):
            answer = _asked(control, options, what)
        lease = None if answer.leader else control.leader(options.record_id)
    except NoRecordError as e:
        say(str(e))
        return {"ok": False, "what": what.value, "record_id": options.record_id, "error": str(e)}
    finally:
        control.close()
    if what is not Intervention.SHOW:
        say("before the order:")
    _show(answer, lease)
    if not answer.leader:
        raise UndecidedError(answer.refused, {"what": what.value, **_plain(answer)})
    if answer.refused:
        say(f"refused: {answer.refused}")
    elif what in _ORDERED:
        say(_ORDERED[what])
    return {"ok": not answer.refused, "what": what.value, **_plain(answer)}


def _asked(control: ControlPlane, options: argparse.Namespace, what: Intervention) -> Intervened:
    """The leader's answer; where none answers, to ``show``, what the record alone says, from no leader."""
    record_id = options.record_id
    try:
        return intervene(
            control,
            record_id,
            run_secret(options.control),
            what,
            channel=options.channel,
            connect_s=options.timeout_s,
            answer_s=options.timeout_s,
        )
    except OperatorError as e:
        stored = control.read(record_id) if what is Intervention.SHOW else None
        if stored is None:
            raise
        return Intervened(record_id, "", decode_record(stored.body), "", "", (), (), str(e))


def _plain(answer: Intervened) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    plain.pop("type")
    return plain


def _show(answer: Intervened, lease: Lease | None) -> None:
    k = answer.record
    if not answer.leader:
        leader = "nobody leads" if lease is None else f"{lease.holder} holds the lease, and does not answer"
    else:
        leader = f"led by {answer.leader}"
    if k is None:
        say(f"record {answer.record_id}: {answer.leader} has not taken it over yet")
    else:
        say(f"record {k.record_id}: version {k.version}, epoch {k.epoch}, {leader}")
        say(f"  open      {'no transition' if k.open is None else _open(k.open, answer.phase)}")
    if not answer.leader:
        say("  not known who pushes, what is waited for, why attempts failed, and who serves: only the leader knows")
        return
    nobody = "not known before every rank is connected" if answer.phase == Phase.STARTING else "nobody"
    say(f"  pushing   {', '.join(answer.waiting) or nobody}")
    if answer.waits_for:
        say(f"  waits for {answer.waits_for}")
    for failure in answer.failures:
        say(f"  failed    {failure}")
    for s in answer.standings:
        say(f"  {s.state:<9} {s.engine}: {s.why}")
    if answer.standings_left_out:
        say(f"  and {answer.standings_left_out} more engines that do not serve")
    if k is not None and k.open is not None and not answer.failures and _failed(k.open, answer.phase):
        say("  failed    not known why: the coordinator that ran those attempts is gone; its log has it")


def _failed(tr: OpenTransition, phase: str) -> int:
    """How many of its attempts are over."""
    return tr.attempts - (phase == Phase.ATTEMPT)


_UNDER_WAY = {
    Phase.ATTEMPT: "under way",
    Phase.WRITING: "the record is being written",
    "": "under way or not, only the leader knows",
}


def _open(tr: OpenTransition, phase: str) -> str:
    way = "back from" if tr.direction is Direction.BACK else "to"
    tries = "1 attempt" if tr.attempts == 1 else f"{tr.attempts} attempts"
    last = f"the last one {tr.kind.value}, {_UNDER_WAY.get(phase, 'none under way now')}"
    return f"{way} version {tr.target}, {tries}, {'stopped' if tr.stopped else last}"
