"""What a native loader does with each canonical tensor, learned in advance without changing a resident bit."""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement_rules import fills_to_skip, find_clashes
from dcr.data_plane.provenance import Source
from dcr.data_plane.region import Region, share_memory
from dcr.data_plane.resident import PartialWriteError, Residents, Snapshot
from dcr.data_plane.thread_watch import count_started_threads
from dcr.data_plane.write_watch import Write, WriteWatch
from dcr.protocol.errors import RefusedError

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str] | None]
"""A native loader: takes (canonical name, tensor) pairs, returns the names of the runtime tensors it loaded."""


class LoaderClass(enum.StrEnum):
    """What a loader does with a canonical tensor, and so which operations may go through it (paper section 5)."""

    PRESERVING = "preserving"
    """Same-dtype copies of views, no other write touches the bytes: ``set``, ``xor`` and ``add``."""
    TRANSFORMING = "transforming"
    """Every written element is computed from one canonical element: ``set`` only."""
    SKIPPED = "skipped"
    """This rank holds nothing of it, and its loader says so."""
    REFUSED = "refused"
    """Cannot be refitted exactly."""


@dataclass(frozen=True)
class Learned:
    """The writes one canonical tensor causes when it is loaded alone.

    Attributes:
        writes: in the order of the loader.
        skip: positions of fills that later copies of the same tensor cover in part; a refit leaves them out.
        reported: what the loader returned, as a set; None if it returned None.
    """

    writes: tuple[Write, ...] = ()
    skip: frozenset[int] = frozenset()
    reported: frozenset[str] | None = frozenset()


@dataclass(frozen=True)
class Prewarm:
    """What prewarm learned.

    Attributes:
        classes: class of every canonical tensor.
        reasons: why, for every refused tensor.
        learned: the writes of every preserving or transforming tensor.
        consulted: resident memory that the loader reads and no load writes, such as expert maps.
    """

    classes: dict[str, LoaderClass]
    reasons: dict[str, str]
    learned: dict[str, Learned]
    consulted: frozenset[Region]

    def raise_if_refused(self) -> None:
        """RefusedError that names refused tensors and says why."""
        if self.reasons:
            shown = "; ".join(f"{n}: {why}" for n, why in list(self.reasons.items())[:8])
            raise RefusedError(f"{len(self.reasons)} canonical tensors cannot be refitted in place: {shown}")


class _LearnWatch(WriteWatch):  # type: ignore[no-untyped-call]  # torch's own hook
    """Records writes.  Withholds them, or (``execute``) lets them happen and can undo them."""

    def __init__(self, residents: Residents, *, execute: bool) -> None:
        super().__init__(residents)
        self.writes: list[Write] = []
        self.refusals: list[tuple[frozenset[str], str]] = []
        self._execute = execute
        self._journal: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def copy(self, write: Write, dst: torch.Tensor, src: torch.Tensor, source: Source) -> None:  # noqa: ARG002 - the mask is for applying
        self.writes.append(write)
        if self._execute:
            self._journalled(dst, lambda: dst.copy_(src))

    def fill(self, write: Write, dst: torch.Tensor) -> None:
        self.writes.append(write)
        if self._execute:
            pattern = write.constant
            assert pattern is not None
            self._journalled(dst, lambda: bit_view(dst).fill_(pattern))

    def _journalled(self, dst: torch.Tensor, act: Callable[[], object]) -> None:
        old = bit_view(dst).clone()
        act()
        self._journal.append((dst.detach(), old, bit_view(dst).clone()))

    def refuse(self, origins: frozenset[str], reason: str) -> None:
        self.refusals.append((origins, reason))

    def undo(self) -> bool:
        """Undo executed writes, last first; False if something else had changed them."""
        intact = True
        for dst, old, new in reversed(self._journal):
            intact = intact and torch.equal(bit_view(dst), new)
            bit_view(dst).copy_(old)
        self._journal.clear()
        return intact


@dataclass
class _Call:
    """What one load call did."""

    error: str = ""
    reported: frozenset[str] | None = frozenset()
    writes: tuple[Write, ...] = ()
    refusals: list[tuple[frozenset[str], str]] = field(default_factory=list)
    consulted: frozenset[Region] = frozenset()
    past_the_watch: str = ""
    threads: int = 0
    touched: set[Region] = field(default_factory=set)

    def copies_of(self, name: str) -> Counter[Region]:
        return Counter(w.region for w in self.writes if w.origin == name)


