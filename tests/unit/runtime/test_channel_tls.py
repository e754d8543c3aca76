"""The control channel over TLS: real sockets, real certificates, and peers that are not what they should be."""

import os
import re
import shutil
import socket
import ssl
import threading
from contextlib import closing

import pytest
from raw_peer import (
    SECRET,
    WAIT_S,
    Events,
    closed_by_peer,
    eventually,
    hello_of,
    pack,
    proof,
    receive_map,
    send_map,
    unpack,
)
from tls_peer import HOUR, Between, connect_tls, context, join_tls, place

from dcr.control_plane.address import open_control_plane
from dcr.credentials.authority import issue
from dcr.credentials.folder import Credentials
from dcr.delivery.address import open_delivery
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import OwnerRef
from dcr.runtime.channel import ChannelTimeoutError, Connected, Disconnected, Hub, Peer, Received
from dcr.runtime.channel_address import ChannelAddress, HostPort
from dcr.runtime.coordinator_host import CoordinatorHost
from dcr.runtime.settings import Settings

A = Peer("node", "a", 1)
MESSAGE, PING = 1, 2


pytestmark = pytest.mark.usefixtures("nothing_left")


def test_messages_both_ways_in_order(tls):
    events, got = Events(), Events()
    hub = tls.hub(events)
    assert re.fullmatch(r"tls://trainer@127\.0\.0\.1:\d+", hub.address)
    spoke = tls.spoke(hub, got.put)
    assert events.take(Connected).peer == A
    spoke.wait_connected(WAIT_S)
    messages = [b"", os.urandom(4 * 1024 * 1024), *(b"%d" % i for i in range(500))]
    for message in messages:
        assert hub.send(A, message)
        assert spoke.send(message)
    assert [got.take(bytes) for _ in messages] == messages
    assert [events.take(Received) for _ in messages] == [Received(A, message) for message in messages]
    spoke.close()
    assert events.take(Disconnected).reason == "the peer closed the connection"


def test_each_end_is_what_the_page_says(tls):
    events, got = Events(), Events()
    hub = tls.hub(events)
    sock, refused = join_tls(hub.address, tls.certificates.folder("raw"), SECRET, name="raw", incarnation=9)
    assert (refused, sock.version()) == ("", "TLSv1.3")
    raw = Peer("node", "raw", 9)
    assert events.take(Connected).peer == raw
    sock.sendall(pack(PING, b"") + pack(MESSAGE, b"up"))
    assert events.take(Received).message == b"up"
    hub.send(raw, b"down")
    while (frame := unpack(sock)) == (PING, b""):
        pass
    assert frame == (MESSAGE, b"down")
    hub.close()
    assert sock.recv(1) == b"", "it said goodbye: a connection that is cut off raises here"
    assert events.take(Disconnected).peer == raw
    sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tls://trainer@127.0.0.1:{listener.getsockname()[1]}"
        spoke = tls.spoke(lambda: address, got.put)
        plain, _ = listener.accept()
        sock = context(tls.certificates.folder("trainer"), ssl.PROTOCOL_TLS_SERVER).wrap_socket(plain, server_side=True)
        _welcome(sock, sock.get_channel_binding("tls-unique"))
        spoke.wait_connected(WAIT_S)
        sock.sendall(pack(MESSAGE, b"hello"))
        assert got.take(bytes) == b"hello"
        spoke.close()
        sock.close()


def _welcome(sock, binding):
    """The hub's half of the handshake."""

    hello = receive_map(sock)
    nonce = os.urandom(32)
    send_map(sock, version=1, nonce=nonce, proof=proof(SECRET, b"hub", hello, nonce, binding))
    assert receive_map(sock) == {"proof": proof(SECRET, b"spoke", hello, nonce, binding)}
    send_map(sock, refused="")


# ---------------------------------------------------------------- who is not let in


def no_certificate(hub, tls):
    return connect_tls(hub.address, context(tls.certificates.folder("node-a"), certificate=False))


def wrong_authority(hub, tls):
    made = context(tls.foreign.folder("node-a"))
    made.load_verify_locations(tls.certificates.root / "authority" / "ca.pem")
    return connect_tls(hub.address, made)


def expired(hub, tls):
    return connect_tls(hub.address, context(tls.certificates.dated("old", -3 * HOUR, -HOUR)))


def not_yet(hub, tls):
    return connect_tls(hub.address, context(tls.certificates.dated("young", HOUR, 3 * HOUR)))


def older_tls(hub, tls):
    return connect_tls(hub.address, context(tls.certificates.folder("node-a"), version=ssl.TLSVersion.TLSv1_2))


def plain(hub, tls):
    _, host, port = place(hub.address)
    sock = socket.create_connection((host, port), WAIT_S)
    send_map(sock, **hello_of())
    return sock


