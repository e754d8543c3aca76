"""The replay can fail: one-line bugs in the roles, guards taken out, and worlds that are not the specification's."""

import re
import sys
from functools import cache
from itertools import pairwise

import msgspec
import pytest
from code_mutants import CODE_MUTANTS, GUARDED_TWICE, ON_A_GRAPH, UNSHOWN, WITHOUT_COUNTERPART
from guards import guards
from spec_models import MANIFEST
from test_replay import TRACED, TRACES, UNSEEN, follows_every_step, replayed

from dcr.modelcheck.replay.abstraction import Abstraction
from dcr.modelcheck.replay.branch import branch
from dcr.modelcheck.replay.content import digest
from dcr.modelcheck.replay.player import Event, Player
from dcr.modelcheck.replay.replayer import DivergenceError, compare, replay
from dcr.modelcheck.replay.world import World
from dcr.modelcheck.trace_set import read_traces
from dcr.protocol.identity import Kind
from dcr.protocol.leader import Phase
from dcr.protocol.record import Direction
from tests.mutation import apply, take_out

QUICK = {
    *("relative_retry", "duplicate_written_again", "ack_before_every_payload", "ack_before_synchronised"),
    *("ack_without_manifest", "commit_without_compare", "failed_attempt_never_ends", "no_mark_before_first_byte"),
    *("commit_on_any_acknowledgement", "stop_without_epoch", "read_back_believed", "stepped_candidate_sealed"),
}
"""Those of the normal run: a second each."""


def _traces(model):
    return read_traces(TRACES / f"{model}.itf.jsonl.zst")


def _caught(mutant, monkeypatch):
    """The first trace that shows it, shows it by the cause that is named; without it the code follows that trace."""
    for trace in _traces(mutant.model):
        with monkeypatch.context() as patch:
            apply(mutant, patch)
            try:
                replay(trace)
            except (DivergenceError, AssertionError) as e:
                shown = str(e) or "an assertion of a role"
            else:
                continue
        assert re.search(rf"\b{mutant.shows}\b", shown), shown
        replay(trace)
        return
    pytest.fail(f"no trace of {mutant.model} shows it")


