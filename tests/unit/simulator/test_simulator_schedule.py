"""Schedules as data: what is written is read, what is not a schedule is refused, and the format is pinned."""

import json
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from dcr.protocol.errors import RefusedError
from dcr.simulator.moves import ACTS
from dcr.simulator.run import run_schedule
from dcr.simulator.schedule import Schedule, Setup, decode_schedule, encode_schedule

GOLDEN = Path(__file__).parents[2] / "golden"
SETUP = Setup(
    7, 2, (1, 2), 1, 3, 3, "async", ("add", "xor"), "coordinator", cold=True, stop_waits=True, rejoin_waits=True
)
SCHEDULE = Schedule(SETUP, (("push", "", 1), ("hear", "c1:o0", 0), ("crash", "e1", 4)), 12, "ServingExact")
PARTIES = ("o0.1", "o1.1", "o0.2", "e0", "e1", "c1", "c2", "c1:e0", "c1:o1", "", "nobody")


def test_the_bytes_are_those_of_version_2():
    golden = (GOLDEN / "simulated_schedule.v2.json").read_bytes()
    assert encode_schedule(SCHEDULE) == golden
    assert decode_schedule(golden) == SCHEDULE


def test_version_1_is_read_and_waits_for_nothing():
    setup = msgspec.structs.replace(SETUP, stop_waits=False, rejoin_waits=False)
    first = msgspec.structs.replace(SCHEDULE, setup=setup, version=1)
    assert decode_schedule((GOLDEN / "simulated_schedule.json").read_bytes()) == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3}, "version 3; this simulator reads 1 and 2"),
        ({"setup": {**msgspec.to_builtins(SETUP), "stop_waits": 1}}, "stop_waits"),
        ({"setup": None}, "setup"),
        ({"moves": [["push", "", "1"]]}, "moves"),
        ({"moves": [["explode", "e0", 1]]}, "explode"),
        ({"weather": "bad"}, "weather"),
        ({"setup": {**msgspec.to_builtins(SETUP), "ranks": []}}, "ranks"),
        ({"setup": {**msgspec.to_builtins(SETUP), "owners": 99}}, "owners"),
        ({"setup": {**msgspec.to_builtins(SETUP), "members_min": 3}}, "members_min"),
        ({"setup": {**msgspec.to_builtins(SETUP), "gate_mode": "ajar"}}, "gate_mode"),
        ({"setup": {**msgspec.to_builtins(SETUP), "operations": ["mul"]}}, "operations"),
        ({"setup": {**msgspec.to_builtins(SETUP), "policy": "none"}}, "policy"),
        ({"setup": {**msgspec.to_builtins(SETUP), "attempts_max": 0}}, "attempts_max"),
    ],
)
def test_what_is_no_schedule_is_refused_by_what_is_wrong(change, said):
    data = {**json.loads(encode_schedule(SCHEDULE)), **change}
    with pytest.raises(RefusedError, match=said):
        decode_schedule(json.dumps(data).encode())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(ACTS)), st.sampled_from(PARTIES), st.integers(0, 99)), max_size=60))
def test_any_moves_are_a_schedule(moves):
    """Whatever they are, in whatever order: what cannot happen does nothing, and the protocol holds."""
    run = run_schedule(Schedule(SETUP, tuple(moves)))
    assert run.failure is None, run.failure
