"""Refusals that a hub keeps for who waits: bounded in number and age, and the same is not told again and again."""

import pytest

from dcr.runtime.refusals import LATELY_S, Refusals


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 1000.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr("dcr.runtime.refusals.time", clock)
    return clock


def test_the_same_is_counted_and_told_again_only_after_a_while(clock):
    refusals = Refusals()
    told = []
    for _ in range(30):
        told.append(refusals.add("10.0.0.5: no certificate"))
        clock.now_s += 5
    assert [n for n, tell in enumerate(told) if tell] == [0, 12, 24]
    assert refusals.add("10.0.0.6: another secret")
    assert refusals.lately == ("10.0.0.6: another secret", "10.0.0.5: no certificate (30 times)")


def test_what_was_long_ago_is_forgotten(clock):
    refusals = Refusals()
    refusals.add("old")
    clock.now_s += LATELY_S / 2
    refusals.add("new")
    clock.now_s += LATELY_S / 2
    assert refusals.lately == ("new",)


def test_strangers_without_end_are_not_kept_without_end(clock):
    refusals = Refusals()
    assert all(refusals.add(f"10.0.0.{n}: no certificate") for n in range(1000))
    assert len(refusals.lately) == 64
    assert refusals.lately[0].startswith("10.0.0.999")
