"""The receiver: every refusal, every failure, and what storage counts as afterwards."""

import msgspec
import pytest
from one_rank import (
    ABSOLUTE,
    D0,
    D1,
    K0,
    MEMBERS,
    OWNERS,
    RELATIVE,
    RESTORE,
    at,
    failure,
    identity,
    manifest,
    opened,
    prepare,
    ready,
    refused,
    without_steps,
    write,
)

from dcr.protocol.identity import Base, Kind, PayloadIdentity, SealedPayload, manifest_root
from dcr.protocol.messages import Prepare, StorageState
from dcr.protocol.receiver import RankAcknowledged, RankPrepared, RankState, Receiver, Synchronise, admits
from dcr.protocol.record import Direction, OpenTransition, OwnerRef
from dcr.protocol.step import Step


def test_a_whole_attempt() -> None:
    r = ready()
    assert r.state == StorageState(0, D0, ())
    assert write(r, identity(1)) == []
    assert r.state == StorageState(0, D0, ("w",))
    m0, m1 = manifest(1, "o0", 1), manifest(1, "o1", 0)
    assert without_steps(r.manifest(m0)) == []
    assert without_steps(r.manifest(m1)) == [Synchronise(1)]
    root = manifest_root({"o0": m0.digest(), "o1": m1.digest()})
    assert without_steps(r.synchronised(1)) == [RankAcknowledged(1, root)]
    assert r.state.torn_by == ("w",)  # until K says that it is committed
    k1 = opened(1, K0)
    torn = RankState(StorageState(0, D0, ("w",)), 1, committed_here=False, epoch=1, stage="acknowledged")
    assert r.learn(k1) == [torn]
    assert r.learn(k1.commit(D1, "another root", "op")) == [torn]
    assert r.seen_through(k1.commit(D1, root, "op")) == StorageState(1, D1, ())
    assert r.state == torn.state  # only looked at
    clean = RankState(StorageState(1, D1, ()), 1, committed_here=True, epoch=1, stage="acknowledged")
    assert r.learn(k1.commit(D1, root, "op")) == [Step("e", "LearnCommit", 1), clean]
    assert r.learn(k1.commit(D1, root, "op")) == [clean]


@pytest.mark.parametrize("call", ["prepare", "open_apply"])
@pytest.mark.parametrize(
    ("record", "epoch", "why"), [("other", 9, "of record 'other'"), ("policy", 1, "the fence is at 2")]
)
def test_orders_of_another_record_or_below_the_fence_are_refused(call: str, record: str, epoch: int, why: str) -> None:
    r = ready(2)
    order = msgspec.structs.replace(prepare(epoch), record_id=record)
    refused(r, call, *((order, at(epoch)) if call == "prepare" else (record, epoch)), why=why)


def test_other_refusals_change_nothing() -> None:
    r = Receiver("e", "policy", D0)
    refused(r, "open_apply", "policy", 1, why="not prepared here")
    refused(r, "payload", identity(1), RELATIVE, "x0", 1, why="before its epoch was opened")
    refused(r, "manifest", manifest(1, "o0", 0), why="not prepared here")
    r.prepare(prepare(1), at(1))
    refused(r, "open_apply", "policy", 2, why="not prepared here")
    refused(r, "payload", identity(1), RELATIVE, "x0", 1, why="before its epoch was opened")
    refused(r, "payload", identity(2), RELATIVE, "x0", 1, why="before its epoch was opened")
    refused(r, "prepare", prepare(1, ABSOLUTE), at(1), why="two different prepare orders")
    refused(r, "manifest", manifest(2, "o0", 0), why="not prepared here")
    elsewhere = msgspec.structs.replace(manifest(1, "o0", 0), record_id="other")
    refused(r, "manifest", elsewhere, why="is of record")
    elsewhere = msgspec.structs.replace(identity(1), record_id="other")
    refused(r, "payload", elsewhere, RELATIVE, "x0", 1, why="is of record")
    other = msgspec.structs.replace(at(2), record_id="other")
    refused(r, "learn", other, why="'other' is not 'policy'")
    refused(r, "seen_through", other, why="'other' is not 'policy'")
    refused(r, "prepare", prepare(2), other, why="'other' is not 'policy'")
    before = r.state
    assert r.prepare(prepare(1), at(1)) == [RankPrepared(1, before)]  # repeated: answered again


