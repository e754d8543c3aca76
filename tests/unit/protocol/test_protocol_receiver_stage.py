"""The receiver behind an asynchronous gate: what it holds, when it is written, and when it is let go of."""

from collections.abc import Callable

import pytest
from one_rank import ABSOLUTE, D0, RELATIVE, at, identity, manifest, prepare, refused, without_steps, write

from dcr.protocol.identity import manifest_root
from dcr.protocol.messages import StorageState
from dcr.protocol.receiver import (
    ApplyStaged,
    DropStage,
    Hold,
    RankAcknowledged,
    RankPrepared,
    RankStaged,
    Receiver,
    Synchronise,
)
from dcr.protocol.step import Step


def staging(payloads: int = 1) -> Receiver:
    """Prepared to stage epoch 1; so many payloads of the first owner are held."""
    r = Receiver("e", "policy", D0, payloads_max=3)
    assert without_steps(r.prepare(prepare(1, stage=True), at(1))) == [RankPrepared(1, StorageState(0, D0, ()))]
    for n in range(payloads):
        assert r.payload(identity(1, n), RELATIVE, f"x{n}", 1) == [Hold(identity(1, n))]
    return r


@pytest.mark.parametrize("sealed_first", [True, False])
def test_what_is_staged_is_written_only_after_open_apply(*, sealed_first: bool) -> None:
    r = staging(0 if sealed_first else 2)
    refused(r, "open_apply", "policy", 1, why="not staged here yet")
    seals = [manifest(1, "o0", 2), manifest(1, "o1", 0)]
    effects = [e for m in seals for e in r.manifest(m)]
    if sealed_first:
        assert without_steps(effects) == []
        assert r.payload(identity(1, 1), RELATIVE, "x1", 1) == [Hold(identity(1, 1))]
        assert r.stage == "fenced"
        effects = r.payload(identity(1, 0), RELATIVE, "x0", 1)
        assert effects.pop(0) == Hold(identity(1, 0))
    assert effects[-2:] == [Step("e", "Stage", 1), RankStaged(1)]
    assert (r.stage, r.state) == ("staged", StorageState(0, D0, ()))
    assert r.payload(identity(1, 0), RELATIVE, "x0", 1) == []  # a duplicate
    assert r.manifest(seals[0]) == []
    assert r.open_apply("policy", 1) == [Step("e", "OpenApply", 1), ApplyStaged(1)]
    assert r.state.clean
    assert write(r, identity(1, 0)) == []
    assert r.payload(identity(1, 0), RELATIVE, "x0", 1) == []
    assert write(r, identity(1, 1)) == [Synchronise(1)]
    assert r.state.torn_by == ("w",)
    root = manifest_root({m.owner: m.digest() for m in seals})
    assert without_steps(r.synchronised(1)) == [RankAcknowledged(1, root)]
    assert r.learn(at(2))[:-1] == []  # nothing is held any more


def test_a_stage_of_nothing_is_complete_at_once() -> None:
    r = staging(0)
    effects = [e for o in ("o0", "o1") for e in r.manifest(manifest(1, o, 0))]
    assert without_steps(effects) == [RankStaged(1)]
    assert without_steps(r.open_apply("policy", 1)) == [ApplyStaged(1), Synchronise(1)]


@pytest.mark.parametrize("by", ["learn", "prepare"])
@pytest.mark.parametrize("payloads", [0, 2])
def test_a_fenced_stage_is_dropped_and_storage_stays_clean(by: str, payloads: int) -> None:
    r = staging(payloads)
    drop = [DropStage(1)] if payloads else []
    effects = r.learn(at(2)) if by == "learn" else r.prepare(prepare(2, stage=True), at(2))
    assert without_steps(effects)[:-1] == drop
    assert r.state == StorageState(0, D0, ())
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []


def test_a_stage_that_is_being_written_is_dropped_too() -> None:
    r = staging(2)
    for m in (manifest(1, "o0", 2), manifest(1, "o1", 0)):
        r.manifest(m)
    r.open_apply("policy", 1)
    write(r, identity(1))
    assert without_steps(r.learn(at(2)))[:-1] == [DropStage(1)]
    assert r.state.torn_by == ("w",)


@pytest.mark.parametrize(
    ("contradict", "why"),
    [
        (lambda r: r.payload(identity(1), RELATIVE, "other", 1), "twice with different bytes"),
        (lambda r: r.payload(identity(1, 1), ABSOLUTE, "x1", 1), "made against"),
        (lambda r: r.manifest(manifest(1, "o0", 0)), "not the one that its owner's manifest lists"),
        (lambda r: [e for n in (1, 2, 3) for e in r.payload(identity(1, n), RELATIVE, "x", 1)][2:], "more than 3"),
        (lambda r: r.undeliverable(1, "gone"), "gone"),
    ],
)
def test_a_contradiction_fails_a_stage_and_frees_its_memory(contradict: Callable[[Receiver], list], why: str) -> None:
    r = staging()
    drop, failed = without_steps(contradict(r))
    assert drop == DropStage(1)
    assert why in failed.reason
    assert (r.stage, r.state) == ("failed", StorageState(0, D0, ()))
    refused(r, "open_apply", "policy", 1, why="has failed here")
    assert r.learn(at(2))[:-1] == []
