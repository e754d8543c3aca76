"""Real Megatron ranks whose conversion fails on one of them alone, whose replicas come apart, and what they own."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

from dcr.protocol.errors import DcrError
from dcr.trainer.megatron.conversion import BridgeConversion
from dcr.trainer.megatron.source import MegatronSource
from tests.integration.megatron_ranks import build
from tests.integration.test_megatron_residual import plain

JOB = "tests.integration.test_megatron_together:refits"
NORMAL = ("qwen3-untied tp2 of 2",)
GRACE_S = 1.0
DOWN = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.input_layernorm.weight"


class Trouble:
    """Tasks that double one projection, and fail on the last rank where and while they are told to."""

    def __init__(self, bridge, model, rank):
        self._bridge, self._model, self._last = bridge, model, rank == 1
        self.where = ""

    def build(self):
        return [
            self._troubled(task) if task.global_param_name == DOWN else task
            for task in plain(self._bridge, self._model)
        ]

    def listed(self):
        if self._last:
            self._fail()
        return plain(self._bridge, self._model)

    def _troubled(self, task):
        if self._last and self.where == "before its collectives":
            task.mapping.megatron_to_hf = self._fail
        return dataclasses.replace(task, export_hook=self._double)

    def _double(self, name, tensor):
        from megatron.bridge.models.conversion.model_bridge import HFWeightTuple  # noqa: PLC0415 - in ranks alone

        if self._last and (self.where == "after them" or (self.where == "on ids" and tensor.dtype == torch.int64)):
            self._fail()
        yield HFWeightTuple(name, tensor if self.where == "on ids" else tensor * 2)

    def _fail(self, *_):
        raise MemoryError("nothing left on this rank")


class Counting(BridgeConversion):
    """Counts the tensors of integers that it converts: nothing but learning does that."""

    ids = 0

    def convert(self, numbers, replace_by, begin):
        def counted(number, live):
            made = replace_by(number, live)
            self.ids += made.dtype == torch.int64
            return made

        yield from super().convert(numbers, counted, begin)


def learned(case, checkpoint, folder, rank):
    """The ids that three starts needed: without a stored projection, with one, and with one on the first rank alone."""
    counts, pieces = [], []
    for start in range(3):
        bridge, model = build(case, checkpoint)
        if start == 2 and rank == 1:
            next(folder.glob("rank-1-*")).unlink()
        dist.barrier()
        conversion = Counting(bridge, model)
        source = MegatronSource(conversion, cache_folder=folder)
        counts.append((conversion.ids, len([t for t in conversion.tasks() if t.tensor is not None])))
        pieces.append(source._pieces)
    return counts, pieces[0] == pieces[1] == pieces[2]


def refused(change):
    """What was said, and after how many seconds."""
    begun = time.monotonic()
    try:
        change()
    except DcrError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return None


def refits(case, rank, folder):
    """Runs on every rank."""
    checkpoint = folder.parent / "checkpoints" / case.model
    stored = learned(case, checkpoint, folder / "projections", rank)
    bridge, model = build(case, checkpoint)
    trouble = Trouble(bridge, model, rank)
    live = dict(model[0].named_parameters())
    trouble.where = "on ids"
    seen = {"stored": stored, "on ids": MegatronSource(BridgeConversion(bridge, model, trouble.build)).residual}
    trouble.where = ""
    source = MegatronSource(
        BridgeConversion(bridge, model, trouble.build), check_replicas_always=True, peer_grace_s=GRACE_S
    )
    seen["arguments"] = refused(lambda: MegatronSource(BridgeConversion(bridge, model), check_replicas=rank == 0))
    seen["listing"] = refused(lambda: MegatronSource(BridgeConversion(bridge, model, trouble.listed)))
    seen["inspection"] = source.inspect()
    seen["memory"] = source.memory_bytes
    digest = source.baseline_digest

    live[NORM].data[3] *= 1 - 2 * rank
    seen["replicas"] = refused(source.prepare)
    live[NORM].data[3] *= 1 - 2 * rank
    source.prepare()

    live[DOWN].data.mul_(2)
    for where in ("after them", "before its collectives"):
        trouble.where = where
        seen[where] = refused(source.prepare)
        seen["unchanged"] = source.baseline_digest == digest
        if where == "after them":
            trouble.where = ""
            source.prepare()  # everything goes on
            live[DOWN].data.mul_(2)
    return seen


@pytest.fixture
def ranks(megatron):
    return megatron[1][NORMAL[0]]


@pytest.mark.parametrize(
    ("where", "kind"), [("after them", "RefusedError"), ("before its collectives", "OutOfStepError")]
)
def test_a_conversion_that_fails_on_one_rank_alone_is_named_on_all(ranks, where, kind):
    for rank in ranks:
        name, said, seconds = rank[where]
        assert name == kind
        assert said.startswith(f"rank 1: the conversion of {DOWN} failed: MemoryError: nothing left on this rank")
        assert seconds < GRACE_S + 20
        assert ("start the trainer again" in said) == (kind == "OutOfStepError")
        assert rank["unchanged"]


def test_ranks_that_were_given_different_arguments_are_told_so(ranks):
    for rank in ranks:
        assert rank["arguments"][:2] == (
            "RefusedError",
            "check_replicas is True on rank 0 and False on rank 1: give all ranks the same",
        )


def test_tasks_that_cannot_be_listed_on_one_rank_alone_are_refused_on_all(ranks):
    for rank in ranks:
        assert rank["listing"][:2] == (
            "RefusedError",
            "rank 1: the conversion tasks cannot be listed: MemoryError: nothing left on this rank",
        )


def test_a_task_that_fails_on_ids_on_one_rank_alone_is_residual_on_all(ranks):
    for rank in ranks:
        (residual,) = rank["on ids"]
        assert residual.task == DOWN
        assert residual.reason == (
            "its conversion fails on integer ids on rank 1: MemoryError: nothing left on this rank"
        )


def test_a_stored_projection_is_used_by_all_ranks_or_by_none(ranks):
    for rank in ranks:
        counts, same = rank["stored"]
        assert same
        tasks = counts[0][1]
        assert counts == [(tasks, tasks), (0, tasks), (tasks, tasks)]


def test_replicas_that_come_apart_are_named_before_anything_is_emitted(ranks):
    for rank in ranks:
        name, said, _ = rank["replicas"]
        assert name == "RefusedError"
        assert said == f"{NORM}: ranks 0 and 1 hold replicas with different bits; synchronise them first"


def test_a_live_model_says_what_is_direct_and_who_owns_it(megatron, ranks):
    from safetensors.torch import load_file  # noqa: PLC0415

    state = load_file(megatron[0] / "checkpoints" / "qwen3-untied" / "model.safetensors")
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
    inspection = ranks[0]["inspection"]
    assert all(rank["inspection"] == inspection for rank in ranks)
    assert inspection.size_bytes == sum(sizes.values()) == sum(inspection.owned_bytes)
    assert sum(c.tensors for c in inspection.classes) == len(state)
    assert inspection.memory_bytes == tuple(rank["memory"] for rank in ranks) == inspection.owned_bytes
    (residual,) = [c for c in inspection.classes if c.residual]
    down = sizes["model.layers.1.mlp.down_proj.weight"]
    assert (residual.name, residual.kind) == ("decoder.layers.*.mlp.linear_fc2.weight", "AutoMapping")
    assert (residual.tasks, residual.tensors, residual.size_bytes) == (1, 1, down)
    assert inspection.direct_share == 1 - down / sum(sizes.values())
    qkv = next(c for c in inspection.classes if c.kind == "QKVMapping")
    assert (qkv.tasks, qkv.tensors) == (2, 6)
    assert qkv.size_bytes == sum(
        size for name, size in sizes.items() if name.split(".")[-2] in {"q_proj", "k_proj", "v_proj"}
    )
    said = str(inspection)
    assert residual.residual in said
    assert f"direct: {inspection.direct_share:.4%} of the bytes" in said
    assert "host memory in MB, from rank 0: 0.139 0.124" in said
