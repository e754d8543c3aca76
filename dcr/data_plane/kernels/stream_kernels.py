"""What a backend does with the bits of shards and the streams of items, and the reference backend in torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dcr.data_plane.codec import ItemBytes, entry_digest, from_bytes, to_bytes
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.streams import choose_low, decode_streams, encode_streams

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Difference:
    """Elements of a shard whose stored bits differ from the committed ones.

    Attributes:
        positions: int64, shape [n], strictly increasing positions in the flat shard, on its device; as are the bits.
        old: committed stored bits there, shape [n], of the shard's ``bits_dtype``.
        new: live stored bits there, the same.
    """

    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


class StreamKernels(Protocol):
    """One backend.  All give the same bits, and the same bytes, for the same input."""

    def differences(self, old: torch.Tensor, new: torch.Tensor, start: int = 0) -> Difference:
        """Compare and compact: where two bit views differ, and the bits there.

        Args:
            old: stored bits, shape [n], of ``bits_dtype``; in host memory, or on the device of ``new``.
            new: the same.
            start: the position in the shard of the first bit, from which positions count.
        """

    def digest(self, spec: TensorSpec, indices: torch.Tensor, bits: torch.Tensor) -> ContentDigest:
        """See :func:`dcr.data_plane.content_digest.digest_elements`."""

    def encode(self, item: Item) -> tuple[ItemBytes, bytes]:
        """An item in the layout that :func:`dcr.data_plane.streams.choose_low` chooses, and its ``entry_digest``.

        Raises:
            RefusedError: see :func:`dcr.data_plane.streams.encode_streams`.
        """

    def decode(self, spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes) -> tuple[Item, bytes]:
        """What ``encode`` wrote, on the host, and its ``entry_digest``; the bytes may hold anything.

        Raises:
            CorruptPayloadError: see :func:`dcr.data_plane.streams.decode_streams`.
        """

    def each(self, work: Callable[[A], B], things: Sequence[A], sizes: Sequence[int]) -> list[B]:
        """What ``work`` gives for each of some things, in order, on as many threads as this backend has.

        Args:
            work: may call this backend.
            things: any.
            sizes: of each thing, about how many bytes or entries it is to work on.
        """


class TorchStreamKernels:
    """The reference: obviously right, on any device."""

    def differences(self, old: torch.Tensor, new: torch.Tensor, start: int = 0) -> Difference:
        """See :meth:`StreamKernels.differences`."""
        old = old.to(new.device)
        positions = (old != new).nonzero().flatten()
        return Difference(positions + start, old[positions], new[positions])

    def digest(self, spec: TensorSpec, indices: torch.Tensor, bits: torch.Tensor) -> ContentDigest:
        """See :meth:`StreamKernels.digest`."""
        return digest_elements(spec, indices, bits)

    def encode(self, item: Item) -> tuple[ItemBytes, bytes]:
        """See :meth:`StreamKernels.encode`."""
        layout = choose_low(item.indices)
        return to_bytes(item.spec, layout, encode_streams(item, layout)), entry_digest(item)

    def decode(self, spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes) -> tuple[Item, bytes]:
        """See :meth:`StreamKernels.decode`."""
        item = decode_streams(spec, operation, written.layout, entries, from_bytes(spec, written))
        return item, entry_digest(item)

    def each(self, work: Callable[[A], B], things: Sequence[A], sizes: Sequence[int]) -> list[B]:
        """See :meth:`StreamKernels.each`."""
        del sizes  # torch has threads of its own
        return [work(thing) for thing in things]
