"""The candidate pinned by a copy, so that the trainer may step while it is sent (DESIGN D10, ``snapshot``)."""

from collections.abc import Callable, Iterable

import torch

from dcr.data_plane.tracker import Tracker

Live = Callable[[int], torch.Tensor | None]
"""By a shard's number its live tensor; None where the committed bits still stand."""


class Snapshot:
    """One rank's owned live elements as they were when it was taken, in host memory, in their own dtypes.

    Each live tensor is copied once, however many shards it is the live tensor of.  Memory is allocated when a shard is
    first copied, and used again by the next snapshot.  Nothing here locks.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, torch.Tensor] = {}
        self._taken: dict[int, torch.Tensor | None] = {}

    @property
    def nbytes(self) -> int:
        """Host memory that it holds, in bytes."""
        return sum(room.nbytes for room in self._rooms.values())

    def tensor(self, number: int) -> torch.Tensor | None:
        """A shard's elements, flat; None where the committed bits stood."""
        return self._taken[number]

    def take(self, shards: Iterable[tuple[int, Tracker]], live: Live) -> None:
        """Copy the live tensors; what was copied before is gone, even if this raises.

        Args:
            shards: number and tracker of each.
            live: finds the live tensors, which nobody writes meanwhile.

        Raises:
            RefusedError: a live tensor has another dtype or number of elements than the tracked one.
        """
        self._taken = {}
        copied: dict[tuple[object, ...], torch.Tensor] = {}
        for number, tracker in shards:
            tensor = live(number)
            if tensor is None:
                self._taken[number] = None
                continue
            place = _place(tensor)
            if place in copied:
                self._rooms.pop(number, None)
            else:
                copied[place] = self._room(number, tracker)
                tracker.copy(tensor, copied[place])
            self._taken[number] = copied[place]

    def _room(self, number: int, tracker: Tracker) -> torch.Tensor:
        if number not in self._rooms:
            self._rooms[number] = torch.empty(tracker.numel, dtype=tracker.dtype)
        return self._rooms[number]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for tensors that are the same elements in the same order, whatever objects they are."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
