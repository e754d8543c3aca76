"""ITF, against documents written by hand from Apalache's ADR-015."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.modelcheck.itf import DEPTH_MAX, ItfError, decode, dump_trace, encode, load_trace
from dcr.modelcheck.trace import Step, Trace
from dcr.modelcheck.trace_set import read_traces, write_traces
from dcr.modelcheck.types import parse_type
from dcr.modelcheck.values import Function, ModelValue


def typed(text, **aliases):
    return parse_type(text, aliases)


@pytest.mark.parametrize(
    ("type_", "value", "document"),
    [
        ("Int", -3, {"#bigint": "-3"}),
        ("Int", 10**30, {"#bigint": "1" + "0" * 30}),
        ("Str", "r1", "r1"),
        ("Bool", True, True),
        ("NODE", ModelValue("n1"), "n1"),
        ("NODE", "n1_OF_NODE", "n1_OF_NODE"),
        ("Set(Int)", frozenset({2, 1}), {"#set": [{"#bigint": "1"}, {"#bigint": "2"}]}),
        ("Seq(Str)", ("a", "b"), ["a", "b"]),
        ("<<Str, Int>>", ("a", 1), {"#tup": ["a", {"#bigint": "1"}]}),
        ("{ ver: Int, st: Str }", Function({"st": "x", "ver": 0}), {"ver": {"#bigint": "0"}, "st": "x"}),
        ("Str -> Bool", Function({"b": False, "a": True}), {"#map": [["a", True], ["b", False]]}),
        ("Str -> Bool", (), {"#map": []}),  # TLC's text for the empty function
        ("Int -> Str", ("x", "y"), {"#map": [[{"#bigint": "1"}, "x"], [{"#bigint": "2"}, "y"]]}),
        ("A(Int) | B(Str)", Function({"tag": "B", "value": "x"}), {"tag": "B", "value": "x"}),
    ],
)
def test_documents(type_, value, document):
    assert encode(value, typed(type_)) == document
    back = decode(json.loads(json.dumps(document)))
    if isinstance(value, ModelValue):
        assert back == value.name
    elif type_.startswith("Int ->"):
        assert back == Function({1: "x", 2: "y"})
    elif value == ():
        assert back == Function({})
    else:
        assert back == value


def test_integers_of_releases_before_0_43():
    assert decode({"#set": [1, 2]}) == {1, 2}


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        *(("Int", True), ("Int", "1"), ("Bool", 1), ("Str", 1), ("Str", ModelValue("a")), ("NODE", 1)),
        *(("Set(Int)", (1,)), ("Set(Int)", frozenset({"a"})), ("Seq(Int)", frozenset()), ("<<Int, Int>>", (1,))),
        *(("{ a: Int }", Function({"a": 1, "b": 2})), ("{ a: Int }", Function({})), ("{ a: Int }", 1)),
        *(("Str -> Int", frozenset()), ("A(Int) | B(Str)", Function({"tag": "C", "value": 1})), ("(Int) => Int", 1)),
    ],
)
def test_a_value_of_another_type_is_refused(type_, value):
    with pytest.raises(ItfError, match="is not of type"):
        encode(value, typed(type_))


@st.composite
def cases(draw, depth=3):
    """(type's text, value of that type)."""
    kinds = ["Int", "Str", "Bool"] if depth == 0 else ["Int", "Str", "Bool", "Set", "Seq", "Tuple", "Record", "Map"]
    kind = draw(st.sampled_from(kinds))
    if kind in {"Int", "Str", "Bool"}:
        return kind, draw({"Int": st.integers(), "Str": st.text(), "Bool": st.booleans()}[kind])
    inner, one = draw(cases(depth=depth - 1))
    match kind:
        case "Set":
            return f"Set({inner})", frozenset({one})
        case "Seq":
            return f"Seq({inner})", (one, one)
        case "Tuple":
            return f"<<{inner}, Str>>", (one, "x")
        case "Record":
            return f"{{ a: {inner}, b: Int }}", Function({"a": one, "b": 7})
    return f"Str -> ({inner})", Function({"k": one, "l": one})


@given(cases(), cases())
def test_a_trace_comes_back(first, second):
    types = {"x": typed(first[0]), "y": typed(second[0])}
    state = {"x": first[1], "y": second[1]}
    trace = Trace((Step(state), Step(state, "Act")), 1)
    assert load_trace(dump_trace(trace, types, "test")) == trace


def test_what_apalache_writes():
    document = {
        "#meta": {"format": "ITF", "format-description": "https://apalache-mc.org/docs/adr/015adr-trace.html"},
        "params": ["N"],
        "vars": ["x"],
        "states": [
            {"#meta": {"index": 0}, "N": {"#bigint": "3"}, "x": {"#set": []}},
            {"#meta": {"index": 1}, "x": {"#set": [{"tag": "A", "value": {"#tup": [True]}}]}},
        ],
    }
    trace = load_trace(json.dumps(document).encode())
    assert [step.state for step in trace.steps] == [
        {"x": frozenset()},
        {"x": frozenset({Function({"tag": "A", "value": (True,)})})},
    ]
    assert trace.loop is None
    assert trace.steps[0].action == ""


@pytest.mark.parametrize(
    "document",
    [
        *("", "nonsense", "[]", "{}", '{"vars": ["x"], "states": []}', '{"vars": "x", "states": [{"x": 1}]}'),
        *('{"vars": ["x"], "states": [{"y": 1}]}', '{"vars": ["x"], "states": [1]}'),
        *('{"vars": ["x"], "states": [{"x": null}]}', '{"vars": ["x"], "states": [{"x": 1.5}]}'),
        '{"vars": ["x"], "states": [{"x": {"#bigint": "x"}}]}',
        '{"vars": ["x"], "states": [{"x": {"#bigint": "1", "a": 1}}]}',
        '{"vars": ["x"], "states": [{"x": {"#map": [[1]]}}]}',
        '{"vars": ["x"], "states": [{"x": {"#map": [[1, 2], [1, 3]]}}]}',
        '{"vars": ["x"], "states": [{"x": {"#unserializable": "Nat"}}]}',
        '{"vars": ["x"], "states": [{"x": {"#set": 1}}]}',
        '{"vars": ["x"], "states": [{"x": 1}], "loop": 1}',
        '{"vars": ["x"], "states": [{"x": 1}], "loop": true}',
        '{"vars": ["x"], "states": [{"#meta": {"action": 1}, "x": 1}]}',
        '{"vars": ["x"], "states": [{"x": ' + "[" * (DEPTH_MAX + 2) + "]" * (DEPTH_MAX + 2) + "}]}",
        '{"vars": ["x"], "states": [{"x": ' + "[" * 200_000 + "]" * 200_000 + "}]}",
    ],
)
def test_no_trace(document):
    with pytest.raises(ItfError):
        load_trace(document.encode())


def test_a_variable_without_a_type_is_named():
    with pytest.raises(ItfError, match="variable y"):
        dump_trace(Trace((Step({"x": 1, "y": 2}),)), {"x": typed("Int")}, "test")


def traces_of(count):
    return [Trace(tuple(Step({"x": n * k, "s": frozenset({k})}, "A" * k) for k in range(5))) for n in range(count)]


def test_a_file_of_traces(tmp_path):
    path, again = tmp_path / "t.itf.jsonl.zst", tmp_path / "u.itf.jsonl.zst"
    types = {"x": typed("Int"), "s": typed("Set(Int)")}
    size = write_traces(path, traces_of(300), types, "test")
    assert size == path.stat().st_size
    assert list(read_traces(path)) == traces_of(300)
    write_traces(again, traces_of(300), types, "test")
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-5], lambda b: b[: len(b) // 2], lambda b: b[:20], lambda _: b"", lambda _: b"{}"]
)
def test_a_damaged_file_of_traces(tmp_path, damage):
    path = tmp_path / "t.itf.jsonl.zst"
    write_traces(path, traces_of(50), {"x": typed("Int"), "s": typed("Set(Int)")}, "test")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ItfError):
        list(read_traces(path))


def test_a_file_whose_middle_was_altered(tmp_path):
    path = tmp_path / "t.itf.jsonl.zst"
    write_traces(path, traces_of(50), {"x": typed("Int"), "s": typed("Set(Int)")}, "test")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ItfError):
        list(read_traces(path))
