"""Who watches a role: called with every protocol step that it takes, before the step is carried out."""

import logging
from collections.abc import Callable

from dcr.protocol.step import Step

Observer = Callable[[Step], None]

_log = logging.getLogger("dcr")

# What an operator follows a push by; the rest is for whoever looks into one.
_MILESTONES = frozenset(
    {
        "Abandon",
        "Admit",
        "AttemptFailed",
        "Commit",
        "Evict",
        "FinishTransition",
        "LoseBaseline",
        "OpenAttempt",
        "OpenRestore",
        "RefuseMember",
        "Stop",
        "TakeOver",
    }
)


def log_step(step: Step) -> None:
    """The default observer: steps go to the log ``dcr``, milestones at level INFO and the others at DEBUG."""
    level = logging.INFO if step.action in _MILESTONES else logging.DEBUG
    _log.log(level, "%s %s epoch=%d %s", step.actor, step.action, step.epoch, step.detail)
