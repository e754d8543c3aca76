"""Every control plane, as the shared suite opens it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlane, ControlPlaneSettings

_numbers = itertools.count()


@dataclass
class Place:
    """One empty place for records, and any number of clients of it."""

    address: str
    opened: list[ControlPlane] = field(default_factory=list)

    def open(self, **bounds: Any) -> ControlPlane:
        """Another client of the same place; closed with the test."""
        self.opened.append(open_control_plane(self.address, ControlPlaneSettings(**bounds)))
        return self.opened[-1]


def _sqlite(request: pytest.FixtureRequest) -> str:
    return f"sqlite://{request.getfixturevalue('tmp_path')}/record.db"


def _etcd(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue('running_etcd').address}/test/{next(_numbers)}"


PLANES: dict[str, Callable[[pytest.FixtureRequest], str]] = {"sqlite": _sqlite, "etcd": _etcd}


@pytest.fixture(params=list(PLANES))
def place(request):
    """A new place on each control plane."""
    made = Place(PLANES[request.param](request))
    yield made
    for plane in made.opened:
        plane.close()


@pytest.fixture
def plane(place):
    return place.open()
