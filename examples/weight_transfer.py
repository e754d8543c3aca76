"""vLLM's own weight-transfer interface with the backend ``dcr``: you pause, send, reset and resume.

    python examples/weight_transfer.py CHECKPOINT

CHECKPOINT is a folder with a Hugging Face model.  Trainer and engine are in one program here, as in a script that
generates and trains by turns; there is no commit record, no gate and no node.
"""

import sys
import tempfile
from typing import Any

import torch

from dcr.rollout import cpu_vllm

REFITS = 3
PROMPT = {"prompt_token_ids": [5, 9, 77]}


class Client:
    """The four calls that a trainer makes, put to an engine in the same process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The engine learns its loader."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """No request may run from here on."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Every rank fetches the payloads that this names, checks and applies them."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every rank has applied all; what older weights computed is dropped before anything is asked again."""
        self._llm.finish_weight_update(weight_version)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")


def main(checkpoint: str) -> None:
    """Generate and train by turns."""
    if not torch.cuda.is_available():
        cpu_vllm.set_environment()
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  vLLM reads its environment when imported
    from vllm import LLM, SamplingParams  # noqa: PLC0415  the same
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415  the same

    from dcr.rollout.vllm.register import register  # noqa: PLC0415  the same
    from dcr.trainer.torch.transfer import DcrTrainerInitInfo  # noqa: PLC0415  the same

    cpu = {} if torch.cuda.is_available() else cpu_vllm.ENGINE_ARGUMENTS
    arguments = {"skip_tokenizer_init": True, "max_model_len": 512, **cpu}
    llm = LLM(checkpoint, weight_transfer_config={"backend": "dcr"}, **arguments)
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    register()  # vLLM loads its plugins in its own processes; a trainer is not one of them
    with tempfile.TemporaryDirectory() as run:
        init = DcrTrainerInitInfo(policy, f"file://{run}/payloads", rank=0)
        sender = WeightTransferTrainerFactory.trainer_init(init, client=Client(llm))
        for version in range(REFITS + 1):
            (output,) = llm.generate([PROMPT], greedy, use_tqdm=False)
            print(f"version {llm.get_weight_version()}: tokens {list(output.outputs[0].token_ids)}", flush=True)
            if version < REFITS:
                with torch.no_grad():  # where an optimizer would step
                    for weight in policy.parameters():
                        weight.add_(0.05 * torch.randn_like(weight) * (torch.rand_like(weight) < 0.1))
                sender.send_weights()
        sender.shutdown()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # vLLM starts its processes from this file anew
    main(sys.argv[1])
