"""Resident storage: every tensor a model holds, found by address, compared by bits, restored exactly."""

import bisect
import hashlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from dcr.data_plane.region import Region
from dcr.protocol.errors import DcrError


class PartialWriteError(DcrError):
    """Resident bytes were written before something failed: the storage may be torn, and the attempt has failed."""


@dataclass(frozen=True)
class Span:
    """One block of memory that resident tensors share.

    Attributes:
        start: address of the first byte.
        nbytes: length in bytes.
        storage: the storage itself.
        names: the tensors that lie in it, in module order.
    """

    start: int
    nbytes: int
    storage: torch.UntypedStorage
    names: tuple[str, ...]

    def bytes(self) -> torch.Tensor:
        """The memory as uint8, shape [nbytes]; no copy."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


@dataclass(frozen=True)
class _Binding:
    """A name in a module (or in a container that a module holds), the tensor bound to it, and that tensor's memory."""

    name: str
    table: MutableMapping[Any, Any] | None  # None inside a list or tuple
    key: Any
    tensor: torch.Tensor
    memory: torch.Tensor  # a second handle on the same memory, for undoing `tensor.data = ...`

    def replaced(self) -> bool:
        """Whether another object has taken the name."""
        return self.table is not None and self.table.get(self.key) is not self.tensor

    def rebound(self) -> bool:
        """Whether another object, or other memory, has taken the name."""
        t, memory = self.tensor, self.memory
        return self.replaced() or t.data_ptr() != memory.data_ptr() or t.shape != memory.shape

    def restore(self) -> None:
        """Bind the old tensor with its old memory again."""
        if self.table is not None:
            self.table[self.key] = self.tensor
        self.tensor.data = self.memory


def _bindings(model: nn.Module) -> Iterator[_Binding]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        held = module.__dict__
        tables = (held["_parameters"], held["_buffers"], held)
        for table in tables:
            yield from _bound(dot, table)
        for key, value in list(held.items()):
            if isinstance(value, (list, tuple)):
                yield from (
                    _Binding(f"{dot}{key}[{i}]", None, i, t, t.detach())
                    for i, t in enumerate(value)
                    if isinstance(t, torch.Tensor)
                )
            elif type(value) is dict and all(value is not t for t in tables):
                yield from _bound(f"{dot}{key}.", value)


def _bound(prefix: str, table: MutableMapping[Any, Any]) -> Iterator[_Binding]:
    for key, value in list(table.items()):
        if isinstance(value, torch.Tensor):
            yield _Binding(f"{prefix}{key}", table, key, value, value.detach())


