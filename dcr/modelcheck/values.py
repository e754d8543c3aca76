"""TLA+ values as TLC prints them, read into immutable Python values.

    integer            int                    set, a..b            frozenset
    string             str                    sequence, tuple      tuple
    TRUE, FALSE        bool                   record, function     Function
    model value        ModelValue

TLC prints a function whose keys are identifiers as a record and one over 1..n as a sequence; the two cannot be told
apart in its text.  `dcr.modelcheck.itf` restores the difference from the specification's type annotations.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from dcr.protocol.errors import RefusedError

DEPTH_MAX = 100
INTERVAL_MAX = 1 << 16
VALUE_BYTES_MAX = 1 << 22

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+|\|->|:>|@@|<<|>>|\.\.|[A-Za-z_]\w*|\S', re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "f": "\f", "r": "\r"}
_CONJUNCT = re.compile(r"^(?:/\\ )?([A-Za-z_]\w*) = ", re.MULTILINE | re.ASCII)


class ValueTextError(RefusedError):
    """Text that is not a value in TLC's notation, or one beyond the bounds."""


@dataclass(frozen=True, slots=True, order=True)
class ModelValue:
    """A value that a configuration file declared by `name = name`; equal to itself alone."""

    name: str


class Function(Mapping["Value", "Value"]):
    """A function or record: an immutable, hashable mapping from arguments (a record's: strings) to values."""

    __slots__ = ("_hash", "_of")

    def __init__(self, of: Mapping["Value", "Value"]) -> None:
        self._of = dict(of)
        self._hash: int | None = None  # most are compared and never hashed

    def __getitem__(self, argument: "Value") -> "Value":
        return self._of[argument]

    def __iter__(self) -> Iterator["Value"]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __eq__(self, other: object) -> bool:
        return self._of == other._of if isinstance(other, Function) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._of.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Function({self._of!r})"


Value: TypeAlias = bool | int | str | ModelValue | tuple["Value", ...] | frozenset["Value"] | Function
State: TypeAlias = Mapping[str, Value]


class _Parser:
    """Recursive descent over the tokens of one value."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = [*_TOKEN.findall(text), ""]
        self.at = 0

    def refuse(self, why: str) -> ValueTextError:
        near = " ".join(self.tokens[max(0, self.at - 3) : self.at + 3]).strip()
        return ValueTextError(f"TLC value, token {self.at} (near `{near[:80]}`): {why}")

    def take(self, want: str) -> None:
        if self.tokens[self.at] != want:
            found = self.tokens[self.at][:40]
            raise self.refuse(f"expected `{want or 'its end'}`, found `{found or 'its end'}`")
        self.at += 1

    def listed(self, end: str, item: Callable[[int], Value], depth: int) -> list[Value]:
        out: list[Value] = []
        if self.tokens[self.at] != end:
            out.append(item(depth))
            while self.tokens[self.at] == ",":
                self.at += 1
                out.append(item(depth))
        self.take(end)
        return out

    def mapping(self, end: str, separator: str, key: Callable[[int], Value], arrow: str, depth: int) -> Function:
        pairs: dict[Value, Value] = {}
        while True:
            name = key(depth)
            self.take(arrow)
            if name in pairs:
                raise self.refuse("an argument occurs twice")
            pairs[name] = self.value(depth)
            if self.tokens[self.at] != separator:
                break
            self.at += 1
        self.take(end)
        return Function(pairs)

    def field(self, _depth: int) -> str:
        name = self.tokens[self.at]
        if not _IDENTIFIER.fullmatch(name):
            raise self.refuse("expected a field name")
        self.at += 1
        return name

    def value(self, depth: int = 0) -> Value:
        if depth > DEPTH_MAX:
            raise self.refuse(f"nested deeper than {DEPTH_MAX}")
        token = self.tokens[self.at]
        self.at += 1
        match token:
            case "{":
                return frozenset(self.listed("}", self.value, depth + 1))
            case "<<":
                return tuple(self.listed(">>", self.value, depth + 1))
            case "[":
                return self.mapping("]", ",", self.field, "|->", depth + 1)
            case "(":
                return self.mapping(")", "@@", self.value, ":>", depth + 1)
            case "TRUE":
                return True
            case "FALSE":
                return False
        return self.scalar(token)

    def scalar(self, token: str) -> Value:
        if _IDENTIFIER.fullmatch(token):
            return ModelValue(token)
        if len(token) > 1 and token[0] == '"':
            return _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), token[1:-1])
        low = self.integer(token)
        if self.tokens[self.at] != "..":
            return low
        high = self.integer(self.tokens[self.at + 1])
        self.at += 2
        if high - low >= INTERVAL_MAX:
            raise self.refuse(f"an interval of more than {INTERVAL_MAX} integers")
        return frozenset(range(low, high + 1))

    def integer(self, token: str) -> int:
        try:
            return int(token)
        except ValueError:
            raise self.refuse(f"unexpected `{token[:40]}`" if token else "the text ends early") from None


@lru_cache(maxsize=1 << 14)
def parse_value(text: str) -> Value:
    """Read one value in TLC's notation.  Results are immutable and remembered: successive states share most of them.

    Args:
        text: At most `VALUE_BYTES_MAX` characters; line breaks between tokens do not matter.

    Raises:
        ValueTextError: Not a value, nested deeper than `DEPTH_MAX`, or an interval of over `INTERVAL_MAX` integers.
    """
    if len(text) > VALUE_BYTES_MAX:
        raise ValueTextError(f"TLC value of {len(text)} characters: at most {VALUE_BYTES_MAX} are read")
    parser = _Parser(text)
    value = parser.value()
    parser.take("")
    return value


def parse_state(text: str) -> dict[str, Value]:
    r"""Read one state, `/\ variable = value` for each variable; values may go over several lines.

    Raises:
        ValueTextError: No variable is there, one occurs twice, or a value is refused.
    """
    parts = _CONJUNCT.split(text)
    names = parts[1::2]
    if parts[0].strip() or not names or len(set(names)) != len(names):
        raise ValueTextError(f"not a state in TLC's notation: `{text[:80]}`")
    return {name: parse_value(body.strip()) for name, body in zip(names, parts[2::2], strict=True)}


def show_value(value: Value) -> str:
    """A value on one line, for people: sets and functions in the order of their printed members."""
    match value:
        case bool():
            return str(value).upper()
        case int():
            return str(value)
        case str():
            return f'"{value}"'
        case ModelValue():
            return value.name
        case tuple():
            return f"<<{', '.join(map(show_value, value))}>>"
        case frozenset():
            return f"{{{', '.join(sorted(map(show_value, value)))}}}"
        case Function():
            return f"[{', '.join(sorted(f'{show_argument(k)}: {show_value(v)}' for k, v in value.items()))}]"


def show_argument(value: Value) -> str:
    """A function's argument or record's field, for people: strings without their quotes."""
    return value if isinstance(value, str) else show_value(value)
