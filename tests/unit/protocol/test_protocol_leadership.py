"""The coordinator and K: unknown outcomes, other leaders, and how leading begins."""

import pytest
from leader import D0, D1, V0, Leader, attempting, committed, leading, succeeding, token

from dcr.protocol.coordinator import Phase
from dcr.protocol.coordinator_effects import ReadRecord, WriteRecord
from dcr.protocol.identity import manifest_root
from dcr.protocol.leader import REWRITES_MAX
from dcr.protocol.messages import (
    CONTROL_VERSION,
    CandidateReady,
    Emit,
    EmitFailed,
    Fold,
    Folded,
    Outcome,
    OwnerJoin,
    Prepare,
    Published,
    Sealed,
    StorageState,
)
from dcr.protocol.record import Direction
from dcr.protocol.step import Step

SHARES_0 = {"o": f"{5:032x}", "p": f"{5:032x}"}  # of D0
SHARES_1 = {"o": f"{5:032x}", "p": f"{6:032x}"}  # of D1


def held_open() -> tuple[Leader, WriteRecord]:
    at = leading("a")
    at.hold_writes = True
    at.push()
    return at, at.held[-1]


def test_an_unknown_outcome_is_resolved_by_reading_back() -> None:
    at, w = held_open()
    assert at.c.unknown(w.operation_id) == [ReadRecord()]
    effects = at.c.record_read(at.revision + 1, w.record, w.operation_id)
    assert [e.action for e in effects if isinstance(e, Step)] == ["ReadBack", "OpenAttempt"]
    assert at.c.phase is Phase.ATTEMPT


def test_the_old_revision_proves_nothing_and_the_same_write_settles_it() -> None:
    at, w = held_open()
    at.c.unknown(w.operation_id)
    assert at.c.record_read(at.revision, at.record, "before") == [
        Step("c1", "WriteAgain", 1, operation_id=w.operation_id),
        w,
    ]
    at.do(at.c.conflict(w.operation_id, at.revision + 1, w.operation_id))  # the first one took effect after all
    assert at.c.phase is Phase.ATTEMPT


def test_an_outcome_that_stays_unknown_is_fatal_in_the_end() -> None:
    at, w = held_open()
    for _ in range(REWRITES_MAX + 1):
        assert not at.fatal
        at.c.unknown(w.operation_id)
        at.do(at.c.record_read(at.revision, at.record, "before"))
    assert "again and again" in at.fatal


@pytest.mark.parametrize("how", ["conflict", "read"])
def test_another_leader_ends_this_one(how: str) -> None:
    at, w = held_open()
    other = at.record.take_over("c2")
    if how == "conflict":
        at.do(at.c.conflict(w.operation_id, at.revision + 1, "other"))
    else:
        at.c.unknown(w.operation_id)
        at.do(at.c.record_read(at.revision + 1, other, "other"))
    named = " (c2)" if how == "read" else ""
    assert f"another coordinator{named} leads record 'policy'" in at.fatal
    at.take()
    at.prepared("a")
    at.push(3)
    at.do(at.c.abandon())
    assert at.take() == []


def test_late_answers_of_the_control_plane_change_nothing() -> None:
    at, w = held_open()
    assert at.c.written("another", 9) == []
    assert at.c.conflict("another", 9, "x") == []
    assert at.c.unknown("another") == []
    at.write()
    assert at.c.written(w.operation_id, 9) == []
    assert at.c.record_read(at.revision, at.record, "x") == []


def test_a_leader_that_gave_up_does_nothing_more_whatever_it_reads() -> None:
    at = leading("a")
    at.hold_writes = True
    at.push()
    w = at.held[-1]
    for _ in range(REWRITES_MAX + 1):
        at.c.unknown(w.operation_id)
        gave_up = at.c.record_read(at.revision, at.record, "")
    step, fatal = gave_up
    assert "open again and again" in fatal.reason
    assert step == Step("c1", "Fatal", 0, fatal.reason)
    assert at.c.record_read(at.revision + 1, w.record, w.operation_id) == []  # its write took effect after all
    assert at.c.written(w.operation_id, at.revision + 1) == []
    assert at.c.conflict(w.operation_id, at.revision + 1, w.operation_id) == []
    assert at.c.unknown(w.operation_id) == []
    assert at.c.phase is Phase.FATAL


