"""Real Megatron training loops refit a vLLM engine of another layout: every push, and a retry, is bit-exact.

The loop is Megatron's own: its schedule, its gradient buffers, and its distributed optimizer with FP32 masters, whose
parameters lie in contiguous buffers and are gathered, in part, by the forward pass that follows a step.  The truth is
the Bridge's own dense export, and an engine that loaded it and was never refitted.
"""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from dcr import MegatronRefit, RefitReport, RolloutNode
from dcr.data_plane.bits import bit_view
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.observer import log_step
from dcr.trainer import cpu_megatron
from demo.process import Process
from tests.faults.thread_fleet import rewrite
from tests.integration.megatron_ranks import Case, build, run

JOB = "tests.integration.test_megatron_refit:pushes"
NORMAL = ("qwen3-moe ep2 of 2",)
LONG = ("qwen3-moe tp2 ep2 of 2", "qwen3-tied tp2 of 2", "qwen3-untied of 2")
ENGINES = {"qwen3-moe tp2 ep2 of 2": {"tensor_parallel_size": 2}}
"""Arguments of ``vllm.LLM``; others are served by one rank."""
STEPS = 3
CUT_AT = 2
LENGTH = 16
PROMPTS = [[5, 9, 77, 130, 33], [1, 2, 3]]
TOKENS = 16  # the twin makes as many
WAIT_S = 200.0


@dataclass
class Seen:
    """What a rank saw of one push; of engines, what the first rank saw."""

    report: RefitReport
    loss: float
    before: str  # digest of this rank's replicas before the push
    exported: str  # of the Bridge's export after it
    plain: dict[str, torch.Tensor] | None = None  # stored bits of the engine in plain torch
    vllm: dict | None = None


class Loop:
    """Megatron's training loop over one batch for each data-parallel rank."""

    def __init__(self, chunk):
        from megatron.core import distributed, optimizer, parallel_state  # noqa: PLC0415 - in ranks alone

        self.chunk = chunk
        chunk.config.finalize_model_grads_func = distributed.finalize_model_grads
        reduction = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=50_000,
        )
        adam = optimizer.OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        with cpu_megatron.on_cpu():
            self.model = distributed.DistributedDataParallel(chunk.config, reduction, chunk)
            self._optimizer = optimizer.get_megatron_optimizer(adam, [self.model])
        chunk.config.no_sync_func = self.model.no_sync
        batch = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
        self._ids = torch.randint(0, 250, (2, LENGTH), generator=batch)

    def step(self):
        from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415

        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).view(1, 1, LENGTH, LENGTH)

        def forward(_, model):
            positions = torch.arange(LENGTH).expand(2, -1)
            labels = self._ids.roll(-1, 1)
            made = model(input_ids=self._ids, position_ids=positions, attention_mask=mask, labels=labels)
            return made, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

        with cpu_megatron.on_cpu():
            self.model.zero_grad_buffer()
            self._optimizer.zero_grad()
            (said,) = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=None,
                model=[self.model],
                num_microbatches=1,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            updated, *_ = self._optimizer.step()
        assert updated
        return float(said["loss"])

    def replicas(self):
        """A digest of the parameters that are on every data-parallel rank."""
        return digest({n: p.detach() for n, p in self.chunk.named_parameters() if ".experts." not in n})


class Cut:
    """Cuts a payload of the second owner in the delivery folder, before any receiver may apply it; once, when armed."""

    def __init__(self, payloads):
        self._payloads = payloads
        self.armed = False

    def __call__(self, step):
        log_step(step)
        if not self.armed or step.action != "OrderOpenApply":
            return
        self.armed = False
        deadline = time.monotonic() + WAIT_S
        while not (manifests := list(self._payloads.glob(f"default/{step.epoch:020d}/*/rank-1/*/manifest"))):
            assert time.monotonic() < deadline, f"rank-1 did not seal epoch {step.epoch}"
            time.sleep(0.005)
        rewrite(max(manifests[0].parent.glob("*.payload")), lambda data: data[:-7])


def digest(state):
    h = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        h.update(bit_view(tensor.contiguous()).numpy().tobytes())
    return h.hexdigest()


def plain_engine(checkpoint):
    """Canonical tensors as they are, by name, and the engine that holds them."""
    own = {n: nn.Parameter(t, requires_grad=False) for n, t in load_file(checkpoint / "model.safetensors").items()}
    numbers = {name: str(number) for number, name in enumerate(own)}

    def load_weights(weights):
        with torch.no_grad():
            return {numbers[name] for name, tensor in weights if own[name].copy_(tensor) is not None}

    return own, TorchEngine(nn.ParameterList(own.values()), load_weights, name="plain", checkpoint=checkpoint)


def vllm_engine(folder, checkpoint, addresses, arguments):
    where = [f"--{what}={address}" for what, address in addresses.items()]
    engine = ["--name=vllm", f"--checkpoint={checkpoint}", f"--arguments={json.dumps(arguments)}"]
    return Process(
        "vllm", folder, "demo.vllm_node", *where, *engine, progress=print, environment={"VLLM_LOGGING_LEVEL": "ERROR"}
    )


def answer_of(process, version):
    """What the engine holds and generates once it serves a version."""
    process.ask(WAIT_S, do="wait_serving", version=version, timeout_s=WAIT_S)
    made = process.ask(WAIT_S, do="generate", prompts=PROMPTS, tokens=TOKENS)
    return {**made, **process.ask(WAIT_S, do="bits")}


