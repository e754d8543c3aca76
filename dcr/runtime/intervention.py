"""The leader's answer to an operator's order about the open transition (DESIGN D14, D17)."""

from collections.abc import Sequence

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.errors import RefusedError
from dcr.protocol.intervention import intervene
from dcr.protocol.messages import Intervene, Intervened, cut
from dcr.runtime.fleet_status import FleetStatus


def intervened(role: Coordinator, order: Intervene, status: FleetStatus) -> tuple[Intervened, Sequence[Effect]]:
    """Obey an order as far as the protocol allows it.

    Args:
        role: the leader's; from the thread that it runs in.
        order: the operator's.
        status: of the fleet, now.

    Returns:
        What the operator is told, of the record as the order found it, and what is to be done.
    """
    record, refused = role.record, ""
    other = f"{role.leader} leads record {role.record_id!r}, not {order.record_id!r}"
    waiting = tuple(name for name, seat in role.seats if seat.ready)
    failures = tuple(cut(f) for f in role.failures) if waiting else ()
    effects: Sequence[Effect] = []
    try:
        effects = intervene(role, order.what) if order.record_id == role.record_id else []
        refused = "" if order.record_id == role.record_id else other
    except RefusedError as e:
        refused = str(e)
    answer = Intervened(
        role.record_id, role.leader, record, status.phase, status.waits_for, waiting, failures, cut(refused)
    )
    return answer, effects
