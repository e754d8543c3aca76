"""Bits on their way to a device and back: the right ones in the right order, whenever the copies happen."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lazy_streams import LazyDevice

from dcr.data_plane import staging
from dcr.data_plane.tracker import Tracker

CPU = torch.device("cpu")


def bounds_of(n, chunk):
    return [(start, min(start + chunk, n)) for start in range(0, n, chunk)]


@settings(max_examples=200)
@given(st.integers(1, 40), st.integers(1, 12), st.one_of(st.none(), st.integers(0, 10_000)))
@example(30, 3, None)
def test_a_device_sees_each_chunk_as_it_was(n, chunk, seed):
    """Whatever is copied early or late: what the caller launched with a chunk reads that chunk."""
    device, held, seen, buffers = LazyDevice(seed), torch.arange(n) * 3 + 1, [], []
    # Who had the memory before is still at work with it.
    device.current.work.append(lambda: [buffer.fill_(-1) for buffer in buffers])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda _device: device)
        upload = staging._Upload(CPU, held, bounds_of(n, chunk))
        buffers += upload._landed
        for start, stop, landed in upload:
            assert landed.numel() == stop - start
            device.current.work.append(lambda landed=landed: seen.append(landed.clone()))
            device.advance()
    device.current.work.append(lambda: seen.append("the buffers are somebody else's"))
    while device.current.work:
        device.current.step()
    assert not any(stream.work for stream in device.streams if stream is not device.current)
    assert torch.equal(torch.cat(seen[:-1]), held)


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_who_stops_early_leaves_no_copy_on_its_way(taken):
    device, held = LazyDevice(None), torch.arange(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda _device: device)
        chunks = iter(staging._Upload(CPU, held, bounds_of(60, 10)))
        for _ in range(taken):
            next(chunks)
        chunks.close()
    while device.current.work:  # before anything else that the caller launches can have the memory
        device.current.step()
    assert not any(stream.work for stream in device.streams)


def test_host_memory_is_seen_where_it_is():
    held = torch.arange(10)
    chunks = list(staging.chunks_on(CPU, held, bounds_of(10, 4)))
    assert [(start, stop) for start, stop, _ in chunks] == [(0, 4), (4, 8), (8, 10)]
    assert all(part.data_ptr() == held[start:].data_ptr() for start, _, part in chunks)
    assert list(staging.chunks_on(CPU, held[:0], [])) == []
    assert staging.to_host(held) is held


@pytest.mark.parametrize("n", [0, 1, 7, 64])
def test_a_tracker_finds_and_folds_by_chunks_that_are_sent(n, monkeypatch):
    """The streams of a CPU do nothing, but they are the ones that torch has for device-generic code."""
    monkeypatch.setattr(
        "dcr.data_plane.tracker.chunks_on", lambda device, held, bounds: iter(staging._Upload(device, held, bounds))
    )
    old = torch.arange(n, dtype=torch.int16)
    tracker = Tracker("t", old, chunk_elements=10)
    if not n:  # nothing is sent
        assert tracker.numel == 0
        return
    new = old.clone()
    new[::3] += 1
    assert torch.cat([d.positions for d in tracker.differences(new)]).tolist() == list(range(0, n, 3))
    for _ in tracker.fold(new):
        pass
    assert torch.equal(tracker.committed(0, n), new)
    assert list(tracker.differences(new)) == []
