"""ITF, the Informal Trace Format (Apalache ADR-015): one way to keep a trace, whichever checker found it.

    integer   {"#bigint": "n"}           sequence   [x, ...]             function   {"#map": [[argument, value], ...]}
    string    "s"                        tuple      {"#tup": [x, ...]}   record     {field: value}
    boolean   true, false                set        {"#set": [x, ...]}   variant    {"tag": T, "value": x}

TLC's text does not tell a record from a function with string arguments, nor a sequence from a tuple or a function
over 1..n.  Writing therefore takes the variables' types (`dcr.modelcheck.source.variable_types`); what is read back
needs none, since ITF keeps the difference.  Read values are those of `dcr.modelcheck.values`; a variant is the Function
[tag: T, value: x], which is what the usual TLC stand-in for Apalache's Variants module makes of it.
"""

import json
from collections.abc import Mapping
from typing import Any

from dcr.modelcheck.trace import Step, Trace
from dcr.modelcheck.types import Atom, FunctionOf, RecordOf, SeqOf, SetOf, TupleOf, Type, VariantOf
from dcr.modelcheck.values import Function, ModelValue, State, Value, show_value
from dcr.protocol.errors import RefusedError

ITF_BYTES_MAX = 1 << 26
DEPTH_MAX = 100
_PAIR = 2


class ItfError(RefusedError):
    """A document that is not a trace in ITF, or a value that does not have its variable's type."""


def _misfit(value: Value, type_: Type) -> ItfError:
    return ItfError(f"{show_value(value)[:120]} is not of type {type_}; correct the @type annotation of its variable")


def _atom(value: Value, type_: Atom) -> Any:
    match type_.name, value:
        case "Bool", bool():
            return value
        case "Int", int() if not isinstance(value, bool):
            return {"#bigint": str(value)}
        case "Int" | "Bool", _:
            raise _misfit(value, type_)
        case "Str", str():
            return value
        case "Str", _:
            raise _misfit(value, type_)
        case _, str():
            return value
        case _, ModelValue():
            return value.name
    raise _misfit(value, type_)


def _sorted(values: list[Any]) -> list[Any]:
    return sorted(values, key=json.dumps)


def _members(value: Value, fields: tuple[tuple[str, Type], ...], type_: Type) -> dict[str, Any]:
    if not isinstance(value, Function) or set(value) != {name for name, _ in fields}:
        raise _misfit(value, type_)
    return {name: encode(value[name], of) for name, of in fields}


def _function(value: Value, type_: FunctionOf) -> Any:
    pairs = value.items() if isinstance(value, Function) else None
    if isinstance(value, tuple):  # TLC's text for a function over 1..n, and for one over the empty set
        pairs = dict(enumerate(value, 1)).items()
    if pairs is None:
        raise _misfit(value, type_)
    return {"#map": _sorted([[encode(k, type_.argument), encode(v, type_.result)] for k, v in pairs])}


def encode(value: Value, type_: Type) -> Any:
    """A value in ITF's JSON; equal values give equal JSON, in whatever order TLC printed their members.

    Raises:
        ItfError: The value does not have the type.
    """
    match type_, value:
        case Atom(), _:
            return _atom(value, type_)
        case SetOf(), frozenset():
            return {"#set": _sorted([encode(member, type_.element) for member in value])}
        case SeqOf(), tuple():
            return [encode(member, type_.element) for member in value]
        case TupleOf(), tuple() if len(value) == len(type_.elements):
            return {"#tup": [encode(member, of) for member, of in zip(value, type_.elements, strict=True)]}
        case FunctionOf(), _:
            return _function(value, type_)
        case RecordOf(), _:
            return _members(value, type_.fields, type_)
        case VariantOf(), Function():
            tag, options = value.get("tag"), dict(type_.options)
            if isinstance(tag, str) and tag in options:
                return _members(value, (("tag", Atom("Str")), ("value", options[tag])), type_)
    raise _misfit(value, type_)


