"""Asynchronous gate (DESIGN D18): payloads lie in host memory within a bound; the old version is served meanwhile."""

import gc
import re
import threading
from pathlib import Path

import pytest

from dcr import PushError
from dcr.delivery.sealed import SealedDelivery
from tests.faults.thread_fleet import Fleet

ASYNC = {"gate_mode": "async", "record_poll_s": 0.1}


@pytest.fixture
def fleet_in(tmp_path):
    opened = []

    def make(**more):
        opened.append(Fleet(tmp_path, {**ASYNC, **more}))
        return opened[-1]

    yield make
    for fleet in opened:
        fleet.close()


def held(engine):
    """Payloads and bytes that the engine's one rank holds, by its own count."""
    rank = engine.engine._rank
    return len(rank._held), rank._held_bytes


def mapped():
    """Bytes of shared payloads that this process has mapped, by the kernel's count, files that are gone included.

    Engines that earlier tests killed may have left some, if nobody has collected them.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [re.match(r"([0-9a-f]+)-([0-9a-f]+) .* /dev/shm/dcr-[0-9a-f]{16}-\d+-\w+/\d+( |$)", line) for line in lines]
    return sum(int(span[2], 16) - int(span[1], 16) for span in spans if span)


def files(engine):
    return [path.stat().st_size for path in engine.node._reception._memory.folder.iterdir()]


def test_what_does_not_fit_is_named_and_the_old_version_served_on(fleet_in):
    gc.collect()
    before = mapped()
    fleet = fleet_in(stage_bytes_max=900, attempts_max=2)
    engine = fleet.engine("a")
    fleet.check(engine)
    fleet.step(0.5)
    with pytest.raises(PushError, match=r"more than stage_bytes_max = 900: raise stage_bytes_max, or use the sync"):
        fleet.push()
    fleet.check(engine)  # not a byte was written: version 0 is served, clean
    assert engine.node.statuses["a"].gate == "open"
    fleet.wait(lambda: held(engine) == (0, 0) and not files(engine) and mapped() <= before)
    fleet.refit.abandon()
    fleet.step(0.001)  # one that fits goes through
    fleet.wait(lambda: fleet.record().open is None)


def test_a_share_larger_than_the_stage_restores_an_engine_all_the_same(fleet_in):
    """Nothing is served meanwhile, so a restore is not staged: its payloads are applied as they come."""
    fleet = fleet_in()
    fleet.check(fleet.engine("a"))
    fleet.step()
    fleet.push()
    fleet.addresses["settings"] = {**fleet.addresses["settings"], "stage_bytes_max": 900}
    late = fleet.stranger("late")
    fleet.check(late)
    (epoch,) = {step.epoch for step in fleet.steps if step.action == "OpenRestore"}
    assert sum(path.stat().st_size for path in fleet.objects(epoch)) > 4 * 900
    assert held(late) == (0, 0)


def test_fenced_while_it_stages_an_engine_frees_the_memory_and_serves_on(fleet_in, monkeypatch):
    gc.collect()
    before = mapped()
    fleet = fleet_in(ack_timeout_s=60.0)
    engine = fleet.engine("a")
    fleet.check(engine)
    manifest_may_go = threading.Event()
    put = SealedDelivery.put

    def late_manifest(store, key, data):
        if key.endswith("/manifest") and not manifest_may_go.is_set():
            assert manifest_may_go.wait(60)
        put(store, key, data)

    monkeypatch.setattr(SealedDelivery, "put", late_manifest)
    fleet.step(0.5)
    ended = []

    def push():
        try:
            fleet.refit.push()
        except PushError as e:
            ended.append(str(e))

    pushing = threading.Thread(target=push)
    pushing.start()
    try:
        # Everything but the manifest is staged: its bytes are held, and every request is answered with version 0.
        fleet.wait(lambda: held(engine)[0] >= 5)
        status = engine.node.statuses["a"]
        assert status.refit is not None
        assert [s.stage for s in status.refit.stages] == ["receive", "decode", "stage", "apply"]
        fleet.wait(lambda: engine.node.statuses["a"].refit.stages[2].bytes == held(engine)[1] > 0)
        fleet.wait(lambda: engine.node.statuses["a"].refit.held_up_by.startswith("receive: payload "))
        assert mapped() - before >= held(engine)[1] > 0
        answered = len(engine.seen)
        fleet.wait(lambda: len(engine.seen) > answered + 5)
        assert {version for version, _ in engine.seen} == {0}
        assert engine.node.version == 0
        fleet.refit.roll_back()
        fleet.wait(lambda: held(engine) == (0, 0))
        fleet.wait(lambda: not files(engine) and mapped() <= before)
        assert engine.node.version == 0 or engine.node.statuses["a"].reason
    finally:
        manifest_may_go.set()
        pushing.join(60)
    assert not pushing.is_alive()
    assert len(ended) == 1
    assert "rolled back" in ended[0]
    fleet.wait(lambda: engine.node.version == 0)
    fleet.check(engine)
    fleet.step(0.1)
    fleet.push()
    fleet.check(engine)
