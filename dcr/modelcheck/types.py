"""Apalache's type annotations (Type System 1.2), read into types.

`Int`, `Str`, `Bool`, `SORT`, `Set(T)`, `Seq(T)`, `T -> T`, `<<T, T>>`, `{ field: T }`, `Tag(T) | Tag(T)`, `$alias`,
`(T, T) => T` and type variables (`a`).
"""

import re
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from dcr.protocol.errors import RefusedError

DEPTH_MAX = 32
_TOKEN = re.compile(r"->|=>|<<|>>|\$?[A-Za-z_]\w*|[(){}:,|]|\S", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class TypeTextError(RefusedError):
    """An annotation that is no type."""


class Atom(msgspec.Struct, frozen=True):
    """Int, Str, Bool, an uninterpreted sort such as NODE, or a type variable such as a."""

    name: str


class SetOf(msgspec.Struct, frozen=True):
    """Set(element)."""

    element: "Type"


class SeqOf(msgspec.Struct, frozen=True):
    """Seq(element)."""

    element: "Type"


class TupleOf(msgspec.Struct, frozen=True):
    """<<T, T>>, of at least one element."""

    elements: tuple["Type", ...]


class FunctionOf(msgspec.Struct, frozen=True):
    """Argument -> result."""

    argument: "Type"
    result: "Type"


class RecordOf(msgspec.Struct, frozen=True):
    """{ field: T }; `row` is the type variable that stands for further fields, or empty."""

    fields: tuple[tuple[str, "Type"], ...]
    row: str = ""


class VariantOf(msgspec.Struct, frozen=True):
    """Tag(T) | Tag(T); `row` as in a record."""

    options: tuple[tuple[str, "Type"], ...]
    row: str = ""


class OperatorOf(msgspec.Struct, frozen=True):
    """(T, T) => T: an operator's arguments and result."""

    arguments: tuple["Type", ...]
    result: "Type"


Type: TypeAlias = Atom | SetOf | SeqOf | TupleOf | FunctionOf | RecordOf | VariantOf | OperatorOf


class _Parser:
    def __init__(self, text: str, aliases: Mapping[str, str], depth: int) -> None:
        self.text = text
        self.tokens: list[str] = [*_TOKEN.findall(text), ""]
        self.at = 0
        self.aliases = aliases
        self.depth = depth

    def refuse(self, why: str) -> TypeTextError:
        return TypeTextError(f"type `{self.text.strip()[:120]}`: {why}")

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, want: str = "") -> str:
        token = self.tokens[self.at]
        if want and token != want:
            raise self.refuse(f"expected `{want}`, found `{token or 'its end'}`")
        self.at += 1
        return token

    def name(self) -> str:
        token = self.take()
        if not _NAME.fullmatch(token):
            raise self.refuse(f"expected a name, found `{token or 'its end'}`")
        return token

    def type(self) -> Type:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise self.refuse(f"nested deeper than {DEPTH_MAX}; does an alias name itself?")
        left = self.primary()
        if isinstance(left, VariantOf):
            left = self.variant(left)
        if self.peek() == "->":
            self.take()
            left = FunctionOf(left, self.type())
        self.depth -= 1
        return left

    def variant(self, first: VariantOf) -> VariantOf:
        options, row = first.options, ""
        while not row and self.peek() == "|":
            self.take()
            more = self.primary()
            if isinstance(more, VariantOf):
                options += more.options
            elif isinstance(more, Atom):
                row = more.name
            else:
                raise self.refuse("`|` joins options Tag(T)")
        if len({tag for tag, _ in options}) != len(options):
            raise self.refuse("a tag occurs twice")
        return VariantOf(options, row)

    def listed(self, end: str) -> tuple[Type, ...]:
        found = []
        while self.peek() != end:
            found.append(self.type())
            if self.peek() != ",":
                break
            self.take()
        self.take(end)
        return tuple(found)

    def primary(self) -> Type:
        token = self.take()
        match token:
            case "(":
                inside = self.listed(")")
                if self.peek() == "=>":
                    self.take()
                    return OperatorOf(inside, self.type())
                if len(inside) != 1:
                    raise self.refuse("parentheses hold one type, or the arguments of an operator before `=>`")
                return inside[0]
            case "<<":
                return TupleOf(self.listed(">>"))
            case "{":
                return self.record()
        if token.startswith("$"):
            return self.alias(token[1:])
        if not _NAME.fullmatch(token):
            raise self.refuse(f"unexpected `{token or 'its end'}`")
        if self.peek() != "(":
            return Atom(token)
        self.take()
        inner = self.type()
        self.take(")")
        match token:
            case "Set":
                return SetOf(inner)
            case "Seq":
                return SeqOf(inner)
        return VariantOf(((token, inner),))

    def record(self) -> RecordOf:
        fields: dict[str, Type] = {}
        row = ""
        while self.peek() != "}" and not row:
            name = self.name()
            if self.peek() == ":":
                self.take()
                if name in fields:
                    raise self.refuse(f"field {name} occurs twice")
                fields[name] = self.type()
            else:
                row = name
            if self.peek() != ",":
                break
            self.take()
        self.take("}")
        return RecordOf(tuple(fields.items()), row)

    def alias(self, name: str) -> Type:
        if name not in self.aliases:
            raise self.refuse(f"no @typeAlias defines ${name}")
        return _whole(_Parser(self.aliases[name], self.aliases, self.depth))


def _whole(parser: _Parser) -> Type:
    found = parser.type()
    if parser.peek():
        raise parser.refuse(f"`{parser.peek()}` after its end")
    return found


def parse_type(text: str, aliases: Mapping[str, str]) -> Type:
    """Read a type.

    Args:
        text: What stands between `@type:` and `;`.
        aliases: Alias name -> its text, from the `@typeAlias: name = text;` of the specification.

    Raises:
        TypeTextError: Not a type, an unknown alias, or nested deeper than `DEPTH_MAX`.
    """
    return _whole(_Parser(text, aliases, 0))
