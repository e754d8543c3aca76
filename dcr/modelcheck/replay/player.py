"""Plays steps of the specification on a world: each action becomes the event of the role that has it."""

from typing import TYPE_CHECKING, Any

import msgspec

from dcr.modelcheck.replay.content import GARBAGE
from dcr.modelcheck.replay.reports import Reports
from dcr.modelcheck.replay.world import RECORD, Payload, Rank, World
from dcr.modelcheck.values import State, Value
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.protocol.messages import Emit, Fold, OpenApply

if TYPE_CHECKING:
    from collections.abc import Callable


class Event(msgspec.Struct, frozen=True):
    """A step by name, with what it chose: the variable `step` of ``RefitTraces.tla``, or a member of `could`."""

    name: str
    coordinator: str = ""
    owner: str = ""
    engine: str = ""
    rank: str = ""
    epoch: int = 0
    incarnation: int = 0
    cell: str = ""
    kind: str = ""
    silent: str = ""

    def __str__(self) -> str:
        """Its name and what it chose, as a story tells a step."""
        chosen = [x for x in msgspec.structs.astuple(self)[1:] if x]
        return f"{self.name}({', '.join(map(str, chosen))})"

    @classmethod
    def of(cls, step: Value) -> "Event":
        """From the specification's record."""
        fields: Any = step
        try:
            return cls(**fields)
        except TypeError as error:
            raise RefusedError(f"no step of RefitTraces.tla: {error}") from None


