"""Type annotations, and where they are found in a module."""

import pytest

from dcr.modelcheck.source import SourceError, read_module, variable_types
from dcr.modelcheck.types import (
    Atom,
    FunctionOf,
    OperatorOf,
    RecordOf,
    SeqOf,
    SetOf,
    TupleOf,
    TypeTextError,
    VariantOf,
    parse_type,
)

INT, STR = Atom("Int"), Atom("Str")


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("Int", INT),
        (" Set( Str )", SetOf(STR)),
        ("Seq(NODE)", SeqOf(Atom("NODE"))),
        ("Str -> Int -> Bool", FunctionOf(STR, FunctionOf(INT, Atom("Bool")))),
        ("(Str -> Int) -> Int", FunctionOf(FunctionOf(STR, INT), INT)),
        ("<<Int, Str>>", TupleOf((INT, STR))),
        ("{ a: Int,\n  b: Set(Str) }", RecordOf((("a", INT), ("b", SetOf(STR))))),
        ("{ a: Int, r }", RecordOf((("a", INT),), "r")),
        ("{}", RecordOf(())),
        ("A(Int) | B({ x: Str })", VariantOf((("A", INT), ("B", RecordOf((("x", STR),)))))),
        ("A(Int) | r", VariantOf((("A", INT),), "r")),
        ("(Int, a) => Set(a)", OperatorOf((INT, Atom("a")), SetOf(Atom("a")))),
        ("() => Int", OperatorOf((), INT)),
        ("$msg -> Set($id)", FunctionOf(RecordOf((("id", INT),)), SetOf(INT))),
    ],
)
def test_types(text, type_):
    assert parse_type(text, {"id": "Int", "msg": "{ id: $id }"}) == type_


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "(",
            "Set(",
            "Set(Int",
            "Set()",
            "Int Int",
            "<<Int",
            "{ a Int }",
            "{ a: Int, a: Str }",
            "-> Int",
            "Int ->",
        ),
        *("(Int, Int)", "$unknown", "$loop", "A(Int) | A(Str)", "A(Int) | Set(Int)", "Int;", "Set(" * 1000, "%"),
    ],
)
def test_no_type(text):
    with pytest.raises(TypeTextError):
        parse_type(text, {"loop": "Set($loop)"})


MODULE = r"""---- MODULE Odd ----
EXTENDS Integers
\* @type: Int;
CONSTANT One
CONSTANTS
  (* @type: Set(Int); *)
  Two, \* @type: Str;
  Three,
  Bare,
  \* @type: (Int) => Int;
  Four(_)
(* @typeAlias: rec = {
     a: Int }; and some words *)
\* @typeAlias: many = Set($rec);
VARIABLES
  \* What it is for.
  \* @type: { all: $many,
  \*          b: Str };
  x
\* @type: (Int) => Int;
\* More words.
LOCAL F(a) == a
G(a) ==
  LET
    \* @type: (Int) => Int;
    H(b) == b
  IN H(a)
====
"""


def test_annotations_are_found(tmp_path):
    path = tmp_path / "Odd.tla"
    path.write_text(MODULE)
    found = {d.name: (d.kind, d.line, d.parameters, d.annotation) for d in read_module(path).declarations}
    x = found.pop("x")
    assert found == {
        "One": ("constant", 4, 0, "Int"),
        "Two": ("constant", 7, 0, "Set(Int)"),
        "Three": ("constant", 8, 0, "Str"),
        "Bare": ("constant", 9, 0, None),
        "Four": ("constant", 11, 1, "(Int) => Int"),
        "F": ("operator", 22, 1, "(Int) => Int"),
        "G": ("operator", 23, 1, None),
        "H": ("operator", 26, 1, "(Int) => Int"),
    }
    assert x[:3] == ("variable", 19, 0)
    assert variable_types(path) == {"x": RecordOf((("all", SetOf(RecordOf((("a", INT),)))), ("b", STR)))}


def test_variables_of_extended_modules(tmp_path):
    (tmp_path / "A.tla").write_text("---- MODULE A ----\nEXTENDS B\nVARIABLE\n  \\* @type: Set($n);\n  a\n====\n")
    (tmp_path / "B.tla").write_text("---- MODULE B ----\n\\* @typeAlias: n = Int;\n\\* @type: $n;\nVARIABLE b\n====\n")
    assert variable_types(tmp_path / "A.tla") == {"a": SetOf(INT), "b": INT}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("---- MODULE A ----\nVARIABLE a\n====\n", r"A\.tla:2: variable a"),
        ("---- MODULE A ----\n\\* @type: Set(;\nVARIABLE a\n====\n", r"A\.tla:3: variable a: type"),
        ("---- MODULE A ----\nB == (\n====\n", r"A\.tla:\d: not TLA\+"),
        ("no module at all", r"A\.tla:\d: not TLA\+"),
    ],
)
def test_a_bad_module_is_named(tmp_path, text, said):
    (tmp_path / "A.tla").write_text(text)
    with pytest.raises((SourceError, TypeTextError), match=said):
        variable_types(tmp_path / "A.tla")


def test_a_missing_module_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"A\.tla: No such file"):
        read_module(tmp_path / "A.tla")
