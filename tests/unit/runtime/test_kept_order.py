"""What becomes of an operator's order whose leader ends before its write of K."""

import threading
from contextlib import closing

import msgspec
import pytest

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlaneUnavailableError
from dcr.protocol.coordinator_effects import WriteRecord
from dcr.protocol.identity import Kind
from dcr.protocol.messages import Intervene, Intervention, Outcome
from dcr.protocol.record import Direction, decode_record, encode_record
from dcr.runtime.fleet_status import fleet_status
from dcr.runtime.intervention import intervened
from dcr.runtime.kept_order import KeptOrder, kept_order
from dcr.runtime.leader_record import LeaderRecord
from tests.unit.protocol.leader import TORN, Leader

WAITS = {"attempts_max": 1, "stop_waits": True}


class Led(Leader):
    """A leader of a record in SQLite, and the orders that it keeps beside it."""

    def __init__(self, control, name="c1", owners=("o",), **settings):
        super().__init__(owners, name, **settings)
        self.control = control
        self.kept = KeptOrder(control, "policy")
        if (stored := control.read("policy")) is not None:
            self.record, self.revision = decode_record(stored.body), stored.revision

    def write(self):
        w = self.held.pop()
        stored = self.control.compare_and_set(
            "policy",
            w.expected_revision,
            encode_record(w.record),
            operation_id=w.operation_id,
            actor=self.c.leader,
            reason=w.reason,
        )
        self.record, self.revision = w.record, stored.revision
        self.do(self.c.written(w.operation_id, stored.revision))

    def order(self, what, order_id="", *, dies=False):
        """The answer's refusal; a leader that dies has answered, and does nothing more."""
        order = Intervene("policy", Intervention(what), order_id)
        answer, effects = intervened(self.c, order, fleet_status(self.c), self.kept)
        self.again = answer.again
        if not dies:
            self.do(effects)
        return answer.refused

    def looks(self):
        self.do(self.kept.due(self.c))

    def back(self, *engines):
        """Owner, push and engines have come to it."""
        self.owner_joins()
        self.push()
        for e in engines:
            self.joins(e, TORN)

    @property
    def outcomes(self):
        return [o.error for o in self.take() if isinstance(o, Outcome)]


@pytest.fixture
def control(tmp_path):
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as made:
        yield made


def under_way(control, **settings):
    at = Led(control, **settings)
    at.owner_joins()
    at.joins("a")
    at.push()
    at.prepared("a")
    return at


def stopped(control, **settings):
    at = under_way(control, **{**WAITS, **settings})
    at.fails("a")
    assert at.reasons[-1] == "Stop"
    at.take()
    return at


@pytest.mark.parametrize(
    ("what", "reasons", "kind"),
    [
        ("resume", ["OpenAttempt"], Kind.ABSOLUTE),
        ("dense", ["OpenAttempt"], Kind.DENSE),
        ("abandon", ["Abandon", "OpenRestore"], None),
    ],
)
def test_the_next_leader_obeys_an_order_about_a_stopped_transition(control, what, reasons, kind):
    assert stopped(control).order(what, dies=True) == ""
    at = Led(control, "c2", **WAITS)
    at.back("a")
    assert at.reasons == ["TakeOver"]
    at.looks()
    assert at.reasons == ["TakeOver", *reasons]
    if kind is None:
        assert at.record.open is None
        assert "was abandoned: on the operator's order" in at.outcomes[0]
    else:
        assert at.record.open.kind is kind
    at.looks()
    assert at.reasons == ["TakeOver", *reasons]


@pytest.mark.parametrize("before", [stopped, under_way])
def test_the_next_leader_turns_a_transition_back(control, before):
    """Also where it has opened the next attempt forward already, as soon as the pushes were offered again."""
    assert before(control).order("roll-back", dies=True) == ""
    at = Led(control, "c2", stop_waits=True)
    at.back()
    at.joins("a")
    at.looks()
    assert at.record.open.direction is Direction.BACK
    at.prepared("a", TORN)
    at.seals(at.record.baseline_id)
    at.acknowledged("a")
    assert (at.record.version, at.record.open) == (0, None)
    assert "was rolled back to version 0 on the operator's order" in at.outcomes[0]


def test_a_push_that_was_not_told_of_its_end_is_not_begun_anew(control):
    """K says that it was abandoned; then the leader died."""
    assert stopped(control).order("abandon") == ""
    at = Led(control, "c2", **WAITS)
    at.back()
    at.joins("a")
    assert at.reasons == ["TakeOver", "OpenAttempt"]  # the successor knows of no end
    at.looks()
    at.prepared("a")
    at.seals(at.record.baseline_id)
    at.acknowledged("a")
    assert (at.record.version, at.record.open) == (0, None)
    assert "was rolled back to version 0 on the operator's order" in at.outcomes[0]
    at.push(2)  # other weights
    at.looks()
    assert at.record.open.direction is Direction.FORWARD


