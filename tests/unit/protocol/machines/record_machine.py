"""Every change of K in any order, beside ``RecordStep`` of spec/tla/Refit.tla and the ``EXCEPT`` of each action."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dcr.protocol.identity import Kind
from dcr.protocol.record import (
    CommitRecord,
    Direction,
    Member,
    OpenTransition,
    OwnerRef,
    decode_record,
    encode_record,
)

ROLES = ("CommitRecord",)
MEMBERS = st.lists(
    st.builds(Member, st.sampled_from("efg"), st.integers(1, 3)), min_size=0, max_size=3, unique_by=lambda m: m.engine
)


class RecordMachine(RuleBasedStateMachine):
    """A change is what the specification says that it is; one that it does not have is refused."""

    @initialize()
    def begin(self) -> None:
        self.k = CommitRecord.create("policy", "c", "d0")
        assert (self.k.version, self.k.epoch, self.k.fencing_token, self.k.members) == (0, 0, 1, ())
        self.committed: dict[int, str] = {0: "d0"}
        self.n = 0

    def becomes(self, k: CommitRecord, *changed: str, epoch: int) -> None:
        """Only these fields changed, and ``RecordStep`` holds."""
        old, self.k = self.k, k
        fields = {f for f in CommitRecord.__struct_fields__ if getattr(old, f) != getattr(k, f)}
        assert fields <= {*changed, "epoch"}, f"{fields} changed"
        assert k.epoch == old.epoch + epoch
        assert k.version in (old.version, old.version + 1)
        assert k.version == old.version or (old.open is not None and old.open.target == k.version)
        if k.committed != old.committed:
            assert (k.committed.epoch, k.open) == (old.epoch, None)
        if k.open is not None and old.open is not None:
            assert k.open.candidate == old.open.candidate
            assert old.open.direction is Direction.FORWARD or k.open.direction is Direction.BACK
        assert list(k.members) == sorted(set(k.members))

    def is_no_change(self, call, *arguments) -> None:
        with pytest.raises(AssertionError):
            call(*arguments)

    @rule(
        kind=st.sampled_from((Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE)),
        members=MEMBERS,
        back=st.integers(0, 1),
        wrong=st.sampled_from(("", "", "", "target", "attempts", "candidate", "direction")),
        found=st.sampled_from(("", "d9")),
    )
    def open_attempt(self, kind, members, back, wrong, found) -> None:
        tr = self.k.open
        going_back = tr is not None and (back == 0 or tr.direction is Direction.BACK)
        self.n += tr is None
        if wrong in ("candidate", "direction") and (tr is None or (wrong == "direction" and not going_back)):
            return
        if wrong == "direction" and tr.direction is Direction.FORWARD:
            return
        new = OpenTransition(
            self.k.version + 1 + (wrong == "target"),
            f"w{self.n}" if wrong != "candidate" else "other",
            (0 if tr is None else tr.attempts) + 1 + (wrong == "attempts"),
            kind,
            (OwnerRef("o", 1),),
            0,
            ("add",),
            content_digest=found,
            direction=Direction.BACK if going_back and wrong != "direction" else Direction.FORWARD,
            pushes=(1,),
        )
        if wrong or not members:
            self.is_no_change(self.k.open_attempt, new, tuple(members))
            self.n -= tr is None
            return
        k = self.k.open_attempt(new, tuple(members))
        assert k.open == new
        assert k.members == tuple(sorted(members))
        self.becomes(k, "open", "members", epoch=1)

    @rule(content=st.sampled_from(("d1", "d2", "d3")))
    def commit(self, content) -> None:
        """``CommitOf``; a rollback brings back the baseline and nothing else."""
        tr = self.k.open
        if tr is None or tr.stopped:
            self.is_no_change(self.k.commit, content, "root", "op")
            return
        back = tr.direction is Direction.BACK
        if back:
            self.is_no_change(self.k.commit, content + "x", "root", "op")
            content = self.k.baseline_id
        k = self.k.commit(content, "root", "op")
        assert k.version == (self.k.version if back else tr.target)
        assert k.baseline_id == content
        c = k.committed
        assert (c.version, c.epoch, c.candidate, c.direction) == (k.version, self.k.epoch, tr.candidate, tr.direction)
        assert (c.members, c.owners, c.pushes) == (self.k.members, tr.owners, tr.pushes)
        assert (c.manifest_root, c.operation_id) == ("root", "op")
        assert self.committed.setdefault(k.version, content) == content, "OneCommit"
        self.becomes(k, "version", "baseline_id", "open", "committed", epoch=0)

    @rule(found=st.sampled_from(("", "d1", "d2")))
    def stop(self, found) -> None:
        tr = self.k.open
        if tr is None:
            self.is_no_change(self.k.stop, found)
            return
        k = self.k.stop(found)
        assert k.open.stopped
        assert k.open.content_digest == (tr.content_digest or found)
        assert (k.open.attempts, k.open.kind, k.open.direction) == (tr.attempts, tr.kind, tr.direction)
        self.becomes(k, "open", epoch=1)

    @rule()
    def abandon(self) -> None:
        if self.k.open is None:
            self.is_no_change(self.k.abandon)
            return
        k = self.k.abandon()
        assert k.open is None
        self.becomes(k, "open", epoch=1)

    @rule()
    def open_restore(self) -> None:
        if self.k.open is not None:
            self.is_no_change(self.k.open_restore)
            return
        self.becomes(self.k.open_restore(), epoch=1)

    @rule(members=MEMBERS)
    def admit(self, members) -> None:
        """``AdmitThese``: as these incarnations; who is a member already stays one."""
        if self.k.open is not None:
            self.is_no_change(self.k.admit, tuple(members))
            return
        k = self.k.admit(tuple(members))
        roster = {m.engine: m.incarnation for m in (*self.k.members, *members)}
        assert {m.engine: m.incarnation for m in k.members} == roster
        assert len(k.members) == len(roster)
        self.becomes(k, "members", epoch=0)

    @rule(leader=st.sampled_from(("c", "c2", "c3")))
    def take_over(self, leader) -> None:
        k = self.k.take_over(leader)
        assert (k.leader, k.fencing_token) == (leader, self.k.fencing_token + 1)
        self.becomes(k, "leader", "fencing_token", epoch=1)

    @invariant()
    def reads_back_from_its_bytes(self) -> None:
        if hasattr(self, "k"):
            assert decode_record(encode_record(self.k)) == self.k
