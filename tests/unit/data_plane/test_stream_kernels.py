"""The compiled stream kernels against the torch reference, byte for byte, and against NumPy over raw memory."""

import threading
from dataclasses import replace

import numba as nb
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.codec import STREAMS, ItemBytes
from dcr.data_plane.content_digest import digest_elements
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels import compiled_scan, numba_streams
from dcr.data_plane.kernels.numba_streams import NumbaStreamKernels
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import TorchStreamKernels
from dcr.data_plane.payload import decode_payload, encode_payload
from dcr.protocol.errors import CorruptPayloadError, RefusedError
from tests.unit.data_plane import golden
from tests.unit.data_plane.strategies import DTYPES, items, payloads, same

TORCH = TorchStreamKernels()
ONE, THREE = NumbaStreamKernels(1), NumbaStreamKernels(3)
BACKENDS = {"reference": TORCH, "numba 1": ONE, "numba 3": THREE}
WIDTHS = [torch.uint8, torch.int16, torch.int32, torch.int64]
every_backend = pytest.mark.parametrize("kernels", BACKENDS.values(), ids=BACKENDS)


def noise(n, dtype, seed):
    words = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, np.uint8)
    return torch.from_numpy(words).view(dtype) if n else torch.empty(0, dtype=dtype)


def parts(encoded: tuple[ItemBytes, bytes]):
    written, digest = encoded
    return digest, written.layout, dict(zip(STREAMS, (part.tobytes() for part in written.parts), strict=True))


@every_backend
@settings(max_examples=150)
@given(
    st.sampled_from(WIDTHS),
    st.integers(0, 6000),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]),
)
@example(torch.int16, 4096, (0, 1), 0.5)  # no word begins at both
@example(torch.uint8, 4103, (5, 5), 0.5)  # three elements before the first word, four after the last
def test_differences_of_views_that_begin_anywhere(kernels, dtype, n, starts, rate):
    """In particular where the two do not begin alike within a word, and where a word begins before or ends after."""
    (first, second), seed = starts, n
    old = noise(n + first, dtype, seed)[first:]
    new = torch.empty(n + second, dtype=dtype)[second:]
    changed = torch.from_numpy(np.random.default_rng(seed + 1).random(n) < rate)
    new.copy_(torch.where(changed, noise(n, dtype, seed + 2), old))
    found = kernels.differences(old, new)
    expected = np.flatnonzero(old.numpy() != new.numpy())
    assert found.positions.dtype == torch.int64
    assert found.positions.numpy().tolist() == expected.tolist()
    assert torch.equal(found.old, old[expected])
    assert torch.equal(found.new, new[expected])


