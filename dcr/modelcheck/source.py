"""A TLA+ module as text that was parsed: what it declares, with the type annotation in front of each declaration."""

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import tree_sitter_tlaplus
from tree_sitter import Language, Node, Parser

from dcr.modelcheck.types import Type, TypeTextError, parse_type
from dcr.protocol.errors import RefusedError

SOURCE_BYTES_MAX = 1 << 22
_COMMENTS = {"comment", "block_comment", "block_comment_text"}
_MARKS = re.compile(r"^\s*(?:\\\*+|\(\*+|\*+\)|\*+)|\*+\)\s*$", re.MULTILINE)
_TYPE = re.compile(r"@type:(.*?);", re.DOTALL)
_ALIAS = re.compile(r"@typeAlias:\s*([A-Za-z]\w*)\s*=(.*?);", re.DOTALL)


class SourceError(RefusedError):
    """A TLA+ module that cannot be read."""


class Declaration(msgspec.Struct, frozen=True):
    """A constant, a variable or an operator."""

    kind: str
    """`constant`, `variable` or `operator`."""
    name: str
    line: int
    """1-based."""
    parameters: int
    annotation: str | None
    """What stands between `@type:` and `;` in the comment directly before the declaration."""


class Module(msgspec.Struct, frozen=True):
    """One parsed module."""

    path: Path
    root: Node
    extends: tuple[str, ...]
    declarations: tuple[Declaration, ...]
    aliases: dict[str, str]
    """`@typeAlias: name = text;` of its comments, anywhere in the module."""


@cache
def _parser() -> Parser:
    with warnings.catch_warnings():
        # The grammar's wheel hands over its pointer as an integer, which tree-sitter takes, and calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return Parser(Language(tree_sitter_tlaplus.language()))


def text_of(node: Node) -> str:
    """The source text of a node."""
    return (node.text or b"").decode()


def descendants(node: Node) -> Iterator[Node]:
    """A node and all below it, in the order of the text."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(top.children))


def _comment_before(node: Node, comments: dict[int, Node], source: bytes) -> str:
    """The run of comments that ends directly before a node, only white space between."""
    found: list[str] = []
    at = node.start_byte
    while True:
        at = len(source[:at].rstrip())
        if at not in comments:
            return "\n".join(reversed(found))
        found.append(text_of(comments[at]))
        at = comments[at].start_byte


def _parameters(node: Node) -> int:
    return sum(child.is_named for child in node.children_by_field_name("parameter"))


def _declared(node: Node) -> Iterator[tuple[str, Node, tuple[Node, ...], int]]:
    """(kind, name, nodes before which its comment may stand, parameters) of each name that a node declares."""
    if node.type in {"constant_declaration", "variable_declaration"}:
        names = [child for child in node.named_children if child.type not in _COMMENTS]
        for place in names:
            name = place.child_by_field_name("name") or place
            before = (place, node) if place is names[0] else (place,)
            yield node.type.removesuffix("_declaration"), name, before, _parameters(place)
    elif node.type == "operator_definition" and (name_node := node.child_by_field_name("name")) is not None:
        outer = node.parent
        start = outer if outer is not None and outer.type == "local_definition" else node
        yield "operator", name_node, (start,), _parameters(node)


def read_module(path: Path) -> Module:
    """Parse one module.

    Raises:
        SourceError: No such file, over `SOURCE_BYTES_MAX`, or not TLA+ (with the first line that is not).
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise SourceError(f"module {path}: {error.strerror}; is it in the folder of the manifest?") from None
    if len(source) > SOURCE_BYTES_MAX:
        raise SourceError(f"module {path}: {len(source)} bytes, at most {SOURCE_BYTES_MAX} are read")
    root = _parser().parse(source).root_node
    nodes = list(descendants(root))
    if root.has_error:
        line = next(node.start_point[0] + 1 for node in nodes if node.is_error or node.is_missing)
        raise SourceError(f"{path.name}:{line}: not TLA+ from here on; TLC's own parser may say more")
    comments = {node.end_byte: node for node in nodes if node.type in {"comment", "block_comment"}}
    text = "\n".join(_MARKS.sub("", text_of(node)) for node in sorted(comments.values(), key=lambda n: n.start_byte))
    declarations = []
    for node in nodes:
        for kind, name, starts, parameters in _declared(node):
            before = (_MARKS.sub("", _comment_before(start, comments, source)) for start in starts)
            found = [annotation.strip() for comment in before for annotation in _TYPE.findall(comment)[-1:]]
            line = name.start_point[0] + 1
            declarations.append(Declaration(kind, text_of(name), line, parameters, found[0] if found else None))
    extended = [name for node in nodes if node.type == "extends" for name in node.named_children]
    extends = tuple(text_of(name) for name in extended if name.type == "identifier_ref")
    return Module(path, root, extends, tuple(declarations), {name: of.strip() for name, of in _ALIAS.findall(text)})


def read_closure(path: Path) -> list[Module]:
    """A module and those of its own folder that it extends, directly or not; the module itself comes first.

    Raises:
        SourceError: See `read_module`.
    """
    found: dict[str, Module] = {}
    waiting = [path]
    while waiting:
        at = waiting.pop(0)
        if at.stem not in found:
            found[at.stem] = read_module(at)
            waiting += [near for name in found[at.stem].extends if (near := path.with_name(f"{name}.tla")).exists()]
    return list(found.values())


def variable_types(path: Path) -> dict[str, Type]:
    """The type of every variable that a module has, by itself or through what it extends.

    Raises:
        SourceError: See `read_module`; or a variable is not annotated.
        TypeTextError: An annotation that is no type.
    """
    modules = read_closure(path)
    aliases = {name: text for module in modules for name, text in module.aliases.items()}
    types = {}
    for module in modules:
        for variable in module.declarations:
            if variable.kind == "variable":
                where = f"{module.path.name}:{variable.line}: variable {variable.name}"
                if variable.annotation is None:
                    raise SourceError(f"{where}: has no `\\* @type: ...;` before it")
                try:
                    types[variable.name] = parse_type(variable.annotation, aliases)
                except TypeTextError as error:
                    raise TypeTextError(f"{where}: {error}") from None
    return types
