"""One load call over probes: which writes a loader makes, seen without changing a resident bit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.prewarm import Load
from dcr.data_plane.placement.provenance import Source
from dcr.data_plane.placement.thread_watch import count_started_threads
from dcr.data_plane.placement.write_watch import Write, WriteWatch
from dcr.data_plane.region import Region
from dcr.data_plane.resident import Residents, Snapshot


@dataclass(frozen=True)
class Mode:
    """How the loader is run.

    Attributes:
        real: probes have values, and resident memory is compared with a copy of it afterwards.
        execute: writes happen, and are undone; else they are withheld.
    """

    real: bool = False
    execute: bool = False


MODES = (Mode(), Mode(real=True), Mode(real=True, execute=True))
"""In the order in which they are tried: the first needs no memory, the last suits every loader."""


@dataclass
class Refusal:
    """Something that a watch could not follow: the tensors it came from, the one given last, and what it was."""

    origins: frozenset[str]
    current: str
    reason: str


@dataclass
class Call:
    """What one load call did.

    Attributes:
        names: the canonical tensors that it was given.
        error: what the loader raised, or empty.
        reported: what it returned, as a set; None if it returned None.
        steps: its writes in order, each with the tensor it came from, or, for a fill, that was given last.
        streams: see :attr:`LoadCall.streams`.
        refusals: what could not be followed.
        refused_regions: resident memory that a refused operation would have written, or that was written unseen.
        consulted: resident memory that was read, with the tensor given last.
        past_the_watch: what it changed without the watch seeing it, or empty.
        threads: how many threads it started.
    """

    names: tuple[str, ...]
    error: str = ""
    reported: frozenset[str] | None = frozenset()
    steps: tuple[tuple[str, Write], ...] = ()
    streams: bool = True
    refusals: list[Refusal] = field(default_factory=list)
    refused_regions: set[Region] = field(default_factory=set)
    consulted: frozenset[tuple[str, Region]] = frozenset()
    past_the_watch: str = ""
    threads: int = 0

    def writes(self) -> dict[str, tuple[Write, ...]]:
        """The writes of every tensor that has some."""
        found: dict[str, list[Write]] = {}
        for name, write in self.steps:
            found.setdefault(name, []).append(write)
        return {name: tuple(writes) for name, writes in found.items()}


class _LearnWatch(WriteWatch):  # type: ignore[no-untyped-call]  # torch's own hook
    """Records writes.  Withholds them, or (``execute``) lets them happen and can undo them."""

    def __init__(self, residents: Residents, *, execute: bool) -> None:
        super().__init__(residents)
        self.steps: list[tuple[str, Write]] = []
        self.streams = True
        self.exhausted = False  # whether the loader has asked for more than there are
        self.refusals: list[Refusal] = []
        self._execute = execute
        self._journal: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def copy(self, write: Write, dst: torch.Tensor, src: torch.Tensor, source: Source) -> None:  # noqa: ARG002 - the mask is for applying
        self.steps.append((write.origin, write))
        self.streams = self.streams and write.origin == self.current and not self.exhausted
        if self._execute:
            self._journalled(dst, lambda: dst.copy_(src))

    def fill(self, write: Write, dst: torch.Tensor) -> None:
        self.steps.append((self.current, write))
        if self._execute:
            pattern = write.constant
            assert pattern is not None
            self._journalled(dst, lambda: bit_view(dst).fill_(pattern))

    def _journalled(self, dst: torch.Tensor, act: Callable[[], object]) -> None:
        old = bit_view(dst).clone()
        act()
        self._journal.append((dst.detach(), old, bit_view(dst).clone()))

    def refuse(self, origins: frozenset[str], reason: str) -> None:
        self.refusals.append(Refusal(origins, self.current, reason))

    def undo(self) -> bool:
        """Undo executed writes, last first; False if something else had changed them."""
        intact = True
        for dst, old, new in reversed(self._journal):
            intact = intact and torch.equal(bit_view(dst), new)
            bit_view(dst).copy_(old)
        self._journal.clear()
        return intact


class Prober:
    """Loads probes into a model, and leaves every resident bit as it was.

    Real probes are needed only for loaders that fail on meta tensors, or about which a call without values leaves a
    doubt.  While one is at work the host holds a copy of resident memory and every canonical tensor of the call.

    Args:
        residents: the model's storage.
        load: its native loader.
    """

    def __init__(self, residents: Residents, load: Load) -> None:
        self._residents = residents
        self._load = load
        self._snapshot: Snapshot | None = None

    def call(self, specs: Sequence[TensorSpec], mode: Mode, seed: int = 0) -> Call:
        """Load probes of some tensors in one call; ``seed`` gives real probes their values."""
        watch = _LearnWatch(self._residents, execute=mode.execute)
        if mode.real and self._snapshot is None:
            self._snapshot = Snapshot(self._residents)
        call = Call(tuple(s.name for s in specs))

        def probes() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in specs:
                probe = _probe(spec, seed) if mode.real else torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                watch.give(spec.name, probe, torch.zeros(spec.numel, dtype=torch.bool, device=probe.device))
                yield spec.name, probe
            watch.exhausted = True

        with count_started_threads() as threads:
            try:
                with watch.watching():
                    got = self._load(probes())
                    call.reported = None if got is None else frozenset(got)
                    call.consulted = frozenset(watch.consulted)
            except Exception as e:  # noqa: BLE001 - whatever a foreign loader raises
                call.error = f"{type(e).__name__}: {e}"[:300]
        call.threads = threads()
        # What is filled before the first tensor is asked for counts as that tensor's.
        call.steps = tuple((name or call.names[0], write) for name, write in watch.steps)
        call.streams, call.refusals, call.refused_regions = watch.streams, watch.refusals, watch.refused_regions
        self._check_untouched(call, real=mode.real, intact=watch.undo())
        return call

    def _check_untouched(self, call: Call, *, real: bool, intact: bool) -> None:
        if replaced := self._residents.replaced():
            self._residents.rebind()
            call.past_the_watch = f"rebinds {replaced[0]}"
        if real:
            assert self._snapshot is not None
            changed = self._snapshot.changed()
            if changed or not intact:
                self._snapshot.restore()
                call.refused_regions |= {Region.of(self._residents.by_name[n]) for n in changed}
                where = changed[0] if changed else "what it had written"
                call.past_the_watch = call.past_the_watch or f"changes {where} past the watch"


def _probe(spec: TensorSpec, seed: int) -> torch.Tensor:
    # NumPy's generator, because the loader pulls probes while its torch calls are being watched.
    nbytes = spec.numel * spec.dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if spec.dtype == torch.bool else 256, nbytes, np.uint8)
    return torch.from_numpy(raw).view(spec.dtype).view(spec.shape)