@pytest.mark.parametrize(("epoch", "age"), [(4, "older"), (6, "newer")])
def test_a_record_that_is_not_the_orders_is_refused(epoch: int, age: str) -> None:
    r = Receiver("e", "policy", D0)
    refused(r, "prepare", prepare(5), at(epoch), why=f"a record at epoch {epoch}, which is {age}")
    assert (r.fence, r.epoch, r.version) == (0, 0, None)


def test_what_storage_does_not_admit_fails_at_once_and_is_answered_so_again() -> None:
    r = Receiver("e", "policy", "")
    effects = r.prepare(prepare(1), at(1))
    assert effects[0] == Step("e", "Fence", 1, "relative", armed=False)
    assert "holds no known version, torn by unknown" in failure(effects)
    assert (r.stage, r.fence, r.state) == ("failed", 1, StorageState(None, "", ("unknown",)))
    assert r.prepare(prepare(1), at(1)) == effects[1:]
    refused(r, "open_apply", "policy", 1, why="epoch 1, which has failed here: a relative payload against version 0")
    refused(r, "payload", identity(1), RELATIVE, "x0", 1, why="before its epoch was opened")


def test_a_prepare_first_learns_what_was_committed() -> None:
    r = ready()
    write(r, identity(1))
    for owner, payloads in (("o0", 1), ("o1", 0)):
        r.manifest(manifest(1, owner, payloads))
    (_, acknowledged) = r.synchronised(1)
    k2 = opened(1, opened(1, K0).commit(D1, acknowledged.root, "op"))
    order = Prepare("policy", 2, 2, Base(Kind.RELATIVE, 1, D1, "v"), OWNERS, 1)
    held = StorageState(1, D1, ())
    assert r.prepare(order, k2) == [Step("e", "Fence", 2, "relative"), RankPrepared(2, held)]
    assert r.learn(k2) == [RankState(held, 2, committed_here=True, epoch=2, stage="fenced")]


def test_only_the_last_acknowledgement_counts() -> None:
    r = ready()
    roots = []
    for epoch in (1, 2):
        if epoch == 2:
            r.prepare(prepare(2), at(2))
            r.open_apply("policy", 2)
        for owner in ("o0", "o1"):
            r.manifest(manifest(epoch, owner, 0))
        roots.append(r.synchronised(epoch)[-1].root)
    first = opened(1, K0).commit(D1, roots[0], "op")
    assert r.seen_through(first) == StorageState(0, D0, ())
    second = opened(2, opened(1, K0), Kind.ABSOLUTE).commit(D1, roots[1], "op")
    assert r.seen_through(second) == StorageState(1, D1, ())


@pytest.mark.parametrize("base", [ABSOLUTE, RELATIVE])
def test_a_commit_of_a_rollback_makes_storage_clean_at_the_version_that_it_kept(base: Base) -> None:
    r = ready()
    r.payload(identity(1), RELATIVE, "x0", 1)
    r.write_failed(identity(1), "torn")
    transition = OpenTransition(
        1, "w", 2, Kind.ABSOLUTE, OWNERS, 0, ("add",), direction=Direction.BACK, pushes=(1,) * len(OWNERS)
    )
    k2 = opened(1, K0).open_attempt(transition, MEMBERS)
    order = Prepare("policy", 2, 0, base, OWNERS, 1)
    effects = r.prepare(order, k2)
    if base is RELATIVE:
        assert "torn by w" in failure(effects)
        return
    r.open_apply("policy", 2)
    i = PayloadIdentity("policy", 0, 2, "o0", 1, 0)
    write(r, i, ABSOLUTE)
    seals = [msgspec.structs.replace(manifest(2, o, n, ABSOLUTE), target=0) for o, n in (("o0", 1), ("o1", 0))]
    for m in seals:
        r.manifest(m)
    root = manifest_root({m.owner: m.digest() for m in seals})
    assert r.synchronised(2)[-1] == RankAcknowledged(2, root)
    assert r.state.torn_by == ("w",)
    r.learn(k2.commit(D0, root, "op"))
    assert r.state == StorageState(0, D0, ())


