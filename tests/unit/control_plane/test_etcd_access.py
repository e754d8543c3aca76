"""Who is let in to etcd, over what, and what its address may say; no password is ever shown."""

import base64
import logging

import msgspec
import pytest

from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.etcd_address import PASSWORD_VARIABLE, EtcdAddress
from dcr.control_plane.interface import ControlPlaneSettings, ControlPlaneUnavailableError
from dcr.credentials.authority import create_authority, issue
from dcr.protocol.errors import RefusedError
from dcr.runtime.secret_path import run_secret
from tests.etcd_server import HINT, EtcdServer, etcd_binary

needs_etcd = pytest.mark.skipif(etcd_binary() is None, reason=HINT)
PASSWORD = "hunter2-of-no-use-elsewhere"


def write(plane, expected, operation, lease=None, record_id="run"):
    return plane.compare_and_set(
        record_id, expected, operation.encode(), operation_id=operation, actor="t", reason="r", lease=lease
    )


def in_words(text):
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def guarded(tmp_path):
    """An etcd with authentication: user ``dcr`` may read and write below /dcr/ and nothing else."""
    server = EtcdServer.started(tmp_path)
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "root's own"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/role/add", {"name": "dcr"}),
        (
            "auth/role/grant",
            {
                "name": "dcr",
                "perm": {"permType": "READWRITE", "key": in_words("/dcr/"), "range_end": in_words("/dcr0")},
            },
        ),
        ("auth/user/add", {"name": "dcr", "password": PASSWORD}),
        ("auth/user/grant", {"user": "dcr", "role": "dcr"}),
        ("auth/enable", {}),
    ):
        status, answer = server.post(path, body)
        assert status == 200, (path, answer)
    yield server
    server.kill()


@needs_etcd
def test_a_user_with_the_least_rights_can_do_everything_and_is_let_in_again(guarded, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    file.chmod(0o600)
    plane = open_control_plane(f"{guarded.address}/dcr?user=dcr&password_file={file}")
    lease = plane.acquire("run", "one", 60)
    plane.renew(lease)
    assert write(plane, None, "a", lease).revision == 1
    plane.register("run", "node", "a", b"1")
    assert plane.registered("run", "node") == {"a": b"1"}
    plane.unregister("run", "node", "a")
    _, answer = guarded.post("auth/authenticate", {"name": "root", "password": "root's own"})
    same = {"name": "dcr", "password": PASSWORD}
    assert guarded.post("auth/user/changepw", same, answer["token"])[0] == 200  # forgets the tokens that it gave out
    assert write(plane, 1, "b", lease).revision == 2
    plane.release(lease)
    plane.close()

    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    open_control_plane(f"{guarded.address}/dcr?user=dcr").close()
    refused = []
    for address in (f"{guarded.address}/other?user=dcr", f"{guarded.address}/dcr"):
        with pytest.raises(RefusedError, match="opening it: etcdserver: ") as e:
            open_control_plane(address)
        refused.append(str(e.value))
    assert "permission denied; user dcr needs to read and write the prefix /other/" in refused[0]
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD[:-1])
    with pytest.raises(RefusedError, match="user dcr was not let in: etcdserver: authentication failed") as e:
        open_control_plane(f"{guarded.address}/dcr?user=dcr")
    refused.append(str(e.value))
    assert PASSWORD[:-1] not in "".join([*refused, caplog.text])


