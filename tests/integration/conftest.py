"""What the modules share: starting it takes longer than using it."""

import pytest
import vllm_support as support
from xdist.scheduler import LoadFileScheduling

from tests.integration import megatron_ranks

SHARE = ("test_inspect.py", "test_megatron_")
"""What files begin with that use the ``megatron`` fixture."""


class WholeFiles(LoadFileScheduling):
    """Of several workers one takes a whole file, and one all of those that share what Megatron's ranks saw.

    ``--dist loadgroup`` would be for that, but pytest-xdist 3.8 groups nothing any more under pytest 9.2, and does not
    say so (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "megatron" if file.rpartition("/")[2].startswith(SHARE) else file


def pytest_xdist_make_scheduler(config, log):
    return WholeFiles(config, log)


def pytest_collection_modifyitems(items):
    using = {item.path.name for item in items if "megatron" in getattr(item, "fixturenames", ())}
    assert all(name.startswith(SHARE) for name in using), f"not all of {sorted(using)} would go to one worker"


@pytest.fixture(scope="session")
def twin():
    """Fresh engines on any checkpoint, in a process that has imported vLLM once."""
    with support.twin() as twin:
        yield twin


@pytest.fixture(scope="session")
def megatron(tmp_path_factory):
    """The folder, and what the ranks of the Megatron tests saw, by case and rank: one process imports Megatron."""
    from tests.integration import (  # noqa: PLC0415 - they use the fixture
        test_megatron_refit,
        test_megatron_residual,
        test_megatron_source,
        test_megatron_together,
    )

    modules = (test_megatron_source, test_megatron_residual, test_megatron_together, test_megatron_refit)
    folder = tmp_path_factory.mktemp("megatron")
    jobs = [(module.JOB, case) for module in modules for case in module.NORMAL]
    return folder, megatron_ranks.run(folder, jobs, timeout_s=450)
