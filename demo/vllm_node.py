"""The vLLM receiver of the demo, in a process of its own."""

import argparse
import json
import os
from typing import Any

from demo.process import claim_output, serve

claim_output()

from dcr.rollout import cpu_vllm  # noqa: E402

cpu_vllm.set_environment()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process a receiver

from vllm import LLM, SamplingParams  # noqa: E402

from dcr import RolloutNode  # noqa: E402
from dcr.rollout.vllm.engine import VllmEngine  # noqa: E402
from demo.vllm_twin import ENGINE_ARGUMENTS, generated, greedy_sampling  # noqa: E402


def main() -> None:
    """Serve one engine."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--control", required=True)
    arguments.add_argument("--delivery", required=True)
    arguments.add_argument("--checkpoint", required=True)
    arguments.add_argument("--name", required=True)
    arguments.add_argument("--arguments", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    a = arguments.parse_args()
    llm = LLM(model=a.checkpoint, **{**ENGINE_ARGUMENTS, **a.arguments})
    engine = VllmEngine(llm, name=a.name)
    node = RolloutNode(engine, control=a.control, delivery=a.delivery)

    def wait_serving(request: dict[str, Any]) -> dict[str, Any]:
        return {"version": node.wait_serving(request["version"], request["timeout_s"])}

    def bits(_: dict[str, Any]) -> dict[str, Any]:
        return {"bits": engine.resident_digests()}

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        made = engine.generate(request["prompts"], greedy_sampling(request["tokens"]))
        return {"version": made.version, **generated(made.outputs)}

    def sample(request: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.6, seed=request["seed"], max_tokens=request["tokens"], ignore_eos=True, detokenize=False
        )
        made = engine.generate([request["prompt"]], sampling)
        return {"tokens": list(made.outputs[0].outputs[0].token_ids)}

    def status(_: dict[str, Any]) -> dict[str, Any]:
        objects, size = node.received
        failure = node.failures.get(a.name, "")
        return {"version": node.version, "failure": failure, "objects": objects, "bytes": size}

    serve({"wait_serving": wait_serving, "bits": bits, "generate": generate, "sample": sample, "status": status})
    node.close()
    engine.shutdown()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
