"""Settings of every test."""

import contextlib
import gc
import itertools
import os

import pytest
from hypothesis import HealthCheck, settings

# Nothing is fetched, vLLM takes 1 GiB for its cache and compiles nothing: set before any test imports it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Threads of torch that wait for one another must not take the cores from two test processes and all that they start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No deadline: how long an example takes, or is drawn, says nothing on a busy machine.
settings.register_profile("dcr", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("dcr")


def pytest_collection_finish():
    """What was imported stays: the collector need not go through millions of objects in the middle of a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def object_store(tmp_path_factory):
    """A real S3 server; ``running_store`` is what tests take."""
    from tests.object_store import ENVIRONMENT, ObjectStore  # noqa: PLC0415 - boto3 is slow to import

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        store = ObjectStore(tmp_path_factory.mktemp("object-store"))
        yield store
        store.kill()


@pytest.fixture
def running_store(object_store):
    """The server, started again if an earlier test left it killed."""
    object_store.start()
    return object_store


@pytest.fixture(scope="session")
def _bucket_numbers():
    return itertools.count()


@pytest.fixture
def bucket(running_store, _bucket_numbers):
    """The name of a new bucket, which is gone after the test."""
    name = f"bucket-{next(_bucket_numbers)}"
    running_store.client().create_bucket(Bucket=name)
    yield name
    running_store.start()
    # The server keeps a volume for each bucket, and has as many as the free disk allows: some sixty fill 65 GB.
    client = running_store.client()
    with contextlib.suppress(client.exceptions.NoSuchBucket):  # a test may have deleted it
        client.delete_bucket(Bucket=name)


@pytest.fixture
def network(running_store):
    """A proxy before the server, which does as told (``bad_network.BadNetwork``)."""
    from tests.bad_network import BadNetwork  # noqa: PLC0415 - few tests need it

    proxy = BadNetwork(running_store.port)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory):
    """A real etcd; ``running_etcd`` is what tests take."""
    from tests.etcd_server import HINT, EtcdServer, etcd_binary  # noqa: PLC0415 - few tests need it

    if etcd_binary() is None:
        pytest.skip(HINT)
    server = EtcdServer.started(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture
def running_etcd(etcd_server):
    """The server, started again if an earlier test left it killed."""
    etcd_server.start()
    return etcd_server
