"""Orders of a leader that was replaced, at members and owners that know of its successor: refused, nothing changed."""

import time

import pytest

from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Emit, Fold, OpenApply, Prepare, encode_message
from dcr.protocol.record import OwnerRef
from dcr.runtime.channel import Connected, Hub, Peer, Received, Spoke
from dcr.runtime.registry import leader_address, register_leader
from dcr.runtime.secret import record_secret


class Zombie:
    """What an old leader's end of the channel may still send, to whoever comes to it."""

    def __init__(self, fleet):
        self.peers, self.heard = {}, []
        secret = record_secret((fleet.folder / "record.db.secret").read_bytes(), "default")
        self._hub = Hub(secret, self._on)
        register_leader(fleet.refit._control, "default", self._hub.address)

    def _on(self, event):
        if isinstance(event, Connected):
            self.peers[event.peer.role] = event.peer
        elif isinstance(event, Received):
            self.heard.append(event.message)

    def send(self, role, order):
        assert self._hub.send(self.peers[role], encode_message(order))

    def close(self):
        self._hub.close()


def test_orders_below_the_fence_are_refused_by_members_and_owners(fleet_with, caplog):
    fleet = fleet_with()
    e = fleet.engine("a")
    fleet.check(e)
    for _ in range(2):
        fleet.step()
        fleet.push()
    fleet.check(e)
    fleet.coordinators[0].close()
    zombie = Zombie(fleet)
    try:
        fleet.wait(lambda: {"node", "owner"} <= zombie.peers.keys())
        fleet.wait(lambda: len(zombie.heard) >= 2)  # they say who they are
        said, steps, before = len(zombie.heard), len(fleet.steps), fleet.record()
        owners = (OwnerRef(*_named(zombie.peers["owner"])),)
        for kind in (Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE):
            base = Base(kind, 0, "" if kind is Kind.DENSE else "0" * 32, "v1-old")
            incarnation = zombie.peers["node"].incarnation
            zombie.send("node", Prepare("default", 1, 1, base, owners, incarnation))
            zombie.send("owner", Emit("default", 1, 1, base, "add", (), zombie.peers["owner"].incarnation))
        zombie.send("node", OpenApply("default", 1))
        zombie.send("owner", Fold("default", 1))
        fleet.wait(lambda: sum("refused" in r.getMessage() for r in caplog.records) >= 6)
        time.sleep(0.3)
        assert (len(zombie.heard), len(fleet.steps)) == (said, steps)
        assert fleet.record() == before
        fleet.check(e)
    finally:
        zombie.close()
    fleet.coordinator("another")
    fleet.step()
    assert fleet.push().kind == "relative"
    fleet.check(e)


@pytest.mark.parametrize(("name", "incarnation"), [("rank-0", 2**62), ("rank-1", 1)])
def test_an_owner_of_another_trainer_is_not_let_in(fleet_with, name, incarnation):
    fleet = fleet_with()
    secret = record_secret((fleet.folder / "record.db.secret").read_bytes(), "default")
    address = leader_address(fleet.refit._control, "default")
    stranger = Spoke(secret, Peer("owner", name, incarnation), print, resolve=lambda: address)
    try:
        fleet.wait(lambda: f"leads another trainer, of which owner {name} ({incarnation}) is none" in stranger.trouble)
    finally:
        stranger.close()
    e = fleet.engine("a")
    fleet.step()
    fleet.push()  # whose owner was not pushed out, though the stranger's incarnation is newer
    fleet.check(e)


def _named(peer):
    return peer.name, peer.incarnation
