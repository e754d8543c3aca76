"""The simulator itself: the same everywhere, and bugs are found, made small, kept, told and replayed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcr.cli.main import main
from dcr.protocol.node import Node
from dcr.protocol.receiver import Receiver
from dcr.simulator.run import run_schedule, run_seed
from dcr.simulator.schedule import Schedule, decode_schedule
from dcr.simulator.shrink import Shrinker
from dcr.simulator.story import tell
from tests.mutation import Mutant, apply

NO_MARK = Mutant(
    "no mark before the first byte",
    Receiver,
    "payload",
    "self.torn_by |= {_TEARS.get(base.kind, base.candidate)}",
    "pass",
)
OPEN_GATE = Mutant(
    "what is staged is written while the gate is still open",
    Node,
    "_open_apply",
    'if self.gate == "closed":',
    "if True:",
)
GOLDEN = Path(__file__).parents[2] / "golden"
SCRIPT = """
from dcr.simulator.run import run_seed
for seed in range(40):
    run = run_seed(seed, 120)
    print(seed, run.steps, sorted(run.actions), run.outcome, run.failure)
"""


def outcomes(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=280).stdout


def test_a_seed_has_the_same_run_in_any_process():
    first = outcomes("1")
    assert first.count("\n") == 40
    assert outcomes("2") == first


def test_the_schedule_of_a_seed_has_the_run_of_the_seed(monkeypatch):
    """What a failing seed leaves behind breaks the same, replayed as data."""
    apply(NO_MARK, monkeypatch)
    found = [run.failure for run in map(run_seed, range(60)) if run.failure is not None]
    assert len(found) > 5
    for failure in found:
        again = run_schedule(failure.schedule).failure
        assert again is not None
        assert (again.invariant, again.what) == (failure.invariant, failure.what)


def test_an_owner_that_never_folds_is_not_asked_for_what_it_would_hold_then():
    """A push that changed nothing, whose fold was given up: what the owner holds is the committed content by chance."""
    run = run_schedule(decode_schedule((GOLDEN / "simulated_fold_overdue.json").read_bytes()))
    assert run.failure is None, run.failure


def found_with(mutant, monkeypatch, **how):
    apply(mutant, monkeypatch)
    return next(run.failure for run in (run_seed(n, **how) for n in range(500)) if run.failure is not None)


def test_a_failure_is_made_small_and_breaks_the_same(monkeypatch):
    failure = found_with(OPEN_GATE, monkeypatch, steps=150)
    small = Shrinker(failure, 60).shrink()
    assert small.invariant == failure.invariant == "ServingExact"
    assert len(small.schedule.moves) < len(failure.schedule.moves)
    moves = small.schedule.moves
    for at in range(len(moves)):
        fewer = Schedule(small.schedule.setup, moves[:at] + moves[at + 1 :])
        other = run_schedule(fewer).failure
        assert other is None or other.invariant != small.invariant, f"move {at} is not needed"


def test_a_shrinker_without_time_changes_nothing(monkeypatch):
    failure = found_with(NO_MARK, monkeypatch, steps=60)
    assert Shrinker(failure, 0).shrink() == failure


def test_a_story_says_who_did_what_and_what_broke(monkeypatch):
    _, story = tell(found_with(OPEN_GATE, monkeypatch, steps=60).schedule)
    assert "the trainer pushes" in story
    legend, _, moves = story.partition("\n  1  ")
    assert "o0.1: owner o0 in trainer 1" in legend
    taken = set(re.findall(r"^ +\w+: (\w+), epoch", moves, re.MULTILINE))
    assert taken  # each word for a step is explained before it comes, and no other
    assert set(re.findall(r"^  (\w+) +\w", legend, re.MULTILINE)) == taken
    assert max(map(len, story.splitlines())) <= 120
    assert re.search(r"^ +c\d: OpenAttempt, epoch \d+$", story, re.MULTILINE)
    assert story.splitlines()[-1].startswith("BROKEN ServingExact: rank 0 of e0 writes under an open gate")


def command(capsys, *arguments):
    status = main(["simulate", *arguments, "--json"])
    *said, last = capsys.readouterr().out.splitlines()
    return status, json.loads(last), "\n".join(said)


def test_seeds_that_hold(capsys):
    status, report, said = command(capsys, "--seeds", "30", "--start-seed", "5", "--steps", "20")
    assert (status, report["ok"], report["seeds"], report["first"], report["failed"]) == (0, True, 30, 5, [])
    assert report["actions"]["Commit"] > 0
    assert "30 seeds from 5" in said


def test_one_seed_needs_no_table(capsys):
    status, report, said = command(capsys, "--seeds", "1")
    assert (status, report["ok"]) == (0, True)
    taken, last = said.splitlines()
    assert taken.startswith("taken: ")
    assert set(taken.removeprefix("taken: ").split(", ")) == {a for a, seeds in report["actions"].items() if seeds}
    assert last.startswith("1 seed from 0, ")


def test_a_seed_that_breaks_something_is_kept_and_replays(capsys, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        apply(OPEN_GATE, patch)
        status, report, said = command(capsys, "--seeds", "40", "--save", str(tmp_path))
        assert (status, report["ok"]) == (1, False)
        failure = next(f for f in report["failures"] if f["invariant"] == "ServingExact")
        assert f"dcr simulate --replay {failure['schedule']}" in said
        assert f"WRONG  seed {failure['seed']}: ServingExact" in said
        status, replayed, said = command(capsys, "--replay", failure["schedule"])
        assert (status, replayed["invariant"], replayed["what"]) == (1, "ServingExact", failure["what"])
        assert f"BROKEN ServingExact: {failure['what']}" in said
    status, replayed, _ = command(capsys, "--replay", failure["schedule"])
    assert (status, replayed["ok"]) == (0, True)
    with open(failure["schedule"], "rb") as kept:  # noqa: PTH123
        assert decode_schedule(kept.read()).invariant == "ServingExact"


def test_a_file_that_is_no_schedule_is_refused(capsys, tmp_path):
    file = tmp_path / "x.json"
    for text, why in ((None, "No such file"), ("{}", "no schedule"), ('{"moves": 3}', "no schedule")):
        if text is not None:
            file.write_text(text)
        status, report, _ = command(capsys, "--replay", str(file))
        assert (status, report["ok"]) == (3, False)
        assert str(file) in report["error"]
        assert why in report["error"]


@pytest.mark.parametrize(
    "arguments", [["--seeds", "0"], ["--scenario", "nothing"], ["--list", "--seeds", "3"], ["--start-seed", "-1"]]
)
def test_a_wrong_command_line_ends_with_2(arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *arguments])
