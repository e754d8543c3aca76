"""Reading the checkpoint that an engine was started from: what its loader was fed."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from dcr.protocol.errors import RefusedError

_INDEX = "model.safetensors.index.json"


def read_checkpoint(directory: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every canonical tensor of a Hugging Face safetensors checkpoint, one at a time, on the CPU.

    Args:
        directory: a local directory with ``*.safetensors`` files; with an index, only the files it names count.

    Yields:
        Canonical name and tensor, with shape and dtype as stored.

    Raises:
        RefusedError: not a local directory, no safetensors files in it, or files that the index names are missing.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise RefusedError(f"checkpoint {directory} is not a local directory: start the engine from a local checkpoint")
    index = directory / _INDEX
    if index.exists():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise RefusedError(f"checkpoint {directory} holds no safetensors files: convert it to safetensors")
    if missing := [file.name for file in files if not file.exists()]:
        raise RefusedError(f"checkpoint {directory} lacks {', '.join(missing)}, which its {_INDEX} names")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                yield name, tensors.get_tensor(name)
