"""What an owner host needs of a trainer: one rank's share of the canonical elements, and their committed baseline."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.item import Change, TensorSpec
from dcr.data_plane.nonfinite import NonFinite
from dcr.protocol.identity import Kind


class Source(Protocol):
    """One owner's share (paper section 4.1).  Calls come from one thread at a time."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """All canonical tensors of the checkpoint, the same on every rank."""
        ...

    @property
    def owner(self) -> str:
        """This owner's name, unique among the ranks."""
        ...

    @property
    def owned_elements(self) -> int:
        """How many canonical elements this owner answers for."""
        ...

    @property
    def baseline_digest(self) -> ContentDigest | None:
        """Content digest of its share of the committed version; None when the baseline is lost."""
        ...

    @property
    def baseline_digests(self) -> Mapping[str, ContentDigest] | None:
        """The same by canonical tensor; those that it owns nothing of may be left out."""
        ...

    @property
    def candidate_digest(self) -> ContentDigest | None:
        """Content digest of its share of the target, once ``changes`` of a forward kind was exhausted."""
        ...

    @property
    def changes_found(self) -> Mapping[str, ChangeCount]:
        """What the last relative or absolute ``changes`` found, by canonical tensor of which this owner holds elements.

        Unchanged tensors are there too.  Empty until it was read to its end, and after a dense one, which compares
        nothing; a restore leaves it as it is.
        """
        ...

    @property
    def compared(self) -> tuple[int, int]:
        """How many source elements the last ``changes`` has looked at, and how many there are; from any thread.

        A fold looks at them once more.
        """
        ...

    def changes(self, kind: Kind) -> Iterator[Change]:
        """What has to be sent: changed elements against the baseline, or every element for dense and restore kinds.

        For every kind but restore the weights must stay as they are until the iterator is exhausted, unless there is a
        snapshot of them; a restore reads the baseline alone.
        """
        ...

    def nonfinite(self) -> Mapping[str, NonFinite]:
        """NaN and infinities among this owner's elements that its baseline has not, by canonical tensor with any.

        The weights must stay as they are meanwhile, unless there is a snapshot of them; DcrError if they are not what
        this source was made for.
        """
        ...

    def snapshot(self) -> None:
        """Pin the weights by a copy in host memory (DESIGN D10): they may change as soon as this returns.

        Until ``hold`` the copy is what ``changes``, ``nonfinite`` and ``fold`` take for the weights; the next snapshot
        is taken into the same memory.  Not while one of these reads it.  DcrError if the weights are not what this
        source was made for.
        """
        ...

    def hold(self) -> None:
        """Read the weights themselves from here on, and give the memory of a snapshot back."""
        ...

    def fold(self, expected: ContentDigest) -> None:
        """Copy the weights into the baseline, in place; DcrError if that is not the content expected."""
        ...
