"""An engine that starts from an older version reaches the committed one by the payloads that are kept (DESIGN D15)."""

import contextlib
import logging
import threading
from functools import partial

import pytest

from dcr import PushError
from dcr.cli.main import main
from dcr.delivery.folder import FolderDelivery
from dcr.protocol.record import Direction
from dcr.runtime.catch_up import CatchUp
from dcr.runtime.committed_attempt import CommittedAttempt
from tests.faults.engine_process import EngineProcess, Kill
from tests.faults.models import Served, dense
from tests.faults.test_transports import Relayed
from tests.faults.thread_fleet import WAIT_S, flip, forge, rewrite


@pytest.fixture
def told(caplog):
    """What nodes wrote into the log."""
    caplog.set_level(logging.INFO, "dcr.node")
    return caplog


def restores(fleet):
    return sum(s.action == "OpenRestore" for s in fleet.steps)


def pushed(fleet, count, rate=0.05):
    for _ in range(count):
        fleet.step(rate)
        fleet.push()


def left(fleet, epoch):
    return fleet.payloads / "default" / f"{epoch:020d}" / "committed"


def went(engine):
    engine.close()
    engine._fleet.engines.remove(engine)


@pytest.mark.parametrize("gate_mode", ["sync", "async"])
def test_an_engine_of_an_older_version_catches_up_and_the_trainer_does_nothing(fleet_of, told, gate_mode):
    fleet = fleet_of(gate_mode=gate_mode)
    fleet.check(fleet.engine("a"))
    pushed(fleet, 3, rate=0.01)
    did = [s.action for s in fleet.steps if s.actor == "rank-0"]
    late = fleet.engine("late")
    fleet.check(late)
    assert restores(fleet) == 0
    assert [s.action for s in fleet.steps if s.actor == "rank-0"] == did
    assert "engine late catches up from version 0 to 3: 3 versions" in told.text
    stranger = fleet.stranger("stranger")
    fleet.check(stranger)
    assert restores(fleet) == 1
    assert "engine stranger does not catch up by what is kept, so it is restored: it holds content" in told.text
    assert late.node.received[1] < stranger.node.received[1] / 3
    pushed(fleet, 1)
    for e in fleet.engines:
        fleet.check(e)


def test_an_engine_of_a_version_in_between_takes_what_is_newer_alone(fleet_of, told):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    pushed(fleet, 3)
    fleet.check(fleet.engine("late", version=2))
    fleet.check(fleet.engine("latest", version=3))
    assert restores(fleet) == 0
    assert "engine late catches up from version 2 to 3: 1 version," in told.text
    assert "engine latest" not in [r.getMessage()[:13] for r in told.records if "catch" in r.getMessage()]


@pytest.mark.parametrize("key", ["committed", "manifest"])
def test_a_store_that_fails_unforeseen_before_anything_was_applied_leaves_a_restore(fleet_of, told, monkeypatch, key):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    pushed(fleet, 2)
    get, failed = FolderDelivery.get, []

    def odd(self, at, size_max):
        if at.endswith(key) and not failed:
            failed.append(at)
            raise ValueError("odd")
        return get(self, at, size_max)

    monkeypatch.setattr(FolderDelivery, "get", odd)
    fleet.check(fleet.engine("late"))
    assert failed
    assert restores(fleet) == 1
    assert "engine late does not catch up by what is kept, so it is restored: ValueError: odd" in told.text


@contextlib.contextmanager
def damaged(path, how):
    """A stored object that is not as it was, for a while."""
    kept = path.read_bytes()
    how(path)
    yield
    path.unlink(missing_ok=True)
    path.write_bytes(kept)


def gone(path):
    path.unlink()


def spoilt(path):
    rewrite(path, flip)


def forged(path):
    """By a process of the run: the seal is right."""
    forge(path, flip)


def of_another_content(path):
    def change(data):
        a = CommittedAttempt.decode(data)
        return CommittedAttempt(
            **{f: getattr(a, f) for f in a.__struct_fields__} | {"content_digest": "0" * 32}
        ).encode()

    forge(path, change)


def test_whatever_is_missing_or_damaged_the_engine_is_restored_and_its_bits_are_right(fleet_of, told):
    fleet = fleet_of(delivery_timeout_s=2.0)  # a payload that is gone is waited for so long
    fleet.check(fleet.engine("a"))
    pushed(fleet, 2)
    epoch = fleet.record().committed.epoch
    before = CommittedAttempt.decode(left(fleet, epoch).read_bytes()[:-40]).before
    payload, manifest = fleet.objects(epoch)[1], fleet.manifest(epoch)
    cases = [
        (payload, gone, "could not catch up, so it is restored: payload 1 of the"),
        (payload, spoilt, "its seal is missing or wrong"),
        (payload, forged, "could not catch up, so it is restored: "),
        (manifest, gone, f"the manifest of rank-0, epoch {epoch}, is not kept any more"),
        (manifest, spoilt, "its seal is missing or wrong"),
        (left(fleet, before), gone, f"the payloads of epoch {before} are not kept any more, or never were"),
        (left(fleet, before), spoilt, "its seal is missing or wrong"),
        (left(fleet, before), of_another_content, f"what was left of epoch {before} is of another commit"),
    ]
    for n, (path, how, why) in enumerate(cases, 1):
        with damaged(path, how):
            told.clear()
            late = fleet.engine(f"late-{n}")
            fleet.check(late)
        assert restores(fleet) == n, (how, path)
        assert why in told.text, (how, path)
        went(late)


