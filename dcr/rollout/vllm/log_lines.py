"""Where dcr's log lines go in a process of vLLM: where vLLM's own go, in the same form."""

import logging


def log_like_vllm() -> None:
    """Give the logger ``dcr`` the handlers and the level that vLLM's configuration gave the logger ``vllm``.

    Call it when vLLM has configured logging.  A configuration of the operator's that speaks of ``dcr`` is left alone.
    """
    dcr, vllm = logging.getLogger("dcr"), logging.getLogger("vllm")
    if dcr.handlers or dcr.level != logging.NOTSET:
        return
    dcr.setLevel(vllm.level)
    dcr.propagate = vllm.propagate
    for handler in vllm.handlers:
        dcr.addHandler(handler)
