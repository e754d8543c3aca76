"""The ways in which K may change."""

import msgspec
import pytest
from contracts import RECORD

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.protocol.record import (
    RECORD_BYTES_MAX,
    CommitRecord,
    Committed,
    Direction,
    Member,
    OpenTransition,
    OwnerRef,
    decode_record,
    encode_record,
)

K0 = CommitRecord.create("policy", "c1", "d0")
MEMBERS = (Member("e0", 1), Member("e1", 1))
OWNERS = (OwnerRef("o", 1),)
PUSHES = (3,)


def transition(
    attempts: int, *, target: int = 1, candidate: str = "w", direction: Direction = Direction.FORWARD
) -> OpenTransition:
    return OpenTransition(
        target, candidate, attempts, Kind.RELATIVE, OWNERS, 0, ("add",), direction=direction, pushes=PUSHES
    )


K1 = K0.open_attempt(transition(1), MEMBERS)


def test_create() -> None:
    created = CommitRecord.create("policy", "c1", "d0")
    assert created == CommitRecord("policy", 0, 0, "c1", 1, "d0", (), None, None)


def test_take_over_bumps_token_and_epoch() -> None:
    k = K1.take_over("c2")
    assert (k.leader, k.fencing_token, k.epoch) == ("c2", 2, 2)
    assert (k.version, k.open, k.members, k.committed) == (K1.version, K1.open, K1.members, K1.committed)


def test_open_attempt_counts() -> None:
    k = K1.open_attempt(transition(2), MEMBERS[1:])
    assert (k.epoch, k.version, k.members) == (2, 0, MEMBERS[1:])
    assert k.open is not None
    assert k.open.attempts == 2


@pytest.mark.parametrize(
    ("wrong", "members"),
    [
        (transition(1), MEMBERS),
        (transition(3), MEMBERS),
        (transition(2, target=2), MEMBERS),
        (transition(2, candidate="x"), MEMBERS),
        (transition(2), ()),
    ],
)
def test_open_attempt_refuses(wrong: OpenTransition, members: tuple[Member, ...]) -> None:
    with pytest.raises(AssertionError):
        K1.open_attempt(wrong, members)


def test_commit_keeps_the_epoch() -> None:
    k = K1.commit("d1", "root", "op")
    assert (k.version, k.epoch, k.baseline_id, k.open) == (1, 1, "d1", None)
    assert k.committed == Committed(1, 1, "w", MEMBERS, "root", "op", OWNERS, Direction.FORWARD, PUSHES)
    assert k.members == MEMBERS


def test_the_commit_of_a_rollback_keeps_the_version() -> None:
    back = K1.open_attempt(transition(2, direction=Direction.BACK), MEMBERS)
    k = back.commit("d0", "root", "op")
    assert (k.version, k.epoch, k.baseline_id, k.open) == (0, 2, "d0", None)
    assert k.committed == Committed(0, 2, "w", MEMBERS, "root", "op", OWNERS, Direction.BACK, PUSHES)
    with pytest.raises(AssertionError):
        back.commit("d1", "root", "op")


def test_nobody_turns_a_rollback_forward() -> None:
    back = K1.open_attempt(transition(2, direction=Direction.BACK), MEMBERS)
    assert back.open_attempt(transition(3, direction=Direction.BACK), MEMBERS).epoch == 3
    with pytest.raises(AssertionError):
        back.open_attempt(transition(3), MEMBERS)


def test_nothing_but_an_open_attempt_commits() -> None:
    for k in (K0, K1.stop(""), K1.abandon()):
        with pytest.raises(AssertionError):
            k.commit("d1", "root", "op")


def test_stop_fences_and_keeps_what_was_found() -> None:
    k = K1.stop("d1")
    assert k.epoch == 2
    assert k.open is not None
    assert (k.open.stopped, k.open.content_digest, k.open.attempts) == (True, "d1", 1)
    again = k.stop("other")
    assert again.open is not None
    assert again.open.content_digest == "d1"


def test_abandon_clears_and_fences() -> None:
    k = K1.abandon()
    assert (k.epoch, k.open, k.version, k.members) == (2, None, 0, MEMBERS)
    with pytest.raises(AssertionError):
        k.abandon()


def test_restore_and_admit_only_between_transitions() -> None:
    for change in (K1.open_restore, lambda: K1.admit(MEMBERS)):
        with pytest.raises(AssertionError):
            change()
    assert K0.open_restore().epoch == 1
    k = K0.admit(MEMBERS).admit((Member("e0", 2),))
    assert k.members == (Member("e0", 2), Member("e1", 1))
    assert k.epoch == 0


def test_size_is_bounded_both_ways() -> None:
    big = msgspec.structs.replace(RECORD, members=tuple(Member("e" * 90 + str(n), 1) for n in range(1000)))
    with pytest.raises(RefusedError, match="names 1000 members"):
        encode_record(big)
    with pytest.raises(RefusedError, match="at most 65536"):
        decode_record(bytes(RECORD_BYTES_MAX + 1))
    fits = msgspec.structs.replace(RECORD, members=tuple(Member(f"engine-{n}", n) for n in range(1000)))
    assert decode_record(encode_record(fits)) == fits


def test_a_record_may_have_as_many_bytes_as_are_allowed() -> None:
    room = RECORD_BYTES_MAX - len(encode_record(msgspec.structs.replace(RECORD, leader="c" * 1000)))
    full = msgspec.structs.replace(RECORD, leader="c" * (1000 + room))
    assert len(encode_record(full)) == RECORD_BYTES_MAX
    assert decode_record(encode_record(full)) == full
    with pytest.raises(RefusedError, match="65537 bytes"):
        encode_record(msgspec.structs.replace(RECORD, leader="c" * (1001 + room)))
