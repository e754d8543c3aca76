"""What an engine holds, summed over its ranks, against the version that it is taken to hold (DESIGN sections 5 and 6).

No weight travels: every rank reads its boxes backwards and answers with digests of canonical elements.  Boxes that
several ranks hold, or one rank twice, are counted once; a tensor is compared if what was counted is each of its
elements once.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.readback import Extent
from dcr.protocol.errors import DcrError
from dcr.runtime.rank_messages import Contents

WAY_OUT = (
    "if something else than dcr has written to it, restart the engine: it then loads its checkpoint, is compared with "
    "that and restored; if it is refused again, its runtime converts weights after loading, or sleeps without keeping "
    "them: choose a backend or setting that does not"
)
_NOT_LOADED = "its bits are not those of the checkpoint that the engine was started from"
_NAMED_MAX = 8
"""How many tensors an error names; it counts the others."""


class ReadbackError(DcrError):
    """Storage was read back and is not what it is taken to be; the engine must not serve.

    Attributes:
        tensors: what is wrong by canonical tensor, or by rank that could not be read.
    """

    def __init__(self, message: str, tensors: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.tensors = dict(tensors or {})


@dataclass(frozen=True)
class ReadbackReport:
    """What a readback has shown.

    Attributes:
        version: the committed version that storage was taken to hold; None for what the loader was fed at the start.
        compared_with: ``checkpoint``, tensor by tensor; ``record``, all of them together with the content digest of
            the version; or empty: some tensors have no way back, and the record tells one digest for all.  Then only
            what ranks can tell among themselves was checked: that they agree on elements which several hold, that they
            hold every element, and that constants are in place.
        tensors: canonical tensors that were read whole.
        elements: of these, in all.
        unread: canonical tensors that could not be read, and why.
    """

    version: int | None
    compared_with: str
    tensors: int
    elements: int
    unread: dict[str, str]


@dataclass(frozen=True)
class EngineContents:
    """The digest of every canonical tensor that the ranks of an engine hold whole, and why others have none."""

    digests: dict[str, ContentDigest]
    unread: dict[str, str]
    elements: int
    """Of the tensors that have a digest, in all."""

    @classmethod
    def of(
        cls, specs: Sequence[TensorSpec], ranks: Mapping[str, Contents], silent: Mapping[str, str]
    ) -> "EngineContents":
        """Sum over ranks.

        Args:
            specs: every canonical tensor.
            ranks: what each rank read.
            silent: ranks that could not be read back, and why.

        Raises:
            ReadbackError: there are such ranks; or a rank's storage is not as its loader leaves it, two places
                disagree, or elements of a tensor that is held lie on no rank: by tensor.
        """
        if silent:
            unread_ranks = {f"rank {rank}": why for rank, why in silent.items()}
            raise ReadbackError(f"{named(unread_ranks)}: {WAY_OUT}", unread_ranks)
        wrong: dict[str, str] = {}
        digests: dict[str, ContentDigest] = {}
        unread: dict[str, str] = {}
        for spec in specs:
            name = spec.name
            if why := next((f"{_at(r, ranks)}{c.wrong[name]}" for r, c in ranks.items() if name in c.wrong), ""):
                wrong[name] = why
            elif any(name in c.unread for c in ranks.values()):
                unread[name] = "the loader transforms it, and there is no way back"
            elif spec.numel == 0:
                digests[name] = ContentDigest()
            elif not any(c.held.get(name) for c in ranks.values()):
                unread[name] = "the loader skips it on every rank, or it is refused"
            else:
                boxes: dict[Extent, str] = {}
                why = _disagreement(ranks, name, boxes)
                missing, twice = covers(spec.numel, frozenset(boxes))
                if why:
                    wrong[name] = why
                elif missing:
                    wrong[name] = (
                        f"{missing} of its {spec.numel} elements lie on no rank of this engine, and a change of them "
                        "would be lost: serve it with a model that loads all of it"
                    )
                elif twice:
                    unread[name] = "ranks hold it in boxes that overlap in part, so that their digests do not add up"
                else:
                    digests[name] = sum((ContentDigest.from_hex(d) for d in boxes.values()), ContentDigest())
        if wrong:
            raise ReadbackError(f"{named(wrong)}: {WAY_OUT}", wrong)
        return cls(digests, unread, sum(s.numel for s in specs if s.name in digests))

    def compare(
        self, version: int | None, content_digest: str, checkpoint: Mapping[str, ContentDigest] | None
    ) -> ReadbackReport:
        """Compare with what storage is taken to hold.

        Args:
            version: which version that is; for the report.
            content_digest: of the whole version, as the record has it.
            checkpoint: digests by tensor of what the loader was fed, if storage is taken to hold that.

        Raises:
            ReadbackError: it is something else.
        """
        against = ""
        if checkpoint is not None:
            against = "checkpoint"
            if off := [n for n, digest in self.digests.items() if checkpoint[n] != digest]:
                raise ReadbackError(f"{named(dict.fromkeys(off, _NOT_LOADED))}: {WAY_OUT}")
        elif not self.unread:
            against = "record"
            total = sum(self.digests.values(), ContentDigest()).hex()
            if total != content_digest:
                raise ReadbackError(
                    f"all {len(self.digests)} canonical tensors together digest to {total}, version {version} of the "
                    f"record to {content_digest}: {WAY_OUT}"
                )
        return ReadbackReport(version, against, len(self.digests), self.elements, self.unread)


def named(reasons: Mapping[str, str]) -> str:
    """Tensors and reasons, as an error spells them out."""
    shown = "; ".join(f"{name}: {why}" for name, why in itertools.islice(sorted(reasons.items()), _NAMED_MAX))
    return f"{shown}; and {len(reasons) - _NAMED_MAX} more" if len(reasons) > _NAMED_MAX else shown


def _at(rank: str, ranks: Mapping[str, Contents]) -> str:
    return f"rank {rank}: " if len(ranks) > 1 else ""


def _disagreement(ranks: Mapping[str, Contents], name: str, boxes: dict[Extent, str]) -> str:
    """Collect the boxes of a tensor, each once; says where two places of the same elements differ."""
    first: dict[Extent, str] = {}
    why = ""
    for rank, contents in ranks.items():
        for box in contents.held.get(name, ()):
            extent = Extent(box.sizes, box.strides, box.offset)
            if boxes.setdefault(extent, box.digest) != box.digest and not why:
                other = f"ranks {first[extent]} and {rank} hold" if rank != first[extent] else f"rank {rank} holds"
                why = f"{other} different bits of the same {extent.numel} elements"
            first.setdefault(extent, rank)
    return why


@functools.lru_cache(maxsize=1 << 16)
def covers(numel: int, extents: frozenset[Extent]) -> tuple[int, bool]:
    """How many of the flat indices 0 <= i < numel are in no extent, and whether one is in two.

    Extents whose ranges meet, such as shards of columns, are counted on a map of one byte an element.
    """
    ordered = sorted(extents, key=lambda e: e.offset)
    total = sum(e.numel for e in ordered)
    if all(a.last < b.offset for a, b in itertools.pairwise(ordered)):
        return numel - total, False
    count = np.zeros(numel, np.uint8)
    for e in ordered:
        view = np.lib.stride_tricks.as_strided(count[e.offset :], e.sizes, e.strides)
        np.add(view, 1, out=view, where=view < 2)  # noqa: PLR2004 - two is as good as more
    return int((count == 0).sum()), bool((count > 1).any())
