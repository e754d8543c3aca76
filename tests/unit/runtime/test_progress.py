"""What an engine's node says of itself, while a leader that is the test takes it through everything."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dcr.delivery.sealed import SEAL_BYTES
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Acknowledged, OpenApply, Prepare, Prepared, Refuse
from dcr.runtime import progress
from dcr.runtime.channel import Hub
from dcr.runtime.progress import EngineStatus
from dcr.runtime.progress_log import Stuck
from dcr.runtime.registry import register_leader
from tests.unit.runtime.led import WAIT_S, Led, led, wait


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Led]:
    yield from led(tmp_path)


@pytest.fixture
def leased(tmp_path: Path) -> Iterator[Led]:
    yield from led(tmp_path, serve_lease_s=1.0)


CLOCKS = timedelta(milliseconds=200)
"""Times that are told by the one clock, and were taken by the other."""


def status(at: Led) -> EngineStatus:
    return at.node.statuses["a"]


def since(status: EngineStatus) -> datetime:
    assert status.since.endswith("Z")
    return datetime.fromisoformat(status.since)


def test_an_engine_that_serves_says_so_and_since_when(at: Led) -> None:
    now = status(at)
    assert (now.engine, now.version, now.gate, now.reason, now.failed, now.last_error) == (
        "a",
        0,
        "open",
        "",
        False,
        "",
    )
    assert timedelta(0) <= datetime.now(UTC) - since(now) < timedelta(seconds=WAIT_S)


def test_a_gate_that_is_closed_for_a_transition_names_it_and_the_log_tells_its_turns(
    at: Led, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcr.node")
    opened = since(status(at))
    at.policy.step(1)
    order = at.prepare(stage=False)
    at.hear(Prepared)
    closed = status(at)
    assert (closed.version, closed.gate, closed.failed) == (None, "closed", False)
    assert closed.reason == "a transition is being applied: version 0 -> 1, relative, epoch 1"
    assert since(closed) >= opened
    root = at.emit(order)
    at.send(OpenApply("default", order.epoch))
    assert at.hear(Acknowledged).manifest_root == root
    at.commit(root)
    assert (status(at).version, status(at).gate, status(at).reason) == (1, "open", "")
    wait(lambda: any("serves version 1" in line for line in caplog.messages))
    payloads = (at.file.parent.parent / "payloads").rglob("*.payload")
    said = "\n".join(caplog.messages)
    assert "engine a prepares epoch 1: a transition is being applied: version 0 -> 1, relative" in said
    assert re.search(r"engine a: gate closed, after \d+ ms of draining", said)
    assert "engine a prepared epoch 1" in said
    assert f"engine a applied epoch 1: {sum(p.stat().st_size - SEAL_BYTES for p in payloads)} bytes in " in said
    (shut_ms,) = re.findall(r"engine a serves version 1; its gate was closed for (\d+) ms", said)
    lasted = since(status(at)) - since(closed)
    assert abs(int(shut_ms) - lasted / timedelta(milliseconds=1)) <= 2


@pytest.mark.parametrize("call", ["reset_caches", "open_gate"])
def test_an_engine_whose_gate_is_not_opened_says_so_and_the_log_warns(
    leased: Led, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    at = leased
    committed, entered, let_go = threading.Event(), threading.Event(), threading.Event()
    real = getattr(at.engine, call)

    def hangs(*version: int) -> None:
        if committed.is_set():  # before that the lease may run out on a busy machine, and the gate be opened again
            entered.set()
            let_go.wait(WAIT_S)
        real(*version)

    monkeypatch.setattr(at.engine, call, hangs)
    at.policy.step(1)
    order = at.prepare(stage=False)
    root = at.emit(order)
    at.send(OpenApply("default", order.epoch))
    at.hear(Acknowledged)
    wait(lambda: status(at).refit.held_up_by == "the commit")  # it reports first
    committed.set()
    at.write(at.record.commit(at.content_digest, root, "op"))
    assert entered.wait(WAIT_S)
    wait(lambda: at.node._agents["a"]._gate.stale)  # its thread reads no record meanwhile
    closed = status(at)
    assert (closed.version, closed.gate) == (None, "closed")
    waits = rf"it waits for {call} \(the gate's opening\), which has not returned for \d+ s"
    assert re.fullmatch(waits, closed.reason)
    (told,) = at.node._under_way().values()
    assert isinstance(told, Stuck)
    assert re.fullmatch(f"engine a serves nothing: {waits}", told.text())
    assert closed.refit is None or closed.refit.held_up_by == f"{call} (the gate's opening)"
    let_go.set()
    at.node.wait_serving(1, WAIT_S)
    wait(lambda: status(at).reason == "")  # an open_gate that took longer than the lease is followed by a close
    assert not any(isinstance(what, Stuck) for what in at.node._under_way().values())


def test_caches_that_cannot_be_reset_are_tried_again_and_again_and_told_once(
    at: Led, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried, why = [0], ["no room"]
    real = at.engine.reset_caches

    def raises() -> None:
        tried[0] += 1
        if why:
            raise OSError(why[0])
        real()

    monkeypatch.setattr(progress, "_AGAIN_FIRST_S", WAIT_S)
    at.policy.step(1)
    order = at.prepare(stage=False)
    root = at.emit(order)
    at.send(OpenApply("default", order.epoch))
    at.hear(Acknowledged)
    monkeypatch.setattr(at.engine, "reset_caches", raises)
    at.write(at.record.commit(at.content_digest, root, "op"))
    wait(lambda: status(at).failed)
    first = status(at)
    assert (first.version, first.gate) == (None, "closed")
    reason = "its caches could not be reset: OSError: no room"
    assert first.last_error.endswith(f"Z {reason}")
    before = tried[0]
    wait(lambda: tried[0] >= before + 5)
    assert status(at) == first

    def told() -> list[str]:
        return [line for line in caplog.messages if "out of service" in line]

    assert told() == [f"engine a is out of service: {reason}"]
    why[0] = "no device"
    wait(lambda: status(at).last_error.endswith("OSError: no device"))
    assert status(at).since == first.since
    assert status(at).last_error > first.last_error
    assert len(told()) == 2
    why.clear()
    wait(lambda: status(at).version == 1)
    assert (status(at).failed, status(at).reason) == (False, "")
    assert status(at).last_error.endswith("OSError: no device")


def test_what_stays_wrong_is_told_after_1_s_and_then_each_time_after_twice_as_long_up_to_a_minute(
    at: Led, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    it, told = at.node._agents["a"]._progress, []
    for half in range(600):
        now[0] = 100.0 + half / 2
        said = len(caplog.messages)
        it.gives_up("no room")
        if len(caplog.messages) > said:
            told.append(half / 2)
    assert told == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert re.fullmatch(r"engine a is still out of service, since .*Z: no room", caplog.messages[-1])


def test_a_gate_that_is_to_go_on_after_it_could_not_be_drained_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Led(tmp_path, {"serve_lease_s": 60.0, "drain_timeout_s": 0.1})
    entered, let_go = threading.Event(), threading.Event()
    real = at.engine.open_gate
    k = at.record
    base = Base(Kind.RESTORE, 0, k.baseline_id, "")
    with at.engine.request():
        monkeypatch.setattr(at.engine, "open_gate", lambda version: (entered.set(), let_go.wait(WAIT_S), real(version)))
        at.write(k.open_restore())
        at.send(Prepare("default", at.record.epoch, 0, base, (at.owner,), at.node.incarnations["a"]))
        assert entered.wait(WAIT_S)
        assert status(at).version is None
        assert status(at).reason.startswith("it waits for open_gate (the gate's opening), which has not returned for ")
        let_go.set()
        wait(lambda: "open_gate" not in status(at).reason)
    at.close()


def test_an_engine_that_is_restored_says_so(at: Led) -> None:
    k = at.record
    base = Base(Kind.RESTORE, 0, k.baseline_id, "")
    at.write(k.open_restore())
    at.send(Prepare("default", at.record.epoch, 0, base, (at.owner,), at.node.incarnations["a"]))
    at.hear(Prepared)
    assert status(at).reason == f"restoring version 0, epoch {at.record.epoch}"


def test_an_engine_that_is_not_admitted_says_so(leased: Led, caplog: pytest.LogCaptureFixture) -> None:
    at = leased
    at.write(msgspec.structs.replace(at.record, members=()))
    at.serves_old()  # it goes on with what it was admitted at
    away = at.file.with_name("away.db")
    at.file.rename(away)
    # Not only withheld: what is withheld is let go on when the record is read again, admitted or not.
    wait(lambda: any("closes its gate: the record was not read" in line for line in caplog.messages))
    wait(lambda: status(at).gate == "closed")
    away.rename(at.file)
    admitted = "the coordinator has not admitted this engine yet; its storage holds version 0"
    wait(lambda: status(at).reason == admitted)


def test_a_lost_lease_is_named_with_its_time_and_is_over_when_the_record_is_read_again(leased: Led) -> None:
    at = leased
    away = at.file.with_name("away.db")
    before, began = datetime.now(UTC), time.monotonic()
    wait(lambda: at.read_at > began)
    at.file.rename(away)
    after = datetime.now(UTC)
    wait(lambda: status(at).gate == "closed")
    said = status(at).reason
    assert said.startswith("lease of the record lost: it was last read at ")
    read = datetime.fromisoformat(re.findall(r"last read at (\S+Z)", said)[0])
    assert before - CLOCKS < read < after + CLOCKS
    wait(lambda: "the record could not be read" in status(at).last_error)
    away.rename(at.file)
    wait(lambda: status(at).version == 0)
    wait(lambda: status(at).reason == "")
    assert "the record could not be read" in status(at).last_error  # what was, with its time


def test_an_engine_without_a_coordinator_says_where_it_looks(at: Led) -> None:
    at.hub.close()
    at.write(at.record.take_over("another"))  # nobody is at the address that it left
    wait(lambda: "no coordinator reached" in at.node._agents["a"]._progress.why())
    assert "leads record 'default'" in at.node._agents["a"]._progress.why()


def test_what_went_wrong_last_is_still_told_when_nobody_leads_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcr.node")
    at = Led(tmp_path, {"stage_bytes_max": 1500})
    try:
        at.policy.step(1)
        at.emit(at.prepare(stage=True))
        wait(lambda: "more than stage_bytes_max = 1500" in status(at).last_error)
        when, _, failed = status(at).last_error.partition(" ")
        at.prepare(stage=False)
        wait(lambda: status(at).gate == "closed")
        at.hub.close()
        before = len(caplog.messages)
        wait(lambda: not at.node._agents["a"]._spoke.connected)
        at.write(msgspec.structs.replace(at.record.abandon(), members=()))  # so it wants to join
        asked = (at.record.epoch, at.record.version)
        wait(lambda: at.node._agents["a"]._role._asked_at == asked)
        wait(lambda: "no coordinator reached" in status(at).reason)
        assert f"; its last error: {when} {failed}" in status(at).reason
        assert status(at).last_error == f"{when} {failed}"
        assert not [line for line in caplog.messages[before:] if "to let it in" in line]
        said = repr(at.node.statuses)
        assert said.startswith("{'a': <engine a gate closed since ")
        assert said.count(failed) == 1
        assert len(said) < 2 * len(status(at).reason)
    finally:
        at.close()


def test_who_was_refused_still_says_why_when_nobody_leads_any_more(at: Led) -> None:
    other = Hub(b"w" * 32, lambda _: None)  # a trainer of another run, at the address in this one's registry
    register_leader(at.control, "default", other.address)
    at.hub.close()
    wait(lambda: "the hub does not hold the secret of this run" in status(at).last_error)
    other.close()
    wait(lambda: "refused" in at.node._agents["a"]._spoke.trouble)
    assert "the hub does not hold the secret of this run" in status(at).last_error


def test_an_engine_that_the_leader_refuses_has_failed(at: Led) -> None:
    at.send(Refuse("default", at.record.epoch, "its tensors are others"))
    wait(lambda: status(at).failed)
    assert status(at).reason == "it is out of service: its tensors are others"
    assert status(at).last_error.endswith("its tensors are others")
