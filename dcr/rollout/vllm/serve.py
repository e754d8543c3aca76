"""``vllm serve`` with refits: vLLM's own OpenAI server over an engine that follows a commit record.

    python -m dcr.rollout.vllm.serve MODEL --dcr-name node-a
        --dcr-control sqlite:///tmp/run/record.db --dcr-delivery file:///tmp/run/payloads
        [--dcr-on-close keep] [any option of vllm serve]

The app, its routes and its engine are built by vLLM's own functions.  Three things differ: the engine client is behind
the gate, a ``RolloutNode`` keeps the engine at the committed version, and answers are labelled (see ``answer_label``).
It listens on 127.0.0.1 unless ``--host`` says otherwise.
"""

import asyncio
import json
import logging
import signal
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from dcr.protocol.errors import RefusedError
from dcr.rollout.node import RolloutNode
from dcr.rollout.vllm.answer_label import AnswerLabelMiddleware
from dcr.rollout.vllm.async_engine import AsyncVllmEngine
from dcr.rollout.vllm.gated_client import GatedClient
from dcr.runtime.settings import Settings

_log = logging.getLogger("dcr.serve")

_HELP = f"""{__doc__}
This page names every option and explains none: --help=dcr explains those of dcr, --help=all all of them.
"""


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    """The options of ``vllm serve`` and those of dcr, checked.

    Raises:
        RefusedError: an option, or the environment, would let requests reach storage past the gate.
    """
    from vllm.entrypoints.launchers.cli_args import (  # noqa: PLC0415  vLLM reads its environment when imported
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415  the same

    parser = make_arg_parser(FlexibleArgumentParser(prog="python -m dcr.rollout.vllm.serve", description=_HELP))
    dcr = parser.add_argument_group(
        "dcr", "How the engine follows the commit record; --dcr-name, --dcr-control and --dcr-delivery must be given."
    )
    dcr.add_argument(
        "--dcr-name", required=True, help="name of the engine, unique among the record's engines; must be given"
    )
    dcr.add_argument(
        "--dcr-control",
        required=True,
        help="where the commit record is, the same for the trainer: sqlite:///tmp/run/record.db is the file "
        "/tmp/run/record.db; must be given",
    )
    dcr.add_argument(
        "--dcr-delivery",
        required=True,
        help="where payloads are, the same for the trainer: file:///tmp/run/payloads is the folder /tmp/run/payloads; "
        "must be given",
    )
    dcr.add_argument("--dcr-record", default="default", help="the commit record to obey: the trainer's record_id")
    dcr.add_argument(
        "--dcr-on-close",
        default="wait",
        choices=("wait", "keep", "abort"),
        help="what becomes of running requests when the gate closes: wait lets them finish, at most drain_timeout_s; "
        "keep freezes them and goes on with the new weights; abort ends them at once, short",
    )
    dcr.add_argument(
        "--dcr-gate-wait-s",
        type=float,
        default=60.0,
        help="how long a request waits at the closed gate, seconds; then it is answered by status 503",
    )
    dcr.add_argument(
        "--dcr-held-requests-max",
        type=int,
        default=256,
        help="how many requests wait there at once; one more is answered by status 503 at once",
    )
    dcr.add_argument(
        "--dcr-settings",
        default={},
        type=json.loads,
        help="bounds as a JSON object, such as '{\"drain_timeout_s\": 30}'; its fields are those of "
        "dcr/runtime/settings.py",
    )
    args: Namespace = parser.parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    _refuse_other_doors(args)
    Settings.of(args.dcr_settings)  # a wrong one is named before the engine is loaded
    args.host = args.host or "127.0.0.1"
    args.worker_extension_cls = args.worker_extension_cls or "dcr.rollout.vllm.extension.DcrWorkerExtension"
    # Added last, so that it is outermost, and sees what every other middleware answers.
    args.middleware = [*args.middleware, f"{AnswerLabelMiddleware.__module__}.{AnswerLabelMiddleware.__qualname__}"]
    args.api_server_count = None
    validate_parsed_serve_args(args)
    return args


def _refuse_other_doors(args: Namespace) -> None:
    from vllm import envs  # noqa: PLC0415  vLLM reads its environment when imported

    found = {
        "VLLM_SERVER_DEV_MODE=1, whose routes resume and write behind the gate": envs.VLLM_SERVER_DEV_MODE,
        "VLLM_USE_RUST_FRONTEND=1, whose requests would not pass the gate": envs.VLLM_USE_RUST_FRONTEND,
        "--api-server-count, whose other servers' requests would not pass the gate": (args.api_server_count or 1) > 1,
        "--headless, which serves nothing here": args.headless,
        "--grpc, whose requests would not pass the gate": getattr(args, "grpc", False),
    }
    if refused := [what for what, is_set in found.items() if is_set]:
        raise RefusedError(f"dcr cannot serve with {'; '.join(refused)}: leave it out")


async def serve(args: Namespace) -> None:
    """Start the engine and its node, and serve until a signal ends it."""
    from vllm.entrypoints.launchers.api_server.entry import (  # noqa: PLC0415  the same
        build_and_serve,
        build_async_engine_client,
    )
    from vllm.entrypoints.launchers.launcher import setup_server  # noqa: PLC0415  the same

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, interrupt)  # until vLLM's server installs its own handlers
    address, sock = setup_server(args, reuse_port=False)
    try:
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
                record_id=args.dcr_record,
                settings=args.dcr_settings,
            )
            try:
                _log.info("engine %s: listening on %s", args.dcr_name, address)
                ended = await build_and_serve(GatedClient(llm, engine, node.close), address, sock, args)
            finally:
                await asyncio.to_thread(node.close)
        await ended
    finally:
        sock.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    import uvloop  # noqa: PLC0415  comes with vLLM, which serves on it
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup  # noqa: PLC0415  vLLM reads its environment then
    from vllm.logger import configure_logging_from_args  # noqa: PLC0415  the same

    cli_env_setup()
    args = parse(arguments)
    configure_logging_from_args(args)
    uvloop.run(serve(args))


if __name__ == "__main__":
    main()
