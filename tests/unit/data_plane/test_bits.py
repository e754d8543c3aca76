"""Stored bits: views that change nothing, whatever the bits are."""

import struct

import pytest
import torch

from dcr.data_plane import bits
from dcr.protocol.errors import RefusedError

WIDTHS = {
    **dict.fromkeys(("bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize(("name", "width"), WIDTHS.items())
def test_every_dtype_has_its_name_width_and_view(name, width):
    dtype = getattr(torch, name)
    assert bits.dtype_of(name) is dtype
    assert bits.dtype_name(dtype) == name
    assert bits.width(dtype) == width
    assert bits.bits_dtype(dtype) is INTEGERS[width]
    tensor = torch.zeros((2, 3), dtype=dtype)
    view = bits.bit_view(tensor)
    assert (view.dtype, view.shape, view.data_ptr()) == (INTEGERS[width], tensor.shape, tensor.data_ptr())


def test_a_view_keeps_nan_payloads_signs_of_zero_infinities_and_denormals():
    words = [0x7FC1, 0xFF81, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x807F]
    raw = bytearray(struct.pack("<7H", *words))
    tensor = torch.frombuffer(raw, dtype=torch.bfloat16)
    assert [int(b) & 0xFFFF for b in bits.bit_view(tensor)] == words
    parameter = torch.nn.Parameter(tensor)
    assert [int(b) & 0xFFFF for b in bits.bit_view(parameter)] == words


def test_unsigned_extends_with_zeros():
    for dtype in INTEGERS.values():
        top = torch.iinfo(dtype)
        got = bits.unsigned(torch.tensor([0, 1, top.max, top.min], dtype=dtype))
        assert got.dtype == torch.int64
        # Eight bytes fill the word: there the top half stays negative.
        size = 8 * dtype.itemsize
        expected = [0, 1, top.max, top.min if size == 64 else top.min % (1 << size)]
        assert got.tolist() == expected


def test_what_does_not_travel_is_refused_by_name():
    with pytest.raises(RefusedError, match="complex64"):
        bits.width(torch.complex64)
    with pytest.raises(RefusedError, match="'int4'"):
        bits.dtype_of("int4")
