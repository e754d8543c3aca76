"""Every place where a role refuses: each `raise RefusedError`, and each guard of a leader's action."""

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from dcr.protocol import conductor, leader, node, owner, rank_attempt, receiver, registrar

ROLES = (conductor, leader, node, owner, rank_attempt, receiver, registrar)

_HELPERS = {"_must"}
"""Functions that raise for their caller: who calls them is the guard."""


@dataclass(frozen=True)
class Guard:
    """One statement that refuses, where it is in the source."""

    file: str
    function: str
    first: int
    last: int
    text: str

    @property
    def name(self) -> str:
        """For people, and stable when lines move."""
        return f"{self.file}: {self.function}: {self.text}"


def _refuses(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
        return isinstance(statement.exc.func, ast.Name) and statement.exc.func.id == "RefusedError"
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _HELPERS


def _of(module: ModuleType) -> list[Guard]:
    source = inspect.getsource(module)
    file = module.__name__.rpartition(".")[2] + ".py"
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name in _HELPERS:
            continue
        for statement in ast.walk(function):
            if isinstance(statement, ast.stmt) and _refuses(statement):
                said = statement.exc.args[0] if isinstance(statement, ast.Raise) else statement.value.args[-1]
                parts = [x.value for x in ast.walk(said) if isinstance(x, ast.Constant)]
                text = "".join(x for x in parts if isinstance(x, str))
                found.append(Guard(file, function.name, statement.lineno, statement.end_lineno, " ".join(text.split())))
    return found


@cache
def guards() -> tuple[Guard, ...]:
    """All of them, in the order of the source."""
    return tuple(g for module in ROLES for g in _of(module))
