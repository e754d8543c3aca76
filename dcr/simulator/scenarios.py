"""Schedules that somebody thought of: the nastiest ones that the protocol has to survive, by name.

Each is written as what an adversary does, and everything that it leaves alone happens by itself meanwhile, in a fixed
order.  What came of it is an ordinary schedule: it can be kept, told and replayed.
"""

from collections.abc import Callable

import msgspec

from dcr.simulator.scenario import Scenario, forget, stage, took, writes, writing
from dcr.simulator.schedule import Setup
from dcr.simulator.script import Script

SCENARIOS: dict[str, Scenario] = {}


def _setup(*ranks: int, owners: int = 1, gate_mode: str = "sync", policy: str = "coordinator") -> Setup:
    return Setup(7, owners, ranks, 1, 3, 3, gate_mode, ("add", "xor"), policy, cold=False)


def _waiting(*ranks: int, attempts_max: int = 1) -> Setup:
    """Attempts of a push before its transition stops, and waits; successors wait for engines."""
    return msgspec.structs.replace(_setup(*ranks), attempts_max=attempts_max, stop_waits=True, rejoin_waits=True)


def _scenario(
    sentence: str, setup: Setup, shows: tuple[str, ...]
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    def register(script: Callable[[Script], None]) -> Callable[[Script], None]:
        name = script.__name__.strip("_").replace("_", "-")
        SCENARIOS[name] = Scenario(sentence, setup, script, shows)
        return script

    return register


# ---------------------------------------------------------------- the control plane and its leaders


@_scenario(
    "A leader's commit is on its way while another trainer takes over; it arrives when the successor leads: refused.",
    _setup(1, 1),
    ("TakeOver", "Fatal", "a late write that was refused"),
)
def _commit_after_take_over(s: Script) -> None:
    s.do("push", n=1)
    s.until(writes("Commit"))
    s.do("unanswered", "c1", 2)
    s.do("stall", "c1")
    s.do("boot", n=1)
    forget(s)
    s.connect()
    s.until(took("TakeOver"))
    s.do("late_write")
    s.do("wake", "c1")
    s.rest()


@_scenario(
    "A dead leader's commit takes effect after its successor has read K, and before it takes over: the successor is "
    "refused, and the next one finishes what was committed.",
    _setup(1, 1),
    ("TakeOver", "a late write that took effect", "Fatal"),
)
def _commit_before_take_over(s: Script) -> None:
    s.do("push", n=1)
    s.until(writes("Commit"))
    s.do("unanswered", "c1", 2)
    s.do("succeed")
    s.connect()
    s.until(writes("TakeOver"), without=[("answer", "c2")])
    s.do("late_write")
    s.rest()
    s.do("succeed")
    s.connect()


@_scenario(
    "A commit takes effect, its leader dies before it hears so, and whoever waits with that push is told by the next.",
    _setup(1),
    ("TakeOver", "a fold that another leader ordered"),
)
def _answered_too_late(s: Script) -> None:
    s.do("push", n=1)
    s.until(writes("Commit"))
    s.do("answered_last", "c1")
    s.connect()
    s.rest()


@_scenario(
    "The answer to an opening is lost and the write is late; the leader writes it again, and the first one arrives "
    "between the second and its answer.",
    _setup(1, 1, gate_mode="async"),
    ("WriteAgain", "LateWrite"),
)
def _opened_twice(s: Script) -> None:
    s.do("push", n=1)
    s.until(writes("OpenAttempt"))
    s.do("unanswered", "c1", 2)
    s.until(took("WriteAgain"), without=[("answer", "c1")])
    s.do("late_write")
    s.rest()


@_scenario(
    "A leader is asleep with orders under way; its successor abandons and commits the next push; the sleeper's orders "
    "come when all that is over.",
    _setup(1, 1),
    ("TakeOver", "Fatal", "Commit"),
)
def _orders_of_a_sleeper(s: Script) -> None:
    s.do("push", n=1)
    s.until(took("OpenAttempt"))
    s.do("stall", "c1")
    for e in ("e0", "e1"):
        s.do("break", e, 24)
    s.do("boot", n=1)
    s.connect()
    s.rest()
    s.do("push", n=3)
    s.rest()
    for e in ("e0", "e1"):
        s.do("late", e)
    s.rest()
    s.do("wake", "c1")


@_scenario(
    "A transition stops, its push waits for the operator, and the leader dies: its successor waits too, until the "
    "operator speaks.",
    _waiting(1, 1),
    ("Stop", "TakeOver", "a stopped transition that went on", "OpenAttempt absolute forward", "Commit"),
)
def _stopped_until_the_word(s: Script) -> None:
    s.do("push", n=1)
    s.until(writing("e0"))
    s.do("fail_write", "e0")
    s.until(took("Stop"))
    s.rest()
    s.do("succeed")
    s.connect()
    s.rest()
    s.do("resume")
    s.rest()


@_scenario(
    "A leader dies in the middle of an attempt, and one of its engines finds the successor late: the next attempt is "
    "opened without it only when the time for that is over.",
    _waiting(1, 1, attempts_max=2),
    ("TakeOver", "engines that K names are waited for", "Evict", "Commit"),
)
def _an_engine_comes_late(s: Script) -> None:
    s.do("push", n=1)
    s.until(stage("e0", "applying"))
    s.do("succeed")
    s.do("connect", "o0.1")
    s.do("connect", "e0")
    s.rest()
    s.do("run_out", "c2")
    s.rest()
    s.connect()
    s.rest()


# ---------------------------------------------------------------- storage


@_scenario(
    "A write fails half-way, the operator turns the transition back, the write of the way back fails too, and the "
    "leader dies: the next one goes on, backwards.",
    _setup(1, 1),
    ("FailWrite", "RollBack", "OpenAttempt absolute back", "TakeOver"),
)
def _torn_both_ways(s: Script) -> None:
    s.do("push", n=1)
    s.until(writing("e0"))
    s.do("fail_write", "e0")
    s.do("roll_back")
    forget(s)
    s.until(writing("e0"))
    s.do("fail_write", "e0")
    s.do("succeed")
    s.connect()
    s.rest()


@_scenario(
    "Two attempts fail half-way; in the third, which is of the second's kind, payloads of the second arrive.",
    _setup(1),
    ("FailWrite", "OpenAttempt absolute forward"),
)
def _payloads_of_the_attempt_before(s: Script) -> None:
    s.do("push", n=1)
    s.until(writing("e0"))
    s.do("fail_write", "e0")
    s.until(stage("e0", "fenced"))
    s.until(writing("e0"))
    s.do("fail_write", "e0")
    s.rest()
    s.do("run_out", "c1")  # the pause before the third
    s.until(stage("e0", "applying"), without=[("deliver", "e0")])
    for n in range(4, 128, 4):
        s.perhaps("replay", "e0", n)
        for _ in range(3):
            s.perhaps("write", "e0")
    s.rest()


@_scenario(
    "A dense attempt, which repairs a lost baseline, dies half-way; what it tore outside every changed set must not "
    "pass for the candidate's tears.",
    _setup(1, 1),
    ("OwnerRestart", "OpenAttempt dense forward", "FailWrite"),
)
def _torn_by_a_dense_attempt(s: Script) -> None:
    s.do("restart", "o0.1", 0)
    s.connect()
    s.rest()
    s.do("push", n=5)
    s.until(writing("e1"))
    s.do("fail_write", "e1")
    s.rest()


@_scenario(
    "The operator answers a stopped transition with a dense attempt, which dies half-way; then the leader dies, and "
    "its successor, which knows of no such order, is told to go on: absolute payloads do not repair what is torn.",
    _waiting(1, 1),
    ("OpenAttempt dense forward", "FailWrite", "TakeOver", "OpenAttempt absolute forward", "Commit"),
)
def _torn_by_an_order(s: Script) -> None:
    s.do("push", n=1)
    s.until(writing("e0"))
    s.do("fail_write", "e0")
    s.until(took("Stop"))
    s.rest()
    s.do("dense")
    s.until(writing("e0", 0))
    s.do("fail_write", "e0")
    s.rest()
    s.do("succeed")
    s.connect()
    s.rest()
    s.do("resume")
    s.rest()


@_scenario(
    "An engine's gate order is slow: before it is carried out the next attempt has prepared it, written, and torn it.",
    _setup(1),
    ("LoseRecord", "FailWrite", "OpenGate"),
)
def _gate_order_of_another_epoch(s: Script) -> None:
    s.do("lose_record", "e0")
    s.do("gate", "e0")
    s.rest(without=[("gate", "e0")])
    s.do("push", n=1)
    s.until(writing("e0"), without=[("gate", "e0")])
    s.do("fail_write", "e0")
    s.do("gate", "e0")
    s.rest()


def _restored_unheard(s: Script) -> None:
    """A restore of e1 ends, for its owner is lost, before the leader hears that e1 has all of it.

    So the leader, on an older report, opens another one for an engine that holds the version.
    """
    s.do("push", n=1)
    s.until(writing("e1"))
    s.do("fail_write", "e1")
    s.do("give_up", "o0.1", 3)
    forget(s)
    s.until(took("OpenRestore"))
    s.until(stage("e1", "applying"))
    s.until(stage("e1", "acknowledged"), without=[("hear", "c1:e1")])
    s.do("break", "o0.1")
    s.connect()
    s.rest(without=_E1_WAITS)
    s.do("run_out", "c1")
    forget(s)
    s.until(took("OpenRestore"), without=_E1_WAITS)


_E1_WAITS = (("hear", "c1:e1"), ("take", "e1"), ("gate", "e1"))


@_scenario(
    "An engine reads K and orders its gate to open; before it does, it is prepared for a restore of the very epoch "
    "that K names, which a leader ordered on an older report; then the gate order comes.",
    _setup(1, 1),
    ("OpenRestore", "EndRestore", "OpenGate"),
)
def _gate_order_after_a_prepare(s: Script) -> None:
    _restored_unheard(s)
    s.do("poll", "e1")
    s.until(lambda w: w.engines[1].node.opening is not None, without=_E1_WAITS)
    s.until(stage("e1", "fenced"), without=[("hear", "c1:e1"), ("gate", "e1")])
    s.until(writing("e1"), without=[("gate", "e1")])
    s.do("gate", "e1")
    s.rest()


@_scenario(
    "A restore ends too early, when an engine that turns out to hold the version was just prepared for it, in vain: "
    "its gate waits for an epoch that nobody brings, unless it is restored again.",
    _setup(1, 1),
    ("OpenRestore", "EndRestore"),
)
def _prepared_in_vain(s: Script) -> None:
    _restored_unheard(s)
    s.until(stage("e1", "fenced"), without=[("hear", "c1:e1"), ("gate", "e1")])
    s.do("break", "o0.1")
    s.connect()
    s.rest()
    s.do("run_out", "c1")
    s.rest()


# ---------------------------------------------------------------- owners


@_scenario(
    "An owner dies in the middle of its emission and comes back to the same push with other weights; payloads of both "
    "incarnations reach the engine.",
    _setup(1, owners=2),
    ("OwnerRestart", "AttemptFailed"),
)
def _two_incarnations_emit(s: Script) -> None:
    s.do("push", n=1)
    s.until(took("Seal"))
    s.do("restart", "o1.1", 15)
    s.connect()
    s.rest()
    for n in range(0, 48, 3):
        s.perhaps("replay", "e0", n)
    s.rest()


@_scenario(
    "While what was committed is folded, one owner gives its push up and pushes again, and the other starts again and "
    "pushes too, with other weights: neither is told that this is what was committed.",
    _setup(1, owners=2),
    ("Commit", "OwnerRestart", "FinishTransition"),
)
def _pushed_while_it_is_folded(s: Script) -> None:
    s.do("push", n=1)
    s.until(took("Commit"))
    s.do("give_up", "o0.1", 3)
    s.do("push_alone", "o0.1", 1)
    s.do("restart", "o1.1", 15)
    s.connect()
    s.rest()


@_scenario(
    "An owner dies between the first and the last byte of its fold, while a restarted engine waits for its baseline.",
    _setup(1, 1, owners=2),
    ("BeginFold", "OwnerRestart", "EngineRestart", "OpenAttempt dense forward"),
)
def _dies_while_it_folds(s: Script) -> None:
    s.do("push", n=1)
    s.until(took("BeginFold"))
    s.do("crash", "e1", 0)
    s.do("restart", "o0.1", 0)
    s.connect()
    s.rest()
    s.do("run_out", "c1")


@_scenario(
    "A leader, which the guards would let, orders a restore from owners that are in the middle of their fold.",
    _setup(1, 1, policy="any"),
    ("BeginFold", "OpenRestore", "EndFold"),
)
def _restored_from_half_a_fold(s: Script) -> None:
    s.do("push", n=1)
    s.until(writes("Commit"))
    s.do("crash", "e1", 0)
    s.connect()
    s.until(lambda w: w.owners[0].reads)
    s.until(took("BeginFold"), without=[("take", "o0.1")])
    s.rest(without=[("fold", "o0.1")])
    s.rest()


@_scenario(
    "An owner that starts again with other weights takes part in a dense attempt; before it folds what was committed, "
    "a leader that the guards would let orders a restore of it.",
    _setup(1, 1, policy="any"),
    ("OwnerRestart", "OpenAttempt dense forward", "OpenRestore", "EndFold"),
)
def _restored_before_the_fold(s: Script) -> None:
    s.do("restart", "o0.1", _OTHER_WEIGHTS)
    s.connect()
    s.until(writes("Commit"))
    s.do("crash", "e1", 0)
    s.connect()
    s.until(lambda w: w.owners[0].reads)
    s.until(took("OpenRestore"), without=[("read", "o0.1")])
    forget(s)
    s.rest(without=[("read", "o0.1")])
    s.rest()


_OTHER_WEIGHTS = 3 * (4 * 5 + 1)
"""An owner starts again with weights that were never committed, takes them for its baseline, and pushes."""


@_scenario(
    "An owner dies while it folds what a dense attempt committed; the next incarnation, which has other weights, is "
    "told to emit that epoch again, and to fold it.",
    _setup(1, 1),
    ("OwnerRestart", "OpenAttempt dense forward", "BeginFold"),
)
def _another_incarnations_seal(s: Script) -> None:
    s.do("restart", "o0.1", 0)
    s.connect()
    s.rest()
    s.do("push", n=1)
    s.until(took("BeginFold"))
    s.do("restart", "o0.1", 0)
    s.do("push_alone", "o0.1", 1)
    s.do("stray", "o0.1", 1)
    forget(s)
    s.until(took("Seal"))
    s.do("stray", "o0.1", 0)
    s.rest()
    s.connect()
    s.rest()


@_scenario(
    "A push is given up and the next one waits; the leader that heard of the first dies, and its successor meets the "
    "second alone, under the open transition of the first.",
    _setup(1),
    ("TakeOver", "Abandon"),
)
def _the_second_push_alone(s: Script) -> None:
    s.do("push", n=1)
    s.until(stage("e0", "applying"))
    s.do("give_up", "o0.1", 3)
    s.do("push_alone", "o0.1", 1)
    s.do("succeed")
    s.connect()
    s.rest()


@_scenario(
    "With an asynchronous gate everything is staged when the operator abandons; the order to write comes late, over a "
    "connection that is gone, to an engine that never stopped serving.",
    _setup(1, 1, gate_mode="async"),
    ("Stage", "Abandon", "OrderOpenApply"),
)
def _staged_and_abandoned(s: Script) -> None:
    s.do("push", n=1)
    s.until(stage("e0", "staged"))
    s.until(stage("e1", "staged"))
    s.until(took("OrderOpenApply"), without=[("take", "e0")])
    s.do("break", "e0", 24)
    s.do("abandon")
    s.connect()
    s.rest(without=[("late", "e0")])
    s.do("late", "e0")
    s.rest()
