"""One owner's share of the checkpoint: its committed bits, what changed against them, and the fold (paper section 4.1).

Trainers differ in how live tensors are found and where their elements lie in the checkpoint.  What is kept, compared,
emitted and folded is the same for all of them, and here: the live weights, which the trainer holds still meanwhile, or
a snapshot of them (DESIGN D10).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.header import TEXT_MAX
from dcr.data_plane.index_map import IndexMap
from dcr.data_plane.item import Change, TensorSpec
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import Difference
from dcr.data_plane.nonfinite import NonFinite, count_nonfinite
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.snapshot import Live, Snapshot


class CandidateChangedError(DcrError):
    """The weights that were folded are not the candidate that was committed; the owner's baseline is lost."""


@dataclass(frozen=True)
class OwnedShard:
    """Elements that this rank owns.

    Attributes:
        number: what the live tensor is found by.
        tracker: the committed bits.
        maps: from flat position in the shard into checkpoint space, the concatenation of all canonical tensors in
            order; no two share a target, one element may have a target in several of them.
    """

    number: int
    tracker: Tracker
    maps: tuple[IndexMap, ...]


class _Mark:
    """Tells whether two passes over a shard found the same positions and new bits, without keeping them."""

    def __init__(self) -> None:
        self._hash: xxhash.xxh3_128 | None = xxhash.xxh3_128()

    def add(self, difference: Difference) -> None:
        """The next chunk's."""
        if difference.positions.device.type != "cpu":
            self._hash = None  # to bring positions to the host costs more than to digest them again where they are
        if self._hash is not None:
            self._hash.update(difference.positions.numpy().data)
            self._hash.update(difference.new.numpy().data)

    def digest(self) -> bytes | None:
        """Of all that was added; None if that was on another device."""
        return None if self._hash is None else self._hash.digest()


@dataclass(frozen=True)
class _Candidate:
    """What a detection that was read to its end found.

    Attributes:
        digests: content digests by canonical tensor.
        marks: by a shard's number, of what differs there.
    """

    digests: dict[str, ContentDigest]
    marks: dict[int, bytes]


