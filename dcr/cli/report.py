"""What commands print, and what they end with when they have something to report and prove nothing by it."""

from typing import Any

from dcr.protocol.errors import DcrError


class UndecidedError(DcrError):
    """A command could not find out what it was asked; what it found is reported all the same (exit status 3).

    Attributes:
        report: the rest of the object that ``--json`` prints.
    """

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


def say(text: str) -> None:
    """One piece of a report, at once: a run takes minutes."""
    print(text, flush=True)  # noqa: T201 -- what a command says
