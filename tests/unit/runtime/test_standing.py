"""What a leader tells an operator of engines that do not serve."""

import msgspec

from dcr.protocol.fleet import FAILURE_CHARS_MAX
from dcr.protocol.messages import REASON_CHARS_MAX, AttemptFailed, Intervene, Intervention, Standing, StorageState
from dcr.runtime.fleet_status import fleet_status
from dcr.runtime.intervention import intervened
from dcr.runtime.kept_order import KeptOrder
from dcr.runtime.standing import STANDINGS_MAX, standings
from tests.unit.protocol.leader import D0, TORN, V0, Leader, attempting, leading, succeeding

TORN_BY = TORN.torn_by[0]


def told(at: Leader, *connected: str) -> dict[str, tuple[str, str]]:
    return {s.engine: (s.state, s.why) for s in standings(at.c, [(name, 1) for name in connected])}


def test_a_transition_that_stopped_names_each_engine_that_does_not_serve() -> None:
    at = attempting("clean", "lost", "silent", "torn", attempts_max=1, stop_waits=True)
    epoch = at.epoch
    for e in ("clean", "lost", "torn"):
        at.prepared(e)
    at.expires()  # of the order to prepare
    assert at.reasons[-1] == "Stop"
    at.member(AttemptFailed("torn", 1, epoch, "the loader raised", TORN))
    at.do(at.c.member_lost("lost", 1))
    at.joins("refused", refused={"bias": "unknown operator"})
    at.joins("late")
    at.joins("other", StorageState(None, "", ()))
    assert told(at, "clean", "stranger") == {
        "late": ("waiting", "holds version 0; it is let in when the next attempt opens, or none is open"),
        "lost": ("away", "not connected; it held version 0"),
        "other": ("gated", "holds no known version"),
        "refused": ("refused", "its loader cannot take 1 canonical tensor(s), first bias: unknown operator"),
        "silent": (
            "silent",
            f"not heard of since; time-out: silent did not prepare epoch {epoch}; it held version 0",
        ),
        "stranger": ("unjoined", "connected, and has not asked to be let in; its log says why"),
        "torn": ("gated", f"holds version 0, torn by {TORN_BY}; epoch {epoch} failed there: the loader raised"),
    }


def test_an_engine_that_was_left_out_of_the_last_attempt_is_evicted() -> None:
    at = attempting("a", "b")
    at.prepared("a")
    at.expires()
    assert told(at) == {"b": ("silent", "not heard of since; time-out: b did not prepare epoch 1; it held version 0")}
    at.prepared("b")  # of the epoch before
    assert told(at) == {
        "b": (
            "evicted",
            "holds version 0; the attempt of epoch 2 was opened without it; time-out: b did not prepare epoch 1",
        )
    }
    at.joins("b")  # on another connection, the same process
    assert told(at)["b"][0] == "evicted"
    at.joins("b", incarnation=2)
    assert told(at)["b"][0] == "waiting"


def test_engines_that_serve_and_those_of_an_attempt_under_way_are_not_named() -> None:
    assert told(Leader()) == {}  # K is not known yet
    assert told(leading("a", "b")) == {}
    at = attempting("a")
    assert told(at, "a") == {}
    at.prepared("a", V0)
    at.seals()
    at.acknowledged("a")
    at.folded()
    assert told(at, "a") == {}


def test_a_restore_is_told_and_what_failed_is_forgotten_with_it() -> None:
    at = leading("a")
    at.joins("b", StorageState(None, "", ()))
    assert told(at) == {"b": ("gated", f"being restored, epoch {at.epoch}")}
    at.member(AttemptFailed("b", 1, at.epoch, "no memory", StorageState(None, "", ("restore",))))
    assert told(at)["b"] == ("gated", "holds no known version, torn by restore; its restore failed: no memory")
    at.expires()  # of the pause
    at.prepared("b")
    at.seals(D0)
    at.acknowledged("b")
    assert told(at) == {}


def test_who_has_not_come_to_a_new_leader_is_away() -> None:
    at = succeeding(attempting("a", "b"))
    at.owner_joins()
    at.joins("b", TORN)
    assert told(at) == {
        "a": ("away", "it has not come back since c2 leads"),
        "b": ("gated", f"holds version 0, torn by {TORN_BY}"),
    }


def test_what_is_told_is_bounded() -> None:
    at = attempting("a", attempts_max=1)
    at.prepared("a")
    at.member(AttemptFailed("a", 1, at.epoch, "x" * 10 * FAILURE_CHARS_MAX, TORN))
    assert len(at.c.fleet.engines["a"].failure) <= FAILURE_CHARS_MAX + len(" ...")
    at.joins("b", refused={"bias": "y" * 10 * REASON_CHARS_MAX})
    for n in range(2 * STANDINGS_MAX):
        at.joins(f"e{n:03}", TORN)
    order = Intervene("policy", Intervention.SHOW)
    answer, _ = intervened(at.c, order, fleet_status(at.c), KeptOrder(None, "policy"))  # type: ignore[arg-type]
    assert len(answer.standings) == STANDINGS_MAX
    assert answer.standings_left_out == STANDINGS_MAX + 2
    assert answer.standings[0].engine == "a"
    assert max(len(msgspec.json.encode(s)) for s in answer.standings) < 2 * REASON_CHARS_MAX
    assert isinstance(answer.standings[0], Standing)
