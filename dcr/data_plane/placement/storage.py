"""What a rank host does with resident storage, however it is reached."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dcr.data_plane.item import Item
from dcr.data_plane.placement.prewarm import Prewarm
from dcr.data_plane.placement.readback import Readback


class Storage(Protocol):
    """Resident storage of one rank, refitted in place.  Calls come one at a time."""

    def prewarm(self) -> Prewarm:
        """Learn what the native loader does with every canonical tensor; changes no resident bit."""

    def fingerprint(self) -> str:
        """Hexadecimal digest of everything that what was learned rests on; cheap enough for every transition."""

    def apply(self, items: Sequence[Item]) -> int:
        """Apply items in place.

        Every item is checked before the first byte is written.

        Args:
            items: of any canonical tensors; those of one tensor have no index in common.

        Returns:
            How many of the items have entries and a place on this rank.

        Raises:
            RefusedError: an item, or the state of the storage, is not what prewarm learned; nothing was written.
            PartialWriteError: the same, noticed after the first byte was written.
        """

    def synchronise(self) -> None:
        """Wait until every write has reached resident storage; raises what a write raised on an accelerator.

        Raises:
            PartialWriteError: a resident tensor is not where and how it was at prewarm.  Captured graphs and compiled
                code hold its old address, and would go on reading that.
        """

    def readback(self, tied: Mapping[str, str] | None = None) -> Readback:
        """What storage holds, as digests of canonical elements; writes nothing.

        Args:
            tied: skipped canonical tensors -> the loaded ones whose memory they share, to be read under both names.

        Raises:
            RefusedError: prewarm was not called, or storage is not where it was then.
        """
