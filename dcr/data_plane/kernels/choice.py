"""Which backend serves a model, and the proof that it works here before it touches anything."""

from collections.abc import Sequence

import torch

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.interface import Kernels
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.reference import ReferenceKernels
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.resident import Span
from dcr.protocol.errors import DcrError

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)

_tried: list[Kernels] = []
"""The numba backend of this process, once it has been tried."""


def kernels_for(spans: Sequence[Span]) -> Kernels:
    """The fastest backend for memory; compiled and tried when this returns.

    Raises:
        DcrError: compiled code gives other bits than the reference on this machine.
    """
    if any(span.storage.device.type != "cpu" for span in spans):
        return ReferenceKernels(spans)
    if not _tried:
        # Imported when it is needed: vLLM on a CPU cannot start in a process that has imported llvmlite, since it takes
        # ``vars()`` of every module's every attribute, and one of llvmlite's gives no dictionary.
        from dcr.data_plane.kernels.numba_cpu import NumbaKernels  # noqa: PLC0415

        kernels = NumbaKernels()
        _try(kernels)
        stream_kernels()  # what decodes for these kernels is to be ready as soon as they are
        _tried.append(kernels)
    return _tried[0]


def _try(kernels: Kernels) -> None:
    """Do every operation at every width, here and in the reference, on a strided, a widened and a plain box."""
    memory = [torch.arange(1024, dtype=torch.int16).view(torch.uint8).clone() for _ in range(2)]
    found = []
    for which, bytes_ in enumerate(memory):
        storage = bytes_.untyped_storage()
        reference = ReferenceKernels([Span(storage.data_ptr(), storage.nbytes(), storage, ())])
        found.append(_trial(kernels if which else reference, storage.data_ptr()))
    if found[0] != found[1] or not torch.equal(*memory):
        raise DcrError(
            "the compiled kernels give other bits than the torch reference: delete numba's cache (__pycache__/*.nbi); "
            "if that does not help, report this with the processor's name"
        )


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
