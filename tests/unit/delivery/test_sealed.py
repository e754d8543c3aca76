"""Seals, checked against an HMAC of the test's own, and against everything that might be put in an object's place."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryConflictError, LookPause
from dcr.delivery.sealed import SealedDelivery, UnsealedError
from dcr.protocol.errors import RefusedError

SECRET = b"s" * 32
KEY = "r/1/0.payload"


class Kept:
    """Objects in a dictionary, which anybody may change."""

    look_pause = LookPause()
    kind = place = "kept"

    def __init__(self):
        self.objects = {}
        self.reads = 0

    def put(self, key, data):
        self.objects[key] = data

    def get(self, key, size_max):
        self.reads += 1
        found = self.objects.get(key)
        assert found is None or len(found) <= size_max
        return found


@given(st.binary(max_size=200))
def test_what_is_stored_is_the_object_and_its_seal(data):
    kept = Kept()
    sealed = SealedDelivery(kept, SECRET)
    sealed.put(KEY, data)
    secret = hmac.new(SECRET, b"dcr delivered objects", hashlib.sha256).digest()
    seal = hmac.new(secret, KEY.encode() + b"\0" + data, hashlib.sha256).digest()
    assert kept.objects == {KEY: data + b"dcrSEAL1" + seal}
    assert sealed.get(KEY, len(data)) == data
    assert sealed.get("r/1/1.payload", 10) is None


@given(st.binary(max_size=60), st.data())
def test_whatever_is_changed_is_refused(data, drawn):
    kept = Kept()
    sealed = SealedDelivery(kept, SECRET)
    sealed.put(KEY, data)
    stored = kept.objects[KEY]
    at = drawn.draw(st.integers(0, len(stored) - 1))
    other = drawn.draw(
        st.sampled_from(
            [
                stored[:at],
                stored[at + 1 :],
                stored + b"\0",
                stored[:at] + bytes([stored[at] ^ drawn.draw(st.integers(1, 255))]) + stored[at + 1 :],
                b"",
                data,
            ]
        )
    )
    kept.objects[KEY] = other
    with pytest.raises(UnsealedError, match="its seal is missing or wrong"):
        sealed.get(KEY, 1000)


def test_an_object_of_another_key_or_another_run_is_refused():
    kept = Kept()
    sealed = SealedDelivery(kept, SECRET)
    sealed.put(KEY, b"of an older epoch")
    kept.objects["r/2/0.payload"] = kept.objects[KEY]
    with pytest.raises(UnsealedError, match=r"r/2/0\.payload"):
        sealed.get("r/2/0.payload", 1000)
    SealedDelivery(kept, b"t" * 32).put(KEY, b"of another run")
    with pytest.raises(UnsealedError):
        sealed.get(KEY, 1000)


def test_a_copy_that_came_bad_is_read_again():
    kept = Kept()
    sealed = SealedDelivery(kept, SECRET)
    sealed.put(KEY, b"good")
    good, kept.objects[KEY] = kept.objects[KEY], b"bad"
    get = kept.get

    def heal(key, size_max):
        found = get(key, size_max)
        if kept.reads == 2:
            kept.objects[KEY] = good
        return found

    kept.get = heal
    assert sealed.get(KEY, 100) == b"good"
    assert kept.reads == 3


def test_over_a_real_folder(tmp_path):
    sealed = SealedDelivery(FolderDelivery(tmp_path / "p"), SECRET)
    sealed.put(KEY, b"data")
    sealed.put(KEY, b"data")
    with pytest.raises(DeliveryConflictError):
        sealed.put(KEY, b"other")
    with pytest.raises(RefusedError, match="more than the"):
        sealed.get(KEY, 3)
    assert sealed.keys("r/") == [KEY]
    assert SealedDelivery(FolderDelivery(tmp_path / "p"), SECRET).get(KEY, 4) == b"data"
    sealed.delete_prefix("r/1/")
    assert sealed.get(KEY, 4) is None
    sealed.close()
