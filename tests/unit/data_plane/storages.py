"""Every way to resident storage, under one signature: tests run each loader through all of them."""

import pytest

from dcr.data_plane.kernels.reference import ReferenceKernels
from dcr.data_plane.placement.loader_path import LoaderPath
from dcr.data_plane.placement.placement import Placement
from dcr.data_plane.resident import Residents


def hooked(model, load, specs):
    return LoaderPath(model, load, specs)


def boxes(model, load, specs):
    return Placement(model, load, specs, sharded=True)


def reference(model, load, specs):
    return Placement(model, load, specs, sharded=True, kernels=ReferenceKernels(Residents(model).spans))


def verified(model, load, specs):
    return Placement(model, load, specs, sharded=True, verify="dense")


def written(model, load, specs):
    return Placement(model, load, specs, sharded=True, verify="written")


EVERY = [hooked, boxes, reference, verified, written]
every = pytest.mark.parametrize("storage", EVERY, ids=lambda f: f.__name__)
