"""Applying items through the runtime's own loader: scratch, load call, intercepted copies (paper section 6.1)."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dcr.data_plane.bits import bit_view, bits_dtype
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.placement.prewarm import Learned, Load, LoadCall
from dcr.data_plane.placement.provenance import Source
from dcr.data_plane.placement.write_watch import Write, WriteWatch
from dcr.data_plane.region import Region
from dcr.data_plane.resident import PartialWriteError, Residents
from dcr.protocol.errors import DcrError, RefusedError

_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass
class Progress:
    """Whether a resident byte has been written since ``apply`` was called."""

    wrote: bool = False

    def error(self, what: str, reason: str) -> DcrError:
        """PartialWriteError if a byte was written, else RefusedError."""
        if self.wrote:
            return PartialWriteError(f"{what}: {reason}; resident storage may be torn, fail the attempt")
        return RefusedError(f"{what}: {reason}; nothing was written")


@dataclass(frozen=True)
class _Active:
    """What one load call applies of one tensor: entries of one operation, by item, as (indices, values)."""

    operation: Operation
    entries: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


_NOTHING = _Active(Operation.SET)


class _ApplyWatch(WriteWatch):  # type: ignore[no-untyped-call]  # torch's own hook
    """Lets a loader's copies reach active elements only, and only as prewarm learned them."""

    def __init__(
        self,
        residents: Residents,
        call: LoadCall,
        skip: frozenset[int],
        active: Mapping[str, _Active],
        progress: Progress,
    ) -> None:
        super().__init__(residents)
        self._call = call
        self._skip = skip
        self._active = active
        self._progress = progress
        self.error: DcrError | None = None
        self.writes = 0

    def refuse(self, origins: frozenset[str], reason: str) -> None:
        name = min(origins, default=self.current or "the loader")
        self.error = self.error or self._progress.error(name, f"the loader {reason}")
        raise self.error

    def _check(self, write: Write) -> int:
        """The position of a write, which must be the one that was learned for it."""
        if self.error is not None:
            raise self.error  # the loader went on after an error
        position = self.writes
        steps = self._call.steps
        if position >= len(steps) or write != steps[position][1]:
            self.refuse(
                frozenset(), "writes something else than at prewarm; it keeps state, so prewarm again or restart"
            )
        self.writes += 1
        return position

    def fill(self, write: Write, dst: torch.Tensor) -> None:
        position = self._check(write)
        if position in self._skip or self._call.steps[position][0] not in self._active:
            return
        assert write.constant is not None
        self._progress.wrote = True
        bit_view(dst).fill_(write.constant)

    def copy(self, write: Write, dst: torch.Tensor, src: torch.Tensor, source: Source) -> None:
        self._check(write)
        active = self._active.get(write.origin)
        if active is None:
            return
        self._progress.wrote = True
        if active.operation is Operation.SET:
            if src.dtype != dst.dtype:
                # The cast runs over the geometry of a dense load: some vector casts of NaN depend on the position.
                cast = torch.empty_strided(dst.shape, dst.stride(), dtype=dst.dtype, device=dst.device)
                src = cast.copy_(src)
            resident = bit_view(dst)
            values = bit_view(src).expand(dst.shape).to(dst.device)
            torch.where(source.mask.to(dst.device), values, resident, out=resident)
            return
        resident = bit_view(dst) if src.dtype == dst.dtype else self._high_halves(write.region, src.dtype)
        # Inactive elements of the scratch are zero, which changes nothing.
        values = bit_view(src).expand(dst.shape).to(dst.device)
        if active.operation is Operation.XOR:
            resident.bitwise_xor_(values)
        else:
            resident.add_(values)

    def _high_halves(self, region: Region, dtype: torch.dtype) -> torch.Tensor:
        """The memory of a widening copy as elements of the narrower dtype's bits, for differences (little-endian)."""
        step = region.dtype.itemsize // dtype.itemsize
        strides = tuple(s * step for s in region.stride)
        high = region.address + region.dtype.itemsize - dtype.itemsize
        return self.residents.at(Region(high, region.size, strides, bits_dtype(dtype)))


class Scratch:
    """Host memory for one canonical tensor and its mask, grown to the largest that asks and kept; zero between uses.

    NumPy's, because the loader pulls tensors while its torch calls are being watched.

    Attributes:
        bytes: uint8.
        mask: bool, one for every element.
    """

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self.mask = np.zeros(0, np.bool_)

    def reserve(self, specs: Sequence[TensorSpec]) -> None:
        """Have room for each of some tensors."""
        nbytes = max((s.numel * s.dtype.itemsize for s in specs), default=0)
        numel = max((s.numel for s in specs), default=0)
        if nbytes > self.bytes.size:
            self.bytes = np.zeros(nbytes, np.uint8)
        if numel > self.mask.size:
            self.mask = np.zeros(numel, np.bool_)


