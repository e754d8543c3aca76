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
        "Commit",
        "Evict",
        "FinishTransition",
        "OpenAttempt",
        "OpenRestore",
    }
)
# What an operator should look at although nothing has failed yet.
_WARNINGS = frozenset({"AttemptFailed", "LoseBaseline", "RefuseMember", "Stop", "TakeOver", "Wait"})


def guarded(observe: Observer) -> Observer:
    """The same observer, whose errors are logged and go no further: who watches must not disturb what is watched."""

    def watch(step: Step) -> None:
        try:
            observe(step)
        except Exception:  # noqa: BLE001 - logged, whatever it is
            _log.exception("an observer failed at %s", step)

    return watch


def log_step(step: Step) -> None:
    """The default observer: steps go to the log ``dcr``, at level WARNING, INFO or DEBUG."""
    if step.action in _WARNINGS:
        level = logging.WARNING
    else:
        level = logging.INFO if step.action in _MILESTONES else logging.DEBUG
    _log.log(level, "%s %s epoch=%d %s", step.actor, step.action, step.epoch, step.detail)
