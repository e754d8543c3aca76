"""What a runtime does to weights after loading, where it only moves elements: learned on integer ids, then composed.

Kernels may want another layout than the loader's: halves of a fused weight swapped, blocks, padding.  Such a conversion
is run here on ids instead of weights; what comes out says where every element went.  Composed with the boxes of the
loader it gives boxes from the checkpoint to the converted storage, so that an update needs neither the loader nor the
conversion (DESIGN section 5).  A conversion that computes has no such answer, and is refused.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcr.data_plane.bits import bit_view, bits_dtype, unsigned
from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.data_plane.kernels.box_table import PlacedBox
from dcr.protocol.errors import RefusedError

Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A conversion as the runtime does it: tensors in the loader's layout -> tensors as they are served, by the same names.
It may overwrite what it is given."""

CHUNK_ELEMENTS = 1 << 22
"""Elements that are fitted at a time: about ten int64 each."""


@dataclass(frozen=True, eq=False)
class Form:
    """How a tensor looks to its loader: what a stand-in for it needs.

    Attributes:
        shape: its shape in the loader's layout.
        dtype: its dtype there.
        kind: its class.
        attributes: what hangs on it, such as ``weight_loader``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type[torch.Tensor] = nn.Parameter
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form of a tensor that is in the loader's layout."""
        return cls(tuple(tensor.shape), tensor.dtype, type(tensor), dict(vars(tensor)))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def stand_in(self) -> torch.Tensor:
        """A tensor of this form on the host, whose memory costs nothing until it is written."""
        empty = torch.empty(self.shape, dtype=self.dtype)
        made = nn.Parameter(empty, requires_grad=False) if issubclass(self.kind, nn.Parameter) else empty
        if type(made) is not self.kind:
            made.__class__ = self.kind
        vars(made).update(self.attributes)
        return made


@dataclass(frozen=True, eq=False)
class Conversion:
    """What became of one resident tensor after loading.

    Attributes:
        name: its qualified name in the model.
        form: how it looks to the loader.
        shape: its shape as it is served.
        index_map: row-major index in the loader's layout -> row-major index as served; every element has a place.
        padding: row-major indices as served that no element goes to, int64, shape [n], and the stored bits there.
    """

    name: str
    form: Form
    shape: tuple[int, ...]
    index_map: IndexMap
    padding: tuple[torch.Tensor, torch.Tensor]

    @property
    def moves(self) -> bool:
        """Whether any element lies elsewhere, or there is padding."""
        same = Box.of((self.form.numel,), (1,), (1,)) if self.form.numel else None
        return self.shape != self.form.shape or self.index_map.boxes != (() if same is None else (same,))

    def placed(self, served: torch.Tensor) -> IndexMap:
        """Row-major index in the loader's layout -> element of the served tensor's storage, from its first one."""
        rows = Box.of(self.shape, _row_major(self.shape), served.stride()) if served.numel() else None
        moved = [] if rows is None else [b for box in self.index_map.boxes for b in _through(box, IndexMap((rows,)))]
        return IndexMap(tuple(moved))

    def padding_holds(self, served: torch.Tensor) -> bool:
        """Whether the served tensor has its constants where no element goes."""
        indices, bits = self.padding
        return not indices.numel() or bool(
            torch.equal(bit_view(served).flatten()[indices.to(served.device)], bits.to(served.device))
        )


