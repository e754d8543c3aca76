"""What a soak takes for a leak, and what it plays with."""

import pytest

from dcr.chaos.soak import WARM_REFITS, Held, Row, Sample, leaked, nothing_dense

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


def test_what_the_harness_remembers_of_refits_is_no_leak():
    late = Sample(90, {**HELD, "memory_bytes": 330 << 20})
    assert leaked(Sample(30, HELD), late, 6 << 20) == []
    assert leaked(Sample(30, HELD), late, 5 << 20) != []


def test_a_process_is_compared_with_itself_once_it_was_warm():
    held = Held(10)
    for refit in range(10, 10 + WARM_REFITS, 10):
        held.add(Sample(refit, HELD))
    assert (held.warm, held.last) == (None, None)
    for refit in (10 + WARM_REFITS, 40, 50):
        held.add(Sample(refit, HELD))
    assert (held.warm.refit, held.last.refit) == (10 + WARM_REFITS, 50)


@pytest.mark.parametrize(
    ("kinds", "enough"),
    [
        ("", False),
        ("rr", False),
        ("rra", True),
        ("drra", True),
        ("rdra", False),
        ("rrrd", False),
    ],
)
def test_a_dense_push_among_those_that_are_kept_is_one_to_catch_up_from(kinds, enough):
    names = {"r": "relative", "a": "absolute", "d": "dense"}
    assert nothing_dense([names[k] for k in kinds], 3) is enough


def test_the_refits_in_a_row_are_said_as_what_they_came_to():
    row = Row(refits=100, first_version=7, version=106, engines=2, tensors=5, bytes=17_536, equal=True)
    assert "100 relative refits in a row, versions 7 to 106" in str(row)
    assert "hold the bits of one dense load of the last candidate (17,536 bytes compared)" in str(row)
    assert "OTHER BITS than one dense load" in str(Row(100, 7, 106, 2, 5, 17_536, False))
