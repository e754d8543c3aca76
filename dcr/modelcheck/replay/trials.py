"""What the specification forbids, tried on the code: each such event must be refused, or change nothing.

The trials are made on the deployment that replays the trace, not on a copy: an order or a payload that came too early,
too late, twice or to the wrong party must do no harm to what follows either.
"""

from collections import Counter
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any, TypeAlias

from dcr.modelcheck.replay.abstraction import Abstraction
from dcr.modelcheck.replay.branch import branch
from dcr.modelcheck.replay.player import Event, Player
from dcr.modelcheck.replay.world import Messages, World
from dcr.modelcheck.story import changes
from dcr.modelcheck.values import State, Value
from dcr.protocol.coordinator_effects import Fatal, WriteRecord
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.leader import Phase
from dcr.protocol.step import Step

_SAID = ("failed", "told", "applies", "orders", "payloads", "manifests", "prepared", "acks")

_Party: TypeAlias = tuple[str, str, str]
"""Names of a coordinator, an owner and an engine, of which one is not empty."""


class ForbiddenError(DcrError):
    """The code did what the specification forbids."""


class Trials:
    """Tries forbidden events on the deployment of a player.

    Args:
        player: plays the trace.
        view: the specification's view of its world.

    Attributes:
        refused: how often an event of each name was refused with an error.
        without_effect: how often one changed nothing.
        refusals: where in the code each error was raised, as (file name, line).
    """

    def __init__(self, player: Player, view: Abstraction) -> None:
        self._player = player
        self._view = view
        self.refused: Counter[str] = Counter()
        self.without_effect: Counter[str] = Counter()
        self.refusals: Counter[tuple[str, int]] = Counter()
        self._published: set[tuple[str, int]] = set()  # (leader, committed epoch) that it published though told before

    def run(self, before: State, could: Any) -> None:
        """Try whatever is not in `could`.

        Args:
            before: the state that the world is in.
            could: every step that the specification allows there.

        Raises:
            ForbiddenError: an event that is not allowed had an effect.
        """
        allowed = {Event.of(step) for step in could}
        seen: dict[_Party, dict[str, Value]] = {}
        for event in _events(self._player.world, before):
            if not _is_allowed(event, allowed):
                self._try(event, seen)
        faults: Any = before["faults"]
        if not faults["waits"]:
            for event in sorted(allowed, key=lambda x: x.coordinator):
                self._must_know(event)

    def _try(self, event: Event, seen: dict[_Party, dict[str, Value]]) -> None:
        """Try one; `seen` has what each party's last trial left as it was, and gets this one's."""
        party: _Party = (event.coordinator, "" if event.engine else event.owner, event.engine)
        before = seen[party] if party in seen else self._seen(party)
        try:
            harmless = self._lead(event) if event.coordinator else self._serve(event)
        except RefusedError as e:
            where = _raised_at(e)
            if where[0] == "player.py":  # the role gave nothing to go on with, and refused nothing
                self.without_effect[event.name] += 1
            else:
                self.refused[event.name] += 1
                self.refusals[where] += 1
        else:
            self.without_effect[event.name] += 1
            if not harmless:
                raise ForbiddenError(f"{event} is forbidden, but the code began to do it")
        now = seen[party] = self._seen(party)
        if now != before:
            changed = [x for name in before for x in changes(name, before[name], now[name])]
            raise ForbiddenError("\n    ".join([f"{event} is forbidden, but it changed", *changed]))

    def _lead(self, event: Event) -> bool:
        """Let a coordinator try; False if it began something that the control plane would not refuse."""
        world, name = self._player.world, event.coordinator
        if world.coordinators[name].revision == world.revision:
            return not self._player.lead(event) or self._publishes(event)
        # Whoever was replaced finds out by its write, which the control plane refuses; the trace says when.
        kept = branch(world.coordinators[name])
        writes = [x for x in self._player.lead(event) if isinstance(x, WriteRecord)]
        if not writes:
            return True
        harmless = all(self._is_refused(name, w) for w in writes)
        world.coordinators[name] = kept
        return harmless

    def _publishes(self, event: Event) -> bool:
        """Who took over publishes the last commit once more, whether there is one that is not published yet or not."""
        c = self._player.world.record.committed
        published = (event.coordinator, 0 if c is None else c.epoch)
        again = published in self._published
        self._published.add(published)
        folding = self._player.world.coordinators[event.coordinator].phase is Phase.FOLDING
        return event.name == "Publish" and folding and not again

    def _is_refused(self, name: str, write: WriteRecord) -> bool:
        """The control plane refuses the write of who was replaced, who then does nothing but end."""
        world, c = self._player.world, self._player.world.coordinators[name]
        if write.expected_revision == world.revision:
            return False
        answer = c.conflict(write.operation_id, world.revision, world.operation)
        return c.phase is Phase.FATAL and all(isinstance(x, Fatal | Step) for x in answer)

    def _serve(self, event: Event) -> bool:
        if event.name == "OpenGate":
            # A gate order is carried out once: whoever refuses it forgets it.  The trace may carry it out later.
            node = branch(self._player.world.node[event.engine])
            node.gate_ready(0 if node.opening is None else node.opening[0])
            return False
        if event.owner and not event.engine:
            self._player.own(event)
        else:
            self._player.serve(event)
        return True

    def _must_know(self, event: Event) -> None:
        """Without a time-out to spend a session ends only because of what was reported: no further reason is needed.

        Raises:
            ForbiddenError: it would go on for ever.
        """
        if event.name not in ("AttemptFailed", "EndRestore"):
            return
        self._player.inform(event.coordinator)
        c = branch(self._player.world.coordinators[event.coordinator])
        try:
            c.fail_attempt() if event.name == "AttemptFailed" else c.end_restore()
        except RefusedError as e:
            raise ForbiddenError(f"{event} is to be, and nothing but a time-out would bring it about: {e}") from e

    def _seen(self, party: _Party) -> dict[str, Value]:
        """What an event of this party may change."""
        said = self._player.world.said
        return self._view.party(*party) | {f"messages of {name}": len(getattr(said, name)) for name in _SAID}