def learn_conversions(convert: Convert, forms: Mapping[str, Form], *, seed: int = 0) -> dict[str, Conversion]:
    """Run a conversion on ids, and say where every element goes.

    Ids are carried in the stored bits, as many runs as their digits need; one run more with one digit inverted tells
    elements from constants, and one with random bits proves the answer: NaN, -0.0 and all.  Needs about 16 bytes an
    element on the host.

    Args:
        convert: the conversion.
        forms: what it is given, by name.
        seed: of the random bits.

    Returns:
        By name; all of them, moved or not.

    Raises:
        RefusedError: it fails, changes a dtype or the names, drops, repeats or joins elements, or computes.
    """
    starts, total = {}, 0
    for name, form in forms.items():
        starts[name], total = total, total + form.numel
    ids: dict[str, torch.Tensor] = {}
    shift = 0
    given = {n: torch.arange(starts[n] + 1, starts[n] + 1 + f.numel) for n, f in forms.items()}
    width = min(32, *(8 * f.dtype.itemsize for f in forms.values()))
    while shift == 0 or total >> shift:
        digits = _run(convert, forms, {n: (i >> shift) & ((1 << width) - 1) for n, i in given.items()})
        if shift == 0:
            inverse = _run(convert, forms, {n: ~i & ((1 << width) - 1) for n, i in given.items()})
            low = digits
        for name, (_, found) in digits.items():
            part = (found & ((1 << width) - 1)) << shift
            ids[name] = ids[name] | part if name in ids else part
        shift += width
    conversions = {}
    for name, form in forms.items():
        shape, first = low[name]
        changed = inverse[name][1]
        constant = first == changed
        if bool((constant | (first ^ changed == (1 << width) - 1)).logical_not().any()):
            raise RefusedError(f"conversion of {name} computes values, so that its result is not a matter of places")
        source = ids[name][~constant] - 1 - starts[name]
        target = (~constant).nonzero().flatten()
        _check_places(name, form, source)
        padding = constant.nonzero().flatten()
        bits = _narrowed(first[padding], form.dtype)
        conversions[name] = Conversion(name, form, shape, _fit(source, target), (padding, bits))
    _prove(convert, forms, conversions, seed)
    return conversions


def _check_places(name: str, form: Form, source: torch.Tensor) -> None:
    if source.numel() and (int(source.min()) < 0 or int(source.max()) >= form.numel):
        raise RefusedError(f"conversion of {name} computes values, or joins elements of several tensors")
    seen = torch.zeros(form.numel, dtype=torch.bool)
    seen[source] = True
    if source.numel() > form.numel:
        raise RefusedError(f"conversion of {name} repeats elements; one place an element can be updated, no more")
    if not bool(seen.all()):
        raise RefusedError(f"conversion of {name} drops {int((~seen).sum())} of its {form.numel} elements")


def _fit(source: torch.Tensor, target: torch.Tensor) -> IndexMap:
    """Boxes of distinct pairs, part by part, so that no part needs much memory."""
    parts = [slice(at, at + CHUNK_ELEMENTS) for at in range(0, source.numel(), CHUNK_ELEMENTS)]
    return IndexMap(tuple(box for part in parts for box in fit(source[part], target[part]).boxes))


def _run(
    convert: Convert, forms: Mapping[str, Form], words: Mapping[str, torch.Tensor]
) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Convert words carried in stored bits; shape and words, int64 and in row-major order, of what comes out."""
    tensors = {n: _narrowed(words[n], f.dtype).view(f.dtype).view(f.shape) for n, f in forms.items()}
    try:
        with torch.no_grad():
            out = convert(tensors)
    except Exception as e:
        raise RefusedError(f"conversion of {', '.join(forms)} failed on ids: {type(e).__name__}: {e}") from e
    if out.keys() != forms.keys():
        raise RefusedError(f"conversion of {', '.join(forms)} gives {', '.join(out)}: tensors are joined or derived")
    for name, tensor in out.items():
        if tensor.dtype != forms[name].dtype:
            raise RefusedError(f"conversion of {name} changes its dtype from {forms[name].dtype} to {tensor.dtype}")
    return {n: (tuple(t.shape), unsigned(bit_view(t.contiguous()).flatten().cpu())) for n, t in out.items()}


def _narrowed(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unsigned words, int64, as stored bits of a dtype."""
    if dtype == torch.bool:
        raise RefusedError("a conversion of booleans cannot be learned: they carry no ids")
    return words.to(bits_dtype(dtype))  # keeps the low bits


