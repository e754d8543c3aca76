"""What both sides say of a refit that takes long: how far each stage is, what holds it up, since when nothing moved."""

import itertools
import logging
import threading

import pytest

from dcr.delivery.sealed import SEAL_BYTES, SealedDelivery
from dcr.runtime.progress_log import ProgressLog
from dcr.runtime.rank_host import RankHost
from tests.faults.models import Policy
from tests.faults.thread_fleet import Fleet

ELEMENTS = sum(t.numel() for t in Policy().state_dict().values())


class Held:
    """A store that keeps the third payload waiting until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        put = SealedDelivery.put

        def slow_put(store, key, data):
            if key.endswith("00000000000000000002.payload"):
                assert self.go.wait(60)
            put(store, key, data)

        monkeypatch.setattr(SealedDelivery, "put", slow_put)


@pytest.mark.parametrize("gate_mode", ["sync", "async"])
def test_both_sides_tell_how_far_they_are(tmp_path, monkeypatch, caplog, gate_mode):
    caplog.set_level(logging.INFO, "dcr")
    monkeypatch.setitem(ProgressLog.__init__.__kwdefaults__, "every_s", 0.3)
    fleet = Fleet(
        tmp_path, {"deliver_threads": 1, "ack_timeout_s": 60.0, "delivery_timeout_s": 60.0, "gate_mode": gate_mode}
    )
    held = Held(monkeypatch)
    pushing = threading.Thread(target=fleet.push)
    try:
        assert any(
            "refit of record 'default': learns how 6 tensors lie in the checkpoint" in line for line in caplog.messages
        )
        assert any("refit of record 'default' is ready, after " in line for line in caplog.messages)
        engine = fleet.engine("a")
        fleet.check(engine)
        assert any(
            "node of a: learns how the weights of engine a lie in its storage" in line for line in caplog.messages
        )
        assert fleet.refit.status.emission is None
        fleet.wait(lambda: fleet.refit.status.fleet.waits_for == "")
        assert engine.node.statuses["a"].refit is None
        fleet.step(0.5)
        pushing.start()

        def stages():
            return {s.stage: s for s in fleet.refit.status.emission.stages}

        def received():
            return {s.stage: s for s in engine.node.statuses["a"].refit.stages}

        fleet.wait(lambda: fleet.refit.status.emission is not None and stages()["deliver"].done == 2)
        fleet.wait(lambda: engine.node.statuses["a"].refit is not None and received()["receive"].done == 2)
        sizes = [path.stat().st_size - SEAL_BYTES for path in fleet.payloads.rglob("*.payload")]
        assert (len(sizes), sum(sizes)) == (2, stages()["deliver"].bytes)
        fleet.wait(lambda: stages()["encode"].done > 2)
        applied = 2 if gate_mode == "sync" else 0
        fleet.wait(lambda: (received()["decode"].done, received()["apply"].done) == (2, applied))
        on_its_way = "deliver: 1 payloads are on their way to the store"
        fleet.wait(lambda: fleet.refit.status.emission.held_up_by == on_its_way)
        mine = fleet.refit.status.emission
        assert (mine.epoch, mine.what) == (1, "version 0 -> 1, relative")
        assert stages()["detect"].total == ELEMENTS
        assert 0 < stages()["detect"].done <= ELEMENTS
        theirs = engine.node.statuses["a"].refit
        assert (theirs.epoch, theirs.what.endswith("version 0 -> 1, relative")) == (1, True)
        fleet.wait(lambda: engine.node.statuses["a"].refit.held_up_by == "receive: payload 2 of rank-0")
        if gate_mode == "async":
            fleet.wait(lambda: received()["stage"].bytes == sum(sizes))
        fleet.wait(lambda: fleet.refit.status.fleet.waits_for.startswith("rank-0 did not seal epoch 1 yet"))
        for ask in (lambda: fleet.refit.status.emission, lambda: engine.node.statuses["a"].refit):
            fleet.wait(lambda ask=ask: ask().idle_s >= 0.4)  # once the stages before the held one are through
            status = ask()
            assert f"nothing has moved for {status.idle_s:.0f} s" in str(status) or status.idle_s < 1
        fleet.wait(lambda: sum(line.startswith("rank-0, epoch 1, version 0 -> 1") for line in caplog.messages) >= 2)
        fleet.wait(lambda: any(line.startswith("engine a, epoch 1, ") for line in caplog.messages))
        of = "1 of 1 engines prepared, 0 of 1 owners sealed"
        told = f"coordinator, epoch 1, version 0 -> 1, relative, attempt 1, {of}"
        fleet.wait(lambda: any(told in line for line in caplog.messages))
        held.go.set()
        pushing.join(60)
        fleet.check(engine)
        fleet.wait(lambda: engine.node.statuses["a"].refit is None)
    finally:
        held.go.set()
        if pushing.ident is not None:
            pushing.join(60)
        fleet.close()
    assert not pushing.is_alive()
    done = {s.stage: s for s in fleet.refit.status.emission.stages}
    assert fleet.refit.status.emission.held_up_by == ""
    assert done["deliver"].done == done["deliver"].total == done["encode"].done > 3
    assert done["detect"].share == 1.0


def test_a_push_that_waits_for_engines_or_ranks_says_so(tmp_path):
    fleet = Fleet(tmp_path, {"members_timeout_s": 60.0})
    pushing = threading.Thread(target=fleet.push)
    try:
        fleet.step()
        pushing.start()
        fleet.wait(
            lambda: fleet.refit.status.fleet.waits_for.startswith("a push waits; engines: none asks to take part")
        )
        engine = fleet.engine("a")
        pushing.join(60)
        fleet.check(engine)
        fleet.wait(lambda: fleet.refit.status.fleet.waits_for == "")
        fleet.wait(lambda: str(fleet.refit.status).endswith("record at version 1, idle"))
    finally:
        fleet.close()


def test_an_asynchronous_apply_shows_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("dcr.runtime.rank_host.ANSWER_S", 0.0)  # after each payload
    go, write, written = threading.Event(), RankHost._write, itertools.count()

    def slow_write(host, *arguments):
        if next(written) == 3:
            assert go.wait(60)
        return write(host, *arguments)

    monkeypatch.setattr(RankHost, "_write", slow_write)
    fleet = Fleet(tmp_path, {"ack_timeout_s": 60.0, "gate_mode": "async"})
    pushing = threading.Thread(target=fleet.push)
    try:
        engine = fleet.engine("a")
        fleet.check(engine)
        fleet.step()
        pushing.start()

        def stages():
            refit = engine.node.statuses["a"].refit
            return {} if refit is None else {s.stage: s for s in refit.stages}

        fleet.wait(lambda: stages() and stages()["apply"].done == 3)
        seen = stages()
        assert seen["apply"].total == seen["stage"].done == seen["receive"].done > 4
        fleet.wait(lambda: engine.node.statuses["a"].refit.held_up_by == "apply")
        go.set()
        pushing.join(60)
        fleet.check(engine)
    finally:
        go.set()
        if pushing.ident is not None:
            pushing.join(60)
        fleet.close()
