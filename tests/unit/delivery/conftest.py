"""The same tests for every kind of delivery."""

import pytest

from dcr.delivery.address import open_delivery


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path):
    """The address of a new, empty store."""
    if request.param == "folder":
        return f"file://{tmp_path}/payloads"
    store, bucket = request.getfixturevalue("running_store"), request.getfixturevalue("bucket")
    return f"s3://{bucket}/some/prefix?endpoint={store.endpoint}"


@pytest.fixture
def delivery_of(address):
    opened = []

    def make(more=""):
        opened.append(open_delivery(address + more))
        return opened[-1]

    yield make
    for delivery in opened:
        delivery.close()


@pytest.fixture
def delivery(delivery_of):
    return delivery_of()
