"""docs/protocol.md names what the roles, the commit record and the specification have: everything, and nothing else."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import dcr.protocol
from dcr.protocol.record import CommitRecord, Committed, OpenTransition
from dcr.runtime.settings import Settings
from dcr.simulator.glossary import GLOSSES
from tests.conformance.code_mutants import CODE_MUTANTS, ON_A_GRAPH, UNSHOWN, WITHOUT_COUNTERPART

SOURCES = Path(dcr.protocol.__file__).parent
ROLES = dict.fromkeys(("leader", "registrar", "conductor"), "coordinator")
ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "protocol.md"
SPEC = ROOT / "spec" / "tla"
ROW = re.compile(
    r"^\| `(\w+)` \| (coordinator|owner|node|receiver) \| .+ \| ((?:D\d+(?:, )?)+) \| .+ \|$", re.MULTILINE
)
RECORDS = {
    "K": "record",
    "K.open": "open",
    "K.committed": "committed",
    "coord": "coordinator",
    "own": "owner",
    "node": "node",
    "rank": "rank",
}
"""Variables and fields of the specification whose fields the document maps one by one, with the alias of their type."""


def section(title: str) -> str:
    """One section of the document, without its title."""
    found = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, title
    return found[0]


def tables(text: str) -> list[list[list[str]]]:
    """Every table's rows, as cells, without the two lines of its head."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [[_cells(line) for line in table.splitlines()[2:]] for table in found]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def emitted() -> set[tuple[str, str]]:
    """(action, role) of every step in the code; the coordinator names its writes of K where it orders them."""
    found: set[tuple[str, str]] = set()
    for path in sorted(SOURCES.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name not in ("Step", "_cas"):
                continue
            action = call.args[1]
            if isinstance(action, ast.Constant):
                found.add((action.value, ROLES.get(path.stem, path.stem)))
            else:
                assert ast.unparse(action) == "w.reason", f"{path.name}: a step without a plain name"
    return found


def is_in_the_code(name: str) -> bool:
    """Whether ``Class.attribute`` is a method or an attribute of a class of dcr.protocol."""
    of, _, attribute = name.partition(".")
    for path in SOURCES.glob("*.py"):
        found = getattr(importlib.import_module(f"dcr.protocol.{path.stem}"), of, None)
        if inspect.isclass(found):
            sources = "".join(inspect.getsource(c) for c in found.__mro__ if c.__module__.startswith("dcr."))
            assigned = re.search(rf"\bself\.{attribute}\b[^\n=]*= |^    {attribute}: ", sources, re.MULTILINE)
            return hasattr(found, attribute) or assigned is not None
    return False


def spec_names() -> set[str]:
    """Every variable of the specification, and the fields of those whose type is a record of their own."""
    text = (SPEC / "RefitState.tla").read_text()
    (listed,) = re.findall(r"^vars == << (.*?) >>", text, re.MULTILINE | re.DOTALL)
    found = {*re.split(r",\s*", listed), "push.candidate", "push.over", "step", "could", "setting"} - {"push"}
    for name, alias in RECORDS.items():
        (fields,) = re.findall(rf"@typeAlias: {alias} = {{ (.*) }};", text)
        found |= {f"{name}.{field}" for field in re.findall(r"(\w+): ", fields)}
    return found - ({*RECORDS} - {"K.open", "K.committed"})


def test_the_table_of_actions_is_the_code() -> None:
    text = section("Actions")
    rows = ROW.findall(text)
    assert len(rows) == text.count("\n| `"), "a row of the table cannot be read"
    named = [(action, role) for action, role, _ in rows]
    assert len(set(named)) == len(named)
    assert set(named) == emitted()
    assert all(1 <= int(n) <= 18 for _, _, decisions in rows for n in re.findall(r"\d+", decisions))


def test_stories_explain_each_step_in_the_words_of_the_table() -> None:
    words: dict[str, list[str]] = {}
    for action, _, what in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", section("Actions"), re.MULTILINE):
        words.setdefault(action, []).append(what)
    assert {action: "; or ".join(what) for action, what in words.items()} == GLOSSES


def test_the_document_names_every_field_of_k() -> None:
    named = set(re.findall(r"^\| `K\.([\w.]+)` \|", section("The commit record K"), re.MULTILINE))
    fields = set(CommitRecord.__struct_fields__)
    fields |= {f"open.{f}" for f in OpenTransition.__struct_fields__}
    fields |= {f"committed.{f}" for f in Committed.__struct_fields__}
    assert named == fields - {"open", "committed"}


def test_every_decision_is_explained_and_every_mutant_shows_one() -> None:
    (rows,) = tables(section("The decisions"))
    assert [decision.split()[0] for decision, _, _ in rows] == [f"D{n}" for n in range(1, 19)]
    assert all(quoted(mutants) for _, _, mutants in rows)
    mutants = {m["name"] for m in json.loads((SPEC / "manifest.json").read_text())["mutants"]}
    assert {name for _, _, cell in rows for name in quoted(cell)} == mutants


def test_every_mutant_has_its_row_and_the_row_says_how_it_is_caught() -> None:
    (rows,) = tables(section("The mutants"))
    mutants = json.loads((SPEC / "manifest.json").read_text())["mutants"]
    assert [quoted(row[0]) for row in rows] == [[m["name"]] for m in mutants]
    shown = {m.what: f"`{m.model}`" for m in CODE_MUTANTS} | {m.what: f"graph of `{m.model}`" for m in ON_A_GRAPH}
    for m, (_, caught_by, states, _, code, seeds) in zip(mutants, rows, strict=True):
        property_ = m["caught_by"].rpartition(":")[2]
        assert quoted(caught_by) == ["Converges" if property_ == "property" else property_]
        assert int(states) >= 2
        if m["name"] in shown:
            assert shown[m["name"]] in code
            assert re.fullmatch(r"[\d,]+|no", seeds)
        else:
            assert code == ("not told apart" if m["name"] in UNSHOWN else "none")
            assert (m["name"] in UNSHOWN) != (m["name"] in WITHOUT_COUNTERPART)


def test_every_action_of_the_specification_has_its_methods_and_steps() -> None:
    rows, _, _ = tables(section("Names in the specification and in the code"))
    actions = [name for spec, _, _ in rows for name in quoted(spec)]
    traced = re.findall(r"^(\w+)Step(?:\(.*\))? ==", (SPEC / "RefitTraces.tla").read_text(), re.MULTILINE)
    assert len(traced) > 30
    assert sorted(actions) == sorted({*traced, "Init"})
    methods = [name for _, code, _ in rows for name in quoted(code) if "." in name]
    assert [name for name in methods if not is_in_the_code(name)] == []
    assert {name for _, _, steps in rows for name in quoted(steps)} == {action for action, _ in emitted()}


def test_every_variable_of_the_specification_has_its_place_in_the_code() -> None:
    _, rows, _ = tables(section("Names in the specification and in the code"))
    variables = [name for spec, _ in rows for name in quoted(spec)]
    assert len(set(variables)) == len(variables)
    assert set(variables) == spec_names()
    attributes = [name for _, code in rows for name in quoted(code) if re.fullmatch(r"[A-Z]\w+\.\w+", name)]
    assert len(attributes) > 40
    assert [name for name in attributes if not is_in_the_code(name)] == []


def test_every_timer_of_the_coordinator_is_a_setting() -> None:
    code = (SOURCES / "coordinator.py").read_text()
    found = re.findall(r"_(?:timer\.start|wait)\(\s*(.*?)[,)]", code)
    names = {name for call in found for name in re.findall(r'"(\w+)"', call)}
    pauses = re.search(r'= _PAUSES = "(\w+)", "(\w+)"', code)
    assert pauses
    names |= set(pauses.groups())
    assert names >= {
        "prepare",
        "ack",
        "fold",
        "restore",
        "restore_pause",
        "attempt_pause",
        "owners",
        "members",
        "ranks",
    }
    assert "rejoin" in names
    assert {f"{name}_timeout_s" for name in names} <= set(Settings.__struct_fields__)