class Plain(Served):
    """All of it can be read back."""

    def load_weights(self, weights):
        weights = dict(weights)
        if (scale := weights.pop("scale", None)) is not None:
            self.decay.data.copy_(scale)
        return super().load_weights(weights.items()) | {"decay"}


def test_a_way_that_leads_elsewhere_is_found_by_reading_back(fleet_of, told, monkeypatch):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    pushed(fleet, 2)
    apply, late = CatchUp._apply, Plain()

    def miss(self, attempt):
        apply(self, attempt)
        late.embed.data[3, 3] += 1

    monkeypatch.setattr(CatchUp, "_apply", miss)
    fleet.check(fleet.engine("late", lambda: late))
    assert restores(fleet) == 1
    assert "engine late could not catch up, so it is restored: all 6 canonical tensors together digest to" in told.text


def test_no_more_is_kept_than_what_was_asked_for_and_who_is_further_behind_is_restored(fleet_of, told):
    fleet = fleet_of(retain_versions=2, retain_epochs=1)
    fleet.check(fleet.engine("a"))
    pushed(fleet, 2)
    fleet.restart_trainer()  # whoever leads then finds what was committed before it
    pushed(fleet, 3)
    epochs = {s.epoch for s in fleet.steps if s.action == "Commit"}
    assert len(epochs) == 5
    fleet.wait(lambda: {int(p.name) for p in (fleet.payloads / "default").iterdir() if p.name.isdigit()} & epochs
               == set(sorted(epochs)[-2:]))  # fmt: skip
    fleet.check(fleet.engine("near", version=3))
    assert restores(fleet) == 0
    fleet.check(fleet.engine("far", version=2))
    assert restores(fleet) == 1
    assert "are not kept any more, or never were" in told.text


def test_a_rollback_and_a_dense_attempt_lie_on_the_way(fleet_of, told):
    fleet = fleet_of()
    a = fleet.engine("a")
    fleet.check(a)
    pushed(fleet, 1)
    fleet.check(a)
    turned = []

    def turn_back(_):
        turned.append(threading.Thread(target=fleet.refit.roll_back))
        turned[0].start()

    fleet.once("BeginWrite", turn_back)
    fleet.once("EndWrite", lambda _: fleet.wait(lambda: any(s.action == "RollBack" for s in fleet.steps)))
    fleet.step()
    with pytest.raises(PushError):
        fleet.refit.push()
    turned[0].join()
    assert fleet.record().committed.direction is Direction.BACK
    fleet.check(fleet.engine("b"))  # by the version alone
    pushed(fleet, 1)
    fleet.check(fleet.engine("c"))
    assert restores(fleet) == 0
    assert "engine c catches up from version 0 to 2: 2 versions" in told.text
    fleet.step()
    fleet.push(dense=True)
    pushed(fleet, 1)
    fleet.check(fleet.engine("d"))
    fleet.check(fleet.stranger("stranger"))  # a dense attempt needs nothing
    assert restores(fleet) == 0
    assert "engine stranger catches up from a dense attempt for 3 to 4: 2 versions" in told.text


def test_what_is_committed_meanwhile_is_taken_too(fleet_of, told, monkeypatch):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    pushed(fleet, 1)
    follow = CatchUp._follow

    def slow(self, plan):
        follow(self, plan)
        if plan.version == 1:
            pushed(fleet, 1)

    monkeypatch.setattr(CatchUp, "_follow", slow)
    fleet.check(fleet.engine("late"))
    assert restores(fleet) == 0
    assert "engine late catches up from version 1 to 2" in told.text


def hold_at(fleet, action):
    """The next step with this action is held until it may go on; waits for that step, and lets it go on."""
    held, go_on = threading.Event(), threading.Event()

    def hold(_):
        held.set()
        assert go_on.wait(WAIT_S)

    fleet.once(action, hold)
    return partial(held.wait, WAIT_S), go_on.set


def held_amid(fleet):
    """An engine whose rank is held before the first byte, and what lets it go on."""
    fleet.check(fleet.engine("a"))
    pushed(fleet, 2)
    held, go_on = hold_at(fleet, "BeginWrite")
    late = fleet.engine("late")
    assert held()
    return late, go_on


def test_what_is_swept_meanwhile_is_waited_for_no_more(fleet_of, told):
    fleet = fleet_of()
    late, go_on = held_amid(fleet)
    epoch = fleet.record().committed.epoch
    for path in [*fleet.objects(epoch), fleet.manifest(epoch)]:
        path.unlink()
    go_on()
    fleet.check(late)
    assert restores(fleet) == 1
    assert f"could not catch up, so it is restored: the manifest of rank-0, epoch {epoch}, is not kept" in told.text