class Player:
    """Plays events on a world.

    Args:
        world: the deployment.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._reports = {c: Reports(world, c) for c in world.coordinators}

    def play(self, event: Event, after: State) -> None:
        """Give the roles the event of a step.

        Args:
            event: what was done.
            after: the state that it led to, for what the environment chose: new weights, a lost answer.

        Raises:
            RefusedError: a role refused the event.
        """
        chosen: Any = after
        match event.name:
            case "CandidateReady":
                self.world.weights = dict(chosen["weights"])
                self.world.push()
            case "StepCandidate":
                self.world.weights = dict(chosen["weights"])
            case "OwnerRestart":
                self._owner_restart(event.owner, chosen)
            case "EngineRestart":
                incarnation = self.world.node[event.engine].incarnation + 1
                ranks = chosen["mem"][event.engine]
                content = dict(ranks[self.world.ranks[0]]) if self.world.setting.reload else None
                self.world.start_engine(event.engine, incarnation, content)
            case "FoldCell":
                self._fold_cell(event.owner, chosen)
            case "LateWrite":
                self._late_write(event)
            case _ if event.coordinator:
                # The specification has found it broken, or a time-out to spend; the code is told of one in any case.
                why = "it took too long" if event.name in ("AttemptFailed", "EndRestore") else event.kind
                event = msgspec.structs.replace(event, kind=why)
                lost = len(chosen["writes"]) > len(self.world.late)
                self.world.carry_out(event.coordinator, self.lead(event), lost=lost)
            case _ if event.owner and not event.engine:
                self.own(event)
            case _:
                self.serve(event)

    # ------------------------------------------------------------ the environment

    def _owner_restart(self, owner: str, chosen: Any) -> None:
        w = self.world
        w.start_owner(owner, w.owner[owner].incarnation + 1)
        for cell in w.mine(owner):
            w.baseline[cell] = GARBAGE
        w.weights = dict(chosen["weights"])

    def _fold_cell(self, owner: str, chosen: Any) -> None:
        w = self.world
        cells = [c for c in w.mine(owner) if chosen["tracker"][c] != w.baseline[c]]
        assert owner in w.fold, f"{owner} copies cells without a fold"
        for cell in cells:
            w.baseline[cell] = w.weights[cell]

    def _late_write(self, event: Event) -> None:
        (late,) = [x for x in self.world.late if (x.by, x.revision) == (event.coordinator, event.epoch)]
        self.world.arrive(late)

    # ------------------------------------------------------------ coordinators

    def inform(self, coordinator: str, *, stale: bool = False) -> None:
        """Let a coordinator hear what there is to hear."""
        self._reports[coordinator].bring(stale=stale)

    def lead(self, event: Event) -> list[Effect]:
        """Give a coordinator the event of its action; its effects are not carried out yet."""
        w, name = self.world, event.name
        c = w.coordinators[event.coordinator]
        if name in ("TakeOver", "ReadBack", "WriteAgain", "Fatal"):
            return c.record_read(w.revision, w.record, w.operation)
        self.inform(event.coordinator, stale=w.setting.stale_reports and name in ("OpenAttempt", "RollBack"))
        leave_out = frozenset({event.silent} - {""})
        match name:
            case "OpenAttempt":
                return c.open_attempt(Kind(event.kind), leave_out=leave_out, first_absolute=w.setting.absolute_first)
            case "OpenRestore":
                return c.open_restore(leave_out=leave_out)
            case "Admit":
                return c.admit(leave_out=leave_out)
            case "AttemptFailed":
                return c.fail_attempt(event.kind)
            case "EndRestore":
                return c.end_restore(event.kind)
            case _ if name in _LEADS:
                act: Callable[[], list[Effect]] = getattr(c, _LEADS[name])
                return act()
            case _:
                raise RefusedError(f"no such step of a coordinator: {name}")

    # ------------------------------------------------------------ owners

    def own(self, event: Event) -> None:
        """Give an owner the event of its action."""
        w, o = self.world, event.owner
        owner = w.owner[o]
        match event.name:
            case "Emit":
                w.owner_does(o, owner.emit(self._emit_order(event)))
            case "EmitFailed" if owner.emitting != event.epoch:
                w.owner_does(o, owner.emit(self._emit_order(event)))
            case "Seal" | "EmitFailed":
                order = w.emission[o]
                w.owner_does(o, owner.emitted(w.manifest(o, order), w.share(o, w.weights)))
            case "BeginFold":
                self._begin_fold(o)
            case "EndFold" | "LoseBaseline":
                self._end_fold(o, lost=event.name == "LoseBaseline")
            case _:
                raise RefusedError(f"no such step of an owner: {event.name}")

    def _emit_order(self, event: Event) -> Emit:
        return self.world.said.orders[event.epoch].emits[event.owner]

    def _begin_fold(self, o: str) -> None:
        w = self.world
        for epoch in sorted(w.said.told):
            w.owner_does(o, w.owner[o].fold(Fold(RECORD, epoch)))
        w.owner_does(o, w.owner[o].learned(w.record))

    def _end_fold(self, o: str, *, lost: bool) -> None:
        w = self.world
        epoch, found = w.fold[o].epoch, w.share(o, w.baseline)
        if lost and found == w.fold[o].content_digest:
            w.owner_does(o, w.owner[o].fold_failed(epoch, "the weights were stepped"))
        else:
            w.owner_does(o, w.owner[o].folded(epoch, found))
        del w.fold[o]
        if lost:
            for cell in w.mine(o):
                w.baseline[cell] = GARBAGE

    # ------------------------------------------------------------ engines

    def serve(self, event: Event) -> None:
        """Give an engine, or one of its ranks, the event of its action."""
        w, e = self.world, event.engine
        node = w.node[e]
        match event.name:
            case "CloseGate":
                self._close_gate(e)
            case "LoseRecord":
                w.node_does(e, node.record_lost())
            case "GateClosed":
                w.node_does(e, node.gate_closed(w.gate_epoch[e]))
            case "OpenGate":
                w.node_does(e, node.gate_ready(0 if node.opening is None else node.opening[0]))
            case "LearnCommit":
                w.node_does(e, node.learned(w.record, w.learn(e)))
            case "OpenApply":
                w.node_does(e, node.order(OpenApply(RECORD, event.epoch)))
            case _ if event.rank:
                self._rank((e, event.rank), event)
            case _:
                raise RefusedError(f"no such step of an engine: {event.name}")

    def _close_gate(self, e: str) -> None:
        """K is read; first an order to prepare for its epoch is heard, if there is one that closes gates."""
        w = self.world
        order = w.prepare_order(e, w.record.epoch)
        if order is not None and not order.stage and order.epoch > w.node[e].fence:
            w.node_does(e, w.node[e].order(order))
        w.node_does(e, w.node[e].read(w.record))

    def _rank(self, rank: Rank, event: Event) -> None:
        w = self.world
        receiver = w.receiver[rank]
        match event.name:
            case "Fence":
                self._fence(rank, event.epoch)
            case "Stage":
                self._stage(rank)
            case "BeginWrite":
                p = w.payload(event.epoch, event.owner, event.incarnation, event.cell)
                w.rank_does(rank, receiver.payload(p.identity, p.order.base, p.digest, 1))
            case "EndWrite":
                writing = w.writing.pop(rank)
                w.storage[rank][writing.payload.cell] = writing.result
                w.rank_does(rank, receiver.write_ended(writing.payload.identity))
            case "FailWrite":
                writing = w.writing.pop(rank)
                w.rank_does(rank, receiver.write_failed(writing.payload.identity, "the loader raised"))
            case "Acknowledge":
                self._acknowledge(rank)
            case _:
                raise RefusedError(f"no such step: {event.name!r}")

    def _fence(self, rank: Rank, epoch: int) -> None:
        """The order reaches the node, which reads K and hands it on, and this rank takes it with K as it is now."""
        w, (e, _) = self.world, rank
        if rank not in w.handed or w.handed[rank].order.epoch != epoch:
            order = w.prepare_order(e, epoch)
            if order is None:
                raise RefusedError(f"{e}: no order to prepare epoch {epoch} was ever sent to it")
            w.node_does(e, w.node[e].order(order))
            w.node_does(e, w.node[e].read(w.record))
        handed = w.handed.get(rank)
        if handed is None or handed.order.epoch != epoch:
            raise RefusedError(f"{e}: the order to prepare epoch {epoch} was not handed on")
        w.rank_does(rank, w.receiver[rank].prepare(handed.order, w.record))

    def _stage(self, rank: Rank) -> None:
        w = self.world
        for p in self._expected(rank):
            w.rank_does(rank, w.receiver[rank].payload(p.identity, p.order.base, p.digest, 1))
        self._manifests(rank)
        if w.receiver[rank].stage != "staged":
            raise RefusedError(f"{rank}: not everything that was sealed has arrived")

    def _expected(self, rank: Rank) -> list[Payload]:
        """Payloads of the rank's epoch that its order names."""
        w = self.world
        epoch = w.receiver[rank].epoch
        order = w.prepare_order(rank[0], epoch)
        if order is None:
            return []
        known = {(o.owner, o.incarnation) for o in order.owners}
        return [
            p
            for p in w.said.payloads
            if p.identity.epoch == epoch and (p.identity.owner, p.identity.owner_incarnation) in known
        ]

    def _manifests(self, rank: Rank) -> None:
        """Every manifest that there is of the rank's epoch arrives, perhaps again."""
        w = self.world
        order = w.prepare_order(rank[0], w.receiver[rank].epoch)
        for o in () if order is None else order.owners:
            manifest = w.said.manifests.get((order.epoch, o.owner, o.incarnation)) if order is not None else None
            if manifest is not None:
                w.rank_does(rank, w.receiver[rank].manifest(manifest))

    def _acknowledge(self, rank: Rank) -> None:
        w = self.world
        epoch = w.receiver[rank].epoch
        self._manifests(rank)
        if not epoch or w.synchronising.get(rank) != epoch:
            raise RefusedError(f"{rank}: not everything of epoch {epoch} is in place")
        w.rank_does(rank, w.receiver[rank].synchronised(epoch))


_LEADS = {
    "RollBack": "roll_back",
    "OrderOpenApply": "order_open_apply",
    "Commit": "commit",
    "Stop": "stop",
    "Abandon": "abandon",
    "Publish": "publish",
    "FinishTransition": "finish_transition",
}
"""Actions of a leader that choose nothing, and the method that each of them is."""
