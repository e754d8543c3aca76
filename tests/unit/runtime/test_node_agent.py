"""A node agent beside a real engine, led by hand."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import (
    Acknowledged,
    AttemptFailed,
    OpenApply,
    Prepared,
    Published,
    Serving,
    Staged,
    StorageState,
)
from dcr.rollout.node import RolloutNode
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.serving_wait import NodeError
from tests.faults.models import Served, dense, stored_bits
from tests.unit.runtime.led import WAIT_S, Led, led, wait


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Led]:
    yield from led(tmp_path)


LEASE_S = 1.0


@pytest.fixture
def leased(tmp_path: Path) -> Iterator[Led]:
    yield from led(tmp_path, serve_lease_s=LEASE_S)


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Led]:
    yield from led(tmp_path, stage_bytes_max=1500)


def test_a_synchronous_attempt(at: Led) -> None:
    at.policy.step(1)
    order = at.prepare(stage=False)
    held = StorageState(0, at.record.baseline_id, ())
    assert at.hear(Prepared) == Prepared("a", at.node.incarnations["a"], 1, held)
    assert at.node.version is None
    root = at.emit(order)
    at.send(OpenApply("default", 1))
    assert at.hear(Acknowledged).manifest_root == root
    assert at.node.version is None
    at.commit(root)
    assert at.hear(Serving).version == 1


def test_an_asynchronous_attempt_serves_the_old_version_until_it_is_applied(at: Led) -> None:
    at.policy.step(1)
    order = at.prepare(stage=True)
    assert at.hear(Prepared).state.clean
    at.serves_old()
    root = at.emit(order)
    assert at.hear(Staged) == Staged("a", at.node.incarnations["a"], 1)
    at.serves_old()
    with at.engine.request() as version:  # it was let in before, and is answered whole
        at.send(OpenApply("default", 1))
        wait(lambda: at.engine.version is None)
        time.sleep(0.1)
        assert version == 0
        assert stored_bits(at.model) == dense(at.old)
    assert at.hear(Acknowledged).manifest_root == root
    assert at.node.version is None
    at.commit(root)


def test_a_stage_that_k_abandons_is_dropped_and_the_old_version_served_on(at: Led) -> None:
    at.policy.step(1)
    order = at.prepare(stage=True)
    at.emit(order)
    at.hear(Staged)
    at.write(at.record.abandon())
    at.send(Published("default", 2))
    at.hears_serving(2)
    at.send(OpenApply("default", 1))  # late
    at.serves_old()
    again = at.prepare(stage=False)
    at.hear(Prepared)
    root = at.emit(again)
    at.send(OpenApply("default", 3))
    at.hear(Acknowledged)
    at.commit(root)


def test_a_stage_beyond_its_bound_fails_by_name_and_the_old_version_is_served_on(narrow: Led) -> None:
    narrow.policy.step(1)
    order = narrow.prepare(stage=True)
    narrow.hear(Prepared)
    narrow.emit(order)
    failed = narrow.hear(AttemptFailed)
    assert "more than stage_bytes_max = 1500: raise stage_bytes_max" in failed.reason
    assert failed.state.clean
    narrow.serves_old()
    again = narrow.prepare(stage=False)  # the synchronous gate holds nothing
    narrow.hear(Prepared)
    root = narrow.emit(again)
    narrow.send(OpenApply("default", 2))
    narrow.hear(Acknowledged)
    narrow.commit(root)


def test_an_order_for_another_incarnation_is_not_obeyed(at: Led) -> None:
    at.prepare(stage=False, incarnation=at.node.incarnations["a"] + 1)
    at.write(at.record.abandon())
    at.send(Published("default", 2))
    assert not any(isinstance(r, Prepared) for r in at.hears_serving(2))
    at.serves_old()


def test_nothing_is_served_that_may_be_stale_while_the_record_is_out_of_reach(leased: Led) -> None:
    at = leased
    time.sleep(1.3)  # longer than the lease: it is renewed with every read
    assert [age for age in at.ages if age <= LEASE_S] == []
    at.serves_old()
    away = at.file.with_name("away.db")
    at.file.rename(away)
    wait(lambda: at.engine.version is None)
    assert min(at.ages) > LEASE_S
    assert at.node.version is None
    away.rename(at.file)
    assert at.node.wait_serving(0, WAIT_S) == 0
    at.serves_old()


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[Led]:
    yield from led(tmp_path, serve_lease_s=LEASE_S, drain_timeout_s=0.1)


def test_a_request_that_will_not_leave_lets_no_other_in_while_the_record_is_out_of_reach(hurried: Led) -> None:
    at = hurried
    away = at.file.with_name("away.db")
    with at.engine.request():
        at.file.rename(away)
        wait(lambda: at.engine.version is None)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert at.engine.version is None
        away.rename(at.file)
        wait(lambda: at.engine.version == 0)  # nothing was written: it goes on as it was
    at.serves_old()


@pytest.mark.parametrize("call", ["close_gate", "reset_caches", "open_gate", "call_ranks"])
def test_an_engine_whose_code_would_end_the_agents_thread_is_out_of_service_by_name(
    at: Led, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def leaves(*_: object) -> None:
        raise SystemExit(3)

    at.policy.step(1)
    order = at.prepare(stage=True)
    at.hear(Prepared)
    root = at.emit(order)
    at.hear(Staged)
    monkeypatch.setattr(at.engine, call, leaves)
    at.send(OpenApply("default", order.epoch))
    if call in {"reset_caches", "open_gate"}:
        at.hear(Acknowledged)
        at.write(at.record.commit(at.content_digest, root, "op"))
    wait(lambda: at.node.failures)
    assert "SystemExit: 3" in at.node.failures["a"]
    wait(lambda: at.node.version is None)
    with pytest.raises(NodeError, match="SystemExit: 3"):
        at.node.wait_serving(1, WAIT_S)


def test_waiting_for_an_engine_that_is_not_there_is_refused_by_name(at: Led) -> None:
    with pytest.raises(RefusedError, match="this node has no engine 'b', only a"):
        at.node.wait_serving(0, WAIT_S, "b")


# ---------------------------------------------------------------- whatever hangs


class Hang:
    """Stands before a call that is to hang: who makes it waits until it is let go."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.reached, self._goes_on = call, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self._goes_on.wait(240)
        return self._call(*args, **kwargs)

    def let_go(self) -> None:
        self._goes_on.set()


