"""An owner's content digests by canonical tensor, as they lie in the delivery store (DESIGN D2).

Digests of disjoint elements add up: the sum over all owners' tables is what every tensor digests to, and the sum over
all tensors is what the record names.
"""

from collections.abc import Mapping, Sequence

import msgspec

from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.payload import payload_digest
from dcr.delivery.interface import Delivery, DeliveryError
from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import TableRef

FORMAT = 1
TABLE_BYTES_MAX = 64 << 20
"""Largest table that is read: about 500,000 tensors."""
_DIGEST_BYTES = 16


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    names: tuple[str, ...]
    digests: bytes
    """16 bytes a name, most significant first."""


_decoder = msgspec.msgpack.Decoder(_Table)
_encoder = msgspec.msgpack.Encoder(order="deterministic")


def encode_table(digests: Mapping[str, ContentDigest]) -> bytes:
    """A table's bytes; RefusedError if nobody would read as many."""
    names = tuple(sorted(digests))
    data = _encoder.encode(_Table(FORMAT, names, b"".join(digests[n].value.to_bytes(_DIGEST_BYTES) for n in names)))
    if len(data) > TABLE_BYTES_MAX:
        raise RefusedError(f"content digests of {len(names)} tensors take {len(data)} bytes, {TABLE_BYTES_MAX} at most")
    return data


def decode_table(data: bytes) -> dict[str, ContentDigest]:
    """Read a table; RefusedError on anything else."""
    try:
        table = _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"not a table of content digests: {e}") from e
    if table.format != FORMAT:
        raise RefusedError(f"a table of content digests of format {table.format}; this version of dcr reads {FORMAT}")
    if len(table.digests) != _DIGEST_BYTES * len(table.names) or len(set(table.names)) != len(table.names):
        raise RefusedError(
            f"a table of content digests names {len(table.names)} tensors ({len(set(table.names))} different ones) and "
            f"has {len(table.digests)} bytes of digests"
        )
    parts = (table.digests[i : i + _DIGEST_BYTES] for i in range(0, len(table.digests), _DIGEST_BYTES))
    return {name: ContentDigest(int.from_bytes(part)) for name, part in zip(table.names, parts, strict=True)}


def read_tables(delivery: Delivery, refs: Sequence[TableRef]) -> dict[str, ContentDigest]:
    """What every tensor digests to, by the owners' tables in a store.

    Raises:
        DeliveryError: the store could not be used, or a table is not there or not what its owner delivered.
        RefusedError: a table is not one.
    """
    tables = []
    for ref in refs:
        data = delivery.get(ref.key, TABLE_BYTES_MAX)
        if data is None:
            raise DeliveryError(f"object {ref.key}: not there; it may have been swept meanwhile: verify again")
        if payload_digest(data) != ref.digest:
            raise DeliveryError(f"object {ref.key}: its bytes are not those that its owner delivered")
        tables.append(decode_table(data))
    return add_tables(tables)


def add_tables(tables: Sequence[Mapping[str, ContentDigest]]) -> dict[str, ContentDigest]:
    """What every tensor digests to, over all owners."""
    total: dict[str, ContentDigest] = {}
    for table in tables:
        for name, digest in table.items():
            total[name] = total.get(name, ContentDigest()) + digest
    return total
