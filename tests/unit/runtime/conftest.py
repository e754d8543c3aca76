import gc
import threading
import time
from pathlib import Path

import pytest
from raw_peer import SECRET, WAIT_S
from tls_peer import Certificates

from dcr.runtime.channel import ChannelSettings, Hub, Peer, Spoke

A = Peer("node", "a", 1)
PATIENT = {"heartbeat_s": 5.0, "peer_timeout_s": WAIT_S, "handshake_timeout_s": WAIT_S}
"""Where a test says nothing else: a machine that stands still for seconds loses no connection."""


def _bounds(settings):
    return ChannelSettings(**{**PATIENT, **settings})


@pytest.fixture
def start():
    """Starts hubs and spokes, and closes them."""

    class Start:
        def __init__(self):
            self.open = []

        def hub(self, events, secret=SECRET, on_event=None, credentials=None, **settings):
            hub = Hub(secret, on_event or events.put, credentials=credentials, settings=_bounds(settings))
            self.open.append(hub)
            return hub

        def spoke(
            self,
            peer,
            hub,
            on_message=lambda _: None,
            *,
            secret=SECRET,
            callbacks=(None, None),
            credentials=None,
            **settings,
        ):
            resolve = hub if callable(hub) else lambda: hub.address
            on_connect, on_disconnect = callbacks
            spoke = Spoke(
                secret,
                peer,
                on_message,
                resolve=resolve,
                credentials=credentials,
                settings=_bounds(settings),
                on_connect=on_connect,
                on_disconnect=on_disconnect,
            )
            self.open.append(spoke)
            return spoke

    start = Start()
    yield start
    for one in reversed(start.open):
        one.close()


@pytest.fixture
def nothing_left():
    """After the test, and after everything is closed, no thread and no file descriptor more than before."""

    def left():
        return {t.name for t in threading.enumerate()}, len(list(Path("/proc/self/fd").iterdir()))

    def more():
        now_threads, now_files = left()
        return now_threads - threads or now_files > files

    gc.collect()  # what earlier tests left to the collector must not go meanwhile, and hide as much that stays
    gc.freeze()  # what is there now, modules above all, need not be looked through again for the next test
    threads, files = left()
    yield
    deadline = time.monotonic() + WAIT_S
    while more() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more(), (left(), threads, files)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    """Of another authority."""
    return Certificates(tmp_path_factory.mktemp("others"))


@pytest.fixture
def tls(start, shared, others):
    """Hubs and spokes with good credentials, and those that are not."""

    class Tls:
        certificates, foreign = shared, others

        def hub(self, events, on_event=None, **bounds):
            return start.hub(events, on_event=on_event, credentials=shared.of("trainer"), **bounds)

        def spoke(self, hub, on_message=lambda _: None, peer=A, name="node-a", **bounds):
            return start.spoke(peer, hub, on_message, credentials=shared.of(name), **bounds)

    return Tls()
