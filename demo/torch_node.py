"""The plain torch receiver of the demo, in a process of its own."""

import argparse
import threading
from pathlib import Path
from typing import Any

from demo.process import claim_output, serve, tell

claim_output()

import torch  # noqa: E402

from dcr import RolloutNode  # noqa: E402
from dcr.protocol.step import Step  # noqa: E402
from dcr.rollout.torch.engine import TorchEngine  # noqa: E402
from demo.bits import stored_bits  # noqa: E402
from demo.torch_policy import load  # noqa: E402


def main() -> None:
    """Serve one engine; with ``--halt-at``, stand still in the middle of that epoch's writes, to be killed there."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--control", required=True)
    arguments.add_argument("--delivery", required=True)
    arguments.add_argument("--checkpoint", type=Path, required=True)
    arguments.add_argument("--halt-at", type=int, default=0, help="refit in which to stand still after two payloads")
    a = arguments.parse_args()
    torch.set_num_threads(1)
    begun = 0

    def halt(step: Step) -> None:
        nonlocal begun
        if a.halt_at and step.action == "BeginWrite" and node.version is None and engine_at() == a.halt_at - 1:
            begun += 1
            if begun == 3:  # two payloads are in place, the third is about to be
                tell({"halted": step.detail})
                threading.Event().wait()

    served: list[int] = []

    def note(step: Step) -> None:
        if step.action == "OpenGate":
            served.append(int(step.detail))

    def engine_at() -> int:
        return served[-1] if served else -1

    model = load(a.checkpoint)
    engine = TorchEngine(model, name="torch", checkpoint=a.checkpoint, observe=halt)
    node = RolloutNode(engine, control=a.control, delivery=a.delivery, observe=note)

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
