"""A real Megatron training loop refits a live engine: forward, backward, FP32 masters, and every push is bit-exact."""

import pytest
import torch
import torch.distributed as dist

from dcr import MegatronRefit, RolloutNode
from dcr.data_plane.bits import bit_view
from tests.integration.megatron_ranks import build

JOB = "tests.integration.test_megatron_refit:pushes"
NORMAL = ("qwen3-tied tp2 pp1 of 2",)
STEPS = 3


class Masters:
    """AdamW over FP32 masters of BF16 weights, as Megatron's optimizer keeps them."""

    def __init__(self, chunk, group):
        self._live = [p for p in chunk.parameters() if p.requires_grad]
        self._partial = [p for n, p in chunk.named_parameters() if "q_layernorm" in n or "k_layernorm" in n]
        self._group = group
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._live]
        self._adam = torch.optim.AdamW(self._masters, lr=1e-4, weight_decay=0.0)

    def step(self, loss):
        loss.backward()
        for parameter in self._partial:  # each tensor-parallel rank saw its own heads only
            dist.all_reduce(parameter.grad, group=self._group)
        for master, live in zip(self._masters, self._live, strict=True):
            master.grad = live.grad.float()
            live.grad = None
        self._adam.step()
        with torch.no_grad():
            for master, live in zip(self._masters, self._live, strict=True):
                live.copy_(master)


def engine_of(checkpoint):
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - in ranks alone

    from dcr.rollout.torch.engine import TorchEngine  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    own = dict(model.named_parameters())

    def load_weights(weights):
        with torch.no_grad():
            return {name for name, tensor in weights if own[name].copy_(tensor) is not None}

    return model, TorchEngine(model, load_weights, name="engine", checkpoint=checkpoint)


def pushes(case, rank, folder):
    """Runs on every rank; the first has the engine in its process."""
    from megatron.core import parallel_state  # noqa: PLC0415 - in ranks alone

    checkpoint = folder.parent / "checkpoints" / case.model
    bridge, model = build(case, checkpoint)
    masters = Masters(model[0], parallel_state.get_tensor_model_parallel_group())
    ids = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1).view(1, 1, 16, 16)
    positions = torch.arange(16).expand(2, -1)
    addresses = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
    seen = []
    with MegatronRefit(model, bridge, **addresses) as refit:
        served, engine = engine_of(checkpoint) if rank == 0 else (None, None)
        node = RolloutNode(engine, **addresses) if rank == 0 else None
        for _ in range(STEPS):
            loss = model[0](input_ids=ids, position_ids=positions, attention_mask=mask, labels=ids.roll(-1, 1))
            masters.step(loss.float().mean())
            report = refit.push()
            exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
            state = {} if served is None else {n: bit_view(t).clone() for n, t in served.state_dict().items()}
            seen.append((report, float(loss.float().mean()), {n: bit_view(t) for n, t in exported.items()}, state))
        again = refit.push()
    loss = model[0](input_ids=ids, position_ids=positions, attention_mask=mask, labels=ids.roll(-1, 1))
    masters.step(loss.float().mean())
    with MegatronRefit(model, bridge, **addresses) as refit:  # a trainer that went on from weights nobody has seen
        resumed = refit.push()
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    exact = None
    if node is not None:
        exact = all(torch.equal(bit_view(served.state_dict()[n]), bit_view(t)) for n, t in exported.items())
        node.close()
    return seen, again, resumed, exact


def test_every_push_of_a_training_loop_is_bit_exact(megatron):
    (first, again, resumed, exact), (second, *_) = megatron[1][NORMAL[0]]
    for version, ((report, _, exported, served), (_, _, elsewhere, _)) in enumerate(zip(first, second, strict=True), 1):
        assert (report.version, report.kind, report.attempts) == (version, "relative", 1)
        assert report.elements == sum(t.numel() for t in exported.values())
        assert 0.005 < report.changed_entries / report.elements < 0.9
        assert exported.keys() <= served.keys()
        for name, bits in exported.items():
            assert torch.equal(served[name], bits), name
            assert torch.equal(elsewhere[name], bits), name
    assert first[-1][1] < first[0][1]  # it learns
    assert (again.version, again.changed_entries) == (STEPS + 1, 0)
    assert (resumed.version, resumed.kind) == (STEPS + 2, "dense")
    assert exact is True


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_the_same_report(megatron, rank):
    reports = [report for report, *_ in megatron[1][NORMAL[0]][rank][0]]
    assert [r.changed_entries for r in reports] == [r.changed_entries for r, *_ in megatron[1][NORMAL[0]][0][0]]
