"""Pauses between the attempts of a push: what failed by an error that was reported would mostly fail again at once."""

_AT_ONCE = 2
"""The second attempt is made at once: it is of another kind than the first, and may well do."""
DOUBLINGS_MAX = 3
"""The longest pause is ``2 ** DOUBLINGS_MAX`` times the first."""


class Backoff:
    """How long to wait before the next attempt; who was lost or late puts nothing off."""

    def __init__(self) -> None:
        self._errors = 0
        self._due = False

    def failed(self, *, reported: bool) -> None:
        """An attempt failed: by an error that an owner or engine reported, or otherwise."""
        self._errors += reported
        self._due = reported and self._errors >= _AT_ONCE

    def take(self) -> int:
        """How many times the first pause is due now, once; 0 if none is."""
        due, self._due = self._due, False
        return 2 ** min(self._errors - _AT_ONCE, DOUBLINGS_MAX) if due else 0
