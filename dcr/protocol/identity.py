"""Names of payloads and seals of attempts (DESIGN D7, D8)."""

import enum
import hashlib

import msgspec

from dcr.protocol.errors import CorruptPayloadError


class Kind(enum.StrEnum):
    """The three kinds of attempt (DESIGN D4), and the restore session (D15)."""

    RELATIVE = "relative"
    """Needs the resident bits of the base version: ``add`` and ``xor`` entries, ``set`` where those are not allowed."""
    ABSOLUTE = "absolute"
    """The complete changed set as ``set`` entries."""
    DENSE = "dense"
    """Every element as ``set``; needs no baseline."""
    RESTORE = "restore"
    """Every element of a committed version, from the owners' baseline, for engines that hold no version."""


class PayloadIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """What makes a payload this payload and no other (DESIGN D7).

    Two payloads with the same identity must have the same digest; anything else fails the attempt.
    """

    record_id: str
    target: int
    """The version whose bits the payload helps to reach."""
    epoch: int
    owner: str
    owner_incarnation: int
    sequence: int
    """0, 1, 2, ... in the order in which the owner emitted, per epoch."""


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a payload was made against, and for: stated in every payload and manifest."""

    kind: Kind
    version: int
    """The version that was compared with; equal to the target for a restore."""
    baseline_id: str
    """Content digest of that version (DESIGN D2); empty for a dense attempt of owners without a baseline."""
    candidate: str
    """The token that names the candidate weights of the open transition; empty for a restore."""


class SealedPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a manifest."""

    sequence: int
    digest: str
    """Hexadecimal digest over the whole payload as it travels (see docs/wire-format.md)."""
    entries: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An owner's seal on one attempt: written last, lists everything it emitted (DESIGN D8)."""

    record_id: str
    target: int
    epoch: int
    owner: str
    owner_incarnation: int
    base: Base
    payloads: tuple[SealedPayload, ...]
    content_digest: str
    """The owner's share of the target's content digest (DESIGN D2), 32 hexadecimal digits."""
    changed_entries: int
    """Changed elements in the whole manifest; for dense and restore kinds, elements sent."""
    owned_elements: int
    """Elements this owner is responsible for, changed or not."""

    def identity(self, sequence: int) -> PayloadIdentity:
        """The identity of the payload with this sequence number."""
        return PayloadIdentity(self.record_id, self.target, self.epoch, self.owner, self.owner_incarnation, sequence)

    def digest(self) -> str:
        """Hexadecimal SHA-256 of the manifest's canonical bytes."""
        return hashlib.sha256(encode_manifest(self)).hexdigest()


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's canonical bytes."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest; CorruptPayloadError on anything else."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise CorruptPayloadError(
            f"these {len(data)} bytes are no manifest that this version of dcr can read: {e}"
        ) from e


def manifest_root(digests: dict[str, str]) -> str:
    """The root that an acknowledgement carries: over every owner's manifest digest, whatever the order of arrival.

    Args:
        digests: manifest digest (hexadecimal) by owner name.
    """
    h = hashlib.sha256()
    for owner in sorted(digests):
        h.update(msgspec.msgpack.encode((owner, digests[owner])))
    return h.hexdigest()
