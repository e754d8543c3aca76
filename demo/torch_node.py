"""The plain torch receiver of the demo, in a process of its own."""

import argparse
from pathlib import Path
from typing import Any

from demo.process import claim_output, serve

claim_output()

import torch  # noqa: E402

from dcr import RolloutNode  # noqa: E402
from dcr.rollout.torch.engine import TorchEngine  # noqa: E402
from demo.bits import stored_bits  # noqa: E402
from demo.torch_policy import load  # noqa: E402


def main() -> None:
    """Serve one engine."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--control", required=True)
    arguments.add_argument("--delivery", required=True)
    arguments.add_argument("--checkpoint", type=Path, required=True)
    a = arguments.parse_args()
    torch.set_num_threads(1)
    model = load(a.checkpoint)
    engine = TorchEngine(model, name="torch", checkpoint=a.checkpoint)
    node = RolloutNode(engine, control=a.control, delivery=a.delivery)

    def wait_serving(request: dict[str, Any]) -> dict[str, Any]:
        return {"version": node.wait_serving(request["version"], request["timeout_s"])}

    def bits(_: dict[str, Any]) -> dict[str, Any]:
        return {"bits": stored_bits(model.policy)}

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        with engine.request() as version:
            return {"version": version, "tokens": [model.greedy(p, request["tokens"]) for p in request["prompts"]]}

    serve({"wait_serving": wait_serving, "bits": bits, "generate": generate})
    node.close()


if __name__ == "__main__":
    main()
