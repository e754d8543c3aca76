"""Trees of one node and of a chain of twelve, objects of no bytes and of just the bound, and certificates that end."""

import time

import pytest
from relay_fleet import Directory

from dcr.credentials.authority import create_authority, issue
from dcr.delivery.interface import DeliveryError
from dcr.delivery.relay.address import open_relay

EPOCH = "r/00000000000000000001"
BOUND = 100_000
FIELDS = f"heartbeat_s=0.5&peer_timeout_s=60&connect_timeout_s=60&object_bytes_max={BOUND}"


@pytest.fixture
def relay_of(tmp_path):
    """An owner and nodes of a directory, in threads of this process."""
    opened, directory = [], Directory()
    create_authority(tmp_path / "authority")

    def make(name, fields="", *, receives=True, days=1):
        issue(tmp_path / "authority", tmp_path / name, name, days)
        opened.append(open_relay(f"relay://{tmp_path}/{name}?{FIELDS}{fields}", directory, receives=receives))
        return opened[-1]

    yield make
    for end in opened:
        end.close()


@pytest.mark.parametrize(("count", "fan_out"), [(1, 1), (1, 4), (12, 1), (12, 4)])
def test_every_shape_brings_every_size_and_the_boundary_is_crossed_once(relay_of, count, fan_out):
    nodes = [relay_of(f"n{n:02d}", f"&fan_out={fan_out}") for n in range(count)]
    owner = relay_of("owner", f"&fan_out={fan_out}", receives=False)
    sizes = [0, 1, BOUND - 1, BOUND]
    objects = {f"{EPOCH}/{size}": bytes([size % 251]) * size for size in sizes}
    for key, data in objects.items():
        owner.put(key, data)
    for node in nodes:
        assert node.keys("r/") == sorted(objects)
        for key, data in objects.items():
            assert node.get(key, len(data)) == data
    assert owner.traffic.bytes_up == sum(sizes)
    assert sum(peer.bytes for peer in owner._peers.values()) == sum(sizes)
    assert sum(node.traffic.bytes_down for node in nodes) == count * sum(sizes)  # once for each node
    assert max(len(node._peers) for node in nodes) <= (0 if count == 1 else fan_out * len(objects))
    with pytest.raises(DeliveryError, match=f"an object of {BOUND + 1} bytes, more than object_bytes_max = {BOUND}"):
        owner.put(f"{EPOCH}/more", bytes(BOUND + 1))
    assert not any(f"{EPOCH}/more" in node.keys("r/") for node in nodes)
    owner.put(f"{EPOCH}/after", b"x")
    assert all(node.get(f"{EPOCH}/after", 1) == b"x" for node in nodes)


@pytest.mark.parametrize("whose", ["node", pytest.param("owner", marks=pytest.mark.long)])
def test_a_certificate_that_ends_meanwhile_is_named(relay_of, whose):
    for lasts_s in (3, 10, 30):
        began = time.monotonic()
        days = {"node": 1, "owner": 1, whose: lasts_s / 86400}
        node = relay_of(f"node{lasts_s}", days=days["node"])
        owner = relay_of(f"o{lasts_s}", "&idle_timeout_s=0.2&connections=1", receives=False, days=days["owner"])
        try:
            owner.put(f"{EPOCH}/before", b"x")
        except DeliveryError:
            assert time.monotonic() - began > lasts_s - 1  # whole seconds are what it lasts; else it was not too slow
            node.close()
        else:
            break
    time.sleep(max(0.0, began + lasts_s + 1.5 - time.monotonic()))  # connections that were made go on, new ones do not
    with pytest.raises(DeliveryError, match=r"node\d+: node\d+ at 127\.0\.0\.1:\d+: .*certificate.*expired"):
        owner.put(f"{EPOCH}/after", b"x")
    assert node.keys("r/") == [f"{EPOCH}/before"]
