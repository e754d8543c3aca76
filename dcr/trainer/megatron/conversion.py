"""A trainer's own conversion into the checkpoint, as numbered tasks whose tensors can be replaced.

What is learned of a conversion, and what is done with it, needs no more than this; ``BridgeConversion`` is the one that
Megatron Bridge carries out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from dcr.data_plane.bits import dtype_name
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.identity import fingerprint

Replace = Callable[[int, torch.Tensor], torch.Tensor]
"""From a task's number and live tensor to the tensor that is converted in its place, of the same shape."""

BuildTasks = Callable[[], Sequence[Any]]
"""Builds the Bridge's ``WeightConversionTask`` list anew; collective."""


@dataclass(frozen=True)
class Task:
    """One conversion task, seen from this rank.

    Attributes:
        name: the source tensor's name over all pipeline stages; ranks of other experts have other names at its number.
        kind: what converts it, for reports.
        tensor: the live tensor that this rank holds of it, a shard or a replica; None if it holds none.
        split: whether tensor-parallel ranks hold different shards of it, as the tensor says; for estimates.
        expert: whether it belongs to one expert.
    """

    name: str
    kind: str
    tensor: torch.Tensor | None
    split: bool = False
    expert: bool = False

    @property
    def layout(self) -> str:
        """Everything but the values; equal layouts have equal projections."""
        held = "not here" if self.tensor is None else f"{self.tensor.dtype} {tuple(self.tensor.shape)}"
        return f"{self.name}: {held}, by {self.kind}"