def test_stale_and_repeated_inputs_give_no_effects() -> None:
    r = ready(2)
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []
    assert r.manifest(manifest(1, "o0", 1)) == []
    write(r, identity(2))
    assert r.payload(identity(2), RELATIVE, "x0", 1) == []
    m = manifest(2, "o0", 1)
    r.manifest(m)
    assert r.manifest(m) == []
    assert r.open_apply("policy", 2) == []
    assert r.synchronised(1) == []
    assert r.undeliverable(1, "gone") == []
    assert r.synchronise_failed(1, "gone") == []


@pytest.mark.parametrize(
    ("i", "base", "why"),
    [
        (msgspec.structs.replace(identity(1), target=2), RELATIVE, "for version 2"),
        (identity(1), ABSOLUTE, "it was made against"),
    ],
)
def test_payloads_that_contradict_the_attempt_fail_it(i: PayloadIdentity, base: Base, why: str) -> None:
    r = ready()
    assert why in failure(r.payload(i, base, "x0", 1))
    assert r.state.clean
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []  # a failed attempt writes nothing more


@pytest.mark.parametrize("changes", [{"owner": "stranger"}, {"owner_incarnation": 2}])
def test_what_is_no_owners_is_refused_and_the_attempt_goes_on(changes: dict) -> None:
    r = ready()
    i = msgspec.structs.replace(identity(1), **changes)
    refused(r, "payload", i, RELATIVE, "x0", 1, why="is not an owner of this attempt")
    m = msgspec.structs.replace(manifest(1, "o0", 0), **changes)
    refused(r, "manifest", m, why="is not an owner of this attempt")
    assert write(r, identity(1)) == []


def test_same_identity_with_other_bytes_fails() -> None:
    r = ready()
    write(r, identity(1))
    assert "twice with different bytes" in failure(r.payload(identity(1), RELATIVE, "other", 1))


def test_too_many_payloads_fail() -> None:
    r = ready()
    for n in range(3):
        write(r, identity(1, n))
    assert "more than 3 payloads" in failure(r.payload(identity(1, 3), RELATIVE, "x3", 1))


@pytest.mark.parametrize(("digest", "entries", "sequence"), [("other", 1, 0), ("x0", 2, 0), ("x1", 1, 1)])
@pytest.mark.parametrize("sealed_first", [True, False])
def test_payloads_that_the_manifest_does_not_list_fail(
    digest: str, entries: int, sequence: int, *, sealed_first: bool
) -> None:
    r, i, m = ready(), identity(1, sequence), manifest(1, "o0", 1)
    if sealed_first:
        assert without_steps(r.manifest(m)) == []
        effects = r.payload(i, RELATIVE, digest, entries)
        assert r.state.clean
    else:
        r.payload(i, RELATIVE, digest, entries)
        r.write_ended(i)
        effects = r.manifest(m)
    assert "not the one that its owner's manifest lists" in failure(effects)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": 3}, "for version 3"),
        ({"base": ABSOLUTE}, "made against"),
        ({"payloads": (SealedPayload(1, "x", 1, 8),)}, "not numbered"),
    ],
)
def test_wrong_manifests_fail(changes: dict, why: str) -> None:
    assert why in failure(ready().manifest(msgspec.structs.replace(manifest(1, "o0", 0), **changes)))


def test_two_manifests_of_one_owner_fail() -> None:
    r = ready()
    r.manifest(manifest(1, "o0", 1))
    assert "twice with different manifests" in failure(r.manifest(manifest(1, "o0", 0)))


def test_a_failed_write_is_never_retried_and_stays_torn() -> None:
    r = ready()
    r.payload(identity(1), RELATIVE, "x0", 1)
    assert "the loader raised" in failure(r.write_failed(identity(1), "the loader raised"))
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []
    assert r.state.torn_by == ("w",)
    assert "torn by w" in failure(r.prepare(prepare(2), at(2)))  # no relative payload over tears
    assert without_steps(r.prepare(prepare(3, ABSOLUTE), at(3))) == [RankPrepared(3, r.state)]
    assert without_steps(r.open_apply("policy", 3)) == []


@pytest.mark.parametrize("how", ["undeliverable", "synchronise_failed"])
def test_failures_beside_a_write(how: str) -> None:
    assert failure(getattr(ready(), how)(1, "gone")) == "gone"


