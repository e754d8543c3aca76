"""How others tell whether they look where the owners deliver: the trainer leaves an object there, and they look for it.

Addresses are no proof: one bucket has several endpoints, one folder several paths, and another folder of the same path
lies on every host.  Over a relay, where each process has an address of its own by design and nothing is stored, only
the kind is compared.
"""

import logging

import msgspec

from dcr.delivery.interface import Delivery, DeliveryError, meeting_key, meeting_prefix
from dcr.delivery.sealed import UnsealedError
from dcr.protocol.errors import RefusedError

_log = logging.getLogger("dcr.delivery")

RELAY = "relay"
_BYTES_MAX = 4096


class MeetingPoint(msgspec.Struct, frozen=True):
    """Where owners deliver, as the registry has it; fields that a later version adds are passed over."""

    kind: str
    """``file``, ``s3`` or ``relay``."""
    place: str
    """The delivery, for people."""
    key: str
    """Of the object that was left there; empty for a relay."""


def leave_sign(delivery: Delivery, record_id: str, name: str) -> bytes:
    """Put an object into the delivery, in place of its forerunners'; what nodes and coordinators need to find it.

    Args:
        delivery: the trainer's.
        record_id: the record.
        name: new with every start of the trainer.

    Raises:
        DeliveryError: nothing can be stored there.
        RefusedError: another run delivers there under the same record id: each would sweep what the other has sent.
    """
    if delivery.kind == RELAY:
        return msgspec.json.encode(MeetingPoint(RELAY, delivery.place, ""))
    _refuse_another_run(delivery, record_id)
    try:
        delivery.delete_prefix(meeting_prefix(record_id))
    except DeliveryError as e:
        _log.warning("what older trainers left at %s could not be removed: %s", delivery.place, e)
    key = meeting_key(record_id, name)
    delivery.put(key, name.encode())
    return msgspec.json.encode(MeetingPoint(delivery.kind, delivery.place, key))


def _refuse_another_run(delivery: Delivery, record_id: str) -> None:
    prefix = meeting_prefix(record_id)
    try:
        for key in delivery.keys(prefix):
            delivery.get(key, _BYTES_MAX)
    except UnsealedError as e:
        raise RefusedError(
            f"delivery {delivery.place}: another run, with another secret, delivers there for record {record_id!r}: "
            f"each would delete what the other has sent. Give this run a delivery or a record_id of its own; if the "
            f"other run is over for good, delete {prefix} there"
        ) from e
    except DeliveryError as e:
        _log.warning("whether another run delivers to %s cannot be told now: %s", delivery.place, e)


def missed(delivery: Delivery, entry: bytes, who: str = "this node") -> str:
    """Why what is delivered at a meeting point cannot be seen in this delivery; empty if it can, or nobody knows.

    Args:
        delivery: where ``who`` looks.
        entry: of the registry, see ``leave_sign``.
        who: looks there, for people.
    """
    try:
        point = msgspec.json.decode(entry, type=MeetingPoint)
    except (msgspec.DecodeError, RecursionError):
        return ""  # of another version of dcr, which the control channel tells
    where = f"the trainer delivers to {point.place}, {who} looks in {delivery.place}"
    advice = "give both sides the same delivery"
    if point.kind != delivery.kind:
        return f"{where}: {advice}"
    if not point.key:
        return ""
    try:
        if delivery.get(point.key, _BYTES_MAX) is not None:
            return ""
    except UnsealedError as e:
        return f"{where}, where the trainer's sign is not of this run ({e}): {advice}"
    except (DeliveryError, RefusedError) as e:
        _log.warning("whether %s cannot be told now: %s", where, e)
        return ""
    same = " (the same address, and yet not the same store: another host's folder, or another server)"
    return f"{where}{same if point.place == delivery.place else ''}, where nothing of it is to be seen: {advice}"
