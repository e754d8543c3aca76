"""The history of K, read piece by piece as a run goes: each rule is given what breaks it."""

from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dcr.chaos.bits import Twins
from dcr.chaos.checks import Checks
from dcr.chaos.history import FILE, KEPT, History
from dcr.chaos.model import make, train_step
from dcr.control_plane.interface import HistoryEntry
from dcr.rollout.node import describe


def entry(revision, reason, version, digest="", *, operation=None, actor="leader"):
    return HistoryEntry(revision, operation or f"op-{revision}", actor, reason, 0.0, version, digest)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of a run with three checkpoints, and their digests."""
    folder, digests = tmp_path_factory.mktemp("run"), {}
    policy = make("dcr.chaos.model:policy")
    for name in ("v0", "c1", "c2"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        state = {n: t.detach().clone() for n, t in policy.state_dict().items()}
        save_file(state, folder / "checkpoints" / name / "model.safetensors")
        digests[name] = describe(iter(state.items()))[1]
        train_step(policy, len(digests), 0.2)
    assert len(set(digests.values())) == len(digests)
    return folder, digests


@pytest.fixture
def run(checkpoints, tmp_path):
    """A history whose commits are judged by the checks of a run, and what was found wrong."""
    folder, digests = checkpoints
    checks = Checks(folder, Twins("dcr.chaos.model:served"))
    checks.begin(folder / "checkpoints/v0")
    history = History(tmp_path / FILE, checks.problems, lambda e: checks.won(e.version, e.digest))
    return SimpleNamespace(history=history, problems=checks.problems, digests=digests, checks=checks, folder=tmp_path)


def start(digests):
    return [
        entry(1, "CreateRecord", 0, digests["v0"]),
        entry(2, "OpenAttempt", 0, digests["v0"]),
        entry(3, "Commit", 1, digests["c1"]),
        entry(4, "Admit", 1, digests["c1"]),
    ]


@pytest.mark.parametrize("at", range(6))
def test_what_may_be_is_no_problem_wherever_it_is_cut(run, at):
    d = run.digests
    whole = [
        *start(d),
        entry(5, "Commit", 1, d["c1"]),  # of a rollback: nothing is new
        entry(6, "TakeOver", 1, d["c1"], actor="next"),
        entry(7, "Commit", 2, d["c2"], actor="next"),
    ]
    run.history.read(whole[:at])
    run.history.read([])
    run.history.read(whole[at:])
    run.history.end(SimpleNamespace(version=2))
    assert run.problems == []
    assert {v: c.name for v, c in run.checks.versions.items()} == {0: "v0", 1: "c1", 2: "c2"}
    kept = [msgspec.json.decode(line, type=HistoryEntry) for line in (run.folder / FILE).read_bytes().splitlines()]
    assert kept == whole


BAD = {
    "goes from revision 2 to 4": lambda d: [*start(d)[:2], start(d)[3]],
    "goes from revision 0 to 2": lambda d: start(d)[1:],
    "goes from revision 4 to 4": lambda d: [*start(d), entry(4, "Admit", 1, operation="another")],
    "revision 5 (Commit by leader) makes version 1 of 1": lambda d: [*start(d), entry(5, "Commit", 1, d["v0"])],
    "version 1 has two winners: c1 and c2": lambda d: [*start(d), entry(5, "Commit", 1, d["c2"])],
    "revision 2 (Commit by leader) makes version 2 of 0": lambda d: [start(d)[0], entry(2, "Commit", 2, d["c2"])],
    "revision 5 (Admit by leader) makes version 0 of 1": lambda d: [*start(d), entry(5, "Admit", 0)],
    "revision 5 (Admit by leader) makes version 2 of 1": lambda d: [*start(d), entry(5, "Admit", 2)],
    "version 2 is none of the trainer's checkpoints: beef": lambda d: [*start(d), entry(5, "Commit", 2, "beef")],
    "operation op-3 made revision 5, and one before it": lambda d: [*start(d), entry(5, "Admit", 1, operation="op-3")],
    "revision 6 (Admit) is of leader, which was replaced before it": lambda d: [
        *start(d),
        entry(5, "TakeOver", 1, actor="next"),
        entry(6, "Admit", 1),
    ],
    "the record is at version 1, and its history at 0": lambda d: start(d)[:2],
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.parametrize("piecewise", [False, True])
def test_what_may_not_be_is_said(run, said, piecewise):
    entries = BAD[said](run.digests)
    for piece in [[e] for e in entries] if piecewise else [entries]:
        run.history.read(piece)
    run.history.end(SimpleNamespace(version=1))
    assert any(said in p for p in run.problems), run.problems


def test_writes_that_were_forgotten_before_they_were_read_are_named_and_nothing_else_is_wrong(run):
    d = run.digests
    run.history.read(start(d))
    first = 4 + 100
    last = first + KEPT - 1
    kept = [entry(revision, "Admit", 5) for revision in range(first, last)]  # versions 2 to 5 came in the gap
    run.history.read([*kept, entry(last, "Commit", 6, d["c2"])])
    run.history.end(SimpleNamespace(version=6))
    (said,) = run.problems
    assert said.startswith(
        f"revisions 5 to {first - 1} of the record were not checked: the control plane keeps 1024 writes"
    )


@given(st.lists(st.sampled_from(["Commit", "Admit", "TakeOver", "OpenAttempt"]), max_size=30), st.data())
def test_one_write_that_is_left_out_or_made_twice_is_always_noticed(tmp_path_factory, reasons, data):
    """Whatever a history is like: it is right as it is, and with one write missing or repeated it is not."""
    entries, version, leader = [entry(1, "CreateRecord", 0)], 0, 1
    for revision, reason in enumerate(reasons, 2):
        version += reason == "Commit"
        leader += reason == "TakeOver"
        entries.append(entry(revision, reason, version, actor=f"leader-{leader}"))
    at = data.draw(st.integers(0, len(entries) - 1))
    folder = tmp_path_factory.mktemp("history")

    def judged(those):
        problems = []
        history = History(folder / FILE, problems, lambda e: False)
        for piece in ([], *([e] for e in those)):
            history.read(piece)
        history.end(SimpleNamespace(version=version))
        return problems

    assert judged(entries) == []
    assert judged([*entries[: at + 1], *entries[at:]])
    missing = [*entries[:at], *entries[at + 1 :]]
    if any(b.revision != a.revision + 1 for a, b in pairwise([SimpleNamespace(revision=0), *missing])):
        assert judged(missing)
