"""TLC's text, against a printer written for this test and against texts that TLC printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.modelcheck.values import (
    DEPTH_MAX,
    Function,
    ModelValue,
    ValueTextError,
    parse_state,
    parse_value,
    show_value,
)

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(lambda name: name not in {"TRUE", "FALSE"})
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")) | st.sampled_from('\n\t"\\'))
SPACES = st.sampled_from(["", " ", "\n  ", "  \n"])


def quoted(text):
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


@st.composite
def scalars(draw):
    """(printed, value): all of one kind, as TLC's sets are."""
    kind = draw(st.sampled_from(["int", "str", "bool", "model"]))
    if kind == "int":
        value = draw(st.integers())
        return str(value), value
    if kind == "str":
        value = draw(TEXTS)
        return quoted(value), value
    if kind == "bool":
        value = draw(st.booleans())
        return "TRUE" if value else "FALSE", value
    name = draw(NAMES)
    return name, ModelValue(name)


def printed(children):
    """Sets, sequences, records and functions of values, with white space where TLC may break a line."""

    @st.composite
    def build(draw):
        kind = draw(st.sampled_from(["set", "sequence", "record", "function", "interval"]))
        gap = draw(SPACES)
        if kind == "interval":
            low, size = draw(st.integers(-50, 50)), draw(st.integers(0, 5))
            return f"{low}{gap}..{gap}{low + size}", frozenset(range(low, low + size + 1))
        parts = draw(st.lists(children, max_size=4))
        if kind == "set":
            # TLC has no set of a Boolean and a number; in Python TRUE and 1 would be one member.
            parts = [part for part in parts if not isinstance(part[1], bool)]
            return "{" + f"{gap},{gap}".join(text for text, _ in parts) + "}", frozenset(value for _, value in parts)
        if kind == "sequence":
            return "<<" + f",{gap}".join(text for text, _ in parts) + ">>", tuple(value for _, value in parts)
        keys = draw(st.lists(NAMES, min_size=len(parts), max_size=len(parts), unique=True))
        pairs = list(zip(keys, parts, strict=True))
        if not pairs:
            return "<<" + gap + ">>", ()
        value = Function({key: part[1] for key, part in pairs})
        if kind == "record":
            return f"[{gap}" + f",{gap}".join(f"{key} |->{gap}{part[0]}" for key, part in pairs) + f"{gap}]", value
        return "(" + f" @@{gap}".join(f"{quoted(key)} :>{gap}{part[0]}" for key, part in pairs) + ")", value

    return build()


@given(st.recursive(scalars(), printed, max_leaves=20))
def test_what_is_printed_is_read(case):
    text, value = case
    assert parse_value(text) == value
    assert hash(parse_value(text)) == hash(value)


def test_functions_over_any_argument():
    assert parse_value("(<<1, 2>> :> {a} @@ <<3, 4>> :> {})") == Function(
        {(1, 2): frozenset({ModelValue("a")}), (3, 4): frozenset()}
    )
    assert parse_value('("node-a" :> -5 @@ "" :> 0)') == Function({"node-a": -5, "": 0})
    assert parse_value("(FALSE :> TRUE @@ TRUE :> FALSE)") == Function({False: True, True: False})


def test_kinds_do_not_mix():
    assert parse_value("a") != parse_value('"a"')
    assert len(parse_value('{a, "a"}')) == 2
    assert parse_value("<<1>>") != parse_value("{1}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "1 2", "-", '"a', "{1,,2}", "{1", "<<1>", "[a |-> ]", "[a = 1]", "[1 |-> 2]", "[a |-> 1", "(1 :> 2"),
        *(
            "()",
            "1..",
            "1..x",
            "..2",
            "1..99999999",
            "(1 :> 2 @@ 1 :> 3)",
            "[a |-> 1, a |-> 2]",
            "SUBSET {1}",
            "é",
            "#",
        ),
        *("9" * 5000, "<<" * (DEPTH_MAX + 2), "{" * 100_000, "[a |-> " * 5000, "(1 :> " * 5000),
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueTextError):
        parse_value(text)


def test_the_depth_bound_is_exact():
    assert show_value(parse_value("{" * DEPTH_MAX + "}" * DEPTH_MAX)).count("{") == DEPTH_MAX
    with pytest.raises(ValueTextError, match="deeper"):
        parse_value("{" * (DEPTH_MAX + 2) + "}" * (DEPTH_MAX + 2))


def test_a_state():
    text = '/\\ a = [ x |-> 1,\n  y |-> "/\\\\ b = 2" ]\n/\\ b = {}\n'
    assert parse_state(text) == {"a": Function({"x": 1, "y": "/\\ b = 2"}), "b": frozenset()}
    assert parse_state("x = 3\n") == {"x": 3}  # TLC leaves the /\ away where there is one variable


@pytest.mark.parametrize("text", ["", "nothing", "/\\ a = 1\n/\\ a = 2", "noise\n/\\ a = 1", "/\\ a = "])
def test_no_state(text):
    with pytest.raises(ValueTextError):
        parse_state(text)


def test_shown_for_people():
    assert show_value(parse_value('[b |-> {2, 1}, a |-> <<TRUE, "x", m>>]')) == '[a: <<TRUE, "x", m>>, b: {1, 2}]'
