"""A push of a snapshot: weights change wildly from the moment the call returns, whatever becomes of the push."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dcr import PushError, PushPendingError
from dcr.cli.main import main
from dcr.data_plane.bits import bit_view
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import Direction
from dcr.runtime.offer import PushTimeoutError
from tests.faults.coordinator_process import Point
from tests.faults.deployment import Deployment
from tests.faults.engine_process import Kill
from tests.faults.models import Doubled, dense
from tests.faults.thread_fleet import Fleet, flip, forge, rewrite


class Trainer:
    """Pushes the policy as it is, keeps what an engine must hold then, and goes on to train as if by dice."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.pushed = {}
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def begin(self, **kwargs):
        self.pushed = self.fleet.state()
        self.pending = self.fleet.refit.begin_push(**kwargs)
        self._thread.start()
        assert self._changed.wait(20)
        return self.pending

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """The weights are what was pushed again, in other tensors."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(20)
            rebind(self.fleet.policy, self.pushed)

    def committed(self, report):
        """This version is what was pushed."""
        self.fleet.version += 1
        assert report.version == self.fleet.version
        self.fleet.states[report.version] = self.pushed
        return report

    def _train(self):
        seed = 0
        while not self._stop.is_set():
            seed += 1
            wild(self.fleet.policy, seed)
            self._changed.set()
            time.sleep(0.001)


def wild(policy, seed):
    """Every bit of every tensor drawn anew, in place or in another tensor by turns."""
    random = torch.Generator().manual_seed(seed)
    noise = {n: torch.randint(0, 256, (t.nbytes,), dtype=torch.uint8, generator=random) for n, t in items(policy)}
    new = {n: noise[n].view(t.dtype).view(t.shape) for n, t in items(policy)}
    if seed % 2:
        rebind(policy, new)
        return
    with torch.no_grad():
        for name, tensor in items(policy):
            bit_view(tensor).copy_(bit_view(new[name]))


def items(policy):
    return policy.state_dict(keep_vars=True).items()


def rebind(policy, state):
    for name, tensor in state.items():
        setattr(policy, name, nn.Parameter(tensor.clone(), requires_grad=False))


@pytest.fixture(params=["sync"])
def fleet(tmp_path: Path, request):
    f = Fleet(tmp_path, {"attempts_max": 2, "gate_mode": request.param})
    yield f
    f.close()


def actions(fleet):
    return [step.action for step in fleet.steps]


@pytest.mark.parametrize("fleet", ["sync", pytest.param("async", marks=pytest.mark.long)], indirect=True)
def test_what_is_served_is_what_was_there_when_the_call_was_made(fleet):
    a, b = fleet.engine("a"), fleet.engine("b", Doubled)
    fleet.check(a)
    for arguments, kind in (({}, "relative"), ({"dense": True}, "dense"), ({}, "relative")):
        fleet.step()
        with Trainer(fleet) as trainer:
            report = trainer.committed(trainer.begin(**arguments).result())
            # A fold that read the live weights would lose the baseline, and the next push would be dense.
            assert (report.kind, report.attempts, report.warnings) == (kind, 1, ())
            assert trainer.pending.done
            assert trainer.pending.result() == report
            fleet.check(a)
            fleet.check(b)
    fleet.step()
    assert fleet.push().kind == "relative"  # of the live weights
    fleet.check(a)


def test_a_retry_and_a_dense_attempt_send_what_was_pushed(fleet):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:
        fleet.once("OpenApply", lambda step: forge(fleet.objects(step.epoch)[-1], flip))
        report = trainer.committed(trainer.begin().result())
        assert (report.kind, report.attempts) == ("absolute", 2)
        fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:  # an engine that holds no version takes part in a dense attempt alone
        fleet.once("OpenApply", lambda step: forge(fleet.objects(step.epoch)[-1], flip))
        report = trainer.committed(trainer.begin(dense=True).result())
        assert (report.kind, report.attempts) == ("dense", 2)
        fleet.check(a)


def test_a_push_is_turned_back_in_place_although_the_weights_are_others(fleet):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step(rate=0.5)
    with Trainer(fleet) as trainer:
        fleet.once("EndWrite", lambda _: fleet.wait(lambda: "RollBack" in actions(fleet)))
        pending = trainer.begin()
        fleet.wait(lambda: "BeginWrite" in actions(fleet))
        fleet.refit.roll_back()
        with pytest.raises(PushError, match=r"rolled back to version 0 .*: every member serves that version again"):
            pending.result()
        fleet.check(a)
        assert fleet.record().committed.direction is Direction.BACK
        assert "OpenRestore" not in actions(fleet)
    with Trainer(fleet) as trainer:
        assert trainer.committed(trainer.begin().result()).kind == "relative"
        fleet.check(a)


def stopped(fleet, trainer):
    """A push whose attempts fail, the last one after it has torn the engine."""
    spoil = lambda step: rewrite(fleet.objects(step.epoch)[-1], flip)  # noqa: E731
    fleet.once("OpenApply", spoil)
    fleet.once("AttemptFailed", lambda _: fleet.once("OpenApply", spoil))
    with pytest.raises(PushError, match="the transition stopped"):
        trainer.begin().result()


def test_a_stopped_transition_is_turned_back_or_abandoned_although_the_weights_are_others(fleet):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step(rate=0.5)
    with Trainer(fleet) as trainer:
        stopped(fleet, trainer)
        assert a.node.version is None
        fleet.refit.roll_back()  # under hold it would be abandoned, as the weights were stepped
        fleet.check(a)
        assert fleet.record().committed.direction is Direction.BACK
        assert "OpenRestore" not in actions(fleet)
    fleet.step(rate=0.5)
    with Trainer(fleet) as trainer:
        stopped(fleet, trainer)
        assert a.node.version is None
        fleet.refit.abandon()
        fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:  # other weights, as another candidate
        assert trainer.committed(trainer.begin().result()).kind == "relative"
        fleet.check(a)


def test_a_push_that_waits_for_the_operator_goes_on_with_the_copy(fleet_of):
    fleet = fleet_of(attempts_max=1, stopped_push="wait")
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step(rate=0.5)
    with Trainer(fleet) as trainer:
        fleet.once("OpenApply", lambda step: rewrite(fleet.objects(step.epoch)[-1], flip))
        pending = trainer.begin()
        fleet.wait(lambda: (tr := fleet.record().open) is not None and tr.stopped)
        assert main(["transition", "resume", "--control", fleet.addresses["control"]]) == 0
        assert trainer.committed(pending.result()).kind == "absolute"
        fleet.check(a)


def test_numbers_are_looked_for_in_the_copy_and_a_refused_push_leaves_nothing_behind(fleet_of):
    fleet = fleet_of(refuse_nonfinite=True)
    a = fleet.engine("a")
    fleet.check(a)
    before, kept = fleet.record(), fleet.policy.up[0, 0].clone()
    fleet.policy.up[0, 0] = float("nan")
    pending = fleet.refit.begin_push()
    fleet.policy.up[0, 0] = kept
    with pytest.raises(PushError, match="rank-0 brings 1 NaN, 0 infinite elements in 1 tensors: up"):
        pending.result()
    assert fleet.record() == before
    fleet.policy.up[0, 1] += 1
    with Trainer(fleet) as trainer:  # whose weights are full of NaN
        trainer.committed(trainer.begin().result())
        fleet.check(a)


def test_one_push_at_a_time_and_its_end_is_to_be_heard(fleet):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:
        fleet.once("Prepare", lambda _: fleet.wait(goes_on.is_set))
        goes_on = threading.Event()
        pending = trainer.begin()
        with pytest.raises(PushPendingError, match=r"push 1 has no outcome after another 0.05 s; it goes on"):
            pending.result(timeout_s=0.05)
        assert not pending.done
        with pytest.raises(RefusedError, match=r"rank-0: .* is pending: take its result\(\) first, on every rank"):
            fleet.refit.begin_push()
        interrupted(pending)
        goes_on.set()  # an interrupt ends the wait, and not the push
        fleet.wait(lambda: pending.done)
        with pytest.raises(RefusedError, match="is pending"):
            fleet.refit.push()  # whatever this rank has heard: another one may not have
        trainer.committed(pending.result())
        fleet.check(a)
    fleet.step()
    fleet.push()
    fleet.check(a)


def interrupted(pending):
    """As Ctrl-C does, even where whoever started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main_thread = threading.main_thread().ident
        threading.Timer(0.2, lambda: signal.pthread_kill(main_thread, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    finally:
        signal.signal(signal.SIGINT, before)


def test_closing_gives_a_pending_push_up_and_its_memory_back(fleet):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:
        never = threading.Event()
        fleet.once("Prepare", lambda _: never.wait(0.5))
        pending = trainer.begin()
        source = fleet.refit.source
        assert source._share._snapshot.nbytes == sum(t.nbytes for t in fleet.policy.state_dict().values())
        fleet.refit.close()
        with pytest.raises(RefusedError, match="this trainer's refit is closed"):
            pending.result()
        with pytest.raises(RefusedError, match="this trainer's refit is closed"):
            fleet.refit.begin_push()
        assert source._share._snapshot is None
    rebind(fleet.policy, fleet.states[0])
    fleet.restart_trainer()
    fleet.check(a)
    fleet.step()
    assert fleet.push().kind == "relative"
    fleet.check(a)


@pytest.mark.parametrize("action", ["", "OpenAttempt", "Emit", "Seal", "Prepare", "OpenApply"])
def test_a_push_that_is_rolled_back_at_any_moment_is_not_committed(fleet, action):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:
        if action:
            fleet.once(action, lambda _: fleet.refit.roll_back())
        pending = trainer.begin()
        if not action:  # before the coordinator has heard of it, most of the time
            fleet.refit.roll_back()
        with pytest.raises(PushError, match="rolled back"):
            pending.result()
    fleet.check(a)
    fleet.step()
    fleet.push()
    fleet.check(a)


def test_a_push_that_waits_for_engines_is_rolled_back_although_nothing_is_open(fleet):
    fleet.step()
    with Trainer(fleet) as trainer:
        pending = trainer.begin()
        fleet.wait(lambda: "a push waits" in fleet.refit.status.fleet.waits_for)
        fleet.refit.roll_back()
        with pytest.raises(PushError, match="rank-0: rolled back on the trainer's order; nothing was opened or sent"):
            pending.result()
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    fleet.push()  # what was taken back was that push alone
    fleet.check(a)


def test_a_push_that_another_coordinator_leads_is_rolled_back_before_it_is_opened(fleet_with):
    fleet = fleet_with()
    fleet.step()
    with Trainer(fleet) as trainer:
        pending = trainer.begin()
        fleet.refit.roll_back()
        with pytest.raises(PushError, match="rank-0: rolled back on the trainer's order; nothing was opened or sent"):
            pending.result()
    a = fleet.engine("a")
    fleet.check(a)


def test_closing_while_the_weights_are_copied_gives_that_memory_back_too(fleet, monkeypatch):
    fleet.check(fleet.engine("a"))
    fleet.step()
    copies, go, copy = threading.Event(), threading.Event(), Tracker.copy

    def slow(*args):
        copies.set()
        assert go.wait(20)
        return copy(*args)

    def begin():
        with pytest.raises(RefusedError, match="this trainer's refit is closed"):
            fleet.refit.begin_push()
        said.append(True)

    monkeypatch.setattr(Tracker, "copy", slow)
    said = []
    pushing = threading.Thread(target=begin)
    pushing.start()
    assert copies.wait(20)
    fleet.refit.close()
    go.set()
    pushing.join(20)
    assert said
    assert fleet.refit.source._share._snapshot is None


def test_a_copy_without_memory_on_the_only_rank_is_refused_with_the_rank(fleet, monkeypatch):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()

    def full(*_):
        raise MemoryError("nothing left")

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "copy", full)
        with pytest.raises(RefusedError, match=r"^rank 0: MemoryError: nothing left$") as refused:
            fleet.refit.begin_push()
    assert isinstance(refused.value.__cause__, MemoryError)
    assert "OpenAttempt" not in actions(fleet)
    fleet.push()
    fleet.check(a)


@pytest.mark.parametrize("next_push", ["begin_push", pytest.param("push", marks=pytest.mark.long)])
def test_a_push_that_timed_out_and_was_committed_all_the_same_is_folded_before_the_next(fleet, next_push):
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    with Trainer(fleet) as trainer:
        timed_out = threading.Event()
        fleet.once("Publish", lambda _: (fleet.wait(timed_out.is_set), time.sleep(0.3)))
        pending = trainer.begin()
        fleet.wait(lambda: "Publish" in actions(fleet))
        pending._offer._deadline = time.monotonic()  # as if push_timeout_s were over
        fleet.wait(lambda: pending.done)
        with pytest.raises(PushTimeoutError, match=r"push 1 has no outcome after 200\.0 s"):
            pending.result()
        fleet.version, fleet.states[1] = 1, trainer.pushed
    fleet.step()
    timed_out.set()
    report = fleet.push() if next_push == "push" else None
    if report is None:
        with Trainer(fleet) as trainer:
            report = trainer.committed(trainer.begin().result())
    assert (report.kind, report.version) == ("relative", 2)  # the baseline was not lost
    fleet.check(a)


@pytest.mark.long
@pytest.mark.parametrize("point", [("after", "OpenAttempt"), ("step", "OrderOpenApply"), ("after", "Commit")])
def test_a_standby_ends_the_push_of_a_copy_whose_leader_was_killed(fleet_with, point):
    fleet = fleet_with(point=Point(*point))
    a = fleet.engine("a")
    fleet.check(a)
    fleet.standby("another")
    fleet.step()
    with Trainer(fleet) as trainer:
        trainer.committed(trainer.begin().result())
        assert fleet.coordinators[0].wait_ended() == -signal.SIGKILL
        fleet.check(a)
    fleet.step()
    assert fleet.push().kind == "relative"  # the copy was folded
    fleet.check(a)


@pytest.mark.long
def test_engines_that_are_killed_after_the_call_and_a_trainer_that_goes_on(tmp_path):
    fleet = Deployment(tmp_path)
    try:
        fleet.step()
        a, b = fleet.engine("a"), fleet.engine("b", Kill("BeginWrite", count=2))
        fleet.check(a)
        assert b.wait_serving(0) == 0
        with Trainer(fleet) as trainer:
            wanted = dense(fleet.state())
            report = trainer.begin().result()
            assert (report.kind, report.members) == ("absolute", ("a",))
            b.wait_killed()
            fleet.version, fleet.bits[1] = 1, wanted
            fleet.check(a)
        again = fleet.engine("b")
        fleet.check(again)
        fleet.step()
        assert fleet.push().kind == "relative"
        fleet.check(a)
        fleet.check(again)
        assert fleet.check_requests() > 10
    finally:
        fleet.close()
