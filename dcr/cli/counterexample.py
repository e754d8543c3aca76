"""A trace shown as a story, and kept as ITF."""

from pathlib import Path

from dcr.cli.report import say
from dcr.modelcheck.itf import dump_trace
from dcr.modelcheck.source import variable_types
from dcr.modelcheck.story import tell
from dcr.modelcheck.trace import Trace
from dcr.protocol.errors import RefusedError


def keep(trace: Trace, module: Path, path: Path, source: str, *, story: bool) -> str | None:
    """Tell a trace of a module, if asked to, and write it as ITF.

    A specification whose annotations are at fault must not cost the counterexample: it is told all the same.

    Returns:
        The file, or None if it could not be written; why was said.
    """
    try:
        types = variable_types(module)
        data = dump_trace(trace, types, source)
    except RefusedError as error:
        if story:
            say(tell(trace, {}))
        say(f"       not saved as ITF: {error}")
        return None
    if story:
        say(tell(trace, types))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + b"\n")
    except OSError as error:
        say(f"       not saved: {path}: {error.strerror}; --save names another folder")
        return None
    say(f"       saved as {path}")
    return str(path)
