"""The whole state graph of a model, as TLC's `-dump dot` writes it."""

import re
from dataclasses import dataclass
from pathlib import Path

from dcr.modelcheck.values import State, parse_state
from dcr.protocol.errors import RefusedError

_NODE = re.compile(r'^(-?\d+) \[label="(.*)"(?:,style = filled)?\]', re.DOTALL)
_EDGE = re.compile(r"^(-?\d+) -> (-?\d+)\b")
_CLOSED = 2
_ESCAPE = re.compile(r"\\(.)")


class StateGraphError(RefusedError):
    """A file that is no state graph as TLC writes it."""


@dataclass(frozen=True)
class StateGraph:
    """Every reachable state, and from each of them every step."""

    states: dict[int, State]
    successors: dict[int, tuple[int, ...]]
    initial: tuple[int, ...]

    @property
    def edges(self) -> int:
        """How many steps there are."""
        return sum(map(len, self.successors.values()))


def read_state_graph(path: Path) -> StateGraph:
    """Read what `tlc.run(..., graph=path)` wrote.  Steps from a state to itself are no steps.

    Raises:
        StateGraphError: no state graph, or one that was cut off.
    """
    states: dict[int, State] = {}
    successors: dict[int, set[int]] = {}
    initial: list[int] = []
    closed = 0  # the last two lines close the inner graph and the outer one
    for line in path.open(encoding="utf-8"):  # a label holds its line breaks escaped: a node or an edge is one line
        closed = closed + 1 if line.strip() == "}" else 0
        if edge := _EDGE.match(line):
            a, b = int(edge[1]), int(edge[2])
            if a != b:
                successors.setdefault(a, set()).add(b)
        elif node := _NODE.match(line):
            states[int(node[1])] = parse_state(_ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], node[2]))
            if ",style = filled]" in line:
                initial.append(int(node[1]))
    if closed != _CLOSED or not initial:
        raise StateGraphError(f"{path}: no state graph of TLC, or one that was cut off; make it again")
    return StateGraph(states, {a: tuple(sorted(b)) for a, b in successors.items()}, tuple(initial))
