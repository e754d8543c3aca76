"""One training rank of the demo."""

import argparse
import json
import pkgutil
from pathlib import Path
from typing import Any

from demo.process import claim_output, serve, tell

claim_output()

import torch.distributed as dist  # noqa: E402

from demo.train import WARM_UP_STEPS, Trainer  # noqa: E402


def main() -> None:
    """Train and push as the parent says."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--trainer", required=True, help="the Trainer to be, as MODULE:CLASS")
    arguments.add_argument("--control", required=True)
    arguments.add_argument("--delivery", required=True)
    arguments.add_argument("--bucket-bytes", type=int, required=True)
    a = arguments.parse_args()
    trainer: Trainer = pkgutil.resolve_name(a.trainer)()
    refit: list[Any] = []

    def progress(steps: int, loss: float) -> None:
        if dist.get_rank() == 0:
            tell({"progress": f"warm-up: {steps}/{WARM_UP_STEPS} steps, loss {loss:.3f} nats a byte"})

    def warm_up(_: dict[str, Any]) -> dict[str, Any]:
        return {"loss": trainer.warm_up(progress=progress)}

    def save(request: dict[str, Any]) -> dict[str, Any]:
        trainer.save(Path(request["directory"]))
        return {}

    def connect(_: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, object] = {"bucket_bytes": a.bucket_bytes}
        refit.append(trainer.refit(control=a.control, delivery=a.delivery, settings=settings))
        source = refit[0].source
        return {"owned": source.owned_elements, "tensors": len(source.specs)}

    def step(_: dict[str, Any]) -> dict[str, Any]:
        return {"loss": trainer.step()}

    def push(_: dict[str, Any]) -> dict[str, Any]:
        return {"report": json.loads(refit[0].push().json())}

    serve({"warm_up": warm_up, "save": save, "connect": connect, "step": step, "push": push})
    for r in refit:
        r.close()
    trainer.close()


if __name__ == "__main__":
    main()
