"""How many attempts a push may take yet, and how many it took; K counts those of its transition (DESIGN D14)."""

from dcr.protocol.record import OpenTransition


class Budget:
    """Attempts of the push in progress, or of its rollback.

    A push is allowed ``attempts_max`` attempts, and as many more each time that an operator lets it go on after a stop.
    How many are left outlives the leader: what its successor finds in K counts (DESIGN D16).

    Args:
        attempts_max: attempts before a transition stops.
    """

    def __init__(self, attempts_max: int) -> None:
        self._attempts_max = attempts_max
        self._allowed_from: int | None = None  # attempts in K when those that are allowed began
        self._taken_from: int | None = None  # attempts in K when the push began
        self._inherited: int | None = None

    @property
    def began(self) -> bool:
        """Whether a push, or what an operator allowed it anew, has begun."""
        return self._allowed_from is not None

    def take_over(self, tr: OpenTransition | None) -> None:
        """Another leader's transition goes on here, if it has not stopped.

        K does not say where its count began.  A transition stops, as a rule, once ``attempts_max`` attempts failed, so
        those after the last multiple of it are taken for what was used of those allowed last: never more are left.
        """
        self.over()
        if tr is not None and not tr.stopped:
            self._inherited = (tr.attempts - 1) // self._attempts_max * self._attempts_max

    def begin(self, attempts: int, *, held: bool) -> bool:
        """An attempt is to be opened after so many in K.

        Args:
            attempts: of the open transition.
            held: a push goes on that has stopped and waited; it began with the first of them, as far as is known.

        Returns:
            Whether a push begins of which nothing is known yet.
        """
        inherited, self._inherited = self._inherited, None
        self._allowed_from = attempts if inherited is None else inherited
        if self._taken_from is not None:
            return False
        self._taken_from = attempts if inherited is None and not held else 0
        return True

    def begin_transition(self) -> None:
        """Nothing is open: whatever was counted was of a transition that is over."""
        self._allowed_from = self._taken_from = 0

    def turn(self, attempts: int) -> None:
        """A rollback begins after so many attempts forward, and has its own ``attempts_max``."""
        self._allowed_from = attempts

    def stop(self) -> None:
        """The transition stopped: whoever goes on with it has ``attempts_max`` more."""
        self._allowed_from = None

    def over(self) -> None:
        """The push ended."""
        self._allowed_from = self._taken_from = self._inherited = None

    def spent(self, attempts: int) -> bool:
        """Whether no attempt is left after so many in K."""
        return attempts - (self._allowed_from or 0) >= self._attempts_max

    def taken(self, attempts: int) -> int:
        """How many of so many attempts in K were the push's."""
        return attempts - (self._taken_from or 0)
