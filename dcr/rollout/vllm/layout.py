"""Whether an engine still holds its weights where its own loader puts them; one that repacked them is refused by name.

Three checks, none of which writes to the model:

*Shape*.  A parameter that was emptied after loading cannot take an update.

*Private copies*.  A tensor that computation uses but the loader does not write keeps serving old weights: a packed copy
that a function of the module closes over, or a tensor derived after loading.

*Readback*.  The loader is run over the very checkpoint that the engine was started from, with each of its writes
turned to a copy of the destination.  A second load of the same checkpoint changes nothing where the layout is the
loader's own; any other layout (transposed, padded, packed, swapped halves, even of the same shape and address) shows as
a difference.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from dcr.protocol.errors import RefusedError
from dcr.rollout.readback import Finding, Readback, split, tensors_of

_NAMED_MAX = 16
"""How many findings an error spells out; it counts the others."""

_DERIVED = frozenset(
    {
        "cos_sin_cache",  # rotary embedding table, from the configuration alone
        "kv_cache",
        *(f"_{which}_scale{suffix}" for which in ("k", "v", "q", "prob") for suffix in ("", "_cpu")),  # of the KV cache
    }
)
"""Names of floating-point tensors that no loader writes and that hold nothing derived from weights."""

WAY_OUT = (
    "refit needs weights in loader layout: on a CPU start the engine with worker_extension_cls="
    "'dcr.rollout.vllm.cpu_extension.DcrCpuWorkerExtension'; on a GPU choose a backend that does not repack this layer"
)


class RepackedError(RefusedError):
    """An engine holds weights in another layout than its loader's, so that an update in place cannot reach them."""


@dataclass(frozen=True)
class LayoutReport:
    """What the checks found.

    Attributes:
        findings: one a tensor; empty if the engine can be refitted.
        tensors_read: canonical tensors that were run through the loader.
        writes_compared: storage writes of the loader that were compared with resident bits.
    """

    findings: tuple[Finding, ...]
    tensors_read: int
    writes_compared: int

    def raise_if_repacked(self) -> None:
        """Raise RepackedError, naming modules and tensors, if there are findings."""
        if self.findings:
            # One of a kind: every layer of a model is repacked alike, and what is repacked once must not be cut.
            kinds: dict[tuple[str, str], Finding] = {}
            for finding in self.findings:
                kinds.setdefault((finding.module.rpartition(".")[2], finding.tensor), finding)
            shown = list(kinds.values())[:_NAMED_MAX]
            named = "; ".join(str(finding) for finding in shown)
            more = f"; and {len(self.findings) - len(shown)} more" if len(self.findings) > len(shown) else ""
            raise RepackedError(
                f"the engine does not hold its weights as its loader placed them: {named}{more}. {WAY_OUT}"
            )


def examine_layout(
    model: torch.nn.Module,
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    fed: Iterable[tuple[str, torch.Tensor]],
) -> LayoutReport:
    """Run the three checks; changes nothing.

    Holds copies of what the loader writes for one canonical tensor at a time (for all of them if the loader takes the
    whole iterator before its first write).

    Args:
        model: the model as it serves, not refitted since it was loaded.
        load_weights: its native loader.
        fed: the canonical tensors that the loader was fed when the engine started.
    """
    findings = [*_emptied(model), *_closed_over(model)]
    readback = Readback(model)
    if readback.run(load_weights, fed):
        findings += _unwritten(model, readback)
    findings += readback.findings
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.module, finding.tensor), finding)
    return LayoutReport(tuple(first.values()), readback.tensors_read, readback.writes_compared)


def _emptied(model: torch.nn.Module) -> Iterator[Finding]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() == 0:
            yield Finding(*split(name), f"removed after loading, shape {tuple(parameter.shape)}")


def _closed_over(model: torch.nn.Module) -> Iterator[Finding]:
    """Packed copies that a function of a module closes over; vLLM's ``cpu_linear`` may close over an opaque handle."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, FunctionType):
                for cell in value.__closure__ or ():
                    if attribute == "cpu_linear" or isinstance(cell.cell_contents, torch.Tensor):
                        kind = type(cell.cell_contents).__name__
                        yield Finding(name, "weight", f"{attribute} computes with a private copy ({kind})")
                        break


def _unwritten(model: torch.nn.Module, readback: "Readback") -> Iterator[Finding]:
    """Floating-point tensors that the loader never writes: derived from weights, unless known to be something else."""
    for module, name, tensor in tensors_of(model):
        if (
            tensor.is_floating_point()
            and tensor.numel()
            and name not in _DERIVED
            and tensor.untyped_storage().data_ptr() not in readback.written
        ):
            yield Finding(module, name, "not written by the loader, and not known to be independent of weights")
