"""Ranges for a profiler: nothing without CUDA, and pushed and popped in order with it, whatever happens between."""

from contextlib import contextmanager

import pytest
import torch

from dcr.data_plane.nvtx import stage, watch_stages


def test_without_cuda_a_stage_is_nothing():
    assert stage("detect") is stage("apply")
    with stage("detect"), stage("encode"):
        pass


def test_with_cuda_ranges_are_opened_and_closed(monkeypatch):
    """NVTX itself needs CUDA's libraries, which are not here: what torch calls is seen in their place."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with stage("detect"), pytest.raises(ValueError, match="inside"), stage("encode"):
        raise ValueError("inside")
    assert calls == ["dcr: detect", "dcr: encode", "pop", "pop"]


def test_whoever_watches_sees_stages_begin_and_end():
    seen = []

    @contextmanager
    def watcher(name):
        seen.append(f"{name} begins")
        try:
            yield
        finally:
            seen.append(f"{name} ends")

    watch_stages(watcher)
    try:
        with stage("detect"), pytest.raises(ValueError, match="inside"), stage("encode"):
            raise ValueError("inside")
    finally:
        watch_stages(None)
    with stage("detect"):
        pass
    assert seen == ["detect begins", "encode begins", "encode ends", "detect ends"]
