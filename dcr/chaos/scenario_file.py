"""Reading a scenario's file: YAML, each key once, and errors that say what is allowed (docs/chaos.md, *A scenario*)."""

import contextlib
import difflib
import re
import stat
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from dcr.chaos.scenario import Scenario
from dcr.protocol.errors import RefusedError

FILE_BYTES_MAX = 1 << 20

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `(?P<at>[^`]*)`)?")
_AT = re.compile(r".* - at `(?P<at>\$[^`]*)`")
_STEPS = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")
_BRACKETS = re.compile(r"[{,]\s*(?P<key>at|who)\s*:\s*[a-z]+\[")
_COMMENT = re.compile(r"#[^\r\n]*")
_COUNT = re.compile(r"#\d+")
_OPENS = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSES = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}


def read_scenario(path: Path) -> Scenario:
    """Read a scenario's file.

    Raises:
        RefusedError: it cannot be read, is no YAML, has a key twice or an unknown one, or a value that is not allowed;
            names the file, the key and what is allowed.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RefusedError(f"scenario {path}: not a regular file")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as e:
        raise RefusedError(f"scenario {path}: {e.strerror}") from e
    if len(data) > FILE_BYTES_MAX:
        raise RefusedError(f"scenario {path}: more than {FILE_BYTES_MAX} bytes")
    try:
        return parse_scenario(data)
    except RefusedError as e:
        raise RefusedError(f"scenario {path}: {e}") from e


def parse_scenario(data: bytes) -> Scenario:
    """Read a scenario's text; RefusedError names the key and what is allowed."""
    _refuse_comments(data)
    try:
        values = yaml.load(data, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise RefusedError(f"no YAML: {e}{_unquoted(data, e)}") from e
    if not isinstance(values, dict):
        raise RefusedError("no scenario: it must be a mapping with name, deployment and faults")
    try:
        return msgspec.convert(values, Scenario)
    except msgspec.ValidationError as e:
        raise RefusedError(f"{_in_words(str(e))}{_allowed(str(e))}") from e
    except RecursionError as e:
        raise RefusedError("no scenario: it has itself in it (an alias of YAML within what it stands for)") from e


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose mappings have each key once; of two that are the same YAML would drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = (key_node.tag, key_node.value), key_node.start_mark.line + 1
            if key in lines:
                raise RefusedError(f"line {line}: {key_node.value!r} is there twice, first in line {lines[key]}")
            lines[key] = line
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as e:  # of a date that is none, or a number that is too long
            raise RefusedError(f"line {node.start_mark.line + 1}: {node.value[:40]!r}: {e}") from e


def _refuse_comments(data: bytes) -> None:
    """A count begins with what is a comment in YAML, which would leave it out of a fault without a word."""
    text = data.decode(errors="replace")
    for begin, end in _between_tokens_of_faults(text):
        for comment in _COMMENT.finditer(text, begin, end):
            if found := _COUNT.match(comment[0]):
                line = text.count("\n", 0, comment.start()) + 1
                raise RefusedError(
                    f"line {line}: # begins a comment in YAML, so {found[0]} would be left out: put the sentence that "
                    "it ends in quotes; where a comment is meant, put a space after #"
                )


def _between_tokens_of_faults(text: str) -> Iterator[tuple[int, int]]:
    """Where, within the value of ``faults``, YAML has nothing but blanks and comments."""
    depth, last, within = 0, None, False
    with contextlib.suppress(yaml.YAMLError):  # said by whoever loads it
        for token in yaml.scan(text):
            if within and last is not None:
                yield last.end_mark.index, token.start_mark.index
            if depth == 1 and isinstance(last, yaml.KeyToken):
                within = isinstance(token, yaml.ScalarToken) and token.value == "faults"
            depth += isinstance(token, _OPENS) - isinstance(token, _CLOSES)
            last = token


def _unquoted(data: bytes, error: Exception) -> str:
    """A hint, where YAML's short form met the brackets of a sentence; empty if that was not it."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    lines = data.decode(errors="replace").split("\n")
    if mark is None or mark.line >= len(lines) or not (found := _BRACKETS.search(lines[mark.line])):
        return ""
    return (
        f"\nline {mark.line + 1}: in YAML's short form, {{...}}, a sentence with brackets wants quotes: "
        f'{found["key"]}: "receiver[1] at BeginWrite"'
    )


def _in_words(error: str) -> str:
    """An error of msgspec, which speaks of JSON, for whoever writes YAML."""
    for of, word in _WORDS.items():
        error = error.replace(f"Expected `{of}`", f"Expected {word}").replace(f"got `{of}`", f"got {word}")
    return error


def _allowed(error: str) -> str:
    """What is allowed where an error of msgspec points to; empty if it says that itself."""
    if unknown := _UNKNOWN.fullmatch(error):
        known = typing.cast("type[msgspec.Struct]", _type_at(unknown["at"] or "$")).__struct_fields__
        near = difflib.get_close_matches(unknown["field"], known, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        return f"; {meant}known are {', '.join(known)}"
    at = _AT.fullmatch(error)
    of = _type_at(at["at"]) if at is not None else None
    if typing.get_origin(of) is Literal:
        return f"; allowed are {', '.join(v or repr(v) for v in typing.get_args(of))}"
    return ""


def _type_at(path: str) -> Any:
    """The type of what lies at a path such as ``$.faults[...].do`` of a scenario."""
    of: Any = Scenario
    for step in _STEPS.finditer(path):
        of = typing.get_type_hints(of)[step["field"]] if step["field"] else typing.get_args(of)[0]
    return of
