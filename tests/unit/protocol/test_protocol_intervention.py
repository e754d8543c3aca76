"""A stopped transition whose push waits for the operator, an operator's orders, and what a successor waits for."""

import pytest

from dcr.protocol.coordinator_effects import ReadRecord
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.protocol.intervention import intervene
from dcr.protocol.leader import Phase
from dcr.protocol.messages import CandidateReady, Emit, Intervention, Outcome, OwnerJoin, Withdraw
from dcr.protocol.record import Direction
from tests.unit.protocol.leader import D0, D1, TORN, V0, Leader, attempting, committed, leading, stopped, succeeding


def holding(content: str = D1) -> Leader:
    """A transition that stopped after its only attempt, and whose push waits for the operator."""
    at = attempting("a", attempts_max=1, stop_waits=True)
    at.prepared("a")
    if content:
        at.seals(content)
    at.fails("a")
    assert at.reasons[-1] == "Stop"
    return at


def outcomes(at: Leader) -> list[Outcome]:
    return [o for o in at.take() if isinstance(o, Outcome)]


def order(at: Leader, what: str) -> None:
    at.do(intervene(at.c, Intervention(what)))


def test_nobody_is_told_and_nothing_is_tried_until_the_operator_speaks() -> None:
    at = holding()
    assert outcomes(at) == []
    assert at.c.held == {"o"}
    at.joins("b")
    at.do(at.c.expired(at.timer))  # of the attempt, long over
    assert (at.reasons[-1], outcomes(at), len(at.c.failures)) == ("Stop", [], 1)


@pytest.mark.parametrize("content", [D1, ""])
@pytest.mark.parametrize(("what", "kind"), [("resume", Kind.ABSOLUTE), ("dense", Kind.DENSE)])
def test_it_goes_on_with_another_budget(content: str, what: str, kind: Kind) -> None:
    at = holding(content)
    at.take()
    order(at, what)
    (emit,) = [o for o in at.take() if isinstance(o, Emit)]
    assert emit.base.kind is kind
    assert at.record is not None
    assert at.record.open is not None
    assert (at.record.open.attempts, at.record.open.stopped) == (2, False)
    at.prepared("a", TORN)
    at.fails("a")
    assert (at.reasons[-1], outcomes(at)) == ("Stop", [])  # and waits again, for another word
    order(at, "resume")
    assert at.record.open.attempts == 3


def test_a_resume_that_finds_no_engine_leaves_it_stopped() -> None:
    at = holding()
    at.do(at.c.member_lost("a", 1))
    order(at, "resume")
    at.do(at.c.expired(at.timer))
    assert (at.reasons[-1], outcomes(at)) == ("Stop", [])
    assert "too few engines" in at.c.failures[-1]
    at.joins("a", TORN)
    assert at.reasons[-1] == "Stop"  # that word is spent
    order(at, "resume")
    assert at.reasons[-1] == "OpenAttempt"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("abandon", "which had stopped, was abandoned: on the operator's order; engines that it tore are restored"),
        ("roll-back", "was rolled back to version 0 on the operator's order"),
    ],
)
def test_its_push_ends_with_it(what: str, said: str) -> None:
    at = holding()
    at.take()
    order(at, what)
    if what == "roll-back":
        at.prepared("a", TORN)
        at.seals(D0)
        at.acknowledged("a")
    (outcome,) = outcomes(at)
    assert said in outcome.error
    assert at.record is not None
    assert (at.record.open, at.record.version) == (None, 0)


def test_a_push_that_is_given_up_while_it_waits_takes_its_candidate_back() -> None:
    at = holding()
    at.owner(Withdraw("o", 1, 1))
    assert "Abandon" in at.reasons
    assert at.record is not None
    assert at.record.open is None


def test_a_successor_goes_on_waiting() -> None:
    at = succeeding(holding(), attempts_max=1, stop_waits=True)
    at.owner_joins()
    at.push()
    at.joins("a", TORN)
    assert (at.reasons, outcomes(at)) == (["TakeOver"], [])
    order(at, "resume")
    assert at.reasons[-1] == "OpenAttempt"


@pytest.mark.parametrize("what", ["resume", "dense", "abandon", "roll-back"])
def test_orders_that_make_no_sense_are_refused_and_change_nothing(what: str) -> None:
    def refused(at: Leader) -> str:
        before = list(at.reasons), at.record, at.c.phase
        with pytest.raises(RefusedError) as e:
            order(at, what)
        assert (at.reasons, at.record, at.c.phase) == before
        return str(e.value)

    at = Leader()
    assert refused(at) == "c1 has not taken the record over yet: no connection to o; ask again"
    assert refused(leading("a")) == "no transition is open: version 0 is committed"
    assert refused(committed("a")) == "no transition is open: version 1 is committed"
    at = attempting("a")
    if what != "roll-back":
        assert refused(at) == (
            "not stopped: the transition to version 1 is at its attempt 1; `dcr transition roll-back` turns it back"
        )
    at.do(at.c.roll_back())
    assert "turned back" in refused(at)
    at.do(at.c.record_read(at.revision + 1, at.record.take_over("c2"), "x"))
    assert refused(at) == "c1 leads no more: ask again, its successor will answer"
    at = attempting("a")
    at.hold_writes = True
    at.fails("a")
    assert refused(at) == "c1 is writing the record; ask again"


