"""Replays every step of a model's whole state graph, and at every state tries every step that is not there."""

from dcr.modelcheck.replay.abstraction import Abstraction
from dcr.modelcheck.replay.branch import branch
from dcr.modelcheck.replay.player import Event, Player
from dcr.modelcheck.replay.replayer import DivergenceError, Replayed, compare
from dcr.modelcheck.replay.trials import ForbiddenError, Trials
from dcr.modelcheck.replay.world import World
from dcr.modelcheck.state_graph import StateGraph
from dcr.protocol.errors import RefusedError


def replay_graph(graph: StateGraph) -> Replayed:
    """Replay the graph of a model of ``RefitTraces.tla``.

    Each state is reached once, by one way, and left by every way.

    Raises:
        DivergenceError: a role refused a step, came to another state, or did what is forbidden.
    """
    done = Replayed()
    (start,) = graph.initial
    player = Player(World(graph.states[start]))
    reached = {start}
    ways: list[tuple[int, Player, tuple[Event, ...]]] = [(start, player, ())]
    while ways:
        node, player, way = ways.pop()
        successors = graph.successors.get(node, ())
        _try_forbidden(graph, node, player, way, done)
        for successor in successors:
            event = Event.of(graph.states[successor]["step"])
            other = branch(player)
            try:
                other.play(event, graph.states[successor])
            except RefusedError as e:
                raise DivergenceError(f"{_told(way, event)}: the code refused it: {e}") from e
            compare(Abstraction(other.world), graph.states[successor], _told(way, event), len(way) + 1)
            done.steps[event.name] += 1
            if successor not in reached:
                reached.add(successor)
                ways.append((successor, other, (*way, event)))
    assert reached == set(graph.states), f"{len(graph.states) - len(reached)} states of the graph were not reached"
    return done


def _try_forbidden(graph: StateGraph, node: int, player: Player, way: tuple[Event, ...], done: Replayed) -> None:
    could = [graph.states[s]["step"] for s in graph.successors.get(node, ())]
    trials = Trials(player, Abstraction(player.world))
    try:
        trials.run(graph.states[node], could)
    except ForbiddenError as e:
        raise DivergenceError(f"after {_told(way)}: {e}") from e
    done += Replayed(0, refused=trials.refused, without_effect=trials.without_effect, refusals=trials.refusals)


def _told(way: tuple[Event, ...], event: Event | None = None) -> str:
    return " ".join(x.name for x in (*way, *((event,) if event is not None else ())))