@needs_etcd
def test_tls_of_both_ends(tmp_path):
    for name in ("authority", "strangers"):
        create_authority(tmp_path / name)
    issue(tmp_path / "authority", tmp_path / "server", "127.0.0.1")
    issue(tmp_path / "authority", tmp_path / "client", "trainer")
    issue(tmp_path / "strangers", tmp_path / "stranger", "trainer")
    server = EtcdServer.started(tmp_path, tls=tmp_path / "server")
    bounds = ControlPlaneSettings(busy_timeout_s=5)

    def address(ca, client=None, host="127.0.0.1"):
        shown = f"&cert={tmp_path / client / 'cert.pem'}&key={tmp_path / client / 'key.pem'}" if client else ""
        return f"etcd://{host}:{server.port}/dcr?ca={tmp_path / ca / 'ca.pem'}{shown}"

    try:
        plane = open_control_plane(address("client", "client"))
        assert write(plane, None, "a", plane.acquire("run", "one", 60)).revision == 1
        plane.close()
        for wrong, said in (
            (address("stranger", "client"), "its certificate is not one of ca="),
            (address("client", "client", "localhost"), "its certificate is not one of ca=: Hostname mismatch"),
            (address("client", "stranger"), "TLS|closed the connection|reset"),
            (address("client"), "TLS|closed the connection|reset"),
            (f"{server.address}/dcr", "no HTTP: is TLS missing on one side|closed|reset|no JSON"),
        ):
            with pytest.raises(ControlPlaneUnavailableError, match=said):
                open_control_plane(wrong, bounds)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("etcd://u:SECRET@127.0.0.1:2379/dcr", "a user or a password before the host: a password comes from the file"),
        ("etcd://127.0.0.1:2379/dcr?user=u&password=SECRET", "looks like a password"),
        ("etcd://127.0.0.1:2379/dcr?PASSWD=SECRET", "looks like a password"),
        ("etcd://127.0.0.1:2379/dcr?colour=SECRET", "unknown field colour; known are ca, cert"),
        ("etcd://127.0.0.1:2379/dcr?SECRET", "the form|empty|unknown|prefix"),
        ("etcd://127.0.0.1:2379/dcr?user=", "user is empty or there twice"),
        ("etcd://127.0.0.1:2379/dcr?user=a&user=b", "user is empty or there twice"),
        ("etcd://127.0.0.1:2379", "after the hosts comes the prefix"),
        ("etcd://127.0.0.1:2379/", "after the hosts comes the prefix"),
        ("etcd://127.0.0.1:2379/a//b", "after the hosts comes the prefix"),
        ("etcd://127.0.0.1/dcr", "is not host:port"),
        ("etcd://127.0.0.1:0/dcr", "is not host:port"),
        ("etcd://127.0.0.1:65536/dcr", "is not host:port"),
        ("etcd://:2379/dcr", "is not host:port"),
        ("etcd://a:1,,b:1/dcr?ca=system", "is not host:port"),
        ("etcd://127.0.0.1:2379/dcr#x", "of the form etcd://"),
        ("etcd://10.0.0.9:2379/dcr", r"10.0.0.9:2379 is not this machine.*name the authority.*ca="),
        ("etcd://127.0.0.1:2379,etcd-2.example:2379/dcr", r"etcd-2.example:2379 is not this machine"),
        ("etcd://127.0.0.1:2379/dcr?ca=relative.pem", "ca must be an absolute path"),
        ("etcd://127.0.0.1:2379/dcr?cert=/c", "cert= and key= come together"),
        ("etcd://127.0.0.1:2379/dcr?cert=/c&key=/k", "cert= wants ca="),
        ("etcd://127.0.0.1:2379/dcr?password_file=/p", "password_file= wants user="),
        ("etcd://127.0.0.1:2379/dcr?ca=/no/such.pem", r"ca=/no/such.pem.*must be a readable PEM file"),
        ("etcd://127.0.0.1:2379/dcr?user=u", f"user u has no password: set {PASSWORD_VARIABLE}"),
        ("etcd://127.0.0.1:2379/dcr?user=u&password_file=/no/such", "password_file /no/such: No such file"),
    ],
)
def test_addresses_that_are_refused_before_anything_is_asked(address, said, monkeypatch):
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(RefusedError, match=said) as refused:
        open_control_plane(address)
    assert "SECRET" not in str(refused.value)


def test_an_address_in_full():
    parsed = EtcdAddress.parse(
        "etcd://etcd-1.example:2379,10.0.0.9:12379,[::1]:2379/rl/dcr?ca=/etc/ca.pem&user=dcr&secret=/etc/dcr/run.secret"
    )
    assert [(e.host, e.port) for e in parsed.endpoints] == [
        ("etcd-1.example", 2379),
        ("10.0.0.9", 12379),
        ("::1", 2379),
    ]
    assert (parsed.prefix, parsed.ca, parsed.user) == ("rl/dcr", "/etc/ca.pem", "dcr")
    assert str(parsed) == "etcd://etcd-1.example:2379,10.0.0.9:12379,[::1]:2379/rl/dcr"