@pytest.mark.parametrize("mutant", [m for m in CODE_MUTANTS if m.what in QUICK], ids=lambda m: m.what)
def test_caught(mutant, monkeypatch):
    _caught(mutant, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", [m for m in CODE_MUTANTS if m.what not in QUICK], ids=lambda m: m.what)
def test_caught_too(mutant, monkeypatch):
    _caught(mutant, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutant", ON_A_GRAPH, ids=lambda m: m.what)
def test_caught_on_a_graph(mutant, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        apply(mutant, patch)
        with pytest.raises((DivergenceError, AssertionError), match=rf"\b{mutant.shows}\b"):
            follows_every_step(mutant.model, tmp_path)


def test_every_mutant_of_the_specification_has_its_counterpart_or_a_reason_why_not():
    names = [*(m.what for m in (*CODE_MUTANTS, *ON_A_GRAPH)), *UNSHOWN, *WITHOUT_COUNTERPART]
    assert sorted(names) == sorted(m.name for m in MANIFEST.mutants)
    assert {m.what for m in CODE_MUTANTS} >= QUICK


# ---------------------------------------------------------------- guards


def _where_it_refused(guard):
    """Models whose trials met this guard, the one that met it most often for its size first."""
    hits = {}
    for model in TRACED:
        done = replayed(model.name)
        met = sum(n for (f, line), n in done.refusals.items() if f == guard.file and guard.first <= line <= guard.last)
        if met:
            hits[model.name] = met / sum(done.refusals.values())
    return sorted(hits, key=hits.__getitem__, reverse=True)


def _is_missed(model):
    try:
        for trace in _traces(model):
            replay(trace)
    except Exception:  # noqa: BLE001 -- whatever the code does without it, with it it did not
        return True
    return False


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guard", [g for g in guards() if g.name not in UNSEEN], ids=lambda g: g.name)
def test_a_guard_that_is_taken_out_is_missed(guard, monkeypatch):
    models = _where_it_refused(guard)
    assert models
    take_out(sys.modules[f"dcr.protocol.{guard.file.removesuffix('.py')}"], guard.first, guard.last, monkeypatch)
    assert any(map(_is_missed, models)) == (guard.name not in GUARDED_TWICE)


def test_what_is_guarded_twice_is_still_there():
    assert {g.name for g in guards()} >= set(GUARDED_TWICE)


# ---------------------------------------------------------------- the comparison


def _set(of, **fields):
    for name, value in fields.items():
        setattr(of, name, value)
    return True


def _one(of, holds=lambda x: True):
    return next(filter(holds, of.values()), None)


def _record(**fields):
    """Change fields of K, each by a function of what it is."""

    def change(w):
        now = {name: getattr(w.record, name) for name in fields}
        w.record = msgspec.structs.replace(w.record, **{name: fields[name](x) for name, x in now.items()})
        return True

    return change


def _inside(part, field, new):
    """Change a field of K's open transition, or of its last commit."""

    def change(w):
        x = getattr(w.record, part)
        if x is None:
            return False
        changed = msgspec.structs.replace(x, **{field: new(getattr(x, field))})
        w.record = msgspec.structs.replace(w.record, **{part: changed})
        return changed != x

    return change


def _restarted(owners):
    return tuple(msgspec.structs.replace(o, incarnation=o.incarnation + 1) for o in owners)


def _baseline(w):
    first = digest(dict.fromkeys(w.cells, 0), w.cells)
    return w.record.baseline_id != first and _record(baseline_id=lambda _: first)(w)


def _party(parties, holds, change):
    """Change the first coordinator, owner or engine of which something holds."""

    def changed(w):
        x = _one(getattr(w, parties), holds)
        return x is not None and change(x)

    return changed


def _any(x):
    return True


def _coordinator(holds, change):
    return _party("coordinators", holds, change)


def _drop(of):
    """Take one member out of a collection of messages."""

    def change(w):
        x = getattr(w.said, of)
        if x:
            x.pop(next(iter(x))) if isinstance(x, dict) else x.pop()
            return True
        return False

    return change


def _order(field, new):
    """Change what every prepare order of one epoch says."""

    def change(w):
        for order in w.said.orders.values():
            found = {
                e: msgspec.structs.replace(p, **{field: new(getattr(p, field))}) for e, p in order.prepares.items()
            }
            if found and found != order.prepares:
                order.prepares = found
                return True
        return False

    return change


def _base(**fields):
    return _order("base", lambda base: msgspec.structs.replace(base, **fields))


def _payload(field):
    """Change a field of one payload."""

    def change(w):
        if not w.said.payloads:
            return False
        p = w.said.payloads[0]
        names = {f: getattr(p, f) for f in ("identity", "order", "cell", "operation", "old", "new")}
        if field in names:
            names[field] = "p9" if isinstance(names[field], str) else names[field] + 5
        else:
            now = getattr(p.identity, field)
            names["identity"] = msgspec.structs.replace(p.identity, **{field: f"{now}9" if isinstance(now, str) else 9})
        w.said.payloads[0] = type(p)(**names)
        return True

    return change


def _writing(w):
    return bool(w.writing) and w.writing.popitem()


def _late(w):
    return bool(w.late) and w.late.pop()


def _late_write(w):
    if not w.late:
        return False
    w.late[0].revision += 1
    return True


def _seal(w):
    return any(owner.sealed_epochs and _set(owner, _sealed={}) for owner in w.owner.values())


def _bits(w):
    for bits in w.sealed_bits.values():
        cell = next(iter(bits), None)
        if cell is not None:
            bits[cell] += 5
            return True
    return False


def _cell(of):
    def change(w):
        content = of(w)
        content[next(iter(content))] += 5
        return True

    return change


def _in_attempt(c):
    return c.phase is Phase.ATTEMPT


def _prepared(k):
    return k._attempt is not None


def _later(k):
    a = k._attempt
    return _set(a, order=msgspec.structs.replace(a.order, epoch=a.order.epoch + 5))


CHANGES = {
    "K.revision": lambda w: _set(w, revision=w.revision + 1),
    "K.reason": lambda w: _set(w, reason="x"),
    "K.version": _record(version=lambda x: x + 1),
    "K.epoch": _record(epoch=lambda x: x + 1),
    "K.leader": _record(leader=lambda x: f"{x}9"),
    "K.token": _record(fencing_token=lambda x: x + 1),
    "K.baseline": _baseline,
    "K.members": _record(members=lambda _: ()),
    "K.open": lambda w: w.record.open is not None and _record(open=lambda _: None)(w),
    "K.open.target": _inside("open", "target", lambda x: x + 1),
    "K.open.candidate": _inside("open", "candidate", lambda _: ""),
    "K.open.attempts": _inside("open", "attempts", lambda x: x + 1),
    "K.open.kind": _inside("open", "kind", lambda _: Kind.DENSE),
    "K.open.direction": _inside("open", "direction", lambda _: Direction.BACK),
    "K.open.owners": _inside("open", "owners", _restarted),
    "K.open.stopped": _inside("open", "stopped", lambda x: not x),
    "K.committed": lambda w: w.record.committed is not None and _record(committed=lambda _: None)(w),
    "K.committed.version": _inside("committed", "version", lambda x: x + 1),
    "K.committed.epoch": _inside("committed", "epoch", lambda x: x + 1),
    "K.committed.candidate": _inside("committed", "candidate", lambda _: ""),
    "K.committed.direction": _inside("committed", "direction", lambda _: Direction.BACK),
    "K.committed.members": _inside("committed", "members", lambda _: ()),
    "K.committed.root": _inside("committed", "owners", _restarted),
    "writes": _late,
    "writes.record": _late_write,
    "coord.phase": _coordinator(_any, lambda c: _set(c, phase=Phase.FATAL)),
    "coord.revision": _coordinator(_in_attempt, lambda c: _set(c, revision=c.revision + 1)),
    "coord.epoch": _coordinator(_in_attempt, lambda c: _set(c.session, epoch=c.session.epoch + 1)),
    "coord.candidate": _coordinator(_in_attempt, lambda c: _set(c, candidate="")),
    "orders": _drop("orders"),
    "orders.kind": _base(kind=Kind.DENSE),
    "orders.version": _base(version=9),
    "orders.candidate": _base(candidate=""),
    "orders.direction": _order("target", lambda x: x - 1),
    "orders.owners": _order("owners", lambda _: ()),
    "orders.members": _order("incarnation", lambda x: x + 1),
    "applies": _drop("applies"),
    "failed": _drop("failed"),
    "told": _drop("told"),
    "push.candidate": lambda w: _set(w, candidate=w.candidate + 1),
    "push.over": lambda w: _set(w, push_over=not w.push_over),
    "own.incarnation": _party("owner", _any, lambda o: _set(o, incarnation=o.incarnation + 1)),
    "own.base": _party("owner", _any, lambda o: _set(o, base=9)),
    "own.folding": _party("owner", _any, lambda o: _set(o, folding=not o.folding)),
    "own.folded": _party("owner", _any, lambda o: _set(o, folded_epoch=9)),
    "own.fence": _party("owner", _any, lambda o: _set(o, fence=o.fence + 1)),
    "own.emitting": _party("owner", lambda o: o.emitting, lambda o: _set(o, _emitting=None)),
    "own.seal": _seal,
    "tracker": _cell(lambda w: w.baseline),
    "weights": _cell(lambda w: w.weights),
    "net": _drop("payloads"),
    **{f"net.{field}": _payload(field) for field in ("cell", "operation", "old", "new", "epoch", "owner")},
    "net.incarnation": _payload("owner_incarnation"),
    "manifests": _drop("manifests"),
    "manifests.bits": _bits,
    "node.incarnation": _party("node", _any, lambda n: _set(n, incarnation=n.incarnation + 1)),
    "node.gate": _party("node", _any, lambda n: _set(n, gate="x")),
    "node.fence": _party("node", _any, lambda n: _set(n, fence=n.fence + 1)),
    "node.serving": _party("node", _any, lambda n: _set(n, serving=9)),
    "node.opening": _party("node", lambda n: n.opening is None, lambda n: _set(n, opening=(9, 0))),
    "node.version": _party("node", lambda n: n.opening, lambda n: _set(n, opening=(n.opening[0], 9))),
    "rank.fence": _party("receiver", _any, lambda k: _set(k, fence=k.fence + 1)),
    "rank.epoch": _party("receiver", _prepared, _later),
    "rank.stage": _party("receiver", _prepared, lambda k: not k._attempt.failed and _set(k._attempt, failed="x")),
    "rank.seen": _party("receiver", lambda k: k.seen, lambda k: _set(k._attempt, seen={})),
    "rank.writing": _writing,
    "rank.version": _party("receiver", _any, lambda k: _set(k, version=9)),
    "rank.torn": _party("receiver", lambda k: k.torn_by, lambda k: _set(k, torn_by=frozenset())),
    "rank.acknowledged": _party("receiver", _any, lambda k: _set(k, _acknowledged=(9, 1, ""))),
    "mem": _cell(lambda w: _one(w.storage)),
    "prepared": _drop("prepared"),
    "acks": _drop("acks"),
}
"""One change of a world for each variable, and each field, of the specification that the code has."""


def _followed(model):
    """Worlds that followed a trace, each with the specification's state."""
    for trace in _traces(model):
        player = Player(World(trace.steps[0].state))
        for _, step in pairwise(trace.steps):
            player.play(Event.of(step.state["step"]), step.state)
            yield player.world, step.state


@cache
def _told_apart():
    """What the comparison says of each change, made at the first state that has something to change."""
    told = {}
    for world, state in _followed("traces_everything"):
        compare(Abstraction(world), state, "as it is", 1)
        for variable in CHANGES.keys() - told.keys():
            other = branch(world)
            if CHANGES[variable](other):
                told[variable] = _said_of(other, state)
        if told.keys() == CHANGES.keys():
            break
    return told


def _said_of(world, state):
    try:
        compare(Abstraction(world), state, "changed", 1)
    except DivergenceError as e:
        return str(e)
    return "the same"


@pytest.mark.parametrize("variable", CHANGES)
def test_a_world_that_is_not_the_specification_s_is_told_apart(variable):
    assert variable in _told_apart(), "no trace comes to a state in which it can be changed"
    first, *rest = variable.split(".")
    difference = rf"^\s*{first}\b" + "".join(rf".*\b{x}\b" for x in rest)
    assert re.search(difference, _told_apart()[variable], re.MULTILINE), _told_apart()[variable]


def test_every_variable_is_changed():
    world, _ = next(_followed("traces_everything"))
    state = Abstraction(world).state()
    fields = {
        *(f"K.{x}" for x in state["K"]),
        *(f"K.{part}.{x}" for part in ("open", "committed") for x in state["K"][part]),
        *(f"push.{x}" for x in state["push"]),
        *(f"{name}.{x}" for name in ("coord", "own", "node") for x in _one(state[name])),
        *(f"rank.{x}" for x in _one(_one(state["rank"]))),
    }
    assert {name.partition(".")[0] for name in CHANGES} == set(state)
    assert fields <= set(CHANGES)
