"""Doing a change twice: memory blocks as they were, and as the first way left them."""

from collections.abc import Collection

import torch

from dcr.data_plane.resident import PartialWriteError, Residents


class Shadow:
    """Copies of some memory blocks, taken before a change, for making it again in another way.

    Args:
        residents: the storage.
        starts: addresses of the blocks that the change may touch.
    """

    def __init__(self, residents: Residents, starts: Collection[int]) -> None:
        self._spans = [span for span in residents.spans if span.start in starts]
        self._copies = [span.bytes().clone() for span in self._spans]

    def swap(self) -> None:
        """Put the old bits back, and keep those that the first way left."""
        for number, span in enumerate(self._spans):
            first = span.bytes().clone()
            span.bytes().copy_(self._copies[number])
            self._copies[number] = first

    def compare(self) -> None:
        """PartialWriteError, naming the block, if the second way left other bits than the first."""
        for span, first in zip(self._spans, self._copies, strict=True):
            if not torch.equal(span.bytes(), first):
                wrong = int((span.bytes() != first).sum())
                raise PartialWriteError(
                    f"{', '.join(span.names[:4])}: boxes and the native loader left different bits in {wrong} bytes; "
                    "storage holds the loader's.  Report this; until then refit this engine densely"
                )
