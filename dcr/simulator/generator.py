"""Schedules from seeds: a deployment, the faults that it meets, and at each moment what happens next.

Each seed draws which faults there are at all and how often: a schedule that has few kinds of them, many times, finds
what one that has a little of everything does not.
"""

import random
from typing import TYPE_CHECKING

from dcr.simulator.moves import apply
from dcr.simulator.schedule import Move, Setup

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment

_FAULTS: dict[str, tuple[float, str]] = {
    "break": (14, "party"),
    "late": (8, "party"),
    "stray": (4, "owner"),
    "twice": (6, "party"),
    "replay": (14, "engine"),
    "stranger": (5, "engine"),
    "cut": (3, "process"),
    "stall": (3, "process"),
    "crash": (7, "engine"),
    "restart": (8, "owner"),
    "boot": (2, ""),
    "succeed": (3, ""),
    "unanswered": (8, "coordinator"),
    "late_write": (5, ""),
    "answered_last": (2, "leader"),
    "run_out": (8, "coordinator"),
    "lose_record": (3, "engine"),
    "jump": (1, ""),
    "lead": (12, "coordinator"),
    "abandon": (2, ""),
    "roll_back": (4, ""),
    "resume": (3, ""),
    "dense": (2, ""),
    "step": (12, "owner"),
    "give_up": (2, "owner"),
    "push_alone": (2, "owner"),
    "poll": (8, "engine"),
}
"""How often each fault is drawn, of those that a seed has, and whom it happens to."""

_GOES_WRONG = {
    "write": "fail_write",
    "synchronise": "fail_synchronise",
    "gate": "stick",
    "emit": "fail_emit",
    "fold": "fail_fold",
    "answer": "unanswered",
    "take": "twice",
    "deliver": "replay",
}
"""What may happen instead of something that is due."""

_MAY_BE_SLOW = ("hear", "take", "read", "answer", "gate", "work", "deliver", "write", "synchronise", "emit", "fold")

_TRIES_MAX = 8
_NUMBERS = 1 << 16


def draw_setup(r: random.Random) -> Setup:
    """A small deployment."""
    engines = r.choice((1, 1, 2, 2, 3))
    return Setup(
        salt=r.randrange(_NUMBERS),
        owners=r.choice((1, 1, 2)),
        ranks=tuple(r.choice((1, 1, 1, 2)) for _ in range(engines)),
        members_min=r.randint(1, min(2, engines)),
        attempts_max=r.randint(1, 4),
        restores_max=r.choice((1, 3)),
        gate_mode=r.choice(("sync", "async")),
        operations=r.choice((("add", "xor"), ("xor",))),
        policy=r.choice(("any", *["coordinator"] * 4)),
        cold=r.choice((True, *[False] * 9)),
        stop_waits=r.choice((True, False)),
        rejoin_waits=r.choice((True, False)),
    )


class Generator:
    """Chooses what happens next, and lets it happen.

    Args:
        world: the deployment.
        r: the seed's source of choices.
    """

    def __init__(self, world: "Deployment", r: random.Random) -> None:
        self.world = world
        self.moves: list[Move] = []
        self._r = r
        self._rate = r.choice((0.02, 0.06, 0.12, 0.25))
        kinds = [name for name in _FAULTS if self._chance(0.55)]
        self._kinds = kinds or ["poll"]
        total, self._up_to = 0.0, list[float]()
        for name in self._kinds:
            total += _FAULTS[name][0]
            self._up_to.append(total)

        # What may go wrong here, and how often; and what is slow here, so that everything else overtakes it.
        self._wrong = {name: r.choice((0.05, 0.15, 0.3)) for name in _GOES_WRONG if self._chance(0.4)}
        self._slow = {name for name in _MAY_BE_SLOW if self._chance(0.12)}

    def step(self) -> None:
        """One thing happens: what is due by itself most of the time, else a fault."""
        if self.world.leader.fatal:
            self._again()
        elif self._r.random() < self._rate:
            self._fault()
        else:
            self._progress()

    def _do(self, name: str, who: str, n: int) -> bool:
        move = (name, who, n)
        self.moves.append(move)
        if apply(self.world, move):
            return True
        self.moves.pop()
        return False

    def _chance(self, share: float) -> bool:
        return self._r.random() < share

    def _pick(self, among: list[str]) -> str:
        return among[int(self._r.random() * len(among))]  # much quicker than random.choice

    def _again(self) -> None:
        """Who leads can lead no more: somebody starts another coordinator, or the whole trainer."""
        if "version 0 cannot be created" in self.world.leader.fatal or self._chance(0.6):
            self._do("boot", "", 2 * self._r.randrange(_NUMBERS))
        else:
            self._do("succeed", "", 2 * self._r.randrange(_NUMBERS))

    def _progress(self) -> None:
        w, r = self.world, self._r
        parties = [w.leader, *w.processes()]
        for _ in range(_TRIES_MAX):
            p = parties[int(r.random() * len(parties))]
            moves = p.moves()
            if not moves:
                continue
            name, who, n = moves[int(r.random() * len(moves))]
            if name in self._slow and self._chance(0.93):
                continue
            wrong = self._wrong.get(name)
            if wrong is not None and r.random() < wrong:
                n = n if name == "write" else r.randrange(_NUMBERS)
                name = (
                    name if name == "deliver" and n % 2 else _GOES_WRONG[name]
                )  # it comes again, or an older one does
            if self._do(name, who, n):
                return
        self._idle()

    def _idle(self) -> None:
        """Little is under way: time goes by, and somebody notices something."""
        w = self.world
        stuck = [p.id for p in w.processes() if p.stalled or p.cut]
        if stuck and self._chance(0.3):
            who = self._pick(stuck)
            if self._do("wake", who, 0) or self._do("mend", who, 0):
                return
        apart = [p.id for p in w.parties() if p.link is None or not p.link.open]
        if apart and self._chance(0.6) and self._do("connect", self._pick(apart), 0):
            return
        if w.leader.policy is not None and w.leader.policy.held and self._chance(0.5):
            self._do(self._pick(["resume", "resume", "dense", "abandon", "roll_back"]), "", 0)
            return
        if self._chance(0.5) and self._do("push", "", self._r.randrange(_NUMBERS)):
            return
        match self._pick(["engine", "engine", "leader", "party", "time"]):
            case "engine":
                self._do("poll", self._pick([e.id for e in w.engines]), 0)
            case "leader":
                self._do("poll", self._pick([c.id for c in w.coordinators()]), 0)
            case "party":
                self._do("connect", self._pick([p.id for p in w.parties()]), 0)
            case _:
                self._do("run_out", w.leader.id, 0)

    def _fault(self) -> None:
        w, r = self.world, self._r
        x = r.random() * self._up_to[-1]
        name = next(k for k, up_to in zip(self._kinds, self._up_to, strict=True) if x < up_to)
        match _FAULTS[name][1]:
            case "party":
                among = [p.id for p in w.parties()]
            case "engine":
                among = [e.id for e in w.engines]
            case "owner":
                among = [o.id for o in (*w.owners, *w.old_owners)]
            case "coordinator":
                among = [w.leader.id, *(c.id for c in w.coordinators())]
            case "leader":
                among = [w.leader.id]
            case "process":
                among = [w.leader.id, w.leader.id, *(p.id for p in w.parties())]
            case _:
                among = [""]
        n = r.randrange(_NUMBERS)
        if name == "run_out" and n % 4:
            n = 0  # the latest time-out, most of the time
        self._do(name, self._pick(among), n)
