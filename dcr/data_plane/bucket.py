"""Packs items into buckets, each of which becomes one payload (paper section 7)."""

from collections.abc import Iterable, Iterator

from dcr.data_plane.header import DEFAULT_LIMITS
from dcr.data_plane.item import Item, TensorSpec
from dcr.protocol.errors import RefusedError

ITEM_BYTES = 128
"""Allowed for an item's header beside its name."""
_DIMENSION_BYTES = 9
_HEADER_BYTES = DEFAULT_LIMITS.header_bytes_max - (1 << 16)
"""For the headers of a payload's items; the rest is for identity, base and streams."""


def entry_bytes(spec: TensorSpec) -> int:
    """What an entry counts: its decoded index and value, which is also more than it takes in the streams on average."""
    return 8 + spec.dtype.itemsize


def item_bytes(spec: TensorSpec) -> int:
    """What an item counts beside its entries."""
    return ITEM_BYTES + len(spec.name.encode())


def pack(items: Iterable[Item], bucket_bytes: int) -> Iterator[list[Item]]:
    """Fill buckets with items in order, cutting items between entries where a bucket is full.

    Only one bucket and the current item are held.  An item without entries is left out.  No bucket has more items, or
    more of them in its header, than a receiver takes by default, however many tensors a model has.

    Args:
        items: taken one by one, as buckets are asked for.
        bucket_bytes: the most that ``item_bytes`` and ``entry_bytes`` of a bucket add up to, so it bounds what a
            receiver holds for a decoded payload; a bucket too small for one entry holds one.

    Raises:
        RefusedError: bucket_bytes is not positive.
    """
    if bucket_bytes < 1:
        raise RefusedError(f"bucket_bytes is {bucket_bytes}, it must be positive")
    return _pack(items, bucket_bytes)


def _pack(items: Iterable[Item], bucket_bytes: int) -> Iterator[list[Item]]:
    bucket: list[Item] = []
    free, header = bucket_bytes, 0
    for item in items:
        described = item_bytes(item.spec) + _DIMENSION_BYTES * len(item.spec.shape)
        start = 0
        while start < item.entries:
            fitting = (free - item_bytes(item.spec)) // entry_bytes(item.spec)
            full = fitting < 1 or len(bucket) == DEFAULT_LIMITS.items_max or header + described > _HEADER_BYTES
            if full and bucket:
                yield bucket
                bucket, free, header = [], bucket_bytes, 0
                continue
            count = min(max(fitting, 1), item.entries - start)
            bucket.append(item if count == item.entries else _cut(item, start, count))
            free -= item_bytes(item.spec) + count * entry_bytes(item.spec)
            header += described
            start += count
    if bucket:
        yield bucket


def _cut(item: Item, start: int, count: int) -> Item:
    """Some entries of an item, copied so that the rest of a large item is not kept alive by a bucket."""
    stop = start + count
    return Item(item.spec, item.operation, item.indices[start:stop].clone(), item.values[start:stop].clone())
