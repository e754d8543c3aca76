"""The conjuncts of an action, taken from the specification's own text: which of them hold can then be asked of TLC."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tree_sitter import Node

from dcr.modelcheck.source import descendants, read_closure, text_of

_ACTS = ("prime", "unchanged")
_BINDS = ("bounded_quantification", "let_in")


@dataclass(frozen=True)
class Guard:
    """One conjunct, with all that come before it.

    Attributes:
        text: the conjunct and the remark beside it, as they stand in the module.
        where: the operator that it stands in.
        fragment: an expression that is true if this conjunct, and every one before it, can hold.
    """

    text: str
    where: str
    fragment: str


@dataclass(frozen=True)
class _Definition:
    name: str
    parameters: tuple[str, ...]
    body: Node


class Guards:
    """The guards of the actions of a module, and the operators that say how far one comes.

    Args:
        module: the root module.

    Attributes:
        operators: definitions that the fragments use.
    """

    def __init__(self, module: Path) -> None:
        self.operators: list[str] = []
        self._made: dict[str, list[Guard]] = {}
        self._definitions: dict[str, _Definition] = {}
        for m in read_closure(module):
            for node in descendants(m.root):
                outer = node.parent
                if node.type == "operator_definition" and (outer is None or outer.type != "let_in"):
                    d = _definition(node)
                    self._definitions[d.name] = d
        self._acting: dict[str, bool] = {}

    def of(self, operator: str) -> list[Guard]:
        """Its guards in order, those of the actions that it is made of in their place."""
        if operator not in self._made:
            self._made[operator] = []  # an operator is not made of itself
            d = self._definitions.get(operator)
            if d is not None:
                self._made[operator] = list(self._within(d.body, operator))
        return self._made[operator]

    def _within(self, body: Node, where: str) -> Iterator[Guard]:
        prefix, conjuncts, listed = _conjuncts(body)
        before: list[tuple[Node, str]] = []
        for node, remark in conjuncts:
            if self._acts(node):
                for inner in self._inner(node, where):
                    yield Guard(
                        inner.text, inner.where, _joined(prefix, [*before, (node, inner.fragment)], listed=listed)
                    )
                continue
            before.append((node, text_of(node)))
            shown = " ".join(text_of(node).split()) + (f"   \\* {remark}" if remark else "")
            yield Guard(shown, where, _joined(prefix, before, listed=listed))

    def _inner(self, node: Node, where: str) -> Iterator[Guard]:
        """The guards within a conjunct that acts: of the operator that it applies, or of what it binds."""
        if node.type in ("bound_op", "identifier_ref"):
            name = text_of(node.named_children[0] if node.named_children else node)
            d = self._definitions.get(name)
            if d is None:
                return
            arguments = [text_of(n) for n in node.named_children[1:] if n.type != "comment"]
            for number, inner in enumerate(self.of(name), 1):
                made = f"{name}UpTo{number}"
                formal = f"({', '.join(d.parameters)})" if d.parameters else ""
                column = " " * d.body.start_point[1]
                text = f"{made}{formal} ==\n{column}{inner.fragment}"
                if text not in self.operators:
                    self.operators.append(text)
                yield Guard(inner.text, inner.where, made + (f"({', '.join(arguments)})" if arguments else ""))
        elif node.type in _BINDS:
            yield from self._within(node, where)

    def _acts(self, node: Node) -> bool:
        if any(n.type in _ACTS for n in descendants(node)):
            return True
        names = {text_of(n) for n in descendants(node) if n.type == "identifier_ref"}
        return any(self._operator_acts(name) for name in names if name in self._definitions)

    def _operator_acts(self, name: str) -> bool:
        if name not in self._acting:
            self._acting[name] = False
            self._acting[name] = self._acts(self._definitions[name].body)
        return self._acting[name]


def _definition(node: Node) -> _Definition:
    name = node.child_by_field_name("name")
    assert name is not None
    parameters = tuple(text_of(n) for n in node.children_by_field_name("parameter") if n.is_named)
    body = [n for n in node.named_children if n.type not in ("comment", "block_comment")][-1]
    return _Definition(text_of(name), parameters, body)


def _conjuncts(body: Node) -> tuple[str, list[tuple[Node, str]], bool]:
    """What binds names before the conjuncts, the conjuncts with their remarks, and whether they are a list."""
    node = body
    while node.type in _BINDS:
        node = [n for n in node.named_children if n.type != "comment"][-1]
    start = (body.text or b"")[: node.start_byte - body.start_byte].decode()
    if node.type == "conj_list":
        found: list[tuple[Node, str]] = []
        for child in node.named_children:
            if child.type == "conj_item":
                found.append(([n for n in child.named_children if n.type not in ("bullet_conj", "comment")][-1], ""))
            elif child.type == "comment" and found:
                found[-1] = (found[-1][0], text_of(child).lstrip("\\* ").strip())
        return start, found, True
    leaves: list[Node] = []
    _flatten(node, leaves)
    return start, [(leaf, "") for leaf in leaves], False


def _flatten(node: Node, leaves: list[Node]) -> None:
    named = [n for n in node.named_children if n.type != "comment"]
    if node.type == "bound_infix_op" and any(n.type == "land" for n in named):
        for n in named:
            if n.type != "land":
                _flatten(n, leaves)
    else:
        leaves.append(node)


def _joined(prefix: str, parts: Sequence[tuple[Node, str]], *, listed: bool) -> str:
    """The conjunction at the columns that its parts have in the module, for there a column means something."""
    if not listed:
        return prefix + " /\\ ".join(f"({text})" for _, text in parts)
    lines = []
    for number, (node, text) in enumerate(parts):
        column = node.start_point[1] - len("/\\ ")
        lines.append(("" if not number and not prefix else "\n" + " " * column) + "/\\ " + text)
    return prefix + "".join(lines)
