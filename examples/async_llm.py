"""vLLM's ``AsyncLLM`` in a program of your own, refitted while it answers.

    python examples/async_llm.py CHECKPOINT

CHECKPOINT is a folder with a Hugging Face model.  A trainer in a process of its own loads it, changes it and pushes;
this process serves it, and shows which version made which tokens of an answer that a refit came into.
"""

import asyncio
import multiprocessing
import sys
import tempfile

import torch

import dcr
from dcr.rollout import cpu_vllm

REFITS = 3
LIMIT_S = 1800.0  # all of it; a large model takes minutes to load
PROMPT = {"prompt_token_ids": [5, 9, 77]}


def train(checkpoint: str, addresses: dict[str, str]) -> None:
    """Push a new version again and again."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  of this process alone

    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    # "async": engines serve on while payloads come, and close their gates only to apply them.
    with dcr.TrainerRefit(policy, **addresses, settings={"gate_mode": "async"}) as refit:
        for _ in range(REFITS):
            with torch.no_grad():  # where an optimizer would step
                for weight in policy.parameters():
                    weight.add_(0.01 * torch.randn_like(weight) * (torch.rand_like(weight) < 0.03))
            report = refit.push()
            print(f"trainer: version {report.version}, {report.payload_bytes} bytes sent", flush=True)


async def serve(checkpoint: str, addresses: dict[str, str]) -> None:
    """Answer until the last version has made an answer alone."""
    from vllm import SamplingParams  # noqa: PLC0415  vLLM reads its environment when imported
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  the same
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  the same

    from dcr.rollout.vllm.async_engine import AsyncVllmEngine  # noqa: PLC0415  the same
    from dcr.rollout.vllm.worker_extension import worker_extension_cls  # noqa: PLC0415  the same

    cpu = {} if torch.cuda.is_available() else cpu_vllm.ENGINE_ARGUMENTS
    arguments = {"skip_tokenizer_init": True, **cpu, "worker_extension_cls": worker_extension_cls()}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(checkpoint, max_model_len=512, **arguments))
    node = None
    try:
        engine = AsyncVllmEngine(llm, name="node-a", on_close="keep")  # names are unique among a record's engines
        # In a thread: it calls the engine, which answers on this loop.
        node = await asyncio.to_thread(dcr.RolloutNode, engine, **addresses)
        greedy = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
        answers, versions = 0, ()
        while versions != (REFITS,):
            async for answer in engine.generate(PROMPT, greedy, f"request-{answers}"):
                versions, spans = answer.versions, answer.spans[0]
            answers += 1
            print("rollout: tokens", *(f"{s.start} to {s.end} by version {s.version}," for s in spans), flush=True)
    finally:
        if node is not None:
            await asyncio.to_thread(node.close)
        llm.shutdown()


def main(checkpoint: str) -> None:
    """Train, and serve what is trained."""
    if not torch.cuda.is_available():
        cpu_vllm.set_environment()
    with tempfile.TemporaryDirectory() as run:
        addresses = {"control": f"sqlite://{run}/record.db", "delivery": f"file://{run}/payloads"}
        trainer = multiprocessing.get_context("spawn").Process(target=train, args=(checkpoint, addresses))
        trainer.start()
        try:
            asyncio.run(asyncio.wait_for(serve(checkpoint, addresses), LIMIT_S))
            trainer.join(60)
        finally:
            trainer.terminate()
    if trainer.exitcode != 0:
        raise SystemExit(f"the trainer ended with {trainer.exitcode}")


if __name__ == "__main__":  # vLLM starts its processes from this file anew
    main(sys.argv[1])
