"""Bits on their way between host and device: pinned memory, and a stream of their own (DESIGN section 5, memory).

A copy between a device and memory that is not pinned goes through a buffer of the driver and holds up the caller; one
from pinned memory goes by itself.  Everything here works on any device, so that a CPU shows that the right bits come in
the right order; what a CPU does not show is that they come while something else is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

SLOTS = 2
"""Chunks held on either side: one that is on its way, and one that is worked with."""


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one of this thread, for kernels that are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def host_room(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory, one-dimensional and not filled, from and to which a device copies by itself."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(staged: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What ``host_room`` holds, on a device; the copy is ordered before what the current stream does next."""
    return staged.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional tensor in host memory, which is there when this returns; no copy if it was there before."""
    if tensor.device.type == "cpu":
        return tensor
    room = host_room(tensor.numel(), tensor.dtype, tensor.device)
    room.copy_(tensor, non_blocking=True)
    torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()
    return room


def chunks_on(
    device: torch.device, held: torch.Tensor, bounds: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Chunks of a flat tensor in host memory, each where it is worked with.

    Args:
        device: where that is; in host memory a chunk is a view.
        held: shape [n], in host memory.
        bounds: start and stop of every chunk.

    Yields:
        Start, stop, and the elements between them.  On a device they last until the next chunk is asked for; what was
        launched with them until then, on the stream that is current there, sees them.
    """
    if device.type == "cpu":
        yield from ((start, stop, held[start:stop]) for start, stop in bounds)
    elif bounds:
        yield from _Upload(device, held, bounds)


class _Upload:
    """Chunks sent one ahead, through SLOTS pinned buffers and as many on the device, by a stream of their own.

    ::

        host    | fill 0 | fill 1 |          | fill 2 |          |   a slot's pinned buffer is filled again when its
        stream           | copy 0 | copy 1            | copy 2   |   copy has ended, and copied again when what the
        current                   | work with 0       | work ... |   caller launched with its last chunk has ended

    Args:
        device: any that has streams; those of a CPU do nothing, and every copy has ended when it returns.
        held: shape [n], in host memory.
        bounds: start and stop of every chunk; at least one.
    """

    def __init__(self, device: torch.device, held: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        self._module: Any = torch.get_device_module(device)
        self._held = held
        self._bounds = bounds
        size, slots = max(stop - start for start, stop in bounds), min(SLOTS, len(bounds))
        self._pinned = [host_room(size, held.dtype, device) for _ in range(slots)]
        self._landed = [torch.empty(size, dtype=held.dtype, device=device) for _ in range(slots)]
        with on(device):
            self._copied = [self._module.Event() for _ in range(slots)]
            self._current = self._module.current_stream()
            self._stream = self._module.Stream()
        # What had the memory of the buffers before may still be at work there.
        self._stream.wait_stream(self._current)

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        try:
            self._send(0)
            for number, (start, stop) in enumerate(self._bounds):
                if number + 1 < len(self._bounds):
                    self._send(number + 1)
                slot = number % SLOTS
                self._current.wait_event(self._copied[slot])
                yield start, stop, self._landed[slot][: stop - start]
        finally:
            # The buffers go back to the current stream's pool: nothing may be copied into them after that.
            self._current.wait_stream(self._stream)

    def _send(self, number: int) -> None:
        slot = number % SLOTS
        start, stop = self._bounds[number]
        if number >= SLOTS:
            self._copied[slot].synchronize()  # else the pinned buffer is still read
            # What the caller launched with the chunk that was here, on its stream, is still at work with it.
            self._stream.wait_stream(self._current)
        self._pinned[slot][: stop - start].copy_(self._held[start:stop])
        with self._module.stream(self._stream):
            self._landed[slot][: stop - start].copy_(self._pinned[slot][: stop - start], non_blocking=True)
            self._copied[slot].record(self._stream)
