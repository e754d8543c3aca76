"""Two names of one resident tensor: what is sent under both must be the same change (DESIGN section 5)."""

from collections.abc import Mapping, Sequence

from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import Item, TensorSpec


class TiedChanges:
    """The changes of one epoch under names that share memory, summed, so that those of two names can be compared.

    The loader takes such a tensor from one name and skips the other.  A trainer that trains two tensors sends the
    changes of both; if they are not the same, those under the skipped name would be lost without a trace.  Where a
    trainer sends nothing under the skipped name, there is nothing to compare.

    Args:
        tied: names that the loader skips -> the loaded ones whose memory they share.
    """

    def __init__(self, tied: Mapping[str, str]) -> None:
        self._tied = tied
        self._names = frozenset({*tied, *tied.values()})
        self._sums: dict[str, ContentDigest] = {}

    def add(self, items: Sequence[Item]) -> None:
        """Note the changes of one payload; entries cost a hash, those of other tensors nothing."""
        for item in items:
            if item.entries and item.spec.name in self._names:
                # Under one name and shape, so that equal changes have equal sums; with the operation, for bits that
                # are to be set are no differences.
                spec = TensorSpec(item.operation.value, (item.spec.numel,), item.spec.dtype)
                change = digest_elements(spec, item.indices, item.values)
                self._sums[item.spec.name] = self._sums.get(item.spec.name, ContentDigest()) + change

    def lost(self) -> str:
        """Why changes would be lost; empty if none would."""
        for name, partner in sorted(self._tied.items()):
            if name in self._sums and self._sums[name] != self._sums.get(partner):
                return (
                    f"{name} shares its memory with {partner} here, and the loader takes that alone, but the two have "
                    "changed in different ways: tie them in the trainer, or serve them with a model that does not"
                )
        return ""
