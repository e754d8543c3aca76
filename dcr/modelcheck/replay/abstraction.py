"""What the specification would see of a world: its state, variable by variable, built from what the roles hold."""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from dcr.modelcheck.replay.world import Payload, World
from dcr.modelcheck.values import Function, State, Value
from dcr.protocol.conductor import Conductor
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.leader import Phase
from dcr.protocol.receiver import DENSE, RESTORE, UNKNOWN
from dcr.protocol.record import CommitRecord, Direction, Member, OwnerRef

if TYPE_CHECKING:
    from dcr.protocol.messages import Emit, Prepare

_PHASES = {
    Phase.STARTING: "standby",
    Phase.IDLE: "idle",
    Phase.WRITING: "unknown",
    Phase.ATTEMPT: "attempt",
    Phase.RESTORING: "restore",
    Phase.FOLDING: "folding",
    Phase.FATAL: "fatal",
}
_MARKS = {DENSE: -1, RESTORE: -2, UNKNOWN: -3}
_NO_VERSION = -1
_NO_EPOCH = -1
_PREPARED = ("fenced", "staged")

_PASSED_OVER = frozenset({"step", "could", "setting", "faults", "commits", "licensed"})
"""Variables that no role has: the trace's own, the model's budget of faults, and history that no party reads."""


def record(**fields: Value) -> Function:
    """A record of the specification."""
    return Function(cast("dict[Value, Value]", fields))


def _function(of: Mapping[str, int]) -> Function:
    return Function(cast("Mapping[Value, Value]", of))


def _version(version: int | None) -> int:
    return _NO_VERSION if version is None else version


