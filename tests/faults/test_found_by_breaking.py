"""Faults that were found by trying to break whole deployments; each once went wrong, and is kept."""

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch

from dcr import PushError, RefitReport, TrainerRefit
from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import DeliveryError
from dcr.protocol.errors import RefusedError
from dcr.runtime.channel import ChannelTimeoutError, Peer, Spoke
from dcr.runtime.offer import OwnerError, PushTimeoutError
from dcr.runtime.registry import leader_address
from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings
from tests.faults.models import Doubled, Policy, Served
from tests.faults.thread_fleet import WAIT_S, Fleet


@pytest.fixture
def fleet(tmp_path: Path):
    f = Fleet(tmp_path)
    yield f
    f.close()


def refused(call) -> str:
    """What a call in a thread is refused with."""
    with pytest.raises(RefusedError) as error:
        call()
    return str(error.value)


class Held(Doubled):
    """Loads nothing while it is not let go on."""

    go = threading.Event()

    def load_weights(self, weights):
        assert Held.go.wait(WAIT_S)
        return super().load_weights(weights)


def test_the_push_after_one_that_timed_out_is_about_its_own_weights(tmp_path: Path) -> None:
    Held.go.set()
    fleet = Fleet(tmp_path, {"push_timeout_s": 0.5})
    try:
        e = fleet.engine("a", Held)
        fleet.check(e)
        fleet.step()
        Held.go.clear()
        with pytest.raises(PushTimeoutError):
            fleet.refit.push()
        Held.go.set()
        fleet.step()  # push() has returned: other weights
        reports: list[RefitReport] = []

        def pushed() -> bool:  # each try has half a second, on a machine that may be slow
            with contextlib.suppress(PushTimeoutError):
                reports.append(fleet.refit.push())
            return bool(reports)

        fleet.wait(pushed)
        fleet.version = reports[0].version
        fleet.states[fleet.version] = fleet.state()
        fleet.check(e)
    finally:
        Held.go.set()
        fleet.close()


def test_an_older_trainer_stops_and_its_engines_follow_the_newer(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    with TrainerRefit(fleet.policy, **fleet.addresses, observe=fleet.observe) as newer:
        fleet.step()
        report = newer.push()
        assert report.members == ("a",)
        fleet.version, fleet.states[1] = report.version, fleet.state()
        fleet.check(e)
        with pytest.raises(PushError, match=r"another coordinator .*leads record 'default'"):
            fleet.refit.push()
        fleet.check(e)


def test_engines_serve_again_after_a_trainer_that_went_before_a_byte_was_sent(fleet: Fleet, monkeypatch) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    never = threading.Event()
    put = type(fleet.refit._delivery).put
    monkeypatch.setattr(type(fleet.refit._delivery), "put", lambda *_: never.wait(WAIT_S))  # payloads do not come
    fleet.step()
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(refused(fleet.refit.push)))
    thread.start()
    fleet.wait(lambda: any(s.action == "OpenApply" for s in fleet.steps))
    assert e.node.version is None
    never.set()
    fleet.refit.close()
    thread.join(WAIT_S)
    assert "closed" in errors[0]
    monkeypatch.setattr(type(fleet.refit._delivery), "put", put)
    held = Policy()
    held.load_state_dict(fleet.states[0])
    fleet.restart_trainer(held)
    fleet.check(e)  # version 0, without any push
    fleet.step()
    assert fleet.push().kind == "relative"
    fleet.check(e)


def test_close_wakes_a_waiting_push_and_nothing_is_pushed_after_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(refused(fleet.refit.push)))  # no engine can take it
    thread.start()
    fleet.wait(lambda: any(s.action == "Wait" for s in fleet.steps))
    fleet.refit.close()
    thread.join(WAIT_S)
    assert "closed" in errors[0]
    with pytest.raises(RefusedError, match="closed"):
        fleet.refit.push()


def test_an_engine_that_lies_about_its_checkpoint_is_restored(fleet: Fleet) -> None:
    class NeverLoaded(Served):
        def load_weights(self, weights):
            if self.loaded:
                return super().load_weights(weights)
            self.loaded = True
            return set()

        loaded = False

    e = fleet.engine("liar", NeverLoaded)
    assert e.node.wait_serving(0, WAIT_S) == 0
    assert e.bits() == fleet.expected(fleet_twin(fleet, e), 0)
    assert any(s.action == "OpenRestore" for s in fleet.steps)


def fleet_twin(fleet: Fleet, e):
    """The same engine, as one whose class loads at the first call."""
    e.model.__class__ = Served
    return e


