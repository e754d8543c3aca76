"""A trace told as a story: at each step the action, who took it, and what changed."""

from collections.abc import Iterator, Mapping

from dcr.modelcheck.trace import Step, Trace
from dcr.modelcheck.types import FunctionOf, Type
from dcr.modelcheck.values import Function, State, Value, show_argument, show_value

STEP = "step"
"""The variable in which a specification writes down the step it takes: a record with the field `name`."""

_UNTOLD = frozenset({STEP, "could", "setting"})
"""What a specification keeps for whoever replays it is no part of the story (``RefitTraces.tla``)."""

_NOTHING: tuple[Value, ...] = ("", 0, False, frozenset(), ())


def _step_record(state: State) -> Function | None:
    record = state.get(STEP)
    return record if isinstance(record, Function) and isinstance(record.get("name"), str) else None


def _who(before: State, after: State, types: Mapping[str, Type]) -> list[str]:
    """By the `step` record, otherwise those whose entry changed in a variable that is a function."""
    record = _step_record(after)
    if record is not None:
        return [show_argument(record[key]) for key in record if key != "name" and record[key] not in _NOTHING]
    found: dict[str, None] = {}
    for name, type_ in types.items():
        old, new = before.get(name), after.get(name)
        if isinstance(type_, FunctionOf) and isinstance(old, Function) and isinstance(new, Function):
            found |= dict.fromkeys(show_argument(key) for key in new if new[key] != old.get(key))
    return list(found)


def changes(path: str, old: Value, new: Value) -> Iterator[str]:
    """What differs between two values, a line for each difference, as deep as both have the same form."""
    if old == new:
        return
    match old, new:
        case Function(), Function():
            for key in sorted({*old, *new}, key=show_argument):
                below = f"{path}.{show_argument(key)}"
                if key not in new:
                    yield f"{below} is gone"
                elif key not in old:
                    yield f"{below} = {show_value(new[key])}"
                else:
                    yield from changes(below, old[key], new[key])
        case frozenset(), frozenset():
            for sign, members in (("+", new - old), ("-", old - new)):
                yield from (f"{path} {sign} {member}" for member in sorted(map(show_value, members)))
        case _:
            yield f"{path}: {show_value(old)} -> {show_value(new)}"


def _title(step: Step, who: list[str]) -> str:
    record = _step_record(step.state)
    name = step.action or (str(record["name"]) if record is not None else "") or "a step"
    return f"{name}({', '.join(who)})" if who else name


def tell(trace: Trace, types: Mapping[str, Type]) -> str:
    """The story, for a terminal.

    Args:
        trace: At least one state.
        types: The variables' types where they are known: they tell nodes' ids from records' fields.  May be empty.
    """
    first = trace.steps[0].state
    shown = sorted(first.keys() - _UNTOLD)
    lines = ["  1  at first", *(f"       {name} = {show_value(first[name])}" for name in shown)]
    for number, (before, step) in enumerate(zip(trace.steps, trace.steps[1:], strict=False), 2):
        lines.append(f"{number:3}  {_title(step, _who(before.state, step.state, types))}")
        changed = [
            change
            for name in sorted(step.state.keys() - _UNTOLD)
            for change in changes(name, before.state[name], step.state[name])
        ]
        lines += [f"       {change}" for change in changed or ["nothing changes"]]
    if trace.loop == trace.length - 1:
        lines.append("     then nothing happens any more")
    elif trace.loop is not None:
        lines.append(f"     then back to state {trace.loop + 1}, and so on for ever")
    return "\n".join(lines)