class Residents:
    """All tensors of a model: parameters, buffers (persistent or not), plain tensor attributes and those in containers.

    Taken when it is built: it must be built again to see tensors that were moved or rebound.

    Attributes:
        by_name: every tensor by its qualified name.
        layout: where every tensor lies and how: name -> address, shape, strides, dtype and device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bindings = tuple(_bindings(model))
        self.by_name = {b.name: b.tensor for b in self._bindings}
        self.layout = {name: _place(t) for name, t in self.by_name.items()}
        self._spans = _spans(self._bindings)
        self._starts = [s.start for s in self._spans]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The memory blocks, by address."""
        return self._spans

    def span(self, tensor: torch.Tensor) -> Span | None:
        """The block that a tensor's memory lies in, whatever storage object leads to it; None if it is not resident."""
        if tensor.is_meta or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._starts[at] + self._spans[at].nbytes:
            return self._spans[at]
        return None

    def start_of(self, address: int) -> int:
        """Where the block begins that holds an address."""
        return self._starts[bisect.bisect_right(self._starts, address) - 1]

    def holds(self, start: int, end: int) -> bool:
        """Whether the bytes from address ``start`` up to ``end`` lie in one block."""
        at = bisect.bisect_right(self._starts, start) - 1
        return at >= 0 and end <= self._starts[at] + self._spans[at].nbytes

    def owner(self, tensor: torch.Tensor) -> str:
        """A name for a tensor in an error message: the resident tensor it overlaps."""
        span = self.span(tensor)
        if span is None:
            return "memory outside the model"
        for name in span.names:
            held = self.by_name[name]
            if held.data_ptr() <= tensor.data_ptr() < held.data_ptr() + max(held.nbytes, 1):
                return name
        return span.names[0]

    def at(self, region: Region) -> torch.Tensor:
        """The resident memory of a region as a tensor."""
        span = self._spans[bisect.bisect_right(self._starts, region.address) - 1]
        offset = (region.address - span.start) // region.dtype.itemsize
        empty = torch.empty(0, dtype=region.dtype, device=span.storage.device)
        return empty.set_(span.storage, offset, region.size, region.stride)

    def replaced(self) -> list[str]:
        """Names that another tensor object has taken; cheaper than ``rebound``."""
        return [b.name for b in self._bindings if b.replaced()]

    def rebound(self) -> list[str]:
        """Names whose tensor object or memory is no longer the registered one."""
        return [b.name for b in self._bindings if b.rebound()]

    def rebind(self) -> None:
        """Put every registered tensor back under its name, on its registered memory."""
        for b in self._bindings:
            if b.rebound():
                b.restore()

    def checksums(self) -> list[int]:
        """One 64-bit checksum of the bytes of every span; reads all resident memory."""
        return [xxhash.xxh3_64_intdigest(s.bytes().cpu().numpy().data) for s in self._spans]


def _place(t: torch.Tensor) -> str:
    return f"{t.data_ptr()} {tuple(t.shape)} {t.stride()} {t.dtype} {t.device}"


def _spans(bindings: tuple[_Binding, ...]) -> tuple[Span, ...]:
    found: dict[int, tuple[torch.UntypedStorage, list[str]]] = {}
    for b in bindings:
        storage = b.tensor.untyped_storage()
        if b.tensor.is_meta or not storage.nbytes():
            continue
        known = found.setdefault(storage.data_ptr(), (storage, []))
        if storage.nbytes() > known[0].nbytes():
            found[storage.data_ptr()] = known = (storage, known[1])
        known[1].append(b.name)
    return tuple(
        Span(start, storage.nbytes(), storage, tuple(names)) for start, (storage, names) in sorted(found.items())
    )


class Snapshot:
    """A host copy of every resident byte and binding, for undoing what a loader did behind the watch."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._copies = [(s, s.bytes().to("cpu", copy=True)) for s in residents.spans]

    def changed(self) -> list[str]:
        """Names of rebound tensors and of tensors in memory whose bytes differ from the copy."""
        names = self._residents.rebound()
        for span, copy in self._copies:
            if not torch.equal(span.bytes().cpu(), copy):
                names.extend(n for n in span.names if n not in names)
        return names

    def restore(self) -> None:
        """Put every byte and binding back."""
        self._residents.rebind()
        for span, copy in self._copies:
            span.bytes().copy_(copy)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def resident_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Host copies of the stored bits of every parameter and buffer, non-persistent buffers included.

    Returns:
        Name -> uint8, shape [numel * itemsize], in the tensor's logical (row-major) order.
    """
    return {name: stored_bytes(t).clone() for name, t in _named(model)}


def resident_digests(model: nn.Module) -> dict[str, str]:
    """A digest of the stored bits of every parameter and buffer, non-persistent buffers included.

    Returns:
        Name -> 32 hexadecimal digits over dtype, shape and stored bits; independent of strides and device.
    """
    digests = {}
    for name, t in _named(model):
        h = hashlib.blake2b(f"{t.dtype}|{tuple(t.shape)}|".encode(), digest_size=16)
        h.update(stored_bytes(t).numpy().data)
        digests[name] = h.hexdigest()
    return digests


def stored_bytes(t: torch.Tensor) -> torch.Tensor:
    """A tensor's stored bits on the host, in logical (row-major) order: uint8, shape [numel * itemsize]."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
