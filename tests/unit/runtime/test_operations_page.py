"""docs/operations.md names bounds by their settings, with their defaults."""

import re
from pathlib import Path

from dcr.protocol.record import RECORD_BYTES_MAX
from dcr.runtime.settings import Settings

PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def test_defaults_are_those_of_the_settings():
    named = re.findall(r"`(\w+)` \((\d+)\)", PAGE)
    assert len(named) > 8
    assert {name: float(value) for name, value in named} == {
        name: float(getattr(Settings(), name)) for name, _ in named
    }


def test_every_bound_that_it_names_is_a_setting():
    bounds = set(re.findall(r"`(\w+_(?:s|max|min|epochs))`", PAGE)) - {"record_bytes_max"}
    assert bounds - set(Settings.__struct_fields__) == set()
    assert "`record_bytes_max`, 64 KiB" in PAGE
    assert RECORD_BYTES_MAX == 64 << 10
