"""Where the secret of a run is kept: beside the control plane, so that whoever may use the one finds the other."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from dcr.protocol.errors import RefusedError


def secret_path(control: str) -> Path:
    """The secret's file: for the control plane ``sqlite:///tmp/run/record.db`` it is ``/tmp/run/record.db.secret``.

    Raises:
        RefusedError: the address is not that of a file.
    """
    parts = urlsplit(control)
    if parts.scheme != "sqlite" or not parts.path:
        raise RefusedError(f"no secret is kept beside control plane {control!r}: only sqlite:///... is known")
    path = Path(unquote(parts.path))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + ".secret")
