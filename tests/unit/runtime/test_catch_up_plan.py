"""The way from what an engine holds to the committed version, against histories of commits that are made up."""

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.delivery.interface import committed_key, manifest_key
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import Base, Kind, Manifest, SealedPayload, encode_manifest, manifest_root
from dcr.protocol.record import CommitRecord, Committed, OwnerRef
from dcr.runtime.catch_up_plan import CannotCatchUpError, plan
from dcr.runtime.committed_attempt import FORMAT, CommittedAttempt

OWNERS = (OwnerRef("rank-0", 5), OwnerRef("rank-1", 6))
GOLDEN = (
    "8aa6666f726d617401a97265636f72645f6964a172a565706f636802a674617267657401ae636f6e74656e745f646967657374a26262a4626173"
    "6584a46b696e64a872656c6174697665a776657273696f6e00ab626173656c696e655f6964a26161a963616e646964617465a163ab626173655f"
    "646967657374a26161a66f776e6572739182a56f776e6572a16fab696e6361726e6174696f6e01ad6d616e69666573745f726f6f74a4726f6f74"
    "a66265666f726501"
)
"""One of format 1, as it lies in delivery stores."""


def share(content, owner):
    """An owner's share of a content's digest: of the elements that it owns."""
    return hashlib.md5(f"{owner} {content[owner]}".encode()).hexdigest()


def digest(content):
    return f"{sum(int(share(content, o.owner), 16) for o in OWNERS) % 2**128:032x}"


class History:
    """Commits one after the other, over two elements of two owners, and what a store then holds."""

    def __init__(self):
        self.content, self.version, self.epoch = {"rank-0": 0, "rank-1": 0}, 0, 0
        self.store, self.changes, self.committed = {}, {}, None
        self.contents = [digest(self.content)]

    @property
    def record(self):
        return CommitRecord("r", self.version, self.epoch, "l", 1, digest(self.content), committed=self.committed)

    def commit(self, kind, new, *, back=False):
        self.epoch += 1 + len(new)  # some attempts fail
        after = self.content if back else {**self.content, **new}
        target = self.version + (not back)
        base = Base(kind, self.version, "" if kind is Kind.DENSE else digest(self.content), f"c{self.epoch}")
        manifests = {}
        for o in OWNERS:
            key = manifest_key("r", target, self.epoch, o.owner, o.incarnation)
            line = (SealedPayload(0, f"{self.epoch}", 3, 10),)
            of = (self.epoch, o.owner, o.incarnation, base, line, share(after, o.owner))
            m = manifests[o.owner] = Manifest("r", target, *of, changed_entries=3, owned_elements=1)
            self.store[key] = encode_manifest(m)
        root = manifest_root({o: m.digest() for o, m in manifests.items()})
        before = 0 if self.committed is None else self.committed.epoch
        of = (self.epoch, target, digest(after), base, digest(self.content), OWNERS, root, before)
        self.store[committed_key("r", self.epoch)] = CommittedAttempt(FORMAT, "r", *of).encode()
        self.committed = Committed(target, self.epoch, base.candidate, (), root, "op")
        self.changes[self.epoch] = (self.content, after, kind)
        self.content, self.version = after, target
        if not back:
            self.contents.append(digest(after))

    def look(self, keys, size_max):
        return [self.store.get(k) for k in keys]

    def applied(self, held, found):
        """What those attempts make of a content, by what each of them changed; None if one does not admit it."""
        for a in found.attempts:
            before, after, kind = self.changes[a.epoch]
            if kind is not Kind.DENSE and held != digest(before):
                return None
            held = digest(after)
        return held


values = st.dictionaries(st.sampled_from(["rank-0", "rank-1"]), st.integers(0, 2), max_size=2)
kinds = st.sampled_from([Kind.RELATIVE, Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE])
commits = st.tuples(kinds, values, st.booleans())


