"""A training rank: takes deterministic steps, saves a checkpoint before each push, and pushes."""

import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dcr.chaos.bits import CHECKPOINT
from dcr.chaos.child import RECORD, Line
from dcr.chaos.detour import channel_through, relay_through
from dcr.chaos.hooks import WatchedControlPlane, WatchedDelivery
from dcr.chaos.model import make, train_step
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlane
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import Delivery
from dcr.protocol.errors import DcrError
from dcr.protocol.record import decode_record
from dcr.runtime import owner_host
from dcr.runtime.shared_memory import ROOT
from dcr.trainer.torch import refit as refit_module
from dcr.trainer.torch.refit import TrainerRefit

_EARLY_SEED, _EARLY_RATE = 13, 0.5
_ABANDONED_S, _LOOK_S = 20.0, 0.05


def serve_trainer(line: Line) -> None:
    """Build the rank, say that it is ready, and obey."""
    config = line.config
    torch.set_num_threads(1)
    if config.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{config.rendezvous}",
            world_size=config.ranks,
            rank=config.number,
        )
    model = make(config.factory)
    if config.checkpoint:
        model.load_state_dict(load_file(Path(config.checkpoint) / CHECKPOINT))
    _watch(line)
    line.trigger.acts["step_early"] = lambda: train_step(model, _EARLY_SEED, _EARLY_RATE)
    refit = TrainerRefit(
        model,
        control=config.control,
        delivery=config.delivery,
        settings=dict(config.settings),
        observe=line.trigger.observer("owner", config.number),
    )
    line.at_once["roll_back"] = refit.roll_back
    line.journal.say("ready", who=config.name)
    line.tell("ready")

    def act(order: dict[str, Any]) -> Any:
        match order["do"]:
            case "step":
                train_step(model, order["seed"], order["rate"])
                if config.number == 0:
                    folder = Path(order["checkpoint"])
                    save(model, folder, folder.with_name("v0"))
            case "push":
                return _push(line, refit, dense=order["dense"])
            case "abandon":
                _abandon(refit, config.control)
            case "resources":
                return resources()
            case other:
                raise ValueError(f"a trainer takes no order {other!r}")
        return None

    line.serve(act)


def save(model: torch.nn.Module, folder: Path, beside: Path | None) -> None:
    """Write a checkpoint; it is whole, or not there.

    Args:
        model: whose state dict it is.
        folder: of the checkpoint.
        beside: another checkpoint's, of which everything but the weights is taken along, such as its config.
    """
    staged = folder.with_name(f".{folder.name}")
    staged.mkdir(parents=True, exist_ok=True)
    for path in () if beside is None else beside.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copy(path, staged)
    save_file({n: t.detach().clone().contiguous() for n, t in model.state_dict().items()}, staged / CHECKPOINT)
    staged.rename(folder)


def resources() -> dict[str, int]:
    """What this process holds of what could leak: bytes of memory, threads, files, and files in shared memory."""
    with Path("/proc/self/status").open() as status:
        fields = dict(text.split(":", 1) for text in status)
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    shared = [Path(name) for name in opened if name.startswith(f"{ROOT}/dcr-")]
    return {
        "memory_bytes": int(fields["VmRSS"].split()[0]) * 1024,
        "threads": int(fields["Threads"]),
        "files": len(opened),
        "shared_files": sum(len(list(folder.iterdir())) for folder in shared if folder.is_dir()),
    }


def _abandon(refit: TrainerRefit, control: str) -> None:
    """As an operator who orders it once, and waits until K says that it is done: a leader may die in between.

    Raises:
        DcrError: nobody took the order, or the transition is open still.
    """
    refit.abandon()
    until = time.monotonic() + _ABANDONED_S
    with closing(open_control_plane(control)) as plane:
        while (stored := plane.read(RECORD)) is not None and decode_record(stored.body).open is not None:
            if time.monotonic() > until:
                raise DcrError(f"the transition was to be abandoned, and is open still after {_ABANDONED_S:g} s")
            time.sleep(_LOOK_S)


def _push(line: Line, refit: TrainerRefit, *, dense: bool) -> dict[str, Any]:
    line.journal.say("push", who="coordinator")
    try:
        report = refit.push(dense=dense)
    except DcrError as e:
        line.journal.say("pushed", who="coordinator", action="error", detail=str(e)[:500])
        return {"error": f"{type(e).__name__}: {e}"}
    line.journal.say("pushed", who="coordinator", action=report.kind, detail=f"version {report.version}")
    return {
        "error": "",
        "version": report.version,
        "kind": report.kind,
        "attempts": report.attempts,
        "members": list(report.members),
        "failures": list(report.failures),
        "payload_bytes": report.payload_bytes,
    }


def _watch(line: Line) -> None:
    """Put the watchers around what the trainer's front door opens: it takes addresses, and offers no other place."""
    if line.config.channel:
        channel_through(owner_host, line.config.channel)
    if line.config.relays:
        relay_through(line.config.relays)

    def control(address: str) -> ControlPlane:
        return WatchedControlPlane(open_control_plane(address), line.trigger)

    def delivery(address: str, directory: Any) -> Delivery:
        store = open_delivery(address, directory)
        return WatchedDelivery(store, line.trigger, line.config.number, Path(line.config.folder))

    vars(refit_module).update(open_control_plane=control, open_delivery=delivery)
