"""A schedule as data: what is deployed, and what happened, move by move.  JSON, versioned."""

import msgspec

from dcr.protocol.conductor import GATE_MODES
from dcr.protocol.errors import RefusedError
from dcr.simulator.moves import ACTS

SCHEDULE_VERSION = 2
SCHEDULE_VERSIONS = (1, SCHEDULE_VERSION)
"""That are read: version 1 had no waits, and a schedule of it runs as it did."""
PARTIES_MAX = 8
"""Most owners, most engines, and most ranks of an engine, in a schedule that is read."""
POLICIES = ("coordinator", "any")
MOVES_MAX = 1_000_000
"""Most moves in a schedule that is read."""

Move = tuple[str, str, int]
"""What happens, to whom (``o0.1``: owner o0 of trainer 1; ``c2``: a coordinator; ``e0``: an engine), and a number that
says which one or how.  A move that is not possible does nothing, so that any part of a schedule is a schedule."""


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deployment before anything happened."""

    salt: int
    """Decides the bits of version 0."""
    owners: int
    ranks: tuple[int, ...]
    """Of each engine; every rank holds every cell."""
    members_min: int
    attempts_max: int
    restores_max: int
    gate_mode: str
    operations: tuple[str, ...]
    policy: str
    """``coordinator``, or ``any``: leaders do whatever their guards admit, until faults stop (``whim.py``)."""
    cold: bool
    """Nothing has been started; otherwise version 0 is served everywhere when the first move comes."""
    stop_waits: bool = False
    """A push whose transition stopped waits for the operator's word; since version 2."""
    rejoin_waits: bool = False
    """Leaders that took over wait for the engines that K names; since version 2."""

    def __post_init__(self) -> None:
        if not 1 <= self.owners <= PARTIES_MAX:
            raise ValueError(f"owners: 1 to {PARTIES_MAX}")
        if not 1 <= len(self.ranks) <= PARTIES_MAX or not all(1 <= n <= PARTIES_MAX for n in self.ranks):
            raise ValueError(f"ranks: 1 to {PARTIES_MAX} engines of 1 to {PARTIES_MAX} ranks")
        if not 1 <= self.members_min <= len(self.ranks):
            raise ValueError("members_min: 1 to the number of engines")
        if self.attempts_max < 1 or self.restores_max < 1:
            raise ValueError("attempts_max, restores_max: at least 1")
        if self.gate_mode not in GATE_MODES:
            raise ValueError(f"gate_mode: {' or '.join(GATE_MODES)}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {' or '.join(POLICIES)}")
        if not self.operations or not {*self.operations} <= {"add", "xor"}:
            raise ValueError("operations: add, xor, or both")


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a run depends on; after its last move faults stop, and the deployment has to converge."""

    setup: Setup
    moves: tuple[Move, ...]
    seed: int | None = None
    """That it came from, if it was not shrunk or written."""
    invariant: str = ""
    """That it broke when it was kept; for people."""
    version: int = SCHEDULE_VERSION


_decoder = msgspec.json.Decoder(Schedule)


def encode_schedule(schedule: Schedule) -> bytes:
    """A schedule's JSON, a move a line."""
    head = msgspec.json.encode(msgspec.structs.replace(schedule, moves=()))
    start, end = head.split(b'"moves":[]')
    moves = b",\n".join(b"  " + msgspec.json.encode(m) for m in schedule.moves)
    return start + b'"moves":[\n' + moves + b"\n]" + end + b"\n"


def decode_schedule(data: bytes) -> Schedule:
    """Read a schedule; RefusedError on anything else."""
    try:
        schedule = _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"this is no schedule of the simulator (version {SCHEDULE_VERSION}): {e}") from e
    if schedule.version not in SCHEDULE_VERSIONS:
        read = " and ".join(map(str, SCHEDULE_VERSIONS))
        raise RefusedError(f"a schedule of version {schedule.version}; this simulator reads {read}")
    unknown = {name for name, _, _ in schedule.moves} - ACTS.keys()
    if unknown:
        raise RefusedError(f"a schedule with moves that this simulator does not know: {', '.join(sorted(unknown))}")
    if len(schedule.moves) > MOVES_MAX:
        raise RefusedError(f"a schedule of {len(schedule.moves)} moves; at most {MOVES_MAX} are read")
    return schedule
