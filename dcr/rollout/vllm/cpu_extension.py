"""The worker extension for vLLM on a CPU: importing this module installs the loader-layout patches in the process.

vLLM imports the module of ``worker_extension_cls`` in every worker before it loads the model, and gives an extension no
other hook that early.  Name it in ``vllm.LLM(worker_extension_cls=...)``; import it nowhere else.
"""

from dcr.rollout import cpu_vllm
from dcr.rollout.vllm.extension import DcrWorkerExtension

cpu_vllm.install_loader_layout()


class DcrCpuWorkerExtension(DcrWorkerExtension):
    """``DcrWorkerExtension`` for a worker that keeps its weights in loader layout on a CPU."""
