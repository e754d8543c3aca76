"""Which committed attempts lead from what an engine holds to the committed version, and whether they are all there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcr.delivery.interface import committed_key, manifest_key
from dcr.protocol.errors import DcrError
from dcr.protocol.identity import Kind, Manifest, decode_manifest, manifest_root
from dcr.protocol.record import CommitRecord
from dcr.protocol.session import digest_sum
from dcr.runtime.committed_attempt import BYTES_MAX, CommittedAttempt
from dcr.runtime.incoming import MANIFEST_BYTES_MAX
from dcr.runtime.refit_status import in_bytes

Look = Callable[[Sequence[str], int], Sequence[bytes | None]]
"""Reads objects of the store, given their keys and the largest size of one; None for each that is not there."""

COMMITS_MAX = 1000
"""So many commits are followed back at most."""


class CannotCatchUpError(DcrError):
    """The way from what an engine holds to the committed version is not there, or not whole: it is restored."""


@dataclass(frozen=True)
class Plan:
    """Attempts to apply, the oldest first; at least one.

    Attributes:
        attempts: what leads to the committed version, each made against the one before it.
        payloads: of each attempt, how many.
        sizes: of each attempt, bytes of its payloads.
    """

    attempts: tuple[CommittedAttempt, ...]
    payloads: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def version(self) -> int:
        """The version that it leads to."""
        return self.attempts[-1].target

    @property
    def content_digest(self) -> str:
        """Content digest of that version."""
        return self.attempts[-1].content_digest

    def __str__(self) -> str:
        first, n = self.attempts[0], len(self.attempts)
        start = "a dense attempt for" if first.base.kind is Kind.DENSE else "version"
        version = first.target if first.base.kind is Kind.DENSE else first.base.version
        return (
            f"from {start} {version} to {self.version}: {n} version{'s' if n > 1 else ''}, {sum(self.payloads)} "
            f"payloads, {in_bytes(sum(self.sizes))}"
        )


def plan(look: Look, record: CommitRecord, held: str) -> Plan | None:
    """What to apply.

    Everything but the payloads themselves is read and compared here, so that little is found missing when storage is
    half way: commits from K backwards, each of which names the one before it; and the manifests of their owners.

    Args:
        look: reads the store.
        record: K.
        held: content digest of what storage holds; empty if unknown, and then only a dense attempt leads on.

    Returns:
        None if storage holds the committed version.

    Raises:
        CannotCatchUpError: something is missing or is not what was committed.
        DeliveryError: the store could not be used, or what it holds was not written by a process of this run.
        RefusedError: an object is larger than what it should be, or is none that this version of dcr can read.
    """
    if record.baseline_id == held:
        return None
    attempts = _attempts(look, record, held)
    manifests = [committed_manifests(look, a) for a in attempts]
    lines = [[p for m in found for p in m.payloads] for found in manifests]
    return Plan(tuple(attempts), tuple(map(len, lines)), tuple(sum(p.size_bytes for p in of) for of in lines))


def _attempts(look: Look, record: CommitRecord, held: str) -> list[CommittedAttempt]:
    c = record.committed
    epoch, root = (0, "") if c is None else (c.epoch, c.manifest_root)
    digest, version = record.baseline_id, record.version
    found: list[CommittedAttempt] = []
    for _ in range(COMMITS_MAX):
        if digest == held:
            return found[::-1]
        if epoch == 0:
            break
        a = _attempt(look, record.record_id, epoch)
        named = (record.record_id, version, digest, root or a.manifest_root)  # K names the root of the last one
        if (a.record_id, a.target, a.content_digest, a.manifest_root) != named:
            raise CannotCatchUpError(f"what was left of epoch {epoch} is of another commit than version {version}")
        if not a.back:
            found.append(a)
            if a.base.kind is Kind.DENSE:  # what is there before it does not matter
                return found[::-1]
        epoch, digest, version, root = a.before, a.base_digest, a.base.version, ""
    if not held:
        raise CannotCatchUpError(f"what it holds is not known, and no attempt since version {version} was dense")
    raise CannotCatchUpError(f"it holds content {held}, which is no version from {version} to {record.version}")


def _attempt(look: Look, record_id: str, epoch: int) -> CommittedAttempt:
    (data,) = look([committed_key(record_id, epoch)], BYTES_MAX)
    if data is None:
        raise CannotCatchUpError(f"the payloads of epoch {epoch} are not kept any more, or never were")
    a = CommittedAttempt.decode(data)
    if a.epoch != epoch:
        raise CannotCatchUpError(f"what was left of epoch {epoch} is of epoch {a.epoch}")
    return a


def committed_manifests(look: Look, a: CommittedAttempt) -> list[Manifest]:
    """The owners' manifests of an attempt, which are what was committed; raises as ``plan`` does."""
    keys = [manifest_key(a.record_id, a.target, a.epoch, o.owner, o.incarnation) for o in a.owners]
    found = look(keys, MANIFEST_BYTES_MAX)
    gone = [o.owner for o, data in zip(a.owners, found, strict=True) if data is None]
    if gone:
        raise CannotCatchUpError(f"the manifest of {gone[0]}, epoch {a.epoch}, is not kept any more")
    manifests = [decode_manifest(data) for data in found if data is not None]
    root = manifest_root({o.owner: m.digest() for o, m in zip(a.owners, manifests, strict=True)})
    if root != a.manifest_root:
        raise CannotCatchUpError(f"the manifests of epoch {a.epoch} are not those that were committed")
    if digest_sum([m.content_digest for m in manifests]) != a.content_digest:
        raise CannotCatchUpError(f"the manifests of epoch {a.epoch} lead to another content than what was committed")
    return manifests
