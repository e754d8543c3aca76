"""The policy as the plain torch receiver holds it: transformers' own module, with a loader of its own."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


class TorchPolicy(torch.nn.Module):
    """Experts are stacked, gate above up: another layout than the checkpoint's, and another than vLLM's."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        config = Qwen3MoeConfig.from_pretrained(checkpoint)
        # Not .to(bfloat16), which would round the rotary table too; transformers keeps that in FP32.
        self.policy = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()  # noqa: SLF001

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy canonical tensors to where they are served from; returns the names of what was written."""
        own = dict(self.policy.named_parameters())
        loaded = set()
        for name, weight in weights:
            match = _EXPERT.fullmatch(name)
            if match is None:
                where, target = name, own[name].data
            elif match["part"] == "down":
                where = f"{match['stack']}.down_proj"
                target = own[where].data[int(match["expert"])]
            else:
                where = f"{match['stack']}.gate_up_proj"
                stacked = own[where].data[int(match["expert"])]
                half = stacked.shape[0] // 2
                target = stacked[:half] if match["part"] == "gate" else stacked[half:]
            target.copy_(weight)
            loaded.add(where)
        return loaded

    @torch.no_grad()
    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy continuation of a prompt of token ids."""
        ids = torch.tensor([prompt])
        for _ in range(tokens):
            ids = torch.cat([ids, self.policy(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        return ids[0, len(prompt) :].tolist()


def load(checkpoint: Path) -> TorchPolicy:
    """A receiver's model, fresh from a checkpoint through its own loader."""
    from dcr.rollout.checkpoint import read_checkpoint  # noqa: PLC0415 - the twin needs nothing of dcr

    model = TorchPolicy(checkpoint)
    with torch.no_grad():
        model.load_weights(read_checkpoint(checkpoint))
    return model
