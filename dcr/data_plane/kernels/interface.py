"""What a backend does with boxes; all backends give the same bits, counts and digests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, Ints
from dcr.data_plane.kernels.records import Records


@dataclass(frozen=True)
class BoxContent:
    """What lies in one box.

    Attributes:
        digest: sum over its elements, as :func:`dcr.data_plane.content_digest.digest_elements` defines it.
        low_halves_zero: whether every low half of a widened box is zero; True for other boxes.
    """

    digest: ContentDigest
    low_halves_zero: bool


class Kernels(Protocol):
    """One backend.  Whoever calls has made sure that the memory behind the boxes is alive."""

    def first_disordered(self, table: BoxTable, records: Records) -> int | None:
        """Position of the first item whose indices are not strictly increasing within its tensor; None if none is."""

    def place(self, table: BoxTable, records: Records) -> Ints:
        """Apply every entry at every place that its element has.

        ``set`` into a widened box clears the low half, as a dense load does; ``xor`` and ``add`` leave it alone.

        Args:
            table: boxes, which do not share memory.
            records: ordered; items of one tensor have no index in common.

        Returns:
            int64, shape [items]: places of the item's entries, counted where they were written.
        """

    def contents(self, table: BoxTable, specs: Sequence[TensorSpec]) -> list[BoxContent]:
        """Content of every box, of tensors ``specs``; reads all of them."""
