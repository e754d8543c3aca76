"""Who watches a role: called with every protocol step that it takes, before the step is carried out."""

import logging
from collections.abc import Callable

from dcr.protocol.step import Step

Observer = Callable[[Step], None]

_log = logging.getLogger("dcr")


def log_step(step: Step) -> None:
    """The default observer: steps go to the log ``dcr`` at level DEBUG."""
    _log.debug("%s %s epoch=%d %s", step.actor, step.action, step.epoch, step.detail)
