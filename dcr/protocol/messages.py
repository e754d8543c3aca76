"""What travels on the control channel: orders from the leader, reports to it.  Both are contracts.

Every order carries record id and epoch and is refused below the fence (DESIGN D6).  Every report carries the
incarnation that made it, so that a report of a dead process is never taken for one of its successor.
"""

import enum

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base
from dcr.protocol.layer_changes import Layers
from dcr.protocol.record import CommitRecord, OwnerRef

CONTROL_VERSION = 1
"""Version of the messages on this page; stated by every peer when it reports for the first time."""


REASON_CHARS_MAX = 2000
"""Longest reason that travels: what a loader or a store says may be of any length."""


def cut(reason: str, chars_max: int = REASON_CHARS_MAX) -> str:
    """A reason that fits into a message; the beginning and the end of a longer one."""
    if len(reason) <= chars_max:
        return reason
    half = chars_max // 2
    return f"{reason[:half]} ... ({len(reason) - 2 * half} characters left out) ... {reason[-half:]}"


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class StorageState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine's storage holds (DESIGN D5)."""

    version: int | None
    """The last version whose bits the whole storage held; None if there was none, or if it is not known which."""
    content_digest: str
    """Content digest of that version; empty if unknown."""
    torn_by: tuple[str, ...]
    """What wrote since then: candidate tokens, ``dense``, ``restore`` or ``unknown``; empty means clean."""

    @property
    def clean(self) -> bool:
        """True if no byte was written since storage last held a version."""
        return not self.torn_by


# ---------------------------------------------------------------- orders to members


class Prepare(_Message, frozen=True):
    """Raise the fence, drop older stages, let older writes end, close the gate, answer with ``Prepared``."""

    record_id: str
    epoch: int
    target: int
    """The version that the payloads help to reach; that of the base for a restore and for a rollback (DESIGN D17)."""
    base: Base
    owners: tuple[OwnerRef, ...]
    incarnation: int
    """Of the engine that is meant: its successor has other storage and refuses."""
    stage: bool = False
    """Asynchronous gate: keep payloads in host memory and the gate open until ``OpenApply`` (DESIGN D18)."""


class OpenApply(_Message, frozen=True):
    """From here on payloads of this epoch may be written."""

    record_id: str
    epoch: int


class Published(_Message, frozen=True):
    """K has changed: read it and act on what it says (never on this message)."""

    record_id: str
    epoch: int


class Refuse(_Message, frozen=True):
    """The leader will not take this engine in, ever, as it is."""

    record_id: str
    epoch: int
    reason: str


# ---------------------------------------------------------------- orders to owners


class Emit(_Message, frozen=True):
    """Detect, encode and deliver one attempt or restore session, then seal it."""

    record_id: str
    epoch: int
    target: int
    base: Base
    operation: str
    """The relative operation to use where it is allowed."""
    set_only: tuple[str, ...]
    """Canonical tensors that some member's loader transforms: only ``set`` may be used."""
    incarnation: int
    """The owner's: another one, which may hold another baseline, emits nothing that rests on one."""


class Fold(_Message, frozen=True):
    """The epoch was committed: read K, then copy the candidate into the baseline."""

    record_id: str
    epoch: int


class Outcome(_Message, frozen=True):
    """How a push ended; every owner's ``push`` returns or raises on it."""

    record_id: str
    epoch: int
    version: int
    candidate: str
    error: str
    """Empty on success."""
    summary: dict[str, float | int | str | list[str]]
    incarnation: int = 0
    push: int = 0
    """Which push of which incarnation of the receiving owner this ends, as its ``CandidateReady`` said (push 0:
    whichever waits); any other push must ignore it, for it may come late, or twice."""
    layers: Layers = ()
    """Of the attempt that was committed, over all owners; empty if there was none, or if it compared nothing."""


# ---------------------------------------------------------------- reports from members


