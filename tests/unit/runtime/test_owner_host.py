"""Owner host and coordinator host with real engines around them: rollback, and the asynchronous gate."""

import re
import threading
import time

import pytest
import torch

from dcr import PushError
from dcr.protocol.record import Direction
from tests.faults.thread_fleet import Fleet, flip, rewrite

PATIENT = {
    "prepare_timeout_s": 60.0,
    "ack_timeout_s": 60.0,
    "fold_timeout_s": 60.0,
    "restore_timeout_s": 60.0,
    "members_timeout_s": 60.0,
    "owners_timeout_s": 60.0,
    "delivery_timeout_s": 60.0,
    "push_timeout_s": 240.0,
}
"""No attempt fails because a machine stands still for seconds."""
ROLLED_BACK = r"to version 1 was rolled back to version 0 on the operator's order: "


@pytest.fixture(params=["sync", "async"])
def fleet(tmp_path, request):
    f = Fleet(tmp_path, {**PATIENT, "gate_mode": request.param, "attempts_max": 1})
    yield f
    f.close()


def actions(fleet):
    return [s.action for s in fleet.steps]


def changed(fleet, old):
    """Changed and all elements by tensor, counted in the trainer's state dict."""
    view = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return {
        n: (int(torch.ne(old[n].view(view[t.dtype]), t.view(view[t.dtype])).sum()), t.numel())
        for n, t in fleet.state().items()
    }


def told(counts):
    return {n: (c.changed, c.elements) for n, c in counts.items()}


def test_a_push_is_exact_in_both_modes(fleet):
    a, b = fleet.engine("a"), fleet.engine("b")
    for _ in range(2):
        fleet.check(a)
        fleet.check(b)
        fleet.step()
        assert fleet.push().members == ("a", "b")
    fleet.check(a)
    fleet.check(b)
    staged = fleet.addresses["settings"]["gate_mode"] == "async"
    assert actions(fleet).count("Stage") == (4 if staged else 0)


def test_a_push_that_waits_is_turned_back(fleet):
    a, b = fleet.engine("a"), fleet.engine("b")
    fleet.check(a)
    fleet.check(b)
    old = fleet.state()
    fleet.step(rate=0.5)
    turned = []

    def act(_):
        turned.append(threading.Thread(target=fleet.refit.roll_back))
        turned[0].start()

    fleet.once("BeginWrite", act)
    fleet.once("EndWrite", lambda _: fleet.wait(lambda: "RollBack" in actions(fleet)))
    with pytest.raises(PushError, match=ROLLED_BACK + "every member serves that version again"):
        fleet.refit.push()
    turned[0].join()
    assert told(fleet.refit.changes) == changed(fleet, old)  # of the weights that were pushed, and turned back
    record = fleet.record()
    assert (record.version, record.open, record.committed.direction) == (0, None, Direction.BACK)
    assert "OpenRestore" not in actions(fleet)
    fleet.check(a)
    fleet.check(b)
    report = fleet.push()  # the same weights, as another candidate: nothing forbids them
    assert (report.kind, report.attempts) == ("relative", 1)
    assert told(report.layers) == told(fleet.refit.changes) == changed(fleet, old)
    fleet.check(a)
    fleet.check(b)


def stop(fleet, engine):
    """A push whose only attempt fails after it has torn the engine."""
    fleet.check(engine)
    fleet.step(rate=0.5)
    fleet.once("OpenApply", lambda step: rewrite(fleet.objects(step.epoch)[-1], flip))
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.refit.push()


@pytest.mark.parametrize("fleet", ["sync"], indirect=True)
def test_a_stopped_transition_is_turned_back_with_the_weights_that_were_pushed(fleet):
    e = fleet.engine("a")
    stop(fleet, e)
    assert e.node.version is None
    fleet.refit.roll_back()
    fleet.check(e)
    assert fleet.record().committed.direction is Direction.BACK
    assert "OpenRestore" not in actions(fleet)


@pytest.mark.parametrize("fleet", ["sync"], indirect=True)
def test_a_stopped_transition_of_weights_that_were_stepped_is_abandoned_instead(fleet):
    e = fleet.engine("a")
    stop(fleet, e)
    fleet.policy.step(99)
    fleet.refit.roll_back()
    fleet.check(e)  # restored
    assert fleet.record().committed is None
    failed = [s.detail for s in fleet.steps if s.action == "EmitFailed"]
    assert any(re.search("candidate changed", detail) for detail in failed)
    assert "OpenRestore" in actions(fleet)