class HookedLoad:
    """One learned load call, repeated with the entries of some items.

    Every tensor of the call is given to the loader; in the scratch of one without entries nothing is active.  A loader
    that streams is given the same scratch again for every tensor; one that does not gets memory for all of them.

    Attributes:
        names: the tensors that it loads.

    Args:
        residents: the model's storage.
        load: the native loader.
        call: what was learned of it.
        specs: of the tensors of the call, and more.
        learned: the writes of its tensors.
        scratch: for a loader that streams.
    """

    def __init__(
        self,
        residents: Residents,
        load: Load,
        call: LoadCall,
        specs: Mapping[str, TensorSpec],
        learned: Mapping[str, Learned],
        *,
        scratch: Scratch,
    ) -> None:
        self._residents = residents
        self._load = load
        self._call = call
        self.names = frozenset(call.names)
        self._specs = [specs[name] for name in call.names]
        self._skip = _skipped(call, learned)
        self._scratch = scratch
        if call.streams:
            scratch.reserve(self._specs)

    def apply(self, items: Sequence[Item], progress: Progress) -> None:
        """Apply items of the call's tensors; those of one tensor have no index in common.

        Args:
            items: checked ones.
            progress: told when the first byte is written.

        Raises:
            RefusedError: the loader did something else than at prewarm; nothing was written.
            PartialWriteError: the same after the first byte.
        """
        for active in _rounds(items):
            self._round(active, progress)

    def _round(self, active: Mapping[str, _Active], progress: Progress) -> None:
        watch = _ApplyWatch(self._residents, self._call, self._skip, active, progress)
        feed = self._feed(watch, active)
        try:
            with watch.watching():
                got = self._load(feed)
                reported = None if got is None else frozenset(got)
        except Exception as e:
            if watch.error is not None:
                raise watch.error from None
            what = watch.current or self._call.names[0]
            raise progress.error(what, f"the loader raised {type(e).__name__}: {e}") from e
        finally:
            feed.close()
        if watch.error is not None:
            raise watch.error
        if watch.writes != len(self._call.steps) or reported != self._call.reported:
            raise progress.error(
                next(iter(active)),
                f"the loader made {watch.writes} writes and reported {_shown(reported)}, at prewarm "
                f"{len(self._call.steps)} and {_shown(self._call.reported)}",
            )

    def _feed(
        self, watch: _ApplyWatch, active: Mapping[str, _Active]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        for spec in self._specs:
            scratch = self._scratch
            if self._call.streams:
                watch.forget()
            else:
                scratch = Scratch()
                scratch.reserve([spec])
            flat, mask = scratch.bytes[: spec.numel * spec.dtype.itemsize], scratch.mask[: spec.numel]
            bits = flat.view(_WORDS[spec.dtype.itemsize])
            one = active.get(spec.name, _NOTHING)
            try:
                for where, values in one.entries:
                    bits[where] = values
                    if one.operation is Operation.SET:  # for differences, zero is inactive
                        mask[where] = True
                canonical = torch.from_numpy(flat).view(spec.dtype).view(spec.shape)
                watch.give(spec.name, canonical, torch.from_numpy(mask))
                yield spec.name, canonical
            finally:
                if self._call.streams:
                    for where, _ in one.entries:
                        bits[where] = 0
                        if one.operation is Operation.SET:
                            mask[where] = False


def _shown(reported: frozenset[str] | None) -> str:
    return "nothing" if reported is None else ", ".join(sorted(reported)[:8]) or "no tensor"


def _skipped(call: LoadCall, learned: Mapping[str, Learned]) -> frozenset[int]:
    """Positions of the fills in a call that a refit leaves out."""
    seen: dict[str, int] = {}
    skip = set()
    for position, (name, _) in enumerate(call.steps):
        nth = seen.get(name, 0)
        seen[name] = nth + 1
        if nth in learned[name].skip:
            skip.add(position)
    return frozenset(skip)


def _rounds(items: Sequence[Item]) -> list[dict[str, _Active]]:
    """Items in as few load calls as there are operations on one tensor."""
    rounds: list[dict[str, _Active]] = []
    for item in items:
        entries = (item.indices.cpu().numpy(), item.values.cpu().numpy())
        for active in rounds:
            one = active.setdefault(item.spec.name, _Active(item.operation))
            if one.operation is item.operation:
                one.entries.append(entries)
                break
        else:
            rounds.append({item.spec.name: _Active(item.operation, [entries])})
    return rounds
