"""The trail that roles leave: one ``Step`` for each action of the protocol that was taken."""

import msgspec

from dcr.protocol.identity import PayloadIdentity
from dcr.protocol.record import CommitRecord, Member, OwnerRef


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """An action was taken, under the name that docs/protocol.md and the spec give it.

    Roles emit it before the effects that carry the action out, so that whoever watches sees the step first.  What the
    action was taken with stands in fields of its own, each set by the actions that it names; ``detail`` is for people.
    """

    actor: str
    action: str
    epoch: int
    detail: str = ""
    record: CommitRecord | None = None
    """K as it was written: every write of the leader."""
    revision: int = 0
    """Of K, with ``record``."""
    operation_id: str = ""
    """Of that write; also ReadBack and WriteAgain."""
    members: tuple[Member, ...] = ()
    """Who is restored: OpenRestore."""
    owners: tuple[OwnerRef, ...] = ()
    """Who restores them."""
    payload: PayloadIdentity | None = None
    """BeginWrite, EndWrite, FailWrite."""
    owner: OwnerRef | None = None
    """Whose seal it is: DeliverManifest."""
    payloads: int = 0
    """How many are sealed: Seal."""
    content_digest: str = ""
    """This owner's share of what is sealed: Seal."""
    version: int | None = None
    """Which is served: OpenGate."""
    armed: bool = True
    """Whether storage takes the attempt's payloads; false fails it: Fence."""