def test_how_far_it_is_can_be_asked_meanwhile(fleet_of, capsys):
    fleet = fleet_of()
    late, go_on = held_amid(fleet)
    found = late.node.statuses["late"]
    payloads = sum(len(fleet.objects(s.epoch)) for s in fleet.steps if s.action == "Commit")
    says = f"catches up from version 0 to 2: 2 versions, {payloads} payloads, "
    assert found.gate == "closed"
    assert found.reason.startswith(f"it has not joined yet: it {says}")
    assert found.refit.what.startswith(says)
    assert next((s.stage, s.done, s.total) for s in found.refit.stages) == ("receive", 0, payloads)
    assert found.refit.held_up_by == "decode and apply"
    show = ["record", "show", "--control", fleet.addresses["control"]]
    assert main(show) == 0
    assert f"catches up late, {says.removeprefix('catches up ')}" in capsys.readouterr().out
    go_on()
    fleet.check(late)
    assert late.node.statuses["late"].refit is None
    assert main(show) == 0
    assert "catches up" not in capsys.readouterr().out


def test_a_node_that_is_closed_meanwhile_leaves_an_engine_that_the_next_one_has_restored(fleet_of):
    fleet = fleet_of()
    late, go_on = held_amid(fleet)
    closing = threading.Thread(target=late.node.close)
    closing.start()
    fleet.wait(late.node._agents["late"]._stop.is_set)
    go_on()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    late.start_node()
    fleet.check(late)
    assert restores(fleet) == 1


def test_an_engine_that_comes_while_an_attempt_is_open_takes_what_comes_of_it(fleet_of, told):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    pushed(fleet, 1)
    held, go_on = hold_at(fleet, "BeginWrite")
    fleet.step()
    pushing = threading.Thread(target=fleet.push)
    pushing.start()
    assert held()
    late, latest = fleet.engine("late"), fleet.engine("latest", version=1)
    epoch = fleet.record().epoch
    waits = f"it has not joined yet: it waits for the attempt of epoch {epoch} to end, which began without it"
    for e in (late, latest):
        fleet.wait(lambda e=e: e.node.statuses[e.name].reason == waits)
    go_on()
    pushing.join(WAIT_S)
    for e in fleet.engines:
        fleet.check(e)
    assert restores(fleet) == 0
    assert told.text.count("catches up from version 1 to 2: 1 version,") == 2


def test_it_waits_no_longer_than_it_may_for_an_attempt_that_does_not_end(fleet_of):
    fleet = fleet_of(members_timeout_s=2.0)
    fleet.check(fleet.engine("a"))
    held, go_on = hold_at(fleet, "BeginWrite")
    fleet.step()
    pushing = threading.Thread(target=fleet.push)
    pushing.start()
    assert held()
    late = fleet.engine("late")
    fleet.wait(lambda: late.node.statuses["late"].reason.startswith("it has not joined yet: it waits for"))
    fleet.wait(lambda: late.node.statuses["late"].reason.startswith("the coordinator has not admitted this engine"))
    go_on()
    pushing.join(WAIT_S)
    fleet.check(late)


def test_a_relay_keeps_nothing_and_that_is_told(tmp_path, told):
    fleet = Relayed(tmp_path, {}, "heartbeat_s=0.5&peer_timeout_s=8")
    try:
        fleet.check(fleet.engine("a"))
        pushed(fleet, 1)
        fleet.check(fleet.engine("late"))
        assert restores(fleet) == 1
        assert (
            "engine late does not catch up by what is kept, so it is restored: a relay keeps no payloads" in told.text
        )
    finally:
        fleet.close()


def killed_amid(fleet, kills):
    """Engines in processes of their own, which kill themselves on their way."""
    fleet.check(fleet.engine("stays"))
    pushed(fleet, 3)
    bits = dense(fleet.states[3])
    late = []
    try:
        for kill in kills:
            late = [EngineProcess("late", fleet.folder, fleet.checkpoint, fleet.addresses, kill)]
            late[0].wait_killed()
            late.append(EngineProcess("late", fleet.folder, fleet.checkpoint, fleet.addresses))
            assert late[1].wait_serving(3) == 3
            assert late[1].call("bits") == bits
            late[1].kill()
            assert {version for version, _ in late[1].requests()} <= {3}
    finally:
        for e in late:
            e.kill()
    assert restores(fleet) == 0
    pushed(fleet, 1)


def test_killed_in_the_middle_it_starts_anew(fleet_of):
    killed_amid(fleet_of(), [Kill("BeginWrite", 2)])


@pytest.mark.long
def test_killed_anywhere_it_starts_anew(fleet_of):
    kills = [Kill(a, n) for a in ("BeginWrite", "EndWrite") for n in (1, 3, 9)]
    killed_amid(fleet_of(), [*kills, *(Kill(a, n) for a in ("Fence", "Acknowledge", "LearnCommit") for n in (1, 3))])
