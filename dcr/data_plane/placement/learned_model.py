"""A model and what was learned of its loader: which items may be applied, and whether the ground still holds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.placement.composition import StandIns
from dcr.data_plane.placement.contained_load import contained
from dcr.data_plane.placement.conversion import Conversion, standing_in
from dcr.data_plane.placement.ground import Ground
from dcr.data_plane.placement.hooked_load import HookedLoad, Progress, Scratch
from dcr.data_plane.placement.learning import learn
from dcr.data_plane.placement.prewarm import Load, LoadCall, LoaderClass, Prewarm
from dcr.data_plane.resident import PartialWriteError, Residents
from dcr.protocol.errors import RefusedError

_BOX = LoaderClass.BOX  # finding an enumeration's member costs as much as all else that is asked of an item


class LearnedModel:
    """What every way to apply items shares.

    Args:
        model: the runtime's model on this rank, loaded or not.
        load: its native loader; called in the calling thread, given host tensors.
        specs: every canonical tensor of the checkpoint, in the order of a dense load.
        settings: what else the loader depends on, in words, such as library versions; part of the fingerprint.
        conversions: what became of resident tensors after loading, one a tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        load: Load,
        specs: Sequence[TensorSpec],
        settings: Mapping[str, str],
        conversions: Sequence[Conversion] = (),
    ) -> None:
        self._model = model
        self._load = contained(load)
        self._order = tuple(specs)
        self._specs = {s.name: s for s in specs}
        self._settings = {"torch": torch.__version__, **settings}
        self._conversions = tuple(conversions)
        self._scratch = Scratch()
        self._residents = Residents(model)
        self._ground: Ground | None = None
        self._prewarm: Prewarm | None = None
        self._known: dict[str, tuple[TensorSpec, LoaderClass]] = {}

    @property
    def residents(self) -> Residents:
        """The storage as it was at the last prewarm."""
        return self._residents

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every canonical tensor by name."""
        return self._specs

    def learn(self) -> Prewarm:
        """Learn anew; raises what :func:`dcr.data_plane.placement.learning.learn` raises."""
        self._prewarm, self._known = None, {}
        with standing_in(self._model, self._conversions) as standing:
            stand_ins = StandIns(standing)
            learned = learn(self._model, self._load, self._order, refuse=stand_ins.why_not)
        if standing:
            learned = stand_ins.composed(learned, self._model)
        self._residents = Residents(self._model)
        self._ground = Ground(self._model, self._residents, learned.consulted, self._settings)
        self._known = {name: (spec, learned.classes[name]) for name, spec in self._specs.items()}
        self._prewarm = learned
        return learned

    def hooked(self, calls: Iterable[LoadCall]) -> list[HookedLoad]:
        """The calls, ready to be repeated; they share one scratch."""
        assert self._prewarm is not None
        learned = self._prewarm.learned
        held, load, specs, scratch = self._residents, self._load, self._specs, self._scratch
        return [HookedLoad(held, load, call, specs, learned, scratch=scratch) for call in calls]

    def bad_padding(self) -> dict[str, str]:
        """Converted tensors that do not hold their constants where no element goes, by a canonical tensor in them."""
        wrong = {}
        for one in self._conversions:
            served = self._residents.by_name[one.name]
            if not one.padding_holds(served):
                start, end = served.data_ptr(), served.data_ptr() + served.untyped_storage().nbytes()
                assert self._prewarm is not None
                inside = (
                    n
                    for n, learned in self._prewarm.learned.items()
                    if any(start <= b.box.target_offset < end for b in learned.boxes)
                )
                wrong[next(inside, one.name)] = f"the padding that its conversion leaves in {one.name} is not there"
        return wrong

    def fingerprint(self) -> str:
        """Digest of everything the learned writes rest on, see :class:`Ground`; hexadecimal; reads the model anew."""
        return (self._ground or Ground(self._model, Residents(self._model), (), self._settings)).digest()

    def check_storage(self) -> None:
        """RefusedError if what was learned rests on something that is not as it was."""
        if self._prewarm is None or self._ground is None or self._ground.same():
            return
        moved = self._ground.moved()
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        raise RefusedError(
            f"{moved[0]}{more} moved, was rebound or changed since prewarm, and the loader may now write elsewhere; "
            "nothing was written, prewarm again: restart the engine"
        )

    def check_bindings(self, progress: Progress) -> None:
        """After a load call: raise if the loader has bound other memory to a name."""
        if rebound := self._residents.rebound():
            raise progress.error(rebound[0], "the loader has bound other memory to the name")

    def admit(self, items: Sequence[Item]) -> list[Item]:
        """The items that have entries and a place here; RefusedError if one may not be applied.

        Whether indices are in order is left to be checked.
        """
        if self._prewarm is None:
            raise RefusedError(f"item {items[0].spec.name if items else ''}: call prewarm before apply")
        admitted = []
        known = self._known
        for item in items:
            spec = item.spec
            mine = known.get(spec.name)
            if mine is None or not (spec is mine[0] or spec == mine[0]):
                raise self._mismatch(item)
            if mine[1] is not _BOX and not self._admits(item, mine[1]):
                continue
            if item.indices.numel():
                admitted.append(item)
        return admitted

    def _admits(self, item: Item, cls: LoaderClass) -> bool:
        """Whether this rank holds anything of an item's tensor, which is no box; RefusedError as for ``admit``."""
        assert self._prewarm is not None
        if cls is LoaderClass.REFUSED:
            why = self._prewarm.reasons[item.spec.name]
            raise RefusedError(f"item {item.spec.name}: cannot be refitted in place: {why}")
        if cls is LoaderClass.TRANSFORMING and item.operation is not Operation.SET:
            raise RefusedError(
                f"item {item.spec.name}: {item.operation} through a transforming loader; only set is exact"
            )
        return cls is not LoaderClass.SKIPPED

    def _mismatch(self, item: Item) -> RefusedError:
        name, spec = item.spec.name, self._specs.get(item.spec.name)
        if spec is None:
            return RefusedError(f"item {name}: no such canonical tensor in this checkpoint")
        return RefusedError(
            f"item {name}: {item.spec.dtype} {item.spec.shape} does not match {spec.dtype} {spec.shape}"
        )

    def wait_for_devices(self) -> None:
        """Return when nothing is at work on an accelerator that holds resident memory, on whatever stream."""
        for device in {s.storage.device for s in self._residents.spans if s.storage.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    def synchronise(self) -> None:
        """See :meth:`Storage.synchronise`."""
        self.wait_for_devices()
        if self._ground is not None and (moved := self._ground.moved_tensors()):
            raise PartialWriteError(
                f"{moved[0]} has other memory, shape, strides or dtype than before the update; captured graphs would "
                "not see it; restart the engine"
            )


def check_disjoint(items: Sequence[Item]) -> None:
    """RefusedError if two items of one tensor, whose indices are in order, have an index in common."""
    if len({item.spec.name for item in items}) == len(items):
        return
    several = {name for name, count in Counter(item.spec.name for item in items).items() if count > 1}
    indices: dict[str, list[torch.Tensor]] = {name: [] for name in several}
    for item in items:
        if item.spec.name in several:
            indices[item.spec.name].append(item.indices.cpu())
    for name, parts in indices.items():
        merged = torch.cat(parts).sort().values
        if bool((merged[1:] == merged[:-1]).any()):
            raise RefusedError(f"item {name}: two items have an index in common; nothing was written")