class Abstraction:
    """The specification's view of one world.

    Args:
        world: the deployment.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._no_owners = _function(dict.fromkeys(world.owners, 0))
        self._no_open = record(
            target=0, candidate=0, attempts=0, kind="none", direction="none", owners=self._no_owners, stopped=False
        )
        self._no_writing = record(epoch=0, cell="", operation="", result=0)

    def state(self) -> dict[str, Value]:
        """The state of the world, without the variables of `specified` that no role has."""
        w = self._world
        said = w.said
        return {
            "K": self._record(w.record, w.revision, w.reason),
            "writes": frozenset(
                record(by=x.by, record=self._record(x.write.record, x.revision, x.write.reason)) for x in w.late
            ),
            "coord": Function({name: self._coordinator(c) for name, c in w.coordinators.items()}),
            "orders": frozenset(self._order(epoch) for epoch in said.orders),
            "applies": frozenset(said.applies),
            "failed": frozenset(said.failed),
            "told": frozenset(said.told),
            "push": record(candidate=w.candidate, over=w.push_over),
            "own": Function({o: self._owner(o) for o in w.owners}),
            "tracker": _function(w.baseline),
            "weights": _function(w.weights),
            "net": frozenset(map(_payload, said.payloads)),
            "manifests": frozenset(self._manifest(m) for m in said.manifests.values()),
            "node": Function({e: self._node(e) for e in w.engines}),
            "rank": Function({e: Function({r: self._rank(e, r) for r in w.ranks}) for e in w.engines}),
            "mem": Function({e: Function({r: _function(w.storage[e, r]) for r in w.ranks}) for e in w.engines}),
            "prepared": frozenset(_report(*key) for key in said.prepared),
            "acks": frozenset(_report(*key) for key in said.acks),
        }

    def party(self, coordinator: str, owner: str, engine: str) -> dict[str, Value]:
        """What is seen of one party: of a coordinator, or of an engine and its ranks, or of an owner."""
        w = self._world
        if coordinator:
            return {"coord": self._coordinator(w.coordinators[coordinator]), "push over": w.push_over}
        if engine:
            ranks = {f"rank {r}": self._rank(engine, r) for r in w.ranks}
            return {
                "node": self._node(engine),
                **ranks,
                **{f"mem {r}": _function(w.storage[engine, r]) for r in w.ranks},
            }
        return {"own": self._owner(owner), "tracker": _function(w.baseline)}

    # ------------------------------------------------------------ the record

    def _roster(self, members: tuple[Member, ...]) -> Function:
        found = {m.engine: m.incarnation for m in members}
        return Function({e: found.get(e, 0) for e in self._world.engines})

    def _owners(self, owners: tuple[OwnerRef, ...]) -> Function:
        found = {o.owner: o.incarnation for o in owners}
        return Function({o: found.get(o, 0) for o in self._world.owners})

    def _record(self, k: CommitRecord, revision: int, reason: str) -> Function:
        w, tr, c = self._world, k.open, k.committed
        opened = self._no_open
        if tr is not None:
            opened = record(
                target=tr.target,
                candidate=w.tokens[tr.candidate],
                attempts=tr.attempts,
                kind=tr.kind.value,
                direction=tr.direction.value,
                owners=self._owners(tr.owners),
                stopped=tr.stopped,
            )
        committed = record(
            version=0 if c is None else c.version,
            epoch=0 if c is None else c.epoch,
            candidate=0 if c is None else w.tokens[c.candidate],
            direction="none" if c is None else c.direction.value,
            members=self._roster(() if c is None else c.members),
            root=self._owners(() if c is None else c.owners),
        )
        return record(
            revision=revision,
            version=k.version,
            epoch=k.epoch,
            leader=k.leader,
            token=k.fencing_token,
            baseline=self._content(k.baseline_id),
            members=self._roster(k.members),
            open=opened,
            committed=committed,
            reason=reason,
        )

    def _content(self, content_digest: str) -> Function:
        return _function(self._world.content(content_digest))

    def _coordinator(self, c: Conductor) -> Function:
        phase = _PHASES[c.phase]
        in_session = phase in ("attempt", "restore") and c.session is not None
        return record(
            phase=phase,
            revision=0 if phase == "standby" or c.revision is None else c.revision,
            epoch=c.session.epoch if in_session and c.session is not None else 0,
            candidate=self._world.tokens[c.candidate] if phase in ("attempt", "folding") else 0,
        )

    # ------------------------------------------------------------ messages

    def _order(self, epoch: int) -> Function:
        order = self._world.said.orders[epoch]
        sent: list[Prepare | Emit] = [*order.prepares.values(), *order.emits.values()]
        base, target = sent[0].base, sent[0].target
        owners = next((x.owners for x in order.prepares.values()), ())
        back = base.kind is not Kind.RESTORE and target == base.version
        direction = "none" if base.kind is Kind.RESTORE else (Direction.BACK if back else Direction.FORWARD).value
        return record(
            epoch=epoch,
            kind=base.kind.value,
            version=base.version,
            candidate=self._world.tokens[base.candidate],
            direction=direction,
            owners=self._owners(owners),
            members=self._roster(tuple(Member(e, p.incarnation) for e, p in order.prepares.items())),
        )

    def _manifest(self, m: Manifest) -> Function:
        w = self._world
        bits = w.sealed_bits[m.epoch, m.owner, m.owner_incarnation]
        return record(
            epoch=m.epoch,
            owner=m.owner,
            incarnation=m.owner_incarnation,
            bits=Function({c: bits.get(c, 0) for c in w.cells}),
        )

    # ------------------------------------------------------------ owners and engines

    def _owner(self, o: str) -> Function:
        owner = self._world.owner[o]
        return record(
            incarnation=owner.incarnation,
            base=_version(owner.base),
            folding=owner.folding,
            folded=owner.folded_epoch,
            fence=owner.fence,
            emitting=owner.emitting,
            seal=self._seal(o),
        )

    def _seal(self, o: str) -> Function:
        """What the owner would hold its weights to: the candidate that it sealed last, and its bits then."""
        w, owner = self._world, self._world.owner[o]
        nothing = dict.fromkeys(w.cells, 0)
        if not owner.sealed_epochs:
            return record(candidate=0, bits=_function(nothing))
        epoch = owner.sealed_epochs[-1]
        order = w.said.orders[epoch].emits[o]
        bits = w.sealed_bits[epoch, o, owner.incarnation]
        return record(candidate=w.tokens[order.base.candidate], bits=_function(nothing | bits))

    def _node(self, e: str) -> Function:
        node = self._world.node[e]
        epoch, version = node.opening or (_NO_EPOCH, 0)
        return record(
            incarnation=node.incarnation,
            gate=node.gate,
            fence=node.fence,
            serving=_version(node.serving),
            opening=epoch,
            version=version,
        )

    def _rank(self, e: str, r: str) -> Function:
        w = self._world
        k, node, writing = w.receiver[e, r], w.node[e], w.writing.get((e, r))
        # The order to apply waits at the node until the gate is closed.
        stage = "applying" if node.applying == k.epoch and k.stage in _PREPARED else k.stage
        return record(
            fence=k.fence,
            epoch=k.epoch,
            stage=stage,
            seen=frozenset(self._seen(i) for i in k.seen),
            writing=self._no_writing
            if writing is None
            else record(
                epoch=writing.payload.identity.epoch,
                cell=writing.payload.cell,
                operation=writing.payload.operation,
                result=writing.result,
            ),
            version=_version(k.version),
            torn=frozenset(_MARKS[t] if t in _MARKS else w.tokens[t] for t in k.torn_by),
            acknowledged=k.acknowledged_epoch,
        )

    def _seen(self, identity: Any) -> Function:
        (p,) = [p for p in self._world.said.payloads if p.identity == identity]
        return record(owner=identity.owner, incarnation=identity.owner_incarnation, cell=p.cell, digest=p.new)


@lru_cache(maxsize=65536)
def _payload(p: Payload) -> Function:
    return record(
        epoch=p.identity.epoch,
        owner=p.identity.owner,
        incarnation=p.identity.owner_incarnation,
        cell=p.cell,
        operation=p.operation,
        old=p.old,
        new=p.new,
    )


@lru_cache(maxsize=65536)
def _report(epoch: int, engine: str, rank: str, incarnation: int) -> Function:
    return record(epoch=epoch, engine=engine, rank=rank, incarnation=incarnation)


# ---------------------------------------------------------------- the specification's side


def specified(state: State) -> dict[str, Value]:
    """A state of the specification, as far as roles have it.

    Left out, or put to nought where it means nothing: the budget of faults; what no party reads; the epoch of a
    coordinator outside sessions; what a rank saw of an attempt that it dropped; the version of a gate order that there
    is none of.
    """
    of: Any = state
    found: dict[str, Value] = {name: value for name, value in of.items() if name not in _PASSED_OVER}
    found["writes"] = frozenset(_without(x, "order") for x in of["writes"])
    found["coord"] = _each(state["coord"], _known)
    found["node"] = _each(state["node"], lambda x: x if x["opening"] != _NO_EPOCH else _with(x, version=0))
    found["rank"] = _each(
        state["rank"], lambda ranks: _each(ranks, lambda x: x if x["epoch"] else _with(x, seen=frozenset()))
    )
    return found


def _each(of: Any, change: Any) -> Function:
    return Function({k: change(v) for k, v in of.items()})


def _with(of: Mapping[Any, Any], **fields: Value) -> Function:
    return Function(dict(of) | fields)


def _without(of: Mapping[Any, Any], *names: str) -> Function:
    return Function({k: v for k, v in of.items() if k not in names})


def _known(c: Mapping[Any, Any]) -> Function:
    phase = c["phase"]
    return record(
        phase=phase,
        revision=c["revision"],
        epoch=c["epoch"] if phase in ("attempt", "restore") else 0,
        candidate=c["candidate"] if phase in ("attempt", "folding") else 0,
    )
