"""Replays every step of a model's whole state graph, and at every state tries every step that is not there."""

from dcr.modelcheck.replay.abstraction import Abstraction
from dcr.modelcheck.replay.branch import branch
from dcr.modelcheck.replay.player import Event, Player
from dcr.modelcheck.replay.replayer import DivergenceError, Replayed, compare
from dcr.modelcheck.replay.trials import ForbiddenError, Trials
from dcr.modelcheck.replay.world import World
from dcr.modelcheck.state_graph import StateGraph
from dcr.modelcheck.trace import Step, Trace
from dcr.protocol.errors import RefusedError


def replay_graph(graph: StateGraph) -> Replayed:
    """Replay the graph of a model of ``RefitTraces.tla``.

    Each state is reached once, by one way, and left by every way.

    Raises:
        DivergenceError: a role refused a step, came to another state, or did what is forbidden; with the way there.
    """
    done = Replayed()
    (start,) = graph.initial
    player = Player(World(graph.states[start]))
    reached = {start}
    ways: list[tuple[Player, tuple[int, ...]]] = [(player, (start,))]
    while ways:
        player, way = ways.pop()
        _try_forbidden(graph, player, way, done)
        for successor in graph.successors.get(way[-1], ()):
            other, on = branch(player), (*way, successor)
            done.steps[_play(graph, other, on)] += 1
            if successor not in reached:
                reached.add(successor)
                ways.append((other, on))
    assert reached == set(graph.states), f"{len(graph.states) - len(reached)} states of the graph were not reached"
    return done


def _play(graph: StateGraph, player: Player, way: tuple[int, ...]) -> str:
    """Play the last step of a way; its name."""
    state = graph.states[way[-1]]
    event = Event.of(state["step"])
    where = f"state {len(way)}, {event}"
    try:
        player.play(event, state)
        compare(Abstraction(player.world), state, where, len(way) - 1)
    except RefusedError as e:
        raise DivergenceError(f"{where}: the code refused it: {e}", len(way) - 1, _trace(graph, way)) from e
    except DivergenceError as e:
        raise DivergenceError(str(e), e.step, _trace(graph, way)) from e
    return event.name


def _try_forbidden(graph: StateGraph, player: Player, way: tuple[int, ...], done: Replayed) -> None:
    could = [graph.states[s]["step"] for s in graph.successors.get(way[-1], ())]
    trials = Trials(player, Abstraction(player.world))
    try:
        trials.run(graph.states[way[-1]], could)
    except ForbiddenError as e:
        raise DivergenceError(f"at state {len(way)}: {e}", len(way) - 1, _trace(graph, way)) from e
    done += Replayed(0, refused=trials.refused, without_effect=trials.without_effect, refusals=trials.refusals)


def _trace(graph: StateGraph, way: tuple[int, ...]) -> Trace:
    return Trace(tuple(Step(graph.states[node]) for node in way))
