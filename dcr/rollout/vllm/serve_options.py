"""The options of ``python -m dcr.rollout.vllm.serve``: those of ``vllm serve`` and those of dcr, checked."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar, get_args

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import check_text
from dcr.delivery.address import open_delivery
from dcr.protocol.errors import DcrError, RefusedError
from dcr.rollout.vllm.answer_label import AnswerLabelMiddleware
from dcr.rollout.vllm.async_engine import OnClose
from dcr.rollout.vllm.worker_extension import worker_extension_cls
from dcr.runtime.channel_address import ChannelAddress
from dcr.runtime.handshake import Peer
from dcr.runtime.registry import RelayDirectory
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import LARGEST, Settings

_T = TypeVar("_T")


class OptionError(RefusedError):
    """An option, or the environment, is not one that the server can be started with; nothing was loaded."""


def parse(arguments: Sequence[str] | None, description: str) -> Namespace:
    """The options, checked before anything is loaded; control plane, secret and delivery store are made if missing.

    Args:
        arguments: the command line; that of the process if None.
        description: the first words of ``--help``.

    Returns:
        vLLM's namespace; ``dcr_settings`` is a ``Settings``.

    Raises:
        OptionError: one cannot be used, or would let requests reach storage past the gate; it is named.
    """
    from vllm.entrypoints.launchers.cli_args import (  # noqa: PLC0415  vLLM reads its environment when imported
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415  the same

    more = "This page names every option and explains none: --help=dcr explains those of dcr, --help=all all of them."
    parser = make_arg_parser(
        FlexibleArgumentParser(prog="python -m dcr.rollout.vllm.serve", description=f"{description}\n{more}\n")
    )
    group = parser.add_argument_group(
        "dcr", "How the engine follows the commit record; --dcr-name, --dcr-control and --dcr-delivery must be given."
    )
    for names, explained in _OPTIONS.items():
        group.add_argument(*names.split(", "), **explained)
    args: Namespace = parser.parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    _refuse_other_doors(args)
    _check(args)
    args.host = args.host or "127.0.0.1"
    args.worker_extension_cls = args.worker_extension_cls or worker_extension_cls()
    # Added last, so that it is outermost, and sees what every other middleware answers.
    args.middleware = [*args.middleware, f"{AnswerLabelMiddleware.__module__}.{AnswerLabelMiddleware.__qualname__}"]
    args.api_server_count = None
    validate_parsed_serve_args(args)
    return args


_OPTIONS: dict[str, dict[str, object]] = {
    "--dcr-name": {
        "required": True,
        "help": "name of the engine, unique among the record's engines; must be given",
    },
    "--dcr-control": {
        "required": True,
        "help": "where the commit record is, the same for the trainer: sqlite:///tmp/run/record.db is the file "
        "/tmp/run/record.db; or etcd://host:port/prefix?..., s3://bucket/prefix?... (docs/control-plane.md); must be "
        "given",
    },
    "--dcr-delivery": {
        "required": True,
        "help": "where payloads are, the same for the trainer: file:///tmp/run/payloads is the folder "
        "/tmp/run/payloads; must be given",
    },
    "--dcr-record-id, --dcr-record": {
        "default": "default",
        "help": "the commit record to obey: the trainer's record_id; --dcr-record is the older name of this option",
    },
    "--dcr-on-close": {
        "default": "wait",
        "choices": get_args(OnClose),
        "help": "what becomes of running requests when the gate closes: wait lets them finish, at most "
        "drain_timeout_s; keep freezes them and goes on with the new weights; abort ends them at once, short",
    },
    "--dcr-gate-wait-s": {
        "type": float,
        "default": 60.0,
        "help": "how long a request waits at the closed gate, seconds; then it is answered by status 503",
    },
    "--dcr-held-requests-max": {
        "type": int,
        "default": 256,
        "help": "how many requests wait there at once; one more is answered by status 503 at once",
    },
    "--dcr-settings": {
        "default": "{}",
        "help": "bounds as a JSON object, such as '{\"drain_timeout_s\": 30}'; its fields are those of "
        "dcr/runtime/settings.py",
    },
}


def _refuse_other_doors(args: Namespace) -> None:
    from vllm import envs  # noqa: PLC0415  vLLM reads its environment when imported

    found = {
        "VLLM_SERVER_DEV_MODE=1, whose routes resume and write behind the gate": envs.VLLM_SERVER_DEV_MODE,
        "VLLM_USE_RUST_FRONTEND=1, whose requests would not pass the gate": envs.VLLM_USE_RUST_FRONTEND,
        "VLLM_ENABLE_RESPONSES_API_STORE=1, whose stored and background answers would be given out later, unlabelled": (
            envs.VLLM_ENABLE_RESPONSES_API_STORE
        ),
        "VLLM_WORKER_MULTIPROC_METHOD=fork, whose processes could outlive the server": (
            os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork"  # else the server makes it spawn
        ),
        "--api-server-count, whose other servers' requests would not pass the gate": (args.api_server_count or 1) > 1,
        "--headless, which serves nothing here": args.headless,
        "--grpc, whose requests would not pass the gate": getattr(args, "grpc", False),
    }
    if refused := [what for what, is_set in found.items() if is_set]:
        raise OptionError(f"dcr cannot serve with {'; '.join(refused)}: leave it out")


def _check(args: Namespace) -> None:
    """Everything that only dcr knows of: what a node would find out after the model is loaded."""
    _named("--dcr-name", lambda: Peer("node", args.dcr_name, 0))
    _named("--dcr-record-id", lambda: check_text("record id", args.dcr_record_id))
    _named("--dcr-settings", lambda: _settings(args))
    wait_s, held = args.dcr_gate_wait_s, args.dcr_held_requests_max
    if not (math.isfinite(wait_s) and 0 < wait_s <= LARGEST):
        raise OptionError(f"--dcr-gate-wait-s: {wait_s} must be greater than 0 and at most {LARGEST:.0e} seconds")
    if held < 0:
        raise OptionError(f"--dcr-held-requests-max: {held} must be 0 or more requests")
    # Opened for good: a file that is not a record and a folder that cannot be written are found no other way.
    with closing(_named("--dcr-control", lambda: open_control_plane(args.dcr_control))) as control:
        _named("--dcr-control", lambda: run_secret(args.dcr_control))
        # As an owner's: a relay's node would be entered where owners look for it.
        directory = RelayDirectory(control, args.dcr_record_id)
        _named("--dcr-delivery", lambda: open_delivery(args.dcr_delivery, directory).close())


def _settings(args: Namespace) -> None:
    try:
        values = json.loads(args.dcr_settings)
    except ValueError as error:
        raise RefusedError(f"{args.dcr_settings!r} is no JSON: {error}; quote it for the shell") from error
    args.dcr_settings = Settings.of(values)
    ChannelAddress.parse(args.dcr_settings.channel).credentials()


def _named(option: str, check: Callable[[], _T]) -> _T:
    try:
        return check()
    except DcrError as error:
        raise OptionError(f"{option}: {error}") from error
