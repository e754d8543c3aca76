"""TLC for the tests of this folder: the real one, at low priority, each configuration run once."""

from functools import cache
from pathlib import Path

import pytest

from dcr.modelcheck import tlc
from tests.unit.modelcheck import stand_in

SPECS = Path(__file__).parent / "specs"


@pytest.fixture(scope="session")
def specs():
    return SPECS


@pytest.fixture
def path_with_java(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("bin")
    stand_in.nice_java(folder)
    monkeypatch.setenv("PATH", stand_in.path_with(folder))


@cache
def _run(module, config, options):
    return tlc.run(SPECS / module, SPECS / config, heap="512m", timeout_s=280, **dict(options))


@pytest.fixture
def check(path_with_java):
    """check(module, config, **options) -> TlcResult; the same call is made once a session."""
    return lambda module, config, **options: _run(module, config, tuple(options.items()))
