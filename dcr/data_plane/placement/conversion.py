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

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.data_plane.kernels.box_table import PlacedBox
from dcr.data_plane.placement.regular_fit import fit_regular, strided
from dcr.protocol.errors import RefusedError

Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A conversion as the runtime does it: tensors in the loader's layout -> tensors as they are served, by the same names.
It may overwrite what it is given."""

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Words = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


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

    @property
    def unit(self) -> int:
        """Elements of one slice along the first dimension, such as an expert."""
        return max(torch.Size(self.shape[1:]).numel(), 1)

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

    def reached(self, served: torch.Tensor) -> Ints:
        """Of every row-major index in the loader's layout: the element of the served tensor's storage, from its first.

        Eight bytes an element.
        """
        where = np.empty(self.form.numel, np.int64)
        for box in self.index_map.boxes:
            targets = strided(where, box.source_offset, box.sizes, box.source_strides)
            targets[...] = box.target_offset
            for dim, (size, stride) in enumerate(zip(box.sizes, box.target_strides, strict=True)):
                targets += (np.arange(size) * stride).reshape(-1, *(1,) * (len(box.sizes) - dim - 1))
        if served.is_contiguous():
            return where
        places = zip(self.shape, _row_major(self.shape), served.stride(), strict=True)
        return sum((where // step % size * stride for size, step, stride in places), np.zeros_like(where))

    def padding_holds(self, served: torch.Tensor) -> bool:
        """Whether the served tensor has its constants where no element goes."""
        indices, bits = self.padding
        return not indices.numel() or bool(
            torch.equal(bit_view(served).flatten()[indices.to(served.device)], bits.to(served.device))
        )


def learn_conversions(convert: Convert, forms: Mapping[str, Form], *, seed: int = 0) -> dict[str, Conversion]:
    """Run a conversion on ids, and say where every element goes.

    Ids are carried in the stored bits, as many runs as their digits need; one run more with one digit inverted tells
    elements from constants, and one with random bits proves the answer: NaN, -0.0 and all.  Needs about 32 bytes an
    element on the host, beside what the conversion itself does.

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
        if form.dtype == torch.bool:
            raise RefusedError("a conversion of booleans cannot be learned: they carry no ids")
        starts[name], total = total, total + form.numel
    wide = np.uint64 if total >> 32 else np.uint32
    digit = _UNSIGNED[min(4, *(f.dtype.itemsize for f in forms.values()))]
    digits = np.dtype(wide).itemsize // np.dtype(digit).itemsize

    def run(number: int, *, inverted: bool = False) -> dict[str, _Out]:
        words = {}
        for name, form in forms.items():
            ids = np.arange(starts[name] + 1, starts[name] + 1 + form.numel, dtype=wide)
            part = ids.view(digit)[number::digits]
            words[name] = (~part if inverted else part).astype(_UNSIGNED[form.dtype.itemsize])
        return _run(convert, forms, words)

    low, inverse = run(0), run(0, inverted=True)
    found = {name: np.zeros(one.words.size, wide) for name, one in low.items()}
    for number in range(digits):
        if total >> (8 * np.dtype(digit).itemsize * number):
            for name, one in (run(number) if number else low).items():
                found[name].view(digit)[number::digits] = one.words  # keeps the low bits
    conversions = {}
    for name, form in forms.items():
        shape, first = low[name].shape, low[name].words
        constant = first == inverse[name].words
        if not bool((constant | (first ^ inverse[name].words == np.iinfo(digit).max)).all()):
            raise RefusedError(f"conversion of {name} computes values, so that its result is not a matter of places")
        padding = np.flatnonzero(constant)
        where = _places(name, form, found.pop(name), constant if padding.size else None, starts[name] + 1)
        bits = torch.from_numpy(first[padding].view(_signed(form.dtype)))
        conversions[name] = Conversion(
            name, form, shape, fit_regular(where, unit=form.unit), (torch.from_numpy(padding), bits)
        )
    _prove(convert, forms, conversions, seed)
    return conversions


@dataclass(frozen=True)
class _Out:
    """What came out of a conversion: shape, and stored bits in row-major order, unsigned."""

    shape: tuple[int, ...]
    words: Words