@pytest.mark.parametrize("late", ["stop", "abandon", "open"])
def test_overwritten_storage_never_counts_as_an_earlier_commit(late: str) -> None:
    r = ready()
    for owner in ("o0", "o1"):
        r.manifest(manifest(1, owner, 0))
    r.synchronised(1)
    root = manifest_root({o: manifest(1, o, 0).digest() for o in ("o0", "o1")})
    k1 = opened(1, K0).commit(D1, root, "op")
    r.learn(k1)
    assert r.state == StorageState(1, D1, ())
    base = Base(Kind.RELATIVE, 1, D1, "w")
    k2 = opened(1, k1)
    r.prepare(Prepare("policy", 2, 2, base, OWNERS, 1), k2)
    r.open_apply("policy", 2)
    r.payload(PayloadIdentity("policy", 2, 2, "o0", 1, 0), base, "x0", 1)
    r.write_failed(PayloadIdentity("policy", 2, 2, "o0", 1, 0), "torn")
    k3 = {"stop": lambda: k2.stop(""), "abandon": k2.abandon, "open": lambda: opened(2, k2, Kind.ABSOLUTE)}[late]()
    for _ in range(2):
        state = r.learn(k3)[-1]
        assert state == RankState(StorageState(1, D1, ("w",)), 3, committed_here=False, epoch=0, stage="idle")


def test_what_is_late_of_a_dead_attempt_finds_the_fence_up() -> None:
    r = ready()
    k2 = opened(2, opened(1, K0), Kind.ABSOLUTE)
    r.learn(k2)
    assert (r.fence, r.epoch, r.stage) == (2, 0, "idle")
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []
    assert r.state.clean
    assert without_steps(r.prepare(prepare(2, ABSOLUTE), k2)) == [RankPrepared(2, StorageState(0, D0, ()))]


@pytest.mark.parametrize(("shares", "good"), [((4, 6), True), ((5, 6), False), (((1 << 128) - 1, 11), True)])
def test_a_restore_must_add_up_to_the_committed_content(shares: tuple[int, int], *, good: bool) -> None:
    r = Receiver("e", "policy", "")
    assert r.state == StorageState(None, "", ("unknown",))
    r.prepare(prepare(1, RESTORE), at(1))
    r.open_apply("policy", 1)
    effects: list = []
    for owner, share in zip(("o0", "o1"), shares, strict=True):
        effects = r.manifest(manifest(1, owner, 0, RESTORE, f"{share:032x}"))
    if not good:
        assert "restored content is not that of version 0" in failure(effects)
        return
    assert without_steps(effects) == [Synchronise(1)]
    r.synchronised(1)
    assert r.state == StorageState(0, D0, ())


def test_stages_of_an_attempt() -> None:
    r = Receiver("e", "policy", D0)
    assert (r.epoch, r.stage) == (0, "idle")
    r.prepare(prepare(1), at(1))
    assert (r.epoch, r.stage) == (1, "fenced")
    for owner in ("o0", "o1"):  # seals may come early; a synchronous order stages nothing
        assert r.manifest(manifest(1, owner, 0)) == [Step("e", "DeliverManifest", 1, owner, owner=OwnerRef(owner, 1))]
    assert without_steps(r.open_apply("policy", 1)) == [Synchronise(1)]
    assert r.stage == "applying"
    r.synchronised(1)
    assert (r.epoch, r.stage) == (1, "acknowledged")


def test_dense_and_restore_tears_need_a_dense_repair() -> None:
    for kind, mark in ((Kind.DENSE, "dense"), (Kind.RESTORE, "restore")):
        base = replace_kind(kind)
        r = ready(1, base)
        i = msgspec.structs.replace(identity(1), target=prepare(1, base).target)
        r.payload(i, base, "x0", 1)
        r.write_failed(i, "torn")
        assert r.state == StorageState(0, D0, (mark,))
        assert not admits(r.state, ABSOLUTE)
        assert admits(r.state, replace_kind(Kind.DENSE))


def replace_kind(kind: Kind) -> Base:
    return {Kind.DENSE: Base(Kind.DENSE, 0, "", "w"), Kind.RESTORE: RESTORE}[kind]


