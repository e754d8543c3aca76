"""The receiver: every refusal, every failure, and what storage counts as afterwards."""

import msgspec
import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload, manifest_root
from dcr.protocol.messages import Prepare, StorageState
from dcr.protocol.receiver import (
    BeginWrite,
    RankAcknowledged,
    RankFailed,
    RankPrepared,
    RankState,
    Receiver,
    Synchronise,
    admits,
)
from dcr.protocol.record import CommitRecord, Member, OpenTransition, OwnerRef
from dcr.protocol.step import Step

D0, D1 = "0" * 31 + "a", "0" * 31 + "b"
OWNERS = (OwnerRef("o0", 1), OwnerRef("o1", 1))
MEMBERS = (Member("e", 1),)
RELATIVE = Base(Kind.RELATIVE, 0, D0, "w")
ABSOLUTE = Base(Kind.ABSOLUTE, 0, D0, "w")
RESTORE = Base(Kind.RESTORE, 0, D0, "")
K0 = CommitRecord.create("policy", "c", D0).admit(MEMBERS)


def opened(attempts: int, k: CommitRecord, kind: Kind = Kind.RELATIVE) -> CommitRecord:
    return k.open_attempt(OpenTransition(k.version + 1, "w", attempts, kind, OWNERS, 0, ("add",)), MEMBERS)


def prepare(epoch: int, base: Base = RELATIVE) -> Prepare:
    return Prepare("policy", epoch, base.version + (base.kind is not Kind.RESTORE), base, OWNERS)


def identity(epoch: int, sequence: int = 0, owner: str = "o0") -> PayloadIdentity:
    return PayloadIdentity("policy", 1, epoch, owner, 1, sequence)


def manifest(epoch: int, owner: str, payloads: int, base: Base = RELATIVE, share: str = "00") -> Manifest:
    listed = tuple(SealedPayload(n, f"x{n}", 1, 8) for n in range(payloads))
    return Manifest("policy", prepare(epoch, base).target, epoch, owner, 1, base, listed, share, payloads, 3)


def ready(epoch: int = 1, base: Base = RELATIVE) -> Receiver:
    """A receiver loaded with version 0, prepared and open for this epoch."""
    r = Receiver("e", "policy", D0, payloads_max=3)
    r.learn(K0)
    r.prepare(prepare(epoch, base))
    r.open_apply("policy", epoch)
    return r


def without_steps(effects: list) -> list:
    return [e for e in effects if not isinstance(e, Step)]


def write(r: Receiver, i: PayloadIdentity, base: Base = RELATIVE) -> list:
    assert without_steps(r.payload(i, base, f"x{i.sequence}", 1)) == [BeginWrite(i)]
    return without_steps(r.write_ended(i))


def failure(effects: list) -> str:
    (e,) = without_steps(effects)
    assert isinstance(e, RankFailed)
    return e.reason


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
    assert r.learn(k1) == [RankState(StorageState(0, D0, ("w",)), 1, committed_here=False)]
    other = r.learn(k1.commit(D1, "another root", "op"))
    assert other == [RankState(StorageState(0, D0, ("w",)), 1, committed_here=False)]
    assert r.learn(k1.commit(D1, root, "op"))[-1] == RankState(StorageState(1, D1, ()), 1, committed_here=True)


@pytest.mark.parametrize("call", ["prepare", "open_apply"])
@pytest.mark.parametrize(
    ("record", "epoch", "why"), [("other", 9, "of record 'other'"), ("policy", 1, "the fence is at 2")]
)
def test_orders_of_another_record_or_below_the_fence_are_refused(call: str, record: str, epoch: int, why: str) -> None:
    r = ready(2)
    order = msgspec.structs.replace(prepare(epoch), record_id=record)
    arguments = (order,) if call == "prepare" else (record, epoch)
    with pytest.raises(RefusedError, match=why):
        getattr(r, call)(*arguments)
    assert write(r, identity(2)) == []  # nothing was changed


def test_other_refusals_change_nothing() -> None:
    r = Receiver("e", "policy", D0)
    r.learn(K0)
    r.prepare(prepare(1))
    before = r.state
    with pytest.raises(RefusedError, match="not prepared here"):
        r.open_apply("policy", 2)
    with pytest.raises(RefusedError, match="before its epoch was opened"):
        r.payload(identity(1), RELATIVE, "x0", 1)
    with pytest.raises(RefusedError, match="two different prepare orders"):
        r.prepare(prepare(1, ABSOLUTE))
    with pytest.raises(RefusedError, match="not prepared here"):
        r.manifest(manifest(2, "o0", 0))
    with pytest.raises(RefusedError, match="is of record"):
        r.manifest(msgspec.structs.replace(manifest(1, "o0", 0), record_id="other"))
    with pytest.raises(RefusedError, match="is of record"):
        r.payload(msgspec.structs.replace(identity(1), record_id="other"), RELATIVE, "x0", 1)
    with pytest.raises(RefusedError, match="is not"):
        r.learn(msgspec.structs.replace(K0, record_id="other"))
    assert r.state == before
    assert without_steps(r.prepare(prepare(1))) == [RankPrepared(1, before)]


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
        (msgspec.structs.replace(identity(1), owner_incarnation=2), RELATIVE, "not an owner of this attempt"),
        (identity(1, owner="stranger"), RELATIVE, "not an owner of this attempt"),
    ],
)
def test_payloads_that_contradict_the_attempt_fail_it(i: PayloadIdentity, base: Base, why: str) -> None:
    r = ready()
    assert why in failure(r.payload(i, base, "x0", 1))
    assert r.state.clean
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []  # a failed attempt writes nothing more


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
        ({"owner": "stranger"}, "not an owner"),
        ({"owner_incarnation": 5}, "not an owner"),
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
    r.prepare(prepare(2))
    assert "torn by w" in failure(r.open_apply("policy", 2))  # no relative payload over tears
    r.prepare(prepare(3, ABSOLUTE))
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
    r.prepare(Prepare("policy", 2, 2, base, OWNERS))
    r.open_apply("policy", 2)
    r.payload(PayloadIdentity("policy", 2, 2, "o0", 1, 0), base, "x0", 1)
    r.write_failed(PayloadIdentity("policy", 2, 2, "o0", 1, 0), "torn")
    k2 = opened(1, k1)
    k3 = {"stop": lambda: k2.stop(""), "abandon": k2.abandon, "open": lambda: opened(2, k2, Kind.ABSOLUTE)}[late]()
    for _ in range(2):
        state = r.learn(k3)[-1]
        assert state == RankState(StorageState(1, D1, ("w",)), 3, committed_here=False)


def test_what_is_late_of_a_dead_attempt_finds_the_fence_up() -> None:
    r = ready()
    r.learn(opened(2, opened(1, K0), Kind.ABSOLUTE))
    assert r.fence == 2
    assert r.payload(identity(1), RELATIVE, "x0", 1) == []
    assert r.state.clean
    assert without_steps(r.prepare(prepare(2, ABSOLUTE))) == [RankPrepared(2, StorageState(0, D0, ()))]


@pytest.mark.parametrize(("shares", "good"), [((4, 6), True), ((5, 6), False), (((1 << 128) - 1, 11), True)])
def test_a_restore_must_add_up_to_the_committed_content(shares: tuple[int, int], *, good: bool) -> None:
    r = Receiver("e", "policy", "")
    assert r.state == StorageState(None, "", ("unknown",))
    r.prepare(prepare(1, RESTORE))
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
        r = Receiver("e", "policy", loaded)
        r.learn(K0)
        assert r.state == StorageState(version, loaded, ())
