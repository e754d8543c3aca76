"""Lines of a protocol event log: what every actor wrote down of the steps it took.  The contract: docs/event-log.md."""

from typing import Self

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import StorageState
from dcr.protocol.step import Step

EVENT_LOG_VERSION = 1
LINE_BYTES_MAX = 1 << 20
"""A line that is longer is no event: K, the largest thing in one, has at most 64 KiB as MessagePack."""

ROLES = ("coordinator", "owner", "node", "rank")


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first event of an actor, and of one that was attached to anew."""

    log_version: int
    record_id: str
    gate_mode: str = ""
    """Of a coordinator: ``sync`` or ``async``."""
    baseline_digest: str = ""
    """Of an owner: its share of the baseline's content digest; empty if it has none."""
    ranks: dict[str, int] = {}
    """Of a node: incarnation of each of the engine's ranks, by the rank's name."""
    state: StorageState | None = None
    """Of a node: what the engine's storage holds."""


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line: who, the how-manieth of this actor, and what it did."""

    seq: int
    """0, 1, 2, ... in one file."""
    role: str
    name: str
    """Of the leader, owner or engine; a rank has its engine's."""
    incarnation: int
    """0 for a coordinator, whose name is new with every start."""
    k: int = 0
    """Revision of K that this node has read last; 0 for everybody else."""
    start: Start | None = None
    step: Step | None = None
    full: bool = False
    """Nothing more is written down: the bound of the log is reached."""

    @property
    def action(self) -> str:
        """The step's; ``Start`` or ``Full`` for a line that is none."""
        if self.step is not None:
            return self.step.action
        return "Start" if self.start is not None else "Full"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Read a line; RefusedError if it is no event of this version of dcr."""
        if len(line) > LINE_BYTES_MAX:
            raise RefusedError(f"a line of {len(line)} bytes: an event has at most {LINE_BYTES_MAX}")
        try:
            event = _decoder.decode(line)
        except msgspec.MsgspecError as e:
            raise RefusedError(f"no event that this version of dcr can read: {e}") from e
        if event.role not in ROLES:
            raise RefusedError(f"no event: its role is {event.role!r}, none of {', '.join(ROLES)}")
        if (event.start is not None) + (event.step is not None) + event.full != 1:
            raise RefusedError("no event: it is not one of a start, a step and the end of a full log")
        if event.start is not None and event.start.log_version != EVENT_LOG_VERSION:
            raise RefusedError(
                f"event log version {event.start.log_version}; this version of dcr reads {EVENT_LOG_VERSION}"
            )
        return event  # type: ignore[return-value]

    def encode(self) -> bytes:
        """The line, with its end."""
        return msgspec.json.encode(self) + b"\n"


_decoder = msgspec.json.Decoder(Event)
