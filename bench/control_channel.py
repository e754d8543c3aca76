"""What TLS costs the control channel: a connection, a message and its answer, a small refit, against plain loopback.

Two deployments in this process, a trainer and a torch engine each, one whose channel is plain and one over TLS 1.3 with
certificates of both ends, are refitted in turn.  Eight weights change, so that the time is that of control: orders,
reports, the record, threads that wake up.  Hubs and spokes that only echo take turns in the same way.
"""

import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from table import Row, parser, report
from torch import nn

import dcr
from dcr.credentials.authority import create_authority, issue
from dcr.credentials.folder import Credentials
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.channel import Hub, HubEvent, Peer, Received, Spoke

SECRET = bytes(range(32))
WEIGHTS, CHANGED = 1 << 16, 8
ORDER_BYTES = 300
"""An order to prepare has about as many."""
WAIT_S = 120.0
WARMUPS = 3
NOT_MEASURED = (
    "a network between the machines: both ends of a connection are on loopback, where a round trip costs nothing",
    "many engines at once: one coordinator and one engine talk",
    "processes of their own: all threads here share one interpreter, and the cores with whatever else runs",
)


class Model(nn.Module):
    """A vector that is trained, and served as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: object) -> set[str]:
        """The native loader."""
        for _, weight in weights:  # type: ignore[attr-defined]
            self.w.copy_(weight)
        return {"w"}


class Deployment:
    """A trainer and an engine that serves; ``channel`` is theirs."""

    def __init__(self, folder: Path, trainer: str, node: str) -> None:
        (folder / "v0").mkdir(parents=True)
        self._policy, served = Model(), Model()
        save_file(self._policy.state_dict(), folder / "v0" / "model.safetensors")
        address = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
        settings = {"channel": trainer, "event_log": "off"}
        self._refit = dcr.TrainerRefit(self._policy, **address, settings=settings)  # type: ignore[arg-type]
        engine = TorchEngine(served, name="a", checkpoint=folder / "v0")
        settings = {"channel": node, "event_log": "off"}
        self._node = dcr.RolloutNode(engine, **address, settings=settings)  # type: ignore[arg-type]
        self._version = self._node.wait_serving(0, WAIT_S)

    def push(self) -> None:
        """A small refit, until the engine serves what was pushed."""
        self._version += 1
        self._policy.w[:CHANGED] += 1.0
        self._refit.push()
        self._node.wait_serving(self._version, WAIT_S)

    def close(self) -> None:
        """End both."""
        self._node.close()
        self._refit.close()


class Echo:
    """A hub that sends back what it hears, and a spoke that waits for it."""

    def __init__(self, hub_has: Credentials | None, spoke_has: Credentials | None) -> None:
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._spoke_has = spoke_has
        self._numbers = iter(range(1, 1 << 30))
        self._hub = Hub(SECRET, self._heard, credentials=hub_has)
        self._spoke = self._connected()

    def _heard(self, event: HubEvent) -> None:
        if isinstance(event, Received):
            self._hub.send(event.peer, event.message)

    def _connected(self) -> Spoke:
        peer = Peer("node", f"n{next(self._numbers)}", 1)
        stands = threading.Event()
        spoke = Spoke(
            SECRET,
            peer,
            self._answers.put,
            resolve=lambda: self._hub.address,
            credentials=self._spoke_has,
            on_connect=stands.set,
        )
        assert stands.wait(WAIT_S)
        return spoke

    def connect(self) -> None:
        """A connection more, which ends."""
        self._connected().close()

    def ask(self) -> None:
        """A message, and its answer."""
        assert self._spoke.send(bytes(ORDER_BYTES))
        self._answers.get(timeout=WAIT_S)

    def close(self) -> None:
        """End both."""
        self._spoke.close()
        self._hub.close()


def in_turn(plain: Callable[[], None], tls: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Seconds of each, medians; both are done once in every round, each first in every other one."""
    took: dict[Callable[[], None], list[float]] = {plain: [], tls: []}
    for number in range(rounds + WARMUPS):
        for act in (plain, tls) if number % 2 else (tls, plain):
            started = time.perf_counter()
            act()
            if number >= WARMUPS:
                took[act].append(time.perf_counter() - started)
    return statistics.median(took[plain]), statistics.median(took[tls])


def rows_of(what: str, plain_s: float, tls_s: float) -> list[Row]:
    """Both times, and how many times the one is the other."""
    return [
        Row(f"{what}, plain loopback", 1e3 * plain_s, "ms"),
        Row(f"{what}, TLS", 1e3 * tls_s, "ms"),
        Row(f"{what}, TLS against plain", tls_s / plain_s, "x"),
    ]


def main() -> None:
    """Measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--refits", type=int, default=60, help="of each deployment (60)")
    arguments.add_argument("--messages", type=int, default=2000, help="of each channel (2000)")
    arguments.add_argument("--connections", type=int, default=60, help="of each channel (60)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        create_authority(root / "authority")
        for name in ("trainer", "node"):
            issue(root / "authority", root / name, name)
        bare = Echo(None, None)
        sealed = Echo(Credentials(root / "trainer"), Credentials(root / "node"))
        connecting = in_turn(bare.connect, sealed.connect, options.connections)
        asking = in_turn(bare.ask, sealed.ask, options.messages)
        bare.close()
        sealed.close()
        plain = Deployment(root / "plain", "loopback", "loopback")
        tls = Deployment(root / "tls", f"tls://{root}/trainer?listen=127.0.0.1:0", f"tls://{root}/node")
        refitting = in_turn(plain.push, tls.push, options.refits)
        plain.close()
        tls.close()
    rows = [
        *rows_of("a connection and its end, proofs of the secret included", *connecting),
        *rows_of(f"a message of {ORDER_BYTES} bytes and its answer", *asking),
        *rows_of(f"a refit of {CHANGED} changed weights, until they are served", *refitting),
    ]
    report("control_channel", rows, NOT_MEASURED, as_json=options.json)


if __name__ == "__main__":
    main()
