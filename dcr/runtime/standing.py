"""Which engines do not serve, and why, as far as the leader knows: what an operator decides by (DESIGN D14).

It knows what engines report, and hears of a gate only when it opens.  An engine whose storage is clean is taken to
serve; why its gate is closed all the same, its own node says (``node.statuses``).
"""

from collections.abc import Iterable

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.fleet import Engine
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Standing, cut
from dcr.protocol.record import CommitRecord

STANDINGS_MAX = 64
"""Most engines that an operator is told of at once."""


def standings(role: Coordinator, connected: Iterable[tuple[str, int]] = ()) -> tuple[Standing, ...]:
    """Engines that do not serve, by name; those of an attempt under way apart, which it waits for by name.

    Args:
        role: the leader's; from the thread that it runs in.
        connected: names and incarnations of the engines whose nodes are connected.
    """
    k = role.record
    if k is None:
        return ()
    there = {name for name, _ in connected}
    found = []
    for name in sorted({m.engine for m in k.members} | set(role.fleet.engines) | there):
        e = role.fleet.engines.get(name)
        state, why = _unknown(role, name, there) if e is None else _known(role, k, e)
        if state:
            found.append(Standing(name, state, cut(why)))
    return tuple(found)


def _unknown(role: Coordinator, name: str, there: set[str]) -> tuple[str, str]:
    if name in there:
        return "unjoined", "connected, and has not asked to be let in; its log says why"
    return "away", f"it has not come back since {role.leader} leads"


def _known(role: Coordinator, k: CommitRecord, e: Engine) -> tuple[str, str]:
    """Its state and why; nothing if it serves, or is in the attempt that is under way."""
    held = f"holds {e.held}"
    failed = f"; {e.failure}" if e.failure else ""
    session = role.session if role.phase in {Phase.ATTEMPT, Phase.RESTORING} else None
    in_it = session is not None and e.member in session.members
    if e.refused:
        return "refused", e.refused
    if not e.connected:
        return "away", f"not connected; it held {e.held}{failed}"
    if e.silent:
        return "silent", f"not heard of since{failed}; it held {e.held}"
    if session is not None and in_it:
        return ("gated", f"being restored, epoch {session.epoch}{failed}") if session.restore else ("", "")
    if not e.clean_at(k):
        return "gated", held + failed
    if e.member in k.members:
        return "", ""
    if e.evicted:
        return "evicted", f"{held}; the attempt of epoch {e.evicted} was opened without it{failed}"
    return "waiting", f"{held}; it is let in when the next attempt opens, or none is open"
