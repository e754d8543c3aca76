"""Ranks of real Megatron-Core models over gloo: a process that has imported Megatron once forks the ranks of each case.

Run as ``python -m tests.integration.megatron_ranks FOLDER JOB...``: each job is a function of a module of tests and a
case, "module:function:case"; every rank's result goes to ``FOLDER/CASE/RANK.pt``.
"""

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dcr.trainer import cpu_megatron

ROOT = Path(__file__).resolve().parents[2]
CASE_TIMEOUT_S = 240


@dataclass(frozen=True)
class Case:
    """A model and how it is laid out, written as "qwen3-moe tp2 pp1 ep2 etp1 of 4"."""

    model: str
    tp: int
    pp: int
    ep: int
    etp: int
    ranks: int

    @classmethod
    def of(cls, text):
        model, *layout, _, ranks = text.split()
        sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 1}
        for word in layout:
            sizes[word.rstrip("0123456789")] = int(word.lstrip("etp"))
        return cls(model, **sizes, ranks=int(ranks))


def build(case, checkpoint, *, bf16=True, **settings):
    """The Bridge, and this rank's chunks of a model, all of it in BF16 or not, with the checkpoint's weights."""
    from megatron.bridge import AutoBridge  # noqa: PLC0415 - after install()
    from megatron.core import parallel_state  # noqa: PLC0415

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
        )
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    provider = cpu_megatron.provider_of(
        bridge,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        **settings,
    )
    chunk = provider.provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )
    model = [chunk.bfloat16() if bf16 else chunk]
    load(bridge, model, checkpoint)
    return bridge, model


def load(bridge, model, checkpoint):
    with contextlib.redirect_stdout(None):  # it draws a progress bar
        bridge.load_hf_weights(model, checkpoint)


def run(folder, jobs, timeout_s):
    """Run "module:function" for each case; results by case and rank.

    Args:
        folder: where checkpoints and results go.
        jobs: pairs of a function and a case, no case twice.
        timeout_s: for all of them.
    """
    cases = [case for _, case in jobs]
    checkpoints(folder, {Case.of(case).model for case in cases})
    command = [sys.executable, "-m", "tests.integration.megatron_ranks", str(folder), *map(":".join, jobs)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return {
        case: [torch.load(folder / case / f"{r}.pt", weights_only=False) for r in range(Case.of(case).ranks)]
        for case in cases
    }


def checkpoints(folder, models):
    from vllm_models import write_checkpoint  # noqa: PLC0415 - slow

    for model in models:
        write_checkpoint(folder / "checkpoints" / model, 0, model)


def _rank(folder, function, text, rank):
    case = Case.of(text)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    torch.save(function(case, rank, folder), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _fork(folder, function, text):
    folder.mkdir(parents=True)
    children = {}
    for rank in range(Case.of(text).ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _rank(folder, function, text, rank)
                status = 0
            except BaseException:  # noqa: BLE001  a forked rank must not return
                print(f"{text}, rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(status)
        children[pid] = rank
    end, bad = time.monotonic() + CASE_TIMEOUT_S, ""
    while children and not bad:
        for pid in list(children):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                rank = children.pop(pid)
                bad = bad or (f"{text}: rank {rank} ended with {status}" if status else "")
        if time.monotonic() > end:
            bad = f"{text}: not done after {CASE_TIMEOUT_S} s"
        time.sleep(0.02)
    if bad:
        time.sleep(1.0)  # the others may have something to say
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return bad


def main(folder, *jobs):
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # no pool of threads exists when ranks are forked
    cpu_megatron.install()
    for module in (
        "megatron.bridge",
        "megatron.bridge.models.gpt_provider",
        "megatron.core.models.hybrid.hybrid_block",
    ):
        importlib.import_module(module)
    for job in jobs:
        module, name, text = job.split(":")
        function = getattr(importlib.import_module(module), name)
        begun = time.monotonic()
        bad = _fork(Path(folder) / text, function, text)
        print(f"{text}: {time.monotonic() - begun:.1f} s", flush=True)
        if bad:
            sys.exit(bad)


if __name__ == "__main__":
    main(*sys.argv[1:])
