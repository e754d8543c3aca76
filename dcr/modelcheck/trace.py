"""A behaviour that a model checker found, the same whichever checker it was."""

from dataclasses import dataclass

from dcr.modelcheck.values import State


@dataclass(frozen=True, slots=True)
class Step:
    """One state, and the action that led to it where the checker named it (TLC does, Apalache does not)."""

    state: State
    action: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """States from an initial one on.

    `loop` is the index of the state to which the last one goes back for ever (its own index: it stutters), or None.
    """

    steps: tuple[Step, ...]
    loop: int | None = None

    @property
    def length(self) -> int:
        """How many states, the initial one included: what TLC calls the length of a counterexample."""
        return len(self.steps)