@pytest.mark.parametrize("fleet", ["sync"], indirect=True)
def test_turning_back_between_transitions_changes_nothing(fleet):
    e = fleet.engine("a")
    fleet.check(e)
    fleet.refit.roll_back()
    fleet.step()
    fleet.push()
    fleet.check(e)
    assert "RollBack" not in actions(fleet)


@pytest.mark.parametrize("fleet", ["sync"], indirect=True)
def test_the_report_of_a_later_attempt_counts_what_changed_once_and_the_log_says_it(fleet, caplog):
    e = fleet.engine("a")
    old = fleet.state()
    stop(fleet, e)
    counts = changed(fleet, old)
    with caplog.at_level("INFO", "dcr.owner"):
        report = fleet.push()
    assert report.kind == "absolute"
    assert told(report.layers) == told(fleet.refit.changes) == counts
    total, elements = (sum(column) for column in zip(*counts.values(), strict=True))
    epoch = fleet.record().committed.epoch
    assert f"absolute attempt of epoch {epoch}: {total} of {elements} elements changed" in caplog.text
    fleet.check(e)
    assert told(fleet.push(dense=True).layers) == {}  # it compares nothing, and does not pretend to


def numbers(fleet, seed):
    """A step without the NaN and infinities that the policy's own brings."""
    with torch.no_grad():
        for t in fleet.policy.parameters():
            t.add_((torch.rand(t.shape, generator=torch.Generator().manual_seed(seed)) < 0.1).to(t.dtype))


@pytest.mark.parametrize("dense", [False, True])
def test_weights_that_are_no_numbers_are_refused_if_asked_and_engines_notice_nothing(tmp_path, dense):
    fleet = Fleet(tmp_path, {**PATIENT, "refuse_nonfinite": True})
    try:
        e = fleet.engine("a")
        fleet.check(e)
        for version in (1, 2):
            before, taken = fleet.record(), len(fleet.steps)
            numbers(fleet, version)
            kept = fleet.policy.scale[3].clone()
            fleet.policy.scale[3] = float("inf")
            fleet.policy.q[2, :5] = float("nan")
            for _ in range(2):  # and again, as nothing was opened
                with pytest.raises(PushError, match=r"^rank-0 brings 5 NaN, 1 infinite elements in 2 tensors: q \("):
                    fleet.refit.push(dense=dense)
            assert fleet.record() == before
            assert not {"OpenAttempt", "Prepare", "CloseGate", "Emit"} & set(actions(fleet)[taken:])
            assert not list(fleet.payloads.glob(f"default/{before.epoch + 1:020d}/**/*"))
            fleet.policy.scale[3], fleet.policy.q[2, :5] = kept, 1.0
            report = fleet.push(dense=dense)
            assert (report.version, report.kind, report.attempts) == (version, "dense" if dense else "relative", 1)
            fleet.check(e)
    finally:
        fleet.close()


def test_after_a_stop_the_same_weights_are_looked_through_again(tmp_path):
    fleet = Fleet(tmp_path, {**PATIENT, "refuse_nonfinite": True, "attempts_max": 1})
    try:
        e = fleet.engine("a")
        fleet.check(e)
        numbers(fleet, 1)
        fleet.once("OpenApply", lambda step: rewrite(fleet.objects(step.epoch)[-1], flip))
        with pytest.raises(PushError, match="the transition stopped"):
            fleet.refit.push()
        kept = fleet.policy.up[0, 0].clone()
        fleet.policy.up[0, 0] = float("nan")
        with pytest.raises(PushError, match=r"1 NaN, 0 infinite elements in 1 tensors: up"):
            fleet.refit.push()
        assert fleet.record().open.stopped
        fleet.policy.up[0, 0] = kept
        report = fleet.push()
        assert (report.kind, report.version) == ("absolute", 1)
        fleet.check(e)
    finally:
        fleet.close()


def test_weights_are_not_offered_before_they_are_looked_through_even_if_the_connection_comes_anew(tmp_path):
    fleet = Fleet(tmp_path, {**PATIENT, "refuse_nonfinite": True})
    try:
        fleet.check(fleet.engine("a"))
        host, look = fleet.refit._host, fleet.refit.source.nonfinite

        def slow():
            host._post(host._connected)
            time.sleep(0.3)
            return look()

        fleet.refit.source.nonfinite = slow
        fleet.policy.up[0, 0] = float("nan")
        before = fleet.record()
        with pytest.raises(PushError, match="rank-0 brings 1 NaN"):
            fleet.refit.push()
        assert fleet.record() == before
    finally:
        fleet.close()
