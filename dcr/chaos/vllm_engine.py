"""vLLM's engines in scenarios: one of one rank, all of it in the process of its node; and the untouched twin of it.

A kill of the node is one of the engine in the middle of whatever it does, and every moment of its receiver is a moment
of that process.  vLLM is imported here only when an engine is made: it is slow, and reads its environment then.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from dcr.chaos.bits import stored_bits, stored_bytes
from dcr.chaos.child import RECORD, ChildConfig, Line
from dcr.chaos.hooks import ReceiverWatch
from dcr.chaos.process import Child, ChildError, wait
from dcr.chaos.trigger import Trigger
from dcr.rollout.vllm.engine import VllmEngine

TWIN_TIMEOUT_S = 300.0
_PROMPT, _TOKENS = [5, 9, 77, 130, 33], 4
_ARGUMENTS: dict[str, Any] = {
    "worker_extension_cls": "dcr.chaos.vllm_extension.WatchedExtension",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
}


def make_llm(checkpoint: Path, watch: ReceiverWatch | None) -> Any:
    """A ``vllm.LLM`` of one rank in this process, from the checkpoint; once a process.

    Args:
        checkpoint: a folder of Hugging Face's layout.
        watch: over its receiver; None for a twin.
    """
    from dcr.rollout import cpu_vllm  # noqa: PLC0415 - for CPUs only

    cpu_vllm.set_environment()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    from dcr.chaos.vllm_extension import WatchedExtension  # noqa: PLC0415

    WatchedExtension.dcr_watched_by(watch)
    arguments = dict(_ARGUMENTS)
    if current_platform.is_cpu():
        cpu_vllm.install_loader_layout()
        arguments = {**cpu_vllm.ENGINE_ARGUMENTS, **arguments}
    return LLM(model=str(checkpoint), **arguments)


class WatchedVllm(VllmEngine):
    """A vLLM engine whose receiver's moments are watched, and that may be handed a payload twice.

    Args:
        checkpoint: that it starts from.
        index: which engine of the scenario.
        trigger: of the process.

    Attributes:
        model: the module that vLLM runs.
    """

    def __init__(self, checkpoint: Path, index: int, trigger: Trigger) -> None:
        self.index = index
        self._watch = ReceiverWatch(trigger, index)
        llm = make_llm(checkpoint, self._watch)
        super().__init__(llm, name=f"engine-{index}", gate_wait_s=3600)
        self.model: torch.nn.Module = _model_of(llm)

    def call_ranks(self, request: bytes) -> list[bytes]:
        """As ``VllmEngine``; a payload comes twice where a scenario says so."""
        return self._watch.handed(super().call_ranks, request)

    def request(self) -> AbstractContextManager[int]:
        """Hold the gate for one look at all of storage."""
        return self._gate.request()

    def answer(self) -> None:
        """Answer a prompt, as an engine does all along."""
        from vllm import SamplingParams  # noqa: PLC0415

        self.generate([_PROMPT], SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False))


def _model_of(llm: Any) -> torch.nn.Module:
    (model,) = llm.apply_model(lambda model: model)  # nothing is copied: the worker is in this process
    assert isinstance(model, torch.nn.Module)
    return model


# ---------------------------------------------------------------- the twin


def twin_bits(checkpoint: Path) -> tuple[dict[str, str], int]:
    """What a fresh engine holds that loaded this checkpoint and was never refitted, and how many bytes that is.

    The engine is one of a process of its own, which ends with it.

    Raises:
        ChildError: it failed, or took longer than ``TWIN_TIMEOUT_S``.
    """
    folder = checkpoint.parent.parent / "twins"
    folder.mkdir(exist_ok=True)
    twin = Child(
        ChildConfig(
            role="twin",
            name=f"twin-{checkpoint.name}",
            number=0,
            start=1,
            folder=str(folder),
            control="",
            delivery="",
            settings={},
            checkpoint=str(checkpoint),
        )
    )
    try:
        found = wait([twin.pipe], TWIN_TIMEOUT_S)
        message = twin.receive() if found else None
    finally:
        twin.kill()
    if message is None or message["what"] != "bits":
        raise ChildError(f"{twin.name} of record {RECORD}: {message or 'no answer'}; its log is {twin.log}")
    return message["bits"], message["bytes"]


def serve_twin(line: Line) -> None:
    """In the twin's process: say what is stored."""
    torch.set_num_threads(1)
    model = _model_of(make_llm(Path(line.config.checkpoint), None))
    line.tell("bits", bits=stored_bits(model), bytes=stored_bytes(model))
    line.serve(lambda order: order)
