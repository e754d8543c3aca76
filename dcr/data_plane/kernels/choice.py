"""Which backend serves a model, and the proof that it works here before it touches anything."""

from collections.abc import Sequence

import torch

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.compiling import compiling
from dcr.data_plane.kernels.interface import Kernels
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.reference import ReferenceKernels
from dcr.data_plane.kernels.stream_choice import other_bits, stream_kernels, triton_serves
from dcr.data_plane.resident import Span

_HOST = torch.device("cpu")
_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
_PLACES = "learns where weights lie, and writes changes there"

_tried: dict[torch.device, Kernels] = {}
"""The numba backend of this process, once it has been tried; and the CUDA devices that Triton was tried on."""


def kernels_for(spans: Sequence[Span]) -> Kernels:
    """The fastest backend for memory; compiled and tried when this returns.

    That is numba for host memory, Triton for the memory of one CUDA device, and the reference for all else.

    Args:
        spans: the blocks of memory in which boxes lie, by address.

    Raises:
        DcrError: compiled code gives other bits than the reference on this machine.
    """
    devices = {span.storage.device for span in spans} or {_HOST}
    device = devices.pop()
    if devices or not (device.type == "cpu" or triton_serves(device)):
        return ReferenceKernels(spans)
    return _on_host() if device.type == "cpu" else _on_device(device)


def _on_host() -> Kernels:
    if _HOST not in _tried:
        # Imported when it is needed: vLLM on a CPU cannot start in a process that has imported llvmlite, since it takes
        # ``vars()`` of every module's every attribute, and one of llvmlite's gives no dictionary.
        with compiling(_PLACES, _HOST):
            from dcr.data_plane.kernels.numba_cpu import NumbaKernels  # noqa: PLC0415

            kernels = NumbaKernels()
            _try(kernels, _HOST)
        stream_kernels()  # what decodes for these kernels is to be ready as soon as they are
        _tried[_HOST] = kernels
    return _tried[_HOST]


def _on_device(device: torch.device) -> Kernels:
    # Imported when it is needed: a machine without a GPU need not have it.
    from dcr.data_plane.kernels.triton_placement import TritonKernels  # noqa: PLC0415

    kernels = TritonKernels(device)  # one for every caller: it keeps a table of theirs
    if device not in _tried:
        with compiling(_PLACES, device):
            _try(kernels, device)
        stream_kernels()
        _tried[device] = kernels
    return kernels


def _try(kernels: Kernels, device: torch.device) -> None:
    """Do every operation at every width, here and in the reference, on a strided, a widened and a plain box."""
    memory = [torch.arange(1024, dtype=torch.int16).view(torch.uint8).to(device, copy=True) for _ in range(2)]
    found = []
    for which, bytes_ in enumerate(memory):
        storage = bytes_.untyped_storage()
        reference = ReferenceKernels([Span(storage.data_ptr(), storage.nbytes(), storage, ())])
        found.append(_trial(kernels if which else reference, storage.data_ptr()))
    if found[0] != found[1] or not torch.equal(*memory):
        raise other_bits(device)


def _trial(kernels: Kernels, address: int) -> list[object]:
    specs = [TensorSpec(f"trial {dtype}", (6, 8), dtype) for dtype in _DTYPES]
    tensors = []
    for number, spec in enumerate(specs):
        width, start = spec.dtype.itemsize, address + 512 * number
        boxes = [PlacedBox(Box.of([6, 4], [8, 1], [5 * width, width], 2, start))]
        if spec.dtype == torch.bfloat16:
            boxes.append(PlacedBox(Box.of([48], [1], [4], 0, start + 128), widened=True))
        tensors.append(PlacedTensor(spec.numel, width, tuple(boxes)))
    table = BoxTable.of(tensors)
    seen: list[object] = []
    for operation in Operation:
        items = []
        for spec in specs:
            indices = torch.arange(1, 48, 3)
            values = torch.arange(indices.numel()).mul_(37).to(bits_dtype(spec.dtype))
            items.append(Item(spec, operation, indices, values))
        records = Records.of(range(len(items)), items)
        seen += [kernels.first_disordered(table, records), kernels.place(table, records).tolist()]
    return [*seen, kernels.contents(table, specs)]
