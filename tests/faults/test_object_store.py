"""A trainer and nodes over a real object store, while the network misbehaves and the server is killed."""

import re
import threading
import time
from collections import Counter

import pytest

from dcr import RolloutNode
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import committed_key, epoch_prefix
from tests.faults.deployment import Deployment
from tests.faults.engine_process import Kill
from tests.faults.models import stored_bits
from tests.faults.test_node_ranks import Sharded, fresh, served, single
from tests.faults.thread_fleet import Fleet

WAIT_S = 120.0
BOUNDS = {
    "delivery_timeout_s": 45.0,
    "prepare_timeout_s": 60.0,
    "ack_timeout_s": 90.0,
    "fold_timeout_s": 60.0,
    "restore_timeout_s": 90.0,
    "push_timeout_s": 250.0,
}
BAD = ("503", "500", "slow", "truncated", "lost", "reset")


@pytest.fixture
def delivery(bucket, network):
    return f"s3://{bucket}/runs?endpoint={network.endpoint}&retry_timeout_s=40"


@pytest.fixture
def kill_store(running_store, network):
    """Kills the server when a request that matches passes, and starts it again."""
    again = []

    def kill(match):
        def now(request):
            if not match(request):
                return False
            running_store.kill()
            again.append(threading.Thread(target=running_store.start))
            again[-1].start()
            return True

        network.once("reset", now)

    yield kill
    for thread in again:
        thread.join(WAIT_S)
    assert again, "the server was never killed, and this shows nothing"


def objects(address, fleet):
    """Keys of what the last committed attempt delivered, payloads and manifest."""
    delivery = open_delivery(address)
    try:
        epoch = fleet.record().committed.epoch
        keys = [k for k in delivery.keys(epoch_prefix("default", epoch)) if k != committed_key("default", epoch)]
    finally:
        delivery.close()
    assert len(keys) >= 4
    assert sum(key.endswith("/manifest") for key in keys) == 1
    return keys


def downloads(network, keys):
    """How often each object was sent to anybody, whole."""
    return Counter(key for key in keys for r in network.seen("GET", key) if r.status in {200, 206} and r.sent)


def test_refits_through_a_bad_network_and_a_server_that_is_killed(tmp_path, delivery, network, kill_store):
    fleet = Fleet(tmp_path, BOUNDS, delivery=delivery)
    nodes = []
    try:
        sharded, one, two = Sharded(fleet, "sharded"), single(fleet, "one"), single(fleet, "two")
        nodes += [
            RolloutNode([sharded, one], **fleet.addresses, observe=fleet.observe),
            RolloutNode([two], **fleet.addresses, observe=fleet.observe),
        ]

        def refit(version):
            fleet.step()
            before = [node.traffic for node in nodes]
            report = fleet.push()
            for node in nodes:
                assert node.wait_serving(version, WAIT_S) == version
            assert sorted(report.members) == ["one", "sharded", "two"]
            assert sharded.bits() == fresh(fleet, version)
            assert stored_bits(one.model) == stored_bits(two.model) == served(fleet, version)
            return report, [node.traffic.since(b) for node, b in zip(nodes, before, strict=True)]

        for node in nodes:
            node.wait_serving(0, WAIT_S)
        report, received = refit(1)
        keys = objects(delivery, fleet)
        # Once for each node, however many engines and ranks it has; and what the report counts is what passed here.
        assert downloads(network, keys) == dict.fromkeys(keys, 2)
        sent = sum(len(r.body) for r in network.seen("PUT") if any(key in r.path for key in keys))
        left = [len(r.body) for r in network.seen("PUT") if r.path.split("?")[0].endswith("/committed")]
        assert report.traffic.bytes_up in (sent, sent + sum(left))  # what is left for others comes when it comes
        assert [t.bytes_down for t in received] == [sent] * 2

        network.slow_s = 0.05
        network.at_random(0.2, BAD, seed=5)
        kill_store(lambda r: r.method == "PUT" and r.path.split("?")[0].endswith("00000000000000000002.payload"))
        report, received = refit(2)
        assert sum(report.traffic.retries.values()) >= 1
        kill_store(lambda r: r.method == "GET" and r.path.split("?")[0].endswith("00000000000000000001.payload"))
        report, received = refit(3)
        assert sum(sum(t.retries.values()) for t in received) >= 1
        assert len(network.faults()) >= 3

        network.quiet()
        report, received = refit(4)
        assert (report.kind, report.attempts) == ("relative", 1)
        keys = objects(delivery, fleet)
        assert downloads(network, keys) == dict.fromkeys(keys, 2)
    finally:
        for node in nodes:
            node.close()
        fleet.close()


def test_waiting_for_payloads_asks_the_store_seldom(tmp_path, bucket, network):
    """The trainer takes its time to emit: meanwhile a node looks a few times a second, not hundreds."""
    address = f"s3://{bucket}/runs?endpoint={network.endpoint}&look_pause_s=0.2"
    fleet = Fleet(tmp_path, BOUNDS, delivery=address)
    try:
        engine = fleet.engine("a")
        fleet.check(engine)
        emitting = threading.Event()
        put, waited_s = fleet.refit._delivery.put, []

        def looks():
            missed = [r for r in network.seen("GET", "/default/") if r.status == 404 and "list-type" not in r.path]
            return Counter(re.sub(r"\?.*", "", r.path) for r in missed)

        def slow_put(key, data):
            if not emitting.is_set():
                emitting.set()
                before, began = looks(), time.monotonic()
                fleet.wait(lambda: max((looks() - before).values(), default=0) >= 4)
                waited_s.append(time.monotonic() - began)
            put(key, data)

        fleet.refit._delivery.put = slow_put
        fleet.step()
        fleet.push()
        fleet.check(engine)
        # Four looks for an owner's first payload or its manifest: 0.2, 0.3 and 0.45 s lie between them, or more.
        assert waited_s[0] > 0.9
    finally:
        fleet.close()


@pytest.mark.long
def test_engines_killed_and_restarted_over_an_object_store(tmp_path, delivery, network, kill_store):
    """Processes of their own: one dies in the middle of its writes, the server while the next one catches up."""
    network.slow_s = 0.05
    network.at_random(0.1, BAD, seed=11)
    deployment = Deployment(tmp_path, BOUNDS, delivery)
    try:
        survivor, victim = deployment.engine("survivor"), deployment.engine("victim", Kill("BeginWrite", 3))
        for engine in (survivor, victim):
            deployment.check(engine)
        deployment.step()
        report = deployment.push()
        victim.wait_killed()
        assert (report.kind, report.members) == ("absolute", ("survivor",))
        deployment.check(survivor)
        kill_store(lambda r: r.method == "GET" and r.path.split("?")[0].endswith(".payload"))
        again = deployment.engine("victim")  # loads version 0, and catches up through the store
        deployment.check(again)
        deployment.step()
        deployment.push()
        for engine in (survivor, again):
            deployment.check(engine)
        assert deployment.check_requests() > 10
    finally:
        deployment.close()
