"""A whole refit between tensors of one device: a trainer and an engine in one process, through store and record."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from table import Row
from torch import nn

import dcr
from dcr.rollout.torch.engine import TorchEngine

WIDE = 4096
PAYLOAD_PERCENT = {0.03: 2.37, 0.05: 3.79}
"""The paper's payloads, as shares of the checkpoint."""


class Trained(nn.Module):
    """A stack of matrices, as it is trained."""

    def __init__(self, layers: int, wide: int, device: torch.device) -> None:
        super().__init__()
        for name in ("gate", "up"):
            made = (torch.empty(wide, wide, dtype=torch.bfloat16, device=device) for _ in range(layers))
            self.register_module(
                name, nn.ParameterList(nn.Parameter(m.normal_(0, 0.02), requires_grad=False) for m in made)
            )


class Served(nn.Module):
    """The same as it is served: gate and up fused, and transposed."""

    def __init__(self, layers: int, wide: int, device: torch.device) -> None:
        super().__init__()
        made = (torch.zeros(wide, 2 * wide, dtype=torch.bfloat16, device=device) for _ in range(layers))
        self.fused = nn.ParameterList(nn.Parameter(m, requires_grad=False) for m in made)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The native loader."""
        loaded = set()
        for name, weight in weights:
            half, layer = name.split(".")
            fused = self.fused[int(layer)].data
            wide = fused.shape[0]
            (fused[:, :wide] if half == "gate" else fused[:, wide:]).copy_(weight.t())
            loaded.add(f"fused.{layer}")
        return loaded


def step(model: nn.Module, rate: float) -> None:
    """Change a share of the elements by up to a hundredth of themselves."""
    for weight in model.parameters():
        chosen = torch.rand_like(weight, dtype=torch.float32) < rate
        noise = 1 + 0.01 * (2 * torch.rand_like(weight, dtype=torch.float32) - 1)
        weight.copy_(torch.where(chosen, (weight.float() * noise).to(weight.dtype), weight))


def rows(device: torch.device, layers: int, wide: int, rates: Iterable[float]) -> Iterator[Row]:
    """Refits at some rates; the first, which compiles, is not counted."""
    with tempfile.TemporaryDirectory() as run, torch.no_grad():
        trained = Trained(layers, wide, device)
        state = {name: weight.cpu() for name, weight in trained.state_dict().items()}
        save_file(state, Path(run, "model.safetensors"))
        model = Served(layers, wide, device)
        model.load_weights(state.items())
        addresses: dict[str, Any] = {"control": f"sqlite://{run}/record.db", "delivery": f"file://{run}/payloads"}
        with dcr.TrainerRefit(trained, **addresses) as refit:
            node = dcr.RolloutNode(TorchEngine(model, name="node-a", checkpoint=run), **addresses)
            try:
                node.wait_serving(0, timeout_s=300)
                size = sum(weight.nbytes for weight in trained.parameters())
                for number, rate in enumerate([0.01, *rates]):
                    step(trained, rate)
                    report = refit.push()
                    node.wait_serving(report.version, timeout_s=60)
                    exact = _same(trained.state_dict(), model, Served(layers, wide, device))
                    if not number:
                        yield Row("refits: the first one leaves the bits of a dense load", float(exact), "", aim=1.0)
                        continue
                    what = (
                        f"refit of {size / 1e9:.2f} GB, {100 * report.changed_entries / report.elements:.3g} % changed"
                    )
                    yield Row(f"{what}: bits of a dense load", float(exact), "", aim=1.0)
                    yield Row(f"{what}: the whole push", size / report.wall_s / 1e9, "GB/s of checkpoint")
                    share = 100 * report.payload_bytes / size
                    paper = PAYLOAD_PERCENT.get(rate)
                    yield Row(f"{what}: payload", share, "% of checkpoint", paper=paper, at_least=False)
                    for stage, seconds in report.stages.items():
                        yield Row(f"{what}: {stage}", seconds, "s")
                for copy in ("first copy", "next copy"):
                    step(trained, 0.03)
                    wanted = {name: weight.to("cpu", copy=True) for name, weight in trained.state_dict().items()}
                    began = time.perf_counter()
                    pending = refit.begin_push()
                    copied_s = time.perf_counter() - began
                    step(trained, 1.0)
                    node.wait_serving(pending.result().version, timeout_s=60)
                    exact = _same(wanted, model, Served(layers, wide, device))
                    what = f"{copy} of {size / 1e9:.2f} GB (begin_push), weights stepped at once"
                    yield Row(f"{what}: bits of a dense load", float(exact), "", aim=1.0)
                    yield Row(f"{what}: begin_push", size / copied_s / 1e9, "GB/s of checkpoint")
            finally:
                node.close()


def _same(trained: dict[str, torch.Tensor], served: Served, twin: Served) -> bool:
    """Whether storage has the bits of a model that was loaded densely and never touched."""
    twin.load_weights(trained.items())
    pairs = zip(served.fused, twin.fused, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
