"""The one timer of a coordinator: it waits for one thing at a time."""

from dcr.protocol.coordinator_effects import StartTimer


class Timer:
    """Which time-out runs.  Another one that is started takes its place, and its end is then no event any more."""

    def __init__(self) -> None:
        self._number = 0
        self._name = ""

    def runs(self, *names: str) -> bool:
        """Whether one of these runs."""
        return self._name in names

    def start(self, name: str, times: int = 1) -> StartTimer:
        """Start this one, so many times as long as its setting says."""
        self.stop()
        self._name = name
        return StartTimer(name, self._number, times)

    def stop(self) -> None:
        """Nobody waits for its end any more."""
        self._number += 1
        self._name = ""

    def ended(self, number: int) -> bool:
        """True if the one that was started under this number still ran; it has ended, and none runs now."""
        if number != self._number or not self._name:
            return False
        self._name = ""
        return True