@pytest.mark.parametrize(
    ("stranger", "said"),
    [
        (no_certificate, "peer did not return a certificate"),
        (
            wrong_authority,
            "the peer's certificate is not good here, by our ca.pem: self-signed certificate in certificate chain",
        ),
        (expired, "the peer's certificate is not good here, by our ca.pem: certificate has expired"),
        (not_yet, "the peer's certificate is not good here, by our ca.pem: certificate is not yet valid"),
        (older_tls, "unsupported protocol"),
        (plain, "does the other end have the same setting channel"),
    ],
)
def test_strangers_are_refused_by_name_and_nobody_else(tls, caplog, stranger, said):
    events = Events()
    hub = tls.hub(events)
    if stranger is older_tls:
        with pytest.raises(ssl.SSLError, match="alert protocol version"):
            stranger(hub, tls)
    else:
        sock = stranger(hub, tls)
        if stranger is plain:
            assert closed_by_peer(sock)
        else:
            with pytest.raises(ssl.SSLError, match="alert"):
                closed_by_peer(sock)
        sock.close()
    eventually(lambda: said in caplog.text)
    assert hub.peers() == []
    assert events.empty()
    tls.spoke(hub)
    assert events.take(Connected).peer == A


@pytest.mark.parametrize(
    ("hub_is", "said"),
    [
        (
            "of another authority",
            "certificate is not good here, by our ca.pem: self-signed certificate in certificate chain",
        ),
        ("somebody else", "certificate is not good here, by our ca.pem: Hostname mismatch.*'trainer'"),
        ("expired", "certificate is not good here, by our ca.pem: certificate has expired"),
        ("older", "protocol version"),
        ("plain", "does the other end have the same setting channel"),
    ],
)
def test_a_spoke_tells_a_hub_that_is_no_good(tls, hub_is, said):
    folder = {
        "of another authority": tls.foreign.folder("trainer"),
        "somebody else": tls.certificates.folder("node-b"),
        "expired": tls.certificates.root / "expired",
    }.get(hub_is, tls.certificates.folder("trainer"))
    if hub_is == "expired" and not folder.exists():
        shutil.move(tls.certificates.dated("trainer", -3 * HOUR, -HOUR), folder)
    version = ssl.TLSVersion.TLSv1_2 if hub_is == "older" else None
    made = context(folder, ssl.PROTOCOL_TLS_SERVER, version)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        over = threading.Event()

        def serve():
            while not over.is_set():
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                sock.settimeout(WAIT_S)
                try:
                    if hub_is == "plain":
                        sock.recv(1 << 16)
                        sock.sendall(b"220 ready\r\n")
                    made.wrap_socket(sock, server_side=True).close()
                except OSError:
                    sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"tls://trainer@127.0.0.1:{listener.getsockname()[1]}"
        spoke = tls.spoke(lambda: address)
        eventually(lambda: "nothing went wrong" not in spoke.trouble)
        with pytest.raises(ChannelTimeoutError, match=f"(?s)authenticating with the hub at tls://trainer@.*{said}"):
            spoke.wait_connected(0.05)
        spoke.close()
        over.set()
        thread.join(WAIT_S)


def test_a_spoke_is_told_that_its_certificate_is_no_good(start, tls, tmp_path):
    """The hub trusts the other authority; its alert gets through although the spoke has said more already."""
    folder = tmp_path / "hub"
    shutil.copytree(tls.certificates.folder("trainer"), folder)
    shutil.copy(tls.foreign.root / "authority" / "ca.pem", folder / "ca.pem")
    hub = start.hub(Events(), credentials=Credentials(folder))
    spoke = tls.spoke(hub)
    eventually(lambda: "TLS: the peer refused this end, most likely its certificate: " in spoke.trouble)
    spoke.close()


def test_both_ends_have_credentials_or_neither(start, tls):
    events = Events()
    secured, open_hub = tls.hub(events), start.hub(events)
    without = start.spoke(A, secured)
    eventually(lambda: "it asks for a certificate: give this process credentials too" in without.trouble)
    with_them = tls.spoke(open_hub)
    eventually(lambda: "it does not speak TLS, which the setting channel asks for here" in with_them.trouble)
    far = start.spoke(A, lambda: "10.1.2.3:7000")
    eventually(lambda: "give every process credentials (dcr certs --help) and the setting channel" in far.trouble)
    assert events.empty()


@pytest.mark.parametrize("stolen", [False, True], ids=["another certificate of this name", "the hub's own key"])
def test_somebody_in_the_middle_with_a_good_certificate_cannot_pass_the_proof_on(tls, tmp_path, stolen):
    """It ends the spoke's TLS session and begins one of its own with the hub, which trusts its certificate too."""
    events = Events()
    hub = tls.hub(events)
    folder = tls.certificates.folder("trainer")
    if not stolen:
        folder = tmp_path / "mallory"
        issue(tls.certificates.root / "authority", folder, "trainer")

    def passed_on(sock):
        here = context(folder, ssl.PROTOCOL_TLS_SERVER).wrap_socket(sock, server_side=True)
        return here, connect_tls(hub.address, context(folder))

    mallory = Between(passed_on)
    spoke = tls.spoke(lambda: f"tls://trainer@{mallory.at}", name="trainer")
    eventually(lambda: "the hub does not hold the secret of this run" in spoke.trouble)
    assert events.empty()
    spoke.close()
    mallory.close()


