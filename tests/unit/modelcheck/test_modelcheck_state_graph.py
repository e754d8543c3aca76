"""State graphs, as the real TLC writes them."""

from pathlib import Path

import pytest

from dcr.modelcheck import tlc
from dcr.modelcheck.state_graph import StateGraphError, read_state_graph

COUNTER = """---- MODULE Counter ----
EXTENDS Integers
VARIABLES n, said
Init == n = 0 /\\ said = "\\\\ \\"quoted\\" {1 -> 2}"
Up == n < 3 /\\ n' = n + 1 /\\ UNCHANGED said
Back == n = 3 /\\ n' = 1 /\\ UNCHANGED said
Stay == UNCHANGED << n, said >>
Next == Up \\/ Back \\/ Stay
Spec == Init /\\ [][Next]_<< n, said >>
====
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """The graph of a counter that goes 0, 1, 2, 3, 1, ..."""
    folder = tmp_path_factory.mktemp("graph")
    (folder / "Counter.tla").write_text(COUNTER)
    (folder / "Counter.cfg").write_text("SPECIFICATION Spec\n")
    path = folder / "graph.dot"
    result = tlc.run(folder / "Counter.tla", folder / "Counter.cfg", heap="256m", graph=path)
    assert (result.verdict, result.distinct_states) == ("ok", 4)
    return path


def test_every_state_and_every_step_between_two(dumped):
    graph = read_state_graph(dumped)
    of = {i: s["n"] for i, s in graph.states.items()}
    assert sorted(of.values()) == [0, 1, 2, 3]
    assert {s["said"] for s in graph.states.values()} == {'\\ "quoted" {1 -> 2}'}
    assert [of[i] for i in graph.initial] == [0]
    steps = {(of[a], of[b]) for a, bs in graph.successors.items() for b in bs}
    assert steps == {(0, 1), (1, 2), (2, 3), (3, 1)}
    assert graph.edges == len(steps)


@pytest.mark.parametrize("lost", [2, 40, 200])
def test_a_file_that_was_cut_off_is_refused(dumped, tmp_path, lost):
    whole = dumped.read_text()
    short = tmp_path / "short.dot"
    short.write_text(whole[:-lost])
    with pytest.raises(StateGraphError, match="cut off"):
        read_state_graph(short)


def test_a_file_that_is_no_graph_is_refused(tmp_path):
    for text in ("", "}\n", "strict digraph DiskGraph {\n}\n"):
        path = Path(tmp_path) / "other.dot"
        path.write_text(text)
        with pytest.raises(StateGraphError, match="no state graph"):
            read_state_graph(path)