class Join(_Message, frozen=True):
    """Sent on every connection: who I am and what my storage holds."""

    engine: str
    incarnation: int
    control_version: int
    wire_version: int
    operations: tuple[str, ...]
    state: StorageState
    set_only: tuple[str, ...]
    """Canonical tensors that this engine's loader transforms."""
    refused: dict[str, str]
    """Canonical tensors that this engine's loader cannot take, with the reason."""


class Prepared(_Message, frozen=True):
    """The fence is up, the gate is closed, and no older write can take effect any more."""

    engine: str
    incarnation: int
    epoch: int
    state: StorageState


class Staged(_Message, frozen=True):
    """Asynchronous gate: everything of this epoch lies in host memory; the old version is still served (DESIGN D18)."""

    engine: str
    incarnation: int
    epoch: int


class Acknowledged(_Message, frozen=True):
    """Every owner's manifest is complete here, and every payload is applied and synchronised (DESIGN D8)."""

    engine: str
    incarnation: int
    epoch: int
    manifest_root: str
    seconds: dict[str, float]
    """Stage times, for people; no rule depends on them."""


class AttemptFailed(_Message, frozen=True):
    """This member cannot acknowledge this epoch any more."""

    engine: str
    incarnation: int
    epoch: int
    reason: str
    state: StorageState


class Serving(_Message, frozen=True):
    """The gate is open at this version."""

    engine: str
    incarnation: int
    epoch: int
    version: int


# ---------------------------------------------------------------- reports from owners


class OwnerJoin(_Message, frozen=True):
    """Sent on every connection: which owner, and its share of the baseline's content digest."""

    owner: str
    incarnation: int
    control_version: int
    baseline_digest: str
    """Empty if this owner has no baseline."""


class CandidateReady(_Message, frozen=True):
    """``push`` was called on this rank: its weights are a candidate and stay as they are until the outcome."""

    owner: str
    incarnation: int
    push: int
    """1, 2, 3, ...: which push of this incarnation."""
    refused: str = ""
    """Why this rank's weights may not become a version: then the push ends on every rank, and nothing is opened.  Said
    of a push whose transition is open by then, it turns that back (DESIGN D17)."""
    dense: bool = False
    """Send every element (DESIGN D14); one rank that says so is enough."""


class Withdraw(_Message, frozen=True):
    """That push was given up on its rank (time-out, interrupt): its weights are no candidate any more."""

    owner: str
    incarnation: int
    push: int


class Sealed(_Message, frozen=True):
    """The owner's manifest of this epoch is delivered."""

    owner: str
    incarnation: int
    epoch: int
    manifest_digest: str
    content_digest: str
    payloads: int
    payload_bytes: int
    changed_entries: int
    owned_elements: int
    seconds: dict[str, float]
    layers: Layers = ()
    """What changed in the elements of this owner; empty if nothing was compared."""


class EmitFailed(_Message, frozen=True):
    """The owner cannot seal this epoch."""

    owner: str
    incarnation: int
    epoch: int
    reason: str
    fatal: bool
    """True if another attempt with these weights cannot succeed either."""
    given_up: int = 0
    """The push of this candidate, if it was given up on this rank: as ``Withdraw`` says, which may be lost (D10)."""


class Folded(_Message, frozen=True):
    """The owner's baseline holds the committed version."""

    owner: str
    incarnation: int
    epoch: int
    baseline_digest: str
    """Empty if the baseline was lost: then the next transition is dense (DESIGN D17)."""
    reason: str
    """Why it was lost; empty on success."""
    seconds: dict[str, float]


# ---------------------------------------------------------------- verification, which changes nothing


class Verify(_Message, frozen=True):
    """Of an operator: compare what engines hold with the owners' baseline, tensor by tensor, by digests (DESIGN D2)."""

    record_id: str


class ShowContents(_Message, frozen=True):
    """To an owner: deliver the digests of what you have committed, and say where they are."""

    record_id: str
    epoch: int
    """Of K now; a fold that is due comes first."""


class TableRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One owner's digests in the delivery store."""

    key: str
    digest: str
    """Of the object's bytes."""


