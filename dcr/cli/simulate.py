"""`dcr simulate`: whole deployments of the protocol in one process, from seeds, schedules and scenarios."""

import argparse
from pathlib import Path
from typing import Any

from dcr.cli.report import say
from dcr.protocol.errors import RefusedError
from dcr.simulator.campaign import Campaign, run_seeds
from dcr.simulator.run import STEPS, Failure
from dcr.simulator.scenarios import SCENARIOS
from dcr.simulator.schedule import Schedule, decode_schedule, encode_schedule
from dcr.simulator.story import tell

SAVE = Path("run/simulate")
SEEDS = 1000
_SHRINK_S = 30.0

_DESCRIPTION = """\
Runs the roles of dcr.protocol, policy included, as whole deployments in one process: trainers, coordinators, engines
of several ranks, the control plane and the delivery store.  A seed decides everything: what is deployed, what is lost,
doubled, delayed, torn, cut off, killed, started again or timed out, and when.  After every move what the specification
promises is compared on concrete cells; then faults stop, and every engine must come to serve what is committed.

  dcr simulate                      a thousand seeds, ten seconds
  dcr simulate --seeds 100000       more of them
  dcr simulate --start-seed 7 --seeds 1 --steps 400     one long one
  dcr simulate --list               schedules that somebody thought of, by name
  dcr simulate --scenario NAME      one of them, told as a story
  dcr simulate --replay FILE        a schedule that was kept, told as a story

A seed that breaks something is named, its schedule is made as short as it can be, told and kept as JSON (--save).
docs/simulator.md says what is simulated and what is not, and which check stands for which property."""

_EPILOG = "exit status: 0 everything held; 1 an invariant broke; 2 the command line is wrong; 3 FILE was refused"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("0 or more")
    return number


def add(commands: Any) -> None:
    """Add `simulate` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="run the protocol in one process, from seeds",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name="simulate")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=_count, metavar="N", help=f"how many seeds ({SEEDS})")
    what.add_argument("--replay", type=Path, metavar="FILE", help="run and tell a schedule that was kept")
    what.add_argument("--scenario", choices=sorted(SCENARIOS), metavar="NAME", help="run and tell a scenario")
    what.add_argument("--list", action="store_true", help="list the scenarios")
    parser.add_argument("--start-seed", type=_seed, default=0, metavar="N", help="the first seed (0)")
    parser.add_argument("--steps", type=_count, default=STEPS, metavar="N", help=f"moves before faults stop ({STEPS})")
    parser.add_argument("--save", type=Path, default=SAVE, metavar="DIR", help=f"where failures go ({SAVE})")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for.

    Raises:
        RefusedError: the file is no schedule.
    """
    if options.list:
        for name, scenario in SCENARIOS.items():
            say(f"{name:32} {scenario.sentence}")
        return {"ok": True, "scenarios": {name: s.sentence for name, s in SCENARIOS.items()}}
    if options.scenario:
        say(f"{options.scenario}: {SCENARIOS[options.scenario].sentence}")
        return _told(SCENARIOS[options.scenario].schedule())
    if options.replay:
        return _told(_read(options.replay))
    return _seeds(options)


def _read(file: Path) -> Schedule:
    try:
        return decode_schedule(file.read_bytes())
    except OSError as error:
        raise RefusedError(f"{file}: {error.strerror}") from None
    except RefusedError as error:
        raise RefusedError(f"{file}: {error}") from None


def _told(schedule: Schedule) -> dict[str, Any]:
    done, story = tell(schedule)
    say(story)
    failed = done.failure
    return {
        "ok": failed is None,
        "moves": len(schedule.moves),
        "steps": done.steps,
        "outcome": done.outcome,
        "invariant": failed.invariant if failed else "",
        "what": failed.what if failed else "",
    }


def _seeds(options: argparse.Namespace) -> dict[str, Any]:
    first, count = options.start_seed, options.seeds or SEEDS
    wanted = range(first, first + count)

    def progress(done: Campaign) -> None:
        say(f"{done.coverage.seeds:8,} of {count:,} seeds, {done.steps:,} steps, {len(done.failed)} failed")

    done = run_seeds(wanted, options.steps, shrink_s=_SHRINK_S, tell=progress)
    found = [_failed(options, seed, failure) for seed, failure in done.failures.values()]
    never, ran = done.coverage.never, done.coverage.seeds
    if count == 1:
        say(f"taken: {', '.join(action for action, by in done.coverage.table() if by)}")
    else:
        say(f"{'action':44} seeds")
        for action, by in done.coverage.table():
            say(f"{action:44} {by:7,}")
        if never:
            say(f"never taken: {', '.join(never)}")
    rate = f"{1000 * done.seconds / ran:.1f} ms a seed"
    seeds = "1 seed" if ran == 1 else f"{ran:,} seeds"
    say(f"{seeds} from {first}, {done.steps:,} steps, {rate}; {len(done.failed)} failed")
    return {
        "ok": not done.failed,
        "first": first,
        "seeds": ran,
        "steps": done.steps,
        "seconds": done.seconds,
        "failed": done.failed,
        "failures": found,
        "actions": dict(done.coverage.table()),
        "never": never,
    }


def _failed(options: argparse.Namespace, seed: int, failure: Failure) -> dict[str, Any]:
    say(f"WRONG  seed {seed}: {failure.invariant}: {failure.what}")
    say(tell(failure.schedule)[1])
    path = options.save / f"seed-{seed}.json"
    kept = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_schedule(failure.schedule))
    except OSError as error:
        say(f"       not saved: {path}: {error.strerror}; --save names another folder")
    else:
        kept = str(path)
        say(f"       {len(failure.schedule.moves)} moves, saved: dcr simulate --replay {path}")
    return {"seed": seed, "invariant": failure.invariant, "what": failure.what, "schedule": kept}
