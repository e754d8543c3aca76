"""What must hold, compared on concrete cells and on K as it was stored, never asked of the roles.

Names are those of the specification's properties (``spec/tla/README.md``); docs/simulator.md says which check stands
for which, and names the others.
"""

from collections.abc import Callable

from dcr.protocol.record import CommitRecord, Direction


class BrokenError(Exception):
    """An invariant does not hold.

    Args:
        invariant: its name.
        what: what was found, for people.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.what = what


def holds(condition: object, invariant: str, what: Callable[[], str] | str) -> None:
    """BrokenError unless the condition is true."""
    if not condition:
        raise BrokenError(invariant, what if isinstance(what, str) else what())


def under_way(k: CommitRecord) -> bool:
    """An attempt was opened, and not committed, abandoned or stopped."""
    return k.open is not None and not k.open.stopped


def first_record(new: CommitRecord) -> None:
    """CreateRecord: version 0 of nothing else."""
    first = (new.version, new.epoch, new.open, new.committed) == (0, 0, None, None)
    holds(first, "MonotoneRecord", "K does not begin at version 0")


def record_step(old: CommitRecord, new: CommitRecord, reason: str, members_min: int) -> None:
    """MonotoneRecord and OneCommit: how K may change from one write to the next (`RecordStep` of Refit.tla)."""
    name = "MonotoneRecord"
    holds(new.record_id == old.record_id, name, "another record")
    grown = 0 if reason in ("Commit", "Admit") else 1
    holds(new.epoch == old.epoch + grown, name, lambda: f"{reason} moved the epoch from {old.epoch} to {new.epoch}")
    taken = reason == "TakeOver"
    holds(new.fencing_token == old.fencing_token + taken, name, "the fencing token")
    holds(new.leader == old.leader or taken, name, "only a take-over changes leaders")
    if new.open is not None:
        holds(new.members, name, "a transition without members")
        if not new.open.stopped:
            enough = len(new.members) >= members_min
            holds(enough, "EnoughMembers", "an attempt with fewer than members_min")
        first = new.open.attempts == 1 or new.open.kind.value != "relative"
        holds(first, name, "an attempt after the first is relative")
    if new.open is not None and old.open is not None:
        holds(new.open.candidate == old.open.candidate, name, "a transition changes its candidate")
        counted, found = old.open.attempts + (reason == "OpenAttempt"), new.open.attempts
        holds(found == counted, name, lambda: f"{reason} counts {found} attempts")
        turned = old.open.direction is Direction.BACK and new.open.direction is Direction.FORWARD
        holds(not turned, name, "a rollback is turned forward")
    if reason != "Commit":
        same = (new.version, new.baseline_id, new.committed) == (old.version, old.baseline_id, old.committed)
        holds(same, name, lambda: f"{reason} changes what is committed")
        kept = new.epoch > old.epoch or new.open == old.open
        holds(kept, name, "a transition changes without a new epoch")
        return
    _commit_step(old, new)


def _commit_step(old: CommitRecord, new: CommitRecord) -> None:
    name = "OneCommit"
    holds(under_way(old), name, "a commit without an attempt under way")
    assert old.open is not None
    holds(new.open is None, name, "a commit that leaves its transition open")
    c, before = new.committed, old.committed
    holds(c is not None, name, "a commit is forgotten")
    assert c is not None
    said = (c.version, c.epoch, c.candidate, c.owners, c.direction)
    meant = (new.version, old.epoch, old.open.candidate, old.open.owners, old.open.direction)
    holds(said == meant, name, lambda: f"the commit of {meant} says {said}")
    back = c.direction is Direction.BACK
    holds(new.version == old.version + (not back), name, "the version does not grow by one with a commit")
    holds(not back or new.baseline_id == old.baseline_id, name, "a rollback changes the content")
    holds(before is None or c.epoch > before.epoch, name, "an epoch was committed twice")
    holds(c.members == old.members == new.members, name, "a commit by others than the attempt required")
