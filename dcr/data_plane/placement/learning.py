"""Learning what a native loader does with each canonical tensor, without changing a resident bit."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.box_fit import fit_boxes
from dcr.data_plane.placement.prewarm import Learned, Load, LoadCall, LoaderClass, Prewarm
from dcr.data_plane.placement.probing import MODES, Call, Mode, Prober
from dcr.data_plane.placement.rules import Touched, fills_to_skip, find_clashes
from dcr.data_plane.region import Region
from dcr.data_plane.resident import PartialWriteError, Residents
from dcr.protocol.errors import RefusedError

GROUP_BYTES = 32 << 20
"""Canonical bytes of the transforming tensors that are loaded in one call, unless one tensor alone has more."""


def learn(
    model: nn.Module, load: Load, specs: Sequence[TensorSpec], *, refuse: Callable[[Learned], str] = lambda _one: ""
) -> Prewarm:
    """Learn the class and the writes of every canonical tensor.

    No resident bit is changed: writes are withheld, or undone from a journal and a snapshot.

    Args:
        model: the runtime's model on this rank.
        load: its native loader; given host tensors, as from a checkpoint.
        specs: every canonical tensor of the checkpoint, in the order of a dense load.
        refuse: why the writes of a tensor, though understood, are not to be repeated; empty if they are.

    Raises:
        RefusedError: two specs share a name.
        PartialWriteError: the loader changed resident memory past the watch while it was given tensors without values.
    """
    twice = [n for n, count in Counter(s.name for s in specs).items() if count > 1]
    if twice:
        raise RefusedError(f"canonical tensor {twice[0]} is given twice")
    return _Learner(model, load, specs, refuse).learn()


class _Learner:
    """Learns from one call over all names; from a call a name where the loader fails in, or bypasses, the former."""

    def __init__(
        self, model: nn.Module, load: Load, specs: Sequence[TensorSpec], refuse: Callable[[Learned], str]
    ) -> None:
        self._refuse = refuse
        self._residents = Residents(model)
        self._prober = Prober(self._residents, load)
        self._specs = [s for s in specs if s.numel]
        self._empty = [s for s in specs if not s.numel]  # nothing of them is ever sent
        self._reasons: dict[str, str] = {}
        self._learned: dict[str, Learned] = {}

    def learn(self) -> Prewarm:
        before = self._residents.checksums()
        calls = self._first_calls()
        for call in calls:
            self._judge(call, alone=len(calls) > 1)
        for name, why in find_clashes({n: one.writes for n, one in self._learned.items()}).items():
            self._blame([name], why)
        consulted = self._judge_reads(calls)
        self._judge_neighbours(calls)
        for name, one in self._learned.items():
            if name not in self._reasons:
                self._settle(name, one)
        kept = self._calls(calls)
        transforming = self._transforming_calls(kept)
        rebound = self._residents.rebound()
        self._residents.rebind()
        if rebound or self._residents.checksums() != before:
            what = ", ".join(rebound[:8]) or "resident memory"
            raise PartialWriteError(f"the loader changed {what} past the watch during prewarm; restore this engine")
        classes = {s.name: self._class_of(s.name) for s in self._specs}
        classes |= {s.name: LoaderClass.SKIPPED for s in self._empty}
        learned = {n: one for n, one in self._learned.items() if n not in self._reasons}
        return Prewarm(classes, self._reasons, learned, consulted, kept, transforming)

    def _class_of(self, name: str) -> LoaderClass:
        if name in self._reasons:
            return LoaderClass.REFUSED
        if name not in self._learned:
            return LoaderClass.SKIPPED
        return LoaderClass.BOX if self._learned[name].boxes else LoaderClass.TRANSFORMING

    def _blame(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self._reasons.setdefault(name, reason)

    def _first_calls(self) -> list[Call]:
        if not self._specs:
            return []
        together = self._load(self._specs)
        if len(self._specs) == 1 or not (together.error or together.past_the_watch):
            return [together]
        return [self._load([spec]) for spec in self._specs]

    def _load(self, specs: Sequence[TensorSpec]) -> Call:
        """One load call in the first mode in which it works, and once more where that leaves a doubt."""
        call, mode = Call(()), Mode()
        for mode in MODES:
            call = self._prober.call(specs, mode)
            if not call.error or call.past_the_watch or (call.refusals and len(specs) == 1):
                break
        if call.error or call.past_the_watch or (call.refusals and len(specs) == 1):
            return call
        writes = call.writes()
        if mode.real:
            again, doubt = self._prober.call(specs, mode, seed=1), "for different values"
        elif call.threads or (call.reported is None and any(s.name not in writes for s in specs)):
            again, doubt = self._prober.call(specs, Mode(real=True)), "when it sees values"
        else:
            return call
        call.refused_regions |= again.refused_regions
        if again.past_the_watch:
            call.past_the_watch = again.past_the_watch
        elif again.error:
            call.error = f"{doubt}: {again.error}"
        else:
            values = again.writes()
            other = [s.name for s in specs if values.get(s.name) != writes.get(s.name)]
            self._blame(other, f"the loader writes differently {doubt}")
        return call

    def _judge(self, call: Call, *, alone: bool) -> None:
        """Take over the writes of a call, and refuse what cannot be trusted."""
        names = set(call.names)
        writes = call.writes()
        copied = {name for name, write in call.steps if write.constant is None}
        silent = [n for n in call.names if n not in copied]
        self._learned |= {n: Learned(w) for n, w in writes.items() if n in names}
        if call.past_the_watch:
            self._blame(call.names, f"the loader {call.past_the_watch}")
        for refusal in call.refusals:
            self._blame(refusal.origins & names or {refusal.current or call.names[0], *silent}, refusal.reason)
        if call.error:
            self._blame(call.names, f"the loader fails when it is loaded alone: {call.error}")
        if stranger := next((n for n in writes if n not in names), None):
            self._blame(call.names, f"the loader writes values of {stranger}, kept from an earlier call")
        self._blame([n for n in silent if n in writes], "the loader writes constants and no element of it")
        if unseen := self._reported_unseen(call):
            self._blame(silent or call.names, f"the loader reports {unseen} as loaded but no write to it was seen")
        if alone:
            self._blame(silent, "the loader loads nothing of it alone, and a call over all names failed")

    def _reported_unseen(self, call: Call) -> str:
        """A resident tensor that the loader reports as loaded although no write to it was seen; empty if none."""
        written = {s.start for _, w in call.steps if (s := self._residents.span(self._residents.at(w.region)))}
        for name in sorted(call.reported or ()):
            held = self._residents.by_name.get(name)
            if held is not None and (span := self._residents.span(held)) is not None and span.start not in written:
                return name
        return ""

    def _judge_reads(self, calls: Sequence[Call]) -> frozenset[Region]:
        """Refuse tensors whose load reads resident memory that a load writes; what else they read is returned."""
        written = Touched((w.region, n) for n, one in self._learned.items() for w in one.writes)
        consulted = set()
        for call in calls:
            for name, region in call.consulted:
                if written.by(region) is None:
                    consulted.add(region)
                else:
                    self._blame([name or call.names[0]], "the loader reads resident values that a load writes")
        return frozenset(consulted)

    def _judge_neighbours(self, calls: Sequence[Call]) -> None:
        """Refuse tensors that write memory which a refused one touches: a dense load would write both."""
        if not self._reasons:
            return
        touched = [(w.region, n) for n in self._reasons if n in self._learned for w in self._learned[n].writes]
        for call in calls:
            culprit = next((n for n in call.names if n in self._reasons), "")
            touched += [(region, culprit) for region in call.refused_regions]
        refused = Touched(touched)
        for name, one in self._learned.items():
            if name not in self._reasons:
                near = next((c for w in one.writes if (c := refused.by(w.region)) is not None), None)
                if near is not None:
                    self._reasons[name] = f"the same memory is touched by {near}, which is refused"

    def _settle(self, name: str, one: Learned) -> None:
        try:
            skip = fills_to_skip(one.writes, self._residents)
        except RefusedError as e:
            self._reasons[name] = str(e)
        else:
            self._learned[name] = Learned(one.writes, skip, fit_boxes(one.writes))
            if why := self._refuse(self._learned[name]):
                self._reasons[name] = why

    def _calls(self, calls: Sequence[Call]) -> tuple[LoadCall, ...]:
        """The first calls without refused tensors; a tensor that is loaded otherwise in such a call is refused too."""
        if len(calls) != 1:
            return tuple(_load_call(c) for c in calls if c.names[0] not in self._reasons)
        (call,) = calls
        while True:
            admissible = [s for s in self._specs if s.name not in self._reasons]
            if [s.name for s in admissible] == list(call.names):
                return (_load_call(call),)
            if not admissible:
                return ()
            call = self._load(admissible)
            if other := self._otherwise(call):
                self._blame(other, "the loader loads it otherwise without the tensors that are refused")

    def _otherwise(self, call: Call) -> list[str]:
        """Tensors of a call that it does not load as learned."""
        if call.error or call.past_the_watch or call.refusals:
            return list(call.names)
        writes = call.writes()
        return [n for n in call.names if writes.get(n, ()) != self._learned.get(n, Learned()).writes]

    def _transforming_calls(self, calls: tuple[LoadCall, ...]) -> tuple[LoadCall, ...]:
        """Calls over the transforming tensors and their partners; those over all names where such a call differs."""
        specs = [s for s in self._specs if self._class_of(s.name) is LoaderClass.TRANSFORMING]
        if not specs or len(calls) != 1:
            return tuple(c for c in calls if any(self._class_of(n) is LoaderClass.TRANSFORMING for n in c.names))
        written = Touched((w.region, s.name) for s in specs for w in self._learned[s.name].writes)
        partners = {
            n
            for n, one in self._learned.items()
            if n not in self._reasons and any(written.by(w.region) for w in one.writes)
        }
        groups: list[list[TensorSpec]] = []
        room = 0
        for spec in self._specs:
            if spec.name in partners:
                nbytes = spec.numel * spec.dtype.itemsize
                if not groups or nbytes > room:
                    groups.append([])
                    room = GROUP_BYTES
                groups[-1].append(spec)
                room -= nbytes
        found = []
        for group in groups:
            call = self._load(group)
            if self._otherwise(call):
                return calls
            found.append(_load_call(call))
        return tuple(found)


def _load_call(call: Call) -> LoadCall:
    return LoadCall(call.names, call.steps, call.reported, call.streams)