def test_an_order_before_the_record_was_read_is_refused_though_nobody_is_missing() -> None:
    at = Leader()
    assert at.c.owner_report(OwnerJoin("o", 1, 1, D0)) == [ReadRecord()]
    with pytest.raises(RefusedError, match="c1 has not taken the record over yet; ask again"):
        order(at, "abandon")


def test_resume_needs_a_push_that_waits() -> None:
    at = stopped(D1)
    with pytest.raises(RefusedError, match="no push waits with the weights of version 1: call push"):
        order(at, "resume")
    order(at, "dense")  # the next push's
    assert at.reasons[-1] == "Stop"
    at.push(2)
    assert at.take()[-1].base.kind is Kind.DENSE


def test_a_push_asks_for_every_element_itself_whoever_leads() -> None:
    at = leading("a")
    at.owner(CandidateReady("o", 1, 1, dense=True))
    assert at.take()[-1].base.kind is Kind.DENSE
    at = succeeding(at)
    at.owner_joins()
    at.joins("a")
    at.owner(CandidateReady("o", 1, 1, dense=True))
    assert at.take()[-1].base.kind is Kind.DENSE
    at = committed("a")
    at.folded()
    at.push(2)
    assert at.take()[-1].base.kind is Kind.RELATIVE


# ---------------------------------------------------------------- a successor


def test_a_successor_waits_for_the_engines_of_its_forerunner_but_not_for_ever() -> None:
    at = succeeding(attempting("a", "b", "c"), rejoin_waits=True)
    at.owner_joins()
    at.joins("a")
    at.push()
    assert at.reasons == ["TakeOver"]
    at.joins("b", incarnation=2)  # it restarted meanwhile: nobody else comes by its name
    at.do(at.c.expired(at.timer))
    assert at.reasons == ["TakeOver", "OpenAttempt"]
    assert at.record is not None
    assert {m.engine for m in at.record.members} == {"a", "b"}
    at.joins("c")  # too late for this attempt
    at.fails("a", V0)
    assert {m.engine for m in at.record.members} == {"a", "b", "c"}


def test_a_successor_opens_the_next_attempt_when_the_last_of_them_is_back() -> None:
    at = succeeding(attempting("a", "b"), rejoin_waits=True)
    at.owner_joins()
    at.push()
    at.joins("a")
    assert at.reasons == ["TakeOver"]
    at.joins("b")
    assert at.reasons == ["TakeOver", "OpenAttempt"]


@pytest.mark.parametrize("comes", [True, False])
def test_a_rollback_waits_for_the_engines_of_the_last_leader_too_but_not_for_ever(*, comes: bool) -> None:
    """Else one that is on its way back is left out of it, and has to be restored."""
    at = succeeding(attempting("a", "b"), rejoin_waits=True)
    at.owner_joins()
    at.joins("a", TORN)
    at.do(at.c.roll_back())
    assert at.reasons == ["TakeOver"]
    if comes:
        at.joins("b", TORN)
    else:
        at.do(at.c.expired(at.timer))
    assert at.reasons == ["TakeOver", "OpenAttempt"]
    assert at.record is not None
    assert at.record.open is not None
    assert at.record.open.direction is Direction.BACK
    assert {m.engine for m in at.record.members} == ({"a", "b"} if comes else {"a"})


def test_an_engine_that_was_back_and_dies_later_is_not_waited_for() -> None:
    at = succeeding(attempting("a", "b"), rejoin_waits=True)
    at.joins("b")  # before the owners
    at.owner_joins()
    at.joins("a")
    at.do(at.c.member_lost("b", 1))
    at.push()
    assert at.reasons == ["TakeOver", "OpenAttempt"]


def test_a_push_ends_when_an_owner_never_comes_to_the_successor() -> None:
    at = Leader(("o", "p"))
    at.owner_joins()
    at.push()
    first = at.timer
    assert (at.c.phase, outcomes(at)) == (Phase.STARTING, [])
    at.do(at.c.expired(at.timer))
    (outcome,) = outcomes(at)
    assert outcome.error == "time-out: no connection to p"
    assert at.timer != first
    at.owner(OwnerJoin("p", 1, 1, D0))
    assert at.reasons == ["CreateRecord"]
