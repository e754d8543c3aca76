"""The same bits whatever brings them: transports, orders, losses, threads, bounds and gate modes, drawn at random."""

import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dcr.credentials.authority import create_authority, issue
from dcr.delivery.interface import DeliveryError
from dcr.delivery.sealed import SealedDelivery
from tests.faults.models import Served
from tests.faults.thread_fleet import Fleet

REFITS = 3
PATIENT = {
    **dict.fromkeys(("prepare_timeout_s", "ack_timeout_s", "fold_timeout_s", "restore_timeout_s"), 60.0),
    **dict.fromkeys(("members_timeout_s", "owners_timeout_s", "serve_lease_s", "push_timeout_s"), 200.0),
    "delivery_timeout_s": 30.0,
}
"""No trouble here is one that has to run out: a machine that is busy with other things must not be one either."""
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)  # an example takes a second: a failure is to end soon
CALM = "heartbeat_s=0.5&peer_timeout_s=60&connect_timeout_s=30"


class Relayed(Fleet):
    """Each engine's node has credentials of its own."""

    def __init__(self, folder: Path, bounds: dict, fields: str) -> None:
        create_authority(folder / "authority")
        self.folder, self.fields = folder, fields
        super().__init__(folder, bounds, delivery=self.address("trainer"))

    def address(self, name: str) -> str:
        issue(self.folder / "authority", self.folder / f"peer-{name}", name)
        return f"relay://{self.folder}/peer-{name}?{self.fields}"

    def engine(self, name: str, make=Served):
        kept = self.addresses
        self.addresses = {**kept, "delivery": self.address(name)}
        try:
            return super().engine(name, make)
        finally:
            self.addresses = kept


class Trouble:
    """What a bad transport does, a bounded number of times: late, twice, spoilt, or an error after it was done."""

    def __init__(self, seed: int, errors: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._errors = errors
        self.done = 0

    def draw(self, *of: str) -> str:
        with self._lock:
            kind = self._random.choice(["", "", *of])
            if kind in {"answer lost", "spoilt"}:
                if not self._errors:
                    return ""
                self._errors -= 1
            self.done += bool(kind)
            return kind

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put, get = SealedDelivery.put, SealedDelivery.get

        def bad_put(store, key, data):
            kind = self.draw("twice", "answer lost")
            put(store, key, data)
            if kind == "twice":
                put(store, key, data)
            elif kind:
                raise DeliveryError(f"object {key}: the answer was lost")

        def bad_get(store, key, size_max):
            kind = self.draw("late", "spoilt")
            data = None if kind == "late" else get(store, key, size_max)
            if data and kind == "spoilt":
                raise DeliveryError(f"object {key}: the connection was lost")
            return data

        monkeypatch.setattr(SealedDelivery, "put", bad_put)
        monkeypatch.setattr(SealedDelivery, "get", bad_get)


def deployment(folder: Path, transport: str, bounds: dict, fields: str) -> Fleet:
    if transport == "folder":
        return Fleet(folder, bounds)
    return Relayed(folder, bounds, fields)


CASES = {
    "transport": st.sampled_from(["folder", "relay", "relay"]),
    "gate_mode": st.sampled_from(["sync", "async"]),
    "operation": st.sampled_from(["add", "xor"]),
    "bucket_bytes": st.sampled_from([400, 1500, 1 << 20]),
    "buckets_ahead": st.integers(1, 8),
    "encode_threads": st.integers(1, 3),
    "deliver_threads": st.integers(1, 5),
    "fetch_ahead": st.integers(1, 5),
    "receive_bytes_max": st.sampled_from([20_000, 1 << 20]),
    "engines": st.integers(1, 3),
    "fan_out": st.integers(1, 3),
    "connections": st.integers(1, 4),
    "errors": st.integers(0, 2),
    "seed": st.integers(0, 2**32),
}


def refits_are_exact(case: dict) -> None:
    engines, seed, errors = case.pop("engines"), case.pop("seed"), case.pop("errors")
    transport = case.pop("transport")
    fields = f"{CALM}&fan_out={case.pop('fan_out')}&connections={case.pop('connections')}"
    bounds = {**case, **PATIENT, "attempts_max": 4}
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as monkeypatch:
        fleet = deployment(Path(made), transport, bounds, fields)
        try:
            nodes = [fleet.engine(f"e{n}") for n in range(engines)]
            for e in nodes:
                fleet.check(e)
            Trouble(seed, errors).patch(monkeypatch)
            for n in range(REFITS):
                fleet.step((0.0, 0.02, 0.2)[(seed + n) % 3])
                report = fleet.push()
                assert len(report.members) == engines
                for e in nodes:
                    fleet.check(e)
        finally:
            monkeypatch.undo()
            fleet.close()


@settings(max_examples=8, phases=WITHOUT_SHRINKING)
@given(st.fixed_dictionaries(CASES))
def test_refits_are_exact_whatever_brings_them(case):
    refits_are_exact(case)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=200, phases=WITHOUT_SHRINKING)
@given(st.fixed_dictionaries(CASES))
def test_many_refits_are_exact_whatever_brings_them(case):
    refits_are_exact(case)
