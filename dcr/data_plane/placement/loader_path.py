"""The hooked loader path: items applied by the runtime's own loader, in one load call (paper section 6.1)."""

from collections.abc import Mapping, Sequence

from torch import nn

from dcr.data_plane.item import Item, TensorSpec
from dcr.data_plane.placement.hooked_load import HookedLoad, Progress
from dcr.data_plane.placement.learned_model import LearnedModel, check_disjoint
from dcr.data_plane.placement.prewarm import Load, Prewarm


class LoaderPath:
    """Storage of one rank, reached through its native loader alone: the independent check of learned placement.

    ::

        path = LoaderPath(model, model.load_weights, specs)
        path.prewarm().raise_if_refused()     # no resident bit changes
        path.apply(items)                     # in place, one load call over all canonical tensors
        path.synchronise()

    A call costs what a dense load costs, whatever the number of entries.  Beside resident weights it keeps one scratch
    of the bytes of the largest canonical tensor, and one mask byte for every element of it; a loader that keeps what it
    is given costs the bytes of all of them while items are applied.

    Args:
        model: the runtime's model on this rank, loaded or not.
        load_weights: its native loader; called in the calling thread, given host tensors.
        specs: every canonical tensor of the checkpoint, in the order of a dense load.
        settings: what else the loader depends on, in words, such as library versions; part of the fingerprint.
    """

    def __init__(
        self,
        model: nn.Module,
        load_weights: Load,
        specs: Sequence[TensorSpec],
        *,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._model = LearnedModel(model, load_weights, specs, settings or {})
        self._calls: list[HookedLoad] = []

    def prewarm(self) -> Prewarm:
        """See :meth:`Storage.prewarm`; a tensor that cannot be refitted raises nothing before it is applied.

        Raises:
            RefusedError, PartialWriteError: see :func:`dcr.data_plane.placement.learning.learn`.
        """
        learned = self._model.learn()
        self._calls = self._model.hooked(learned.calls)
        return learned

    def fingerprint(self) -> str:
        """See :meth:`Storage.fingerprint`."""
        return self._model.fingerprint()

    def apply(self, items: Sequence[Item]) -> int:
        """See :meth:`Storage.apply`."""
        if not items:
            return 0
        admitted = self._model.admit(items)
        for item in admitted:
            item.check_indices()
        check_disjoint(admitted)
        self._model.check_storage()
        progress = Progress()
        apply_hooked(self._calls, admitted, progress)
        self._model.check_bindings(progress)
        return len(admitted)

    def synchronise(self) -> None:
        """See :meth:`Storage.synchronise`."""
        self._model.synchronise()


def apply_hooked(calls: Sequence[HookedLoad], items: Sequence[Item], progress: Progress) -> None:
    """Apply checked items through those of some calls that load their tensors."""
    call_of = {name: number for number, call in enumerate(calls) for name in call.names}
    work: dict[int, list[Item]] = {}
    for item in items:
        work.setdefault(call_of[item.spec.name], []).append(item)
    for number, mine in sorted(work.items()):
        calls[number].apply(mine, progress)
