"""The untouched twin: what a fresh engine holds and answers, to compare a refitted one with.

    python -m demo.vllm_twin

speaks JSON lines: one request a line on standard input, one answer a line on standard output, until the input ends.

    {"checkpoint": DIRECTORY, "prompts": [[TOKEN, ...], ...], "max_tokens": N, "alone": false,
     "arguments": {NAME: VALUE, ...}}
    {"digests": {NAME: DIGEST, ...}, "tokens": [[TOKEN, ...], ...], "logprobs": [[P, ...], ...], "start_s": S,
     "rss_bytes": B}

``digests`` are of every parameter and buffer (by ``RANK/NAME`` if there are several ranks), ``tokens`` are greedy, and
``logprobs`` theirs; ``alone`` asks one prompt after the other, since what shares a batch may round otherwise.
``arguments`` of ``vllm.LLM`` go before ``ENGINE_ARGUMENTS``.  Each request builds a new engine from the checkpoint,
asks it, and discards it; none is ever refitted.  vLLM is imported once.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from dcr.rollout import cpu_vllm

ENGINE_ARGUMENTS: dict[str, Any] = {
    **cpu_vllm.ENGINE_ARGUMENTS,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
}
"""Keyword arguments of ``vllm.LLM`` for the twin, and for an engine that is to be compared with it."""


def greedy_sampling(max_tokens: int) -> Any:
    """``vllm.SamplingParams`` for the likeliest ``max_tokens`` tokens, with their log-probabilities."""
    from vllm import SamplingParams  # noqa: PLC0415  slow to import, and reads its environment then

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)


def generated(outputs: Sequence[Any]) -> dict[str, Any]:
    """``tokens`` and ``logprobs`` of ``vllm.RequestOutput``, as in an answer of the twin."""
    completions = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(c.token_ids) for c in completions],
        "logprobs": [
            [chosen[token].logprob for token, chosen in zip(c.token_ids, c.logprobs, strict=True)] for c in completions
        ],
    }


def greedy(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """Greedy continuations of token-id prompts, each of exactly ``max_tokens`` tokens, as in an answer of the twin."""
    asked = [{"prompt_token_ids": list(p)} for p in prompts]
    return generated(llm.generate(asked, greedy_sampling(max_tokens), use_tqdm=False) if asked else [])


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Build a fresh engine from the checkpoint, ask it, discard it."""
    from vllm import LLM  # noqa: PLC0415  the same
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: PLC0415  the same

    started = time.monotonic()
    llm = LLM(model=request["checkpoint"], **{**ENGINE_ARGUMENTS, **request.get("arguments", {})})
    start_s = time.monotonic() - started
    digests, *others = llm.collective_rpc("dcr_resident_digests")
    if others:
        digests = {f"{rank}/{name}": d for rank, one in enumerate([digests, *others]) for name, d in one.items()}
    prompts = request["prompts"]
    batches = [[prompt] for prompt in prompts] if request.get("alone") else [prompts]
    parts = [greedy(llm, batch, request["max_tokens"]) for batch in batches]
    made = {key: [one for part in parts for one in part[key]] for key in ("tokens", "logprobs")}
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return {"digests": digests, **made, "start_s": start_s, "rss_bytes": psutil.Process().memory_info().rss}


def main() -> None:
    """Answer requests until the input ends."""
    cpu_vllm.set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: nothing to import again
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
