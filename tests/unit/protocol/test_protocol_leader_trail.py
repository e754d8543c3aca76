"""The trail of a leader: each step names who took it, which action of the specification it was, and the epoch."""

import pytest
from leader import D0, D1, V0, Bare, Leader, attempting, committed, leading, succeeding

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, manifest_root
from dcr.protocol.messages import (
    CandidateReady,
    EmitFailed,
    Folded,
    Outcome,
    OwnerJoin,
    Refuse,
    Sealed,
    StorageState,
)
from dcr.protocol.record import Member
from dcr.protocol.step import Step

EMPTY = StorageState(None, "", ("unknown",))


def trail(at: Leader) -> list[tuple[str, str, int]]:
    return [(s.actor, s.action, s.epoch) for s in at.steps]


def told(at: Leader, action: str) -> list[Step]:
    return [s for s in at.steps if s.action == action]


def test_a_transition_that_goes_well() -> None:
    at = committed("a")
    at.folded()
    assert trail(at) == [
        ("c1", "CreateRecord", 0),
        ("c1", "Admit", 0),
        ("c1", "OpenAttempt", 1),
        ("c1", "OrderOpenApply", 1),
        ("c1", "Commit", 1),
        ("c1", "Publish", 1),
        ("c1", "FinishTransition", 1),
    ]


def test_a_transition_that_is_turned_back() -> None:
    at = attempting("a", "b")
    at.do(at.c.roll_back())
    assert trail(at)[2:] == [
        ("c1", "Admit", 0),
        ("c1", "OpenAttempt", 1),
        ("c1", "AttemptFailed", 1),
        ("c1", "RollBack", 1),
        ("c1", "OpenAttempt", 2),
    ]


def test_a_restore() -> None:
    at = leading("a")
    at.joins("b", EMPTY)
    at.steps.clear()
    at.prepared("b", EMPTY)
    at.acknowledged("b")
    assert trail(at) == [
        ("c1", "OrderOpenApply", 1),
        ("c1", "EndRestore", 1),
        ("c1", "Publish", 1),
        ("c1", "FinishTransition", 0),
        ("c1", "Admit", 1),
    ]
    at.joins("d", EMPTY)
    at.owner(EmitFailed("o", 1, at.epoch, "down", fatal=False))
    assert told(at, "EndRestore")[-1] == Step("c1", "EndRestore", 2, "down")


def test_a_rollback_that_cannot_be_opened_is_refused_by_its_name() -> None:
    at = Bare()
    at.owner_joins()
    at.joins("a")
    at.push()
    at.do(at.c.open_attempt(Kind.RELATIVE))
    at.fails("a")
    at.do(at.c.fail_attempt())
    at.do(at.c.member_lost("a", 1))
    with pytest.raises(RefusedError, match="RollBack of record 'policy' was refused at epoch 1: 0 engines"):
        at.c.roll_back()


@pytest.mark.parametrize(
    ("times", "settings", "why"),
    [
        (2, {}, "before the next attempt, for absolute attempt of epoch 2: down"),
        (1, {"attempts_max": 1, "stop_waits": True}, "the transition stopped, and its push waits"),
    ],
)
def test_a_wait_says_what_for(times: int, settings: dict, why: str) -> None:
    at = attempting("a", **settings)
    for _ in range(times):
        at.owner(EmitFailed("o", 1, at.epoch, "down", fatal=False))
    (step,) = told(at, "Wait")
    assert (step.actor, step.epoch) == ("c1", 2)
    assert step.detail.startswith(why)


def test_a_wait_for_engines_says_what_for() -> None:
    at = leading()
    at.push()
    (step,) = told(at, "Wait")
    assert (step.actor, step.epoch) == ("c1", 0)
    assert step.detail.startswith("too few engines")


