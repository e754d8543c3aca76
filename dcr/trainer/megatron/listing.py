"""The live tensors of all ranks, listed: on every rank, or refused on every rank alike."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from dcr.protocol.errors import DcrError
from dcr.trainer.megatron.conversion import Conversion, Task
from dcr.trainer.torch.ranks import Ranks


def list_tasks(conversion: Conversion, ranks: Ranks) -> Sequence[Task]:
    """The tasks with their live tensors now; collective.

    Raises:
        RefusedError: on every rank alike: they cannot be listed on one of them, or have tensors there without storage.
    """
    tasks: Sequence[Task] = ()
    try:
        tasks = conversion.tasks()
        problem = missing(tasks, conversion.others())
    except DcrError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  it is the trainer's code, and other ranks wait
        problem = f"the conversion tasks cannot be listed: {type(error).__name__}: {error}"
    ranks.refuse_together(problem)
    return tasks


def missing(tasks: Sequence[Task], others: Mapping[str, torch.Tensor]) -> str | None:
    """What is wrong with the first tensor whose elements are not all in memory, each in a place of its own.

    Reading one that was freed (``storage().resize_(0)``, by which trainers offload) would end the process, and one
    whose elements share places cannot be changed and put back.
    """
    for name, tensor in _named(tasks, others):
        if tensor.is_meta or tensor.untyped_storage().nbytes() < _end(tensor):
            return (
                f"{name}: its storage is freed, offloaded or was never made; bring the weights back to their device "
                "before they are refitted, and keep them there until the push returns"
            )
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            return f"{name}: it is expanded, so that elements share a place; make it contiguous"
    return None


def _named(tasks: Sequence[Task], others: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((task.name, task.tensor) for task in tasks if task.tensor is not None and task.tensor.numel())
    yield from ((name, tensor) for name, tensor in others.items() if tensor.numel())


def _end(tensor: torch.Tensor) -> int:
    """Bytes of storage that the tensor reaches into."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())
