"""A rollout node: its engines, which answer requests all along and write down from what storage, and its node agent."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcr.chaos.bits import combined, load, stored_bits, stored_bytes
from dcr.chaos.child import Line
from dcr.chaos.detour import channel_through, relay_through
from dcr.chaos.hooks import ReceiverWatch
from dcr.chaos.journal import REQUESTS
from dcr.chaos.model import VLLM, make
from dcr.chaos.trainer_child import resources
from dcr.chaos.trigger import Trigger
from dcr.protocol.step import Step
from dcr.rollout.node import RolloutNode
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime import node_agent

if TYPE_CHECKING:
    from dcr.chaos.vllm_engine import WatchedVllm

REQUEST_PAUSE_S = 0.005
LOOK_S = 0.02
_NO_EPOCH = 1 << 62
"""Of a request: it belongs to none, and waits for none."""


class WatchedEngine(TorchEngine):
    """An engine whose receiver's moments are watched, and that may be handed a payload twice.

    Args:
        model: what it serves.
        checkpoint: that the model was loaded from.
        index: which engine of the scenario.
        trigger: of the process.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Path, index: int, trigger: Trigger) -> None:
        self.index = index
        self._watch = ReceiverWatch(trigger, index)
        super().__init__(
            model, name=f"engine-{index}", checkpoint=checkpoint, observe=self._watch.observe, gate_wait_s=3600
        )
        factory = self._rank._factory  # noqa: SLF001 - the rank's host offers no other place
        self._rank._factory = lambda specs: self._watch.storage(factory(specs))  # noqa: SLF001

    def call_ranks(self, request: bytes) -> list[bytes]:
        """As ``TorchEngine``; a payload comes twice where a scenario says so."""
        return self._watch.handed(super().call_ranks, request)

    def answer(self) -> None:
        """Nothing but the look at storage that every request is here."""


def serve_node(line: Line) -> None:
    """Build the engines, say that they are ready, and obey."""
    config = line.config
    torch.set_num_threads(1)
    checkpoint = Path(config.checkpoint)
    if config.channel:
        channel_through(node_agent, config.channel)
    if config.relays:
        relay_through(config.relays)
    engines = {}
    for index in config.engines:
        engines[f"engine-{index}"] = _engine(config.factory, checkpoint, index, line.trigger)

    def observe(step: Step) -> None:
        of[step.actor](step)

    of = {name: line.trigger.observer("engine", e.index) for name, e in engines.items()}
    node = RolloutNode(
        list(engines.values()),
        control=config.control,
        delivery=config.delivery,
        settings=dict(config.settings),
        observe=observe,
    )
    for name, engine in engines.items():
        path = Path(config.folder) / f"{name}-{config.start}{REQUESTS}"
        arguments = (engine, engine.index, line.trigger, path)
        threading.Thread(target=_requests, args=arguments, name=f"requests-{name}", daemon=True).start()
    threading.Thread(target=_look, args=(line, node), name="chaos-look", daemon=True).start()
    line.journal.say("ready", who=config.name)
    line.tell("ready")

    def act(order: dict[str, Any]) -> Any:
        match order["do"]:
            case "bits":
                return {
                    name: {"version": e.version, "bits": stored_bits(e.model), "bytes": stored_bytes(e.model)}
                    for name, e in engines.items()
                }
            case "status":
                return {name: str(status) for name, status in node.statuses.items()}
            case "resources":
                return resources()
            case other:
                raise ValueError(f"a node takes no order {other!r}")

    line.serve(act)


def _engine(factory: str, checkpoint: Path, index: int, trigger: Trigger) -> "WatchedEngine | WatchedVllm":
    if factory == VLLM:
        from dcr.chaos.vllm_engine import WatchedVllm  # noqa: PLC0415 - only where a scenario wants vLLM

        return WatchedVllm(checkpoint, index, trigger)
    model = make(factory)
    load(model, checkpoint)
    return WatchedEngine(model, checkpoint, index, trigger)


def _requests(engine: "WatchedEngine | WatchedVllm", index: int, trigger: Trigger, path: Path) -> None:
    """Answer requests for ever: each reads all of storage, and writes down what it saw."""
    with path.open("a") as out:
        while True:
            engine.answer()
            with engine.request() as version:
                trigger.reached("engine", index, "request", epoch=_NO_EPOCH)
                digest = combined(stored_bits(engine.model))
                t = time.monotonic()
            out.write(f"{t:.6f} {version} {digest}\n")
            out.flush()
            time.sleep(REQUEST_PAUSE_S)


def _look(line: Line, node: RolloutNode) -> None:
    """Tell the harness what is served, whenever that changes, and what cannot go on."""
    last: tuple[dict[str, int | None], dict[str, str]] = ({}, {})
    while True:
        now = (dict(node.versions), dict(node.failures))
        if now != last:
            last = now
            for name, version in now[0].items():
                detail = "" if version is None else str(version)
                line.journal.say("serving", who=name.replace("-", "[") + "]", detail=detail)
            line.tell("serving", versions=now[0], failures=now[1])
        time.sleep(LOOK_S)
