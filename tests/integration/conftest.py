"""What the modules share: starting it takes longer than using it."""

import pytest
import vllm_support as support

from tests.integration import megatron_ranks


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items):
    """Of several workers one takes a whole file, and all of those that share what Megatron's ranks saw."""
    for item in items:
        group = "megatron" if item.path.stem.startswith("test_megatron") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


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