@given(st.lists(commits, max_size=6), st.data())
def test_a_plan_leads_to_the_committed_version_or_there_is_none(history, data):
    h = History()
    for kind, new, back in history:
        h.commit(Kind.ABSOLUTE if back else kind, new, back=back)
    gone = data.draw(st.sets(st.sampled_from(sorted(h.store)), max_size=1)) if h.store else set()
    for key in gone:
        del h.store[key]
    held = data.draw(st.sampled_from([*h.contents, "", "f" * 32]))
    try:
        found = plan(h.look, h.record, held)
    except CannotCatchUpError:
        known = held in h.contents or any(kind is Kind.DENSE and not back for kind, _, back in history)
        assert gone or not known
        return
    if found is None:
        assert held == digest(h.content)
        return
    assert h.applied(held, found) == found.content_digest == digest(h.content)
    assert found.version == h.version
    assert found.payloads == (2,) * len(found.attempts)
    assert found.sizes == (20,) * len(found.attempts)
    assert len(found.attempts) <= sum(not back for _, _, back in history)


def three_commits():
    h = History()
    for n in (1, 2, 3):
        h.commit(Kind.RELATIVE, {"rank-1": n})
    return h


def altered(data, **changes):
    return msgspec.structs.replace(CommittedAttempt.decode(data), **changes).encode()


@pytest.mark.parametrize(
    ("epoch", "changes", "why"),
    [
        (4, {"content_digest": "0" * 32}, "what was left of epoch 4 is of another commit than version 2"),
        (4, {"target": 5}, "what was left of epoch 4 is of another commit than version 2"),
        (4, {"record_id": "other"}, "what was left of epoch 4 is of another commit than version 2"),
        (4, {"epoch": 5}, "what was left of epoch 4 is of epoch 5"),
        (6, {"manifest_root": "0" * 64}, "what was left of epoch 6 is of another commit than version 3"),
        (4, {"manifest_root": "0" * 64}, "the manifests of epoch 4 are not those that were committed"),
        (4, {"format": 2}, "a commit of format 2; this version of dcr reads 1"),
    ],
)
def test_what_contradicts_the_record_or_the_commit_after_it_is_refused(epoch, changes, why):
    h = three_commits()
    assert len(plan(h.look, h.record, h.contents[0]).attempts) == 3
    key = committed_key("r", epoch)
    h.store[key] = altered(h.store[key], **changes)
    with pytest.raises(DcrError, match=why):
        plan(h.look, h.record, h.contents[0])


def test_manifests_that_lead_elsewhere_are_refused():
    h = three_commits()
    key = committed_key("r", 4)
    later = committed_key("r", 6)
    h.store[later] = altered(h.store[later], base_digest="0" * 32)
    h.store[key] = altered(h.store[key], content_digest="0" * 32)
    with pytest.raises(CannotCatchUpError, match="lead to another content than what was committed"):
        plan(h.look, h.record, h.contents[0])


def test_what_is_left_of_a_commit_is_read_as_it_was_left_and_nothing_else_is():
    base = Base(Kind.RELATIVE, 0, "aa", "c")
    one = CommittedAttempt(FORMAT, "r", 2, 1, "bb", base, "aa", (OwnerRef("o", 1),), "root", 1)
    assert one.encode().hex() == GOLDEN
    assert CommittedAttempt.decode(bytes.fromhex(GOLDEN)) == one
    for data in (b"", b"x", one.encode()[:-1], one.encode() + b"x"):
        with pytest.raises(RefusedError, match="not what a leader leaves of a commit"):
            CommittedAttempt.decode(data)
    with pytest.raises(RefusedError, match="epoch 7 was committed before epoch 2"):
        CommittedAttempt.decode(one.encode()[:-1] + b"\x07")


def test_a_history_that_goes_on_for_ever_is_not_followed_for_ever():
    """Nothing but a fault makes one; contents that return must not help it."""
    looks = []

    def look(keys, size_max):
        epoch = int(keys[0].split("/")[1])
        looks.append(epoch)
        base = Base(Kind.ABSOLUTE, 1, "aa", "c")
        return [CommittedAttempt(FORMAT, "r", epoch, 1, "aa", base, "aa", OWNERS, "root", epoch - 1).encode()]

    c = Committed(1, 10**9, "c", (), "root", "op")
    with pytest.raises(CannotCatchUpError, match="which is no version from 1 to 1"):
        plan(look, CommitRecord("r", 1, 10**9, "l", 1, "aa", committed=c), "bb")
    assert len(looks) == 1000
