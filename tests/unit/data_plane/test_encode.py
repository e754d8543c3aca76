"""Operations on special values of every width, against arithmetic on Python integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.encode import apply_operation, to_item
from dcr.data_plane.item import Change, Operation, TensorSpec
from dcr.data_plane.payload import decode_payload, encode_payload
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from tests.unit.data_plane.strategies import DTYPES, bits, words

IDENTITY = PayloadIdentity("run", 8, 3, "rank0", 1, 0)
# bfloat16: quiet and signalling NaN with payload bits, +-0, +-infinity, denormals, normal values, both NaN signs
SPECIAL = (0x7FC1, 0x7F81, 0xFFFF, 0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x3F01, 0x3F02, 0xBF80)


def change(dtype, old, new):
    n = len(new)
    spec = TensorSpec("w", (n + 5,), dtype)
    return Change(spec, torch.arange(5, n + 5), None if old is None else bits(dtype, old), bits(dtype, new))


def travelled(item, kind):
    return decode_payload(encode_payload(IDENTITY, Base(kind, 7, "", ""), [item]))[1][0]


@pytest.mark.parametrize("operation", list(Operation))
def test_every_special_value_turns_into_every_other(operation):
    pairs = [(a, b) for a in SPECIAL for b in SPECIAL if a != b]
    old, new = zip(*pairs, strict=True)
    item = travelled(to_item(change(torch.bfloat16, old, new), Kind.RELATIVE, True, operation), Kind.RELATIVE)
    assert item.operation is operation
    resident = bits(torch.bfloat16, old)
    got = apply_operation(resident, item.operation, item.values)
    assert [int(b) & 0xFFFF for b in got] == list(new)
    assert [int(b) & 0xFFFF for b in resident] == list(old)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(DTYPES)), st.sampled_from(list(Operation)), st.data())
def test_all_widths_reach_the_new_bits_through_the_wire(dtype, operation, data):
    word = words(dtype.itemsize)
    pairs = data.draw(st.lists(st.tuples(word, word).filter(lambda p: p[0] != p[1]), max_size=20))
    old, new = [p[0] for p in pairs], [p[1] for p in pairs]
    item = travelled(to_item(change(dtype, old, new), Kind.RELATIVE, True, operation), Kind.RELATIVE)
    top = 1 << 8 * dtype.itemsize
    expected = {
        Operation.SET: new,
        Operation.XOR: [a ^ b for a, b in pairs],
        Operation.ADD: [(b - a) % top for a, b in pairs],
    }
    assert [int(v) % top for v in item.values] == expected[operation]
    assert [int(b) % top for b in apply_operation(bits(dtype, old), operation, item.values)] == new


@pytest.mark.parametrize("kind", [Kind.ABSOLUTE, Kind.DENSE, Kind.RESTORE])
def test_only_a_relative_attempt_depends_on_resident_bits(kind):
    item = to_item(change(torch.bfloat16, (0x3F01,), (0x3F02,)), kind, True)
    assert item.operation is Operation.SET
    assert item.values.tolist() == [0x3F02]
    assert travelled(item, kind).values.tolist() == [0x3F02]


def test_the_worked_example_and_the_choice_of_operation():
    found = change(torch.bfloat16, (0x3F01,), (0x3F02,))
    chosen = [
        to_item(found, Kind.RELATIVE, True),
        to_item(found, Kind.RELATIVE, True, Operation.XOR),
        to_item(found, Kind.RELATIVE, False, Operation.XOR),
        to_item(found, Kind.RELATIVE, True, Operation.SET),
    ]
    expected = [(Operation.ADD, 1), (Operation.XOR, 3), (Operation.SET, 0x3F02), (Operation.SET, 0x3F02)]
    assert [(i.operation, int(i.values)) for i in chosen] == expected


def test_missing_or_unfitting_old_bits_are_refused():
    good = change(torch.bfloat16, (1, 2), (3, 4))
    for old in (None, good.old[:1], good.old.to(torch.int32)):
        with pytest.raises(RefusedError, match="change of w: add needs the old bits"):
            to_item(Change(good.spec, good.indices, old, good.new), Kind.RELATIVE, True)
    with pytest.raises(RefusedError, match="resident bits"):
        apply_operation(good.old, Operation.XOR, good.new.to(torch.int32))
    with pytest.raises(RefusedError, match="resident bits"):
        apply_operation(good.old, Operation.ADD, good.new[:1])
