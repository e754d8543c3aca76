"""Applying items through the runtime's own loader, in place (paper section 6.1)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dcr.data_plane.bits import bit_view, bits_dtype
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.prewarm import Learned, Load, LoaderClass, Prewarm, learn
from dcr.data_plane.provenance import Source
from dcr.data_plane.resident import PartialWriteError, Residents, stored_bytes
from dcr.data_plane.write_watch import Write, WriteWatch
from dcr.protocol.errors import DcrError, RefusedError

__all__ = ["LoaderClass", "LoaderPath", "PartialWriteError", "Prewarm"]


@dataclass
class _Progress:
    """Whether a resident byte has been written since ``apply`` was called."""

    wrote: bool = False

    def error(self, name: str, reason: str) -> DcrError:
        if self.wrote:
            return PartialWriteError(f"{name}: {reason}; resident storage may be torn, fail the attempt")
        return RefusedError(f"{name}: {reason}; nothing was written")


class _ApplyWatch(WriteWatch):  # type: ignore[no-untyped-call]  # torch's own hook
    """Lets a loader's copies reach active elements only, and only as prewarm learned them."""

    def __init__(self, residents: Residents, item: Item, learned: Learned, progress: _Progress) -> None:
        super().__init__(residents)
        self._item = item
        self._learned = learned
        self._progress = progress
        self.error: DcrError | None = None
        self.writes = 0
        self.copies = 0

    def refuse(self, origins: frozenset[str], reason: str) -> None:  # noqa: ARG002 - one tensor is loaded at a time
        self.error = self.error or self._progress.error(self._item.spec.name, f"the loader {reason}")
        raise self.error

    def _check(self, write: Write) -> int:
        """The position of a write, which must be the one that was learned for it."""
        if self.error is not None:
            raise self.error  # the loader went on after an error
        position = self.writes
        expected = self._learned.writes
        if position >= len(expected) or write != expected[position]:
            self.refuse(
                frozenset(), "writes something else than at prewarm; it keeps state, so prewarm again or restart"
            )
        self.writes += 1
        return position

    def fill(self, write: Write, dst: torch.Tensor) -> None:
        if self._check(write) in self._learned.skip:
            return
        assert write.constant is not None
        self._progress.wrote = True
        bit_view(dst).fill_(write.constant)

    def copy(self, write: Write, dst: torch.Tensor, src: torch.Tensor, source: Source) -> None:
        self._check(write)
        self.copies += 1
        if not bool(source.mask.any()):
            return
        self._progress.wrote = True
        resident = bit_view(dst)
        if self._item.operation is Operation.SET:
            if src.dtype != dst.dtype:
                # The cast runs over the geometry of a dense load: some vector casts of NaN depend on the position.
                cast = torch.empty_strided(dst.shape, dst.stride(), dtype=dst.dtype, device=dst.device)
                src = cast.copy_(src)
            values = bit_view(src).expand(dst.shape).to(dst.device)
            torch.where(source.mask.to(dst.device), values, resident, out=resident)
        else:
            # Inactive elements of the scratch are zero, which changes nothing.
            values = bit_view(src).expand(dst.shape).to(dst.device)
            if self._item.operation is Operation.XOR:
                resident.bitwise_xor_(values)
            else:
                resident.add_(values)