class Conversion(Protocol):
    """A conversion in numbered tasks; a task has the same number on every rank."""

    def tasks(self) -> Sequence[Task]:
        """The tasks with their live tensors now; collective."""
        ...

    def state(self) -> object:
        """Where every live tensor is and how it is laid out; while it is equal, so are the tasks.  Not collective."""
        ...

    def others(self) -> Mapping[str, torch.Tensor]:
        """Live tensors of the model that are no task's: adapters, for one.  Not collective."""
        ...

    def identity(self) -> str:
        """A digest of everything but tensors that decides how it converts, on this rank; collective."""
        ...

    def convert(
        self, numbers: Sequence[int], replace_by: Replace, begin: Callable[[int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert some tasks, in order, with other tensors than the live ones; collective.

        Args:
            numbers: increasing.
            replace_by: what stands for a task's tensor; the live one may be returned.
            begin: called with a task's number before any of its canonical tensors is given.

        Returns:
            Whole canonical tensors in host memory, by name, on every rank.
        """
        ...


class BridgeConversion:
    """Megatron Bridge's export, without the rows that pad a vocabulary, which the Bridge leaves in.

    Those are rows beyond the shape that the checkpoint which the Bridge was made from has.

    Args:
        bridge: an ``AutoBridge``.
        model: the model's chunks on this rank, one a virtual pipeline stage; wrappers are looked through.
        build_tasks: builds the task list where it is not the Bridge's own: with another export dtype, hooks or a
            quantisation plan.  None takes what ``export_hf_weights`` would build.
    """

    def __init__(self, bridge: Any, model: Sequence[nn.Module], build_tasks: BuildTasks | None = None) -> None:
        self._bridge = bridge
        self._model = model  # itself: a chunk that is replaced in it is the model from then on
        self._build_tasks = build_tasks or self._bridge_tasks
        self._held: frozenset[int] = frozenset()
        self._names: list[str] = []

    def tasks(self) -> Sequence[Task]:
        """See ``Conversion``.

        Raises:
            RefusedError: a tensor that cannot be refitted.
        """
        tasks = []
        for task in self._build():
            tensor = task.param_weight
            if isinstance(tensor, DTensor):
                raise RefusedError(f"{task.global_param_name}: it is a DTensor; Megatron-FSDP is not supported")
            if tensor is not None:
                dtype_name(tensor.dtype)
            tasks.append(
                Task(
                    task.global_param_name,
                    type(task.mapping).__name__,
                    None if tensor is None else tensor.detach(),
                    split=bool(getattr(tensor, "tensor_model_parallel", False)),
                    expert=bool(task.mapping.is_expert),
                )
            )
        self._names = [task.name for task in tasks]
        self._held = frozenset(t.tensor.data_ptr() for t in tasks if t.tensor is not None and t.tensor.numel())
        return tasks

    def state(self) -> object:
        """See ``Conversion``."""
        return [
            (name, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            for chunk in self._model
            for name, value in _stored(chunk)
        ]

    def others(self) -> Mapping[str, torch.Tensor]:
        """See ``Conversion``; of the last ``tasks()``."""
        found = {}
        for number, chunk in enumerate(self._model):
            for name, value in _stored(chunk):
                if value.numel() and value.data_ptr() not in self._held:
                    found[f"chunk {number}: {name}"] = value.detach()
        return found

    def identity(self) -> str:
        """See ``Conversion``: library versions, the Bridge, the configuration, the layout, and every task's mapping."""
        config = self._bridge.hf_pretrained
        config = getattr(config, "config", config)
        described = dict(config.to_dict())
        described.pop("_name_or_path", None)  # where it was read from
        names = ("param_name", "global_param_name", "mapping", "pp_rank", "vp_stage", "weight_dtype", "export_hook")
        tasks = [[getattr(task, name) for name in names] for task in self._build()]
        return fingerprint(
            [
                {package: version(package) for package in ("torch", "megatron-core", "megatron-bridge", "dcr")},
                type(self._bridge._model_bridge),  # noqa: SLF001 - the public class is the same for all models
                self._bridge.export_weight_dtype,
                self._build_tasks,
                described,
                self._shapes,
                [getattr(chunk, "config", None) for chunk in self._model],
                tasks,
            ]
        )

    def convert(
        self, numbers: Sequence[int], replace_by: Replace, begin: Callable[[int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Conversion``."""
        # Built anew each time: mappings remember shapes and dtypes of what they have broadcast.
        built = self._build()
        if [task.global_param_name for task in built] != self._names:
            raise RefusedError(
                "the conversion tasks are listed otherwise than when they were numbered: build_tasks has to give the "
                "same tasks in the same order every time"
            )

        def replaced() -> Iterator[Any]:
            # Handed over one by one, so that the stand-ins of one task are alive at a time.
            for number in numbers:
                begin(number)
                task = built[number]
                live = task.param_weight
                if live is None:
                    yield task
                    continue
                stand_in = replace_by(number, live.detach())
                stand_in.__dict__.update(live.__dict__)  # how it is partitioned
                yield replace(task, param_weight=stand_in)

        with torch.no_grad():
            for name, tensor in self._bridge.export_hf_weights(
                list(self._model), cpu=True, show_progress=False, conversion_tasks=replaced()
            ):
                yield name, self._without_padding(name, tensor)

    def _without_padding(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        shape = self._shapes.get(name)
        if shape is None or len(shape) != tensor.dim() or shape[1:] != tensor.shape[1:]:
            return tensor
        return tensor[: shape[0]]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's tensors, from the heads of its files; empty where the Bridge has only a config."""
        source: Any = getattr(getattr(self._bridge.hf_pretrained, "state", None), "source", None)
        files: dict[str, str] = getattr(source, "key_to_filename_map", {})
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(files.values())):
            with safe_open(str(source.path / file), framework="pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        return shapes

    def _build(self) -> list[Any]:
        return [task for task in self._build_tasks() if task is not None]

    def _bridge_tasks(self) -> Sequence[Any]:
        from megatron.bridge.models.conversion.utils import unwrap_model  # noqa: PLC0415 - optional dependency

        model_bridge = self._bridge._model_bridge  # noqa: SLF001 - the public way needs weights on disk
        build = model_bridge.build_conversion_tasks
        if self._bridge.export_weight_dtype == "fp8":
            build = model_bridge.build_export_fp8_tasks
        tasks: Sequence[Any] = build(self._bridge.hf_pretrained, unwrap_model(list(self._model)))
        return tasks


def _stored(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers; not by ``state_dict``, at which routers change the dtype of theirs."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public way
                yield f"{prefix}.{name}" if prefix else name, buffer
