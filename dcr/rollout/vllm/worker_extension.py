"""Which worker extension an engine is started with."""


def worker_extension_cls() -> str:
    """The name for ``worker_extension_cls`` on the platform that vLLM finds here: a CPU needs another than a GPU."""
    from vllm.platforms import current_platform  # noqa: PLC0415  vLLM reads its environment when imported

    # Named, not imported: vLLM imports it in each worker, and a CPU's changes vLLM where it is imported.
    if current_platform.is_cpu():
        return "dcr.rollout.vllm.cpu_extension.DcrCpuWorkerExtension"
    return "dcr.rollout.vllm.extension.DcrWorkerExtension"
