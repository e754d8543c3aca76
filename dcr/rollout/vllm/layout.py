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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dcr.protocol.errors import RefusedError

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
class Finding:
    """One tensor that an update through the loader would not reach, or would corrupt."""

    module: str
    tensor: str
    found: str

    def __str__(self) -> str:
        return f"{self.module}.{self.tensor}: {self.found}".removeprefix(".")


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
    readback = _Readback(model)
    findings = [*_emptied(model), *_closed_over(model)]
    try:
        with torch.no_grad(), readback:
            load_weights(readback.feed(fed))
    except Exception as error:  # noqa: BLE001  whatever a loader raises on storage that is not in its layout
        found = f"its loader refused to load it again: {error or type(error).__name__}"
        findings.append(Finding(*_split(readback.current), found))
    else:
        findings += _unwritten(model, readback)
    findings += readback.findings
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.module, finding.tensor), finding)
    return LayoutReport(tuple(first.values()), readback.tensors_read, readback.writes_compared)


def _split(name: str) -> tuple[str, str]:
    module, _, tensor = name.rpartition(".")
    return module, tensor


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Module, name and tensor of every parameter, buffer and tensor attribute."""
    for module, owner in model.named_modules(remove_duplicate=False):
        for name, value in {**owner._parameters, **owner._buffers, **vars(owner)}.items():  # noqa: SLF001  all three
            if isinstance(value, torch.Tensor):
                yield module, name, value


def _emptied(model: torch.nn.Module) -> Iterator[Finding]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() == 0:
            yield Finding(*_split(name), f"removed after loading, shape {tuple(parameter.shape)}")


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


def _unwritten(model: torch.nn.Module, readback: "_Readback") -> Iterator[Finding]:
    """Floating-point tensors that the loader never writes: derived from weights, unless known to be something else."""
    for module, name, tensor in _tensors(model):
        if (
            tensor.is_floating_point()
            and tensor.numel()
            and name not in _DERIVED
            and tensor.untyped_storage().data_ptr() not in readback.written
        ):
            yield Finding(module, name, "not written by the loader, and not known to be independent of weights")


class _Readback(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns every write to the model's storage to a copy of the view written, and compares the copy with the view.

    Copies live until the loader asks for the next canonical tensor, so that a loader which reads back what it has just
    written (``p.copy_(x); p.copy_(-exp(p))``) reads its own write.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = {t.untyped_storage().data_ptr(): (module, name) for module, name, t in _tensors(model)}
        self._owners.pop(0, None)  # what has no storage
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.findings: list[Finding] = []
        self.written: set[int] = set()
        self.current = ""
        self.tensors_read = 0
        self.writes_compared = 0

    def feed(self, fed: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for self.current, tensor in fed:
            self.tensors_read += 1
            yield self.current, tensor
            self._compare()

    def _compare(self) -> None:
        copies, self._copies = self._copies, {}  # first: this mode is active, and must see no copies while comparing
        for resident, copy in copies.values():
            storage = resident.untyped_storage().data_ptr()
            self.written.add(storage)
            self.writes_compared += 1
            if not torch.equal(_bytes(resident), _bytes(copy)):
                found = f"does not hold what the loader writes there for {self.current}, shape {tuple(copy.shape)}"
                self.findings.append(Finding(*self._owners[storage], found))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001  the only place that tells
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self._owners:
                        self._copies.setdefault(_view_key(tensor), (tensor, tensor.clone()))
        originals = {id(copy): resident for resident, copy in self._copies.values()}
        args, kwargs = tree_map_only(torch.Tensor, self._current_bits, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)

    def _current_bits(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copies.get(_view_key(tensor), (None, tensor))[1]


def _view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.is_meta:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
