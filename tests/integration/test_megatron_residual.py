"""What a real Bridge cannot export by moving elements: found, named, converted where it changed, and exact.

The truth is the Bridge's own export of the whole model before and after, by tasks that the owners never see.
"""

import contextlib
import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcr.data_plane.content_digest import ContentDigest
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.megatron import learner
from dcr.trainer.megatron.conversion import BridgeConversion
from dcr.trainer.megatron.source import MegatronSource
from tests.integration.emitted import bits_of, digest, same, union
from tests.integration.megatron_ranks import build

JOB = "tests.integration.test_megatron_residual:refits"
NORMAL = ("qwen3-padded tp2 of 2", "qwen3-untied pp2 of 2", "nemotron-h tp1 of 2")
CHUNK = 1000
BLOCK = 32


def quantise(name, tensor):
    """A hook of our own: one projection in FP8 blocks with their scales, another doubled."""
    from megatron.bridge.models.conversion.model_bridge import HFWeightTuple  # noqa: PLC0415 - in ranks alone

    if name.endswith("o_proj.weight"):
        blocks = tensor.float().view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True) / 448
        yield HFWeightTuple(name, (blocks / scale).to(torch.float8_e4m3fn).view(tensor.shape))
        yield HFWeightTuple(f"{name}_scale", scale.view(-1))
    elif name.endswith("down_proj.weight"):
        yield HFWeightTuple(name, tensor * 2)
    else:
        yield HFWeightTuple(name, tensor)


def plain(bridge, model, **options):
    tasks = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, model, **options)
    return [task for task in tasks if task is not None]


def hooked(bridge, model):
    return [dataclasses.replace(task, export_hook=quantise) for task in plain(bridge, model)]


def zero_centred(bridge, model):
    from megatron.bridge.models.conversion import param_mapping  # noqa: PLC0415 - in ranks alone

    def centred(task):
        if not task.global_param_name.endswith("input_layernorm.weight"):
            return task
        mapping = param_mapping.RMSNorm2ZeroCenteredRMSNormMapping(task.mapping.megatron_param, task.mapping.hf_param)
        return dataclasses.replace(task, mapping=mapping)

    return [centred(task) for task in plain(bridge, model)]


def in_bf16(bridge, model):
    return plain(bridge, model, weight_dtype=torch.bfloat16)


def train(model, number, share=0.2):
    """Small changes of some elements, in place, alike on replicas: by the name and shape of the tensor."""
    for chunk in model:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                random = torch.Generator().manual_seed(number + len(name) + tensor.numel())
                chosen = torch.rand(tensor.shape, generator=random) < share
                moved = tensor.detach() * 1.5 + torch.randn(tensor.shape, generator=random).to(tensor.dtype)
                tensor.data.copy_(torch.where(chosen, moved, tensor.detach()))


def exported(bridge, model, tasks, rows):
    with torch.no_grad():
        out = bridge.export_hf_weights(model, cpu=True, show_progress=False, conversion_tasks=tasks(bridge, model))
        return {name: tensor[:rows].clone() if tensor.shape[0] > 128 else tensor.clone() for name, tensor in out}


def refit(source, change, export):
    """One refit; what this rank saw."""
    seen = {"old": export(), "baseline": source.baseline_digest, "owned": source.owned_elements}
    change()
    source.prepare()
    for kind in Kind:
        seen[kind] = [(c.spec.name, c.indices, c.old, c.new) for c in source.changes(kind)]
        if kind is not Kind.RESTORE:
            assert seen.setdefault("candidate", source.candidate_digest) == source.candidate_digest
    seen["new"] = export()
    source.fold(seen["candidate"])
    seen["folded"] = source.baseline_digest
    return seen


def run_variant(bridge, model, tasks=plain, changes=(), rows=None):
    source = MegatronSource(
        BridgeConversion(bridge, model, lambda: tasks(bridge, model)), chunk_elements=CHUNK, check_replicas=False
    )
    changes = (*changes, lambda: train(model, 1), lambda: train(model, 2), lambda: None)
    return {
        "specs": source.specs,
        "residual": source.residual,
        "residual specs": source.residual_specs,
        "refits": [refit(source, change, lambda: exported(bridge, model, tasks, rows)) for change in changes],
        "untouched": source.prepare() or dict(source._candidates),
    }


