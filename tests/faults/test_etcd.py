"""Real kills, a held server and answers that get lost under the etcd control plane."""

import signal
import time

import pytest

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import (
    ConflictError,
    ControlPlaneSettings,
    ControlPlaneUnavailableError,
    Stored,
    UnknownOutcomeError,
)
from dcr.control_plane.lease import LeadershipLostError
from tests.bad_network import BadNetwork
from tests.etcd_server import HINT, EtcdServer, etcd_binary
from tests.faults.record_writers import kills_lose_nothing, write

pytestmark = pytest.mark.skipif(etcd_binary() is None, reason=HINT)


@pytest.fixture
def server(tmp_path):
    """One of its own, which may be killed."""
    made = EtcdServer.started(tmp_path)
    yield made
    made.kill()


@pytest.mark.parametrize(("contenders", "kills"), [(4, 2), pytest.param(20, 8, marks=pytest.mark.long)])
def test_kills_of_server_and_writers_lose_nothing_acknowledged(server, contenders, kills):
    kills_lose_nothing(f"{server.address}/run", killing([server]), contenders, kills)


@pytest.mark.long
def test_kills_of_members_lose_nothing_acknowledged(tmp_path):
    """Three members, of which one or two are dead at a time: the majority goes on, or nobody does."""
    members = EtcdServer.cluster(tmp_path, 3)
    try:
        hosts = ",".join(f"127.0.0.1:{member.port}" for member in members)
        kills_lose_nothing(f"etcd://{hosts}/run", killing(members), 20, 9)
    finally:
        for member in members:
            member.kill()


def killing(servers):
    """One server, then two at a time where there are so many, and so on."""

    def disturb(turn, rng):
        dead = rng.sample(servers, min(len(servers), 1 + turn % 2))
        for server in dead:
            server.kill(signal.SIGKILL)
        if len(dead) < len(servers):
            time.sleep(rng.uniform(0, 2))  # a majority elects, or a minority waits
        for server in dead:
            server.launch()
        for server in dead:
            server.wait_ready()

    return disturb


@pytest.fixture
def lossy(running_etcd):
    """A proxy before the server, which swallows answers as told."""
    proxy = BadNetwork(running_etcd.port)
    yield proxy
    proxy.close()


def transactions(request):
    """Writes alone; what is read before one is a transaction without comparisons."""
    return request.path == "/v3/kv/txn" and b'"compare": [{' in request.body


def test_an_answer_that_is_lost_is_an_unknown_outcome_and_read_back(running_etcd, lossy):
    plane = open_control_plane(lossy.endpoint.replace("http", "etcd") + "/lost")
    assert write(plane, None, "a").revision == 1
    lossy.once("lost", transactions)
    with pytest.raises(UnknownOutcomeError, match=r"writing the record.*operation b may have taken effect") as doubt:
        write(plane, 1, "b")
    assert doubt.value.operation_id == "b"
    assert plane.operation_revision("run", "b") == 2
    assert write(plane, 1, "b") == Stored(2, b"b" * 100, "b")  # the same again is safe
    lossy.once("reset", transactions)  # the server was never asked, and nobody can tell
    with pytest.raises(UnknownOutcomeError):
        write(plane, 2, "c")
    assert plane.operation_revision("run", "c") is None
    assert write(plane, 2, "c").revision == 3
    lossy.once("500", transactions)
    with pytest.raises(UnknownOutcomeError):
        write(plane, 3, "d")
    lossy.once("lost", transactions)
    with pytest.raises(UnknownOutcomeError):
        write(plane, 3, "d")
    direct = open_control_plane(f"{running_etcd.address}/lost")
    write(direct, 4, "e")
    with pytest.raises(ConflictError, match="overtaken"):
        write(plane, 3, "d")
    assert [e.operation_id for e in direct.history("run", 9)] == ["e", "d", "c", "b", "a"]
    direct.close()
    plane.close()


