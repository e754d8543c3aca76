"""vLLM's OpenAI server behind the gate, from its options to its end; see ``serve``."""

import asyncio
import logging
from argparse import Namespace
from collections.abc import Sequence

from dcr.rollout.node import RolloutNode
from dcr.rollout.vllm.async_engine import AsyncVllmEngine
from dcr.rollout.vllm.gated_client import GatedClient
from dcr.rollout.vllm.log_lines import log_like_vllm
from dcr.rollout.vllm.rank_calls import check_config
from dcr.rollout.vllm.serve_options import parse
from dcr.rollout.vllm.supervisor import Leash

END_S = 20.0
"""How long a server may take to end, beside what ``--shutdown-timeout`` gives running requests, seconds."""

_log = logging.getLogger("dcr.serve")


def run(arguments: Sequence[str] | None, description: str, leash: Leash) -> None:
    """Serve until a signal ends it; before it listens a signal ends the process at once.

    Args:
        arguments: the command line; that of the process if None.
        description: the first words of ``--help``.
        leash: told how long the end may take.

    Raises:
        OptionError: see ``parse``.
        DcrError: the engine cannot be refitted.
    """
    import uvloop  # noqa: PLC0415  comes with vLLM, which serves on it
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup  # noqa: PLC0415  vLLM reads its environment then
    from vllm.logger import configure_logging_from_args  # noqa: PLC0415  the same
    from vllm.utils.system_utils import decorate_logs  # noqa: PLC0415  the same

    cli_env_setup()
    args = parse(arguments, description)
    configure_logging_from_args(args)
    log_like_vllm()
    decorate_logs("APIServer", skip_if_decorated=True)
    leash.allow(END_S + args.shutdown_timeout)
    uvloop.run(_serve(args))


async def _serve(args: Namespace) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  the same
    from vllm.entrypoints.launchers.api_server.entry import (  # noqa: PLC0415  the same
        build_and_serve,
        build_async_engine_client,
    )
    from vllm.entrypoints.launchers.launcher import setup_server  # noqa: PLC0415  the same
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415  the same

    address, sock = setup_server(args, reuse_port=False)
    try:
        # Before minutes of loading; vLLM makes the same configuration again.
        planned = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        check_config(args.dcr_name, planned)
        async with build_async_engine_client(args) as llm:
            engine = AsyncVllmEngine(
                llm,
                name=args.dcr_name,
                on_close=args.dcr_on_close,
                gate_wait_s=args.dcr_gate_wait_s,
                held_requests_max=args.dcr_held_requests_max,
            )
            node = await asyncio.to_thread(
                RolloutNode,
                engine,
                control=args.dcr_control,
                delivery=args.dcr_delivery,
                record_id=args.dcr_record_id,
                settings=args.dcr_settings,
            )
            try:
                _log.info("engine %s: listening on %s", args.dcr_name, address)
                ended = await build_and_serve(GatedClient(llm, engine, node), address, sock, args)
            finally:
                await asyncio.to_thread(node.close)
        await ended
    finally:
        sock.close()
