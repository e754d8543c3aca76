"""Hypothesis strategies for payloads: specs, stored bits of every width, items, identities."""

import torch
from hypothesis import strategies as st

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.protocol.identity import Base, Kind, PayloadIdentity

DTYPES = {
    torch.uint8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int64: torch.int64,
}
"""Dtypes of widths 1, 2, 4 and 8, with the dtype of their bits."""

# Where the forms of gaps and codes change, and where signs and words wrap.
_EDGES = (0, 1, 2, 7, 8, 14, 15, 16, 253, 254, 255, 268, 269, 270, 271, 507, 508, 761, 762, 1015, 1016, 1017)

texts = st.text(max_size=12)
counts = st.integers(0, 2**63 - 1)
identities = st.builds(PayloadIdentity, texts, counts, counts, texts, counts, counts)


def words(width: int) -> st.SearchStrategy[int]:
    """Unsigned words, mostly near 0, near 2**width and near where their forms change."""
    top = 1 << 8 * width
    near = st.sampled_from(_EDGES).flatmap(lambda e: st.sampled_from((e, -e, 2 * e, 1 - 2 * e)))
    return st.one_of(near, st.integers(0, top - 1)).map(lambda w: w % top)


def bits(dtype: torch.dtype, unsigned: list[int]) -> torch.Tensor:
    """Unsigned words as stored bits."""
    top = 1 << (8 * dtype.itemsize - 1)
    signed = unsigned if dtype.itemsize == 1 else [w - 2 * top if w >= top else w for w in unsigned]
    return torch.tensor(signed, dtype=DTYPES[dtype])


@st.composite
def items(draw, operations=tuple(Operation), name=None):
    dtype = draw(st.sampled_from(list(DTYPES)))
    gap = st.one_of(st.just(0), st.sampled_from(_EDGES), st.integers(0, 70_000), st.integers(0, 2**33))
    gaps = draw(st.lists(gap, max_size=30))
    indices, end = [], 0
    for g in gaps:
        indices.append(end + g)
        end += g + 1
    numel = end + draw(
        st.one_of(st.just(0), st.integers(0, 1000), st.sampled_from((2**32 - end, 2**62)).filter(lambda x: x >= 0))
    )
    shape = draw(st.sampled_from(((numel,), (1, numel), (numel, 1, 1)) + (((),) if numel == 1 else ())))
    operation = draw(st.sampled_from(operations))
    value = words(dtype.itemsize)
    if operation is not Operation.SET:
        value = value.filter(bool)
    values = draw(st.lists(value, min_size=len(indices), max_size=len(indices)))
    spec = TensorSpec(draw(texts) if name is None else name, shape, dtype)
    return Item(spec, operation, torch.tensor(indices, dtype=torch.int64), bits(dtype, values))


@st.composite
def payloads(draw):
    """(identity, base, items) that may be encoded."""
    kind = draw(st.sampled_from(list(Kind)))
    operations = tuple(Operation) if kind is Kind.RELATIVE else (Operation.SET,)
    number = draw(st.integers(0, 4))
    found = [draw(items(operations, name=f"{draw(texts)}.{k}")) for k in range(number)]
    return draw(identities), Base(kind, draw(counts), draw(texts), draw(texts)), found


def same(a: Item, b: Item) -> bool:
    """Equal in every respect, bits included."""
    return (
        (a.spec, a.operation) == (b.spec, b.operation)
        and torch.equal(a.indices, b.indices)
        and a.values.dtype == b.values.dtype
        and torch.equal(a.values, b.values)
    )
