"""`dcr coordinator` over TLS, over a relay, with a bucket and etcd: a leader is killed in a push, which goes on."""

import pytest

from dcr.credentials.authority import create_authority, issue
from dcr.runtime.secret import create_secret
from tests.etcd_server import HINT, etcd_binary
from tests.faults.test_coordinator_command import Command
from tests.faults.test_transports import CALM
from tests.faults.thread_fleet import Fleet

BOUNDS = {"coordinator": "elsewhere", "leader_lease_s": 8.0, "delivery_timeout_s": 30.0}


class Placed(Fleet):
    """A trainer, an engine and two commands, each with what is its own: credentials, and where it listens."""

    def __init__(self, folder, *, tls=False, relay=False, delivery=None, control=None, **settings):
        self.commands = []
        self._tls, self._relay = tls, relay
        self.folder = folder
        if tls or relay:
            create_authority(folder / "authority")
            for name in ("trainer", "a", "one", "two"):
                issue(folder / "authority", folder / f"peer-{name}", name)
        self._shared = {**BOUNDS, **settings}
        super().__init__(
            folder,
            {**self._shared, **self._channel("trainer")},
            delivery=self._delivery("trainer") or delivery,
            control=control,
        )

    def _channel(self, name, listen=""):
        return {"channel": f"tls://{self.folder}/peer-{name}{listen}"} if self._tls else {}

    def _delivery(self, name):
        return f"relay://{self.folder}/peer-{name}?{CALM}" if self._relay else None

    def start_trainer(self):
        if not self.commands:
            for name in ("one", "two"):
                own = self._channel(name, "?listen=127.0.0.1:0")
                more = [word for key, value in own.items() for word in ("--settings", f"{key}={value}")]
                more += ["--delivery", self._delivery(name)] if self._relay else []
                self.commands.append(Command(name, self, *more))
        return super().start_trainer()

    def engine(self, name):
        kept = self.addresses
        settings = {**kept["settings"], **self._channel(name)}
        self.addresses = {**kept, "settings": settings, "delivery": self._delivery(name) or kept["delivery"]}
        try:
            return super().engine(name)
        finally:
            self.addresses = kept

    @property
    def leading(self):
        name = self.refit._control.leader("default").holder.split("-")[0]
        return next(c for c in self.commands if c.log.name == f"{name}.log")

    def close(self):
        super().close()
        for c in self.commands:
            c.close()


def a_push_outlives_its_leader(fleet):
    try:
        e = fleet.engine("a")
        fleet.check(e)
        fleet.step()
        fleet.push()
        killed = fleet.leading
        fleet.once("Prepare", lambda _: killed.process.kill())
        fleet.step()
        report = fleet.push()
        assert report.members == ("a",)
        fleet.check(e)
        fleet.step()
        fleet.push()
        fleet.check(e)
        other = next(c for c in fleet.commands if c is not killed)
        assert fleet.leading is other
        status, said = other.end()
        assert (status, said["ok"]) == (0, True)
    finally:
        fleet.close()


@pytest.mark.long
def test_over_tls(tmp_path):
    fleet = Placed(tmp_path, tls=True)
    assert all(b"tls://" in e for e in fleet.refit._control.registered("default", "leader").values())
    a_push_outlives_its_leader(fleet)


@pytest.mark.long
@pytest.mark.parametrize("gate_mode", ["sync", "async"])
def test_over_a_relay_and_tls(tmp_path, gate_mode):
    a_push_outlives_its_leader(Placed(tmp_path, tls=True, relay=True, gate_mode=gate_mode))


@pytest.mark.long
def test_with_payloads_in_a_bucket_and_the_record_in_a_file(tmp_path, bucket, running_store):
    a_push_outlives_its_leader(Placed(tmp_path, delivery=f"s3://{bucket}/run?endpoint={running_store.endpoint}"))


@pytest.mark.long
@pytest.mark.skipif(etcd_binary() is None, reason=HINT)
def test_with_payloads_in_a_bucket_and_the_record_in_etcd(tmp_path, bucket, running_store, running_etcd):
    create_secret(tmp_path / "run.secret")
    control = f"{running_etcd.address}/{tmp_path.name}?secret={tmp_path / 'run.secret'}"
    delivery = f"s3://{bucket}/run?endpoint={running_store.endpoint}"
    a_push_outlives_its_leader(Placed(tmp_path, delivery=delivery, control=control))
