"""A trainer and nodes in this process, closed when a test is over; and what a run wrote down, held to the spec."""

import os
import warnings
from pathlib import Path

import pytest

from dcr import RolloutNode
from dcr.modelcheck.eventlog.validate import validate
from dcr.protocol.errors import RefusedError
from tests.faults.failover_fleet import FailoverFleet
from tests.faults.thread_fleet import Fleet

SPEC = Path(__file__).parents[2] / "spec" / "tla"


@pytest.fixture(autouse=True)
def validated(tmp_path):
    """With DCR_VALIDATE_LOGS set, the event logs that a test leaves must be a behaviour of the specification.

    That takes several seconds a test, so it is for the long run (``make test-long``).
    """
    yield
    for folder in sorted(tmp_path.glob("**/*.events")) if os.environ.get("DCR_VALIDATE_LOGS") else []:
        leaders = "".join(path.read_text() for path in folder.glob("coordinator-*"))
        if '"record":' not in leaders:
            continue  # no leader came to write the record: there is no run
        try:
            found = validate(folder, SPEC, heap="1g")
        except RefusedError as e:  # what the specification does not have, such as a trainer of other ranks
            warnings.warn(f"NOT VALIDATED: {e}", stacklevel=1)
            continue
        assert found.ok, f"{found.rejected}\n" + "\n".join((*found.why, *found.story))


@pytest.fixture
def fleet_of(tmp_path):
    opened = []

    def make(**settings):
        opened.append(Fleet(tmp_path, settings))
        return opened[0]

    yield make
    for fleet in opened:
        fleet.close()


@pytest.fixture
def node_of():
    nodes = []

    def make(fleet, engines):
        nodes.append(RolloutNode(engines, **fleet.addresses, observe=fleet.observe))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def fleet_with(tmp_path):
    """A fleet whose coordinators run elsewhere."""
    opened = []

    def make(*args, **kwargs):
        opened.append(FailoverFleet(tmp_path, *args, **kwargs))
        return opened[0]

    yield make
    for fleet in opened:
        fleet.close()