class ContentsShown(_Message, frozen=True):
    """An owner's answer to ``ShowContents``."""

    owner: str
    incarnation: int
    epoch: int
    table: TableRef | None
    baseline_digest: str
    """The sum over its digests: its share of the committed version's."""
    reason: str
    """Why there is no table; empty on success."""


class CompareContents(_Message, frozen=True):
    """To an engine: read storage back and compare it with these digests, tensor by tensor."""

    record_id: str
    epoch: int
    version: int
    tables: tuple[TableRef, ...]


class ContentsCompared(_Message, frozen=True):
    """An engine's answer to ``CompareContents``."""

    engine: str
    incarnation: int
    epoch: int
    tensors: int
    """How many were compared."""
    elements: int
    """Of these, in all."""
    different: dict[str, str]
    """Tensors whose bits are not the committed ones, and how; the first few."""
    different_count: int
    unread: dict[str, str]
    """Tensors that have no way back from storage, and why; the first few."""
    unread_count: int
    reason: str
    """Why nothing could be compared; empty otherwise."""
    seconds: float


class Verified(_Message, frozen=True):
    """To the operator: what one engine answered, or why none can be asked."""

    record_id: str
    version: int
    owners: int
    engine: ContentsCompared | None
    left: int
    """Engines that have not answered yet."""
    error: str
    """Why the verification ended without all answers; empty otherwise."""


# ---------------------------------------------------------------- an operator's orders


class Intervention(enum.StrEnum):
    """What an operator orders of the open transition (DESIGN D14, D17)."""

    SHOW = "show"
    """Nothing: say how it stands."""
    RESUME = "resume"
    ABANDON = "abandon"
    DENSE = "dense"
    """Resume, and send every element."""
    ROLL_BACK = "roll-back"


class Intervene(_Message, frozen=True):
    """Of an operator, to the leader."""

    record_id: str
    what: Intervention
    order_id: str = ""
    """New with every order: an operator that lost the answer asks again under the same one, and is obeyed once."""


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that does not serve, or may not, as far as the leader knows."""

    engine: str
    state: str
    """``refused``, ``away`` (not connected), ``unjoined`` (connected, and has not asked to be let in), ``silent`` (let
    a time-out pass), ``gated`` (its storage is not the committed version), ``evicted`` or ``waiting`` (to be let in).
    """
    why: str
    """For people: what it holds, and what it failed at."""


class Intervened(_Message, frozen=True):
    """To the operator: how the record stood when the order came, and what follows from it."""

    record_id: str
    leader: str
    record: CommitRecord | None
    """K; None while the leader has not taken it over."""
    phase: str
    """Of the leader."""
    waits_for: str
    """Whom or what the leader waits for, for people; empty if for nobody."""
    waiting: tuple[str, ...]
    """Owners whose push waits for its outcome."""
    failures: tuple[str, ...]
    """Why attempts of the push that waits have failed."""
    refused: str
    """Why nothing was done; empty if the order is obeyed."""
    standings: tuple[Standing, ...] = ()
    """Engines that do not serve, by name, the first ``standing.STANDINGS_MAX`` of them."""
    standings_left_out: int = 0
    """How many more there are."""
    again: bool = False
    """It is refused only for the moment: this leader, or its successor, may obey when it is asked again."""


Order = (
    Prepare
    | OpenApply
    | Published
    | Refuse
    | Emit
    | Fold
    | Outcome
    | ShowContents
    | CompareContents
    | Verified
    | Intervened
)
MemberReport = Join | Prepared | Staged | Acknowledged | AttemptFailed | Serving
OwnerReport = OwnerJoin | CandidateReady | Withdraw | Sealed | EmitFailed | Folded
Report = MemberReport | OwnerReport | Verify | ContentsShown | ContentsCompared | Intervene

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode_message(message: Order | Report) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def decode_order(data: bytes) -> Order:
    """Read an order; RefusedError on anything else."""
    try:
        return _order_decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"not an order of control version {CONTROL_VERSION}: {e}") from e


def decode_report(data: bytes) -> Report:
    """Read a report; RefusedError on anything else."""
    try:
        return _report_decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"not a report of control version {CONTROL_VERSION}: {e}") from e