def test_no_attempt_is_opened_before_orders_were_looked_for(control):
    """The control plane comes and goes: a leader that could not ask might commit what was given up."""
    away, later = [True], []

    def look():
        if away:
            raise ControlPlaneUnavailableError("away")

    at = under_way(control)
    record = LeaderRecord(control, at.c, None, later.extend, threading.Event(), before_attempt=look)
    k = msgspec.structs.replace(at.record, epoch=at.epoch + 1)
    write = WriteRecord(k, at.revision, "op", "OpenAttempt")
    assert record.write(write) == []
    assert (later, control.read("policy").revision) == ([write], at.revision)
    away.clear()
    record.write(write)
    assert control.read("policy").revision == at.revision + 1


@pytest.mark.parametrize("call", ["register", "read"])
def test_what_was_kept_although_the_answer_was_lost_is_obeyed_by_the_one_that_was_asked(control, monkeypatch, call):
    at = stopped(control)
    took = getattr(control, call)

    def loses(*args):
        took(*args)
        raise ControlPlaneUnavailableError("its answer was lost")

    with monkeypatch.context() as away:
        away.setattr(control, call, loses)
        assert "the control plane is away" in at.order("roll-back", "one")
        assert at.again
    assert kept_order(control, "policy").order_id == "one"
    at.looks()
    assert at.record.open.direction is Direction.BACK
    assert at.order("roll-back", "one") == ""  # asked again, for its answer was lost: obeyed once


def test_why_attempts_failed_is_shown_although_their_push_has_heard_of_it(control):
    at = stopped(control, stop_waits=False)
    show = Intervene("policy", Intervention.SHOW)
    answer, _ = intervened(at.c, show, fleet_status(at.c), at.kept)
    assert (answer.waiting, len(answer.failures)) == ((), 1)
    assert "relative attempt of epoch" in answer.failures[0]
    at.do(at.c.abandon())
    answer, _ = intervened(at.c, show, fleet_status(at.c), at.kept)
    assert answer.failures == ()  # they are of a push that is over


def test_an_end_waits_a_look_for_owners_that_are_on_their_way(control):
    assert stopped(control).order("abandon", dies=True) == ""
    at = Led(control, "c2", **WAITS)
    at.owner_joins()
    at.looks()
    assert at.reasons == ["TakeOver"]
    at.looks()  # nobody waits with that push any more
    assert at.reasons == ["TakeOver", "Abandon"]


@pytest.mark.parametrize("what", ["resume", "abandon"])
def test_a_leader_that_was_succeeded_takes_no_order(control, what):
    """It does not know yet; what it kept would come after its successor has looked."""
    old = stopped(control)
    Led(control, "c2", **WAITS).owner_joins()
    assert old.order(what) == "c1 leads no more: ask again, its successor will answer"
    assert old.again
    assert kept_order(control, "policy") is None
    assert old.reasons[-1] == "Stop"


@pytest.mark.parametrize("what", ["resume", "dense", "abandon", "roll-back"])
def test_who_asks_again_under_the_same_id_is_obeyed_once(control, what):
    old = stopped(control)
    assert old.order(what, "x") == ""
    reasons, record = list(old.reasons), old.record
    assert old.order(what, "x") == ""
    assert (old.reasons, old.record) == (reasons, record)
    at = Led(control, "c2", **WAITS)
    at.owner_joins()
    reasons, record = list(at.reasons), at.record
    assert at.order(what, "x") == ""
    assert (at.reasons, at.record) == (reasons, record)
    assert at.order(what, "y") != ""  # another one, which comes too late


def test_the_last_word_counts_and_one_that_is_refused_is_none(control):
    assert stopped(control).order("abandon", "x", dies=True) == ""
    at = Led(control, "c2", **WAITS)
    at.owner_joins()
    assert at.order("resume", "y").startswith("no push waits with the weights of version 1")
    assert not at.again
    assert kept_order(control, "policy").order_id == "x"
    assert at.order("roll-back", "z", dies=True) == ""
    assert kept_order(control, "policy").what is Intervention.ROLL_BACK


def test_nothing_is_ordered_while_the_control_plane_is_away(control):
    at = stopped(control)
    control.close()
    assert at.order("abandon").startswith("the control plane is away, so that nothing can be ordered; ask again: ")
    assert (at.reasons[-1], at.record.open.stopped) == ("Stop", True)
    assert at.again
    assert at.order("show", "x") == ""
