"""What a coordinator waits for, of all owners and engines, at this moment."""

from collections.abc import Iterable

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.leader import Phase
from dcr.protocol.record import Member, OpenTransition
from dcr.protocol.session import Session
from dcr.runtime.refit_status import Told

_CHARS_MAX = 400
"""Of the names of whoever is waited for: enough to see who they are."""
WAITS_FOR_OPERATOR = "the transition has stopped, and waits for the operator: dcr transition --help"


class FleetStatus(Told, frozen=True):
    """The fleet as the leader of a record knows it; nothing in it is secret."""

    phase: str
    """``idle``, ``attempt``, ``folding`` and so on (``dcr.protocol.leader.Phase``)."""
    version: int | None
    """Committed; None before the record was read."""
    epoch: int
    what: str
    """The attempt or restore that is under way; empty if none is."""
    done: dict[str, tuple[int, int]]
    """Of it, how many engines or owners are through each stage, and how many there are: prepared, sealed, staged,
    acknowledged."""
    waits_for: str
    """Whom it waits for, by name; empty if nothing is to be done."""
    not_joined: tuple[str, ...] = ()
    """Engines whose node is connected and has not asked to let them in; its own log says why."""
    refused: tuple[str, ...] = ()
    """Connections that the coordinator refused lately, from where and why: certificate, secret, incarnation."""
    next_dense: str = ""
    """Why the next push sends every element instead of what changed; empty if it does not."""

    def __str__(self) -> str:
        what = self.what or f"record at version {self.version}, {self.phase}"
        done = "".join(f", {n} of {of} {stage}" for stage, (n, of) in self.done.items())
        waits = f"; {self.waits_for}" if self.waits_for else ""
        dense = f"; the next push sends every element: {self.next_dense}" if self.next_dense else ""
        return f"{what}{done}{waits}{dense}" + (f"; {self.strangers}" if self.strangers else "")

    @property
    def strangers(self) -> str:
        """Who is there and takes no part, in words; empty if there is nobody."""
        not_joined, refused = _short(", ".join(self.not_joined)), _short("; ".join(self.refused))
        told = [f"connected, and not asking to be let in: {not_joined} (its log says why)"] if not_joined else []
        return "; ".join([*told, f"refused lately: {refused}"] if refused else told)


def fleet_status(
    role: Coordinator, connected: Iterable[tuple[str, int]] = (), refused: tuple[str, ...] = ()
) -> FleetStatus:
    """The status of a coordinator's role; from the thread that the role runs in.

    Args:
        role: the role.
        connected: names and incarnations of the engines whose nodes are connected.
        refused: connections that were refused lately, and why.
    """
    joined = {(e.join.engine, e.join.incarnation) for e in role.fleet.engines.values()}
    s = role.session if role.phase in {Phase.ATTEMPT, Phase.RESTORING} else None
    record = role.record
    return FleetStatus(
        role.phase.value,
        None if record is None else record.version,
        0 if record is None else record.epoch,
        "" if s is None else _what(s),
        {} if s is None else _done(s),
        _short(_waits_for(role, s)),
        tuple(sorted(name for name, incarnation in connected if (name, incarnation) not in joined)),
        refused,
        role.next_dense,
    )


def not_admitted(role: Coordinator, connected: Iterable[tuple[str, int]]) -> dict[Member, str]:
    """Engines whose node is connected and that K does not name as members, and why; arguments as ``fleet_status``."""
    members = () if role.record is None else role.record.members
    found = {m: role.fleet.of(m) for m in sorted(Member(*c) for c in connected) if m not in members}
    return {m: "it has not asked to be let in" if e is None else e.standing for m, e in found.items()}


def _short(text: str) -> str:
    return text if len(text) <= _CHARS_MAX else f"{text[:_CHARS_MAX]} ... ({len(text) - _CHARS_MAX} characters more)"


def _what(s: Session) -> str:
    if s.restore:
        return f"epoch {s.epoch}, restoring version {s.target}"
    versions = f"back to version {s.target}" if s.back else f"version {s.base.version} -> {s.target}"
    return f"epoch {s.epoch}, {versions}, {s.base.kind.value}, attempt {s.attempt}"


def _done(s: Session) -> dict[str, tuple[int, int]]:
    members = len(s.members)
    done = {"engines prepared": (len(s.prepared & s.members), members), "owners sealed": (len(s.sealed), len(s.owners))}
    if s.stage:
        done["engines staged"] = (len(s.staged & s.members), members)
    done["engines acknowledged"] = (len(s.members & set(s.roots)), members)
    return done


def _open(role: Coordinator) -> OpenTransition | None:
    return None if role.record is None else role.record.open


def _waits_for(role: Coordinator, s: Session | None) -> str:
    if s is not None:
        return "" if s.complete else f"{s.late[1]} yet"
    match role.phase:
        case Phase.STARTING:
            return f"no connection to {', '.join(role.seats.missing)} yet" if role.seats.missing else "reads the record"
        case Phase.WRITING:
            return "writes the record"
        case Phase.FOLDING:
            return "owners fold the committed version into their baselines"
        case Phase.IDLE if role.seats.missing and _open(role):
            return f"no connection to {', '.join(role.seats.missing)} yet"
        case Phase.IDLE if role.held and not role.resumed:
            return WAITS_FOR_OPERATOR
        case Phase.IDLE if role.pausing:
            return f"a push pauses before its next attempt, for {role.pausing}"
        case Phase.IDLE if role.seats.ready and role.awaited:
            return f"a push waits; engines not connected again since the last leader: {', '.join(sorted(role.awaited))}"
        case Phase.IDLE if role.seats.ready:
            return f"a push waits; engines: {role.fleet.describe()}"
        case Phase.IDLE if role.seats.late:
            return f"{', '.join(role.seats.late)} did not call push() yet; every rank has to"
        case Phase.IDLE if (tr := _open(role)) is not None and not tr.stopped:
            return "no rank has offered the candidate of the open transition again"
        case _:
            return ""