def test_a_password_file_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    file.chmod(0o640)
    with pytest.raises(RefusedError, match=r"mode 0640 lets others use it; chmod 600"):
        open_control_plane(f"etcd://127.0.0.1:2379/dcr?user=u&password_file={file}")


@needs_etcd
def test_a_member_that_is_away_is_passed_over(running_etcd):
    port = running_etcd.port
    plane = open_control_plane(f"etcd://127.0.0.1:1,127.0.0.1:{port}/passed-over")
    assert write(plane, None, "a").revision == 1
    plane.close()
    with pytest.raises(ControlPlaneUnavailableError, match=r"opening it: 127.0.0.1:1: nothing.*; 127.0.0.1:2: nothing"):
        open_control_plane("etcd://127.0.0.1:1,127.0.0.1:2/dcr")


@needs_etcd
def test_keys_and_values_are_those_of_the_page(running_etcd):
    """docs/control-plane.md, read through the gateway and decoded by hand."""
    plane = open_control_plane(f"{running_etcd.address}/lay/out")
    lease = plane.acquire("a/b", "one", 600)
    said = {"operation_id": "op 1", "actor": "t", "reason": "r", "version": 3, "digest": "0f"}
    plane.compare_and_set("a/b", None, b"K", lease=lease, **said)
    plane.register("a/b", "node", "x/y", b"here")
    plane.close()
    _, answer = running_etcd.post("kv/range", {"key": in_words("/lay/"), "range_end": in_words("/lay0")})
    pairs = {base64.b64decode(p["key"]).decode(): p for p in answer["kvs"]}
    values = {key: base64.b64decode(p["value"]) for key, p in pairs.items()}
    base = "/lay/out/a%2Fb"
    assert values.pop(f"{base}/operation/op%201") == b"1"
    assert values.pop(f"{base}/registry/node/x%2Fy") == b"here"
    leader = pairs[f"{base}/leader"]
    assert (int(leader["create_revision"]), int(leader["lease"]) > 0) == (lease.token, True)
    decoded = {key.removeprefix(base): msgspec.msgpack.decode(value) for key, value in values.items()}
    assert decoded.pop("/history/00000000000000000001").pop("time_s") > 1e9
    assert decoded == {
        "/leader": {"holder": "one", "lease_s": 600.0},
        "/record": {"layout": 1, "revision": 1, "operation_id": "op 1", "body": b"K"},
    }
    newer = msgspec.msgpack.encode({"layout": 2, "revision": 1, "operation_id": "op 1", "body": b"K"})
    running_etcd.post("kv/put", {"key": in_words(f"{base}/record"), "value": base64.b64encode(newer).decode()})
    plane = open_control_plane(f"{running_etcd.address}/lay/out")
    with pytest.raises(RefusedError, match="layout 2, while this dcr knows 1"):
        plane.read("a/b")
    with pytest.raises(RefusedError, match="layout 2, while this dcr knows 1"):
        write(plane, 1, "late", record_id="a/b")
    plane.close()


def test_the_secret_of_a_run_on_several_machines_is_brought_and_never_made(tmp_path, capsys):
    address = "etcd://127.0.0.1:2379/dcr"
    with pytest.raises(RefusedError, match=r"make one with `dcr certs secret .*add secret=/etc/dcr/run.secret"):
        run_secret(address)
    file = tmp_path / "run.secret"
    with pytest.raises(RefusedError, match="is missing; bring it here"):
        run_secret(f"{address}?secret={file}")
    assert not file.exists()
    assert main(["certs", "secret", str(file)]) == 0
    assert file.read_bytes().hex() not in capsys.readouterr().out
    assert main(["certs", "secret", str(file)]) == 3
    assert "is there already" in capsys.readouterr().err
    assert run_secret(f"{address}?secret={file}") == file.read_bytes()
    assert len(file.read_bytes()) == 32