def export(bridge, loop, checkpoint, directory):
    """The Bridge's own dense export of the live weights, which the first rank writes as a checkpoint."""
    state = {
        name: tensor.clone() for name, tensor in bridge.export_hf_weights([loop.model], cpu=True, show_progress=False)
    }
    if dist.get_rank() == 0:
        directory.mkdir()
        shutil.copy(checkpoint / "config.json", directory)
        save_file({n: t.contiguous() for n, t in state.items()}, directory / "model.safetensors", {"format": "pt"})
    return digest(state)


def pushes(case, rank, folder):
    """Runs on every rank; the first has an engine in its process, and one in vLLM beside it."""
    checkpoint = folder.parent / "checkpoints" / case.model
    addresses = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
    cut = Cut(folder / "payloads")
    options = {**addresses, "settings": {"bucket_bytes": 20_000, "members_min": 2}, "observe": cut}
    vllm = vllm_engine(folder, checkpoint, addresses, ENGINES.get(folder.name, {})) if rank == 0 else None
    bridge, (chunk,) = build(case, checkpoint, sequence_parallel=case.tp > 1)
    loop = Loop(chunk)
    seen = []
    try:
        with MegatronRefit([loop.model], bridge, **options) as refit:
            own, engine = plain_engine(checkpoint) if rank == 0 else ({}, None)
            node = RolloutNode(engine, **addresses) if rank == 0 else None
            for version in range(1, STEPS + 1):
                loss, before = loop.step(), loop.replicas()
                cut.armed = version == CUT_AT
                report = refit.push()
                one = Seen(report, loss, before, export(bridge, loop, checkpoint, folder / f"v{version}"))
                if vllm is not None:
                    one.plain = {name: bit_view(tensor.data).clone() for name, tensor in own.items()}
                    one.vllm = answer_of(vllm, version)
                seen.append(one)
            again = refit.push()
            loop.step()
            pending = refit.begin_push()
            export(bridge, loop, checkpoint, folder / "copied")
            loop.step()  # the copy is sent, converted tensors and all, while every parameter changes
            copied = pending.result(), {name: bit_view(tensor.data).clone() for name, tensor in own.items()}
        loop.step()
        # A trainer that went on from weights that nobody has seen, and gives its model as it was before it was wrapped.
        with MegatronRefit([chunk], bridge, **options) as refit:
            resumed = refit.push()
            export(bridge, loop, checkpoint, folder / "resumed")
            if node is not None:
                node.wait_serving(resumed.version, WAIT_S)
                node.close()
    finally:
        if vllm is not None:
            vllm.end()
    return seen, again, copied, resumed, {name: bit_view(tensor.data) for name, tensor in own.items()}


def bits_of(checkpoint):
    return {n: bit_view(t) for n, t in load_file(checkpoint / "model.safetensors").items()}


def same(held, wanted):
    assert held.keys() == wanted.keys()
    wrong = [name for name, bits in wanted.items() if not torch.equal(held[name], bits)]
    assert wrong == []


def judge(folder, case, ranks, twin, twins):
    """Twins are made of some versions: the last is relative to the retry, and would be wrong wherever that was."""
    (seen, again, (copied, while_trained), resumed, last), (others, *_) = ranks
    replicated = Case.of(case).ranks > Case.of(case).tp
    for version, (one, other) in enumerate(zip(seen, others, strict=True), 1):
        retried = version == CUT_AT
        assert (one.report.version, one.report.attempts) == (version, 2 if retried else 1)
        assert one.report.kind == ("absolute" if retried else "relative")
        assert ["its seal is missing or wrong" in failure for failure in one.report.failures] == [True] * retried
        assert one.report.members == other.report.members
        assert sorted(one.report.members) == ["plain", "vllm"]
        assert one.report.changed_entries == other.report.changed_entries
        assert 0.005 < one.report.changed_entries / one.report.elements < 0.9
        assert (one.before != other.before) or not replicated  # the step itself has gathered nothing
        assert one.exported == other.exported
        exported = bits_of(folder / case / f"v{version}")
        assert one.report.elements == sum(bits.numel() for bits in exported.values())
        same(one.plain, exported)
    assert [one.vllm["version"] for one in seen] == list(range(1, STEPS + 1))
    for version in twins:
        wanted = twin.ask(folder / case / f"v{version}", PROMPTS, **ENGINES.get(case, {}))
        answer = seen[version - 1].vllm
        assert len(wanted["digests"]) > 10
        assert answer["bits"] == wanted["digests"]
        assert (answer["tokens"], answer["logprobs"]) == (wanted["tokens"], wanted["logprobs"])
    assert seen[-1].loss < seen[0].loss  # it learns
    assert (again.version, again.changed_entries) == (STEPS + 1, 0)
    assert (copied.version, copied.kind, copied.warnings) == (STEPS + 2, "relative", ())
    same(while_trained, bits_of(folder / case / "copied"))
    assert (resumed.version, resumed.kind) == (STEPS + 3, "dense")
    same(last, bits_of(folder / case / "resumed"))


@pytest.mark.vllm
@pytest.mark.timeout(600)  # with the cases of the other modules
@pytest.mark.parametrize("case", NORMAL)
def test_every_push_of_a_training_loop_is_bit_exact(megatron, twin, case):
    folder, seen = megatron
    judge(folder, case, seen[case], twin, twins=[STEPS])


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_push_of_training_loops_of_other_layouts_is_bit_exact(tmp_path, twin):
    seen = run(tmp_path, [(JOB, case) for case in LONG], timeout_s=800)
    for case in LONG:
        judge(tmp_path, case, seen[case], twin, twins=range(1, STEPS + 1))
