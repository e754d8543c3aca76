"""Does storage hold what its own loader writes?  The loader is run again, with its writes turned to copies."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dcr.data_plane.placement.contained_load import contained

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class Finding:
    """One tensor that an update through the loader would not reach, or would corrupt."""

    module: str
    tensor: str
    found: str

    def __str__(self) -> str:
        return f"{self.module}.{self.tensor}: {self.found}".removeprefix(".")


def split(name: str) -> tuple[str, str]:
    """Module and tensor of a qualified name."""
    module, _, tensor = name.rpartition(".")
    return module, tensor


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Module, name and tensor of every parameter, buffer and tensor attribute."""
    for module, owner in model.named_modules(remove_duplicate=False):
        for name, value in {**owner._parameters, **owner._buffers, **vars(owner)}.items():  # noqa: SLF001  all three
            if isinstance(value, torch.Tensor):
                yield module, name, value


class Readback(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns every write to the model's storage to a copy of the view written, and compares the copy with the view.

    Copies live until the loader asks for the next canonical tensor, so that a loader which reads back what it has just
    written (``p.copy_(x); p.copy_(-exp(p))``) reads its own write.

    Args:
        model: the model.
        unread: addresses of storage that holds nothing yet: writes to it are counted, not compared.
    """

    def __init__(self, model: torch.nn.Module, unread: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unread = unread
        self._owners = {t.untyped_storage().data_ptr(): (module, name) for module, name, t in tensors_of(model)}
        self._owners.pop(0, None)  # what has no storage
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.findings: list[Finding] = []
        self.written: set[int] = set()
        self.current = ""
        self.tensors_read = 0
        self.writes_compared = 0

    def run(self, load_weights: LoadWeights, fed: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Load again what the loader was fed; False, with a finding, if the loader would not."""
        try:
            with torch.no_grad(), self:
                contained(load_weights)(self._feed(fed))
        except Exception as error:  # noqa: BLE001  whatever a loader raises on storage that is not in its layout
            found = f"its loader refused to load it again: {error or type(error).__name__}"
            self.findings.append(Finding(*split(self.current), found))
            return False
        return True

    def _feed(self, fed: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for self.current, tensor in fed:
            self.tensors_read += 1
            yield self.current, tensor
            self._compare()

    def _compare(self) -> None:
        copies, self._copies = self._copies, {}  # first: this mode is active, and must see no copies while comparing
        for resident, copy in copies.values():
            storage = resident.untyped_storage().data_ptr()
            self.written.add(storage)
            if storage in self._unread:
                continue
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
