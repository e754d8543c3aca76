"""Every bound of the runtime, in one validated object."""

import difflib
from typing import Self

import msgspec

from dcr.control_plane.lease import LEASE_S_MAX, LEASE_S_MIN
from dcr.protocol.conductor import GATE_MODES
from dcr.protocol.errors import RefusedError
from dcr.runtime.channel_address import LOOPBACK, ChannelAddress

BUCKET_BYTES_MAX = 128 << 20
"""Larger buckets could make payloads that receivers refuse (``Limits.payload_bytes_max``)."""


LARGEST = 1e9
"""Largest number that a setting may have; seconds beyond it overflow the clocks."""
MEMORY_LARGEST = 1 << 50
"""Largest bound for bytes in memory, which has more of them than clocks have seconds."""
THREADS_MAX = 64
"""Most threads of one stage, and buckets on their way."""
STAGE_BYTES_MAX = 8 << 30
RECEIVE_BYTES_MAX = 4 << 30

_LARGEST = {
    **dict.fromkeys(("stage_bytes_max", "receive_bytes_max", "event_log_bytes_max"), MEMORY_LARGEST),
    **dict.fromkeys(("buckets_ahead", "encode_threads", "deliver_threads", "fetch_ahead"), THREADS_MAX),
}

_CHOICES = {
    "operation": ("add", "xor"),
    "gate_mode": GATE_MODES,
    "readback": ("start", "restore", "always"),
    "coordinator": ("trainer", "elsewhere"),
    "stopped_push": ("raise", "wait"),
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds and sizes; the defaults are right on one machine.  Times are in seconds, sizes in bytes."""

    operation: str = "add"
    """Relative operation where it is allowed: ``add`` (smaller) or ``xor`` (the paper's)."""
    gate_mode: str = "sync"
    """When an engine's gate closes: before payloads are sent (``sync``) or once all are staged (``async``; D18)."""
    readback: str = "restore"
    """When an engine's storage is read back and compared: when its node starts (``start``), also after every restore
    (``restore``), or also after every refit (``always``); each time before the gate opens."""
    bucket_bytes: int = 8 << 20
    """Entries packed into one payload, before compression; at most BUCKET_BYTES_MAX."""
    buckets_ahead: int = 8
    """Buckets of one owner between detection and the store: with ``bucket_bytes``, the memory of an emission."""
    encode_threads: int = 1
    """Buckets that an owner encodes at once; each is spread over all cores already, where it is worth it."""
    deliver_threads: int = 4
    """Payloads that an owner sends to the store at once."""
    chunk_elements: int = 1 << 22
    """Elements compared with the baseline at a time."""
    refuse_nonfinite: bool = False
    """Refuse weights with NaN or infinities that the last version has not: ``push`` raises on every rank, before
    anything is opened or sent (``bench/fold.py`` measures what it costs)."""
    members_min: int = 1
    """Fewest engines that a commit needs."""
    attempts_max: int = 4
    """Attempts of one push before the transition stops."""
    coordinator: str = "trainer"
    """Where the trainer's coordinator is: in its first rank (``trainer``), or in whichever ``dcr coordinator`` process
    leads (``elsewhere``), so that a push survives that one's death (docs/coordinator.md)."""
    stopped_push: str = "raise"
    """What becomes of a push whose transition stopped: it ends with an error (``raise``), or waits for the operator's
    ``dcr transition`` (``wait``), within its ``push_timeout_s``.  The coordinator's setting counts."""
    restores_max: int = 3
    """Failed restores of one engine's incarnation before it is refused."""
    attempt_pause_timeout_s: float = 2.0
    """Pause before the third attempt of a push, if an owner or engine reported an error in each of the first two; the
    next such pauses are 2, 4 and at most 8 times as long."""
    prepare_timeout_s: float = 120.0
    """From the order to prepare until every member is fenced, drained and gated."""
    ack_timeout_s: float = 600.0
    """From open_apply until every member has acknowledged."""
    fold_timeout_s: float = 600.0
    """From the commit until every owner's baseline holds it."""
    restore_timeout_s: float = 1200.0
    """A whole restore session."""
    restore_pause_timeout_s: float = 2.0
    """Pause after a restore that failed."""
    members_timeout_s: float = 300.0
    """How long a push waits for ``members_min`` engines."""
    rejoin_timeout_s: float = 15.0
    """How long a coordinator that took over waits for the engines of its forerunner before it goes on without them."""
    ranks_timeout_s: float = 600.0
    """How long a push of some ranks waits for the others to call ``push`` too."""
    owners_timeout_s: float = 120.0
    """How long a push waits for an owner whose connection was lost."""
    verify_timeout_s: float = 600.0
    """How long a verification waits for the next answer of an owner or engine."""
    push_timeout_s: float = 7200.0
    """A whole push on one rank; longer than all its attempts together."""
    drain_timeout_s: float = 60.0
    """How long running requests may take to leave a closing gate."""
    delivery_timeout_s: float = 60.0
    """How long the next payload that an owner's manifest lists may stay out of sight, and the store unanswering."""
    connect_timeout_s: float = 60.0
    """First connection of an owner or node to the coordinator."""
    fetch_poll_s: float = 0.004
    """Pause between looks for the next payload when none was there; a store where looks cost makes it longer
    (``look_pause_s`` in the address of one of S3)."""
    fetch_ahead: int = 4
    """Payloads of each owner that a node reads from the store before its engines ask for them."""
    record_poll_s: float = 0.5
    """How often a node reads the commit record by itself."""
    serve_lease_s: float = 30.0
    """How long an engine serves on when its node cannot read the commit record (DESIGN D16)."""
    stage_bytes_max: int = STAGE_BYTES_MAX
    """Payload bytes that one rank holds in host memory until they are applied (DESIGN D18)."""
    receive_bytes_max: int = RECEIVE_BYTES_MAX
    """Payload bytes that a node keeps in shared memory for the ranks of its engines, until all have read them."""
    retain_epochs: int = 8
    """Epochs of payloads kept in the delivery store; older ones are swept."""
    retain_versions: int = 8
    """Commits whose payloads are kept beside those, so that an engine that starts from an older version can catch up
    (DESIGN D15)."""
    leader_lease_s: float = 30.0
    """How long a coordinator leads without reaching the control plane, before another one may (DESIGN D16)."""
    channel: str = LOOPBACK
    """How trainer, nodes and leader talk: ``loopback``, or ``tls:///folder/of/credentials`` with this process's
    credentials, on the trainer's first rank with where it listens, ``?listen=10.0.0.4:7100``
    (docs/control-channel.md)."""
    events_max: int = 10_000
    """Events waiting in one role's queue."""
    event_log: str = "beside"
    """Where every process writes the protocol steps that it takes (docs/event-log.md): in the folder
    ``<record>.events`` (``beside``; nowhere if the record is in no file), nowhere (``off``), or in the folder that is
    named here by its absolute path."""
    event_log_bytes_max: int = 256 << 20
    """Bytes that one actor of a process writes there; then its log ends, with a warning."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RefusedError(f"setting {name}: {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if not LEASE_S_MIN <= self.leader_lease_s <= LEASE_S_MAX:
            raise RefusedError(
                f"setting leader_lease_s: {self.leader_lease_s} must be from {LEASE_S_MIN:.0f} to {LEASE_S_MAX:.0f}"
            )
        try:
            ChannelAddress.parse(self.channel)
        except RefusedError as e:
            raise RefusedError(f"setting channel: {e}") from e
        if self.event_log not in ("beside", "off") and not self.event_log.startswith("/"):
            raise RefusedError(f"setting event_log: {self.event_log!r} is not one of beside, off, or an absolute path")
        if self.bucket_bytes > BUCKET_BYTES_MAX:
            raise RefusedError(f"setting bucket_bytes: {self.bucket_bytes} is more than {BUCKET_BYTES_MAX}")
        for name in self.__struct_fields__:
            value, largest = getattr(self, name), _LARGEST.get(name, LARGEST)
            if not isinstance(value, str | bool) and not 0 < value <= largest:
                raise RefusedError(f"setting {name}: {value!r} must be greater than 0 and at most {largest:.6g}")
        if self.serve_lease_s <= self.record_poll_s:
            raise RefusedError(
                f"setting serve_lease_s: {self.serve_lease_s} must be greater than record_poll_s, which is "
                f"{self.record_poll_s}: the gate would close between two reads of the record"
            )

    @classmethod
    def of(cls, values: dict[str, object]) -> Self:
        """Settings from a plain mapping; RefusedError names an unknown key or a value of the wrong type."""
        if not isinstance(values, dict):
            raise RefusedError(f"settings must be a Settings or a dict of some of its fields, not {values!r}")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as e:
            unknown = [k for k in values if k not in cls.__struct_fields__]
            near = [m for k in unknown for m in difflib.get_close_matches(str(k), cls.__struct_fields__, 1)]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise RefusedError(f"settings: {e}{hint}") from e