def double_attention_output(model):
    for chunk in model:
        for name, tensor in chunk.named_parameters():
            if name.endswith("linear_proj.weight"):
                tensor.data.mul_(2)


@contextlib.contextmanager
def wrong_maps():
    """Fits that exchange the halves of whatever comes out of one tensor in several runs."""
    right = learner._run_or_fit

    def wrong(source, target):
        return right(source, target.roll(target.numel() // 2))

    learner._run_or_fit = wrong
    try:
        yield
    finally:
        learner._run_or_fit = right


def padded(case, checkpoint):
    bridge, model = build(case, checkpoint, should_pad_vocab=True, make_vocab_size_divisible_by=128)
    seen = {"padded vocabulary": run_variant(bridge, model, rows=250)}
    bridge, model = build(case, checkpoint, should_pad_vocab=True, make_vocab_size_divisible_by=128)
    with wrong_maps():
        seen["wrong maps"] = run_variant(bridge, model, rows=250)
    return seen


def dense(case, checkpoint):
    seen = {}
    bridge, model = build(case, checkpoint)
    seen["hook"] = run_variant(bridge, model, hooked, [lambda: double_attention_output(model)])
    seen["zero-centred"] = run_variant(bridge, model, zero_centred)
    source = MegatronSource(BridgeConversion(bridge, model, lambda: hooked(bridge, model)))
    seen["refused"] = {}
    for what, change in (
        ("not prepared", lambda: source.changes(Kind.RELATIVE)),
        ("stepped after prepare", lambda: (source.prepare(), train(model, 9), source.changes(Kind.RELATIVE))),
        ("added", lambda: (model[0].register_buffer("more", torch.ones(3)), source.prepare())),
    ):
        try:
            change()
        except RefusedError as error:
            seen["refused"][what] = str(error)
    bridge, model = build(case, checkpoint)
    from megatron.bridge.peft.lora import LoRA  # noqa: PLC0415 - in ranks alone

    LoRA(target_modules=["linear_qkv", "linear_fc2"], dim=4, alpha=4)(model)
    seen["adapter"] = run_variant(bridge, model, changes=[lambda: train_adapters(model)])
    both = checkpoint.parent / f"two-names-{torch.distributed.get_rank()}"
    shutil.copytree(checkpoint.parent / "qwen3-tied", both)
    state = load_file(both / "model.safetensors")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, both / "model.safetensors")
    bridge, model = build(case, both)
    seen["two names"] = run_variant(bridge, model)
    return seen


def train_adapters(model):
    for chunk in model:
        for name, tensor in chunk.named_parameters():
            if "adapter" in name:
                tensor.data.normal_(generator=torch.Generator().manual_seed(len(name)))


def mamba(case, checkpoint):
    bridge, model = build(case, checkpoint, bf16=False)
    seen = {"FP32": run_variant(bridge, model), "cast": run_variant(bridge, model, in_bf16)}
    if torch.distributed.get_rank() == 1:
        model[0].decoder.final_norm.weight.data[3] += 1
    try:
        MegatronSource(BridgeConversion(bridge, model))
    except RefusedError as error:
        seen["replicas"] = str(error)
    return seen


def refits(case, rank, folder):
    """Runs on every rank."""
    variants = {"qwen3-padded": padded, "qwen3-untied": dense, "nemotron-h": mamba}
    return variants[case.model](case, folder.parent / "checkpoints" / case.model)


VARIANTS = {
    "padded vocabulary": (NORMAL[0], {}),
    "wrong maps": (NORMAL[0], {"q_proj": "random bits do not come out", "gate_proj": "random bits do not come out"}),
    "hook": (NORMAL[1], {"o_proj.weight": "casts integer ids", "o_proj.weight_scale": None, "down_proj": "comput"}),
    "zero-centred": (NORMAL[1], {"input_layernorm": "comput"}),
    "adapter": (NORMAL[1], {"q_proj": "", "k_proj": None, "v_proj": None, "down_proj": ""}),
    "two names": (NORMAL[1], {}),
    "FP32": (NORMAL[2], {}),
    "cast": (NORMAL[2], {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_emitted_is_the_bridges_own_export(megatron, variant):
    case, _ = VARIANTS[variant]
    ranks = [rank[variant] for rank in megatron[1][case]]
    specs = ranks[0]["specs"]
    assert all(r["specs"] == specs for r in ranks)
    for number in range(len(ranks[0]["refits"])):
        seen = [r["refits"][number] for r in ranks]
        old, new = seen[0]["old"], seen[0]["new"]
        assert [(s.name, s.shape, s.dtype) for s in specs] == [
            (n, tuple(t.shape), t.dtype) for n, t in sorted(old.items())
        ]
        assert all(same(bits_of(s["new"]), bits_of(new)) for s in seen)
        numel = sum(t.numel() for t in old.values())
        changed = sum(int((bits_of(old)[n] != b).sum()) for n, b in bits_of(new).items())
        assert sum(s["owned"] for s in seen) == numel
        for kind in (Kind.RELATIVE, Kind.ABSOLUTE):
            result, named = union([s[kind] for s in seen], bits_of(old), check_old=True, chunk=CHUNK)
            assert same(result, bits_of(new))
            assert named == changed
        blank = {n: torch.zeros_like(b) for n, b in bits_of(old).items()}
        for kind, expected in ((Kind.DENSE, new), (Kind.RESTORE, old)):
            result, named = union([s[kind] for s in seen], blank, check_old=False, chunk=CHUNK)
            assert same(result, bits_of(expected))
            assert named == numel
        for share, expected in (("baseline", old), ("candidate", new), ("folded", new)):
            assert sum((s[share] for s in seen), ContentDigest()) == digest(specs, expected)
    assert changed == 0  # the last step is none
    assert all(r["untouched"] == {} for r in ranks)  # and converts nothing


@pytest.mark.parametrize("variant", VARIANTS)
def test_residual_tensors_are_those_that_do_not_only_move(megatron, variant):
    case, expected = VARIANTS[variant]
    (residual, names), *others = [(r[variant]["residual"], r[variant]["residual specs"]) for r in megatron[1][case]]
    assert all(other == (residual, names) for other in others)
    if variant == "cast":
        whole = (spec.name for spec in megatron[1][case][0]["FP32"]["specs"] if spec.dtype == torch.float32)
        expected = dict.fromkeys(whole, "casts torch.float32 to torch.bfloat16")
        assert len(expected) > 4
    found = {name for name in expected for spec in names if name in spec.name}
    assert found == set(expected)
    stray = [spec.name for spec in names if not any(name in spec.name for name in expected)]
    assert variant == "wrong maps" or stray == []
    for name, reason in expected.items():
        assert reason is None or any(name in r.reason and reason in r.reason for r in residual), (name, residual)


def test_a_scale_that_changed_alone_is_sent_alone(megatron):
    ranks = [rank["hook"]["refits"][0] for rank in megatron[1][NORMAL[1]]]
    named = {name for rank in ranks for name, *_ in rank[Kind.RELATIVE]}
    assert named == {f"model.layers.{n}.self_attn.o_proj.weight_scale" for n in range(2)}


def test_replicas_that_differ_are_named(megatron):
    for rank in megatron[1][NORMAL[2]]:
        assert rank["replicas"].startswith("decoder.final_norm.weight: ranks 0 and 1 hold replicas with different bits")


def test_what_does_not_fit_is_refused_by_name(megatron):
    for rank in megatron[1][NORMAL[1]]:
        refused = rank["refused"]
        assert "call prepare() on every rank" in refused["not prepared"]
        assert "have changed since prepare()" in refused["stepped after prepare"]
        assert "chunk 0: more" in refused["added"]