def test_version_0_needs_every_owners_baseline() -> None:
    at = Leader()
    at.owner_joins(1, "")
    assert "version 0 cannot be created" in at.fatal


def test_another_control_version_of_an_owner_is_fatal() -> None:
    at = Leader()
    at.owner(OwnerJoin("o", 1, 7, D0))
    assert "control version 7" in at.fatal


def test_a_leader_that_reads_of_another_one_leads_no_more() -> None:
    at = leading("a")
    other = at.record.take_over("c2")
    assert at.c.record_read(at.revision, at.record, "x") == []
    assert at.c.record_read(at.revision - 1, other, "x") == []  # a read that our last write has overtaken
    at.do(at.c.record_read(at.revision + 1, other, "x"))
    assert "another coordinator (c2) leads" in at.fatal
    assert at.c.phase is Phase.FATAL


def test_a_new_leader_goes_on_with_the_candidate_of_owners_that_live() -> None:
    at = succeeding(attempting("a"))
    at.owner_joins()
    assert at.reasons == ["TakeOver"]  # the owner may be about to say that it still waits
    at.push()
    at.joins("a")
    assert at.reasons == ["TakeOver", "OpenAttempt"]
    assert (at.record.fencing_token, at.record.open.candidate, at.record.open.attempts) == (2, token(1, 1), 2)
    assert at.c.candidate == token(1, 1)
    at.prepared("a")
    at.seals()
    at.acknowledged("a")
    at.folded()
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert (outcome.error, outcome.push, outcome.candidate) == ("", 1, token(1, 1))


def test_a_new_leader_does_not_take_another_push_for_the_candidate() -> None:
    """The first was given up, and the leader that was told of it is gone: the weights may be others."""
    at = succeeding(attempting("a"))
    at.owner_joins()
    at.joins("a")
    at.push(4)
    assert at.reasons == ["TakeOver", "Abandon", "OpenAttempt"]
    assert (at.record.open.pushes, at.record.open.attempts) == ((4,), 1)


def test_a_push_that_was_given_up_unheard_makes_room_for_the_next() -> None:
    """Its ``Withdraw`` was lost: the owner says it again when it is ordered to emit (DESIGN D10)."""
    at = attempting("a")
    at.push(2)  # what the owner says on its next connection
    assert at.record.open is not None
    at.owner(EmitFailed("o", 1, at.epoch, "o has no candidate: its push was given up", fatal=True, given_up=1))
    assert at.record.open.pushes == (2,)
    assert at.reasons[-2:] == ["Abandon", "OpenAttempt"]
    at.owner(EmitFailed("o", 1, at.epoch, "o has no candidate: its push was given up", fatal=True, given_up=2))
    assert at.reasons[-1] == "Abandon"
    assert at.record.open is None


def test_a_new_leader_tells_those_who_wait_that_the_old_one_stopped() -> None:
    old = attempting("a", attempts_max=1)
    old.owner(EmitFailed("o", 1, old.epoch, "down", fatal=False))
    assert old.record.open.stopped
    at = succeeding(old)
    at.owner_joins()
    at.joins("a")
    at.push()
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert (outcome.push, outcome.error.partition(";")[0]) == (1, "the transition stopped")
    assert at.reasons == ["TakeOver"]


def test_a_commit_that_only_some_owners_heard_of_is_told_to_the_others() -> None:
    """One has gone on to its next push; the other, still waiting, must not be taken for offering something new."""
    old = Leader(owners=("o", "p"))
    for name, share in SHARES_0.items():
        old.owner(OwnerJoin(name, 1, CONTROL_VERSION, share))
    old.joins("a")
    for name in SHARES_0:
        old.owner(CandidateReady(name, 1, 1))
    old.prepared("a")
    for name, share in SHARES_1.items():
        old.owner(Sealed(name, 1, old.epoch, "digest", share, 1, 8, 1, 3, {}))
    old.acknowledged("a", manifest_root({"o": "digest", "p": "digest"}))
    committed_at = old.record.committed.epoch
    assert old.record.committed.pushes == (1, 1)
    at = succeeding(old, owners=("o", "p"))
    for name, share in SHARES_1.items():
        at.owner(OwnerJoin(name, 1, CONTROL_VERSION, share))
    at.joins("a", StorageState(1, D1, ()))
    for name, share in SHARES_1.items():
        at.owner(Folded(name, 1, committed_at, share, "", {}))
    at.owner(CandidateReady("o", 1, 2))
    at.take()
    at.owner(CandidateReady("p", 1, 1))
    assert [(o.push, o.error) for o in at.take() if isinstance(o, Outcome)] == [(1, "")]
    assert at.record.open is None
    at.owner(CandidateReady("p", 1, 2))
    assert at.record.open.pushes == (2, 2)


