"""What a node agent and the host of one rank say to each other; bytes, since the rank may live in another process."""

import msgspec

from dcr.data_plane.bits import dtype_name, dtype_of
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import PayloadIdentity
from dcr.protocol.messages import OpenApply, StorageState
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, RankState
from dcr.protocol.record import CommitRecord
from dcr.runtime.settings import STAGE_BYTES_MAX


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class WireSpec(msgspec.Struct, frozen=True, array_like=True):
    """A canonical tensor's spec in plain values."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, spec: TensorSpec) -> "WireSpec":
        """From a spec."""
        return cls(spec.name, spec.shape, dtype_name(spec.dtype))

    @property
    def spec(self) -> TensorSpec:
        """Back to a spec."""
        return TensorSpec(self.name, self.shape, dtype_of(self.dtype))


class Attach(_Message, frozen=True):
    """First call of a node agent: learn the storage, or find it as an earlier agent left it."""

    engine: str
    record_id: str
    specs: tuple[WireSpec, ...]
    loaded_digest: str
    """Content digest of what the loader was fed; empty if unknown."""
    stage_bytes_max: int = STAGE_BYTES_MAX
    """Payload bytes that may be held in host memory until they are applied (DESIGN D18)."""
    event_log: str = ""
    """Folder in which the rank writes its steps down; empty if it writes none."""
    event_log_bytes_max: int = 0


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank finds a payload that its node received: a file in memory, which it maps and never trusts."""

    path: str
    size: int
    digest: str
    """``payload_digest`` of the bytes as the node received them."""


class Payload(_Message, frozen=True):
    """Bytes fetched for this identity; in shared memory where the node serves several ranks with one copy."""

    identity: PayloadIdentity
    data: bytes | Shared


class SealedManifest(_Message, frozen=True):
    """Manifest bytes fetched for an owner and epoch."""

    owner: str
    epoch: int
    data: bytes


class Undeliverable(_Message, frozen=True):
    """Something of this epoch cannot be fetched."""

    epoch: int
    reason: str


class WriteOn(_Message, frozen=True):
    """The answer to ``OpenApply``, or to this, came before all that is held of this epoch was written: go on."""

    epoch: int


class Learn(_Message, frozen=True):
    """K was read."""

    record: CommitRecord


class Orphans(_Message, frozen=True):
    """Canonical tensors that no rank of the engine holds: changes of them would be lost without a trace."""

    names: tuple[str, ...]


class ReadBack(_Message, frozen=True):
    """Read storage back: nothing is written."""


class BeginCatchUp(_Message, frozen=True):
    """Before the engine takes part: what comes next are attempts that were committed, applied one after the other.

    From here to the end of it storage is taken to hold nothing that is known (DESIGN D5, D15).
    """


class EndCatchUp(_Message, frozen=True):
    """It is over: storage is as if its loader had been fed the version with this content digest."""

    content_digest: str
    """Empty if it failed: storage holds nothing that is known."""


Request = (
    Attach
    | PrepareRank
    | OpenApply
    | WriteOn
    | Payload
    | SealedManifest
    | Undeliverable
    | Learn
    | Orphans
    | ReadBack
    | BeginCatchUp
    | EndCatchUp
)


class HeldBox(msgspec.Struct, frozen=True, array_like=True):
    """Flat indices ``offset + i . strides``, 0 <= i < sizes, of a canonical tensor, and the digest of their bits.

    Two boxes of the same indices have the same sizes, strides and offset, on whatever rank.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    digest: str


class Contents(_Message, frozen=True):
    """What the rank holds, read back from storage."""

    held: dict[str, tuple[HeldBox, ...]]
    """By canonical tensor; nothing of those that are skipped here and not tied."""
    wrong: dict[str, str]
    """What is not as the loader leaves it, seen from here alone, by canonical tensor."""
    unread: tuple[str, ...]
    """Canonical tensors that the loader transforms: there is no way back from storage to their bits."""


class Attached(_Message, frozen=True):
    """What the rank is."""

    incarnation: int
    set_only: tuple[str, ...]
    skipped: tuple[str, ...]
    """Canonical tensors of which this rank holds nothing."""
    refused: dict[str, str]
    tied: tuple[str, ...] = ()
    """Those skipped whose resident memory is known to be written from another canonical tensor."""


Result = Attached | RankPrepared | RankStaged | RankAcknowledged | RankFailed | RankState | Contents


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rank's answer to one request."""

    results: tuple[Result, ...]
    state: StorageState
    refused: str = ""
    """Why the request was refused; then nothing was changed."""
    corrupt: bool = False
    """The refusal is about the bytes as fetched; fetching them again may help."""
    seconds: dict[str, float] = {}
    """Stage times of the epoch so far, with an acknowledgement."""
    held: int = 0
    """Payloads that are held in host memory and not written yet (DESIGN D18)."""
    broken: str = ""
    """The rank failed at something that it did not expect: what it has done is unknown, and the engine is lost (D9)."""


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Bytes of a request or an answer."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Read a request; RefusedError on anything else."""
    try:
        return _request_decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"the rank was sent something that is no request of this version of dcr: {e}") from e


def decode_answer(data: bytes) -> Answer:
    """Read an answer; RefusedError on anything else."""
    try:
        return _answer_decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"the rank answered with something that is no answer of this version of dcr: {e}") from e
