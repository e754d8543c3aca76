"""Names for stretches of work in NVIDIA's profilers: what a timeline of Nsight Systems shows above kernels and copies.

A refit has these, on the thread that does the work:

- ``detect``: finding changes, until the next bucket is full (owner, ``runtime/emission.py``);
- ``encode``: a bucket's streams, compression and entry digests (the same);
- ``seal``: the digest that the manifest has of a payload (the same);
- ``fetch``: looking for a payload or manifest, and receiving it (node, ``runtime/fetch.py``);
- ``validate``: a payload's digests and streams, until it is items (rank, ``runtime/rank_host.py``);
- ``apply``: checking items and writing them (the same);
- ``read back``: the digests of what storage holds (the same).
"""

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def stage(name: str) -> AbstractContextManager[None]:
    """A range named ``dcr: name`` while CUDA is in use in this process; otherwise nothing, at the cost of a call.

    Args:
        name: one of the stages above.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _NOTHING
    return torch.cuda.nvtx.range(f"dcr: {name}")
