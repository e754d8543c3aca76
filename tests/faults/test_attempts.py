"""Attempts that fail end by name and leave nothing torn in service; whatever comes after is exact again."""

import re
import threading
from pathlib import Path

import pytest

from dcr import PushError
from dcr.data_plane.item import Operation
from dcr.data_plane.payload import read_header
from dcr.protocol.messages import Published, decode_order
from dcr.protocol.step import Step
from dcr.runtime.serving_wait import NodeError
from tests.faults.models import Doubled, Policy, Served
from tests.faults.thread_fleet import Fleet, flip, forge, unsealed


@pytest.fixture
def fleet(tmp_path: Path):
    f = Fleet(tmp_path, {"attempts_max": 2})
    yield f
    f.close()


def spoil(fleet: Fleet, position: int, attempts: int = 1) -> None:
    """In each of the next attempts one stored payload has a flipped bit, from before anything is fetched."""
    left = [attempts]

    def act(step: Step) -> None:
        forge(fleet.objects(step.epoch)[position], flip)
        left[0] -= 1
        if left[0]:
            fleet.once("OpenApply", act)

    fleet.once("OpenApply", act)


# ---------------------------------------------------------------- the candidate


@pytest.mark.parametrize(("spoilt", "torn"), [(0, False), (-1, True)])
def test_a_candidate_stepped_between_attempts_ends_by_name(fleet: Fleet, spoilt: int, torn: bool) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.push()
    fleet.check(e)

    fleet.step()
    spoil(fleet, spoilt)
    fleet.once("AttemptFailed", lambda _: fleet.policy.step(99))
    with pytest.raises(PushError, match=r"candidate changed.*rank-0.*keep them as they are until push"):
        fleet.refit.push()
    assert fleet.record().version == 1
    if torn:  # it holds no version, and serves none until it is restored
        assert e.node.version is None
        fleet.refit.abandon()
    fleet.check(e)
    assert any(s.action == "OpenRestore" for s in fleet.steps) == torn
    fleet.refit.abandon()
    fleet.wait(lambda: fleet.record().open is None)

    report = fleet.push()  # the stepped weights, as a new candidate
    assert (report.kind, report.members) == ("relative", ("a",))
    fleet.check(e)


def test_weights_put_back_after_a_stepped_attempt_are_pushed_exactly(fleet: Fleet) -> None:
    # The attempt with the stepped weights has written elements that the first candidate's changed set does not name.
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    held = fleet.state()
    spoil(fleet, -1)
    fleet.once("AttemptFailed", lambda _: fleet.policy.step(99))
    with pytest.raises(PushError, match="candidate changed"):
        fleet.refit.push()
    fleet.policy.load_state_dict(held)
    fleet.push()
    fleet.check(e)


