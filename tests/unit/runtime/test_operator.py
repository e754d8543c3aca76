"""An operator whose leader is lost, or busy, before it answers: it asks again, and is told what became of its order."""

from contextlib import closing

import msgspec
import pytest

from dcr.control_plane.address import open_control_plane
from dcr.protocol.messages import Intervened, Intervention, decode_report, encode_message
from dcr.protocol.record import CommitRecord, encode_record
from dcr.runtime import operator
from dcr.runtime.channel import Hub, Received
from dcr.runtime.kept_order import Kept
from dcr.runtime.operator import NoRecordError, OperatorError, intervene
from dcr.runtime.registry import register_leader
from dcr.runtime.secret import record_secret

SECRET = b"s" * 32
ANSWER = Intervened("default", "one", None, "idle", "", (), (), "")
BUSY = msgspec.structs.replace(ANSWER, phase="writing", refused="one is writing the record", again=True)
NONSENSE = msgspec.structs.replace(ANSWER, refused="no transition is open: version 0 is committed")


class Leader:
    """A hub that meets each order with what is next in turn: an answer, or the end of the connection."""

    def __init__(self, control):
        self.control = control
        self.lease = control.acquire("default", "one", 300)
        self.turns = []
        self.orders = []
        self.hub = Hub(record_secret(SECRET, "default"), self._on_event)
        register_leader(control, "default", self.hub.address)

    def _on_event(self, event):
        if not isinstance(event, Received):
            return
        self.orders.append(decode_report(event.message))
        turn = self.turns.pop(0) if self.turns else None
        if callable(turn):
            turn = turn(self.orders[-1])
        if isinstance(turn, Intervened):
            self.hub.send(event.peer, encode_message(turn))
        else:
            self.hub.drop(event.peer, "it was killed")

    def keep(self, order):
        kept = Kept("v1-c", 1, order.what, order.order_id)
        self.control.register("default", "operator", "order", msgspec.msgpack.encode(kept))

    def order(self, what, answer_s=20.0):
        return intervene(
            self.control, "default", SECRET, Intervention(what), channel="loopback", connect_s=20.0, answer_s=answer_s
        )


@pytest.fixture
def leader(tmp_path, monkeypatch):
    monkeypatch.setattr(operator, "_AGAIN_S", 0.02)
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as control:
        made = Leader(control)
        with closing(made.hub):
            yield made


@pytest.mark.parametrize("turns", [[None, ANSWER], [BUSY, BUSY, ANSWER], [None, BUSY, None, ANSWER]])
def test_it_asks_again_until_one_answers_and_always_for_the_same_order(leader, turns):
    leader.turns = list(turns)
    assert leader.order("abandon") == ANSWER
    assert len(leader.orders) == len(turns)
    assert len({o.order_id for o in leader.orders}) == 1
    leader.turns = [ANSWER]
    assert leader.order("abandon") == ANSWER
    assert len({o.order_id for o in leader.orders}) == 2


def test_what_makes_no_sense_is_not_asked_again(leader):
    leader.turns = [NONSENSE]
    assert leader.order("abandon") == NONSENSE
    assert len(leader.orders) == 1


def test_a_leader_that_stays_busy_is_what_it_says(leader):
    leader.turns = [BUSY] * 100
    assert leader.order("resume", answer_s=0.4) == BUSY


@pytest.mark.parametrize(
    ("what", "kept", "told"),
    [
        ("abandon", True, "abandon is ordered all the same: it was taken before that, and whoever leads obeys it"),
        ("abandon", False, "nothing is ordered until now: ask again"),
        ("show", False, "ask again"),
    ],
)
def test_it_says_what_became_of_an_order_that_nobody_answered(leader, what, kept, told):
    leader.turns = [leader.keep if kept else None]
    with pytest.raises(OperatorError, match=f"; {told}$"):
        leader.order(what, answer_s=0.4)


def test_an_order_that_a_leader_refused_and_kept_all_the_same_is_not_told_as_refused(leader):
    def keeps(order):
        leader.keep(order)
        return BUSY

    leader.turns = [keeps] * 100
    with pytest.raises(OperatorError, match="roll-back is ordered all the same: it was taken before that"):
        leader.order("roll-back", answer_s=0.4)


def test_an_order_of_somebody_else_is_not_taken_for_it(leader):
    leader.turns = [lambda order: leader.keep(msgspec.structs.replace(order, order_id="another"))]
    with pytest.raises(OperatorError, match="nothing is ordered until now: ask again"):
        leader.order("abandon", answer_s=0.4)


def test_where_no_leases_are_kept_the_address_is_all_that_tells_of_a_leader(leader, monkeypatch):
    k = encode_record(CommitRecord.create("default", "one", "0" * 32))
    leader.control.compare_and_set("default", None, k, operation_id="op", actor="one", reason="test")
    leader.control.release(leader.lease)
    leader.turns = [ANSWER]
    with pytest.raises(OperatorError, match=r"^nobody leads record 'default': one, the last leader that wrote it"):
        leader.order("abandon")
    assert leader.orders == []
    monkeypatch.setattr(type(leader.control), "leases", False)
    assert leader.order("abandon") == ANSWER


def test_of_a_record_that_does_not_exist_nobody_is_asked(leader):
    leader.control.release(leader.lease)
    with pytest.raises(NoRecordError, match=r"^there is no record 'default' at this address$"):
        leader.order("abandon")
    assert leader.orders == []
