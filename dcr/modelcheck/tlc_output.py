"""What TLC prints with `-tool`: messages in frames that carry a code, read into the facts that matter."""

import re

import msgspec

from dcr.modelcheck.trace import Step, Trace
from dcr.modelcheck.values import parse_state

_FRAME = re.compile(r"@!@!@(STARTMSG|ENDMSG) (\d+)(?::(\d+))? @!@!@\n?")

# Codes of tlc2.output.EC.
_STATE, _STUTTERING, _BACK_TO = 2217, 2218, 2122
_STATES_FOUND, _DEPTH, _SIMULATED, _ACTION_COVERAGE = 2199, 2194, 2210, 2772
_INITIAL = {2190, 2269}
_VIOLATED = {2107, 2110, 2112}
"""Invariant violated by an initial state, invariant, action property."""
_TRACE_FOLLOWS = {2121, 2264}
_ERROR = 1

_NAME = re.compile(r"(?:Invariant|Action property) (\w+) is violated")
_FOUND = re.compile(r"(\d+) states generated, (\d+) distinct states found")
_HEAD = re.compile(r"\d+: <(.+?)(?: line \d+, col \d+.*)?>\s*$")
_COVERED = re.compile(r"<(\S+) line .*>: (\d+):(\d+)")
_SANY = re.compile(r"^(\*\*\*Parse Error\*\*\*|\*\*\* Errors:|Fatal errors while|Parse Error)", re.MULTILINE)
_NUMBER = re.compile(r"\d+")
_SIMULATED_STATE = re.compile(r"^STATE_\d+ ==.*$", re.MULTILINE)


class TlcOutput(msgspec.Struct, frozen=True):
    """The facts of one run; see `TlcResult` for their meaning."""

    violated: str
    message: str
    initial_states: int | None
    distinct_states: int | None
    generated_states: int | None
    depth: int | None
    trace: Trace | None
    coverage: dict[str, tuple[int, int]]


class Message(msgspec.Struct, frozen=True):
    """One framed message."""

    code: int
    severity: int
    body: str


def messages(output: str) -> list[Message]:
    """The framed messages in the order of their ends; a frame may lie within another."""
    found: list[Message] = []
    open_frames: list[tuple[int, int, list[str]]] = []
    at = 0
    for mark in _FRAME.finditer(output):
        if open_frames:
            open_frames[-1][2].append(output[at : mark.start()])
        at = mark.end()
        code = int(mark[2])
        if mark[1] == "STARTMSG":
            open_frames.append((code, int(mark[3] or 0), []))
        elif open_frames and open_frames[-1][0] == code:
            _, severity, parts = open_frames.pop()
            found.append(Message(code, severity, "".join(parts).strip()))
            if open_frames:
                open_frames[-1][2].append(found[-1].body)
    return found


def printed(output: str) -> str:
    """What lies outside of every frame: what the specification printed."""
    parts: list[str] = []
    depth = at = 0
    for mark in _FRAME.finditer(output):
        if not depth:
            parts.append(output[at : mark.start()])
        depth += 1 if mark[1] == "STARTMSG" else -1
        at = mark.end()
    return "".join(parts)


def _loop(found: list[Message], length: int) -> int | None:
    for message in found:
        if message.code == _STUTTERING:
            return length - 1
        if message.code == _BACK_TO and (number := _NUMBER.match(message.body)):
            return int(number[0]) - 1
    return None


def _trace(found: list[Message]) -> Trace | None:
    steps = []
    for message in found:
        if message.code == _STATE:
            head, _, rest = message.body.partition("\n")
            named = _HEAD.match(head)
            action = named[1] if named else ""
            steps.append(Step(parse_state(rest), "" if action == "Initial predicate" else action))
    return Trace(tuple(steps), _loop(found, len(steps))) if steps else None


def _parse_error(output: str) -> str:
    """SANY prints its errors outside any frame: what stands before the frame that says it has finished."""
    found = _SANY.search(output)
    return output[found.start() :].partition("@!@!@")[0].strip() if found else ""


def read_output(output: str) -> TlcOutput:
    """Read what a run printed.

    Raises:
        ValueTextError: A state of the counterexample is not in TLC's notation.
    """
    found = messages(output)
    bodies = {message.code: message.body for message in found}  # of several with one code, the last
    wrong = [m.body for m in found if m.severity == _ERROR and m.code not in _TRACE_FOLLOWS and m.body]
    names = [name[1] for m in found if m.code in _VIOLATED and (name := _NAME.search(m.body))]
    states = _FOUND.search(bodies.get(_STATES_FOUND, ""))
    simulated = _NUMBER.search(bodies.get(_SIMULATED, ""))
    depth = _NUMBER.search(bodies.get(_DEPTH, ""))
    initial = next((_NUMBER.search(m.body) for m in found if m.code in _INITIAL), None)
    covered = [row for m in found if m.code == _ACTION_COVERAGE and (row := _COVERED.match(m.body))]
    coverage: dict[str, tuple[int, int]] = {}
    for row in covered:  # an operator that is used in two places is printed twice
        distinct, all_states = coverage.get(row[1], (0, 0))
        coverage[row[1]] = (distinct + int(row[2]), all_states + int(row[3]))
    return TlcOutput(
        violated=names[0] if names else "",
        message="\n".join(part for part in (*wrong, _parse_error(output)) if part),
        initial_states=int(initial[0]) if initial else None,
        distinct_states=int(states[2]) if states else None,
        generated_states=int(states[1]) if states else int(simulated[0]) if simulated else None,
        depth=int(depth[0]) if depth else None,
        trace=_trace(found),
        coverage=coverage,
    )


def read_behaviour(text: str) -> Trace:
    """Read a file that `-simulate file=...` wrote: `STATE_k ==` before each state, no actions.

    Raises:
        ValueTextError: A state is not in TLC's notation.
    """
    body = text.partition("\n====")[0]
    return Trace(tuple(Step(parse_state(state)) for state in _SIMULATED_STATE.split(body)[1:]))
