"""The dispatch mode that sees every storage write of a native loader (paper section 6.1)."""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dcr.data_plane.bits import bit_view, bits_dtype
from dcr.data_plane.placement.provenance import ELEMENTWISE, Provenance, Source, UntraceableError, combine, storage_id
from dcr.data_plane.region import Region
from dcr.data_plane.resident import Residents
from dcr.protocol.errors import RefusedError


@dataclass(frozen=True)
class Write:
    """One storage write, as far as it must be the same whenever the same canonical tensor is loaded.

    Attributes:
        region: the resident memory that is written.
        constant: bit pattern that a fill writes; None for a copy.
        lineage: which canonical elements a copy writes, in what arrangement.
        origin: the canonical tensor that a copy writes from; empty for a fill.
        steps: the operations between the canonical tensor and the copy.
        direct: the copy's input is a view of the canonical tensor's storage.
        dtype: the dtype of the copy's input.
        view: of a direct copy, offset and strides, in elements, of its input seen in the shape of ``region``.
    """

    region: Region
    constant: int | None
    lineage: tuple[Any, ...] = ()
    origin: str = ""
    steps: tuple[str, ...] = ()
    direct: bool = False
    dtype: torch.dtype | None = None
    view: tuple[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class _Traits:
    """What a schema says about an operation."""

    name: str  # without namespace
    is_view: bool
    written: tuple[tuple[int, str], ...]  # position and name of every argument that is written


@functools.cache
def _traits(func: Any) -> _Traits:
    schema = func._schema  # noqa: SLF001 - the only way to a schema
    written = tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    return _Traits(schema.name.split("::")[-1], func.is_view, written)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for v in values:
        if isinstance(v, torch.Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _tensors(v)


# Ways from a tensor to its raw memory that a dispatch mode does not see.
_RAW = frozenset({"numpy", "tolist", "__array__", "__dlpack__", "apply_", "map_", "map2_"})


class _RawMemoryGuard(TorchFunctionMode):
    """Refuses to hand out raw memory of resident or canonical tensors, and to rebind a resident tensor's memory."""

    def __init__(self, watch: "WriteWatch") -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _RAW or (name == "__set__" and getattr(func.__self__, "__name__", "") == "data"):
            self._watch.check_raw(args[0], f"tensor.{name}()" if name in _RAW else "assignment to tensor.data")
        return func(*args, **(kwargs or {}))


class WriteWatch(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]  # torch's own hook
    """Watches one load call at a time; subclasses say what happens to each write.

    Everything the loader's own thread does to a tensor passes here.  Reads and moves of canonical values are followed
    by :class:`Provenance`; what cannot be followed goes to :meth:`refuse`.

    Attributes:
        current: the canonical tensor that the loader was given last; empty before the first.
        consulted: resident memory that was read and is not a region written in the same call, and ``current`` then.
        refused_regions: resident memory that a refused operation would have written.
    """

    def __init__(self, residents: Residents) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own constructor
        self.residents = residents
        self.provenance = Provenance()
        self.current = ""
        self.consulted: set[tuple[str, Region]] = set()
        self.refused_regions: set[Region] = set()
        self._written: dict[Region, Source] = {}
        self._fresh: dict[int, torch.UntypedStorage] = {}

    # What subclasses decide.

    @abstractmethod
    def copy(self, write: Write, dst: torch.Tensor, src: torch.Tensor, source: Source) -> None:
        """A copy of canonical elements into resident memory; ``source`` has the shape of ``dst``."""

    @abstractmethod
    def fill(self, write: Write, dst: torch.Tensor) -> None:
        """A constant written into resident memory."""

    @abstractmethod
    def refuse(self, origins: frozenset[str], reason: str) -> None:
        """Something that cannot be handled exactly; empty ``origins``: not traced to a canonical tensor."""

    # The watch itself.

    def give(self, name: str, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        """Note that the loader is given the canonical tensor ``name``; ``mask`` as :meth:`Provenance.track` has it."""
        self.current = name
        self.provenance.track(name, tensor, mask)

    def forget(self) -> None:
        """Let go of all that is known of this call's tensors; for a loader that keeps nothing of what it was given."""
        self.provenance.forget()
        self._written.clear()
        self._fresh.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one load call."""
        self.provenance.begin()
        self._written.clear()
        self.consulted.clear()
        self.current = ""
        with torch.no_grad(), _RawMemoryGuard(self), self:
            yield
        self._written.clear()
        self._fresh.clear()

    def check_raw(self, tensor: torch.Tensor, how: str) -> None:
        """Refuse raw access to memory whose reads and writes must be seen."""
        origins = frozenset[str]()
        if self.residents.span(tensor) is not None:
            if how == "tensor.tolist()" and self.source_of(tensor) is None:
                return  # read as it was before the call, and noted
            what = f"resident {self.residents.owner(tensor)}"
        elif self.provenance.knows(tensor):
            what = "canonical values"
            with contextlib.suppress(UntraceableError):
                source = self.provenance.source(tensor)
                origins = source.origins if source else origins
        else:
            return
        if self.residents.span(tensor) is not None:
            self.refused_regions.add(Region.of(tensor))
        reason = f"{how} reaches {what} past the watch"
        self.refuse(origins, reason)
        raise RefusedError(f"the loader was stopped: {reason}")

    def source_of(self, tensor: torch.Tensor) -> Source | None:
        """Where a tensor's elements came from.

        Resident memory counts as canonical where the same region was written in this call; all else is noted as
        consulted, and prewarm refuses a loader that consults what a load writes.
        """
        if tensor.numel() == 0:
            return None
        if self.residents.span(tensor) is None:
            return self.provenance.source(tensor)
        region = Region.of(tensor)
        if region not in self._written:
            self.consulted.add((self.current, region))
        return self._written.get(region)

    def _name(self, tensor: torch.Tensor) -> str:
        return self.residents.owner(tensor)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _traits(func)
        if traits.is_view:
            return func(*args, **kwargs)
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in traits.written]
        targets = [t for t in _tensors(written) if t.numel()]
        try:
            if any(self.residents.span(t) is not None for t in targets):
                self._resident_write(traits.name, args, kwargs)
                return written[0]
            return self._plain(func, traits, args, kwargs, targets)
        except UntraceableError as e:
            self.refused_regions.update(Region.of(t) for t in targets if self.residents.span(t) is not None)
            self.refuse(e.origins, e.reason)
            return written[0] if targets else func(*args, **kwargs)

    def _temporary(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor) in self._fresh or self.provenance.knows(tensor)

    def _origins(self, values: Iterable[Any]) -> frozenset[str]:
        found = frozenset[str]()
        for t in _tensors(values):
            with contextlib.suppress(UntraceableError):
                source = self.source_of(t)
                found |= source.origins if source else frozenset()
        return found

    def _plain(self, func: Any, traits: _Traits, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Any:
        """An operation that writes no resident memory: run it and follow the canonical values through it."""
        if not all(self._temporary(t) for t in targets):
            origins = self._origins((*args, *kwargs.values()))
            raise UntraceableError(origins, f"writes memory outside the model with {traits.name}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UntraceableError(frozenset(), f"draws random numbers with {traits.name}")
        reads = list(_tensors((*args, *kwargs.values())))
        if traits.name in {"copy_", "fill_", "zero_"}:
            reads = reads[1:]  # the old values of what is overwritten do not matter
        elif traits.name.endswith("_like") or traits.name.startswith("new_"):
            reads = []  # only shape and dtype matter
        sources = {id(t): s for t in reads if (s := self.source_of(t)) is not None}
        scalars = tuple(a for a in args if isinstance(a, (bool, int, float)))
        known = any(self.provenance.knows(t) for t in targets)
        if not sources and not known:
            out = func(*args, **kwargs)
            for t in _tensors([out]):
                if self.residents.span(t) is None:
                    self._fresh[storage_id(t)] = t.untyped_storage()
            return out
        if not targets:
            if traits.name in {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}:
                self.provenance.derive(traits.name, args, sources, scalars, None)  # refuses before a meta value is read
            out = func(*args, **kwargs)
            self.provenance.derive(traits.name, args, sources, scalars, out)
            return out
        target = args[0]
        source = self._in_place(traits.name, target, list(sources.values()), scalars)
        self.provenance.assign(target, source)
        return func(*args, **kwargs)

    def _in_place(
        self, name: str, target: torch.Tensor, sources: list[Source], scalars: tuple[Any, ...]
    ) -> Source | None:
        """What a temporary holds after an in-place operation."""
        if name == "copy_":
            return sources[0].expand(target.shape) if sources else None
        if name in {"fill_", "zero_"} and not sources:
            return None
        if name.removesuffix("_") in ELEMENTWISE and name.endswith("_") and sources:
            return combine(name, sources, tuple(target.shape), scalars)
        origins = frozenset[str]().union(*(s.origins for s in sources))
        raise UntraceableError(origins, f"writes a temporary with {name}, which is not understood")

    def _resident_write(self, name: str, args: Any, kwargs: Any) -> None:
        if name in {"fill_", "zero_"}:
            self._resident_fill(args[0], args[1] if len(args) > 1 else kwargs.get("value", 0))
            return
        if name != "copy_":
            origins = self._origins((*args, *kwargs.values()))
            where = next(self._name(t) for t in _tensors((*args, *kwargs.values())) if self.residents.span(t))
            raise UntraceableError(origins, f"writes {where} with {name}, which is not understood")
        dst, src = args[0], args[1]
        source = self.source_of(src)
        if source is None:
            raise UntraceableError(frozenset(), f"copies values of no canonical tensor into {self._name(dst)}")
        source = source.expand(dst.shape)
        (origin,) = source.origins
        region = _writable(dst, self._name(dst), source.origins)
        earlier = self._written.get(region)
        if earlier is not None and earlier.lineage != source.lineage:
            raise UntraceableError(
                source.origins | earlier.origins, f"writes {self._name(dst)} twice, from different elements"
            )
        seen = src.expand(dst.shape)
        view = (int(seen.storage_offset()), seen.stride()) if source.direct else None
        write = Write(region, None, source.lineage, origin, source.steps, source.direct, src.dtype, view)
        self.copy(write, dst, src, source)
        self._written[region] = Source(source.mask, source.lineage, source.origins, source.steps, direct=False)

    def _resident_fill(self, dst: torch.Tensor, value: Any) -> None:
        if isinstance(value, torch.Tensor) and (source := self.source_of(value)) is not None:
            raise UntraceableError(source.origins, f"fills {self._name(dst)} with a canonical value")
        region = _writable(dst, self._name(dst), frozenset())
        if isinstance(value, torch.Tensor):
            value = value.item()
        pattern = bit_view(torch.full((1,), value, dtype=dst.dtype))
        self.fill(Write(region, int(pattern)), dst)


def _writable(dst: torch.Tensor, name: str, origins: frozenset[str]) -> Region:
    region = Region.of(dst)
    try:
        bits_dtype(dst.dtype)
    except RefusedError as e:
        raise UntraceableError(origins, f"writes {name}: {e}") from e
    if region.hits_itself:
        raise UntraceableError(origins, f"writes {name} through a view whose elements share memory")
    return region