HANGS = {
    "a rank": lambda at: (at.engine, "call_ranks"),
    "the control plane": lambda at: (at.node._agents["a"]._control, "read"),
    "the leader's address": lambda at: (at.node._agents["a"]._control, "lookup"),
}


@pytest.mark.parametrize("what", HANGS)
def test_the_gate_closes_on_the_lost_lease_though_something_hangs(
    leased: Led, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    at = leased
    where, name = HANGS[what](at)
    hang = Hang(getattr(where, name))
    try:
        monkeypatch.setattr(where, name, hang)
        assert hang.reached.wait(WAIT_S)
        hung = time.monotonic()
        wait(lambda: at.engine.version is None)
        assert time.monotonic() - hung < 30  # the hanging call would take minutes
        assert min(at.ages) > LEASE_S
        assert at.node.version is None
        with pytest.raises(NodeError, match="version 0 is not served"):
            at.node.wait_serving(0, 0.1)
    finally:
        hang.let_go()
    assert at.node.wait_serving(0, WAIT_S) == 0  # the record is read again, and nothing was written
    at.serves_old()


def test_orders_are_obeyed_and_the_lease_is_kept_while_a_read_of_the_store_hangs(
    leased: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = leased
    store = at.node._reception._delivery
    at.policy.step(1)
    hang = Hang(store.get)
    try:
        monkeypatch.setattr(store, "get", hang)
        order = at.prepare(stage=True)
        at.hear(Prepared)
        at.emit(order)
        assert hang.reached.wait(WAIT_S)
        hung = time.monotonic()
        wait(lambda: at.read_at > hung + LEASE_S)
        assert [age for age in at.ages if age <= LEASE_S] == []  # a machine that stood still may have lost it
        at.serves_old()
        again = at.prepare(stage=False)  # the leader has given the attempt up
        assert at.hear(Prepared).epoch == again.epoch
        assert at.engine.version is None
        monkeypatch.setattr(store, "get", hang._call)
        root = at.emit(again)
        at.send(OpenApply("default", again.epoch))
        at.hear(Acknowledged)
        at.commit(root)
    finally:
        hang.let_go()
    assert stored_bits(at.model) == dense(at.policy.state_dict())  # nothing of the old epoch came after it


def test_memory_that_is_taken_away_in_the_middle_of_an_attempt_costs_nothing(at: Led) -> None:
    """As systemd does when the user who started the node logs out (RemoveIPC)."""
    at.policy.step(1)
    order = at.prepare(stage=False)
    at.hear(Prepared)
    memory = at.node._reception._memory
    write, taken, one_at_a_time = memory.write, [], threading.Lock()

    def taken_away(data: bytes) -> Any:
        with one_at_a_time:  # several threads receive
            shared = write(data)
            if len(taken) < 2:  # before any rank can map it, and before the next is written
                taken.append(memory.folder)
                shutil.rmtree(memory.folder)
        return shared

    memory.write = taken_away  # type: ignore[method-assign]
    root = at.emit(order)
    at.send(OpenApply("default", 1))
    assert at.hear(Acknowledged).manifest_root == root
    assert len(set(taken)) == 2
    at.commit(root)


# ---------------------------------------------------------------- one node an engine


def node_beside(at: Led, engine: TorchEngine) -> RolloutNode:
    return RolloutNode(engine, control=f"sqlite://{at.file}", delivery=f"file://{at.file.parents[1]}/payloads")


@pytest.mark.parametrize("adapter", ["the same", "another"])
def test_a_second_node_is_refused_while_the_first_is_there_and_changes_nothing(at: Led, adapter: str) -> None:
    folder = at.file.parents[1]
    engine = at.engine if adapter == "the same" else TorchEngine(at.model, name="b", checkpoint=folder)
    free = TorchEngine(Served(), name="free")
    with pytest.raises(RefusedError, match="another node of this process keeps it, as engine 'a': close that one"):
        RolloutNode([free, engine], control=f"sqlite://{at.file}", delivery=f"file://{folder}/payloads")
    at.serves_old()
    at.policy.step(1)
    order = at.prepare(stage=False)
    at.hear(Prepared)
    root = at.emit(order)
    at.send(OpenApply("default", 1))
    at.hear(Acknowledged)
    at.commit(root)
    at.node.close()
    at.node = node_beside(at, at.engine)
    assert at.node.wait_serving(1, WAIT_S) == 1


def test_a_node_whose_rank_hangs_keeps_its_engine_until_it_is_answered_and_then_lets_nobody_in(
    hurried: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = hurried
    hang = Hang(at.engine.call_ranks)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(at.engine, "call_ranks", hang)
            assert hang.reached.wait(WAIT_S)
        wait(lambda: at.engine.version is None)  # the lease is lost
        threads = [threading.Thread(target=at.node.close) for _ in range(3)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert time.monotonic() - began < 30.0  # of minutes
        with pytest.raises(RefusedError, match="its node was closed, but a call of it to the engine has not returned"):
            node_beside(at, at.engine)
        late = at.node._agents["a"]
    finally:
        hang.let_go()
    wait(lambda: late.ended)
    assert at.engine.version is None
    at.node = node_beside(at, at.engine)
    assert at.node.wait_serving(0, WAIT_S) == 0
    at.serves_old()
