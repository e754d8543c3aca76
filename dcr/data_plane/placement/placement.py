"""Learned placement: what the native loader does is learned once, and then repeated without it (DESIGN section 5)."""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import Item, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, PlacedTensor
from dcr.data_plane.kernels.choice import kernels_for
from dcr.data_plane.kernels.interface import Kernels
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.placement.conversion import Conversion
from dcr.data_plane.placement.hooked_load import HookedLoad, Progress
from dcr.data_plane.placement.learned_model import LearnedModel, check_disjoint
from dcr.data_plane.placement.loader_path import apply_hooked
from dcr.data_plane.placement.prewarm import Load, LoaderClass, Prewarm
from dcr.data_plane.placement.readback import Readback, read_back
from dcr.data_plane.placement.rules import uncovered_holds
from dcr.data_plane.placement.shadow import Shadow
from dcr.data_plane.placement.write_watch import Write
from dcr.data_plane.placement.written_check import WrittenCheck
from dcr.protocol.errors import RefusedError

VERIFY = ("", "written", "dense")
"""How an application may be checked, beside what always is."""


class Placement:
    """Storage of one rank, reached through learned boxes at the cost of the changed elements.

    ::

        placement = Placement(model, model.load_weights, specs)
        placement.prewarm().raise_if_refused()   # one load call over probes; no resident bit changes
        placement.apply(items)                   # one kernel call for all boxes, one load call for what transforms
        placement.synchronise()
        placement.readback()                     # digests of what this rank holds, to compare without weights

    Tensors of class ``box`` are applied by a kernel over flat tables.  Those of class ``transforming`` go through the
    hooked loader, all of a call together with every tensor that writes the same memory; they come last, and cost the
    bytes of those tensors.  Constants that the loader fills in are checked at prewarm and written only where they were
    missing, which is so in a model that was never loaded.

    How many places a kernel wrote is counted and compared, where every element has equally many: not in a shard, of
    which only some entries are here.  ``verify="written"`` reads every place that was to be written, and compares it
    with what plain torch says that it must hold: about ten times what writing costs.

    ``verify="dense"`` is for finding out, not for serving: every call saves the memory blocks that it may touch,
    applies the items by boxes, saves the result, puts the old bits back, applies the same items through the native
    loader in one call over all canonical tensors, and compares.  Storage then holds what the loader wrote.  It costs
    two copies of those blocks and a dense load a call; what transforms goes through the loader both times, so only
    boxes and constants are checked independently.

    Args:
        model: the runtime's model on this rank, loaded or not.
        load_weights: its native loader; called in the calling thread, given host tensors.
        specs: every canonical tensor of the checkpoint, in the order of a dense load.
        sharded: whether the engine has more ranks, so that entries may belong elsewhere.  A rank that is alone refuses
            an entry for which the loader has no place.
        verify: "", "written" or "dense"; see above.
        settings: what else the loader depends on, in words, such as library versions; part of the fingerprint.
        kernels: the backend; by default the fastest one for where the model lies.
        conversions: what the runtime did to resident tensors after loading, where it only moved elements; see
            :mod:`dcr.data_plane.placement.conversion`.  The loader's boxes go on through them.

    Raises:
        RefusedError: an unknown ``verify``; or one with conversions, for the loader does not write converted storage.
    """

    def __init__(
        self,
        model: nn.Module,
        load_weights: Load,
        specs: Sequence[TensorSpec],
        *,
        sharded: bool = False,
        verify: str = "",
        settings: Mapping[str, str] | None = None,
        kernels: Kernels | None = None,
        conversions: Sequence[Conversion] = (),
    ) -> None:
        if verify not in VERIFY:
            raise RefusedError(f"verify is {verify!r}; it must be one of {', '.join(map(repr, VERIFY))}")
        if verify == "dense" and conversions:
            raise RefusedError(
                f"verify={verify!r} loads densely, but the loader does not write converted storage: drop it"
            )
        self._model = LearnedModel(model, load_weights, specs, settings or {}, conversions)
        self._sharded = sharded
        self._verify = verify
        self._given_kernels = kernels
        self._kernels = kernels
        self._numbers: dict[str, int] = {}
        self._table = BoxTable.of([])
        self._boxed: list[TensorSpec] = []
        self._transforming: list[HookedLoad] = []
        self._dense: list[HookedLoad] = []
        self._missing: dict[str, list[Write]] = {}
        self._prewarm: Prewarm | None = None
        self._turn = threading.Lock()  # kernels run without the interpreter's lock, and hooks and scratch are one

    def prewarm(self) -> Prewarm:
        """See :meth:`Storage.prewarm`; a tensor that cannot be refitted raises nothing before it is applied.

        Raises:
            RefusedError, PartialWriteError: see :func:`dcr.data_plane.placement.learning.learn`.
        """
        self._prewarm = None
        learned = self._model.learn()
        residents = self._model.residents
        names = [n for n, c in learned.classes.items() if c is LoaderClass.BOX]
        self._boxed = [self._model.specs[n] for n in names]
        self._numbers = {n: i for i, n in enumerate(names)}
        self._table = BoxTable.of(
            [PlacedTensor(s.numel, s.dtype.itemsize, learned.learned[s.name].boxes) for s in self._boxed]
        )
        written = set()
        for tensor in self._table.tensors:
            for placed in tensor.boxes:
                start, end = placed.span(tensor.width)
                assert residents.holds(start, end), "a box must lie in one block of resident memory"
                written.add(residents.start_of(start))
        # A model on a GPU may keep some tensors of its own in host memory: these say nothing of where boxes lie.
        self._kernels = self._given_kernels or kernels_for([s for s in residents.spans if s.start in written])
        self._transforming = self._model.hooked(learned.transforming)
        self._dense = self._model.hooked(learned.calls) if self._verify == "dense" else []
        self._missing = {n: writes for n in names if (writes := self._missing_constants(learned, n))}
        self._prewarm = learned
        return learned

    def fingerprint(self) -> str:
        """See :meth:`Storage.fingerprint`."""
        return self._model.fingerprint()

    def synchronise(self) -> None:
        """See :meth:`Storage.synchronise`."""
        self._model.synchronise()

    def apply(self, items: Sequence[Item]) -> int:
        """See :meth:`Storage.apply`; threads that call at once take turns."""
        if not items:
            return 0
        with self._turn:
            return self._apply(items)

    def _apply(self, items: Sequence[Item]) -> int:
        admitted = self._model.admit(items)
        records, hooked = self._sorted(admitted)
        self._check(records, hooked)
        self._model.check_storage()
        if not admitted:
            return 0
        if self._verify != "dense":
            self._write(records, hooked, Progress())
            return len(admitted)
        shadow = Shadow(self._model.residents, self._written_by(admitted))
        self._write(records, hooked, Progress())
        shadow.swap()
        progress = Progress(wrote=True)
        apply_hooked(self._dense, admitted, progress)
        self._model.check_bindings(progress)
        shadow.compare()
        return len(admitted)

    def readback(self, tied: Mapping[str, str] | None = None) -> Readback:
        """What this rank holds, read backwards through the boxes: to be compared with its owners' (DESIGN section 6).

        Reads every resident element that a box places, and every constant.

        Args:
            tied: canonical tensors that are skipped here because they are another one's memory -> that one; those of
                the same shape and dtype as a ``box`` tensor are read under both names.

        Raises:
            RefusedError: prewarm was not called, or storage is not where it was then.
        """
        learned = self._learned("readback")
        self._model.check_storage()
        specs, also = self._model.specs, dict[TensorSpec, PlacedTensor]()
        for name, partner in (tied or {}).items():
            one, number = specs[name], self._numbers.get(partner)
            if number is not None and (one.shape, one.dtype) == (specs[partner].shape, specs[partner].dtype):
                also[one] = self._table.tensors[number]
        parts = [(self._table, self._boxed), (BoxTable.of(list(also.values())), list(also))]
        found = read_back(self._backend, parts, learned, self._model.residents)
        for name, why in self._model.bad_padding().items():
            found.wrong.setdefault(name, why)
        return found

    @property
    def _backend(self) -> Kernels:
        assert self._kernels is not None
        return self._kernels

    def _learned(self, what: str) -> Prewarm:
        if self._prewarm is None:
            raise RefusedError(f"call prewarm before {what}")
        return self._prewarm

    def _sorted(self, items: Sequence[Item]) -> tuple[Records, list[Item]]:
        """Items for the kernel, and items for the loader."""
        get = self._numbers.get
        numbers = [get(item.spec.name, -1) for item in items]
        if min(numbers, default=0) >= 0:
            return Records.of(numbers, items), []
        placed = [(number, item) for number, item in zip(numbers, items, strict=True) if number >= 0]
        rest = [item for number, item in zip(numbers, items, strict=True) if number < 0]
        return Records.of([n for n, _ in placed], [item for _, item in placed]), rest

    def _check(self, records: Records, hooked: Sequence[Item]) -> None:
        """RefusedError if an item is not what it should be: nothing has been written yet."""
        disordered = self._backend.first_disordered(self._table, records)
        if disordered is not None:
            records.items[disordered].check_indices()  # says what is wrong
            raise RefusedError(f"item {records.items[disordered].spec.name}: its indices changed while they were read")
        for item in hooked:
            item.check_indices()
        check_disjoint([*records.items, *hooked])
        if self._sharded:
            return
        numbers = records.numbers[0]
        for position in np.flatnonzero(self._table.places[numbers] == 0):
            item = records.items[position]
            if absent := self._table.tensors[numbers[position]].absent(item.indices):
                raise RefusedError(
                    f"item {item.spec.name}: {absent} of its entries lie where the loader of this rank puts nothing, "
                    "and the engine has no other rank; nothing was written.  If it has, say sharded=True"
                )

    def _write(self, records: Records, hooked: Sequence[Item], progress: Progress) -> None:
        self._model.wait_for_devices()  # the last request may still be read on a stream of its own
        for item in records.items if self._missing else ():
            for write in self._missing.pop(item.spec.name, ()):
                assert write.constant is not None
                progress.wrote = True
                bit_view(self._model.residents.at(write.region)).fill_(write.constant)
        if records.items:
            check = WrittenCheck(self._model.residents, self._table, records) if self._verify == "written" else None
            progress.wrote = True
            hits = self._backend.place(self._table, records)
            self._check_hits(records, hits, progress)
            if check is not None:
                check.compare()
        if hooked:
            apply_hooked(self._transforming, hooked, progress)
            self._model.check_bindings(progress)

    def _check_hits(self, records: Records, hits: np.ndarray, progress: Progress) -> None:
        numbers = records.numbers
        places = self._table.places[numbers[0]]
        wrong = np.flatnonzero((places > 0) & (hits != places * numbers[1]))
        if wrong.size:
            item = records.items[int(wrong[0])]
            raise progress.error(
                item.spec.name,
                f"its {item.entries} entries found {int(hits[wrong[0]])} places, not as many as its boxes have",
            )

    def _missing_constants(self, learned: Prewarm, name: str) -> list[Write]:
        """The fills of a tensor that no copy covers in part, and that resident memory does not hold."""
        one = learned.learned[name]
        return [
            write
            for position, write in enumerate(one.writes)
            if write.constant is not None
            and position not in one.skip
            and not uncovered_holds(write, (), self._model.residents)
        ]

    def _written_by(self, items: Sequence[Item]) -> set[int]:
        """Starts of the memory blocks that these items may change."""
        learned = self._learned("apply").learned
        residents = self._model.residents
        regions = {write.region for item in items for write in learned[item.spec.name].writes}
        return {span.start for region in regions if (span := residents.span(residents.at(region))) is not None}
