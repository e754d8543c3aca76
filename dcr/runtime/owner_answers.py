"""What an owner says of its weights when it is asked, without an attempt."""

from dcr.data_plane.nonfinite import listed
from dcr.data_plane.payload import payload_digest
from dcr.delivery.interface import Delivery, contents_key
from dcr.protocol.messages import ContentsShown, TableRef, cut
from dcr.runtime.contents_table import encode_table
from dcr.runtime.source import Source


def why_refused(source: Source) -> str:
    """Why the weights that are pushed may not become a version (setting ``refuse_nonfinite``); empty if they may.

    Asked before they are offered, and not in detection: payloads leave while that goes on, on every rank at its own
    pace, and engines apply them as they come.
    """
    try:
        found = source.nonfinite()
        return cut(f"{source.owner} brings {listed(found)} (setting refuse_nonfinite)") if found else ""
    except BaseException as e:  # noqa: BLE001 - whatever the model's code raises ends the push by its name
        return cut(f"{source.owner}: {type(e).__name__}: {e}")


def show_contents(source: Source, delivery: Delivery, record_id: str, incarnation: int, epoch: int) -> ContentsShown:
    """Deliver the digests of what is committed, by tensor.  Not while the source folds."""
    name, digests, total = source.owner, source.baseline_digests, source.baseline_digest
    table, reason = None, ""
    if digests is None or total is None:
        reason = f"{name} has no baseline: it was lost, or a fold was cut short; the next push brings a new one"
    else:
        try:
            data = encode_table(digests)
            key = contents_key(record_id, epoch, name, incarnation, total.hex())
            delivery.put(key, data)
            table = TableRef(key, payload_digest(data))
        except Exception as e:  # noqa: BLE001 - the operator is told; the owner has emissions and folds to do
            reason = cut(f"{name} could not deliver its content digests: {type(e).__name__}: {e}")
    held = "" if total is None else total.hex()
    return ContentsShown(name, incarnation, epoch, table, held, reason)