def _places(name: str, form: Form, ids: Words, constant: npt.NDArray[np.bool_] | None, first: int) -> Ints:
    """Row-major index in the loader's layout -> row-major index as served, of ids that count from ``first``."""
    target = np.arange(ids.size) if constant is None else np.flatnonzero(~constant)
    source = (ids if constant is None else ids[target]).astype(np.int64) - first
    if source.size and (int(source.min()) < 0 or int(source.max()) >= form.numel):
        raise RefusedError(f"conversion of {name} computes values, or joins elements of several tensors")
    if source.size > form.numel:
        raise RefusedError(f"conversion of {name} repeats elements; one place an element can be updated, no more")
    where = np.full(form.numel, -1)
    where[source] = target
    if dropped := int((where < 0).sum()):
        raise RefusedError(f"conversion of {name} drops {dropped} of its {form.numel} elements")
    return where


def _run(convert: Convert, forms: Mapping[str, Form], words: Mapping[str, Words]) -> dict[str, _Out]:
    """Convert words carried in stored bits, unsigned and of each dtype's width."""
    tensors = {
        n: torch.from_numpy(words[n].view(_signed(f.dtype))).view(f.dtype).view(f.shape) for n, f in forms.items()
    }
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
    flat = {n: bit_view(t.contiguous()).flatten().cpu().numpy() for n, t in out.items()}
    return {n: _Out(tuple(t.shape), flat[n].view(_UNSIGNED[t.dtype.itemsize])) for n, t in out.items()}


def _signed(dtype: torch.dtype) -> npt.DTypeLike:
    """NumPy's name of ``bits_dtype``."""
    return np.uint8 if dtype.itemsize == 1 else np.dtype(f"i{dtype.itemsize}")


def _prove(convert: Convert, forms: Mapping[str, Form], conversions: Mapping[str, Conversion], seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = {n: _UNSIGNED[f.dtype.itemsize] for n, f in forms.items()}
    words = {n: rng.integers(0, np.iinfo(kinds[n]).max, f.numel, kinds[n], endpoint=True) for n, f in forms.items()}
    for name, out in _run(convert, forms, {n: w.copy() for n, w in words.items()}).items():
        one = conversions[name]
        expected = ~out.words  # what no box and no padding reaches is wrong
        if expected.size == one.padding[0].numel() + forms[name].numel:
            expected[one.padding[0].numpy()] = one.padding[1].numpy().view(kinds[name])
            for box in one.index_map.boxes:
                target = strided(expected, box.target_offset, box.sizes, box.target_strides)
                target[...] = strided(words[name], box.source_offset, box.sizes, box.source_strides)
        if out.shape != one.shape or not np.array_equal(expected, out.words):
            raise RefusedError(f"conversion of {name} depends on values: random bits do not go where ids went")


# ---------------------------------------------------------------- composing


def compose(placed: Sequence[PlacedBox], start: int, served: torch.Tensor, reached: Ints) -> list[PlacedBox]:
    """Boxes into a stand-in, followed by the conversion: boxes into the served tensor.

    Args:
        placed: boxes of one canonical tensor into the stand-in.
        start: address of the stand-in.
        served: the resident tensor, of the conversion's shape.
        reached: its conversion's ``reached(served)``.
    """
    width, base = served.element_size(), served.data_ptr()
    found = []
    for one in placed:
        box = one.box
        strides = tuple(stride // width for stride in box.target_strides)
        targets = strided(reached, (box.target_offset - start) // width, box.sizes, strides).reshape(-1)
        low, high = box.source_bounds
        if high - low + 1 == box.numel:
            unit = box.numel // box.sizes[0] if box.sizes else 1
            moved = fit_regular(targets, first=low, unit=unit)
        else:
            moved = fit(box.expand()[0], torch.from_numpy(np.ascontiguousarray(targets)))
        for there in moved.boxes:
            steps = [stride * width for stride in there.target_strides]
            address = base + there.target_offset * width
            at = Box.of(there.sizes, there.source_strides, steps, there.source_offset, address)
            found.append(PlacedBox(at, one.widened))
    return found


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
