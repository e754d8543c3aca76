"""What the modules share: starting it takes longer than using it."""

import pytest
import vllm_support as support


@pytest.fixture(scope="session")
def twin():
    """Fresh engines on any checkpoint, in a process that has imported vLLM once."""
    with support.twin() as twin:
        yield twin
