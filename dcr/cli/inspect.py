"""`dcr inspect`: what of a model is projected directly, what is converted and why, who owns it and what it costs."""

import argparse
import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dcr.cli.report import say
from dcr.protocol.errors import DcrError, RefusedError

SHAPES = Path(__file__).parent / "shapes"
"""Configurations that come with dcr."""

CONFIG_BYTES_MAX = 16 << 20
TASKS_MAX = 1 << 16
"""Layers times experts; each is some modules, which take time and memory even without weights."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")

_DESCRIPTION = """\
Makes the model that a Hugging Face configuration describes, without weights, puts one tensor of each class through
Megatron Bridge's own export, and shows which classes only move elements (direct) and which have to be converted
(residual), and why; then spreads owners over the ranks of a layout.  Nothing is downloaded; no GPU is needed.

  dcr inspect qwen3-30b-a3b
  dcr inspect nemotron-3-nano-30b-a3b --tp 2 --ep 8 --ranks 16
  dcr inspect path/to/checkpoint --json

Exit status: 0 the model was inspected; 3 it cannot be."""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show what of a Megatron model is projected directly",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name="inspect")
    shipped = ", ".join(sorted(path.stem for path in SHAPES.glob("*.json")))
    parser.add_argument("model", metavar="MODEL", help=f"a config.json, its folder, or one of {shipped}")
    for option, what in (
        ("--tp", "tensor-parallel size"),
        ("--pp", "pipeline-parallel size"),
        ("--ep", "expert-parallel size"),
        ("--etp", "tensor-parallel size of experts"),
    ):
        parser.add_argument(option, type=int, default=1, metavar="N", help=f"{what} (1)")
    parser.add_argument("--ranks", type=int, metavar="N", help="all ranks (the fewest that the sizes allow)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Inspect, and print the table.

    Raises:
        RefusedError: there is no such configuration, or the Bridge does not know its model, or the layout is none.
    """
    from dcr.trainer.megatron.inspection import Layout  # noqa: PLC0415 - needs torch

    fewest = max(options.tp, options.ep * options.etp) * options.pp
    layout = Layout(options.tp, options.pp, options.ep, options.etp, options.ranks or fewest)
    inspection = _inspected(_config(options.model), layout)
    for line in f"{options.model}: {inspection}".splitlines():
        say(line)
    return {
        "ok": True,
        "model": options.model,
        "layout": asdict(layout),
        "size_bytes": inspection.size_bytes,
        "direct_share": inspection.direct_share,
        "classes": [asdict(one) for one in inspection.classes],
        "owned_bytes": list(inspection.owned_bytes),
        "imbalance": inspection.imbalance,
    }


def _config(model: str) -> dict[str, Any]:
    shipped, given = SHAPES / f"{model}.json", Path(model)
    path = shipped if shipped.exists() else given / "config.json" if given.is_dir() else given
    try:
        config = json.loads(_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(
            f"model {model!r}: no configuration in {path}: {error}; give a config.json of Hugging Face, its folder, or "
            f"one of {', '.join(sorted(p.stem for p in SHAPES.glob('*.json')))}"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise RefusedError(f"model {model!r}: {path} has no model_type; give a config.json of Hugging Face")
    tasks = _most(config, _LAYERS) * _most(config, _EXPERTS)
    if tasks > TASKS_MAX:
        raise RefusedError(f"model {model!r}: layers times experts are {tasks} in {path}, more than {TASKS_MAX}")
    return config


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe would never end
        raise OSError("there is no such file")
    with path.open("rb") as file:
        data = file.read(CONFIG_BYTES_MAX + 1)
    if len(data) > CONFIG_BYTES_MAX:
        raise OSError(f"it has more than {CONFIG_BYTES_MAX} bytes")
    return data.decode()


def _most(config: dict[str, Any], fields: tuple[str, ...]) -> int:
    return max([1, *(value for field in fields if isinstance(value := config.get(field), int))])


def _inspected(config: dict[str, Any], layout: Any) -> Any:
    """In a process group of this process alone, as Megatron wants one."""
    import torch.distributed as dist  # noqa: PLC0415 - slow

    from dcr.trainer.megatron.conversion import BridgeConversion  # noqa: PLC0415
    from dcr.trainer.megatron.inspection import inspect  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Megatron misses: nothing of it is needed here
        logging.disable(logging.WARNING)
        try:
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it, but does not say so
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            bridge, model = _model(config)
            return inspect(BridgeConversion(bridge, [model]), layout)
        finally:
            logging.disable(logging.NOTSET)
            if dist.is_initialized():
                dist.destroy_process_group()


def _model(config: dict[str, Any]) -> tuple[Any, Any]:
    """The Bridge and the model without weights."""
    import torch  # noqa: PLC0415 - slow

    try:
        bridge, provider = _bridge(config)
        with torch.device("meta"):
            return bridge, provider.provide(pre_process=True, post_process=True).bfloat16()
    except ImportError as error:
        raise RefusedError(f"Megatron-Core and Megatron Bridge cannot be imported: {error}; install them") from error
    except DcrError:
        raise
    except Exception as error:
        raise RefusedError(
            f"Megatron Bridge makes no model of this configuration: {type(error).__name__}: {error}"
        ) from error


def _bridge(config: dict[str, Any]) -> tuple[Any, Any]:
    import torch  # noqa: PLC0415

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        from dcr.trainer import cpu_megatron  # noqa: PLC0415 - for machines without CUDA

        cpu_megatron.install()
    from megatron.bridge import AutoBridge  # noqa: PLC0415 - optional, and after install()
    from megatron.core import parallel_state  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    fields = {key: value for key, value in config.items() if key != "model_type"}
    bridge = AutoBridge.from_hf_config(AutoConfig.for_model(config["model_type"], **fields))
    if not on_gpu:
        return bridge, cpu_megatron.provider_of(bridge)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.finalize()
    return bridge, provider
