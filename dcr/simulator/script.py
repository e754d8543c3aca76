"""What an adversary does to a deployment, written down as moves; what it leaves alone happens meanwhile, in order."""

from collections.abc import Callable, Collection

from dcr.simulator.deployment import Deployment
from dcr.simulator.moves import apply
from dcr.simulator.schedule import Move

_STEPS_MAX = 2000


class ScenarioError(Exception):
    """A scenario does not come to where it wants to go: the protocol has changed, and the scenario has to follow."""


class EnoughError(Exception):
    """So many moves were wanted."""


class Script:
    """What an adversary does to a deployment.

    Args:
        world: where version 0 is served.
        moves: what happens is written down here.
        moves_max: so many moves, and no more.
    """

    def __init__(self, world: Deployment, moves: list[Move], moves_max: int) -> None:
        self.world = world
        self.moves = moves
        self._moves_max = moves_max

    def do(self, name: str, who: str = "", n: int = 0) -> None:
        """This happens now; ScenarioError if it cannot."""
        if not self._happens((name, who, n)):
            raise ScenarioError(f"{name} {who} {n} cannot happen here")

    def perhaps(self, name: str, who: str = "", n: int = 0) -> None:
        """This happens now, if it can."""
        self._happens((name, who, n))

    def _happens(self, move: Move) -> bool:
        if len(self.moves) >= self._moves_max:
            raise EnoughError
        self.moves.append(move)
        if apply(self.world, move):
            return True
        self.moves.pop()
        return False

    def until(self, reached: Callable[[Deployment], object], without: Collection[tuple[str, str]] = ()) -> None:
        """What can happen by itself happens, one thing after the other, until this is so.

        Args:
            reached: where to stop.
            without: (name, whom) of what does not happen meanwhile; an empty name stands for everything of that party.
        """
        w = self.world
        for _ in range(_STEPS_MAX):
            if reached(w):
                return
            if not self._one(without):
                raise ScenarioError("nothing more happens, and it has not come to where the scenario goes")
        raise ScenarioError("it goes on for ever")

    def rest(self, without: Collection[tuple[str, str]] = ()) -> None:
        """What can happen by itself happens, until nothing is left."""
        for _ in range(_STEPS_MAX):
            if not self._one(without):
                return
        raise ScenarioError("it goes on for ever")

    def _one(self, without: Collection[tuple[str, str]]) -> bool:
        w = self.world
        for p in w.processes():
            for move in p.moves():
                name, who, _ = move
                if (name, who) in without or ("", who) in without or ("", who.partition(":")[0]) in without:
                    continue
                if self._happens(move):
                    return True
        return False

    def connect(self) -> None:
        """Whoever has no connection to the leader that is registered makes one."""
        for p in self.world.parties():
            self._happens(("connect", p.id, 0))
