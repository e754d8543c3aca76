"""What learned placement rests on: a change that could send a loader elsewhere is named before a byte is written."""

import dataclasses
import enum
import statistics
import time

import loaders
import pytest
import torch
from torch import nn

from dcr.data_plane.item import Operation
from dcr.data_plane.placement.ground import Ground
from dcr.data_plane.placement.placement import Placement
from dcr.data_plane.resident import PartialWriteError, Residents
from dcr.protocol.errors import RefusedError


class Backend(enum.Enum):
    TRITON = 1
    CUTLASS = 2


@dataclasses.dataclass
class Parallel:
    tp_rank: int = 0
    ep_size: int = 2


@dataclasses.dataclass
class Config:
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    padded: int = 64


class Experts(nn.Module):
    """Puts an expert where its maps say: a list, a dict, a tensor, configurations and flags, as vLLM's layers have."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.w.output_dim = 0
        self.register_buffer("expert_map", torch.tensor([0, 1, -1, -1], dtype=torch.int32), persistent=False)
        self.slots = [0, 1, 2, 3]
        self.by_name = {"a": 0, "b": (1, 2)}
        self.hot = {1, 2}
        self.config = Config()
        self.tp_rank, self.use_ep, self.backend, self.scale = 0, True, Backend.TRITON, 0.5
        self.kernel = None
        self.cache = object()

    def load_weights(self, weights):
        for _, w in weights:
            for e in range(4):
                if self.expert_map[e].item() != -1:
                    self.w.data[self.slots[self.expert_map[e].item()]].copy_(w[e])


def ready():
    model = nn.Module()
    model.mlp = Experts()
    weights = {"w": loaders.random_bits((4, 6), loaders.BF16, 1)}
    model.mlp.load_weights(weights.items())
    specs = [loaders.TensorSpec("w", (4, 6), loaders.BF16)]
    placement = Placement(model, model.mlp.load_weights, specs, sharded=True)
    placement.prewarm().raise_if_refused()
    changed = loaders.changed(weights["w"], 2, 0.5)
    return model.mlp, placement, loaders.item("w", weights["w"], changed, Operation.SET)


CHANGES = {
    "expert_map": lambda m: m.expert_map.copy_(torch.tensor([1, 0, -1, -1])),
    "slots": lambda m: m.slots.reverse(),
    "by_name": lambda m: m.by_name.update(b=(2, 1)),
    "hot": lambda m: m.hot.add(3),
    "config": lambda m: setattr(m.config.parallel, "tp_rank", 1),
    "config ": lambda m: setattr(m.config, "padded", 128),
    "tp_rank": lambda m: setattr(m, "tp_rank", 1),
    "use_ep": lambda m: setattr(m, "use_ep", False),
    "backend": lambda m: setattr(m, "backend", Backend.CUTLASS),
    "scale": lambda m: setattr(m, "scale", 0.25),
    "slots ": lambda m: delattr(m, "slots"),
    "w": lambda m: setattr(m.w, "output_dim", 1),
    "w ": lambda m: setattr(m.w, "data", m.w.data.clone()),
    "extra": lambda m: m.register_buffer("extra", torch.ones(2)),
}


@pytest.mark.parametrize("named", CHANGES)
def test_a_change_is_refused_by_name_and_nothing_is_written(named):
    model, placement, item = ready()
    fingerprint = placement.fingerprint()
    CHANGES[named](model)
    before = loaders.raw(model.w).clone()
    what = "resident memory that the loader consults" if named == "expert_map" else rf"mlp\.{named.strip()}"
    with pytest.raises(RefusedError, match=f"^{what} (and 1 more )?moved, was rebound or changed.*restart the engine"):
        placement.apply([item])
    assert torch.equal(loaders.raw(model.w), before)
    assert placement.fingerprint() != fingerprint


class Adapted(nn.Module):
    """As LoRA wraps a layer: the weights lie where they lay, under another name, and others beside them."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Parameter(torch.zeros(2, 6, dtype=torch.bfloat16), requires_grad=False)


def offload(model):
    """As offloaders do: the same parameter object over other memory, with the same bits."""
    model.w.data = model.w.data.clone()


def retie(model):
    """A draft model, or a checkpoint that turns out to be tied, takes another one's tensor for its own."""
    model.head = model.w


@pytest.mark.parametrize(
    ("change", "named"), [(offload, r"mlp\.w"), (retie, r"mlp\.head"), (None, r"mlp\.base_layer\.\w+")]
)
def test_a_runtime_that_wraps_offloads_or_shares_after_learning_is_refused(change, named):
    root = nn.Module()
    root.mlp = mlp = Experts()
    weights = {"w": loaders.random_bits((4, 6), loaders.BF16, 1)}
    mlp.load_weights(weights.items())
    placement = Placement(root, mlp.load_weights, [loaders.TensorSpec("w", (4, 6), loaders.BF16)], sharded=True)
    placement.prewarm().raise_if_refused()
    new = loaders.changed(weights["w"], 2, 0.5)
    if change is None:
        root.mlp = Adapted(mlp)
    else:
        change(mlp)
    before = loaders.raw(mlp.w).clone()
    with pytest.raises(RefusedError, match=f"{named}.* moved, was rebound or changed.*nothing was written"):
        placement.apply([loaders.item("w", weights["w"], new, Operation.SET)])
    with pytest.raises(PartialWriteError, match="captured graphs would not see it"):
        placement.synchronise()
    assert torch.equal(loaders.raw(mlp.w), before)
    # Learned after it, all three are as good as any other model.
    again = Placement(root, mlp.load_weights, [loaders.TensorSpec("w", (4, 6), loaders.BF16)], sharded=True)
    again.prewarm().raise_if_refused()
    again.apply([loaders.item("w", weights["w"], new, Operation.SET)])
    assert torch.equal(loaders.raw(mlp.w)[:2], loaders.raw(new)[:2])


HARMLESS = {
    "a kernel is made when it is first needed": lambda m: setattr(m, "kernel", object()),
    "a new attribute": lambda m: setattr(m, "calls", 1),
    "another object that says the same": lambda m: setattr(m, "config", Config()),
    "an equal list": lambda m: setattr(m, "slots", [0, 1, 2, 3]),
    "an object that is no value": lambda m: setattr(m, "cache", object()),
    "eval": lambda m: m.eval(),
    "a hook": lambda m: m.register_forward_hook(print),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_what_a_loader_cannot_ask_does_not_matter(change):
    model, placement, item = ready()
    fingerprint = placement.fingerprint()
    HARMLESS[change](model)
    assert placement.apply([item]) == 1
    placement.synchronise()
    assert placement.fingerprint() == fingerprint
    CHANGES["tp_rank"](model)  # and what does matter still does
    with pytest.raises(RefusedError, match=r"mlp\.tp_rank"):
        placement.apply([item])


def test_a_second_look_costs_a_fraction_of_the_first():
    model = nn.ModuleList(Experts() for _ in range(300))
    ground = Ground(model, Residents(model), (), {})

    def seconds(look):
        times = []
        for _ in range(5):
            started = time.process_time()
            assert not ground.moved() if look == "moved" else ground.same()
            times.append(time.process_time() - started)
        return statistics.median(times)

    assert seconds("same") * 5 < seconds("moved")