class LoaderPath:
    """The hooked loader path of one rank: scratch, native loader, intercepted copies.

    ::

        path = LoaderPath(model, model.load_weights, specs)
        path.prewarm().raise_if_refused()     # no resident bit changes
        path.apply(items)                     # one item at a time, in place
        path.synchronise()

    Beside resident weights it keeps one scratch of the bytes of the largest canonical tensor that the rank loads, and
    one mask byte for every element of it; while an item is applied, masks of the loader's temporaries and, for a
    transforming copy, the cast values of one copy.

    Args:
        model: the runtime's model on this rank, loaded or not.
        load_weights: its native loader; called in the calling thread, with one canonical tensor at a time.
        specs: every canonical tensor of the checkpoint.
        scratch_device: where the loader finds what it is given; the host, as in a load from a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        load_weights: Load,
        specs: Sequence[TensorSpec],
        *,
        scratch_device: torch.device | str = "cpu",
    ) -> None:
        self._model = model
        self._load = load_weights
        self._specs = {s.name: s for s in specs}
        self._order = tuple(specs)
        self._device = torch.device(scratch_device)
        self._prewarm: Prewarm | None = None
        self._residents = Residents(model)
        self._fingerprint = ""
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._mask = torch.empty(0, dtype=torch.bool, device=self._device)

    def prewarm(self) -> Prewarm:
        """Learn what the loader does with every canonical tensor, and reserve the scratch.

        No resident bit is changed.

        Raises:
            RefusedError, PartialWriteError: see :func:`dcr.data_plane.prewarm.learn`.  Single tensors that cannot be
                refitted do not raise; see :meth:`Prewarm.raise_if_refused`.
        """
        self._prewarm = None
        learned = learn(self._model, self._load, self._order, self._device)
        loaded = [self._specs[n] for n in learned.learned]
        self._scratch = torch.zeros(
            max((s.numel * s.dtype.itemsize for s in loaded), default=0), dtype=torch.uint8, device=self._device
        )
        self._mask = torch.zeros(max((s.numel for s in loaded), default=0), dtype=torch.bool, device=self._device)
        self._residents = Residents(self._model)
        self._prewarm = learned
        self._fingerprint = self.fingerprint()
        return learned

    def fingerprint(self) -> str:
        """Digest of everything the learned writes rest on, hexadecimal.

        Name, address, shape, strides, dtype and device of every resident tensor, and the bits of resident memory that
        the loader consults, such as expert maps.
        """
        now = Residents(self._model)
        h = hashlib.sha256()
        for name, place in sorted(now.layout.items()):
            h.update(f"{name}|{place}\n".encode())
        if self._prewarm is not None and now.layout == self._residents.layout:
            for region in sorted(self._prewarm.consulted, key=lambda r: (r.address, r.size, r.stride)):
                h.update(stored_bytes(now.at(region)).numpy().data)
        return h.hexdigest()

    def apply(self, items: Sequence[Item]) -> int:
        """Apply items in place, one at a time, through the native loader.

        Every item is checked before the first byte is written.

        Returns:
            The number of intercepted copies.

        Raises:
            RefusedError: an item, or the state of the storage, is not what prewarm learned; nothing was written.
            PartialWriteError: the same, noticed after the first byte was written.
        """
        work = [(item, one) for item in items if (one := self._admit(item)) is not None]
        self._check_storage()
        progress = _Progress()
        copies = sum(self._apply_one(item, one, progress) for item, one in work)
        if rebound := self._residents.rebound():
            raise progress.error(rebound[0], "the loader has bound other memory to the name")
        return copies

    def synchronise(self) -> None:
        """Wait until every write has reached resident storage on an accelerator; raises what a write raised there.

        Raises:
            PartialWriteError: a resident tensor is not where and how it was at prewarm.  Captured graphs and compiled
                code hold its old address, and would go on reading that.
        """
        for device in {s.storage.device for s in self._residents.spans if s.storage.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        if moved := self._moved():
            raise PartialWriteError(
                f"{moved[0]} has other memory, shape, strides or dtype than before the update; captured graphs would "
                "not see it; restart the engine"
            )

    def _admit(self, item: Item) -> Learned | None:
        """What was learned for an item; None if it has nothing to do here; RefusedError if it may not be applied."""
        name, spec = item.spec.name, self._specs.get(item.spec.name)
        if self._prewarm is None:
            raise RefusedError(f"item {name}: call prewarm before apply")
        if spec is None:
            raise RefusedError(f"item {name}: no such canonical tensor in this checkpoint")
        if spec != item.spec:
            raise RefusedError(
                f"item {name}: {item.spec.dtype} {item.spec.shape} does not match {spec.dtype} {spec.shape}"
            )
        item.check_indices()
        cls = self._prewarm.classes[name]
        if cls is LoaderClass.REFUSED:
            raise RefusedError(f"item {name}: cannot be refitted in place: {self._prewarm.reasons[name]}")
        if cls is LoaderClass.TRANSFORMING and item.operation is not Operation.SET:
            raise RefusedError(f"item {name}: {item.operation} through a transforming loader; only set is exact")
        return None if cls is LoaderClass.SKIPPED or item.entries == 0 else self._prewarm.learned[name]

    def _check_storage(self) -> None:
        if self._prewarm is None or self.fingerprint() == self._fingerprint:
            return
        moved = self._moved()
        what = moved[0] if moved else "resident memory that the loader consults"
        raise RefusedError(f"{what} moved, was rebound or changed since prewarm; nothing was written, prewarm again")

    def _moved(self) -> list[str]:
        """Names that are not what they were at prewarm, by address, shape, strides, dtype or device."""
        old, new = self._residents.layout, Residents(self._model).layout
        return sorted(set(self._residents.rebound()) | {n for n in old.keys() | new.keys() if old.get(n) != new.get(n)})

    def _apply_one(self, item: Item, learned: Learned, progress: _Progress) -> int:
        spec = item.spec
        flat = self._scratch[: spec.numel * spec.dtype.itemsize]
        bits = flat.view(bits_dtype(spec.dtype))
        where = item.indices.to(self._device)
        bits[where] = item.values.to(self._device)
        self._mask[where] = True
        watch = _ApplyWatch(self._residents, item, learned, progress)
        try:
            canonical = flat.view(spec.dtype).view(spec.shape)
            watch.provenance.track(spec.name, canonical, self._mask)
            with watch.watching():
                got = self._load(iter([(spec.name, canonical)]))
                reported = None if got is None else frozenset(got)
        except Exception as e:
            if watch.error is not None:
                raise watch.error from None
            raise progress.error(spec.name, f"the loader raised {type(e).__name__}: {e}") from e
        finally:
            bits[where] = 0
            self._mask[where] = False
        if watch.error is not None:
            raise watch.error
        if watch.writes != len(learned.writes) or reported != learned.reported:
            raise progress.error(
                spec.name,
                f"the loader made {watch.writes} writes and reported {reported}, at prewarm {len(learned.writes)} and "
                f"{learned.reported}",
            )
        return watch.copies