def test_the_token_is_compared_in_the_transaction_that_writes(running_etcd, lossy):
    """Taken over after the writer has looked, before its write arrives: only the transaction can tell."""
    plane = open_control_plane(lossy.endpoint.replace("http", "etcd") + "/between")
    direct = open_control_plane(f"{running_etcd.address}/between")
    old = plane.acquire("run", "one", 60)

    def take_over(request):
        if transactions(request) and direct.leader("run").token == old.token:
            direct.acquire("run", "two", 60, replaces=old.token)
        return False

    lossy.once("lost", take_over)
    with pytest.raises(LeadershipLostError, match="held by one: two leads now"):
        write(plane, None, "a", old)
    assert direct.read("run") is None
    lossy.quiet()

    # The same of the record itself.
    lease = direct.leader("run")

    def write_first(request):
        if transactions(request) and direct.read("run") is None:
            write(direct, None, "b", lease)
        return False

    lossy.once("lost", write_first)
    with pytest.raises(ConflictError, match="at revision 1, not None") as conflict:
        write(plane, None, "c", lease)
    assert conflict.value.current.operation_id == "b"
    for one in (plane, direct):
        one.close()


def test_reads_registry_and_leases_pass_over_lost_answers(lossy):
    plane = open_control_plane(lossy.endpoint.replace("http", "etcd") + "/passed")
    for path in ("kv/txn", "lease/grant", "lease/keepalive", "lease/revoke"):
        lossy.once("lost", lambda request, path=path: request.path == f"/v3/{path}")
    lossy.once("lost", transactions)
    lease = plane.acquire("run", "one", 60)
    plane.renew(lease)
    plane.register("run", "node", "a", b"1")
    assert plane.registered("run", "node") == {"a": b"1"}
    assert write(plane, None, "a", lease).revision == 1
    plane.release(lease)
    assert plane.leader("run") is None
    assert lossy.faults()["lost"] >= 4
    plane.close()


def once_it_answers(act):
    """What is answered as soon as a server that is back answers in time: a busy machine may keep it from that."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return act()
        except (ControlPlaneUnavailableError, UnknownOutcomeError):  # a write with its own id is safe to repeat
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_server_that_is_away_is_named_in_bounded_time_and_used_again_when_it_is_back(server):
    address = f"{server.address}/run"
    plane = open_control_plane(address, ControlPlaneSettings(busy_timeout_s=1.0))
    lease = plane.acquire("run", "one", 60)
    write(plane, None, "a", lease)
    server.kill()
    for act in (lambda: plane.read("run"), lambda: write(plane, 1, "b"), lambda: plane.renew(lease)):
        with pytest.raises(ControlPlaneUnavailableError, match=f"127.0.0.1:{server.port}: nothing listens there"):
            act()
    server.start()
    assert once_it_answers(lambda: plane.read("run")).operation_id == "a"
    once_it_answers(lambda: plane.renew(lease))  # who led before leads on: a restart of etcd loses no lease
    assert once_it_answers(lambda: write(plane, 1, "b", lease)).revision == 2

    server.stop()
    before = time.monotonic()
    with pytest.raises(ControlPlaneUnavailableError, match=r"reading the record: .*no answer in time"):
        plane.read("run")
    assert time.monotonic() - before < 20
    server.go_on()
    assert once_it_answers(lambda: plane.read("run")).revision == 2
    plane.close()


def test_another_cluster_behind_the_same_address_is_told(tmp_path, server):
    plane = open_control_plane(f"{server.address}/run")
    write(plane, None, "a")
    server.kill()
    (server.folder / "data").rename(server.folder / "kept")
    server.start()
    with pytest.raises(ControlPlaneUnavailableError, match="another cluster answers"):
        plane.read("run")
    server.kill()
    (server.folder / "data").rename(server.folder / "empty")
    (server.folder / "kept").rename(server.folder / "data")
    server.start()
    assert plane.read("run").operation_id == "a"
    plane.close()
