"""A real trainer, engines of several ranks in processes of their own, and checkpoints of what the trainer holds."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import vllm_support as support
from safetensors.torch import save_file
from torch import nn
from vllm_models import write_checkpoint

from dcr import TrainerRefit
from dcr.data_plane.bits import bit_view
from dcr.rollout.checkpoint import read_checkpoint
from demo.kill import KILL_AT_VARIABLE
from demo.process import Process

WAIT_S = 240.0  # a bound; an engine of two ranks starts in 15 s on a quiet machine
SETTINGS = {"bucket_bytes": 40_000, "ack_timeout_s": 120.0, "members_timeout_s": 120.0}
SPECIAL = {
    torch.bfloat16: [0x7FC1, 0x7F81, -0x8000, 0x7F80, -0x80, 0x0001],
    torch.float32: [0x7FC00001, 0x7F800001, -(1 << 31), 0x7F800000, -0x800000, 1],
}
"""Stored bits of quiet and signalling NaN with payloads, -0.0, infinities, and the smallest denormal."""


class Canonical(nn.Module):
    """A checkpoint's tensors under their own names: a trainer's model whose state dict is the checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        for name, tensor in read_checkpoint(checkpoint):
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights) -> set[str]:
        """As an engine: copies each tensor to its own name."""
        own = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


class Fleet:
    """One trainer of ``MODELS[model]``, with a checkpoint on disk of every version that it pushed."""

    def __init__(self, folder: Path, model: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.folder = folder
        self.version = 0
        write_checkpoint(self.checkpoint(0), 0, model, dtype)
        self._others = [
            dict(read_checkpoint(write_checkpoint(folder / f"other{seed}", seed, model, dtype))) for seed in (1, 2)
        ]
        self.policy = Canonical(self.checkpoint(0))
        self.addresses: dict[str, Any] = {
            "control": f"sqlite://{folder}/record.db",
            "delivery": f"file://{folder}/payloads",
        }
        self.refit = TrainerRefit(self.policy, **self.addresses, settings=SETTINGS)

    def checkpoint(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def change(self, share: float) -> None:
        """Give about this share of the elements of every tensor the value that they have in another checkpoint."""
        generator = torch.Generator().manual_seed(self.version)
        other = self._others[self.version % 2]
        for name, tensor in self.policy.named_parameters():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensor.copy_(torch.where(chosen, other[name], tensor))

    def change_to_special(self) -> None:
        """Write every special pattern somewhere into every tensor."""
        generator = torch.Generator().manual_seed(self.version)
        for tensor in self.policy.parameters():
            flat = bit_view(tensor.data).flatten()
            patterns = torch.tensor(SPECIAL[tensor.dtype], dtype=flat.dtype)
            at = torch.randperm(flat.numel(), generator=generator)[: len(patterns)]
            flat[at] = patterns[: len(at)]

    def push(self):
        """Push, and save what was pushed as a checkpoint; the report."""
        report = self.refit.push()
        self.version += 1
        assert report.version == self.version
        shutil.copytree(self.checkpoint(0), self.checkpoint(self.version))
        state = {name: tensor.contiguous() for name, tensor in self.policy.state_dict().items()}
        save_file(state, self.checkpoint(self.version) / "model.safetensors", {"format": "pt"})
        return report

    def engine(self, name: str, kill_at: int = 0, **arguments) -> "EngineProcess":
        return EngineProcess(self, name, kill_at, arguments)

    def close(self) -> None:
        self.refit.close()


class EngineProcess:
    """A vLLM engine on the first checkpoint, with its node, in a process of its own."""

    def __init__(self, fleet: Fleet, name: str, kill_at: int, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        environment = {**support.ENVIRONMENT, **({KILL_AT_VARIABLE: str(kill_at)} if kill_at else {})}
        where = [f"--{what}={address}" for what, address in fleet.addresses.items()]
        extension = {"worker_extension_cls": "demo.killable_extension.KillableExtension"}
        self._process = Process(
            name,
            fleet.folder,
            "demo.vllm_node",
            *[*where, f"--checkpoint={fleet.checkpoint(0)}", f"--name={name}"],
            f"--arguments={json.dumps({**arguments, **extension})}",
            progress=print,
            environment=environment,
        )

    def ask(self, do: str, **request) -> dict[str, Any]:
        return self._process.ask(WAIT_S, do=do, **request)

    def wait_serving(self, version: int) -> None:
        assert self.ask("wait_serving", version=version, timeout_s=WAIT_S)["version"] == version

    def close(self) -> None:
        self._process.end()

    def kill(self) -> None:
        self._process.kill()


def check(fleet: Fleet, engine: EngineProcess, twin: support.Twin, prompts=support.BATCH) -> None:
    """Bits on every rank, greedy tokens and log-probabilities are those of a fresh engine on the checkpoint."""
    engine.wait_serving(fleet.version)
    wanted = twin.ask(fleet.checkpoint(fleet.version), prompts, **engine.arguments)
    assert len(wanted["digests"]) > 10
    assert engine.ask("bits")["bits"] == wanted["digests"]
    if prompts:
        made = engine.ask("generate", prompts=prompts, tokens=support.TOKENS)
        assert made["version"] == fleet.version
        assert made["tokens"] == wanted["tokens"]
        assert made["logprobs"] == wanted["logprobs"]
