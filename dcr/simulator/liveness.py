"""`Converges`: once faults stop, the push ends, the next one succeeds, and every engine serves what was committed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dcr.protocol.leader import Phase
from dcr.protocol.record import Direction
from dcr.simulator.cells import content_digest
from dcr.simulator.invariants import BrokenError, holds
from dcr.simulator.moves import apply

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment

ROUNDS_MAX = 60
"""So many time-outs may run out before something must have come of it."""
STEPS_MAX = 4000
"""So many steps are taken at most until nothing is left to do."""
PUSHES_MAX = 4

_NAME = "Converges"


def converge(world: "Deployment", observe: Callable[[str], None] | None = None) -> None:
    """Let faults stop, and see what comes of it.  What happens from here on follows from what there is.

    Args:
        world: the deployment.
        observe: told what is done, for the story.

    Raises:
        BrokenError: it does not converge, or another invariant breaks on the way.
    """
    _Calm(world, observe or (lambda _: None)).converge()


class _Calm:
    def __init__(self, world: "Deployment", tell: Callable[[str], None]) -> None:
        self.world = world
        self.tell = tell
        self._replaced: set[str] = set()
        self._went_on: set[str] = set()  # candidates, with an operator's word

    def converge(self) -> None:
        w = self.world
        self.tell("faults stop")
        w.calm = True
        if w.leader.whim is not None:
            self.tell("a leader with a policy takes over")
            w.succeed(0, old_lives=False)
            for old in w.old:
                old.dies(0)
            w.old = []
        for process in w.processes():
            process.stalled = process.cut = False
        for party in w.parties():
            party.late.clear()
        while w.late_write(0):
            pass
        self._until(self._pushed, "the push does not end")
        self._abandon()
        if self._restorable():
            self._until(self.served, "an engine does not come to serve the committed version without another push")
        for _ in range(PUSHES_MAX):
            self._abandon()
            before = len(w.outcomes)
            self.tell("the trainer pushes")
            apply(w, ("push", "", 1 + 5 * w.newest))
            self._until(self._pushed, "a push without faults does not end")
            if all(not outcome.error for outcome in w.outcomes[before:]):
                break
        else:
            raise BrokenError(_NAME, f"no push succeeds without faults: {w.outcomes[-1].error}")
        self._until(self.served, "an engine does not come to serve the committed version")
        for c in w.old:
            apply(w, ("poll", c.id, 0))
        self.rest()
        for c in w.old:
            known = c.role.phase in (Phase.FATAL, Phase.STARTING)  # or it never led
            holds(known, _NAME, f"{c.id} was replaced and does not learn so: it is {c.role.phase}")

    def _abandon(self) -> None:
        k = self.world.store.record
        if k is not None and k.open is not None:
            self.tell("the operator abandons the transition")
            apply(self.world, ("abandon", "", 0))
            self.rest()

    def _answer(self) -> None:
        """A push waits in a stopped transition for the operator, who has it go on; who stops again is given up."""
        w = self.world
        assert w.store.record is not None
        assert w.store.record.open is not None
        candidate = w.store.record.open.candidate
        how = ("resume", "dense")[w.setup.salt % 2]
        if candidate not in self._went_on and apply(w, (how, "", 0)):
            self.tell("the operator has the stopped transition go on")
            self._went_on.add(candidate)
            self.rest()
        else:
            self._abandon()

    def _restorable(self) -> bool:
        """The owners hold the committed version: from there every engine can be restored.

        Who sealed it and has not folded it does not count, even if its shares of the two versions are the same: a
        leader may have given up waiting for that fold, and then believes it no more.
        """
        k = self.world.store.record
        c = None if k is None else k.committed
        sealed = {} if c is None or c.direction is Direction.BACK else {o.owner: o.incarnation for o in c.owners}
        for o in self.world.owners:
            if c is not None and sealed.get(o.name) == o.incarnation and o.role.folded_epoch != c.epoch:
                return False
        owners = [o.baseline for o in self.world.owners if o.baseline is not None and not o.role.folding]
        held = {i: v for cells in owners for i, v in cells.items()}
        return k is not None and content_digest(held) == k.baseline_id

    def _pushed(self) -> bool:
        return not any(o.pushing for o in self.world.owners)

    def served(self) -> bool:
        k = self.world.store.record
        return k is not None and k.open is None and all(e.serving == k.version for e in self.world.engines)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        w = self.world
        for _ in range(ROUNDS_MAX):
            self._restart_what_cannot_go_on()
            for p in w.parties():
                w.connect(p)
            self.rest()
            if done():
                return
            if w.leader.policy is not None and w.leader.policy.held:
                self._answer()
                if done():
                    return
            if not self._pushed() and not all(o.pushing for o in w.owners):
                for o in w.owners:
                    if not o.pushing:
                        o.push()  # ranks go in step: whoever restarted comes to the same push
                self.rest()
                if done():
                    return
            for process in w.processes():
                apply(w, ("poll", process.id, 0))
            self.rest()
            if done():
                return
            self.tell("the leader's time-out runs out")
            apply(w, ("run_out", w.leader.id, 0))
        held = [(e.name, e.incarnation, e.serving, e.node.gate, str(e.state()), e.refused) for e in w.engines]
        raise BrokenError(_NAME, f"{what}: the leader is {w.leader.role.phase}, engines {held}, K {w.store.record}")

    def _restart_what_cannot_go_on(self) -> None:
        w = self.world
        if w.leader.fatal:
            self.tell(f"the trainer starts again: {w.leader.fatal}")
            w.boot_trainer(0, old_lives=False)
        for e in w.engines:
            if e.refused and e.name not in self._replaced:
                self._replaced.add(e.name)  # once: nothing is refused for what happens without faults
                self.tell(f"{e.name} starts again: {e.refused}")
                w.disconnect(e, lost=0, kept=0)
                e.start(None)

    def connect_all(self) -> None:
        """Everybody connects, and reads K once."""
        for p in self.world.parties():
            self.world.connect(p)
        self.rest()
        for e in self.world.engines:
            apply(self.world, ("poll", e.id, 0))
        self.rest()

    def rest(self) -> None:
        """Everything that can happen by itself happens."""
        w = self.world
        steps, moved = 0, True
        while moved:
            moved = False
            for p in w.processes():
                tried = p.moves()
                while tried:
                    if apply(w, tried.pop()):
                        moved = True
                        steps += 1
                        if not tried:
                            tried = p.moves()
                if steps > STEPS_MAX:
                    raise BrokenError(_NAME, "it never comes to rest")


def start_up(world: "Deployment", observe: Callable[[str], None] | None = None) -> None:
    """Bring a deployment that starts warm to where version 0 is served everywhere."""
    if world.setup.cold:
        return
    calm = _Calm(world, observe or (lambda _: None))
    calm.tell("everything starts; version 0 is served")
    if world.setup.policy != "coordinator":
        world.calm = True
        world.succeed(0, old_lives=False)
    calm.connect_all()
    holds(calm.served(), _NAME, "version 0 is not served everywhere")
    if world.setup.policy != "coordinator":
        world.calm = False
        world.succeed(0, old_lives=False)
        for p in world.parties():
            world.connect(p)
