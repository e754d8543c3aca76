"""A trainer and nodes in this process, closed when a test is over."""

import pytest

from dcr import RolloutNode
from tests.faults.thread_fleet import Fleet


@pytest.fixture
def fleet_of(tmp_path):
    opened = []

    def make(**settings):
        opened.append(Fleet(tmp_path, settings))
        return opened[0]

    yield make
    opened[0].close()


@pytest.fixture
def node_of():
    nodes = []

    def make(fleet, engines):
        nodes.append(RolloutNode(engines, **fleet.addresses, observe=fleet.observe))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
