"""The leader's answer to an operator's order about the open transition (DESIGN D14, D17)."""

from collections.abc import Iterable, Sequence

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.errors import RefusedError
from dcr.protocol.intervention import check, intervene
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Intervene, Intervened, cut
from dcr.runtime.fleet_status import FleetStatus
from dcr.runtime.kept_order import KeptOrder, NotNowError
from dcr.runtime.standing import STANDINGS_MAX, standings

_REFUSES_ALL = (Phase.STARTING, Phase.WRITING, Phase.FATAL)


def intervened(
    role: Coordinator,
    order: Intervene,
    status: FleetStatus,
    kept: KeptOrder,
    connected: Iterable[tuple[str, int]] = (),
) -> tuple[Intervened, Sequence[Effect]]:
    """Obey an order as far as the protocol allows it.

    Args:
        role: the leader's; from the thread that it runs in.
        order: the operator's.
        status: of the fleet, now.
        kept: keeps the order, which the next leader has to obey if this one does not come to it.
        connected: names and incarnations of the engines whose nodes are connected.

    Returns:
        What the operator is told, of the record as the order found it, and what is to be done.
    """
    record, effects = role.record, list[Effect]()
    waiting = tuple(name for name, seat in role.seats if seat.ready)
    told = waiting or (record is not None and record.open is not None)  # else they are of a push that is over
    failures = tuple(cut(f) for f in role.failures) if told else ()
    engines = standings(role, connected)
    refused, again = f"{role.leader} leads record {role.record_id!r}, not {order.record_id!r}", False
    if order.record_id == role.record_id:
        try:
            if not kept.knows(order):  # it is asked again otherwise, for its answer was lost
                check(role, order.what)
                kept.keep(role, order)
                effects = intervene(role, order.what)
            refused = ""
        except RefusedError as e:
            refused, again = str(e), role.phase in _REFUSES_ALL or isinstance(e, NotNowError)
    answer = Intervened(
        role.record_id,
        role.leader,
        record,
        status.phase,
        status.waits_for,
        waiting,
        failures,
        cut(refused),
        engines[:STANDINGS_MAX],
        len(engines[STANDINGS_MAX:]),
        again,
    )
    return answer, effects
