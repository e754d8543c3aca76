"""Triton's stream kernels in its interpreter, against the torch reference byte for byte, and against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.codec import STREAMS
from dcr.data_plane.content_digest import digest_elements
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import TorchStreamKernels
from dcr.data_plane.kernels.triton_streams import TritonStreamKernels
from dcr.data_plane.payload import decode_payload, encode_payload
from dcr.protocol.errors import RefusedError
from tests.unit.data_plane import golden
from tests.unit.data_plane.strategies import items, payloads, same

TORCH = TorchStreamKernels()
TRITON = TritonStreamKernels(torch.device("cpu"), stream_kernels())
WIDTHS = [torch.uint8, torch.int16, torch.int32, torch.int64]


def noise(n, dtype, seed):
    words = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, np.uint8)
    return torch.from_numpy(words).view(dtype) if n else torch.empty(0, dtype=dtype)


def parts(encoded):
    written, digest = encoded
    return digest, written.layout, dict(zip(STREAMS, (part.tobytes() for part in written.parts), strict=True))


def check_differences(dtype, n, starts, rate):
    (first, second), seed = starts, n
    old = noise(n + first, dtype, seed)[first:]
    new = torch.empty(n + second, dtype=dtype)[second:]
    changed = torch.from_numpy(np.random.default_rng(seed + 1).random(n) < rate)
    new.copy_(torch.where(changed, noise(n, dtype, seed + 2), old))
    found = TRITON.differences(old, new)
    expected = np.flatnonzero(old.numpy() != new.numpy())
    assert found.positions.dtype == torch.int64
    assert found.positions.tolist() == expected.tolist()
    assert found.old.dtype == found.new.dtype == dtype
    assert torch.equal(found.old, old[expected])
    assert torch.equal(found.new, new[expected])
    assert torch.equal(TRITON.differences(old, new, 1 << 40).positions, found.positions + (1 << 40))


RATES = [0.0, 0.001, 0.03, 0.5, 1.0]


@settings(max_examples=25)
@given(
    st.sampled_from(WIDTHS),
    st.integers(0, 9000),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(RATES),
)
@example(torch.int16, 8192, (0, 0), 1.0)  # whole blocks
@example(torch.int64, 8193, (3, 1), 1.0)
@example(torch.uint8, 1, (0, 0), 1.0)
def test_differences_of_views_that_begin_anywhere(dtype, n, starts, rate):
    check_differences(dtype, n, starts, rate)


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.sampled_from(WIDTHS),
    st.integers(0, 70_000),
    st.tuples(st.integers(0, 99), st.integers(0, 99)),
    st.sampled_from(RATES),
)
def test_differences_of_larger_views(dtype, n, starts, rate):
    check_differences(dtype, n, starts, rate)


def check_item(item):
    encoded = TRITON.encode(item)
    assert parts(encoded) == parts(TORCH.encode(item))
    read, digest = TRITON.decode(item.spec, item.operation, item.entries, encoded[0])
    assert same(read, item)
    assert digest == encoded[1]


@settings(max_examples=40)
@given(items())
def test_items_are_written_with_the_same_bytes_and_read_back(item):
    check_item(item)


@pytest.mark.long
@settings(max_examples=200)
@given(items())
def test_more_items_are_written_with_the_same_bytes_and_read_back(item):
    check_item(item)


def check_large(dtype, operation, rate, entries):
    """Gaps that a uniform rate gives, over several blocks, and words of all forms."""
    kind = bits_dtype(dtype)
    indices = torch.from_numpy(np.random.default_rng(1).geometric(rate, entries).cumsum())
    values = noise(entries, kind, 2)
    values[::2] %= 300
    values[1::4] %= 8
    values[values == 0] = 1
    for numel in (int(indices[-1]) + 1, 1 << 40):
        item = Item(TensorSpec("w", (numel,), dtype), operation, indices, values)
        assert parts(TRITON.encode(item)) == parts(TORCH.encode(item))


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.bfloat16, 0.03), (torch.uint8, 0.9), (torch.float32, 0.0001), (torch.float64, 0.000001)]
)
def test_items_of_several_blocks(dtype, rate, operation):
    check_large(dtype, operation, rate, 2047)


@pytest.mark.long
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.9, 0.03, 0.002, 0.0001])
def test_items_of_many_blocks(dtype, rate, operation):
    check_large(dtype, operation, rate, 10_001)


@settings(max_examples=10)
@given(payloads())
def test_payloads_have_the_same_bytes_whatever_the_backend(case):
    expected = encode_payload(*case, kernels=TORCH)
    assert encode_payload(*case, kernels=TRITON) == expected
    read = decode_payload(expected, kernels=TRITON)[1]
    assert all(same(a, b) for a, b in zip(read, case[2], strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "dense")) for name in golden.cases()]
)
def test_golden_payloads(name):
    case = golden.cases()[name]
    assert encode_payload(*case, kernels=TRITON) == (golden.FOLDER / f"{name}.dcrp").read_bytes()


def test_what_is_not_written():
    spec = TensorSpec("w", (5000,), torch.bfloat16)
    for indices in ([4, 4], [4, 3], [-1, 3], [9, 5000], [-2, -1]):
        with pytest.raises(RefusedError, match=r"item w: indices must be strictly increasing within \[0, 5000\)"):
            TRITON.encode(Item(spec, Operation.SET, torch.tensor(indices), torch.ones(2, dtype=torch.int16)))
    for at in (0, 1024, 2000):  # where one block ends and another begins
        indices, values = torch.arange(2001), torch.ones(2001, dtype=torch.int16)
        indices[at] = indices[at] - 1 if at else -1
        with pytest.raises(RefusedError, match="strictly increasing"):
            TRITON.encode(Item(spec, Operation.SET, indices, values))
        values[at] = 0
        for operation in (Operation.ADD, Operation.XOR):
            with pytest.raises(RefusedError, match=f"item w: a zero {operation} entry"):
                TRITON.encode(Item(spec, operation, torch.arange(2001), values))
        TRITON.encode(Item(spec, Operation.SET, torch.arange(2001), values))


@settings(max_examples=20)
@given(items())
def test_content_digests(item):
    assert TRITON.digest(item.spec, item.indices, item.values) == digest_elements(item.spec, item.indices, item.values)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64])
def test_content_digest_of_several_blocks(dtype):
    spec, words = TensorSpec("w", (9000,), dtype), noise(9000, bits_dtype(dtype), 4)
    assert TRITON.digest(spec, torch.arange(9000), words) == digest_elements(spec, None, words)


def test_strided_tensors_are_taken():
    indices, values = torch.arange(200)[::2], torch.arange(200, dtype=torch.int16)[::2] + 1
    item = Item(TensorSpec("w", (200,), torch.bfloat16), Operation.ADD, indices, values)
    assert parts(TRITON.encode(item)) == parts(TORCH.encode(item))
    assert TRITON.digest(item.spec, indices, values) == TORCH.digest(item.spec, indices, values)
    assert TRITON.differences(values, values + (indices == 6).to(torch.int16)).positions.tolist() == [3]