@every_backend
@pytest.mark.parametrize("dtype", WIDTHS)
def test_one_bit_anywhere_in_a_large_shard_is_found(kernels, dtype):
    """Where one thread's slice ends and another's begins, in the first block and in the last, in every lane."""
    n = 300_000
    old = noise(n, dtype, 1)
    places = sorted({0, 1, n - 1, *range(n // 12 // 64 * 64 - 9, n // 12 // 64 * 64 + 9), *range(65_530, 65_545), 4096})
    new = old.clone()
    for k, place in enumerate(places):
        new[place] ^= 1 << k % 7
    found = kernels.differences(old, new)
    assert found.positions.tolist() == places
    assert torch.equal(found.old, old[places])
    assert torch.equal(found.new, new[places])


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.2, 1.0])
def test_a_processor_that_cannot_squeeze_registers_finds_the_same(monkeypatch, dtype, rate):
    plain = nb.njit(nogil=True, error_model="numpy")(compiled_scan.differences.py_func)
    monkeypatch.setattr(compiled_scan, "SQUEEZES", False)  # which the compiler takes as it finds it
    monkeypatch.setattr(compiled_scan, "differences", plain)
    old = noise(20_001, dtype, 5)
    new = torch.where(torch.from_numpy(np.random.default_rng(6).random(20_001) < rate), noise(20_001, dtype, 7), old)
    expected = np.flatnonzero(old.numpy() != new.numpy())
    found = ONE.differences(old, new, 1 << 40)
    assert (found.positions - (1 << 40)).tolist() == expected.tolist()
    assert torch.equal(found.old, old[expected])
    assert torch.equal(found.new, new[expected])


@every_backend
def test_positions_count_from_where_the_part_begins(kernels):
    old = torch.zeros(200_000, dtype=torch.int16)
    new = old.clone()
    new[[0, 70_000, 199_999]] = 1
    start = (1 << 62) - 5
    assert kernels.differences(old, new, start).positions.tolist() == [start, start + 70_000, start + 199_999]


def test_differences_of_memory_between_two_elements():
    memory = bytearray(range(251)) * 9
    old = torch.frombuffer(memory, dtype=torch.int32, offset=1, count=500)
    assert not old.numpy().flags.aligned
    new = old.clone()
    new[77] += 1
    for kernels in (ONE, THREE):
        for a, b in ((old, new), (new, old)):
            assert kernels.differences(a, b).positions.tolist() == [77]


@settings(max_examples=200)
@given(items())
def test_items_are_written_with_the_same_bytes_and_read_back(item):
    written, digest = TORCH.encode(item)
    assert parts(ONE.encode(item)) == parts((written, digest))
    for kernels in BACKENDS.values():
        read, found = kernels.decode(item.spec, item.operation, item.entries, written)
        assert same(read, item)
        assert found == digest


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32, torch.float64])
def test_large_items_of_random_bits(dtype, operation):
    """Every length of gap that a uniform rate gives, and words of all forms."""
    kind = bits_dtype(dtype)
    for rate in (0.9, 0.03, 0.01, 0.002, 0.0001):
        indices = torch.from_numpy(np.random.default_rng(1).geometric(rate, 200_003).cumsum())
        n = int(indices[-1]) + 1
        values = noise(indices.numel(), kind, 2)
        values[::2] %= 300
        values[1::4] %= 8
        values[values == 0] = 1
        item = Item(TensorSpec("w", (n,), dtype), operation, indices, values)
        encoded = TORCH.encode(item)
        for kernels in (ONE, THREE):
            assert parts(kernels.encode(item)) == parts(encoded)
            read, digest = kernels.decode(item.spec, operation, item.entries, encoded[0])
            assert same(read, item)
            assert digest == encoded[1]


@pytest.fixture
def small_slices(monkeypatch):
    """Items of a few hundred entries are cut among threads, and read and written in pieces."""
    monkeypatch.setattr(numba_streams, "_GRAIN", 64)
    monkeypatch.setattr(numba_streams, "_PIECE", 128)


