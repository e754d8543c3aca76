"""``vllm serve`` with refits: vLLM's own OpenAI server over an engine that follows a commit record.

    python -m dcr.rollout.vllm.serve MODEL --dcr-name node-a
        --dcr-control sqlite:///tmp/run/record.db --dcr-delivery file:///tmp/run/payloads
        [--dcr-on-close keep] [any option of vllm serve]

The app, its routes and its engine are built by vLLM's own functions.  What differs: the engine client is behind the
gate, a ``RolloutNode`` keeps the engine at the committed version, answers are labelled (see ``answer_label``), and a
supervisor ends the whole of it within a bound at SIGTERM or SIGINT.  It listens on 127.0.0.1 unless ``--host`` says
otherwise.
"""

import sys
from collections.abc import Sequence

from dcr.rollout.vllm.supervisor import Leash, end_with_parent, supervise


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; it returns in the server's process alone, when that has ended."""
    _serve(supervise(), arguments)


def _serve(leash: Leash, arguments: Sequence[str] | None) -> None:
    # Imported by the server alone: this module is the main one of the supervisor and of every worker too.
    from dcr.protocol.errors import DcrError  # noqa: PLC0415
    from dcr.rollout.vllm.serve_options import OptionError  # noqa: PLC0415
    from dcr.rollout.vllm.server import run  # noqa: PLC0415

    try:
        run(arguments, __doc__ or "", leash)
    except DcrError as error:
        print(f"dcr serve: error: {error}", file=sys.stderr)  # noqa: T201  the command's own words, as argparse's are
        sys.exit(2 if isinstance(error, OptionError) else 1)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that vLLM started: this module is the first that it imports
    end_with_parent()
