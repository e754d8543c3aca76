"""What a move does: a function of the deployment, whom it happens to, and a number that says which one or how."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment

Act = Callable[["Deployment", str, int], bool]
"""Returns whether anything happened; one that is not possible changes nothing."""

Table = dict[str, tuple[Act, str]]
"""By name: what it does, and a sentence for the story, in which ``{who}`` and ``{n}`` are filled in."""


def move(table: Table, name: str, sentence: str) -> Callable[[Act], Act]:
    """Give a move its name."""

    def register(act: Act) -> Act:
        table[name] = (act, sentence)
        return act

    return register
