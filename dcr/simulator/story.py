"""A schedule told as a story: what happened to whom, what was lost, and what the roles did about it."""

from typing import TYPE_CHECKING

from dcr.simulator.glossary import GLOSSES
from dcr.simulator.run import Observer, Run, run_schedule

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment
    from dcr.simulator.schedule import Schedule

_CALM_STEPS_MAX = 12
"""So many steps of the roles are told after one thing that was done."""
_LEGEND = """\
A number is a move of the schedule; below it what was sent, then the steps of the roles: who, which one, epoch, details.
c1, c2: coordinators, in the order in which they started.  o0.1: owner o0 in trainer 1.  e0: an engine with its node.
c1:e0: at c1, what e0 sent.  K: the commit record.  docs/protocol.md explains each word; of the steps come here:"""


class _Story(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.actions: set[str] = set()
        self._number = 0
        self._open: list[str] | None = None

    def begins(self, world: "Deployment", what: str) -> None:
        self.ends(world)
        world.trail.clear()
        world.notes = []
        self._open = [what]

    def nothing(self) -> None:
        self._open = None

    def ends(self, world: "Deployment") -> None:
        if self._open is None:
            return
        self._number += 1
        steps = list(world.trail)
        told = steps if len(steps) <= _CALM_STEPS_MAX else steps[: _CALM_STEPS_MAX // 2]
        last = steps[-_CALM_STEPS_MAX // 2 :] if len(told) < len(steps) else []
        self.actions |= {s.action for s in (*told, *last)}
        self.lines.append(f"{self._number:3}  {self._open[0]}")
        self.lines += [f"       {note}" for note in world.notes or ()]
        self.lines += [f"       {s.actor}: {s.action}, epoch {s.epoch} {s.detail}".rstrip() for s in told]
        if last:
            self.lines.append(f"       ... and {len(steps) - len(told)} steps more, the last ones:")
            self.lines += [f"       {s.actor}: {s.action}, epoch {s.epoch} {s.detail}".rstrip() for s in last]
        self._open = None


def tell(schedule: "Schedule") -> tuple[Run, str]:
    """Run a schedule again and tell it.

    Returns:
        What came of it, and the story: how to read it, with every word that it has for a step; then a line for
        everything that was done, and below it what was sent or lost and the steps of the roles.
    """
    story = _Story()
    s = schedule.setup
    head = (
        f"{s.owners} owners, engines of {', '.join(map(str, s.ranks))} ranks, {s.gate_mode} gate, members_min "
        f"{s.members_min}, attempts_max {s.attempts_max}, operations {', '.join(s.operations)}"
        f"{', a stopped push waits' if s.stop_waits else ''}{', successors wait for engines' if s.rejoin_waits else ''}"
    )
    run = run_schedule(schedule, story)
    end = f"BROKEN {run.failure.invariant}: {run.failure.what}" if run.failure else f"all held: {run.outcome}"
    words = [f"  {action:16} {gloss}" for action, gloss in GLOSSES.items() if action in story.actions]
    return run, "\n".join([head, "", _LEGEND, *words, "", *story.lines, end])
