"""The coordinator and K: unknown outcomes, other leaders, and how leading begins."""

import pytest
from leader import D0, Leader, attempting, leading

from dcr.protocol.coordinator import Phase
from dcr.protocol.coordinator_effects import ReadRecord, WriteRecord
from dcr.protocol.leader import REWRITES_MAX
from dcr.protocol.messages import (
    OwnerJoin,
)


def held_open() -> tuple[Leader, WriteRecord]:
    at = leading("a")
    at.hold_writes = True
    at.push()
    return at, at.held[-1]


def test_an_unknown_outcome_is_resolved_by_reading_back() -> None:
    at, w = held_open()
    effects = at.c.unknown(w.operation_id)
    assert ReadRecord() in effects
    at.do(at.c.record_read(at.revision + 1, w.record, w.operation_id))
    assert at.c.phase is Phase.ATTEMPT


def test_the_old_revision_proves_nothing_and_the_same_write_settles_it() -> None:
    at, w = held_open()
    at.c.unknown(w.operation_id)
    assert at.c.record_read(at.revision, at.record, "before") == [w]
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
    assert "another trainer leads record" in at.fatal
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


def test_version_0_needs_every_owners_baseline() -> None:
    at = Leader()
    at.owner_joins(1, "")
    assert "version 0 cannot be created" in at.fatal


def test_another_control_version_of_an_owner_is_fatal() -> None:
    at = Leader()
    at.owner(OwnerJoin("o", 1, 7, D0))
    assert "control version 7" in at.fatal


def test_a_new_leader_takes_over_and_abandons_what_is_open() -> None:
    old = attempting("a")
    at = Leader()
    at.c.leader = "c2"
    at.record, at.revision = old.record, old.revision
    at.owner_joins()
    assert at.reasons == ["TakeOver", "Abandon"]
    assert (at.record.fencing_token, at.record.epoch, at.record.open) == (2, old.epoch + 2, None)
