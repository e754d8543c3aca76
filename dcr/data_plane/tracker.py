"""The committed bits of one training shard in host memory, and detection against them (paper 4.1, DESIGN D13)."""

from collections.abc import Iterator

import torch

from dcr.data_plane.bits import bit_view, bits_dtype, flat_part
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import Difference
from dcr.data_plane.nonfinite import nonfinite_positions
from dcr.data_plane.staging import chunks_on, to_host
from dcr.protocol.errors import RefusedError


class Tracker:
    """The committed copy of one shard, flat, as stored bits.

    Bits are compared, not values: a NaN equals itself, -0.0 and 0.0 differ.  Nothing here locks; who folds while
    another thread reads must keep them apart.

    Args:
        name: what the shard is called in errors.
        live: the shard's tensor, any shape and device; its bits are copied.
        chunk_elements: elements compared, copied or read at once; bounds the temporary memory.

    Attributes:
        visited: how far the latest reading or comparison is, in elements; for whoever shows progress.
    """

    def __init__(self, name: str, live: torch.Tensor, *, chunk_elements: int) -> None:
        if chunk_elements < 1:
            raise RefusedError(f"tracker of {name}: chunk_elements must be at least 1, not {chunk_elements}")
        self.name = name
        self.dtype = live.dtype
        self._chunk_elements = chunk_elements
        self._bits = torch.empty(live.numel(), dtype=bits_dtype(live.dtype))
        self.visited = 0
        stored = bit_view(live.detach())
        for start, stop in self.chunks():
            self._bits[start:stop] = flat_part(stored, start, stop)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._bits.numel()

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Bounds ``(start, stop)`` of the chunks, in order."""
        for start in range(0, self.numel, self._chunk_elements):
            yield start, min(start + self._chunk_elements, self.numel)

    def committed(self, start: int, stop: int) -> torch.Tensor:
        """A copy of the committed bits [start, stop)."""
        self.visited = stop
        return self._bits[start:stop].clone()

    def live(self, live: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The live bits chunk by chunk, as copies on their device, each with its first position.

        Raises:
            RefusedError: if the live tensor has another dtype or number of elements than the tracked one.
        """
        stored = self._checked(live)
        for start, stop in self.chunks():
            self.visited = stop
            yield start, flat_part(stored, start, stop).clone()

    def copy(self, live: torch.Tensor, room: torch.Tensor) -> None:
        """Copy the live bits, chunk by chunk; from a device through pinned memory of a chunk's size.

        Args:
            live: the shard's tensor, any shape and device; written by nobody meanwhile.
            room: shape [numel] of the tracked dtype, in host memory.

        Raises:
            RefusedError: if the live tensor has another dtype or number of elements than the tracked one.
        """
        stored, bits = self._checked(live), bit_view(room)
        for start, stop in self.chunks():
            bits[start:stop] = to_host(flat_part(stored, start, stop))

    def differences(self, live: torch.Tensor) -> Iterator[Difference]:
        """The changed elements, chunk by chunk in increasing position; chunks without any are left out.

        They lie on the device of the live tensor, which the committed bits visit chunk by chunk; the next chunk is on
        its way while the caller works with one.

        Raises:
            RefusedError: if the live tensor has another dtype or number of elements than the tracked one.
        """
        stored = self._checked(live)
        kernels = stream_kernels([stored])
        for start, stop, old in chunks_on(stored.device, self._bits, tuple(self.chunks())):
            found = kernels.differences(old, flat_part(stored, start, stop), start)
            self.visited = stop
            if found.positions.numel():
                yield found

    def nonfinite(self, live: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """NaN and infinities of the live tensor that are not committed, chunk by chunk; only chunks with some.

        Returns:
            Positions (int64, increasing) and the bits there, both on the device of the live tensor.

        Raises:
            RefusedError: if the live tensor has another dtype or number of elements than the tracked one.
        """
        stored = self._checked(live)
        for start, stop in self.chunks() if self.dtype.is_floating_point else ():
            part = flat_part(stored, start, stop)
            for positions in nonfinite_positions(part, self.dtype):
                bits = part[positions]
                new = bits != self._bits[start:stop][positions.cpu()].to(bits.device)
                if bool(new.any()):
                    yield positions[new] + start, bits[new]

    def fold(self, live: torch.Tensor) -> Iterator[Difference]:
        """Make the committed bits those of the live tensor, in place; yields each difference once it is written.

        Nothing is written past what the caller has consumed.  Running it again from the start, after it ended or was
        cut short, writes what is left.

        Raises:
            RefusedError: if the live tensor has another dtype or number of elements than the tracked one.
        """
        for difference in self.differences(live):
            self._bits[difference.positions.cpu()] = difference.new.cpu()
            yield difference

    def _checked(self, live: torch.Tensor) -> torch.Tensor:
        if live.dtype != self.dtype or live.numel() != self.numel:
            raise RefusedError(
                f"tracker of {self.name}: it holds {self.numel} elements of {self.dtype}, the live shard has "
                f"{live.numel()} of {live.dtype}; rebuild the trainer's refit object after changing the model"
            )
        return bit_view(live.detach())
