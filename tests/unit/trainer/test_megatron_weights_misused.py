"""What users do to live weights around a refit: named before anything is read, and nothing is left half done."""

import pytest
import torch

from dcr.data_plane.bits import bit_view
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.megatron.conversion import Task
from dcr.trainer.megatron.disturbance import flipped, scrambled
from dcr.trainer.megatron.identity import fingerprint
from dcr.trainer.megatron.source import MegatronSource
from tests.unit.trainer.test_own_conversion import Own, alone, refit, weights


def doubled(number, tensor):
    return {f"w{number}": tensor * 2}


def sent(source):
    return sum(change.indices.numel() for change in source.changes(Kind.RELATIVE))


def free(tensor):
    """As trainers offload weights; what gives them back."""
    kept, gone = tensor.data, torch.empty_like(tensor)
    gone.untyped_storage().resize_(0)
    tensor.data = gone

    def back():
        tensor.data = kept

    return back


@pytest.mark.parametrize("function", [alone, doubled], ids=["direct", "residual"])
def test_weights_that_are_offloaded_are_named_at_every_step(function):
    own = Own(weights((40, 30), (8, 8)), function)
    source = MegatronSource(own)
    back = free(own.tensors[0])
    with pytest.raises(RefusedError, match=r"task\.0: its storage is freed"):
        source.prepare()
    back()
    own.tensors[1].mul_(2)
    source.prepare()
    back = free(own.tensors[0])
    with pytest.raises(RefusedError, match=r"task\.0: its storage is freed"):
        source.changes(Kind.DENSE)
    back()
    source.prepare()
    assert sent(source) == 64
    back = free(own.tensors[0])
    with pytest.raises(RefusedError, match=r"task\.0: its storage is freed"):
        source.fold(source.candidate_digest)
    back()
    assert not source._share.folding
    source.fold(source.candidate_digest)
    refit(source, own, lambda: own.tensors[0].mul_(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_are_not_there_at_the_start_are_named_and_others_stay(device):
    own = Own([*weights((4, 3)), torch.empty(8, 8, device=device)], alone)
    if device == "cpu":
        free(own.tensors[1])
    before = own.tensors[0].clone()
    with pytest.raises(RefusedError, match=r"rank 0: task\.1: its storage is freed, offloaded or was never made"):
        MegatronSource(own)
    assert torch.equal(own.tensors[0], before)


@pytest.mark.parametrize("where", ["task", "other"])
def test_an_expanded_tensor_is_named(where):
    tensor = torch.ones(1, 8).expand(8, 8)
    held = weights((4, 3))
    own = Own([*held, tensor], alone) if where == "task" else Own(held, alone, {"scales": tensor})
    with pytest.raises(RefusedError, match="it is expanded, so that elements share a place; make it contiguous"):
        MegatronSource(own)


def test_a_tensor_that_cannot_be_flipped_leaves_the_others_as_they_were():
    small, shared = torch.randn(3), torch.randn(1, 8).expand(8, 8)
    before = bit_view(small).clone()
    with pytest.raises(RuntimeError), flipped([shared, small], scrambled):
        pytest.fail("it was flipped")
    assert torch.equal(bit_view(small), before)


class Listed(Own):
    """Tasks in an order of our own."""

    order = (0, 1)

    def tasks(self):
        return [Task(f"task.{n}", "Own", self.tensors[n]) for n in self.order]


def test_tasks_that_change_places_are_refused_and_not_taken_for_each_other():
    own = Listed(weights((4, 3), (4, 3)), alone)
    source = MegatronSource(own)
    own.order, own.tensors = (1, 0), [tensor.clone() for tensor in own.tensors]
    with pytest.raises(RefusedError, match="listed in another order"):
        source.prepare()
    own.order = (0, 1)
    refit(source, own, lambda: own.tensors[0].mul_(2))


def test_a_function_that_is_not_whole_yet_has_a_fingerprint():
    def made():
        def hook():
            return later

        early = fingerprint(hook)
        later = 1
        return early, fingerprint(hook)

    early, whole = made()
    assert early != whole
