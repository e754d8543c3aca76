"""Learning a projection takes ids of 4 bytes, twice where the save path copies; all else follows a chunk."""

import pytest
import torch
from torch import nn

from dcr.trainer.torch.source import TorchSource
from tests.peak_memory import peak_of

ROWS, COLUMNS, CHUNK = 1500, 1000, 1 << 16
NOISE = 16 << 20


def joined(state):
    """Both of one group, or what there is of it."""
    return {"+".join(state): torch.cat(list(state.values()))}


@pytest.mark.parametrize(("save_path", "copies"), [(dict, 0), (joined, 1)])
def test_learning_takes_a_few_bytes_an_element(save_path, copies):
    model = nn.Module()
    for k in range(2):
        model.register_parameter(f"w{k}", nn.Parameter(torch.randn(ROWS, COLUMNS).bfloat16(), requires_grad=False))
    TorchSource(nn.Linear(3, 3), chunk_elements=CHUNK)  # compiles, and starts threads
    found = []
    peak = peak_of(lambda: found.append(TorchSource(model, save_path=save_path, chunk_elements=CHUNK)))
    elements = 2 * ROWS * COLUMNS
    group = elements if save_path is joined else elements // 2
    outline = 2 * elements * copies  # all that the save path copies, in 16 bits
    assert peak < 2 * elements + max(outline, (4 + 4 * copies) * group + group // 8) + 112 * CHUNK + NOISE
    assert sum(spec.numel for spec in found[0].specs) == elements
