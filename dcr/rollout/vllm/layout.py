"""Whether an engine still holds its weights where its own loader puts them; one that repacked them is refused by name.

Four checks, none of which writes to the model:

*Shape*.  A parameter that was emptied after loading cannot take an update.

*Private copies*.  A tensor that computation uses but the loader does not write keeps serving old weights: a packed copy
that a function of the module closes over, or a tensor derived after loading.

*Readback*.  The loader is run over the very checkpoint that the engine was started from, with each of its writes
turned to a copy of the destination.  A second load of the same checkpoint changes nothing where the layout is the
loader's own; any other layout (transposed, padded, packed, swapped halves, even of the same shape and address) shows as
a difference.

*Census*.  What vLLM's post-load processing made, removed or rewrote was counted when it ran (``post_load.py``).  A
tensor that it made may be derived from weights, and would go on holding the old ones; bits that it rewrote are not the
loader's.  What only moved elements, and was learned, is no finding: placement goes on through it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.conversion import Conversion, standing_in
from dcr.data_plane.placement.placement import Placement
from dcr.protocol.errors import RefusedError
from dcr.rollout.readback import Finding, Readback, split, tensors_of
from dcr.rollout.vllm.census import Change

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

_HAZARD = "an update would write the loader's layout over it"

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
    *,
    changes: Sequence[Change] = (),
    conversions: Sequence[Conversion] = (),
    unlearned: Mapping[str, str] | None = None,
) -> LayoutReport:
    """Run the four checks; changes nothing.

    Holds copies of what the loader writes for one canonical tensor at a time (for all of them if the loader takes the
    whole iterator before its first write).

    Args:
        model: the model as it serves, not refitted since it was loaded.
        load_weights: its native loader.
        fed: the canonical tensors that the loader was fed when the engine started.
        changes: what post-load processing did.
        conversions: what of that only moved elements; here the loader meets stand-ins, which are not compared: see
            ``check_converted``.
        unlearned: why other changes could not be learned, by tensor.
    """
    findings = [*_emptied(model), *_closed_over(model)]
    findings += _processed(changes, {one.name for one in conversions}, unlearned or {})
    with standing_in(model, conversions) as stand_ins:
        readback = Readback(model, stand_ins)
        if readback.run(load_weights, fed):
            findings += _unwritten(model, readback)
        findings += readback.findings
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.module, finding.tensor), finding)
    return LayoutReport(tuple(first.values()), readback.tensors_read, readback.writes_compared)


def check_converted(placement: Placement, fed: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Read converted storage back through the loader and the conversion, and compare with what the loader was fed.

    Every box is compared for itself, so that a rank proves what it holds without the others.

    Args:
        placement: prewarmed, over the conversions.
        fed: as for ``examine_layout``.

    Raises:
        RepackedError: what was learned of the conversion is not what the engine holds.
    """
    found = placement.readback()
    findings = [Finding(*split(name), why) for name, why in found.wrong.items()]
    for name, tensor in fed:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        bits = bit_view(tensor.contiguous()).flatten()
        if any(held.digest != held.extent.digest(spec, bits) for held in found.held.get(name, ())):
            findings.append(Finding(*split(name), "not where vLLM's conversion after loading puts it"))
    LayoutReport(tuple(findings), len(found.held), 0).raise_if_repacked()


def _processed(
    changes: Sequence[Change], converted: Collection[str], unlearned: Mapping[str, str]
) -> Iterator[Finding]:
    """What post-load processing did that an update in place would not repeat."""
    for change in changes:
        module, name = split(change.name)
        if change.name in converted or name in _DERIVED:
            continue
        hazard = "what it holds is derived, and would stay as it is" if change.kind == "created" else _HAZARD
        why = f"; {unlearned[change.name]}" if change.name in unlearned else ""
        yield Finding(module, name, f"{change.found}: {hazard}{why}")


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
