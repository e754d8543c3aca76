"""Which stream backend serves some tensors, and the proof that it works here before anything depends on it."""

import importlib.util
import logging
import sys
import threading
from collections.abc import Iterable

import torch

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.compiling import compiling
from dcr.data_plane.kernels.stream_kernels import StreamKernels, TorchStreamKernels
from dcr.protocol.errors import DcrError

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
_TORCH = TorchStreamKernels()
_HOST = torch.device("cpu")

_tried: dict[torch.device, StreamKernels] = {}
"""The compiled backend of every device of this process, once it has been tried."""
_trying = threading.RLock()

_log = logging.getLogger("dcr.kernels")


def stream_kernels(tensors: Iterable[torch.Tensor] = ()) -> StreamKernels:
    """The fastest backend for tensors; compiled and tried when this returns.

    That is numba for host memory, Triton for the memory of one CUDA device, and the reference for all else.

    Args:
        tensors: what it is for; nothing means host memory.

    Raises:
        DcrError: compiled code gives other bits than the reference on this machine.
    """
    devices = {tensor.device for tensor in tensors} or {_HOST}
    device = devices.pop()
    if sys.byteorder != "little" or devices or not (device.type == "cpu" or triton_serves(device)):
        return _TORCH
    with _trying:
        if device not in _tried:
            with compiling("compares weights, or encodes and decodes changes", device):
                _tried[device] = _host() if device.type == "cpu" else _on_device(device)
    return _tried[device]


def triton_serves(device: torch.device) -> bool:
    """Whether Triton compiles for a device, as far as can be told without importing it."""
    if device.type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        _log.warning("%s is served by the torch reference, which is slow: install triton", device)
        return False
    return True


def other_bits(device: torch.device) -> DcrError:
    """What a failed trial says."""
    cache = "numba's cache (__pycache__/*.nbi)" if device.type == "cpu" else "Triton's cache (~/.triton/cache)"
    return DcrError(
        f"the compiled kernels for {device} give other bits than the torch reference: delete {cache}; if that does "
        "not help, report this with the name of the processor or GPU"
    )


def _host() -> StreamKernels:
    # Imported when it is needed: see ``dcr.data_plane.kernels.choice.kernels_for``.
    from dcr.data_plane.kernels.numba_streams import NumbaStreamKernels  # noqa: PLC0415

    return _tried_on(_HOST, NumbaStreamKernels())


def _on_device(device: torch.device) -> StreamKernels:
    # Imported when it is needed: a machine without a GPU need not have it.
    from dcr.data_plane.kernels.triton_streams import TritonStreamKernels  # noqa: PLC0415

    return _tried_on(device, TritonStreamKernels(device, stream_kernels()))


def _tried_on(device: torch.device, kernels: StreamKernels) -> StreamKernels:
    for dtype in _DTYPES:
        if _trial(kernels, dtype, device) != _trial(_TORCH, dtype, _HOST):
            raise other_bits(device)
    return kernels


def _trial(kernels: StreamKernels, dtype: torch.dtype, device: torch.device) -> list[object]:
    """What every kernel makes of elements of one width, with gaps and values of every form."""
    n, kind = 1000, bits_dtype(dtype)
    step = torch.arange(n, device=device)
    old = (step * step * 0x9E3779B9).to(kind)
    new = torch.where(step % 7 == 0, old + (step % 900).to(kind) + 1, old)
    found = kernels.differences(old[1:], new[1:])
    seen: list[object] = [found.positions.tolist(), found.old.tolist(), found.new.tolist()]
    for numel in (1 << 32, 1 << 33):
        spec = TensorSpec("trial", (numel,), dtype)
        indices = (step[: found.new.numel()] ** 3 * 40).to(torch.int64) + step[: found.new.numel()]
        values = {Operation.ADD: found.new - found.old, Operation.XOR: found.new ^ found.old, Operation.SET: found.new}
        seen.append(kernels.digest(spec, indices, found.new))
        for operation, words in values.items():
            item = Item(spec, operation, indices[words != 0], words[words != 0])
            written, digest = kernels.encode(item)
            read, digest_read = kernels.decode(spec, operation, item.entries, written)
            seen += [digest, digest_read, written.layout, [part.tobytes() for part in written.parts]]
            seen += [read.indices.tolist(), read.values.tolist()]
    return seen
