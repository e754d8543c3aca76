"""An operator's orders about the open transition: which of them can be obeyed as it stands (DESIGN D14, D17)."""

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.errors import RefusedError
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Intervention
from dcr.protocol.record import Direction, OpenTransition


def check(c: Coordinator, what: Intervention) -> None:
    """Whether an operator's order can be obeyed now; nothing is changed.

    Raises:
        RefusedError: it makes no sense as the transition stands, and why.
    """
    if what is Intervention.SHOW:
        return
    tr = _open(c)
    back = tr.direction is Direction.BACK
    if what is Intervention.ROLL_BACK:
        if back:
            raise RefusedError(f"the transition to version {tr.target} is being turned back already")
    elif not tr.stopped:
        way = "it is being turned back" if back else "`dcr transition roll-back` turns it back"
        raise RefusedError(f"not stopped: the transition to version {tr.target} is at its attempt {tr.attempts}; {way}")
    elif what is Intervention.RESUME and c.held != c.seats.names:
        raise RefusedError(
            f"no push waits with the weights of version {tr.target}: call push() in the trainer, on every rank, with "
            f"the same weights to resume it"
        )


def intervene(c: Coordinator, what: Intervention) -> list[Effect]:
    """Give an operator's order to the leader.

    Raises:
        RefusedError: as ``check`` says; nothing was changed.
    """
    check(c, what)
    match what:
        case Intervention.SHOW:
            return []
        case Intervention.ROLL_BACK:
            return c.roll_back()
        case Intervention.ABANDON:
            return c.abandon()
        case Intervention.DENSE:
            c.dense_next()
            return c.resume() if c.held else []
        case Intervention.RESUME:
            return c.resume()


def _open(c: Coordinator) -> OpenTransition:
    """The open transition; RefusedError if there is none, or if this leader cannot say now."""
    if c.phase is Phase.FATAL:
        raise RefusedError(f"{c.leader} leads no more: ask again, its successor will answer")
    if c.record is None or c.phase is Phase.STARTING:
        missing = f": no connection to {', '.join(c.seats.missing)}" if c.seats.missing else ""
        raise RefusedError(f"{c.leader} has not taken the record over yet{missing}; ask again")
    if c.phase is Phase.WRITING:
        raise RefusedError(f"{c.leader} is writing the record; ask again")
    if c.record.open is None:
        raise RefusedError(f"no transition is open: version {c.record.version} is committed")
    return c.record.open
