"""docs/protocol.md and the roles name the same actions."""

import ast
import re
from pathlib import Path

import dcr.protocol
from dcr.protocol.record import CommitRecord, Committed, OpenTransition

SOURCES = Path(dcr.protocol.__file__).parent
ROLES = {"leader": "coordinator", "conductor": "coordinator"}
DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"
ROW = re.compile(
    r"^\| `(\w+)` \| (coordinator|owner|node|receiver) \| .+ \| ((?:D\d+(?:, )?)+) \| .+ \|$", re.MULTILINE
)


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


def test_the_table_of_actions_is_the_code() -> None:
    text = DOCUMENT.read_text()
    rows = ROW.findall(text)
    assert len(rows) == text.count("\n| `") - text.count("\n| `K."), "a row of the table cannot be read"
    named = [(action, role) for action, role, _ in rows]
    assert len(set(named)) == len(named)
    assert set(named) == emitted()
    assert all(1 <= int(n) <= 18 for _, _, decisions in rows for n in re.findall(r"\d+", decisions))


def test_the_document_names_every_field_of_k() -> None:
    named = set(re.findall(r"^\| `K\.([\w.]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    fields = set(CommitRecord.__struct_fields__)
    fields |= {f"open.{f}" for f in OpenTransition.__struct_fields__}
    fields |= {f"committed.{f}" for f in Committed.__struct_fields__}
    assert named == fields - {"open", "committed"}
