"""Detection and folding against NumPy over the raw bytes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import bit_view
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import RefusedError

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def raw(tensor):
    """The elements' bytes, [n, width] uint8."""
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), np.uint8).reshape(
        tensor.numel(), tensor.element_size()
    )


def random_bits(numel, dtype, seed):
    words = np.random.default_rng(seed).integers(0, 256, numel * dtype.itemsize, np.uint8)
    tensor = torch.empty(numel, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = words
    return tensor


def joined(differences):
    parts = [(d.positions, d.old, d.new) for d in differences]
    return [torch.cat(column) for column in zip(*parts, strict=True)] if parts else [torch.empty(0)] * 3


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 70), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_differences_are_those_of_the_bytes(dtype, numel, chunk, rate, seed):
    old = random_bits(numel, dtype, seed)
    new = random_bits(numel, dtype, seed + 1)
    kept = torch.from_numpy(np.random.default_rng(seed + 2).random(numel) >= rate)
    bit_view(new)[kept] = bit_view(old)[kept]
    tracker = Tracker("t", old, chunk_elements=chunk)
    positions, before, after = joined(tracker.differences(new))
    expected = np.flatnonzero((raw(old) != raw(new)).any(axis=1)).tolist()
    assert positions.tolist() == expected
    if expected:
        assert np.array_equal(raw(before), raw(old)[expected])
        assert np.array_equal(raw(after), raw(new)[expected])


def test_bits_are_compared_not_values():
    words = torch.tensor([0x7FC0, 0x7FC1, 0x0000, 0x3F80, 0x7F80], dtype=torch.int16)
    live = words.view(torch.bfloat16).clone()
    tracker = Tracker("t", live, chunk_elements=2)
    assert list(tracker.differences(live)) == []  # NaNs equal themselves
    bit_view(live)[1] += 1  # another NaN payload
    bit_view(live)[2] = -0x8000  # -0.0, equal to 0.0
    positions, old, new = joined(tracker.differences(live))
    assert positions.tolist() == [1, 2]
    assert old.tolist() == [0x7FC1, 0]
    assert new.tolist() == [0x7FC2, -0x8000]


def test_the_baseline_is_a_copy_and_any_layout_counts_in_logical_order():
    live = torch.arange(12, dtype=torch.float32).view(3, 4).T
    tracker = Tracker("t", live, chunk_elements=5)
    live[1, 2] = -1  # logical position 1 * 3 + 2
    positions, old, new = joined(tracker.differences(live))
    assert positions.tolist() == [5]
    assert old.view(torch.float32).tolist() == [9.0]
    assert new.view(torch.float32).tolist() == [-1.0]


def test_fold_cut_short_is_finished_from_its_start():
    old, new = random_bits(100, torch.bfloat16, 1), random_bits(100, torch.bfloat16, 2)
    tracker = Tracker("t", old, chunk_elements=10)
    next(tracker.fold(new))  # one chunk, then the caller is gone
    first = torch.cat([tracker.committed(a, b) for a, b in tracker.chunks()])
    assert np.array_equal(raw(first)[:10], raw(new)[:10])
    assert np.array_equal(raw(first)[10:], raw(old)[10:])
    list(tracker.fold(new))
    assert np.array_equal(raw(torch.cat([tracker.committed(a, b) for a, b in tracker.chunks()])), raw(new))
    assert list(tracker.fold(new)) == []


def test_chunks_are_copies():
    live = torch.arange(7, dtype=torch.int32)
    tracker = Tracker("t", live, chunk_elements=3)
    before = tracker.committed(2, 5)
    list(tracker.fold(live + 10))
    assert before.tolist() == [2, 3, 4]
    chunks = dict(tracker.live(live))
    live.zero_()
    assert {start: bits.tolist() for start, bits in chunks.items()} == {0: [0, 1, 2], 3: [3, 4, 5], 6: [6]}


@pytest.mark.parametrize("other", [torch.zeros(9), torch.zeros(10, dtype=torch.int32)])
def test_another_shard_is_refused_and_changes_nothing(other):
    tracker = Tracker("layer.weight", torch.ones(10), chunk_elements=4)
    for use in (tracker.differences, tracker.fold, tracker.live):
        with pytest.raises(RefusedError, match=r"layer\.weight"):
            list(use(other))
    assert list(tracker.differences(torch.ones(10))) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms(use_true_random=False), st.integers(1, 40))
def test_strides_do_not_matter(shape, random, chunk):
    order = random.sample(range(len(shape)), len(shape))
    base = random_bits(2 * int(np.prod(shape)), torch.bfloat16, random.getrandbits(32))
    live = base.view(2, *shape)[random.randrange(2)].permute(order)
    if random.random() < 0.5:
        live = base.view(*shape, 2)[..., random.randrange(2)].permute(order)  # holes between elements
    old = np.array(bit_view(live).tolist(), np.int16).reshape(-1)
    tracker = Tracker("t", live, chunk_elements=chunk)
    assert np.array_equal(tracker.committed(0, live.numel()).numpy(), old)
    for place in [tuple(random.randrange(n) for n in live.shape) for _ in range(4)]:
        bit_view(live)[place] ^= 1 << random.randrange(15)
    new = np.array(bit_view(live).tolist(), np.int16).reshape(-1)
    positions, before, after = joined(tracker.differences(live))
    expected = np.flatnonzero(old != new)
    assert positions.tolist() == expected.tolist()
    assert before.tolist() == old[expected].tolist()
    assert after.tolist() == new[expected].tolist()
    assert np.array_equal(torch.cat([bits for _, bits in tracker.live(live)]).numpy(), new)
    for _ in tracker.fold(live):
        pass
    assert np.array_equal(tracker.committed(0, live.numel()).numpy(), new)


def status(field):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("strided", [False, True])
def test_memory_is_bounded_by_a_chunk_whatever_the_tensor(strided):
    """The allocator keeps no freed memory of this size, so that a copy of the tensor shows in the high-water mark."""
    list(Tracker("rehearsal", torch.zeros(9), chunk_elements=9).differences(torch.ones(9)))  # compiles
    live = torch.zeros(2080, 8256, dtype=torch.bfloat16)  # no powers of two: these strides are slow
    size = live.nbytes
    if strided:
        live = live.T
    tracker = Tracker("t", live, chunk_elements=1 << 18)
    bit_view(live)[::64, ::64] += 1
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    assert sum(found.positions.numel() for found in tracker.differences(live)) == 33 * 129
    assert sum(bits.numel() for _, bits in tracker.live(live)) == live.numel()
    assert sum(found.positions.numel() for found in tracker.fold(live)) == 33 * 129
    assert status("VmHWM") - before < size / 8
