"""The smallest whole deployment: a trainer and a rollout engine, each in a process of its own.

    python examples/refit.py

The trainer holds a module whose state dict is the checkpoint.  The rollout side holds the same weights in a layout of
its own, fused and transposed, and has a loader that knows how to get there; that is all dcr asks of it.
"""

import multiprocessing
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dcr
from dcr.rollout.torch.engine import TorchEngine

REFITS = 3


class Policy(nn.Module):
    """As it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)


class Served(nn.Module):
    """As it is served: gate and up fused, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(256, 1024, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The engine's native loader: checkpoint tensors in, names of what was written out."""
        halves = {"gate.weight": self.gate_up.data[:, :512], "up.weight": self.gate_up.data[:, 512:]}
        for name, weight in weights:
            halves[name].copy_(weight.t())
        return {"gate_up"}


def rollout(checkpoint: Path, addresses: dict[str, str], versions: int) -> None:
    """Serve, and follow the trainer."""
    model = Served()
    model.load_weights(load_file(checkpoint / "model.safetensors").items())
    engine = TorchEngine(model, name="node-a", checkpoint=checkpoint)  # names are unique among a record's engines
    node = dcr.RolloutNode(engine, **addresses)
    for version in range(versions + 1):
        node.wait_serving(version, timeout_s=120)  # this version, or a later one
        with engine.request() as served:  # the gate: no weight changes in here
            print(f"rollout: version {served}, sum of weights {model.gate_up.double().sum():+.6f}", flush=True)
    node.close()


def main() -> None:
    """Train, and push after every step."""
    with tempfile.TemporaryDirectory() as run:
        # Absolute paths: sqlite:///tmp/x/record.db is /tmp/x/record.db.  Both sides name the same ones.
        addresses = {"control": f"sqlite://{run}/record.db", "delivery": f"file://{run}/payloads"}
        policy = Policy()
        save_file(policy.state_dict(), Path(run, "model.safetensors"))  # version 0, which engines start from

        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=rollout, args=(Path(run), addresses, REFITS))
        process.start()
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
        with dcr.TrainerRefit(policy, **addresses) as refit:  # on every rank; its weights are version 0
            for _ in range(REFITS):
                loss = (policy.gate(torch.randn(8, 256, dtype=torch.bfloat16)) ** 2).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                report = refit.push()  # on every rank; no weight may change until it returns
                print(
                    f"trainer: version {report.version}, {report.changed_entries} of {report.elements} elements "
                    f"changed, {report.payload_bytes} bytes sent ({report.kind}), {report.wall_s:.2f} s",
                    flush=True,
                )
            process.join(120)
    if process.exitcode != 0:
        raise SystemExit(f"the rollout process ended with {process.exitcode}")


if __name__ == "__main__":
    main()
