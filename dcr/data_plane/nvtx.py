"""Names for stretches of work: what a timeline shows, of NVIDIA's profilers or of whoever watches.

A refit has these, on the thread that does the work:

- ``detect``: finding changes, until the next bucket is full (owner, ``runtime/emission.py``);
- ``encode``: a bucket's streams, compression and entry digests (the same);
- ``seal``: the digest that the manifest has of a payload (the same);
- ``send``: a payload on its way, until the store or the relay's nodes hold it (the same);
- ``fold``: bringing the baseline to the committed weights (owner, ``runtime/owner_host.py``);
- ``receive``: bytes of an object that come in over the network (node, ``delivery/relay/node.py``, ``delivery/s3.py``);
- ``fetch``: looking for a payload or manifest, and receiving it (node, ``runtime/fetch.py``);
- ``validate``: a payload's digests and streams, until it is items (rank, ``runtime/rank_host.py``);
- ``apply``: checking items and writing them (the same);
- ``read back``: the digests of what storage holds (the same).
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Watcher = Callable[[str], AbstractContextManager[None]]
"""Given a stage's name, what to enter for as long as it lasts; called from any thread."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_watcher: Watcher | None = None


def watch_stages(watcher: Watcher | None) -> None:
    """Have this process's stages watched, in place of a profiler; None for nobody again."""
    global _watcher  # noqa: PLW0603 - of the process, as a profiler is
    _watcher = watcher


def stage(name: str) -> AbstractContextManager[None]:
    """A range named ``dcr: name`` while CUDA is in use in this process; otherwise nothing, at the cost of a call.

    Args:
        name: one of the stages above.
    """
    if _watcher is not None:
        return _watcher(name)
    torch = sys.modules.get("torch")  # a process that only moves bytes has none
    if torch is None or not torch.cuda.is_initialized():
        return _NOTHING
    entered: AbstractContextManager[None] = torch.cuda.nvtx.range(f"dcr: {name}")
    return entered
