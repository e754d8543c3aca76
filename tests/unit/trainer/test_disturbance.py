"""Live tensors get other bits for a while, and exactly their own back."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr.data_plane.bits import bit_view
from dcr.trainer.megatron import disturbance
from dcr.trainer.megatron.disturbance import PERIOD, enlarged, flipped, others_changed, scrambled
from dcr.trainer.random_bits import random_bits

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)


@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 50),
    mask=st.sampled_from([scrambled, enlarged]),
    turned=st.booleans(),
    fails=st.booleans(),
)
def test_every_element_is_other_bits_inside_and_its_own_after(dtype, numel, mask, turned, fails):
    tensor = random_bits(torch.empty(3, numel, dtype=dtype), numel)
    tensor = tensor.t() if turned else tensor
    before = bit_view(tensor).clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disturbance, "PERIOD", 16)
        with contextlib.suppress(KeyError), flipped([tensor, tensor.view(tensor.shape)], mask):  # twice: flipped once
            inside = bit_view(tensor).clone()
            if fails:
                raise KeyError
    assert bool((inside != before).all())
    assert torch.equal(bit_view(tensor), before)


def test_masks_reach_nan_and_huge_finite_values():
    weights = torch.linspace(-1.99, 1.99, PERIOD).to(torch.bfloat16)
    with flipped([weights], scrambled):
        assert bool(weights.isnan().any())
        assert bool((weights < 0).any())
    with flipped([weights], enlarged):
        assert bool(weights.isfinite().all())
        assert float(weights.float().abs().min()) > 1e10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_tensors_of_no_task_are_put_back(dtype):
    tensor = random_bits(torch.empty(5, 7, dtype=dtype), 1)
    before = bit_view(tensor).clone()
    with others_changed({"adapter": tensor}):
        assert torch.equal(bit_view(tensor), before) == (dtype == torch.int32)
        assert bool(tensor.float().isfinite().all())
    assert torch.equal(bit_view(tensor), before)
