"""One-line bugs: a function of the code is made anew with a piece of its source replaced or taken out."""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Mutant:
    """A bug."""

    what: str
    of: Any
    """The class, or the modules that name the function."""
    name: str
    old: str
    new: str


def apply(m: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bug, until the patch is undone."""
    first = m.of[0] if isinstance(m.of, tuple) else m.of
    found = vars(first)[m.name]
    function: Callable[..., object] = found.fget if isinstance(found, property) else found
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(m.old) == 1, f"{m.what}: the line has changed; bring this mutant up to date"
    made = _made(source.replace(m.old, m.new), function.__globals__, m.name)
    for of in m.of if isinstance(m.of, tuple) else (m.of,):
        monkeypatch.setattr(of, m.name, made)


def take_out(module: ModuleType, first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the statement on these lines out of its method, until the patch is undone.

    Args:
        module: where the class is.
        first: the statement's first line, as the module counts them.
        last: its last line.
        monkeypatch: undoes it.
    """
    source = inspect.getsource(module)
    lines = source.splitlines()
    (of, method) = _method_at(ast.parse(source), first)
    indent = lines[first - 1][: -len(lines[first - 1].lstrip())]
    lines[first - 1 : last] = [f"{indent}pass", *[""] * (last - first)]
    start = min(x.lineno for x in (method, *method.decorator_list)) - 1
    text = textwrap.dedent("\n".join(lines[start : method.end_lineno]))
    made = _made(text, vars(module), method.name)
    monkeypatch.setattr(vars(module)[of.name], method.name, made)


def _method_at(tree: ast.Module, line: int) -> tuple[ast.ClassDef, ast.FunctionDef]:
    found = [
        (of, method)
        for of in tree.body
        if isinstance(of, ast.ClassDef)
        for method in of.body
        if isinstance(method, ast.FunctionDef) and method.lineno <= line <= (method.end_lineno or 0)
    ]
    assert len(found) == 1, f"line {line} is in no method"
    return found[0]


def _made(source: str, names: dict[str, Any], name: str) -> object:
    made: dict[str, Any] = {}
    exec(compile(source, f"mutant of {name}", "exec"), names, made)
    return made[name]
