"""The secret of a run, from wherever the control plane's address says that it is kept."""

from pathlib import Path

from dcr.control_plane.address import secret_file
from dcr.runtime.secret import load_or_create_secret, load_secret


def secret_path(control: str) -> Path:
    """The secret's file: for the control plane ``sqlite:///tmp/run/record.db`` it is ``/tmp/run/record.db.secret``.

    Raises:
        RefusedError: the address has another form, or names no file for it.
    """
    return secret_file(control)[0]


def run_secret(control: str) -> bytes:
    """The secret of the run.

    Beside a record in a file it is made where it is missing; one that is brought to several machines never is.

    Raises:
        RefusedError: the address names no file for it, or the file is missing or no good.
    """
    path, may_be_made = secret_file(control)
    if not may_be_made:
        return load_secret(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return load_or_create_secret(path)
