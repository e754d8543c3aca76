"""The projection: where each element of a training shard lies in the checkpoint (paper section 4.2, DESIGN section 5).

Learned, not written: integer ids go through the trainer's own gather (shard to full tensor) and its own save path (full
tensor to canonical tensors).  What comes out is fitted as index maps into *checkpoint space*, the concatenation of all
canonical tensors in order of name, and then proved by values: random bits through the save path, and the live weights
through gather and save path, must come out where the maps say.

Sources go through the save path one at a time where it allows: a first run over the whole state dict, with each tensor
a single stored number seen at full shape, shows which sources meet in a canonical tensor; those form one group.  That
run needs no memory unless the save path copies, and then 2 bytes an element of all that it copies (4 beyond 32,767
sources).

A group's ids have 4 bytes (8 from 2**30 elements on, or where ranks times elements reach 2**31); they are fitted chunk
by chunk and let go.  So learning takes, full size and on every rank, 4 bytes an element of the largest group, and as
much again for what the save path copies, and a bit; then, instead, the group's own bytes once, and again for what it
copies; and beside either up to 112 bytes an element of a chunk (bench/memory.py).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dcr.data_plane.bits import bit_view, row_chunks
from dcr.data_plane.chunked_fit import ChunkedFit, maps_exactly
from dcr.data_plane.index_map import IndexMap
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.trainer.random_bits import random_bits
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.state import SavePath, SourceTensor, run_save_path

_NARROW, _WIDE = torch.int32, torch.int64
_FIRST_ID = {_NARROW: 1 << 30, _WIDE: 1 << 40}  # far from the constants that a save path may pad with
_SOURCES_NARROW = 1 << 15
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
    chunk_elements: int

    def chunks(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``row_chunks``."""
        return row_chunks(tensor, self.chunk_elements)

    @property
    def offsets(self) -> list[int]:
        """The first id of each source, and the number of ids."""
        return list(itertools.accumulate((source.tensor.numel() for source in self.sources), initial=0))

    def split(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """By source: its number, the positions in ``ids``, which are not empty, of its own, and its flat indices."""
        if len(self.sources) == 1:
            yield 0, torch.arange(ids.numel()), ids
            return
        low, high = (int(bound) for bound in ids.aminmax())
        for number, (first, end) in enumerate(itertools.pairwise(self.offsets)):
            if first > high or end <= low:
                continue
            positions = ((ids >= first) & (ids < end)).nonzero().view(-1)
            if positions.numel():
                yield number, positions, ids[positions] - first


@dataclass(frozen=True)
class _Held:
    """The elements of a full tensor that lie in this rank's shard.

    Attributes:
        places: from flat index in the full tensor to position in the flat shard; None if the shard is the full tensor.
        part: digest of which elements they are, in which order.
    """

    places: IndexMap | None
    part: str


@dataclass
class _Learned:
    """What the ids of a group showed, by canonical name.

    Attributes:
        origins: for each source that has elements there, from flat index in it to flat index in the source.
        moves: digest of all ids in order.
    """

    origins: dict[str, dict[int, IndexMap]] = field(default_factory=dict)
    moves: dict[str, object] = field(default_factory=dict)


def learn(
    sources: Sequence[SourceTensor], save_path: SavePath, ranks: Ranks, *, chunk_elements: int = 1 << 21
) -> Projection:
    """Learn and prove the projection; collective over the ranks.

    Args:
        sources: the state dict.
        save_path: makes canonical tensors.
        ranks: that hold the state.
        chunk_elements: elements fitted or compared at a time.

    Raises:
        RefusedError: on every rank alike, naming the tensor, if the save path computes, casts, duplicates, pads or
            depends on values, or if a map does not reproduce the live weights.
    """
    problem, outline = None, _Outline((), {}, {})
    try:
        outline = _outline(sources, save_path, chunk_elements)
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
        group = _Group(tuple(sources[number] for number in numbers), chunk_elements)
        held: list[_Held] = []
        learned = _Learned()
        for source in group.sources:
            gathered = _gathered_positions(source, ranks)
            try:
                held.append(_held(source, gathered, ranks.rank, chunk_elements))
            except RefusedError as error:
                problem = problem or f"state {source.name}: {error}"
            del gathered
        if problem is None:
            try:
                learned = _learn_ids(group, save_path, outline, numbers)
                dtypes |= _prove_moves(group, save_path, learned)
            except RefusedError as error:
                problem = str(error)
        live = [source.full() for source in group.sources]  # the other ranks need this one here, whatever its problem
        if problem is None:
            try:
                pieces = _prove_live(group, save_path, learned, held, live)
            except RefusedError as error:
                problem = str(error)
        if problem is not None:
            continue
        moves |= {f"canonical {name}": digest for name, digest in learned.moves.items()}
        for number, own, part in zip(numbers, pieces, held, strict=True):
            maps[number] = IndexMap(tuple(box for name in own for box in own[name].moved(target=base[name]).boxes))
            parts[number] = part.part
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


def _outline(sources: Sequence[SourceTensor], save_path: SavePath, chunk_elements: int) -> _Outline:
    """One run over the whole state dict, with each source's number in the place of its elements."""
    dtype = torch.int16 if len(sources) <= _SOURCES_NARROW else torch.int32
    numbers = [torch.tensor(n, dtype=dtype).expand(source.tensor.shape) for n, source in enumerate(sources)]
    saved = run_save_path(save_path, sources, numbers)
    leader = list(range(len(sources)))  # of each source's group
    origins: dict[str, tuple[int, ...]] = {}
    for name, tensor in saved.items():
        if tensor.dtype != dtype:
            raise RefusedError(f"canonical {name}: the save path casts {dtype} to {tensor.dtype}; {_ONLY_MOVES}")
        single = tensor.numel() == 0 or all(stride == 0 for stride in tensor.stride())
        chunks = [(0, tensor.reshape(-1)[:1])] if single else row_chunks(tensor, chunk_elements)
        seen = [_distinct(chunk) for _, chunk in chunks]
        drawn = torch.unique(torch.cat(seen)).tolist()
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


def _distinct(numbers: torch.Tensor) -> torch.Tensor:
    """Each number that occurs, once."""
    if numbers.numel() and bool((numbers == numbers[0]).all()):  # as a rule, and found sooner
        return numbers[:1]
    distinct: torch.Tensor = torch.unique(numbers)
    return distinct


def _gathered_positions(source: SourceTensor, ranks: Ranks) -> torch.Tensor | None:
    """Rank times elements plus position in that rank's shard, by the trainer's own gather; None if all hold all.

    Collective.
    """
    if not source.distributed:
        return None
    shape, full = source.local().shape, source.tensor.numel()
    dtype = _NARROW if full * ranks.count <= torch.iinfo(_NARROW).max else _WIDE
    return source.gather(torch.arange(math.prod(shape), dtype=dtype).add_(full * ranks.rank).view(shape))


def _held(source: SourceTensor, gathered: torch.Tensor | None, rank: int, most: int) -> _Held:
    """What this rank holds of a source, from what ``_gathered_positions`` gave."""
    numel, digest, found = source.tensor.numel(), xxhash.xxh3_128(), ChunkedFit()
    if gathered is None:
        digest.update(f"all {numel}".encode())
        return _Held(None, digest.hexdigest())
    for start, chunk in row_chunks(gathered, most):
        ids = chunk.to(torch.int64)
        positions = torch.where(ids // numel == rank, ids % numel, -1)
        digest.update(positions.numpy().data)
        here = (positions >= 0).nonzero().view(-1)
        found.add(here + start, positions[here])
    return _Held(found.result(), digest.hexdigest())


def _learn_ids(group: _Group, save_path: SavePath, outline: _Outline, numbers: Sequence[int]) -> _Learned:
    """Ids through the save path: which source element each canonical element is."""
    *offsets, total = group.offsets
    dtype = _NARROW if total < _FIRST_ID[_NARROW] else _WIDE
    first = _FIRST_ID[dtype]
    saved = run_save_path(
        save_path,
        group.sources,
        [
            torch.arange(first + offset, first + offset + source.tensor.numel(), dtype=dtype).view(source.tensor.shape)
            for offset, source in zip(offsets, group.sources, strict=True)
        ],
    )
    for name, tensor in saved.items():
        whole = outline.shapes.get(name)
        if whole != tuple(tensor.shape):
            raise RefusedError(
                f"canonical {name}: the save path makes it of shape {tuple(tensor.shape)} from "
                f"{group.sources[0].name} alone, but of shape {whole} out of the whole state dict"
            )
        if tensor.dtype != dtype:
            raise RefusedError(f"canonical {name}: the save path casts {dtype} to {tensor.dtype}; {_ONLY_MOVES}")
        for _, chunk in group.chunks(tensor):
            if bool(((chunk < first) | (chunk >= first + total)).any()):
                raise RefusedError(
                    f"canonical {name}: it has elements that are no source element (computed, or padding); "
                    f"{_ONLY_MOVES}"
                )
        if not set(outline.origins[name]) <= set(numbers):
            raise RefusedError(
                f"canonical {name}: the save path makes it from {group.sources[0].name} alone, but from other tensors "
                "out of the whole state dict"
            )
    learned, seen = _Learned(), np.zeros(-(-total // 64), np.uint64)
    while saved:
        name = next(iter(saved))
        learned.moves[name], learned.origins[name] = _learn_name(group, name, saved.pop(name), first, seen)
    return learned


def _learn_name(
    group: _Group, name: str, tensor: torch.Tensor, first: int, seen: npt.NDArray[np.uint64]
) -> tuple[str, dict[int, IndexMap]]:
    """Fit one canonical tensor's ids, and see that the maps give them back: an entry of ``_Learned``.

    Args:
        group: the sources.
        name: of the tensor.
        tensor: its ids.
        first: the first id of the group.
        seen: a bit for each of the group's elements: whether an earlier tensor had it; brought forward.
    """
    # Imported when it is needed: vLLM on a CPU cannot start in a process that has imported llvmlite.
    from dcr.data_plane.kernels import compiled  # noqa: PLC0415

    fits: dict[int, ChunkedFit] = {}
    digest = xxhash.xxh3_128()
    for start, chunk in group.chunks(tensor):
        ids = chunk.to(torch.int64) - first
        if not compiled.mark(seen, ids.numpy()):
            raise RefusedError(
                f"canonical {name}: it repeats source elements, its own or another tensor's (tied names?); "
                f"{_ONLY_MOVES}, so give a save_path that keeps one of them"
            )
        digest.update(ids.numpy().data)
        for number, positions, indices in group.split(ids):
            fits.setdefault(number, ChunkedFit()).add(positions + start, indices)
    origins = {number: found.result() for number, found in fits.items()}
    for start, chunk in group.chunks(tensor):
        for number, positions, indices in group.split(chunk.to(torch.int64) - first):
            exact = maps_exactly(origins[number], positions + start, indices)
            assert exact, "index maps fitted in chunks must hold exactly their pairs"
    return digest.hexdigest(), origins


def _origins(
    origins: Mapping[int, IndexMap], start: int, stop: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of canonical elements [start, stop), by source: its number, positions from ``start``, flat indices in it."""
    wanted = torch.arange(start, stop)
    for number, index_map in origins.items():
        positions, indices = index_map.apply(wanted)
        if positions.numel():
            yield number, positions, indices


def _prove_moves(group: _Group, save_path: SavePath, learned: _Learned) -> dict[str, torch.dtype]:
    """Random bits through the save path must come out as the ids did; returns the canonical dtypes."""
    values = [random_bits(source.tensor, number) for number, source in enumerate(group.sources)]
    saved = run_save_path(save_path, group.sources, values)
    _refuse_other_names(saved, learned)
    flat = [bit_view(value).view(-1) for value in values]
    for name, origins in learned.origins.items():
        for number in origins:
            if saved[name].dtype != values[number].dtype:
                raise RefusedError(
                    f"canonical {name}: the save path casts {values[number].dtype} of {group.sources[number].name} to "
                    f"{saved[name].dtype}; {_ONLY_MOVES}"
                )
        for start, chunk in group.chunks(bit_view(saved[name])):
            for number, positions, indices in _origins(origins, start, start + chunk.numel()):
                if not torch.equal(chunk[positions], flat[number][indices]):
                    raise RefusedError(
                        f"canonical {name}: random bits in {group.sources[number].name} do not come out where ids did, "
                        f"so the save path depends on values or dtypes; {_ONLY_MOVES}"
                    )
    return {name: tensor.dtype for name, tensor in saved.items()}


def _prove_live(
    group: _Group,
    save_path: SavePath,
    learned: _Learned,
    held: Sequence[_Held],
    live: list[torch.Tensor],
) -> list[dict[str, IndexMap]]:
    """Fit this rank's maps and compare the live shards through them with the saved tensors.

    Args:
        group: the sources.
        save_path: makes canonical tensors.
        learned: where canonical elements come from.
        held: by source, what this rank holds.
        live: by source, the full live tensor.

    Returns:
        By source, the maps from this rank's shard to canonical tensors.
    """
    saved = run_save_path(save_path, group.sources, live)
    _refuse_other_names(saved, learned)
    pieces: list[dict[str, IndexMap]] = [{} for _ in group.sources]
    shards = [bit_view(source.local().reshape(-1)) for source in group.sources]
    for name, origins in learned.origins.items():
        canonical = bit_view(saved[name])
        found = _own_maps(origins, held, group, canonical)
        back = {number: index_map.inverse() for number, index_map in found.items()}
        for start, chunk in group.chunks(canonical):
            for number, kept, positions in _origins(back, start, start + chunk.numel()):
                bits = shards[number][positions.to(shards[number].device)].cpu()
                if bits.dtype != chunk.dtype or not torch.equal(bits, chunk[kept]):
                    raise RefusedError(
                        f"canonical {name}: the live bits of {group.sources[number].name} through the projection differ"
                        " from the save path's; do not train while constructing, and check that replicas are identical"
                    )
        for number, index_map in found.items():
            pieces[number][name] = index_map
    return pieces


def _own_maps(
    origins: Mapping[int, IndexMap], held: Sequence[_Held], group: _Group, canonical: torch.Tensor
) -> dict[int, IndexMap]:
    """By source, the map from this rank's shard to a canonical tensor."""
    shared = {number: index_map for number, index_map in origins.items() if held[number].places is not None}

    def pairs() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Chunks of positions in the shard with their canonical indices, which are in order."""
        for start, chunk in group.chunks(canonical) if shared else ():
            for number, positions, indices in _origins(shared, start, start + chunk.numel()):
                ordered, order = _in_order(indices)
                places = held[number].places
                assert places is not None
                kept, sources = places.apply(ordered)
                targets, back = _in_order(positions[order[kept]])
                yield number, sources[back], targets + start

    fits = {number: ChunkedFit() for number in shared}
    for number, sources, targets in pairs():
        fits[number].add(targets, sources)
    back = {**origins, **{number: one.result() for number, one in fits.items()}}
    for number, sources, targets in pairs():
        assert maps_exactly(back[number], targets, sources), "index maps of shards must hold exactly their pairs"
    return {number: index_map.inverse() for number, index_map in back.items()}


def _in_order(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values sorted, and where each was; most are in order already, and looking costs a tenth of sorting."""
    if bool((values[1:] >= values[:-1]).all()):
        return values, torch.arange(values.numel())
    ordered, places = values.sort()
    return ordered, places


def _refuse_other_names(saved: Mapping[str, torch.Tensor], learned: _Learned) -> None:
    for name in sorted(saved.keys() ^ learned.origins.keys()):
        raise RefusedError(f"canonical {name}: whether the save path makes it depends on values or dtypes")
    for name, origins in learned.origins.items():
        if saved[name].numel() != sum(index_map.numel for index_map in origins.values()):
            raise RefusedError(f"canonical {name}: its size depends on values or dtypes")