class Share:
    """Committed bits, detection and fold over some shards (DESIGN section 5, D10, D13).

    A forward ``changes``, ``fold``, ``snapshot`` and the optimizer take turns; once there is a snapshot the optimizer
    is free.  Iterating over ``changes(Kind.RESTORE)`` may go on in another thread at any time.

    Args:
        owner: the owner's name.
        specs: all canonical tensors of the checkpoint.
        bases: the first position of each in checkpoint space.
        shards: what this rank owns.

    Raises:
        RefusedError: a canonical tensor has a name that cannot travel.
    """

    def __init__(
        self, owner: str, specs: Sequence[TensorSpec], bases: Sequence[int], shards: Sequence[OwnedShard]
    ) -> None:
        for spec in specs:
            _check_name(spec.name)
        self.owner = owner
        self.specs = specs
        self.owned_elements = sum(index_map.numel for shard in shards for index_map in shard.maps)
        self._bases = torch.tensor(bases, dtype=torch.int64)
        self._shards = shards
        self._snapshot: Snapshot | None = None
        self._marks = threading.Lock()  # over folding and the number of folds, against a restore in another thread
        self._folding = False
        self._folds = 0
        self._candidate_digest: ContentDigest | None = None
        self._candidate: _Candidate | None = None
        self._changes_found: Mapping[str, ChangeCount] = {}
        self._elements: Counter[str] = Counter()
        self._baseline_digests: dict[str, ContentDigest] | None = self._digests_of_baseline(self._elements)
        self._baseline_digest: ContentDigest | None = _sum(self._baseline_digests)

    @property
    def baseline_digest(self) -> ContentDigest | None:
        """This owner's share of the committed version's content digest; None when the baseline is lost."""
        return self._baseline_digest

    @property
    def baseline_digests(self) -> Mapping[str, ContentDigest] | None:
        """The same by canonical tensor, brought forward from the changed elements alone."""
        return self._baseline_digests

    @property
    def candidate_digest(self) -> ContentDigest | None:
        """This owner's share of the target's content digest; None until a forward ``changes`` was read to its end."""
        return self._candidate_digest

    @property
    def changes_found(self) -> Mapping[str, ChangeCount]:
        """See :attr:`dcr.runtime.source.Source.changes_found`."""
        return self._changes_found

    @property
    def compared(self) -> tuple[int, int]:
        """See :attr:`dcr.runtime.source.Source.compared`."""
        return sum(s.tracker.visited for s in self._shards), sum(s.tracker.numel for s in self._shards)

    @property
    def folding(self) -> bool:
        """Whether a fold has begun and not ended (D13); only ``fold`` again ends it."""
        return self._folding

    def snapshot(self, look: Callable[[], Live]) -> None:
        """Pin the candidate by a copy of the live weights, which are read no more until ``hold`` (DESIGN D10).

        Args:
            look: finds the live tensors, or refuses.

        Raises:
            RefusedError: what ``look`` raises, and then a snapshot before this one stays; or a live tensor has another
                dtype or number of elements than the tracked one, and then there is none.
        """
        live = look()
        snapshot, self._snapshot = self._snapshot or Snapshot(), None  # a copy that ends half-way is no candidate
        snapshot.take(((shard.number, shard.tracker) for shard in self._shards), live)
        self._snapshot = snapshot

    def hold(self) -> None:
        """Read the live weights from here on; the memory of a snapshot is given back (DESIGN D10)."""
        self._snapshot = None

    def changes(self, kind: Kind, look: Callable[[], Live]) -> Iterator[Change]:
        """What this owner emits in an attempt of this kind, in chunks; not collective.

        Args:
            kind: relative and absolute give the changed elements, old and new bits; dense every owned element of the
                live weights; restore every owned element of the baseline.
            look: finds the live tensors, or refuses; called for forward kinds alone, and not if there is a snapshot.

        Returns:
            Changes whose indices are strictly increasing in each, in host memory; a tensor may have several.

        Raises:
            RefusedError: while folding; if the kind needs a baseline and it is lost; what ``look`` raises; and out of a
                restore, if a fold begins before it ends.
        """
        if self._folding:
            raise RefusedError(f"owner {self.owner} is folding: it emits nothing until fold() has ended")
        if kind is not Kind.DENSE and self._baseline_digest is None:
            raise RefusedError(f"owner {self.owner} lost its baseline: only a dense attempt can follow, not {kind}")
        for shard in self._shards:
            shard.tracker.visited = 0
        if kind is Kind.RESTORE:
            return self._restore(self._folds)
        self._candidate_digest = self._candidate = None
        self._changes_found = {}
        live = self._pinned(look)
        return self._dense(live) if kind is Kind.DENSE else self._detect(live)

    def nonfinite(self, look: Callable[[], Live]) -> dict[str, NonFinite]:
        """NaN and infinities among the owned elements of the live weights, by canonical tensor that has any.

        One reading of the live weights, with no copy.  What the tracker holds already, such as a mask of -inf, is not
        told of.  Not collective.

        Args:
            look: finds the live tensors, or refuses; not called if there is a snapshot.
        """
        live = self._pinned(look)
        found: dict[str, NonFinite] = {}
        for shard in self._shards:
            tensor = live(shard.number)
            if tensor is None:
                continue
            for positions, bits in shard.tracker.nonfinite(tensor):
                for change in self._project(shard, positions, None, bits):
                    name = change.spec.name
                    found[name] = found.get(name, NonFinite()) + count_nonfinite(change.new, change.spec.dtype)
        return found

    def fold(self, expected: ContentDigest, look: Callable[[], Live]) -> None:
        """Bring the baseline to the live weights in place, after the commit (D13); may be run again at any time.

        Args:
            expected: this owner's share of the committed candidate's digest.
            look: finds the live tensors, or refuses, and then nothing was changed; not called if there is a snapshot.

        Raises:
            CandidateChangedError: if what was folded has another digest; the baseline is lost then.
        """
        live = self._pinned(look)
        whole, found = not self._folding, self._candidate
        if found is not None and _sum(found.digests) != expected:
            found = None
        held = None if found or not whole or self._baseline_digests is None else dict(self._baseline_digests)
        with self._marks:
            self._folding = True
            self._folds += 1
        marks = dict[int, bytes | None]()
        for shard in self._shards:
            tensor = live(shard.number)
            if tensor is None:
                continue
            mark = _Mark()
            for difference in shard.tracker.fold(tensor):
                if held is not None:
                    for change in self._project(shard, difference.positions, difference.old, difference.new):
                        held[change.spec.name] += _digest_of_change(change)
                elif found is not None:
                    mark.add(difference)
            marks[shard.number] = mark.digest()
        if held is None:
            # What detection found was written, and nothing else: its digests are the baseline's now.
            same = whole and found is not None and marks == found.marks
            held = found.digests if found is not None and same else self._digests_of_baseline()
        digest = _sum(held)
        self._baseline_digests, self._baseline_digest = (held, digest) if digest == expected else (None, None)
        self._candidate_digest = self._candidate = None
        with self._marks:
            self._folding = False
        if digest != expected:
            raise CandidateChangedError(
                f"owner {self.owner}: the folded weights digest to {digest.hex()}, the committed candidate to "
                f"{expected.hex()}; the weights were stepped between detection and fold. The baseline is lost, so the "
                "next push sends every element; keep the optimizer from stepping until push() returns, or use "
                "begin_push()"
            )

    def _pinned(self, look: Callable[[], Live]) -> Live:
        return look() if self._snapshot is None else self._snapshot.tensor

    def _detect(self, live: Live) -> Iterator[Change]:
        assert self._baseline_digests is not None, "changes() refuses without a baseline"
        digests, marks = dict(self._baseline_digests), dict[int, bytes | None]()
        changed: Counter[str] = Counter()
        for shard in self._shards:
            tensor = live(shard.number)
            if tensor is None:
                continue
            mark = _Mark()
            for difference in shard.tracker.differences(tensor):
                mark.add(difference)
                for change in self._project(shard, difference.positions, difference.old, difference.new):
                    digests[change.spec.name] += _digest_of_change(change)
                    changed[change.spec.name] += change.indices.numel()
                    yield change
            marks[shard.number] = mark.digest()
        self._candidate_digest = _sum(digests)
        known = {number: mark for number, mark in marks.items() if mark is not None}
        self._candidate = _Candidate(digests, known) if len(known) == len(marks) else None
        self._changes_found = {name: ChangeCount(changed[name], owned) for name, owned in self._elements.items()}

    def _dense(self, live: Live) -> Iterator[Change]:
        digest = ContentDigest()
        for shard in self._shards:
            for start, bits in _target_bits(shard.tracker, live(shard.number)):
                positions = torch.arange(start, start + bits.numel(), device=bits.device)
                for change in self._project(shard, positions, None, bits):
                    digest = digest + _digest_of_change(change)
                    yield change
        self._candidate_digest = digest

    def _restore(self, folds: int) -> Iterator[Change]:
        for shard in self._shards:
            for start, stop in shard.tracker.chunks():
                with self._marks:
                    if self._folding or self._folds != folds:
                        raise RefusedError(f"owner {self.owner} folded during a restore: restore the new version")
                    bits = shard.tracker.committed(start, stop)
                yield from self._project(shard, torch.arange(start, stop), None, bits)

    def _digests_of_baseline(self, elements: Counter[str] | None = None) -> dict[str, ContentDigest]:
        """Taken afresh from every owned element, by canonical tensor; counts them where that is asked for."""
        digests: dict[str, ContentDigest] = {}
        for shard in self._shards:
            for start, stop in shard.tracker.chunks():
                bits = shard.tracker.committed(start, stop)
                for change in self._project(shard, torch.arange(start, stop), None, bits):
                    name = change.spec.name
                    digests[name] = digests.get(name, ContentDigest()) + _digest_of_change(change)
                    if elements is not None:
                        elements[name] += change.indices.numel()
        return digests

    def _project(
        self, shard: OwnedShard, positions: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor
    ) -> Iterator[Change]:
        """Changes of some positions of a shard, one a canonical tensor; positions are strictly increasing int64."""
        for index_map in shard.maps:
            yield from self._project_one(index_map, positions, old, new)

    def _project_one(
        self, index_map: IndexMap, positions: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor
    ) -> Iterator[Change]:
        kept, targets = index_map.apply(positions)
        if bool((targets[1:] < targets[:-1]).any()):
            targets, order = targets.sort()
            kept = kept[order]
        if kept.numel() != positions.numel() or bool((kept[1:] < kept[:-1]).any()):
            old, new = None if old is None else old[kept], new[kept]
        numbers, counts = torch.unique_consecutive(
            torch.searchsorted(self._bases.to(targets.device), targets, right=True) - 1, return_counts=True
        )
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            part = slice(start, start + count)
            indices = targets[part] - self._bases[number]
            yield Change(self.specs[number], indices, None if old is None else old[part], new[part])
            start += count


def _target_bits(tracker: Tracker, live: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
    """The bits that a shard will have after the fold, chunk by chunk, each with its first position."""
    if live is not None:
        yield from tracker.live(live)
        return
    for start, stop in tracker.chunks():
        yield start, tracker.committed(start, stop)


def _check_name(name: str) -> None:
    """Refuse now what no payload could carry."""
    if not 0 < len(name) <= TEXT_MAX or any("\ud800" <= c <= "\udfff" for c in name):
        raise RefusedError(
            f"canonical tensor {name[:80]!r}: a name must have 1 to {TEXT_MAX} characters of valid Unicode; rename it "
            "in the save path"
        )


def _sum(digests: Mapping[str, ContentDigest]) -> ContentDigest:
    return sum(digests.values(), ContentDigest())


def _digest_of_change(change: Change) -> ContentDigest:
    """What a change adds to the content digest."""
    kernels = stream_kernels([change.indices, change.new])
    digest = kernels.digest(change.spec, change.indices, change.new)
    return digest if change.old is None else digest - kernels.digest(change.spec, change.indices, change.old)