def decode(document: Any, depth: int = 0) -> Value:
    """A value from ITF's JSON.

    Raises:
        ItfError: No ITF value, one that Apalache could not serialise, or nested deeper than `DEPTH_MAX`.
    """
    if depth > DEPTH_MAX:
        raise ItfError(f"ITF value nested deeper than {DEPTH_MAX}")
    if isinstance(document, bool | int | str):
        return document
    if isinstance(document, list):
        return tuple(decode(member, depth + 1) for member in document)
    if not isinstance(document, dict):
        raise ItfError(f"not an ITF value: {str(document)[:120]}")
    if len(document) == 1:
        ((mark, inner),) = document.items()
        if mark.startswith("#"):
            return _marked(mark, inner, depth)
    if any(field.startswith("#") for field in document):
        raise ItfError(f"not an ITF value: {str(document)[:120]}")
    return Function({field: decode(member, depth + 1) for field, member in document.items()})


def _marked(mark: str, inner: Any, depth: int) -> Value:
    if mark == "#bigint" and isinstance(inner, str):
        return _bigint(inner)
    if isinstance(inner, list):
        match mark:
            case "#set":
                return frozenset(decode(member, depth + 1) for member in inner)
            case "#tup":
                return tuple(decode(member, depth + 1) for member in inner)
            case "#map":
                return _map(inner, depth)
    raise ItfError(f"not an ITF value: {mark}: {str(inner)[:120]}")


def _bigint(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ItfError(f"#bigint holds no integer: {digits[:40]!r}") from None


def _map(pairs: list[Any], depth: int) -> Function:
    if not all(isinstance(pair, list) and len(pair) == _PAIR for pair in pairs):
        raise ItfError("#map holds pairs [argument, value]")
    found = {decode(key, depth + 1): decode(value, depth + 1) for key, value in pairs}
    if len(found) != len(pairs):
        raise ItfError("#map: an argument occurs twice")
    return Function(found)


def dump_trace(trace: Trace, types: Mapping[str, Type], source: str) -> bytes:
    """A trace as one line of ITF JSON.  Actions' names, where known, go into each state's `#meta`.

    Args:
        trace: The same variables in every state.
        types: The type of each variable.
        source: What made the trace, for the reader.

    Raises:
        ItfError: A variable without a type, or a value that is not of its type.
    """
    names = sorted(trace.steps[0].state)
    if untyped := [name for name in names if name not in types]:
        raise ItfError(f"no @type annotation for variable {', '.join(untyped)}")
    states = []
    for index, step in enumerate(trace.steps):
        meta = {"index": index} | ({"action": step.action} if step.action else {})
        states.append({"#meta": meta, **{name: encode(step.state[name], types[name]) for name in names}})
    document: dict[str, Any] = {"#meta": {"format": "ITF", "source": source}, "vars": names, "states": states}
    if trace.loop is not None:
        document["loop"] = trace.loop
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()


def load_trace(data: bytes) -> Trace:
    """Read a trace that Apalache or `dump_trace` wrote.  CONSTANTS in state 0 (Apalache's `params`) are passed over.

    Raises:
        ItfError: Over `ITF_BYTES_MAX`, no JSON, no trace, or a state that lacks a variable.
    """
    if len(data) > ITF_BYTES_MAX:
        raise ItfError(f"ITF of {len(data)} bytes: at most {ITF_BYTES_MAX} are read")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ItfError(f"ITF: no JSON that can be read: {error}") from None
    match document:
        case {"vars": [*names], "states": [*states]} if states and all(isinstance(name, str) for name in names):
            loop = document.get("loop")
        case _:
            raise ItfError("ITF: needs `vars`, a list of names, and `states`, a list of at least one")
    if loop is not None and not (type(loop) is int and 0 <= loop < len(states)):
        raise ItfError(f"ITF: loop {loop} is the index of no state")
    steps: list[Step] = []
    for index, state in enumerate(states):
        steps.append(_step(state, names, index, states[index - 1], steps[-1].state if steps else None))
    return Trace(tuple(steps), loop)


def _step(state: Any, names: list[str], index: int, last: Any, read: State | None) -> Step:
    """One state; `last` is the one before it, and `read` what that was read as: most variables stay as they are."""
    if not isinstance(state, dict) or any(name not in state for name in names):
        raise ItfError(f"ITF: state {index} lacks a variable of `vars`")
    meta = state.get("#meta")
    action = meta.get("action", "") if isinstance(meta, dict) else ""
    if not isinstance(action, str):
        raise ItfError(f"ITF: state {index}: `action` is no string")
    if read is None:
        return Step({name: decode(state[name]) for name in names}, action)
    values = {name: read[name] if state[name] == last[name] else decode(state[name]) for name in names}
    return Step(values, action)
