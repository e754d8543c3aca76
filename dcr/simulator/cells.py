"""Weights small enough to compare whole: a few integer cells, their digests, and payloads over them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload
from dcr.protocol.messages import Emit

RECORD_ID = "policy"
MODULUS = 1 << 16
"""A cell is one element of 16 bits."""
ENTRIES_A_PAYLOAD = 2

Cells = dict[int, int]
"""Value by flat index."""


@lru_cache(maxsize=1 << 14)
def _element(index: int, value: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d=%d" % (index, value), digest_size=16).digest(), "big")


def content_digest(cells: Mapping[int, int]) -> str:
    """The content digest of these cells, 32 hexadecimal digits: an order-free sum over (index, value) (DESIGN D2)."""
    return f"{sum(_element(i, v) for i, v in cells.items()) % (1 << 128):032x}"


def mixed(number: int, index: int) -> int:
    """A number below 2^32 that both arguments decide: what a schedule chose, spread over cells."""
    x = (number * 0x9E3779B1 + index * 0x85EBCA77 + 0x27D4EB2F) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True, slots=True)
class Payload:
    """One bucket on the wire."""

    identity: PayloadIdentity
    base: Base
    entries: tuple[tuple[str, int, int], ...]
    """(operation, index, value)."""
    digest: str
    """What it digests: two payloads have the same digest if, and only if, they are the same."""


def operate(operation: str, resident: int, value: int) -> int:
    """What an entry makes of a resident value."""
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
    """What an owner of these cells emits for this order: payloads in their sequence, and the manifest over them."""
    base = order.base
    of_baseline = order.target == base.version  # a restore, or a rollback
    source = baseline if of_baseline else weights
    assert source is not None
    if base.kind in (Kind.DENSE, Kind.RESTORE):
        entries = [("set", i, v) for i, v in sorted(source.items())]
    else:
        assert baseline is not None
        changed = [i for i in sorted(weights) if weights[i] != baseline[i]]
        entries = [_entry(order.operation, i, baseline[i], source[i]) for i in changed]
    payloads = []
    for n, at in enumerate(range(0, len(entries), ENTRIES_A_PAYLOAD)):
        identity = PayloadIdentity(order.record_id, order.target, order.epoch, owner, incarnation, n)
        part = tuple(entries[at : at + ENTRIES_A_PAYLOAD])
        digest = f"{order.epoch}/{owner}.{incarnation}/{n} {base.kind} {base.version} {base.candidate} {part}"
        payloads.append(Payload(identity, base, part, digest))
    manifest = Manifest(
        record_id=order.record_id,
        target=order.target,
        epoch=order.epoch,
        owner=owner,
        owner_incarnation=incarnation,
        base=base,
        payloads=tuple(SealedPayload(n, p.digest, len(p.entries), 8) for n, p in enumerate(payloads)),
        content_digest=content_digest(source),
        changed_entries=len(entries),
        owned_elements=len(source),
    )
    return payloads, manifest


def other_payload(p: Payload, salt: int) -> Payload:
    """What nobody sealed: this payload as another incarnation's, or under its own name with other bytes."""
    i = p.identity
    if salt // 4 % 2 == 0:
        i = msgspec.structs.replace(i, owner_incarnation=i.owner_incarnation + 1)
    entries = tuple((operation, at, (value + 1 + salt) % MODULUS) for operation, at, value in p.entries)
    return Payload(i, p.base, entries, f"{p.digest} as {i.owner_incarnation}: {entries}")


def _entry(operation: str, index: int, old: int, new: int) -> tuple[str, int, int]:
    match operation:
        case "add":
            return ("add", index, (new - old) % MODULUS)
        case "xor":
            return ("xor", index, new ^ old)
    return ("set", index, new)