def test_weights_stepped_after_detection_lose_the_baseline_and_a_dense_push_mends_it(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.states[1] = fleet.state()  # what is detected, sent and committed
    fleet.once("Seal", lambda _: fleet.policy.step(99))
    report = fleet.refit.push()
    assert report.version == 1
    assert "lost its baseline" in report.warnings[0]
    assert "stepped between detection and fold" in report.warnings[0]
    fleet.version = 1
    fleet.check(e)  # the engine holds what was committed, whatever the trainer did to its weights meanwhile
    assert fleet.push().kind == "dense"
    fleet.check(e)
    fleet.step()
    assert fleet.push().kind == "relative"
    fleet.check(e)


# ---------------------------------------------------------------- the transition stops


def test_a_stopped_transition_is_named_and_resumes_with_the_same_weights(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    spoil(fleet, 0, attempts=2)
    with pytest.raises(PushError, match="the transition stopped") as stopped:
        fleet.refit.push()
    # Both attempts are named, and their common reason once.
    assert re.search(r"relative attempt of epoch 1, absolute attempt of epoch 2: .*digest", str(stopped.value))
    assert str(stopped.value).count("does not match its own digest") == 1
    fleet.check(e)  # nothing was written: it serves the committed version again
    tr = fleet.record().open
    assert tr is not None
    assert (tr.attempts, tr.stopped) == (2, True)

    report = fleet.push()
    assert (report.kind, report.attempts) == ("absolute", 1)
    fleet.check(e)


def test_resuming_with_other_weights_is_refused_by_name(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    spoil(fleet, -1, attempts=2)
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.refit.push()
    assert e.node.version is None  # torn
    fleet.step()
    with pytest.raises(PushError, match="candidate changed"):
        fleet.refit.push()
    assert e.node.version is None
    fleet.refit.abandon()
    fleet.check(e)
    fleet.push()
    fleet.check(e)


def test_a_dense_push_mends_what_a_stopped_transition_tore(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    spoil(fleet, -1, attempts=2)
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.refit.push()
    report = fleet.push(dense=True)
    assert (report.kind, report.changed_entries) == ("dense", report.elements)
    fleet.check(e)


# ---------------------------------------------------------------- restarts


def test_a_trainer_restarted_with_the_committed_weights_goes_on_relatively(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.push()
    fleet.check(e)
    fleet.restart_trainer()
    fleet.step()
    assert fleet.push().kind == "relative"
    fleet.check(e)


def test_a_trainer_restarted_with_other_weights_says_so_and_pushes_densely_and_exactly(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    assert "sends every element" not in caplog.text + str(fleet.refit.status)
    held = fleet.record().baseline_id
    fleet.restart_trainer(Policy(seed=7))
    fleet.check(e)  # goes on serving what is committed
    why = "the weights that the trainer started with are not those of the committed version 0: their content digest is "
    fleet.wait(lambda: f"; the next push sends every element: {why}" in str(fleet.refit.status))
    fleet.wait(lambda: f"default: the next push sends every element: {why}" in caplog.text)
    report = fleet.push()
    assert (report.kind, report.changed_entries) == ("dense", report.elements)
    assert report.why_dense.startswith(why)
    assert f", the record's is {held[:8]}..." in report.why_dense
    fleet.check(e)
    fleet.step()
    report = fleet.push()
    assert (report.kind, report.why_dense) == ("relative", "")
    fleet.check(e)
    fleet.wait(lambda: str(fleet.refit.status).endswith("record at version 2, idle"))
    assert caplog.text.count("sends every element") == 1


def test_a_trainer_that_restarts_amid_a_torn_transition_restores_its_engines(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    before = fleet.state()
    fleet.step()
    spoil(fleet, -1, attempts=2)
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.refit.push()
    assert e.node.version is None
    fleet.policy.load_state_dict(before)  # as its own checkpoint would have it
    fleet.restart_trainer()
    fleet.check(e)


def test_a_node_agent_that_restarts_finds_its_storage_and_serves_nothing_torn(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.push()
    fleet.check(e)
    incarnation = e.node.incarnations[e.name]
    e.node.close()
    e.start_node()  # the gate was left open, and requests run
    assert e.node.incarnations[e.name] == incarnation
    fleet.check(e)
    fleet.step()
    report = fleet.push()
    assert (report.kind, report.attempts, report.failures) == ("relative", 1, ())
    fleet.check(e)


def test_a_node_agent_that_restarts_between_two_payloads_is_mended_absolutely(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    old = e.node
    restarted = threading.Event()

    def restart() -> None:
        old.close()
        e.start_node()
        restarted.set()

    def act(_: Step) -> None:  # on the agent's own thread, which its close has to wait for
        threading.Thread(target=restart, daemon=True).start()
        fleet.wait(old._agents["a"]._stop.is_set)

    fleet.once("EndWrite", lambda _: fleet.once("EndWrite", act))
    report = fleet.push()
    assert restarted.wait(10)
    assert (report.kind, report.attempts) == ("absolute", 2)
    assert "a was lost" in report.failures[0]
    fleet.check(e)


# ---------------------------------------------------------------- loaders


class Mixed(Served):
    """A loader that computes one tensor from a resident value: no change can be placed exactly."""

    def load_weights(self, weights):
        loaded = set()
        for name, w in weights:
            if name == "q":
                self.qk[:24].copy_(w * self.decay.sum().to(w.dtype))
                loaded.add("qk")
            else:
                loaded |= super().load_weights([(name, w)])
        return loaded


def test_engines_with_different_loaders_get_set_where_one_needs_it(fleet: Fleet) -> None:
    plain, doubled = fleet.engine("plain"), fleet.engine("doubled", Doubled)
    fleet.check(plain)
    fleet.check(doubled)
    fleet.step(rate=0.5)
    report = fleet.push()
    assert (report.kind, report.members) == ("relative", ("doubled", "plain"))
    fleet.check(plain)
    fleet.check(doubled)
    sent: dict[str, set[Operation]] = {}
    for path in fleet.objects(fleet.record().epoch):
        for item in read_header(unsealed(path)).items:
            sent.setdefault(item.name, set()).add(item.operation)
    assert sent["embed"] == {Operation.SET}
    assert sent["scale"] == {Operation.SET}
    assert sent["q"] == sent["gate"] == {Operation.ADD}


def test_an_engine_whose_loader_cannot_be_refitted_is_refused_by_name_and_the_others_go_on(fleet: Fleet) -> None:
    a, odd = fleet.engine("a"), fleet.engine("odd", Mixed)
    with pytest.raises(NodeError, match=r"engine odd: its loader cannot take .*q: the loader reads resident values"):
        odd.node.wait_serving(0, 10)
    before = odd.bits()
    fleet.check(a)
    fleet.step()
    assert fleet.push().members == ("a",)
    fleet.check(a)
    assert odd.node.version is None
    assert odd.bits() == before
    assert odd.seen == []


# ---------------------------------------------------------------- messages


def test_a_node_that_was_not_told_of_the_commit_finds_it_by_itself(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    coordinator = fleet.refit._coordinator
    assert coordinator is not None
    send, lost = coordinator._send, []

    def lossy(role: str, name: str, data: bytes) -> None:
        if role == "node" and isinstance(decode_order(data), Published):
            lost.append(name)
        else:
            send(role, name, data)

    coordinator._send = lossy  # type: ignore[method-assign]  # what a broken connection does to one message
    fleet.step()
    fleet.push()
    fleet.check(e)
    assert "a" in lost
