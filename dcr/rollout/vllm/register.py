"""Makes the weight-transfer backend ``dcr`` known to vLLM, in every process that vLLM starts."""

import contextlib

BACKEND = "dcr"


def register() -> None:
    """The entry point ``dcr`` of the group ``vllm.general_plugins``; again is harmless.

    Nothing of dcr is imported until an engine is started with ``weight_transfer_config={"backend": "dcr"}``.
    """
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415  called by vLLM while it is imported
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    homes = {
        WeightTransferEngineFactory: ("dcr.rollout.vllm.transfer", "DcrTransferEngine"),
        WeightTransferTrainerFactory: ("dcr.trainer.torch.transfer", "DcrTransferSender"),
    }
    for factory, (module, name) in homes.items():
        with contextlib.suppress(ValueError):  # registered already: plugins may be loaded more than once
            factory.register_engine(BACKEND, module, name)
