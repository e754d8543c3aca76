"""What processes of the WAN bench do: an owner, an engine and its node, a part of a full transfer, a store.

Times are of the monotonic clock, which all of them share.
"""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from wan_child import Handler, Request
from wan_model import Served, Trained

from dcr.data_plane.nvtx import watch_stages
from dcr.delivery.address import open_delivery
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Emit
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.node import RolloutNode
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.emission import Emission
from dcr.runtime.observer import log_step
from dcr.runtime.progress_log import untold
from dcr.runtime.settings import Settings
from dcr.s3.parallel import in_parallel
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.refit import Refit
from tests.object_store import ObjectStore

if TYPE_CHECKING:
    from dcr.delivery.interface import Delivery

IDLE_STAGES = {"fetch"}
"""Looks, most of them in vain; what comes in is seen by ``receive``."""
OBJECT_BYTES = 16 << 20
"""Of the full transfer."""
OBJECTS_AT_ONCE = 4


class Recorder:
    """Stages of this process since they were taken last: name, begin, end, thread."""

    def __init__(self) -> None:
        self._events: list[tuple[str, float, float, str]] = []
        watch_stages(self._watch)

    def take(self) -> list[tuple[str, float, float, str]]:
        """The stages, in the order in which they ended."""
        events, self._events = self._events, []
        return events

    def _watch(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if name in IDLE_STAGES else self._record(name)

    @contextmanager
    def _record(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._events.append((name, began, time.monotonic(), threading.current_thread().name))


class Dropped:
    """A delivery store that keeps nothing."""

    def put(self, key: str, data: bytes) -> None:
        """Forget it."""


def settle(_: Request) -> Request:
    """Give what is free back to the system, so that peak memory counts what is used from here on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    return {}


def owner() -> dict[str, Handler]:
    """One rank of the trainer."""
    torch.set_num_threads(1)
    recorder = Recorder()
    held: dict[str, Any] = {}

    def start(request: Request) -> Request:
        os.environ["GLOO_SOCKET_IFNAME"] = "lan"
        meeting = f"tcp://{request['meeting']}"
        dist.init_process_group("gloo", init_method=meeting, rank=request["rank"], world_size=request["ranks"])
        settings = Settings.of(request["settings"])
        place = (request["rank"], request["ranks"], settings.chunk_elements)
        source = Trained(Path(request["checkpoint"]), request["layers"], *place)
        held["source"], held["settings"] = source, settings
        held["refit"] = Refit(
            source,
            Ranks(),
            control=request["control"],
            delivery=request["delivery"],
            record_id="default",
            settings=settings,
            observe=log_step,
            step=untold,
        )
        return {"elements": source.owned_elements}

    def step(request: Request) -> Request:
        held["source"].step(request["rate"], request["seed"])
        return {}

    def construct(_: Request) -> Request:
        """Processor seconds from the changed weights to payloads that nobody takes."""
        source = held["source"]
        order = Emit("wan", 1, 1, Base(Kind.RELATIVE, 0, source.baseline_digest.hex(), "candidate"), "add", (), 1)
        before = time.process_time()
        Emission(order, source, 1, cast("Delivery", Dropped()), held["settings"]).run()
        recorder.take()
        return {"processor_s": time.process_time() - before}

    def push(_: Request) -> Request:
        dist.barrier()
        recorder.take()
        began = time.monotonic()
        report = held["refit"].push()
        ended = time.monotonic()
        return {
            "began": began,
            "ended": ended,
            "kind": report.kind,
            "attempts": report.attempts,
            "version": report.version,
            "payloads": report.payloads,
            "payload_bytes": report.payload_bytes,
            "changed": report.changed_entries,
            "elements": report.elements,
            "stages": report.stages,
            "bytes_up": report.traffic.bytes_up,
            "events": recorder.take(),
        }

    return {"start": start, "step": step, "construct": construct, "push": push, "settle": settle}


def node() -> dict[str, Handler]:
    """One engine and the node beside it."""
    torch.set_num_threads(1)
    recorder = Recorder()
    held: dict[str, Any] = {}

    def start(request: Request) -> Request:
        model = Served(request["layers"])
        model.load_weights(read_checkpoint(request["checkpoint"]))
        engine = TorchEngine(model, name=request["name"], checkpoint=request["checkpoint"])
        held["node"] = RolloutNode(
            engine, control=request["control"], delivery=request["delivery"], settings=request["settings"]
        )
        return {}

    def wait(request: Request) -> Request:
        return {"version": held["node"].wait_serving(request["version"], request["timeout_s"])}

    def take(_: Request) -> Request:
        objects, size = held["node"].received
        return {"events": recorder.take(), "objects": objects, "bytes": size}

    def readback(_: Request) -> Request:
        """ReadbackError, and so an error, if storage holds anything but the committed version."""
        found = held["node"].readback()
        return {"engines": len(found)}

    return {"start": start, "wait": wait, "take": take, "readback": readback, "settle": settle}


def transfer() -> dict[str, Handler]:
    """A node's part in moving the whole checkpoint: the S3 client of refits, and nothing else."""
    held: dict[str, Any] = {}

    def start(request: Request) -> Request:
        held["delivery"] = open_delivery(request["delivery"])
        held["block"] = os.urandom(OBJECT_BYTES)
        return {}

    def timed(act: Callable[[str], None], keys: list[str]) -> Request:
        began = time.monotonic()
        in_parallel(lambda number: act(keys[number]), len(keys), OBJECTS_AT_ONCE)
        return {"began": began, "ended": time.monotonic()}

    def upload(request: Request) -> Request:
        return timed(lambda key: held["delivery"].put(key, held["block"]), request["keys"])

    def download(request: Request) -> Request:
        def take(key: str) -> None:
            data = held["delivery"].get(key, OBJECT_BYTES)
            if data is None or len(data) != OBJECT_BYTES:
                raise RuntimeError(f"object {key} is not there, or not whole")

        return timed(take, request["keys"])

    def drop(request: Request) -> Request:
        held["delivery"].delete_prefix(request["prefix"])
        return {}

    return {"start": start, "upload": upload, "download": download, "drop": drop}


def store(folder: str, host: str, bucket: str) -> dict[str, Handler]:
    """SeaweedFS with its S3 interface, at this node's WAN address."""
    held: dict[str, ObjectStore] = {}

    def start(_: Request) -> Request:
        held["store"] = made = ObjectStore(Path(folder), host)
        made.client().create_bucket(Bucket=bucket)
        return {"endpoint": made.endpoint}

    def close(_: Request) -> Request:
        if "store" in held:
            held["store"].kill()
        return {}

    return {"start": start, "close": close}
