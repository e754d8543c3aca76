"""The untouched twin of the plain torch receiver: transformers' own loading of a checkpoint, never refitted."""

from typing import Any

from demo.process import claim_output, serve

claim_output()

import torch  # noqa: E402
from transformers import Qwen3MoeForCausalLM  # noqa: E402

from demo.bits import stored_bits  # noqa: E402


def twin(request: dict[str, Any]) -> dict[str, Any]:
    """Stored bits of a fresh model that was loaded from the checkpoint."""
    model = Qwen3MoeForCausalLM.from_pretrained(request["checkpoint"], dtype=torch.bfloat16, local_files_only=True)
    return {"bits": stored_bits(model)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"twin": twin})