def _raised_at(error: BaseException) -> tuple[str, int]:
    """Where a role refused; where it called the guard, if a guard raised for it."""
    frames = [(f.f_code, line) for f, line in walk_tb(error.__traceback__) if f.f_code.co_name != "_must"]
    code, line = frames[-1]
    return code.co_filename.rpartition("/")[2], line


def _is_allowed(event: Event, allowed: set[Event]) -> bool:
    if event in allowed:
        return True
    match event.name:
        case "Emit":  # an order to emit leads to an emission, or to its failure by name: which one, the owner says
            return any(x.name == "EmitFailed" and (x.owner, x.epoch) == (event.owner, event.epoch) for x in allowed)
        case "Fence" | "CloseGate":  # a node that reads K closes its gate, or hands on an order that it has
            return any(x.name in ("Fence", "CloseGate") and x.engine == event.engine for x in allowed)
        case "Acknowledge" | "BeginWrite":  # what arrives before it may be written completes the stage
            return any(x.name == "Stage" and (x.engine, x.rank) == (event.engine, event.rank) for x in allowed)
        case "Stage":  # what arrives when it may be written is written
            return any(x.name == "BeginWrite" and (x.engine, x.rank) == (event.engine, event.rank) for x in allowed)
        case _:
            return False


# ---------------------------------------------------------------- what there is to try


def _events(world: World, before: State) -> Iterator[Event]:
    faults: Any = before["faults"]
    for c in world.coordinators:
        yield from _of_coordinator(world, c, faults)
    for o in world.owners:
        yield from _of_owner(world, o)
    for e in world.engines:
        yield from _of_engine(world, e)


def _of_coordinator(world: World, c: str, faults: Any) -> Iterator[Event]:
    role = world.coordinators[c]
    if role.record is None or role.phase in (Phase.WRITING, Phase.FATAL):
        return
    replaced = role.revision != world.revision
    silent = ["", *(world.engines if faults["evictions"] else [])]
    attempts = 0 if world.record.open is None else world.record.open.attempts
    if attempts < world.setting.attempts_max:
        yield from (Event("OpenAttempt", c, kind=k, silent=s) for k in sorted(world.setting.kinds) for s in silent)
        if faults["rollbacks"]:
            yield Event("RollBack", c)
    for name in ("OrderOpenApply", "AttemptFailed", "Commit", "EndRestore"):
        yield Event(name, c)
    # What only the model's budget of whims forbids is none of the code's business.
    for name, whim in (("Stop", "stops"), ("Abandon", "abandons")):
        if faults[whim]:
            yield Event(name, c)
    for name in ("OpenRestore", "Admit"):
        yield from (Event(name, c, silent=s) for s in silent)
    if not replaced:
        # One that was replaced may still repeat what it said before it knew; whoever hears it reads K.
        yield from (Event(name, c) for name in ("Publish", "FinishTransition", "Fatal"))


def _of_owner(world: World, o: str) -> Iterator[Event]:
    for epoch, order in world.said.orders.items():
        if o in order.emits:
            yield Event("Emit", owner=o, epoch=epoch)
    if o in world.emission and not world.owner[o].emitting:
        yield Event("Seal", owner=o)
    yield Event("BeginFold", owner=o)


def _of_engine(world: World, e: str) -> Iterator[Event]:
    node = world.node[e]
    idle = all((e, r) not in world.writing for r in world.ranks)
    yield Event("OpenGate", engine=e)
    if node.gate != "open":
        yield Event("LoseRecord", engine=e)
    if e in world.gate_epoch and node.gate != "closing":
        yield Event("GateClosed", engine=e)
    yield from (Event("OpenApply", engine=e, epoch=epoch) for epoch in sorted(world.said.applies))
    if idle:  # the shell hands nothing in while a write is under way
        yield Event("CloseGate", engine=e)
        yield Event("LearnCommit", engine=e)
    yield from _of_ranks(world, e, world.said)


def _of_ranks(world: World, e: str, said: Messages) -> Iterator[Event]:
    for r in world.ranks:
        yield Event("Acknowledge", engine=e, rank=r)  # manifests arrive at any time
        if (e, r) in world.writing:  # the shell hands nothing else in meanwhile, but to the other ranks
            continue
        for epoch, order in said.orders.items():
            if e in order.prepares:
                yield Event("Fence", engine=e, rank=r, epoch=epoch)
        if world.setting.asynchronous:
            yield Event("Stage", engine=e, rank=r)
        for p in said.payloads:
            i = p.identity
            yield Event(
                "BeginWrite",
                engine=e,
                rank=r,
                epoch=i.epoch,
                owner=i.owner,
                incarnation=i.owner_incarnation,
                cell=p.cell,
            )