# ---------------------------------------------------------------- credentials and addresses


def test_certificates_are_replaced_under_a_running_hub(start, tls, caplog, tmp_path):
    events = Events()
    folder, new, other = tmp_path / "used", tmp_path / "new", tmp_path / "other"
    for made, name in ((folder, "trainer"), (new, "trainer"), (other, "somebody")):
        issue(tls.certificates.root / "authority", made, name)
    hub = start.hub(events, credentials=Credentials(folder))
    spoke = tls.spoke(hub)
    events.take(Connected)

    def shown():
        with connect_tls(hub.address, context(tls.certificates.folder("raw"))) as sock:
            return ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True)).split()

    def is_in(where):
        return (where / "cert.pem").read_text().split()

    before = is_in(folder)
    assert shown() == before
    shutil.copy(new / "cert.pem", folder / "cert.pem.new")
    (folder / "cert.pem.new").rename(folder / "cert.pem")  # its key is still the old one
    assert shown() == before
    assert "what was read before stays in use" in caplog.text
    shutil.copy(new / "key.pem", folder / "key.pem")
    assert shown() == is_in(new) != before
    for name in ("cert.pem", "key.pem"):
        shutil.copy(other / name, folder / name)
    assert shown() == is_in(new)
    assert "they name somebody now, and this process is trainer" in caplog.text
    (folder / "key.pem").unlink()
    assert shown() == is_in(new)
    assert spoke.connected


def test_a_key_that_others_can_read_is_refused(shared, tmp_path):
    folder = tmp_path / "open"
    shutil.copytree(shared.folder("node-a"), folder)
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(RefusedError, match=r"open/key\.pem: mode 0644 lets others use it; chmod 600"):
        ChannelAddress.parse(f"tls://{folder}").credentials()


def test_a_hub_says_where_others_reach_it(shared):
    trainer = shared.of("trainer")
    with pytest.raises(RefusedError, match="every address of this machine; say with advertise=host:port"):
        Hub(SECRET, print, listen=HostPort("0.0.0.0", 0), credentials=trainer)
    hub = Hub(
        SECRET,
        print,
        listen=HostPort("0.0.0.0", 0),
        advertise=HostPort("host-7.example", 0),
        credentials=trainer,
    )
    assert re.fullmatch(r"tls://trainer@host-7\.example:[1-9]\d+", hub.address)
    hub.close()
    hub = Hub(SECRET, print, advertise=HostPort("10.1.2.3", 7000), credentials=trainer)
    assert hub.address == "tls://trainer@10.1.2.3:7000"
    hub.close()


def test_an_address_of_another_machine_is_refused_by_name(shared, tmp_path):
    settings = Settings(channel=f"tls://{shared.folder('trainer')}?listen=203.0.113.7:7000")
    said = r"setting channel: listening at 203\.0\.113\.7:7000: .*; give an address of this machine"
    with (
        closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as control,
        closing(open_delivery(f"file://{tmp_path}/payloads")) as delivery,
        pytest.raises(RefusedError, match=said),
    ):
        CoordinatorHost(
            record_id="default",
            leader="leader",
            owners=[OwnerRef("owner", 1)],
            control=control,
            delivery=delivery,
            secret=SECRET,
            settings=settings,
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls", "is not loopback, or tls:///folder"),
        ("", "is not loopback, or tls:///folder"),
        ("tls://host/folder", "is not loopback, or tls:///folder"),
        ("tls:///", "is not loopback, or tls:///folder"),
        ("tls:///f?port=7", "is not loopback, or tls:///folder"),
        ("tls:///f?listen", "is not loopback, or tls:///folder"),
        ("tls:///f#x", "is not loopback, or tls:///folder"),
        ("tcp:///f", "is not loopback, or tls:///folder"),
        ("tls://[/f", "is not loopback, or tls:///folder"),
        ("tls:///f?listen=7000", "'7000' is not host:port"),
        ("tls:///f?listen=h:70000", "'h:70000' is not host:port"),
        ("tls:///f?listen=[::1]:7", "is not host:port, with an IPv4 address"),
        ("tls:///f?listen=0.0.0.0:7000", "say with advertise=host:port"),
        ("tls:///f?listen=:7000", "':7000' is not host:port"),
        ("tls:///f?listen=0:7000", "say with advertise=host:port"),
        ("tls:///f?listen=h:1&advertise=0.0.0.0:7000", "must be an address that others can connect to"),
    ],
)
def test_settings_that_are_no_channel(text, said):
    with pytest.raises(RefusedError, match=re.escape(said)):
        ChannelAddress.parse(text)


def test_a_setting_says_all_of_it():
    plain_loopback = ChannelAddress.parse("loopback")
    assert (plain_loopback.folder, plain_loopback.credentials()) == (None, None)
    said = ChannelAddress.parse("tls:///etc/a%20b?listen=0.0.0.0:7100&advertise=trainer.example:0")
    assert str(said.folder) == "/etc/a b"
    assert (str(said.listen), str(said.advertise)) == ("0.0.0.0:7100", "trainer.example:0")
