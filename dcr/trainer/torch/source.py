"""One rank's share of a plain torch trainer: detects, emits and folds the elements that it owns."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.item import Change, TensorSpec
from dcr.data_plane.nonfinite import NonFinite
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.runtime.progress_log import untold
from dcr.trainer.share import OwnedShard, Share
from dcr.trainer.snapshot import Live
from dcr.trainer.torch.ownership import Ownership, Shard, assign
from dcr.trainer.torch.projection import Projection, learn
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.state import SavePath, SourceTensor, own_save_path, run_save_path, sources_of


class TorchSource:
    """The owner of one training rank (DESIGN section 5, D10, D13).

    The baseline, the committed bits of the owned shards, lives in host memory; a new source takes the current weights
    as its baseline.  Parameters may be plain tensors (replicated on every rank) or DTensors of any sharding whose
    gather is index-only.  Only the constructor and ``gather_state`` are collective.  A forward ``changes``, ``fold``,
    ``snapshot`` and the optimizer take turns; once there is a snapshot the optimizer is free.  Iterating over
    ``changes(Kind.RESTORE)`` may go on in another thread at any time.

    Weights on a GPU are compared, projected, hashed and written there; the baseline visits them chunk by chunk.

    Args:
        model: its parameters and persistent buffers are the state; they must not change while this constructs.
        save_path: turns full tensors by state-dict name into canonical tensors; None takes the model's own.  It is
            called several times, with integer tensors too, and with parts of the state dict.
        process_group: the ranks that hold the model; None is the default group, or one process without any.
        chunk_elements: elements handled at once; a chunk needs up to 72 bytes of temporary memory for each element
            that is sent or digested: every one in a dense attempt, a restore and the construction.
        step: told of each step of the construction.

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
        step: Callable[[str], None] = untold,
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
        step(f"looks at {len(sources)} tensors, and waits until all {ranks.count} ranks have")
        ranks.refuse_together(problem)
        self._layouts = tuple(source.layout for source in sources)
        step(f"learns how {len(sources)} tensors lie in the checkpoint, by running the save path on numbers")
        # A pair that is fitted takes more than an element that is sent: see below.
        projection = learn(sources, self._save_path, ranks, chunk_elements=max(chunk_elements // 2, 1))
        self.specs: tuple[TensorSpec, ...] = projection.specs
        self.owner = f"rank-{self._rank}"
        step(f"compares replicas and chooses owners of {len(self.specs)} canonical tensors, all ranks together")
        self.ownership = _assign(sources, projection, ranks)
        step("copies what this rank owns into host memory, and digests it")
        shards = [
            OwnedShard(number, Tracker(source.name, source.local(), chunk_elements=chunk_elements), (index_map,))
            for number, (source, index_map, part) in enumerate(
                zip(sources, projection.maps, projection.parts, strict=True)
            )
            if index_map.numel and self.ownership.owner[source.name, part] == self._rank
        ]
        self._share = Share(self.owner, self.specs, projection.bases, shards)
        self.owned_elements = self._share.owned_elements
        step(f"owns {self.owned_elements} elements; waits until all {ranks.count} ranks know what they own")
        counts = ranks.gather(self.owned_elements)
        if sum(counts) != sum(spec.numel for spec in self.specs):
            raise RefusedError(
                f"ranks own {counts} elements of a checkpoint of {sum(spec.numel for spec in self.specs)}: "
                "shards on different ranks overlap in part; use placements that shard or replicate"
            )

    @property
    def baseline_digest(self) -> ContentDigest | None:
        """This owner's share of the committed version's content digest; None when the baseline is lost."""
        return self._share.baseline_digest

    @property
    def baseline_digests(self) -> Mapping[str, ContentDigest] | None:
        """The same by canonical tensor, brought forward from the changed elements alone."""
        return self._share.baseline_digests

    @property
    def candidate_digest(self) -> ContentDigest | None:
        """This owner's share of the target's content digest; None until a forward ``changes`` was read to its end."""
        return self._share.candidate_digest

    @property
    def changes_found(self) -> Mapping[str, ChangeCount]:
        """See :attr:`dcr.runtime.source.Source.changes_found`."""
        return self._share.changes_found

    @property
    def compared(self) -> tuple[int, int]:
        """See :attr:`dcr.runtime.source.Source.compared`."""
        return self._share.compared

    @property
    def folding(self) -> bool:
        """Whether a fold has begun and not ended (D13); only ``fold`` again ends it."""
        return self._share.folding

    def changes(self, kind: Kind) -> Iterator[Change]:
        """What this owner emits in an attempt of this kind, in chunks; not collective.  See ``Share.changes``.

        Raises:
            RefusedError: as ``Share.changes``, or if the model's tensors are not the ones this source was made for.
        """
        return self._share.changes(kind, self._look)

    def nonfinite(self) -> Mapping[str, NonFinite]:
        """New NaN and infinities among the owned elements, by canonical tensor; not collective.  See ``Share``.

        Raises:
            RefusedError: as ``changes``.
        """
        return self._share.nonfinite(self._look)

    def snapshot(self) -> None:
        """Pin the candidate by a copy of the live weights; not collective.  See ``Share.snapshot``.

        Raises:
            RefusedError: if the model's tensors are not the ones this source was made for; nothing was changed.
        """
        self._share.snapshot(self._look)

    def hold(self) -> None:
        """Read the live weights from here on; see ``Share.hold``."""
        self._share.hold()

    def fold(self, expected: ContentDigest) -> None:
        """Bring the baseline to the candidate in place, after the commit (D13); may be run again at any time.

        Args:
            expected: this owner's share of the committed candidate's digest.

        Raises:
            CandidateChangedError: if what was folded has another digest; the baseline is lost then.
            RefusedError: if the model's tensors are not the ones this source was made for; nothing was changed.
        """
        self._share.fold(expected, self._look)

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

    def _look(self) -> Live:
        live = self._live()
        return lambda number: live[number].local()


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
