"""What a soak takes for a leak, and what it plays with."""

import pytest

from dcr.chaos.soak import Sample, leaked

HELD = {"memory_bytes": 300 << 20, "threads": 20, "files": 40, "shared_files": 3}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, []),
        ({"memory_bytes": 320 << 20, "threads": 22, "files": 38}, []),
        ({"memory_bytes": 330 << 20}, ["holds 31,457,280 memory_bytes more after refit 90 than after refit 30"]),
        ({"threads": 23}, ["holds 3 threads more after refit 90 than after refit 30"]),
        ({"files": 100}, ["holds 60 files more after refit 90 than after refit 30"]),
        ({"shared_files": 65}, ["holds 65 files in shared memory after refit 90"]),
    ],
)
def test_what_is_a_leak(more, said):
    assert leaked(Sample(30, HELD), Sample(90, {**HELD, **more})) == said
