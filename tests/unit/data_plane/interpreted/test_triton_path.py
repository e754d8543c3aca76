"""The whole data path with Triton's kernels on both sides, and the baseline sent chunk by chunk, against a dense load.

Memory is the host's, and so are the streams; all else is what runs where there is a GPU.
"""

import random

import pytest
import torch

from dcr.data_plane import staging, tracker
from dcr.data_plane.kernels import choice, stream_choice
from dcr.data_plane.kernels.triton_placement import TritonKernels
from dcr.data_plane.kernels.triton_streams import TritonStreamKernels
from dcr.protocol.identity import Kind
from tests.integration import test_data_path as whole

CPU = torch.device("cpu")


@pytest.fixture
def sent(monkeypatch):
    """How many chunks were sent."""
    chunks = []

    def chunks_on(device, held, bounds):
        for chunk in staging._Upload(device, held, bounds):
            chunks.append(chunk[:2])
            yield chunk

    streams = TritonStreamKernels(CPU, stream_choice.stream_kernels())
    choice.kernels_for([])  # tried before it is replaced
    monkeypatch.setitem(stream_choice._tried, CPU, streams)
    monkeypatch.setitem(choice._tried, CPU, TritonKernels(CPU))
    monkeypatch.setattr(tracker, "chunks_on", chunks_on)
    return chunks


def test_the_kernels_pass_their_trial():
    streams = TritonStreamKernels(CPU, stream_choice.stream_kernels())
    assert stream_choice._tried_on(CPU, streams) is streams
    choice._try(TritonKernels(CPU), CPU)


@pytest.mark.parametrize(
    ("kind", "operation", "change"),
    [
        (Kind.RELATIVE, "add", "some"),
        (Kind.RELATIVE, "xor", "some"),
        pytest.param(Kind.ABSOLUTE, "add", "all", marks=pytest.mark.long),
        (Kind.DENSE, "add", "one"),
    ],
)
def test_storage_equals_a_dense_load(tmp_path, sent, kind, operation, change):
    rng = random.Random(5)
    trained = whole.Trained()
    whole.set_bits(trained, rng, "all")
    with torch.no_grad():
        path = whole.DataPath(trained, tmp_path / "p", chunk_elements=50, loaded=True)
        assert isinstance(path.host._storage._backend, TritonKernels)
        whole.set_bits(trained, rng, change)
        path.prepare(1, kind)
        path.open_apply()
        manifest, requests = path.emit(2000, operation)
        for request in requests:
            assert not path.call(request).refused
        assert whole.same(whole.stored(path.model), whole.dense(whole.state(trained)))
        assert bool(sent) == (kind is not Kind.DENSE)
        path.source.fold(path.source.candidate_digest)
        path.commit(manifest)
        assert path.state().clean
        held = path.host._storage.readback().held
        assert len(held) > 5
        loaded, specs = whole.state(trained), {spec.name: spec for spec in path.source.specs}
        for name, extents in held.items():
            for one in extents:
                bits = whole.bits(loaded[name]).flatten()
                assert one.extent.digest(specs[name], bits) == one.digest