def test_an_engine_that_fails_every_attempt_is_left_out_and_the_others_go_on(fleet: Fleet) -> None:
    class Broken(Doubled):
        broken = False

        def load_weights(self, weights):
            if self.broken:
                raise RuntimeError("x" * 3_000_000)
            return super().load_weights(weights)

    good, bad = fleet.engine("good"), fleet.engine("bad", Broken)
    fleet.check(good)
    fleet.check(bad)
    bad.model.broken = True
    fleet.step()
    report = fleet.push()
    assert report.members == ("good",)
    assert report.attempts == 3
    assert all(len(f) < 3000 for f in report.failures)
    fleet.check(good)
    bad.model.broken = False


class Leaves(Doubled):
    ends: type[BaseException] | None = None

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        if Leaves.ends is not None:
            raise Leaves.ends(0)
        return loaded


@pytest.mark.parametrize("ends", [SystemExit, pytest.param(GeneratorExit, marks=pytest.mark.long)])
def test_a_loader_that_would_end_its_process_fails_the_attempt_by_name(tmp_path: Path, monkeypatch, ends) -> None:
    """The agent that called it lives, and takes the next push."""
    fleet = Fleet(tmp_path, {"attempts_max": 1})
    try:
        e = fleet.engine("a", Leaves)
        fleet.check(e)
        fleet.step()
        monkeypatch.setattr(Leaves, "ends", ends)
        with pytest.raises(PushError, match=rf"the loader raised LoaderExitError: {ends.__name__}: 0"):
            fleet.refit.push()
        assert e.node.failures == {}
        monkeypatch.setattr(Leaves, "ends", None)
        fleet.push()
        fleet.check(e)
    finally:
        fleet.close()


def test_an_observer_that_raises_disturbs_nobody(tmp_path: Path, caplog) -> None:
    fleet = Fleet(tmp_path)
    try:
        e = fleet.engine("a")
        fleet.check(e)
        for action in ("BeginFold", "CloseGate", "OpenGate", "Commit"):
            fleet.once(action, lambda _: 1 / 0)
        fleet.step()
        fleet.push()
        fleet.check(e)
        assert caplog.text.count("an observer failed") == 4
    finally:
        fleet.close()


class Odd(BaseException):
    """Nothing that anybody expects."""


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_an_observer_that_would_end_its_thread_disturbs_nobody(tmp_path: Path, caplog, ends) -> None:
    def act(_) -> None:
        raise ends("from observe")

    fleet = Fleet(tmp_path)
    try:
        e = fleet.engine("a")
        fleet.check(e)
        watched = ("OpenAttempt", "Emit", "BeginFold", "CloseGate", "OpenGate", "Commit")
        for action in watched:
            fleet.once(action, act)
        fleet.step()
        fleet.push()
        fleet.check(e)
        assert caplog.text.count("an observer failed") == len(watched)
    finally:
        fleet.close()


def test_a_coordinator_whose_thread_would_end_leads_no_more_by_name(tmp_path: Path, monkeypatch) -> None:
    fleet = Fleet(tmp_path)
    try:
        fleet.check(fleet.engine("a"))
        fleet.step()
        coordinator = fleet.refit._coordinator

        def ends(*_) -> None:
            raise Odd("no more")

        monkeypatch.setattr(coordinator._sweeper, "sweep", ends)
        with pytest.raises(PushError, match="the coordinator leads no more: the coordinator failed: Odd: no more"):
            fleet.refit.push()
        assert coordinator.ended.wait(WAIT_S)
        assert fleet.refit._control.leader("default") is None  # given back: nobody takes it for one that leads
    finally:
        fleet.close()


