"""Whether a node looks where the owners deliver is told by what is stored there, and not by addresses."""

import msgspec
import pytest

from dcr.delivery.address import open_delivery
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryError, sweep
from dcr.delivery.meeting import leave_sign, missed
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.errors import RefusedError

SECRET = b"a secret of sixteen bytes or more"


@pytest.fixture
def ours(delivery):
    return SealedDelivery(delivery, SECRET)


def test_who_looks_at_the_same_store_finds_the_sign(ours, delivery_of, delivery):
    entry = leave_sign(ours, "run", "leader-1")
    assert missed(SealedDelivery(delivery_of(), SECRET), entry) == ""
    sweep(delivery, "run", 1 << 60)
    assert missed(ours, entry) == ""  # it is of no epoch, and outlives every sweep
    again = leave_sign(ours, "run", "leader-2")
    assert delivery.keys("run/") == ["run/meeting/leader-2"]
    assert missed(ours, again) == ""
    assert "where nothing of it is to be seen" in missed(ours, entry)


def test_another_store_another_run_and_another_kind_are_named(ours, delivery, tmp_path):
    entry = leave_sign(ours, "run", "leader")
    (tmp_path / "other").mkdir()
    other = FolderDelivery(tmp_path / "other")
    said = missed(SealedDelivery(other, SECRET), entry)
    assert f"the trainer delivers to {delivery.place}, this node looks in file://{tmp_path}/other" in said
    assert "give both sides the same delivery" in said
    assert "is not of this run" in missed(SealedDelivery(delivery, SECRET[::-1]), entry)
    relay = msgspec.json.encode({"kind": "relay", "place": "relay", "key": ""})
    assert "the trainer delivers to relay, this node looks in" in missed(ours, relay)


def test_the_same_path_of_another_host_is_told_to_be_one(tmp_path):
    entry = leave_sign(FolderDelivery(tmp_path / "p"), "run", "leader")
    (tmp_path / "p").rename(tmp_path / "moved")
    assert "the same address, and yet not the same store" in missed(FolderDelivery(tmp_path / "p"), entry)


def test_what_cannot_be_told_holds_nobody_up(ours, network_of, caplog):
    entry = leave_sign(ours, "run", "leader")
    assert missed(ours, b"what a later version of dcr writes") == ""
    assert missed(SealedDelivery(network_of("away"), SECRET), entry) == ""
    assert "cannot be told now" in caplog.text


def test_two_runs_do_not_share_a_place(ours, delivery, caplog):
    """Else each sweeps away what the other has sent, its sign first."""
    entry = leave_sign(ours, "run", "leader")
    other = SealedDelivery(delivery, SECRET[::-1])
    with pytest.raises(RefusedError, match=r"another run, with another secret, .*'run'.* delete run/meeting/ there"):
        leave_sign(other, "run", "leader-of-another-run")
    assert missed(ours, entry) == ""  # nothing was taken away
    leave_sign(other, "another", "leader-of-another-run")
    delivery.delete_prefix("run/meeting/")
    leave_sign(other, "run", "leader-of-another-run")
    assert "cannot be told" not in caplog.text


def test_a_store_that_may_not_be_listed_holds_no_leader_up(delivery, network_of, caplog):
    class Unlisted(type(network_of("unlisted"))):
        def keys(self, prefix):
            raise DeliveryError(f"listing {prefix}: denied")

    leave_sign(SealedDelivery(Unlisted(network_of("unlisted")._root), SECRET), "run", "leader")
    assert "whether another run delivers to" in caplog.text


@pytest.fixture
def network_of(tmp_path, delivery):
    class Away(FolderDelivery):
        kind = delivery.kind

        def get(self, key, size_max):
            raise DeliveryError(f"object {key}: the store is away ({size_max})")

    return lambda name: Away(tmp_path / name)


def test_a_leader_that_may_not_write_hears_it_when_it_starts(tmp_path):
    delivery = open_delivery(f"file://{tmp_path}/p")
    (tmp_path / "p" / "run").write_bytes(b"a file where the record's folder should be")
    with pytest.raises(DeliveryError, match=r"storing run/meeting/leader"):
        leave_sign(delivery, "run", "leader")