def _prove(convert: Convert, forms: Mapping[str, Form], conversions: Mapping[str, Conversion], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = {n: torch.randint(-(1 << 63), (1 << 63) - 1, (f.numel,), generator=generator) for n, f in forms.items()}
    words = {n: unsigned(_narrowed(w, forms[n].dtype)) for n, w in words.items()}
    for name, (shape, found) in _run(convert, forms, words).items():
        one = conversions[name]
        expected = torch.empty_like(found)
        expected[one.padding[0]] = unsigned(one.padding[1])
        for box in one.index_map.boxes:
            source, target = box.expand()
            expected[target] = words[name][source]
        if shape != one.shape or not torch.equal(expected, found):
            raise RefusedError(f"conversion of {name} depends on values: random bits do not go where ids went")


# ---------------------------------------------------------------- composing


def compose(placed: Sequence[PlacedBox], start: int, served: torch.Tensor, conversion: Conversion) -> list[PlacedBox]:
    """Boxes into a stand-in, followed by the conversion: boxes into the served tensor.

    Args:
        placed: boxes of one canonical tensor into the stand-in.
        start: address of the stand-in.
        served: the resident tensor, of the conversion's shape.
        conversion: its conversion.
    """
    width = served.element_size()
    inside, base = conversion.placed(served), served.data_ptr()
    found = []
    for one in placed:
        box = one.box
        loader = Box.of(
            box.sizes,
            box.source_strides,
            [stride // width for stride in box.target_strides],
            box.source_offset,
            (box.target_offset - start) // width,
        )
        for there in _through(loader, inside):
            strides = [stride * width for stride in there.target_strides]
            moved = Box.of(
                there.sizes, there.source_strides, strides, there.source_offset, base + there.target_offset * width
            )
            found.append(PlacedBox(moved, one.widened))
    return found


def _through(box: Box, other: IndexMap) -> list[Box]:
    """A box followed by a map that holds all of its targets; costs its expansion, part by part."""
    if box.numel > CHUNK_ELEMENTS and box.sizes[0] > 1:
        half = box.sizes[0] // 2
        rest = (box.source_offset + half * box.source_strides[0], box.target_offset + half * box.target_strides[0])
        parts = [(half, (box.source_offset, box.target_offset)), (box.sizes[0] - half, rest)]
        return [
            found
            for size, offsets in parts
            for found in _through(
                Box.of((size, *box.sizes[1:]), box.source_strides, box.target_strides, *offsets), other
            )
        ]
    found = IndexMap((box,)).then(other)
    assert found.numel == box.numel, "a conversion has a place for every element"
    return list(found.boxes)


def _row_major(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1][: len(shape)]


# ---------------------------------------------------------------- standing in


@contextlib.contextmanager
def standing_in(model: nn.Module, conversions: Sequence[Conversion]) -> Iterator[dict[int, Conversion]]:
    """Put stand-ins in the loader's layout under the names of converted tensors; yields conversions by their address.

    Raises:
        RefusedError: the model has no such tensor, or one of another shape than the conversion gives.
    """
    bound: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    standing: dict[int, Conversion] = {}
    kept = []
    try:
        for one in conversions:
            table, key = find(model, one.name)
            served = table[key]
            if tuple(served.shape) != one.shape or served.dtype != one.form.dtype:
                raise RefusedError(
                    f"{one.name} is {served.dtype} {tuple(served.shape)}, but its conversion after loading gives "
                    f"{one.form.dtype} {one.shape}: it was converted otherwise"
                )
            bound.append((table, key, served))
            table[key] = one.form.stand_in()
            kept.append(table[key])
            standing[table[key].data_ptr()] = one
        yield standing
    finally:
        for table, key, served in bound:
            table[key] = served


def find(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module keeps a tensor, and under which key; RefusedError if it has none of this name."""
    path, _, key = name.rpartition(".")
    modules = dict(model.named_modules())
    if path in modules:
        held = vars(modules[path])
        for table in (held["_parameters"], held["_buffers"], held):
            if isinstance(table.get(key), torch.Tensor):
                assert isinstance(table, dict)
                return table, key
    raise RefusedError(f"the model has no tensor {name}")