def test_an_owner_whose_thread_would_end_fails_its_push_by_name_and_takes_the_next(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        e = fleet.engine("a")
        fleet.check(e)
        fleet.step()
        role, emit = fleet.refit._host._role, fleet.refit._host._role.emit

        def ends(*_) -> None:
            role.emit = emit
            raise Odd("no more")

        role.emit = ends
        with pytest.raises(OwnerError, match=r"rank-0: Odd: no more; its log has the whole story"):
            fleet.refit.push()
        report = fleet.refit.push()
        fleet.version, fleet.states[report.version] = report.version, fleet.state()
        fleet.check(e)
    finally:
        fleet.close()


@pytest.mark.parametrize("ends", [SystemExit, pytest.param(GeneratorExit, marks=pytest.mark.long)])
@pytest.mark.parametrize("refuse_nonfinite", [False, True])
def test_a_hook_of_the_model_that_would_end_its_thread_fails_the_emission_by_name(
    tmp_path: Path, ends, refuse_nonfinite
) -> None:
    """The emission's thread lives, and takes the next push."""
    fleet = Fleet(tmp_path, {"attempts_max": 1, "refuse_nonfinite": refuse_nonfinite})
    try:
        fleet.check(fleet.engine("a"))
        with torch.no_grad():
            fleet.policy.up[0, 0] += 1  # not by a step, which brings NaN

        def hook(*_) -> None:
            if threading.current_thread().name.startswith("dcr-emission"):
                raise ends("from a hook")

        handle = fleet.policy._register_state_dict_hook(hook)
        with pytest.raises(PushError, match=rf"rank-0: {ends.__name__}: from a hook"):
            fleet.refit.push()
        handle.remove()
        fleet.push()
    finally:
        fleet.close()


def test_damaged_entries_of_the_registry_take_nobody_down(fleet: Fleet, capsys) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    control, damage = fleet.refit._control, b"\xff\xfe\x00bad"
    for entry in (("leader", "address"), ("catching-up", "b"), ("unfit", "b"), ("delivery", "meeting")):
        control.register("default", *entry, damage)
    fleet.wait(lambda: leader_address(control, "default") == fleet.refit._coordinator.address)  # entered again
    fleet.step()
    fleet.push()
    fleet.check(e)
    fleet.check(fleet.engine("late", version=1))
    assert main(["record", "show", "--control", fleet.addresses["control"]]) == 0
    assert r"catches up b, \xff\xfe" in capsys.readouterr().out
    control.register("default", "leader", "address", damage)
    fleet.restart_trainer(fleet.policy)
    fleet.step()
    fleet.push()


def test_disk_is_given_back_when_engines_restart_again_and_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, {"retain_epochs": 2})
    try:
        keep = fleet.engine("keep")
        fleet.check(keep)
        fleet.step()
        fleet.push()
        for _ in range(6):
            e = fleet.stranger("again")
            fleet.check(e)
            e.close()
            fleet.engines.remove(e)
        # The last epochs, the one commit that is kept for engines that catch up, and where both sides meet.
        fleet.wait(lambda: len(list((fleet.payloads / "default").iterdir())) <= 3 + 1 + 1)
    finally:
        fleet.close()


def test_empty_tensors_do_not_matter(tmp_path: Path, monkeypatch) -> None:
    class Odd(Policy):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.nothing = torch.nn.Parameter(torch.zeros(0, 24), requires_grad=False)

    class OddServed(Served):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = torch.nn.Parameter(torch.zeros(24, 0), requires_grad=False)

        def load_weights(self, weights):
            weights = dict(weights)
            if (w := weights.pop("nothing", None)) is not None:
                self.nothing.data.copy_(w.t())
            return super().load_weights(weights.items())

    monkeypatch.setattr("tests.faults.thread_fleet.Policy", Odd)
    fleet = Fleet(tmp_path)
    try:
        e = fleet.engine("a", OddServed)
        fleet.check(e)
        fleet.step()
        fleet.push()
        fleet.check(e)
    finally:
        fleet.close()


def test_what_is_no_file_is_no_object(tmp_path: Path) -> None:
    delivery = open_delivery(f"file://{tmp_path}/p")
    delivery.put("r/1", b"x")
    os.mkfifo(tmp_path / "p" / "r" / "2")
    (tmp_path / "p" / "r" / "3").mkdir()
    fds = len(list(Path("/proc/self/fd").iterdir()))
    for key in ("r/2", "r/3"):
        with pytest.raises(DeliveryError, match="not a regular file"):
            delivery.get(key, 10)
    assert len(list(Path("/proc/self/fd").iterdir())) == fds


@pytest.mark.parametrize("name", ["x" * 1025, "w\ud800"])
def test_names_that_no_payload_can_carry_are_refused_before_anything_is_pushed(tmp_path: Path, name: str) -> None:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(4))
    addresses = {"control": f"sqlite://{tmp_path}/r.db", "delivery": f"file://{tmp_path}/p"}
    with pytest.raises(RefusedError, match="1 to 1024 characters of valid Unicode"):
        TrainerRefit(module, **addresses, save_path=lambda state: {name: state["w"]})


def test_a_record_that_cannot_be_read_ends_the_push_by_name(tmp_path: Path) -> None:
    control = open_control_plane(f"sqlite://{tmp_path}/record.db")
    control.compare_and_set("default", None, b"of another time", operation_id="x", actor="x", reason="x")
    control.close()
    fleet = Fleet(tmp_path)
    try:
        with pytest.raises(PushError, match="no commit record that this version of dcr can read"):
            fleet.refit.push()
    finally:
        fleet.close()


def test_a_peer_of_another_record_beside_this_one_is_not_let_in(fleet: Fleet) -> None:
    secret = Path(fleet.folder / "record.db.secret").read_bytes()
    address = leader_address(fleet.refit._control, "default")
    stray = Spoke(record_secret(secret, "other"), Peer("node", "stray", 1), lambda _: None, resolve=lambda: address)
    with pytest.raises(ChannelTimeoutError):
        stray.wait_connected(1.0)
    stray.close()


@pytest.mark.parametrize("seconds", [float("inf"), 1e10, float("nan"), 0.0])
def test_times_that_no_clock_can_wait_for_are_refused(seconds: float) -> None:
    with pytest.raises(RefusedError, match="push_timeout_s"):
        Settings.of({"push_timeout_s": seconds})
