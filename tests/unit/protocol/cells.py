"""Weights small enough to compare whole: a few integer cells, their digests, and payloads over them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload
from dcr.protocol.messages import Emit

MODULUS = 1 << 16
RECORD_ID = "policy"
ENTRIES_A_PAYLOAD = 2


def _element(index: int, value: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d=%d" % (index, value), digest_size=16).digest(), "big")


def content_digest(cells: Mapping[int, int]) -> str:
    """The content digest of these cells: an order-free sum over (index, value)."""
    return _digest(tuple(sorted(cells.items())))


@lru_cache(maxsize=4096)
def _digest(cells: tuple[tuple[int, int], ...]) -> str:
    return f"{sum(_element(i, v) for i, v in cells) % (1 << 128):032x}"


@dataclass(frozen=True)
class Payload:
    identity: PayloadIdentity
    base: Base
    entries: tuple[tuple[str, int, int], ...]
    """(operation, index, value)."""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.identity, self.base, self.entries)).encode()).hexdigest()


def operate(operation: str, resident: int, value: int) -> int:
    match operation:
        case "set":
            return value
        case "add":
            return (resident + value) % MODULUS
        case "xor":
            return resident ^ value
    raise AssertionError(operation)


def emission(
    order: Emit, owner: str, incarnation: int, weights: Mapping[int, int], baseline: Mapping[int, int] | None
) -> tuple[list[Payload], Manifest]:
    """What an owner of these cells emits for this order."""
    of_baseline = order.target == order.base.version  # a restore, or a rollback
    source = baseline if of_baseline else weights
    assert source is not None
    entries: list[tuple[str, int, int]] = []
    for i, v in sorted(source.items()):
        if order.base.kind in (Kind.DENSE, Kind.RESTORE):
            entries.append(("set", i, v))
            continue
        assert baseline is not None
        if weights[i] == baseline[i]:
            continue
        match order.operation:
            case "add":
                entries.append(("add", i, (v - baseline[i]) % MODULUS))
            case "xor":
                entries.append(("xor", i, v ^ baseline[i]))
            case "set":
                entries.append(("set", i, v))
    payloads = [
        Payload(
            PayloadIdentity(order.record_id, order.target, order.epoch, owner, incarnation, n),
            order.base,
            tuple(entries[at : at + ENTRIES_A_PAYLOAD]),
        )
        for n, at in enumerate(range(0, len(entries), ENTRIES_A_PAYLOAD))
    ]
    manifest = Manifest(
        record_id=order.record_id,
        target=order.target,
        epoch=order.epoch,
        owner=owner,
        owner_incarnation=incarnation,
        base=order.base,
        payloads=tuple(SealedPayload(p.identity.sequence, p.digest, len(p.entries), 8) for p in payloads),
        content_digest=content_digest(source),
        changed_entries=len(entries),
        owned_elements=len(source),
    )
    return payloads, manifest
