"""Who watches a role: called with every protocol step that it takes, before the step is carried out."""

import logging
import threading
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
    """The same observer, whose errors are logged and go no further: who watches must not disturb what is watched.

    That holds for what would end the thread too, as ``sys.exit`` does; not for the interrupt of whoever runs the
    process, which comes in the main thread.
    """

    def watch(step: Step) -> None:
        try:
            observe(step)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            _log.exception("an observer failed at %s", step)

    return watch


def log_step(step: Step) -> None:
    """The default observer: steps go to the log ``dcr``, at level WARNING, INFO or DEBUG."""
    if step.action in _WARNINGS:
        level = logging.WARNING
    else:
        level = logging.INFO if step.action in _MILESTONES else logging.DEBUG
    _log.log(level, "%s %s epoch=%d %s", step.actor, step.action, step.epoch, step.detail)
