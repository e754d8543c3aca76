"""A trace told for people."""

from dcr.modelcheck.story import tell
from dcr.modelcheck.trace import Step, Trace
from dcr.modelcheck.types import parse_type
from dcr.modelcheck.values import Function

TYPES = {
    "K": parse_type("{ ver: Int }", {}),
    "rcv": parse_type("Str -> { st: Str }", {}),
    "acks": parse_type("Set(Int)", {}),
}


def state(version, one, two, acks=(), **more):
    receivers = Function({"r1": Function({"st": one}), "r2": Function({"st": two})})
    return {"K": Function({"ver": version}), "rcv": receivers, "acks": frozenset(acks), **more}


def test_actions_who_and_what():
    trace = Trace(
        (
            Step(state(0, "serving", "serving")),
            Step(state(0, "paused", "serving", {1, 2}), "Pause"),
            Step(state(1, "paused", "serving", {2}), "Commit"),
            Step(state(1, "serving", "down", {2})),
        )
    )
    assert tell(trace, TYPES) == (
        "  1  at first\n"
        "       K = [ver: 0]\n"
        "       acks = {}\n"
        '       rcv = [r1: [st: "serving"], r2: [st: "serving"]]\n'
        "  2  Pause(r1)\n"
        "       acks + 1\n"
        "       acks + 2\n"
        '       rcv.r1.st: "serving" -> "paused"\n'
        "  3  Commit\n"
        "       K.ver: 0 -> 1\n"
        "       acks - 1\n"
        "  4  a step(r1, r2)\n"
        '       rcv.r1.st: "paused" -> "serving"\n'
        '       rcv.r2.st: "serving" -> "down"'
    )


def test_the_step_variable_says_who():
    def step(**fields):
        return Function({"node": "", "coord": 0, **fields})

    trace = Trace(
        (
            Step(state(0, "a", "a", step=step(name="Init"))),
            Step(state(1, "a", "b", step=step(name="Commit", node="r9", coord=2))),
            Step(state(1, "a", "b", step=step(name="Idle"))),
        ),
        loop=0,
    )
    story = tell(trace, {}).splitlines()
    assert story[4:] == [
        "  2  Commit(r9, 2)",
        "       K.ver: 0 -> 1",
        '       rcv.r2.st: "a" -> "b"',
        "  3  Idle",
        "       nothing changes",
        "     then back to state 1, and so on for ever",
    ]


def test_a_function_that_grows_and_shrinks():
    trace = Trace((Step({"f": Function({"a": 1, "b": 2})}), Step({"f": Function({"b": 2, "c": (3,)})})), loop=1)
    assert tell(trace, {}).splitlines()[2:] == [
        "  2  a step",
        "       f.a is gone",
        "       f.c = <<3>>",
        "     then nothing happens any more",
    ]