@st.composite
def long_items(draw):
    """Items of hundreds of entries: runs, dense and sparse stretches, gaps around every bound, codes of every form."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
    around = [b * 16**k + d for b in (254, 508, 762, 1016) for k in range(3) for d in (-1, 0, 1)]
    stretches = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 3, 40, 300, 2000, *around]), st.integers(1, 200), st.booleans()), max_size=6
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    gaps = [np.full(n, size) if same_gap else rng.integers(0, size + 1, n) for size, n, same_gap in stretches]
    indices = np.cumsum(np.concatenate([np.zeros(0, np.int64), *gaps]) + 1) - 1
    kind = bits_dtype(dtype)
    values = noise(indices.size, kind, draw(st.integers(0, 99)))
    small = torch.from_numpy(rng.random(indices.size) < draw(st.sampled_from([0.0, 0.9, 0.99, 1.0])))
    values = torch.where(small, values % draw(st.sampled_from([2, 8, 14, 15, 100])), values)
    values[values == 0] = 1
    numel = int(indices[-1]) + 1 + draw(st.sampled_from([0, 5, 1 << 33])) if indices.size else 7
    return Item(TensorSpec("w", (numel,), dtype), draw(st.sampled_from(Operation)), torch.from_numpy(indices), values)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(long_items())
def test_an_item_cut_into_slices_has_the_same_bytes_and_is_read_back(item):
    encoded = TORCH.encode(item)
    for kernels in (ONE, THREE):
        assert parts(kernels.encode(item)) == parts(encoded)
        read, digest = kernels.decode(item.spec, item.operation, item.entries, encoded[0])
        assert same(read, item)
        assert digest == encoded[1]


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(long_items(), st.data())
def test_an_item_that_cannot_be_written_is_refused_wherever_it_is_wrong(item, data):
    if not item.entries:
        return
    indices, values = item.indices.clone(), item.values.clone()
    at = data.draw(st.integers(0, item.entries - 1))
    how = data.draw(st.sampled_from(["same", "negative", "past the end", "far past the end", "zero"]))
    if how == "zero":
        values[at] = 0
    else:
        before = int(indices[at - 1]) if at else -1
        last, lowest = item.spec.numel, -(1 << 63)
        indices[at] = {"same": before, "negative": lowest + at, "past the end": last, "far past the end": -1 - lowest}[
            how
        ]
    wrong = Item(item.spec, item.operation, indices, values)
    outcomes = []
    for kernels in (TORCH, ONE, THREE):
        try:
            outcomes.append(parts(kernels.encode(wrong)))
        except RefusedError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert (how == "zero" and item.operation is Operation.SET) or isinstance(outcomes[0], str)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("gap", [0, 3, 300, 5000])
def test_slices_that_together_run_past_the_end_are_refused(gap):
    """Each slice alone would fit into the tensor many times."""
    indices = torch.arange(1000) * (gap + 1) + gap
    numel = int(indices[-1]) + 1
    item = Item(TensorSpec("w", (numel,), torch.bfloat16), Operation.SET, indices, noise(1000, torch.int16, 1))
    written, _ = TORCH.encode(item)
    for shorter in (numel - 1, numel * 2 // 3, numel // 5):
        for kernels in (TORCH, ONE, THREE):
            with pytest.raises(CorruptPayloadError, match="run past the tensor's"):
                kernels.decode(replace(item.spec, shape=(shorter,)), item.operation, 1000, written)
    assert same(THREE.decode(item.spec, item.operation, 1000, written)[0], item)


@pytest.mark.usefixtures("small_slices")
def test_slices_of_items_on_the_threads_that_work_on_items():
    """Every thread is inside an item when its slices come: none may wait for what only another could begin."""
    identity, base, _ = golden.cases()["every_codec"]
    spec = TensorSpec("w", (1 << 20,), torch.bfloat16)
    made = [
        Item(replace(spec, name=f"w{k}"), Operation.ADD, torch.arange(k, k + 900 * (k % 5 + 1)) * 7, ones)
        for k in range(40)
        for ones in [torch.ones(900 * (k % 5 + 1), dtype=torch.int16)]
    ]
    data = encode_payload(identity, base, made, kernels=TORCH)
    threads = NumbaStreamKernels(8)
    for _ in range(5):
        assert encode_payload(identity, base, made, kernels=threads) == data
        assert all(same(a, b) for a, b in zip(decode_payload(data, kernels=threads)[1], made, strict=True))


@settings(max_examples=100)
@given(payloads())
def test_payloads_have_the_same_bytes_whatever_the_backend(case):
    expected = encode_payload(*case, kernels=TORCH)
    for kernels in (ONE, THREE):
        assert encode_payload(*case, kernels=kernels) == expected
        read = decode_payload(expected, kernels=kernels)[1]
        assert all(same(a, b) for a, b in zip(read, case[2], strict=True))


@every_backend
@pytest.mark.parametrize("name", golden.cases())
def test_golden_payloads(kernels, name):
    case = golden.cases()[name]
    data = (golden.FOLDER / f"{name}.dcrp").read_bytes()
    assert encode_payload(*case, kernels=kernels) == data
    assert all(same(a, b) for a, b in zip(decode_payload(data, kernels=kernels)[1], case[2], strict=True))


def test_many_items_on_many_threads_stay_in_order():
    spec = TensorSpec("w", (1 << 40,), torch.bfloat16)
    made = [
        Item(
            replace(spec, name=f"w{k}"),
            Operation.ADD,
            torch.arange(k, k + 20_000 * (k % 3 + 1)) * (k + 1),
            noise(20_000 * (k % 3 + 1), torch.int16, k) | 1,
        )
        for k in range(12)
    ]
    identity, base, _ = golden.cases()["every_codec"]
    data = encode_payload(identity, base, made, kernels=THREE)
    assert data == encode_payload(identity, base, made, kernels=TORCH)
    for kernels in (TORCH, THREE):
        assert all(same(a, b) for a, b in zip(decode_payload(data, kernels=kernels)[1], made, strict=True))


HOSTILE = st.one_of(st.binary(max_size=24), st.sampled_from([b"\xfe" * n for n in (1, 3, 4, 70)] + [b"\xff" * 70]))


@settings(max_examples=400)
@given(items(), st.data())
def test_streams_that_may_hold_anything(item, data):
    """The compiled reader takes what the reference takes, and refuses what it refuses, with its words."""
    read_anything(item, data)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(long_items(), st.data())
def test_long_streams_that_may_hold_anything_are_read_in_slices(item, data):
    read_anything(item, data)


def read_anything(item, data):
    written = TORCH.encode(item)[0]
    streams = [bytearray(part.tobytes()) for part in written.parts]
    for _ in range(data.draw(st.integers(1, 3))):
        stream = data.draw(st.sampled_from(streams))
        at = data.draw(st.integers(0, max(len(stream) - 1, 0)))
        new = data.draw(HOSTILE)
        stream[at : at + (len(new) if data.draw(st.booleans()) else 1)] = new
    width = item.spec.dtype.itemsize
    for plane in streams[6 : 5 + width]:  # from a header, all planes have one length
        plane[:] = plane.ljust(len(streams[5]), b"\0")[: len(streams[5])]
    del streams[2][len(streams[2]) // 8 * 8 :]
    hostile = ItemBytes(
        data.draw(st.sampled_from((written.layout, 0, 1, 2, 3))), tuple(np.array(s, np.uint8) for s in streams)
    )
    entries = max(0, item.entries + data.draw(st.integers(-1, 1)))
    outcomes = []
    for kernels in (TORCH, ONE, THREE):
        try:
            read = kernels.decode(item.spec, item.operation, entries, hostile)[0]
            read.check_indices()
            outcomes.append((read.indices.tolist(), read.values.tolist()))
        except CorruptPayloadError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@every_backend
def test_what_is_not_written(kernels):
    spec = TensorSpec("w", (10,), torch.bfloat16)
    ones = torch.ones(2, dtype=torch.int16)
    for indices in ([4, 4], [4, 3], [-1, 3], [9, 10], [-2, -1]):
        with pytest.raises(RefusedError, match=r"item w: indices must be strictly increasing within \[0, 10\)"):
            kernels.encode(Item(spec, Operation.SET, torch.tensor(indices), ones))
    for operation in (Operation.ADD, Operation.XOR):
        with pytest.raises(RefusedError, match=f"item w: a zero {operation} entry"):
            kernels.encode(Item(spec, operation, torch.tensor([1, 2]), torch.tensor([1, 0], dtype=torch.int16)))


@every_backend
@settings(max_examples=100)
@given(items())
def test_content_digests(kernels, item):
    assert kernels.digest(item.spec, item.indices, item.values) == digest_elements(item.spec, item.indices, item.values)


@every_backend
def test_content_digest_of_many(kernels):
    n = 500_000
    for dtype in (torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64):
        spec = TensorSpec("w", (n,), dtype)
        words = noise(n, bits_dtype(dtype), 4)
        assert kernels.digest(spec, torch.arange(n), words) == digest_elements(spec, None, words)


def test_strided_tensors_are_taken():
    indices, values = torch.arange(200)[::2], torch.arange(200, dtype=torch.int16)[::2] + 1
    item = Item(TensorSpec("w", (200,), torch.bfloat16), Operation.ADD, indices, values)
    assert parts(ONE.encode(item)) == parts(TORCH.encode(item))
    assert ONE.differences(values, values + (indices == 6).to(torch.int16)).positions.tolist() == [3]


def test_the_backend_of_the_cpu_is_tried_once_and_may_be_called_from_many_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(stream_kernels())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(found[0], NumbaStreamKernels)
    assert all(kernels is found[0] for kernels in found)
    old, new = noise(1 << 20, torch.int16, 1), noise(1 << 20, torch.int16, 2)
    expected = TORCH.differences(old, new).positions
    same_result = []
    threads = [
        threading.Thread(
            target=lambda: same_result.append(torch.equal(found[0].differences(old, new).positions, expected))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same_result == [True] * 4


def test_every_dtype_has_a_width_that_is_compiled():
    assert {bits_dtype(dtype) for dtype in DTYPES} == set(WIDTHS)
