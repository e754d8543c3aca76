"""A schedule told as a story: what happened to whom, what was lost, and what the roles did about it."""

from typing import TYPE_CHECKING

from dcr.simulator.run import Observer, Run, run_schedule

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment
    from dcr.simulator.schedule import Schedule

_CALM_STEPS_MAX = 12
"""So many steps of the roles are told after one thing that was done."""


class _Story(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
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
        self.lines.append(f"{self._number:3}  {self._open[0]}")
        self.lines += [f"       {note}" for note in world.notes or ()]
        self.lines += [f"       {s.actor}: {s.action}, epoch {s.epoch} {s.detail}".rstrip() for s in told]
        if len(told) < len(steps):
            self.lines.append(f"       ... and {len(steps) - len(told)} steps more, the last ones:")
            last = steps[-_CALM_STEPS_MAX // 2 :]
            self.lines += [f"       {s.actor}: {s.action}, epoch {s.epoch} {s.detail}".rstrip() for s in last]
        self._open = None


def tell(schedule: "Schedule") -> tuple[Run, str]:
    """Run a schedule again and tell it.

    Returns:
        What came of it, and the story: a line for everything that was done, and below it what was sent or lost and the
        steps of the roles.
    """
    story = _Story()
    s = schedule.setup
    head = (
        f"{s.owners} owners, engines of {', '.join(map(str, s.ranks))} ranks, {s.gate_mode} gate, members_min "
        f"{s.members_min}, attempts_max {s.attempts_max}, operations {', '.join(s.operations)}"
    )
    run = run_schedule(schedule, story)
    end = f"BROKEN {run.failure.invariant}: {run.failure.what}" if run.failure else f"all held: {run.outcome}"
    return run, "\n".join([head, *story.lines, end])
