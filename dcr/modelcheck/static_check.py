r"""What a TLA+ module must hold to before any checker runs: typed, free of what Apalache refuses, actions by name.

Types: every constant, every variable and every operator with parameters has an annotation `\* @type: ...;` that can be
read.  Refused constructs: those for which Apalache has no encoding, see `_REFUSED` and the functions below it.  Names:
each disjunct of `Next` (and of an operator whose name ends in `Next`) is a named operator, since TLC's coverage, its
counterexamples and the replay of traces go by these names.  A group, an operator that is itself a disjunction of named
operators, counts as its disjuncts.

Not checked here: that each disjunct assigns each variable once (TLC finds a missing assignment), `r[f]` on a record
with a variable field, and types themselves (`apalache-mc typecheck`).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from tree_sitter import Node

from dcr.modelcheck.source import Module, SourceError, descendants, read_closure, text_of
from dcr.modelcheck.types import TypeTextError, parse_type

_KNOWN_MODULES = {"Integers", "Naturals", "Sequences", "FiniteSets", "TLC", "Apalache", "Variants"}
_TLC_OPERATORS = {
    *("Print", "PrintT", "Assert", "JavaTime", "TLCGet", "TLCSet", "Permutations", "SortSeq", "RandomElement"),
    *("RandomSubset", "RandomSetOfSubsets", "Any", "ToString", "TLCEval"),
}
_REFUSED = {
    "recursive_declaration": "RECURSIVE has no encoding: write a comprehension, or ApaFoldSet / ApaFoldSeqLeft",
    "unbounded_quantification": "a quantifier without a set: give the set it ranges over",
    "choose": "CHOOSE: say what is chosen, or make it a parameter of the action under a bounded \\E",
    "string_set": "STRING cannot be enumerated: name the set of strings",
    "real_number_set": "Real has no encoding",
    "enabled": "ENABLED has no encoding: belongs in the TLC-only module",
    "fairness": "fairness (WF_, SF_) has no encoding: belongs in the TLC-only module",
    "cdot": "\\cdot has no encoding",
    "leads_to": "~> has no encoding: belongs in the TLC-only module",
    "plus_arrow": "-+-> has no encoding",
}
_INFINITE = {"nat_number_set", "int_number_set"}
_ARITHMETIC = {"plus", "minus", "mul", "slash", "div", "pow", "mod"}


class Finding(msgspec.Struct, frozen=True, order=True):
    """One violation."""

    file: str
    line: int
    rule: str
    """`source`, `type`, `refused` or `action`."""
    said: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.said}"


class _Definitions(msgspec.Struct, frozen=True):
    """What names mean in a module and all that it extends."""

    constants: set[str]
    aliases: dict[str, str]
    bodies: dict[str, Node]
    """The definition of each operator at module level."""
    nullary: set[str]

    @classmethod
    def of(cls, modules: list[Module]) -> "_Definitions":
        bodies, nullary = {}, set()
        for module in modules:
            for node in descendants(module.root):
                body, name = node.child_by_field_name("definition"), node.child_by_field_name("name")
                parent = node.parent.type if node.parent is not None else ""
                if node.type == "operator_definition" and parent in {"module", "local_definition"} and body and name:
                    bodies[text_of(name)] = body
                    if not node.children_by_field_name("parameter"):
                        nullary.add(text_of(name))
        constants = {d.name for m in modules for d in m.declarations if d.kind == "constant" and not d.parameters}
        aliases = {name: text for module in modules for name, text in module.aliases.items()}
        return cls(constants, aliases, bodies, nullary)


def _types(module: Module, definitions: _Definitions) -> Iterator[tuple[int, str, str]]:
    for declared in module.declarations:
        what = f"{declared.kind} {declared.name}"
        if declared.annotation is None:
            if declared.kind != "operator" or declared.parameters:
                yield declared.line, "type", f"{what} has no `\\* @type: ...;` directly before it"
            continue
        try:
            parse_type(declared.annotation, definitions.aliases)
        except TypeTextError as error:
            yield declared.line, "type", f"{what}: {error}"


def _is_constant(node: Node | None, definitions: _Definitions, seen: frozenset[str] = frozenset()) -> bool:
    """Whether an expression is made of numbers, constants and operators without parameters that are."""
    if node is None:
        return False
    name = text_of(node)
    match node.type:
        case "nat_number":
            return True
        case "identifier_ref" if name in definitions.constants:
            return True
        case "identifier_ref" if name in definitions.nullary and name not in seen:
            return _is_constant(definitions.bodies[name], definitions, seen | {name})
        case "parentheses":
            return all(_is_constant(child, definitions, seen) for child in node.named_children)
        case "bound_prefix_op":
            return _is_constant(node.child_by_field_name("rhs"), definitions, seen)
        case "bound_infix_op":
            sides = (node.child_by_field_name("lhs"), node.child_by_field_name("rhs"))
            return _symbol(node) in _ARITHMETIC and all(_is_constant(side, definitions, seen) for side in sides)
    return False


def _symbol(node: Node) -> str:
    symbol = node.child_by_field_name("symbol")
    return symbol.type if symbol is not None else ""


def _refused_node(node: Node, definitions: _Definitions) -> str | None:
    """Why Apalache would refuse this node, or None."""
    parent = node.parent
    if node.type in _REFUSED and node.is_named:
        return _REFUSED[node.type]
    if (
        node.type in _INFINITE
        and parent is not None
        and not (parent.type == "bound_infix_op" and _symbol(parent) in {"in", "notin"})
    ):
        return f"{text_of(node)} cannot be enumerated: only `x \\in {text_of(node)}` may use it"
    if node.type == "bound_infix_op" and _symbol(node) == "dots_2":
        sides = (node.child_by_field_name("lhs"), node.child_by_field_name("rhs"))
        if not all(_is_constant(side, definitions) for side in sides):
            return f"`{text_of(node)}`: a range needs constant bounds; filter a constant range instead"
    if node.type == "module_definition" and any(c.is_named for c in node.children_by_field_name("parameter")):
        return "INSTANCE with parameters has no encoding"
    if node.type == "function_definition":
        name = text_of(node.child_by_field_name("name") or node.named_children[0])
        if any(n.type == "identifier_ref" and text_of(n) == name for n in descendants(node)):
            return f"function {name} calls itself: write a comprehension, or a fold"
    if node.type == "identifier_ref":
        if parent is not None and parent.type == "bound_op" and text_of(node) == "Seq":
            return "Seq(S) cannot be enumerated"
        if text_of(node) in _TLC_OPERATORS and text_of(node) not in definitions.bodies:
            return f"{text_of(node)} is TLC's alone"
    return None


def _refused(module: Module, definitions: _Definitions, local: set[str]) -> Iterator[tuple[int, str, str]]:
    for name in module.extends:
        if name not in _KNOWN_MODULES | local:
            yield 1, "refused", f"EXTENDS {name}: a module that Apalache does not have"
    for number, line in enumerate(text_of(module.root).splitlines(), 1):
        if not line.isascii():
            yield number, "refused", "a character that is not ASCII"
    for node in descendants(module.root):
        if said := _refused_node(node, definitions):
            yield node.start_point[0] + 1, "refused", said


def _disjuncts(node: Node) -> Iterator[Node]:
    r"""The disjuncts of an expression, through lists, infix disjunction, bounded \E and parentheses."""
    inner: Iterable[Node | None] = ()
    match node.type:
        case "disj_list":
            inner = [item.named_children[-1] for item in node.named_children if item.type == "disj_item"]
        case "bound_infix_op" if _symbol(node) == "lor":
            inner = (node.child_by_field_name("lhs"), node.child_by_field_name("rhs"))
        case "bounded_quantification" if text_of(node).startswith("\\E"):
            inner = (node.child_by_field_name("expression"),)
        case "parentheses":
            inner = [child for child in node.named_children if not child.type.endswith("comment")]
        case _:
            yield node
    for child in inner:
        if child is not None:
            yield from _disjuncts(child)


def _applied(node: Node) -> str | None:
    """The operator that an expression applies, if that is all it does."""
    if node.type == "identifier_ref":
        return text_of(node)
    if node.type == "bound_op":
        name = node.child_by_field_name("name")
        return text_of(name) if name is not None else None
    return text_of(node) if node.type == "prefixed_op" else None


def _actions(name: str, definitions: _Definitions, seen: set[str]) -> Iterator[tuple[Node, str]]:
    """Disjuncts of a group that are no named action, as (node, what is wrong)."""
    seen.add(name)
    parts = list(_disjuncts(definitions.bodies[name]))
    for part in parts:
        applied = _applied(part)
        if applied is None:
            yield part, f"a disjunct of {name} is no named action: `{' '.join(text_of(part).split())[:60]}`"
        elif "!" not in applied and applied not in definitions.bodies:
            yield part, f"a disjunct of {name}, {applied}, is defined nowhere"
        elif applied in definitions.bodies and applied not in seen:
            inner = list(_disjuncts(definitions.bodies[applied]))
            if any(_applied(disjunct) is not None for disjunct in inner) and len(inner) > 1:
                yield from _actions(applied, definitions, seen)


def check_module(path: Path) -> list[Finding]:
    """Check one module; what it extends is read for the meaning of names, and checked by calls of its own.

    Returns:
        The violations in the order of the lines; empty if there are none.  A module that is no TLA+ is one violation.
    """
    try:
        modules = read_closure(path)
    except SourceError as error:
        return [Finding(path.name, 1, "source", str(error))]
    module, definitions = modules[0], _Definitions.of(modules)
    found = [*_types(module, definitions), *_refused(module, definitions, {m.path.stem for m in modules})]
    for declared in module.declarations:
        if declared.kind == "operator" and declared.name.endswith("Next") and declared.name in definitions.bodies:
            # A group that an extended module defines is that module's to answer for.
            own = {n.id for n in descendants(module.root)}
            at = [(n, said) for n, said in _actions(declared.name, definitions, set()) if n.id in own]
            found += [(node.start_point[0] + 1, "action", said) for node, said in at]
    return sorted({Finding(path.name, line, rule, said) for line, rule, said in found})