class _Learner:
    """Loads probes: storage-less (meta) ones first, then real ones under a snapshot of all resident memory.

    Real probes are needed only for loaders that fail on meta tensors, or about which a call without values leaves a
    doubt.  While one is at work the host holds a copy of resident memory, and, when the call is over all names and
    the loader keeps what it is given, every canonical tensor once.
    """

    def __init__(self, model: nn.Module, load: Load, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self._residents = Residents(model)
        self._load = load
        self._specs = [s for s in specs if s.numel]
        self._empty = [s for s in specs if not s.numel]  # nothing of them is ever sent
        self._device = device
        self._snapshot: Snapshot | None = None
        self._consulted: dict[str, frozenset[Region]] = {}
        self._touched: dict[str, set[Region]] = {s.name: set() for s in specs}

    def learn(self) -> Prewarm:
        before = self._residents.checksums()
        together = self._together(self._specs)
        learned: dict[str, Learned] = {}
        reasons: dict[str, str] = {}
        for spec in self._specs:
            try:
                learned[spec.name] = self._alone(spec, together)
            except RefusedError as e:
                reasons[spec.name] = str(e)
        rebound = self._residents.rebound()
        self._residents.rebind()
        if rebound or self._residents.checksums() != before:
            what = ", ".join(rebound[:8]) or "resident memory"
            raise PartialWriteError(f"the loader changed {what} past the watch during prewarm; restore this engine")
        reasons |= find_clashes({n: one.writes for n, one in learned.items()})
        reasons |= self._unstable(learned)
        reasons |= self._beside_refused(learned, reasons)
        for name, one in learned.items():
            if name not in reasons:
                try:
                    skip = fills_to_skip(one.writes, self._residents)
                    learned[name] = Learned(one.writes, skip, one.reported)
                except RefusedError as e:
                    reasons[name] = str(e)
        classes = {
            s.name: LoaderClass.REFUSED if s.name in reasons else _class_of(learned[s.name]) for s in self._specs
        }
        classes |= {s.name: LoaderClass.SKIPPED for s in self._empty}
        kept = {n: one for n, one in learned.items() if n not in reasons and one.writes}
        return Prewarm(classes, reasons, kept, frozenset(r for n in kept for r in self._consulted[n]))

    def _call(self, specs: Sequence[TensorSpec], *, real: bool, execute: bool = False, seed: int = 0) -> _Call:
        watch = _LearnWatch(self._residents, execute=execute)
        if real and self._snapshot is None:
            self._snapshot = Snapshot(self._residents)
        call = _Call()

        def probes() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in specs:
                probe = _probe(spec, self._device if real else torch.device("meta"), seed)
                watch.provenance.track(spec.name, probe, torch.zeros(spec.numel, dtype=torch.bool, device=probe.device))
                yield spec.name, probe

        with count_started_threads() as threads:
            try:
                with watch.watching():
                    got = self._load(probes())
                    call.reported = None if got is None else frozenset(got)
                    call.consulted = frozenset(watch.consulted)
            except Exception as e:  # noqa: BLE001 - whatever a foreign loader raises
                call.error = f"{type(e).__name__}: {e}"[:300]
        call.threads = threads()
        call.writes, call.refusals = tuple(watch.writes), watch.refusals
        call.touched = watch.refused_regions | {w.region for w in watch.writes}
        intact = watch.undo()
        if replaced := self._residents.replaced():
            self._residents.rebind()
            call.past_the_watch = f"rebinds {replaced[0]}"
        if real:
            assert self._snapshot is not None
            changed = self._snapshot.changed()
            if changed or not intact:
                self._snapshot.restore()
                call.touched |= {Region.of(self._residents.by_name[n]) for n in changed}
                where = changed[0] if changed else "what it had written"
                call.past_the_watch = call.past_the_watch or f"changes {where} past the watch"
        return call

    def _together(self, specs: Sequence[TensorSpec]) -> _Call | None:
        """One call over all names; None if it fails in every mode."""
        call = _Call()
        for real, execute in ((False, False), (True, False), (True, True)):
            call = self._call(specs, real=real, execute=execute)
            if not call.error:
                return call
        return None

    def _alone(self, spec: TensorSpec, together: _Call | None) -> Learned:
        """What one tensor does when it is loaded alone, or RefusedError."""
        call, real = self._first_success(spec)
        expected = together.copies_of(spec.name) if together else None
        if call.error:
            if expected is not None and not expected and self._skipped_in_company(spec, together):
                return Learned()
            raise RefusedError(f"the loader fails when it is loaded alone: {call.error}")
        if not real and (call.threads or (not call.writes and call.reported is None)):
            again = self._call([spec], real=True)
            self._touched[spec.name] |= again.touched
            if again.past_the_watch or again.writes != call.writes:
                raise RefusedError(again.past_the_watch or "the loader writes differently when it sees values")
        for origins, reason in together.refusals if together else ():
            if spec.name in origins or (not origins and not call.writes):
                raise RefusedError(f"loaded with the other tensors: {reason}")
        if not any(w.origin for w in call.writes):
            self._check_skip(call, expected)
        elif expected is not None and call.copies_of(spec.name) != expected:
            raise RefusedError("the loader writes differently when it is loaded alone than with the other tensors")
        if stranger := next((w.origin for w in call.writes if w.origin not in {"", spec.name}), None):
            raise RefusedError(f"the loader writes values of {stranger}, kept from an earlier call")
        self._check_reported(call)
        self._consulted[spec.name] = call.consulted
        return Learned(call.writes, frozenset(), call.reported)

    def _first_success(self, spec: TensorSpec) -> tuple[_Call, bool]:
        call = _Call()
        for real, execute in ((False, False), (True, False), (True, True)):
            call = self._call([spec], real=real, execute=execute)
            self._touched[spec.name] |= call.touched
            if call.refusals or call.past_the_watch:
                raise RefusedError(call.refusals[0][1] if call.refusals else f"the loader {call.past_the_watch}")
            if not call.error:
                if real and self._call([spec], real=True, execute=execute, seed=1).writes != call.writes:
                    raise RefusedError("the loader writes differently for different values")
                return call, real
        return call, True

    def _skipped_in_company(self, spec: TensorSpec, together: _Call | None) -> bool:
        """Whether the other names load just the same without this one: a tied or redundant name."""
        others = self._call([s for s in self._specs if s.name != spec.name], real=False)
        return (
            together is not None
            and together.reported is not None
            and not others.error
            and (others.reported, others.writes) == (together.reported, together.writes)
        )

    def _check_skip(self, call: _Call, expected: Counter[Region] | None) -> None:
        if call.writes:
            raise RefusedError("the loader writes constants and no element of it")
        if call.reported:
            raise RefusedError(f"the loader reports {min(call.reported)} as loaded but no write was seen")
        if expected is None:
            raise RefusedError("the loader loads nothing of it alone, and a call over all names failed")
        if expected:
            raise RefusedError("the loader loads it only together with other tensors")

    def _check_reported(self, call: _Call) -> None:
        for name in call.reported or ():
            held = self._residents.by_name.get(name)
            if held is not None and (span := self._residents.span(held)) is not None:
                regions = (w.region for w in call.writes)
                if not any(span.start <= r.address < span.start + span.nbytes for r in regions):
                    raise RefusedError(f"the loader reports {name} as loaded but no write to it was seen")

    def _unstable(self, learned: dict[str, Learned]) -> dict[str, str]:
        """Tensors whose load reads resident memory that a load writes."""
        written = [w.region for one in learned.values() for w in one.writes]
        consulted = {r: any(share_memory(r, w) for w in written) for n in learned for r in self._reads(n)}
        return {
            n: "the loader reads resident values that a load writes"
            for n in learned
            if any(consulted[r] for r in self._reads(n))
        }

    def _beside_refused(self, learned: dict[str, Learned], reasons: dict[str, str]) -> dict[str, str]:
        """Tensors that write memory which a refused one touches: a dense load would write both."""
        refused = [(n, r) for n in reasons for r in self._touched[n]]
        return {
            n: f"the same memory is touched by {culprit}, which is refused"
            for n, one in learned.items()
            if n not in reasons
            for culprit in [next((c for c, r in refused for w in one.writes if share_memory(r, w.region)), None)]
            if culprit is not None
        }

    def _reads(self, name: str) -> frozenset[Region]:
        return self._consulted.get(name, frozenset())


def _probe(spec: TensorSpec, device: torch.device, seed: int) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    # NumPy's generator, because the loader pulls probes while its torch calls are being watched.
    raw = np.random.default_rng(seed).integers(0, 2 if spec.dtype == torch.bool else 256, _nbytes(spec), np.uint8)
    return torch.from_numpy(raw).to(device).view(spec.dtype).view(spec.shape)


def _nbytes(spec: TensorSpec) -> int:
    return spec.numel * spec.dtype.itemsize


def _class_of(one: Learned) -> LoaderClass:
    if not one.writes:
        return LoaderClass.SKIPPED
    regions = Counter(w.region for w in one.writes)
    preserving = not one.skip and all(
        w.constant is not None or (w.direct and w.dtype == w.region.dtype and regions[w.region] == 1)
        for w in one.writes
    )
    return LoaderClass.PRESERVING if preserving else LoaderClass.TRANSFORMING


def learn(model: nn.Module, load: Load, specs: Sequence[TensorSpec], device: torch.device) -> Prewarm:
    """Learn the class and the writes of every canonical tensor.

    No resident bit is changed: writes are withheld, or undone from a journal and a snapshot.

    Args:
        model: the runtime's model on this rank.
        load: its native loader.
        specs: every canonical tensor of the checkpoint.
        device: where the loader finds the tensors it is given.

    Raises:
        RefusedError: two specs share a name.
        PartialWriteError: the loader changed resident memory past the watch while it was given tensors without values.
    """
    twice = [n for n, count in Counter(s.name for s in specs).items() if count > 1]
    if twice:
        raise RefusedError(f"canonical tensor {twice[0]} is given twice")
    return _Learner(model, load, specs, device).learn()
