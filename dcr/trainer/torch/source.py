"""One rank's share of a plain torch trainer: detects, emits and folds the elements that it owns."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.header import TEXT_MAX
from dcr.data_plane.index_map import IndexMap
from dcr.data_plane.item import Change, TensorSpec
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.torch.ownership import Ownership, Shard, assign
from dcr.trainer.torch.projection import Projection, learn
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.state import SavePath, SourceTensor, own_save_path, run_save_path, sources_of


class CandidateChangedError(DcrError):
    """The weights that were folded are not the candidate that was committed; the owner's baseline is lost."""


@dataclass(frozen=True)
class _OwnedShard:
    """A shard that this rank owns: number of its source tensor, committed bits, and map into checkpoint space."""

    number: int
    tracker: Tracker
    index_map: IndexMap


class TorchSource:
    """The owner of one training rank (DESIGN section 5, D10, D13).

    The baseline, the committed bits of the owned shards, lives in host memory; a new source takes the current weights
    as its baseline.  Parameters may be plain tensors (replicated on every rank) or DTensors of any sharding whose
    gather is index-only.  Only the constructor and ``gather_state`` are collective.  A forward ``changes``, ``fold``
    and the optimizer belong to one thread; iterating over ``changes(Kind.RESTORE)`` may go on in another.

    Weights on a GPU are compared, projected, hashed and written there; the baseline visits them chunk by chunk.

    Args:
        model: its parameters and persistent buffers are the state; they must not change while this constructs.
        save_path: turns full tensors by state-dict name into canonical tensors; None takes the model's own.  It is
            called several times, with integer tensors too, and with parts of the state dict.
        process_group: the ranks that hold the model; None is the default group, or one process without any.
        chunk_elements: elements handled at once; a chunk needs up to 72 bytes of temporary memory for each element
            that is sent or digested: every one in a dense attempt, a restore and the construction.

    Raises:
        RefusedError: on every rank alike, naming the tensor, if the state cannot be refitted: see ``projection.learn``;
            or if ranks that hold a replica of a shard differ in its bits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        save_path: SavePath | None = None,
        process_group: dist.ProcessGroup | None = None,
        chunk_elements: int = 1 << 22,
    ) -> None:
        self._model = model
        self._save_path = save_path or own_save_path(model)
        ranks = Ranks(process_group)
        self._rank = ranks.rank
        sources: tuple[SourceTensor, ...] = ()
        problem = None
        try:
            sources = sources_of(model)
        except RefusedError as error:
            problem = str(error)
        ranks.refuse_together(problem)
        self._layouts = tuple(source.layout for source in sources)
        projection = learn(sources, self._save_path, ranks)
        self.specs: tuple[TensorSpec, ...] = projection.specs
        for spec in self.specs:
            _check_name(spec.name)
        self._bases = torch.tensor(projection.bases, dtype=torch.int64)
        self.owner = f"rank-{self._rank}"
        self.ownership = _assign(sources, projection, ranks)
        self._shards = [
            _OwnedShard(number, Tracker(source.name, source.local(), chunk_elements=chunk_elements), index_map)
            for number, (source, index_map, part) in enumerate(
                zip(sources, projection.maps, projection.parts, strict=True)
            )
            if index_map.numel and self.ownership.owner[source.name, part] == self._rank
        ]
        self.owned_elements = sum(shard.index_map.numel for shard in self._shards)
        counts = ranks.gather(self.owned_elements)
        if sum(counts) != sum(spec.numel for spec in self.specs):
            raise RefusedError(
                f"ranks own {counts} elements of a checkpoint of {sum(spec.numel for spec in self.specs)}: "
                "shards on different ranks overlap in part; use placements that shard or replicate"
            )
        self._marks = threading.Lock()  # over folding and the number of folds, against a restore in another thread
        self._folding = False
        self._folds = 0
        self._candidate_digest: ContentDigest | None = None
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
    def folding(self) -> bool:
        """Whether a fold has begun and not ended (D13); only ``fold`` again ends it."""
        return self._folding

    def changes(self, kind: Kind) -> Iterator[Change]:
        """What this owner emits in an attempt of this kind, in chunks; not collective.

        Args:
            kind: relative and absolute give the changed elements, old and new bits; dense every owned element of the
                live weights; restore every owned element of the baseline.

        Returns:
            Changes whose indices are strictly increasing in each, in host memory; a tensor may have several.

        Raises:
            RefusedError: while folding; if the kind needs a baseline and it is lost; if the model's tensors are not
                the ones this source was made for; and out of a restore, if a fold begins before it ends.
        """
        if self._folding:
            raise RefusedError(f"owner {self.owner} is folding: it emits nothing until fold() has ended")
        if kind is not Kind.DENSE and self._baseline_digest is None:
            raise RefusedError(f"owner {self.owner} lost its baseline: only a dense attempt can follow, not {kind}")
        if kind is Kind.RESTORE:
            return self._restore(self._folds)
        self._candidate_digest = None
        self._changes_found = {}
        live = self._live()
        return self._dense(live) if kind is Kind.DENSE else self._detect(live)

    def fold(self, expected: ContentDigest) -> None:
        """Bring the baseline to the live weights in place, after the commit (D13); may be run again at any time.

        Args:
            expected: this owner's share of the committed candidate's digest.

        Raises:
            CandidateChangedError: if what was folded has another digest; the baseline is lost then.
            RefusedError: if the model's tensors are not the ones this source was made for; nothing was changed.
        """
        live = self._live()
        held = None if self._folding or self._baseline_digests is None else dict(self._baseline_digests)
        with self._marks:
            self._folding = True
            self._folds += 1
        for shard in self._shards:
            for difference in shard.tracker.fold(live[shard.number].local()):
                if held is None:
                    continue  # nothing to bring forward: digests are taken afresh
                for change in self._project(shard, difference.positions, difference.old, difference.new):
                    held[change.spec.name] += _digest_of_change(change)
        if held is None:
            held = self._digests_of_baseline()
        digest = _sum(held)
        self._baseline_digests, self._baseline_digest = (held, digest) if digest == expected else (None, None)
        self._candidate_digest = None
        with self._marks:
            self._folding = False
        if digest != expected:
            raise CandidateChangedError(
                f"owner {self.owner}: the folded weights digest to {digest.hex()}, the committed candidate to "
                f"{expected.hex()}; the weights were stepped between detection and fold. The baseline is lost, so the "
                "next push sends every element; keep the optimizer from stepping until push() returns"
            )

    def gather_state(self) -> dict[str, torch.Tensor] | None:
        """The checkpoint by the trainer's own state-dict path, not by the projection; collective.

        Returns:
            On rank 0 the canonical tensors, contiguous copies in host memory; None elsewhere.
        """
        sources = self._live()
        full = []
        for source in sources:
            tensor = source.full()
            if self._rank == 0:
                full.append(tensor)
        if self._rank != 0:
            return None
        return {name: tensor.contiguous() for name, tensor in run_save_path(self._save_path, sources, full).items()}

    def _live(self) -> tuple[SourceTensor, ...]:
        """The model's tensors now, refused unless they are laid out as at construction."""
        sources = sources_of(self._model)
        layouts = tuple(source.layout for source in sources)
        for ours, theirs in ((self._layouts, layouts), (layouts, self._layouts)):
            for layout in ours:
                if layout not in theirs:
                    found = "appeared in" if ours is layouts else "is gone from"
                    raise RefusedError(
                        f"owner {self.owner}: [{layout}] {found} the model since this source was made; make a new one"
                    )
        # The optimizer may have written them on a stream that the calling thread knows nothing of.
        for device in {source.local().device for source in sources if source.local().device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return sources

    def _detect(self, live: tuple[SourceTensor, ...]) -> Iterator[Change]:
        digest = self._baseline_digest
        assert digest is not None, "changes() refuses without a baseline"
        changed: Counter[str] = Counter()
        for shard in self._shards:
            for difference in shard.tracker.differences(live[shard.number].local()):
                for change in self._project(shard, difference.positions, difference.old, difference.new):
                    digest = digest + _digest_of_change(change)
                    changed[change.spec.name] += change.indices.numel()
                    yield change
        self._candidate_digest = digest
        self._changes_found = {name: ChangeCount(changed[name], owned) for name, owned in self._elements.items()}

    def _dense(self, live: tuple[SourceTensor, ...]) -> Iterator[Change]:
        digest = ContentDigest()
        for shard in self._shards:
            for start, bits in shard.tracker.live(live[shard.number].local()):
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
        self, shard: _OwnedShard, positions: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor
    ) -> Iterator[Change]:
        """Changes of some positions of a shard, one a canonical tensor; positions are strictly increasing int64."""
        kept, targets = shard.index_map.apply(positions)
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


def _assign(sources: tuple[SourceTensor, ...], projection: Projection, ranks: Ranks) -> Ownership:
    """Owners of all ranks' shards that reach the checkpoint; refuses replicas that differ.  Collective."""
    held = []
    for source, index_map, part in zip(sources, projection.maps, projection.parts, strict=True):
        if index_map.numel:
            bits = bit_view(source.local().reshape(-1)).cpu()
            size_bytes = bits.numel() * bits.element_size()
            held.append((source.name, part, size_bytes, xxhash.xxh3_128_hexdigest(bits.numpy().data)))
    holders: dict[tuple[str, str, int], list[int]] = {}
    bits_of: dict[tuple[str, str], str] = {}
    for rank, theirs in enumerate(ranks.gather(held)):
        for name, part, size_bytes, digest in theirs:
            holders.setdefault((name, part, size_bytes), []).append(rank)
            if bits_of.setdefault((name, part), digest) != digest:
                first = holders[name, part, size_bytes][0]
                raise RefusedError(
                    f"{name}: ranks {first} and {rank} hold replicas of a shard with different bits; synchronise them "
                    "first (a tensor that is no DTensor is taken to be replicated)"
                )
    return assign((Shard(*key, tuple(value)) for key, value in holders.items()), ranks.count)
