"""Which stream backend serves some tensors, and the proof that it works here before anything depends on it."""

import sys
import threading
from collections.abc import Iterable

import torch

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.stream_kernels import StreamKernels, TorchStreamKernels
from dcr.protocol.errors import DcrError

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
_TORCH = TorchStreamKernels()

_tried: list[StreamKernels] = []
"""The numba backend of this process, once it has been tried."""
_trying = threading.Lock()


def stream_kernels(tensors: Iterable[torch.Tensor] = ()) -> StreamKernels:
    """The fastest backend for tensors; compiled and tried when this returns.

    Raises:
        DcrError: compiled code gives other bits than the reference on this machine.
    """
    if sys.byteorder != "little" or any(tensor.device.type != "cpu" for tensor in tensors):
        return _TORCH
    with _trying:
        if not _tried:
            # Imported when it is needed: see ``dcr.data_plane.kernels.choice.kernels_for``.
            from dcr.data_plane.kernels.numba_streams import NumbaStreamKernels  # noqa: PLC0415

            kernels = NumbaStreamKernels()
            for dtype in _DTYPES:
                if _trial(kernels, dtype) != _trial(_TORCH, dtype):
                    raise DcrError(
                        "the compiled kernels give other bits than the torch reference: delete numba's cache "
                        "(__pycache__/*.nbi); if that does not help, report this with the processor's name"
                    )
            _tried.append(kernels)
    return _tried[0]


def _trial(kernels: StreamKernels, dtype: torch.dtype) -> list[object]:
    """What every kernel makes of elements of one width, with gaps and values of every form."""
    n, kind = 1000, bits_dtype(dtype)
    step = torch.arange(n)
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
