"""Says that kernels are being compiled, where that takes so long that somebody may wonder what is waited for."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

TOLD_AFTER_S = 1.0
_log = logging.getLogger("dcr.kernels")


@contextmanager
def compiling(what: str, device: torch.device) -> Iterator[None]:
    """Around the import, compilation and trial of kernels; of one that finds compiled code nothing is told.

    Args:
        what: the kernels do, which is what comes next.
        device: they are for.
    """
    began = time.monotonic()
    told = threading.Event()

    def tell() -> None:
        told.set()
        _log.info(
            "compiles kernels for %s, and tries them: the first time on a machine it takes up to a minute; then it %s",
            device,
            what,
        )

    timer = threading.Timer(TOLD_AFTER_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if told.is_set():
        _log.info("kernels for %s are ready, after %.1f s; now it %s", device, time.monotonic() - began, what)
