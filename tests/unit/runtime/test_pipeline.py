"""The pipeline: order, bounds, errors and cancellation, whatever the threads do."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.runtime.pipeline import CancelledError, Pipeline, PipelineError, Stage


class Watch:
    """Counts what is on its way, from outside the pipeline."""

    def __init__(self, pauses):
        self.pauses = pauses
        self.lock = threading.Lock()
        self.begun = set()
        self.ended = set()
        self.most = 0

    def first(self, piece):
        with self.lock:
            self.begun.add(piece)
            self.most = max(self.most, len(self.begun) - len(self.ended))
        time.sleep(self.pauses[piece % len(self.pauses)])
        return piece, "first"

    def last(self, taken):
        time.sleep(self.pauses[(taken[0] * 7) % len(self.pauses)])
        with self.lock:
            self.ended.add(taken[0])
        return (*taken, "last")


def pipeline(stages, *, ahead=4, cancelled=None, stop_timeout_s=10.0):
    return Pipeline("p", stages, ahead=ahead, cancelled=cancelled or threading.Event(), stop_timeout_s=stop_timeout_s)


def left():
    return [t.name for t in threading.enumerate() if t.name.startswith("p-")]


@settings(max_examples=40)
@given(
    st.integers(0, 25),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 0, 0.001, 0.003]), min_size=1, max_size=5),
)
def test_results_come_in_order_and_the_bound_holds(pieces, ahead, firsts, lasts, pauses):
    watch = Watch(pauses)
    with pipeline([Stage("a", watch.first, firsts), Stage("b", watch.last, lasts)], ahead=ahead) as p:
        for piece in range(pieces):
            p.put(piece)
        assert p.join() == [(piece, "first", "last") for piece in range(pieces)]
        progress = p.progress()
    assert watch.most <= ahead
    assert {name: (s.waiting, s.running, s.done) for name, s in progress.items()} == {
        "a": (0, 0, pieces),
        "b": (0, 0, pieces),
    }
    assert left() == []


@settings(max_examples=15)
@given(st.integers(0, 11), st.integers(1, 6), st.integers(2, 4))
def test_one_piece_that_is_late_lets_no_more_than_the_bound_overtake_it(late, ahead, threads):
    release, begun = threading.Event(), []

    def work(piece):
        begun.append(piece)
        if piece == late:
            assert release.wait(120)

    with pipeline([Stage("a", work, threads)], ahead=ahead) as p:
        putting = threading.Thread(target=lambda: [p.put(piece) for piece in range(20)])
        putting.start()
        deadline = time.monotonic() + 60
        while len(begun) < late + ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # whatever else would begin, begins
        assert sorted(begun) == list(range(late + ahead))
        release.set()
        putting.join(60)
        assert len(p.join()) == 20
    assert left() == []


@settings(max_examples=30)
@given(st.integers(0, 19), st.sampled_from(["a", "b"]), st.integers(1, 4), st.integers(1, 3))
def test_the_first_error_ends_all_and_leaves_no_thread(bad, where, ahead, threads):
    def work(name):
        def do(piece):
            if (name, piece) == (where, bad):
                raise ZeroDivisionError(str(piece))
            return piece

        return do

    with pytest.raises(ZeroDivisionError, match=str(bad)):  # noqa: PT012, SIM117 - either call may raise it
        with pipeline([Stage(n, work(n), threads) for n in "ab"], ahead=ahead) as p:
            for piece in range(20):
                p.put(piece)
            p.join()
    assert left() == []


@pytest.mark.parametrize("waits_in", ["put", "join"])
def test_cancelling_ends_a_wait_and_what_has_begun_comes_to_its_end(waits_in):
    begun, cancelled, release, ended = threading.Event(), threading.Event(), threading.Event(), []

    def slow(piece):
        begun.set()
        assert release.wait(60)
        ended.append(piece)

    def cancel():
        assert begun.wait(60)
        time.sleep(0.1)  # whoever puts and joins waits by now, most likely
        cancelled.set()
        time.sleep(0.1)
        release.set()

    threading.Thread(target=cancel).start()
    with (  # noqa: PT012 - any of the calls may raise it
        pytest.raises(CancelledError),
        pipeline([Stage("a", slow, 1)], ahead=2, cancelled=cancelled) as p,
    ):
        p.put(0)
        p.put(1)
        if waits_in == "put":
            p.put(2)
        p.join()
    assert ended == [0], "the one that was waiting is dropped"
    assert left() == []


def test_a_stage_that_hangs_is_named_in_time():
    release = threading.Event()
    p = pipeline([Stage("encode", lambda x: x, 1), Stage("deliver", lambda _: release.wait(60), 1)], stop_timeout_s=0.3)
    p.put(0)
    started = time.monotonic()
    while not p.progress()["deliver"].running:
        time.sleep(0.01)
    with pytest.raises(PipelineError, match=r"p: deliver did not end in 0\.3 s"):
        p.close()
    assert time.monotonic() - started < 30  # of a minute
    release.set()
    p._stop_timeout_s = 60.0
    p.close()
    assert left() == []


def test_nothing_starts_without_a_piece():
    with pipeline([Stage("a", lambda x: x, 3)]) as p:
        assert left() == []
        assert p.join() == []


@pytest.mark.parametrize("started", [0, 1, 2, 3])
def test_a_thread_that_cannot_be_started_is_the_error_and_the_others_end(monkeypatch, started):
    begun, start = [], threading.Thread.start

    def starts(thread):
        if len(begun) == started:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    with pipeline([Stage("a", lambda piece: piece, 2), Stage("b", lambda piece: piece, 2)]) as p:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starts)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                p.put(0)
        for call in (lambda: p.put(1), p.join):  # nobody waits for the stages that have no thread
            with pytest.raises(RuntimeError, match="can't start new thread"):
                call()
    assert len(begun) == started
    assert not left()
