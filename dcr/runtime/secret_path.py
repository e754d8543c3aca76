"""Where the secret of a run is kept: beside the control plane, so that whoever may use the one finds the other."""

from pathlib import Path

from dcr.control_plane.address import control_file


def secret_path(control: str) -> Path:
    """The secret's file: for the control plane ``sqlite:///tmp/run/record.db`` it is ``/tmp/run/record.db.secret``.

    Raises:
        RefusedError: the address is not that of a file.
    """
    path = control_file(control)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + ".secret")