@pytest.mark.parametrize(
    ("state", "kinds"),
    [
        (StorageState(0, D0, ()), {Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE, Kind.RESTORE}),
        (StorageState(0, D0, ("w",)), {Kind.ABSOLUTE, Kind.DENSE, Kind.RESTORE}),
        (StorageState(0, D0, ("u", "w")), {Kind.DENSE, Kind.RESTORE}),
        (StorageState(1, D0, ()), {Kind.DENSE, Kind.RESTORE}),
        (StorageState(None, D0, ()), {Kind.DENSE, Kind.RESTORE}),
        (StorageState(None, "", ("unknown",)), {Kind.DENSE, Kind.RESTORE}),
    ],
)
def test_admits(state: StorageState, kinds: set[Kind]) -> None:
    assert {k for k in Kind if admits(state, Base(k, 0, D0, "w"))} == kinds


def test_loaded_content_is_a_version_only_if_the_digest_says_so() -> None:
    for loaded, version in ((D0, 0), (D1, None)):
        for record in (K0, opened(1, K0)):
            r = Receiver("e", "policy", loaded)
            r.learn(record)
            assert r.state == StorageState(version, loaded, ())
    r.prepare(prepare(1, replace_kind(Kind.DENSE)), at(1))  # of D1, which is not committed yet
    r.open_apply("policy", 1)
    r.payload(identity(1), replace_kind(Kind.DENSE), "x0", 1)
    r.write_failed(identity(1), "torn")
    assert r.seen_through(opened(1, K0).commit(D1, "root", "op")) == StorageState(None, D1, ("dense",))


def test_the_trail_of_a_write_that_fails_names_each_action_its_epoch_and_the_payload() -> None:
    r, i = ready(), identity(1)
    assert r.payload(i, RELATIVE, "x0", 1)[0] == Step("e", "BeginWrite", 1, "o0/0 of epoch 1", payload=i)
    failed, step, _ = r.write_failed(i, "torn")
    assert failed == Step("e", "FailWrite", 1, "o0/0 of epoch 1", payload=i)
    assert step == Step("e", "FailAttempt", 1, "payload o0/0 of epoch 1: torn")


def test_the_trail_of_an_attempt_that_goes_well_names_each_action_its_epoch_and_the_payload() -> None:
    r, i = ready(), identity(1)
    r.payload(i, RELATIVE, "x0", 1)
    for owner, payloads in (("o0", 1), ("o1", 0)):
        r.manifest(manifest(1, owner, payloads))
    ended = Step("e", "EndWrite", 1, "o0/0 of epoch 1", payload=i)
    assert r.write_ended(i) == [ended, Synchronise(1)]
    assert r.synchronised(1)[0] == Step("e", "Acknowledge", 1)


def sealed() -> Receiver:
    """Everything of epoch 1 is written; what was written is being synchronised."""
    r = ready()
    for owner in ("o0", "o1"):
        r.manifest(manifest(1, owner, 0))
    return r


def test_what_failed_is_not_acknowledged_when_the_synchronisation_ends_after_all() -> None:
    r = sealed()
    assert failure(r.synchronise_failed(1, "the readback differs")) == "the readback differs"
    assert r.synchronised(1) == []
    assert (r.stage, r.acknowledged_epoch) == ("failed", 0)
    assert r.undeliverable(1, "gone") == []  # it has failed already, and is told once


def test_what_was_acknowledged_is_acknowledged_once_and_fails_no_more() -> None:
    r = sealed()
    r.synchronised(1)
    assert r.synchronised(1) == []
    assert r.undeliverable(1, "gone") == []
    assert (r.stage, r.acknowledged_epoch) == ("acknowledged", 1)


def test_a_write_that_ends_after_the_attempt_failed_completes_nothing() -> None:
    r, i = ready(), identity(1)
    r.payload(i, RELATIVE, "x0", 1)
    for owner, payloads in (("o0", 1), ("o1", 0)):
        r.manifest(manifest(1, owner, payloads))
    assert failure(r.undeliverable(1, "gone")) == "gone"
    assert without_steps(r.write_ended(i)) == []


def test_one_reading_of_the_record_tells_of_the_commit_and_of_the_epoch_after_it() -> None:
    r = sealed()
    root = r.synchronised(1)[-1].root
    k2 = opened(1, K0).commit(D1, root, "op").take_over("c2")
    held = RankState(StorageState(1, D1, ()), 2, committed_here=True, epoch=0, stage="idle")
    assert r.learn(k2) == [Step("e", "LearnCommit", 1), held]
