"""Every control plane, as the shared suite opens it."""

import itertools
from collections.abc import Callable, Iterator
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
    contenders_max: int = 20
    """More would wait for one another: an S3 server locks a key for each conditional write."""
    examples: int = 20
    opened: list[ControlPlane] = field(default_factory=list)

    def open(self, **bounds: Any) -> ControlPlane:
        """Another client of the same place; closed with the test."""
        settings = ControlPlaneSettings(**{"busy_timeout_s": 60.0, **bounds})  # however busy the machine is
        self.opened.append(open_control_plane(self.address, settings))
        return self.opened[-1]


def _sqlite(request: pytest.FixtureRequest) -> Place:
    return Place(f"sqlite://{request.getfixturevalue('tmp_path')}/record.db")


def _etcd(request: pytest.FixtureRequest) -> Place:
    return Place(f"{request.getfixturevalue('running_etcd').address}/test/{next(_numbers)}")


def _s3(request: pytest.FixtureRequest) -> Place:
    endpoint = request.getfixturevalue("running_store").endpoint
    return Place(f"s3://{request.getfixturevalue('bucket')}/runs/a?endpoint={endpoint}", contenders_max=5, examples=5)


LEADING: dict[str, Callable[[pytest.FixtureRequest], Place]] = {"sqlite": _sqlite, "etcd": _etcd}
"""Those that keep leases."""
PLANES = {**LEADING, "s3": _s3}


def _opened(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = PLANES[request.param](request)
    yield made
    for plane in made.opened:
        plane.close()


@pytest.fixture(params=list(PLANES))
def place(request):
    """A new place on each control plane."""
    yield from _opened(request)


@pytest.fixture
def plane(place):
    return place.open()


@pytest.fixture(params=list(LEADING))
def led_place(request):
    """A new place on each control plane that keeps leases."""
    yield from _opened(request)


@pytest.fixture
def led(led_place):
    return led_place.open()


@pytest.fixture
def s3_place(request):
    """A new place in a bucket."""
    made = _s3(request)
    yield made
    for plane in made.opened:
        plane.close()