def test_a_new_leader_abandons_a_candidate_that_died() -> None:
    old = attempting("a")
    at = succeeding(old)
    at.owner_joins(2)
    assert at.reasons == ["TakeOver", "Abandon"]
    assert (at.record.fencing_token, at.record.epoch, at.record.open) == (2, old.epoch + 2, None)


def test_a_new_leader_abandons_a_candidate_that_nobody_offers_any_more() -> None:
    at = succeeding(attempting("a"))
    at.owner_joins()
    assert at.reasons == ["TakeOver"]
    at.do(at.c.expired(at.timer))
    assert at.reasons == ["TakeOver", "Abandon"]


def test_a_new_leader_finishes_the_publication_of_a_commit() -> None:
    at = succeeding(committed("a"))
    at.joins("a", V0)  # it has not read K yet
    at.owner_joins()
    assert at.reasons == ["TakeOver"]
    assert at.c.phase is Phase.FOLDING
    assert at.take() == [Published("policy", 2), Fold("policy", 1)]
    at.joins("a", StorageState(1, D1, ()))
    at.owner(Folded("o", 1, 1, D1, "", {}))
    assert at.c.phase is Phase.IDLE
    assert at.c.candidate == token(1, 1)
    at.push(9)
    at.take()
    assert at.reasons[-1] == "OpenAttempt"
    assert at.record.open.target == 2


def test_a_new_leader_tells_of_a_commit_that_the_old_one_did_not_live_to_tell_of() -> None:
    at = succeeding(committed("a"))
    at.owner_joins()
    at.push(1)  # the very push that was committed: it still waits
    at.joins("a", StorageState(1, D1, ()))
    at.owner(Folded("o", 1, 1, D1, "", {}))
    assert at.reasons == ["TakeOver"]
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert (outcome.error, outcome.version, outcome.push, outcome.candidate) == ("", 1, 1, token(1, 1))
    assert outcome.summary["members"] == ["a"]
    assert "is gone committed it" in outcome.summary["warnings"][0]
    at.push(2)  # the next one is another candidate
    assert at.reasons == ["TakeOver", "OpenAttempt"]
    assert at.record.open.candidate == token(2, 2)


def test_a_new_leader_waits_for_no_fold_of_an_owner_that_restarted() -> None:
    at = succeeding(committed("a"))
    at.owner_joins(2, "")
    assert at.c.phase is Phase.IDLE
    assert not any(isinstance(o, Fold) for o in at.take())


def test_a_new_leader_goes_on_with_a_rollback() -> None:
    old = attempting("a")
    old.do(old.c.roll_back())
    assert old.record.open.direction is Direction.BACK
    at = succeeding(old)
    at.joins("a")
    at.owner_joins()
    assert at.reasons == ["TakeOver", "OpenAttempt"]
    assert (at.record.open.direction, at.record.open.attempts) == (Direction.BACK, 3)
    orders = [o for o in at.take() if isinstance(o, Prepare | Emit)]
    assert [(o.target, o.base.version) for o in orders] == [(0, 0)] * 2


def test_a_reading_older_than_the_last_write_says_nothing_of_the_next_one() -> None:
    at, w = held_open()
    assert w.expected_revision == at.revision
    before = at.revision - 1
    assert at.c.record_read(before, at.record, "before") == [ReadRecord()]
    assert at.c.record_read(None, None, "") == [ReadRecord()]
    at.do(at.c.written(w.operation_id, at.revision + 1))
    assert at.c.phase is Phase.ATTEMPT
    assert not at.fatal
