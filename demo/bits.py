"""The proof's own reading of stored bits, which shares nothing with what it proves."""

import hashlib

import torch


def stored_bits(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 over dtype, shape and stored bytes of every parameter and buffer, by name."""
    digests = {}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        h = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
        h.update(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        digests[name] = h.hexdigest()
    return digests
