"""What is told of things that take long, and what a status says in words."""

import logging
import threading
import time

import pytest

from dcr.runtime import progress_log
from dcr.runtime.progress_log import ProgressLog, Steps, Stuck
from dcr.runtime.refit_status import LastMove, RefitStatus, StageStatus, in_bytes

LOG = logging.getLogger("dcr.test-progress")


def wait(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_goes_on_is_told_after_its_time_and_then_as_often(caplog):
    caplog.set_level(logging.INFO, LOG.name)
    found, looks = {}, []

    def look():
        looks.append(time.monotonic())
        return dict(found)

    progress = ProgressLog(LOG, "test", look, every_s=0.2)
    try:
        wait(lambda: len(looks) > 2)
        assert caplog.messages == []
        began = time.monotonic()
        found["a"] = "a is at work"
        wait(lambda: caplog.messages)
        assert time.monotonic() - began >= 0.2
        wait(lambda: len(caplog.messages) >= 3)
        assert set(caplog.messages) == {"a is at work"}
        assert len(caplog.messages) <= (time.monotonic() - began) / 0.2 + 1
        found.clear()
        told = len(looks)
        wait(lambda: len(looks) > told + 1)
        said = len(caplog.messages)
        began = time.monotonic()
        found["a"] = "again"  # something new, which has its time too
        wait(lambda: len(caplog.messages) > said)
        assert time.monotonic() - began >= 0.2
    finally:
        progress.close()
    assert "test" not in [t.name for t in threading.enumerate()]


def test_a_look_that_fails_is_told_and_not_the_end(caplog):
    caplog.set_level(logging.INFO, LOG.name)
    errors = [ZeroDivisionError("unforeseen")]

    def look():
        if errors:
            raise errors.pop()
        return {"a": "going on"}

    progress = ProgressLog(LOG, "test", look, every_s=0.05)
    wait(lambda: "going on" in caplog.messages)
    progress.close()
    assert "unforeseen" in caplog.text


def test_what_is_stuck_is_a_warning_after_3_s_and_then_each_time_after_twice_as_long(caplog, monkeypatch):
    caplog.set_level(logging.INFO, LOG.name)
    progress = ProgressLog(LOG, "test", dict)
    progress.close()
    now, asked, told = [0], [], []
    monkeypatch.setattr(progress_log.time, "monotonic", lambda: 100.0 + now[0])
    stuck = Stuck(lambda: asked.append(now[0]) or f"stuck, {now[0]} s")
    for second in range(1000):
        now[0] = second
        progress._tell({"a": "a is at work"} if second < 8 else {"a": stuck})
        if len(caplog.messages) > len(told):
            told.append(second)
    assert told == asked == [11, 17, 29, 53, 101, 197, 389, 773]  # not 10: it is no work any more, and has its own time
    assert caplog.messages[1] == "stuck, 17 s"
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_steps_are_told_when_they_begin_and_while_they_last(caplog):
    caplog.set_level(logging.INFO, LOG.name)
    with Steps(LOG, "the thing", every_s=0.1) as step:
        step("one")
        step("two")
        wait(lambda: any("the thing: two, for " in line for line in caplog.messages))
    begun = [line for line in caplog.messages if ", for " not in line]
    assert begun[:2] == ["the thing: one", "the thing: two"]
    assert caplog.messages[-1].startswith("the thing is ready, after ")
    with pytest.raises(ValueError, match="no"), Steps(LOG, "another") as step:
        raise ValueError("no")
    assert not any("another is ready" in line for line in caplog.messages)


def test_a_status_in_words():
    detect = StageStatus("detect", 50, "elements", 200, seconds=1.25)
    deliver = StageStatus("deliver", 3, "payloads", None, 3 << 20, waiting=2)
    assert detect.share == 0.25
    assert deliver.share is None
    assert StageStatus("deliver", 0, "payloads", 0).share == 1.0
    assert str(detect) == "detect 50 of 200 elements (25 %), 1.2 s"
    assert str(deliver) == "deliver 3 payloads, 3.0 MiB, 2 waiting"
    status = RefitStatus(7, "version 3 -> 4, relative", (detect, deliver), "deliver", "t", "t", 12.0)
    assert str(status) == (
        f"epoch 7, version 3 -> 4, relative: {detect}; {deliver}; held up by deliver; nothing has moved for 12 s"
    )


def test_when_anything_moved_last():
    moved = LastMove()
    one = StageStatus("encode", 1, "payloads")
    first = moved.status(1, "w", (one,), "encode")
    time.sleep(0.05)
    still = moved.status(1, "w", (StageStatus("encode", 1, "payloads", seconds=9.0),), "encode")
    assert (still.since, still.moved) == (first.since, first.moved)
    assert still.idle_s >= 0.05
    on = moved.status(1, "w", (StageStatus("encode", 2, "payloads"),), "encode")
    assert on.moved > first.moved
    assert on.idle_s < still.idle_s


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_bytes_for_people(size, said):
    assert in_bytes(size) == said
