"""Buckets hold every entry once, in order, within their size, and no more is read ahead than they need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.bucket import pack
from dcr.data_plane.header import DEFAULT_LIMITS
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import encode_payload, read_header
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, PayloadIdentity


def make(name, n, dtype=torch.bfloat16):
    of_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    spec = TensorSpec(name, (3 * n + 1,), dtype)
    return Item(spec, Operation.SET, torch.arange(n) * 3, torch.arange(n).to(of_bits))


def size(bucket):
    """Written from the docstring: decoded index and value, and 128 bytes and the name for every piece."""
    return sum(128 + len(i.spec.name) + len(i.indices) * (8 + i.spec.dtype.itemsize) for i in bucket)


def flat(items):
    return [(i.spec.name, i.operation, int(a), int(b)) for i in items for a, b in zip(i.indices, i.values, strict=True)]


dtypes = st.sampled_from((torch.uint8, torch.bfloat16, torch.float32, torch.float64))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), dtypes), max_size=6), st.integers(1, 900))
def test_order_completeness_and_size(case, bucket_bytes):
    items = [make(f"t{k}", n, dtype) for k, (n, dtype) in enumerate(case)]
    buckets = list(pack(items, bucket_bytes))
    assert flat(i for b in buckets for i in b) == flat(items)
    for k, bucket in enumerate(buckets):
        assert all(i.entries for i in bucket)
        for i in bucket:
            i.check_indices()
        one_entry = len(bucket) == 1 and bucket[0].entries == 1
        assert size(bucket) <= bucket_bytes or one_entry
        # Full: not even one entry of what comes next would have fitted.
        if k + 1 < len(buckets):
            following = buckets[k + 1][0].spec
            assert size(bucket) + 128 + len(following.name) + 8 + following.dtype.itemsize > bucket_bytes or (
                bucket[-1].spec == following and size(bucket) + 8 + following.dtype.itemsize > bucket_bytes
            )


def test_a_tensor_three_buckets_long():
    fits = 20
    buckets = list(pack([make("w", 3 * fits)], 128 + 1 + fits * 10))
    assert [[i.entries for i in b] for b in buckets] == [[20], [20], [20]]


@pytest.mark.parametrize("bucket_bytes", [1, 139])
def test_from_one_entry_a_bucket(bucket_bytes):
    assert [len(b) for b in pack([make("w", 5)], bucket_bytes)] == [1] * 5


def test_it_reads_one_item_beyond_a_full_bucket_and_no_more():
    read = []

    def source():
        for k in range(6):
            read.append(k)
            yield make(f"{k}", 10)

    buckets = pack(source(), 2 * (128 + 1 + 100))
    assert read == []
    next(buckets)
    assert read == [0, 1, 2]
    next(buckets)
    assert read == [0, 1, 2, 3, 4]


def test_a_piece_does_not_keep_its_item_alive():
    item = make("w", 1000)
    whole = item.indices.untyped_storage().nbytes()
    for bucket in pack([item], 1000):
        assert bucket[0].indices.untyped_storage().nbytes() < whole // 8
        assert bucket[0].values.untyped_storage().nbytes() < 1000


def test_nothing_gives_nothing():
    assert list(pack([], 100)) == []
    assert list(pack([make("w", 0)], 100)) == []


def test_a_size_of_zero_is_refused_at_once():
    with pytest.raises(RefusedError, match="bucket_bytes is 0"):
        pack([], 0)


def test_a_bucket_has_no_more_items_or_header_than_a_receiver_takes():
    """A model of 256 experts a layer, with a scale beside each weight, has more tensors than that."""
    one, most = make("model.layers.3.experts.7.weight_scale_inv", 1), DEFAULT_LIMITS.items_max
    assert [len(b) for b in pack([one] * (most + 5), 128 << 20)] == [most, 5]
    names = ["é" * 1000 + str(k) for k in range(9000)]
    specs = [TensorSpec(name, (1,) * 31 + (4,), torch.bfloat16) for name in names]
    long = [Item(spec, one.operation, one.indices, one.values) for spec in specs]
    first, second = pack(long, 128 << 20)
    assert [i.spec for i in (*first, *second)] == specs
    read_header(encode_payload(PayloadIdentity("r", 1, 1, "o", 1, 0), Base(Kind.DENSE, 0, "", "c"), first))
