"""The entry of every process that a scenario starts: its logs, its journal, and its line to the harness."""

import faulthandler
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from dcr.chaos.journal import Journal
from dcr.chaos.lifetime import end_with_parent
from dcr.chaos.model import VLLM
from dcr.chaos.trigger import Armed, Trigger

ENDED_ALONE = 70
"""Exit status of a child whose harness is gone."""
FAILED = 71
RECORD = "default"
"""The record of every run."""


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told when it starts."""

    role: str
    """``trainer``, ``coordinator``, ``node`` or ``twin``."""
    name: str
    number: int
    """Which training rank, coordinator or node."""
    start: int
    """The how-manieth process of this name."""
    folder: str
    """Of the run."""
    control: str
    delivery: str
    settings: dict[str, Any]
    factory: str = ""
    """Of the model; a coordinator has none."""
    checkpoint: str = ""
    """Folder from which the model is loaded; empty for the factory's own weights."""
    ranks: int = 1
    """Of the trainer."""
    rendezvous: str = ""
    """File at which its ranks meet."""
    engines: tuple[int, ...] = ()
    """Numbers of the node's engines."""
    channel: str = ""
    """Where a proxy before the coordinator's control channel listens; empty for none."""
    relays: dict[str, int] = {}
    """Ports of the proxies before the relays that it sends to, by the relay's name; others are reached directly."""
    environment: dict[str, str] = {}
    armed: tuple[Armed, ...] = ()
    bug: str = ""
    """What is broken on purpose (``dcr.chaos.bugs``)."""

    @property
    def vllm(self) -> bool:
        """Whether vLLM runs in it, which does not start in a process where kernels of numba are loaded."""
        return self.role == "twin" or self.factory == VLLM


class Line:
    """A child's line to the harness: what it is told comes into a queue; a harness that is gone ends it."""

    def __init__(self, config: ChildConfig, pipe: Connection) -> None:
        self.config = config
        self.journal = Journal(Path(config.folder) / f"{config.name}-{config.start}.journal")
        elsewhere = config.role == "coordinator"
        self.trigger = Trigger(self.journal, self.tell, f"coordinator[{config.number}]" if elsewhere else "coordinator")
        self.at_once: dict[str, Callable[[], None]] = {}
        """Orders that do not wait for their turn."""
        self.orders: queue.Queue[dict[str, Any]] = queue.Queue(1000)
        self._pipe = pipe
        self._lock = threading.Lock()
        self.trigger.arm(list(config.armed))
        threading.Thread(target=self._read, name="chaos-line", daemon=True).start()

    def tell(self, what: str, **fields: Any) -> None:
        """Send a message."""
        with self._lock:
            self._pipe.send({"what": what, **fields})

    def _read(self) -> None:
        while True:
            try:
                order = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(ENDED_ALONE)
            if order["do"] == "go":
                self.trigger.go(order["number"])
            elif order["do"] == "disarm":
                self.trigger.disarm(order["number"])
            elif order["do"] in self.at_once:
                threading.Thread(target=self.at_once[order["do"]], daemon=True).start()
            elif order["do"] == "arm":
                self.trigger.arm(Trigger.decode(order["armed"]))
                self.tell("armed")
            else:
                self.orders.put(order, timeout=60)

    def serve(self, act: Callable[[dict[str, Any]], Any]) -> None:
        """Obey orders, one after the other, for ever; an answer carries the order's name."""
        while True:
            order = self.orders.get()
            self.tell("answer", to=order["do"], value=act(order))


def run(encoded: bytes, pipe: Connection) -> None:
    """The life of a child.

    Args:
        encoded: a ``ChildConfig``, JSON.
        pipe: to the harness.
    """
    end_with_parent()  # which ends with the harness, see ``preload``
    config = msgspec.json.decode(encoded, type=ChildConfig)
    _log_to(Path(config.folder) / f"{config.name}-{config.start}.log")
    os.environ.update(config.environment)
    line = Line(config, pipe)
    line.journal.say("start", who=config.name, detail=str(os.getpid()))
    try:
        if config.bug:
            from dcr.chaos.bugs import plant  # noqa: PLC0415 - only where the harness is put to the proof

            plant(config.bug)
        if config.role == "trainer":
            from dcr.chaos.trainer_child import serve_trainer as serve  # noqa: PLC0415 - each side imports its own
        elif config.role == "coordinator":
            from dcr.chaos.coordinator_child import serve_coordinator as serve  # noqa: PLC0415
        elif config.role == "twin":
            from dcr.chaos.vllm_engine import serve_twin as serve  # noqa: PLC0415
        else:
            from dcr.chaos.node_child import serve_node as serve  # noqa: PLC0415
        serve(line)
    except BaseException as e:
        logging.getLogger("dcr.chaos").exception("%s ends", config.name)
        line.journal.say("error", detail=f"{type(e).__name__}: {e}"[:500])
        line.tell("failed", error=f"{type(e).__name__}: {e}")
        os._exit(FAILED)


def _log_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