def test_a_wait_for_engines_does_not_shorten_the_pause_after_a_restore_that_failed() -> None:
    at = leading()
    at.joins("a", EMPTY)
    at.owner(EmitFailed("o", 1, at.epoch, "down", fatal=False))
    at.push()
    at.joins("b", EMPTY)
    assert (at.timers[-1].name, at.reasons[-1]) == ("restore_pause", "OpenRestore")
    at.steps.clear()
    at.expires()
    assert trail(at)[0] == ("c1", "OpenRestore", 2)


def test_an_engine_that_fails_one_attempt_after_another_is_left_out_of_the_next() -> None:
    at = attempting("a", "b")
    at.fails("a", V0)
    at.fails("a", V0)
    at.expires()  # the pause before the third
    assert at.record is not None
    assert at.record.members == (Member("b", 1),)
    assert told(at, "Evict") == [Step("c1", "Evict", 3, "a (1)")]


def test_a_successor_tells_of_the_commit_as_much_as_it_knows() -> None:
    at = succeeding(committed("a"))
    at.owner_joins()
    at.push()
    at.joins("a", StorageState(1, D1, ()))
    at.owner(Folded("o", 1, 1, D1, "", {}))
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    unknown = dict.fromkeys(("attempts", "changed_entries", "elements", "payloads", "payload_bytes"), 0)
    warnings = ["a coordinator that is gone committed it: how many attempts and bytes it took is not known"]
    assert outcome.summary == {"kind": "unknown", "members": ["a"], "failures": [], "warnings": warnings, **unknown}
    assert trail(at)[:2] == [("c2", "TakeOver", 2), ("c2", "Publish", 2)]


def test_a_finished_transition_that_committed_nothing_is_of_no_epoch() -> None:
    at = succeeding(leading("a"))
    at.owner_joins(1, D0)
    assert told(at, "FinishTransition") == [Step("c2", "FinishTransition", 0)]


def test_an_attempt_whose_owner_is_lost_waits_for_it() -> None:
    at = attempting("a")
    at.do(at.c.owner_lost("o", 1))
    assert trail(at)[-2:] == [("c1", "AttemptFailed", 1), ("c1", "Wait", 1)]
    assert (at.steps[-2].detail, at.steps[-1].detail) == ("owner o was lost", "no connection to o")


def test_a_restore_that_takes_too_long_counts_against_the_engine() -> None:
    at = leading(restores_max=1)
    at.joins("a", EMPTY)
    at.take()
    at.expires()
    assert told(at, "EndRestore") == [Step("c1", "EndRestore", 1, "time-out: a did not prepare epoch 1")]
    why = "its restore failed 1 times, last: time-out: a did not prepare epoch 1"
    assert at.take()[0] == Refuse("policy", 1, why)


def test_a_fold_that_is_late_takes_nothing_back_of_what_another_owner_said_of_its_own() -> None:
    at = Leader(owners=("o", "p"))
    half = f"{5:032x}"
    for name in ("o", "p"):
        at.owner(OwnerJoin(name, 1, 1, half))
    at.joins("a")
    for name in ("o", "p"):
        at.owner(CandidateReady(name, 1, 1))
    at.prepared("a")
    for name in ("o", "p"):
        at.owner(Sealed(name, 1, at.epoch, "digest", half, 1, 8, 1, 3, {}))
    at.acknowledged("a", manifest_root({"o": "digest", "p": "digest"}))
    at.owner(Folded("o", 1, at.epoch, "", "the copy failed", {}))
    at.take()
    at.expires()
    outcomes = [o for o in at.take() if isinstance(o, Outcome)]
    lost = "lost its baseline, so the next push sends every element"
    late = f"p {lost}: time-out: no answer to the order to fold"
    assert [o.summary["warnings"] for o in outcomes] == [[f"o {lost}: the copy failed", late]] * 2


def test_a_wait_for_the_other_ranks_is_too_common_to_be_told() -> None:
    at = Leader(owners=("o", "p"))
    for name in ("o", "p"):
        at.owner(OwnerJoin(name, 1, 1, f"{5:032x}"))
    at.push()
    assert at.timers[-1].name == "ranks"
    assert told(at, "Wait") == []
