"""The projection: where each element of a training shard lies in the checkpoint (paper section 4.2, DESIGN section 5).

Learned, not written: integer ids go through the trainer's own gather (shard to full tensor) and its own save path (full
tensor to canonical tensors).  What comes out is fitted as index maps into *checkpoint space*, the concatenation of all
canonical tensors in order of name, and then proved by values: random bits through the save path, and the live weights
through gather and save path, must come out where the maps say.

Sources go through the save path one at a time where it allows: a first run over the whole state dict, with each tensor
a single stored number seen at full shape, shows which sources meet in a canonical tensor; those form one group.  That
run needs no memory unless the save path copies.  Learning a group needs 10 to 14 int64 an element of the group, full
size and on every rank, in host memory (bench/memory.py).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from dcr.data_plane.bits import bit_view
from dcr.data_plane.index_map import IndexMap, fit
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.trainer.random_bits import random_bits
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.state import SavePath, SourceTensor, run_save_path

_RANK_SHIFT = 40
_FIRST_ID = 1 << 40  # far from the constants that a save path may pad with
_ONLY_MOVES = "a save path may only rename, split, join and permute"


@dataclass(frozen=True)
class Projection:
    """How this rank's shards lie in the checkpoint.

    Attributes:
        specs: the canonical tensors, in order of name; the same on every rank.
        bases: the first position of each in checkpoint space.
        maps: for each source, from flat position in this rank's shard to checkpoint space.
        parts: for each source, a digest of which elements the shard holds, in which order: equal on replicas.
    """

    specs: tuple[TensorSpec, ...]
    bases: tuple[int, ...]
    maps: tuple[IndexMap, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True)
class _Outline:
    """Which sources meet, and in order of name the canonical tensors' shapes and sources."""

    groups: tuple[tuple[int, ...], ...]
    shapes: dict[str, tuple[int, ...]]
    origins: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Group:
    """Sources that go through the save path together; ids count their elements one source after the other."""

    sources: tuple[SourceTensor, ...]

    @property
    def offsets(self) -> list[int]:
        """The first id of each source, and the number of ids."""
        return list(itertools.accumulate((source.tensor.numel() for source in self.sources), initial=0))

    def split(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """By source: its number, the positions in ``ids`` that are its own, and its flat indices there."""
        if len(self.sources) == 1:
            yield 0, torch.arange(ids.numel()), ids
            return
        for number, (first, end) in enumerate(itertools.pairwise(self.offsets)):
            positions = ((ids >= first) & (ids < end)).nonzero().view(-1)
            if positions.numel():
                yield number, positions, ids[positions] - first


def learn(sources: Sequence[SourceTensor], save_path: SavePath, ranks: Ranks) -> Projection:
    """Learn and prove the projection; collective over the ranks.

    Raises:
        RefusedError: on every rank alike, naming the tensor, if the save path computes, casts, duplicates, pads or
            depends on values, or if a map does not reproduce the live weights.
    """
    problem, outline = None, _Outline((), {}, {})
    try:
        outline = _outline(sources, save_path)
    except RefusedError as error:
        problem = str(error)
    ranks.refuse_together(problem)
    _refuse_unlike(ranks, {f"state {s.name}": (s.names, s.tensor.dtype, tuple(s.tensor.shape)) for s in sources})
    _refuse_unlike(
        ranks, {f"canonical {name}": (outline.shapes[name], outline.origins[name]) for name in outline.shapes}
    )

    *bases, _ = itertools.accumulate(map(math.prod, outline.shapes.values()), initial=0)
    base = dict(zip(outline.shapes, bases, strict=True))
    dtypes: dict[str, torch.dtype] = {}
    maps: dict[int, IndexMap] = {}
    parts: dict[int, str] = {}
    moves: dict[str, object] = {}
    for numbers in outline.groups:
        group = _Group(tuple(sources[number] for number in numbers))
        located = [_local_positions(source, ranks.rank) for source in group.sources]
        live = [source.full() for source in group.sources]
        if problem is not None:
            continue  # the other ranks still need this one in their gathers
        try:
            ids = _canonical_ids(group, save_path, outline, numbers)
            dtypes |= _prove_moves(group, save_path, ids)
            pieces = _prove_live(group, save_path, ids, located, live)
        except RefusedError as error:
            problem = str(error)
            continue
        moves |= {f"canonical {name}": xxhash.xxh3_128_hexdigest(flat.numpy().data) for name, flat in ids.items()}
        for number, own, local in zip(numbers, pieces, located, strict=True):
            maps[number] = IndexMap(tuple(box for name in own for box in own[name].moved(target=base[name]).boxes))
            parts[number] = xxhash.xxh3_128_hexdigest(local.numpy().data)
    if problem is None and (missing := outline.shapes.keys() - dtypes.keys()):
        problem = f"canonical {min(missing)}: the save path does not make it from the tensors it consists of alone"
    ranks.refuse_together(problem)
    _refuse_unlike(ranks, moves)
    return Projection(
        tuple(TensorSpec(name, shape, dtypes[name]) for name, shape in outline.shapes.items()),
        tuple(bases),
        tuple(maps[number] for number in range(len(sources))),
        tuple(parts[number] for number in range(len(sources))),
    )


def _refuse_unlike(ranks: Ranks, described: dict[str, object]) -> None:
    """Refuse, by name, unless every rank describes the same things alike; collective."""
    everywhere = ranks.gather(described)
    for rank, theirs in enumerate(everywhere):
        for name in sorted(everywhere[0].keys() | theirs.keys()):
            if theirs.get(name) != everywhere[0].get(name):
                raise RefusedError(
                    f"{name} is not on rank {rank} what it is on rank 0: every rank must hold a part or a replica of "
                    "every tensor, and save them alike"
                )


def _outline(sources: Sequence[SourceTensor], save_path: SavePath) -> _Outline:
    """One run over the whole state dict, with each source's number in the place of its elements."""
    numbers = [torch.tensor(n, dtype=torch.int32).expand(source.tensor.shape) for n, source in enumerate(sources)]
    saved = run_save_path(save_path, sources, numbers)
    leader = list(range(len(sources)))  # of each source's group
    origins: dict[str, tuple[int, ...]] = {}
    for name, tensor in saved.items():
        if tensor.dtype != torch.int32:
            raise RefusedError(f"canonical {name}: the save path casts int32 to {tensor.dtype}; {_ONLY_MOVES}")
        single = tensor.numel() == 0 or all(stride == 0 for stride in tensor.stride())
        drawn = (tensor.reshape(-1)[:1] if single else torch.unique(tensor)).tolist()
        origins[name] = tuple(n for n in drawn if 0 <= n < len(sources))  # the others are refused by their ids
        joined = {leader[n] for n in origins[name]}
        leader = [min(joined) if n in joined else n for n in leader]
    groups: dict[int, list[int]] = {}
    for number, first in enumerate(leader):
        groups.setdefault(first, []).append(number)
    return _Outline(
        tuple(tuple(group) for group in groups.values()),
        {name: tuple(saved[name].shape) for name in sorted(saved)},
        origins,
    )


def _local_positions(source: SourceTensor, rank: int) -> torch.Tensor:
    """Where the elements of the full tensor lie in this rank's shard, by the trainer's own gather; collective.

    Returns:
        int64, shape [full elements]: position in the flat shard, or -1 where this rank does not hold the element.
    """
    shape = source.local().shape
    ids = torch.arange(math.prod(shape)).view(shape) + (rank << _RANK_SHIFT)
    gathered = source.gather(ids).reshape(-1)
    return torch.where(gathered >> _RANK_SHIFT == rank, gathered & ((1 << _RANK_SHIFT) - 1), -1)


def _canonical_ids(
    group: _Group, save_path: SavePath, outline: _Outline, numbers: Sequence[int]
) -> dict[str, torch.Tensor]:
    """For each canonical tensor that the group makes, the group's id of each of its elements: int64, shape [numel]."""
    *offsets, total = group.offsets
    numbered = [
        torch.arange(_FIRST_ID + offset, _FIRST_ID + offset + source.tensor.numel()).view(source.tensor.shape)
        for offset, source in zip(offsets, group.sources, strict=True)
    ]
    ids: dict[str, torch.Tensor] = {}
    for name, tensor in run_save_path(save_path, group.sources, numbered).items():
        whole = outline.shapes.get(name)
        if whole != tuple(tensor.shape):
            raise RefusedError(
                f"canonical {name}: the save path makes it of shape {tuple(tensor.shape)} from "
                f"{group.sources[0].name} alone, but of shape {whole} out of the whole state dict"
            )
        if tensor.dtype != torch.int64:
            raise RefusedError(f"canonical {name}: the save path casts int64 to {tensor.dtype}; {_ONLY_MOVES}")
        flat = tensor.reshape(-1) - _FIRST_ID
        if bool(((flat < 0) | (flat >= total)).any()):
            raise RefusedError(
                f"canonical {name}: it has elements that are no source element (computed, or padding); {_ONLY_MOVES}"
            )
        if not set(outline.origins[name]) <= set(numbers):
            raise RefusedError(
                f"canonical {name}: the save path makes it from {group.sources[0].name} alone, but from other tensors "
                "out of the whole state dict"
            )
        ids[name] = flat
    _refuse_duplicates(ids, total)
    return ids


def _refuse_duplicates(ids: dict[str, torch.Tensor], total: int) -> None:
    seen = torch.zeros(total, dtype=torch.bool)
    for flat in ids.values():
        seen[flat] = True
    if int(seen.sum()) == sum(flat.numel() for flat in ids.values()):
        return
    seen.zero_()
    for name, flat in ids.items():
        if bool(seen[flat].any()) or torch.unique(flat).numel() != flat.numel():
            raise RefusedError(
                f"canonical {name}: it repeats source elements, its own or another tensor's (tied names?); "
                f"{_ONLY_MOVES}, so give a save_path that keeps one of them"
            )
        seen[flat] = True


def _prove_moves(group: _Group, save_path: SavePath, ids: dict[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Random bits through the save path must come out as the ids did; returns the canonical dtypes."""
    values = [random_bits(source.tensor, number) for number, source in enumerate(group.sources)]
    saved = run_save_path(save_path, group.sources, values)
    _refuse_other_names(saved, ids)
    for name, flat in ids.items():
        for number, positions, indices in group.split(flat):
            if saved[name].dtype != values[number].dtype:
                raise RefusedError(
                    f"canonical {name}: the save path casts {values[number].dtype} of {group.sources[number].name} to "
                    f"{saved[name].dtype}; {_ONLY_MOVES}"
                )
            expected = bit_view(values[number]).view(-1)[indices]
            if not torch.equal(bit_view(saved[name]).reshape(-1)[positions], expected):
                raise RefusedError(
                    f"canonical {name}: random bits in {group.sources[number].name} do not come out where ids did, so "
                    f"the save path depends on values or dtypes; {_ONLY_MOVES}"
                )
    return {name: tensor.dtype for name, tensor in saved.items()}


def _prove_live(
    group: _Group,
    save_path: SavePath,
    ids: dict[str, torch.Tensor],
    located: list[torch.Tensor],
    live: list[torch.Tensor],
) -> list[dict[str, IndexMap]]:
    """Fit this rank's maps and compare the live shards through them with the saved tensors.

    Args:
        group: the sources.
        save_path: makes canonical tensors.
        ids: by canonical name, the group's ids.
        located: by source, positions in this rank's shard, as ``_local_positions`` gives them.
        live: by source, the full live tensor.

    Returns:
        By source, the maps from this rank's shard to canonical tensors.
    """
    saved = run_save_path(save_path, group.sources, live)
    _refuse_other_names(saved, ids)
    shards = [bit_view(source.local().reshape(-1)).cpu() for source in group.sources]
    pieces: list[dict[str, IndexMap]] = [{} for _ in group.sources]
    for name, flat in ids.items():
        canonical = bit_view(saved[name]).reshape(-1)
        for number, positions, indices in group.split(flat):
            here = located[number][indices]
            held = here >= 0
            source, target = here[held], positions[held]
            if shards[number].dtype != canonical.dtype or not torch.equal(shards[number][source], canonical[target]):
                raise RefusedError(
                    f"canonical {name}: the live bits of {group.sources[number].name} through the projection differ "
                    "from the save path's; do not train while constructing, and check that replicas are identical"
                )
            pieces[number][name] = fit(source, target)
    return pieces


def _refuse_other_names(saved: dict[str, torch.Tensor], ids: dict[str, torch.Tensor]) -> None:
    for name in sorted(saved.keys() ^ ids.keys()):
        raise RefusedError(f"canonical {name}: whether the save path makes it depends on values or dtypes")
    for name, flat in ids.items():
        if saved[name].numel() != flat.numel():
            raise RefusedError(f"canonical {name}: its size depends on values or dtypes")
