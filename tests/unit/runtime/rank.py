"""A rank's host that holds version 0, and the payloads and manifests of one candidate."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import encode_payload, payload_digest
from dcr.data_plane.placement.placement import Placement
from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload, encode_manifest, manifest_root
from dcr.protocol.messages import OpenApply, Prepare
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared
from dcr.protocol.record import CommitRecord, OwnerRef
from dcr.runtime.rank_host import RankHost
from dcr.runtime.rank_messages import (
    Answer,
    Attach,
    Payload,
    SealedManifest,
    WireSpec,
    decode_answer,
    encode,
)
from tests.faults.models import BF16, Policy, Served, stored_bits

LOADED = "ab" * 16
OWNERS = (OwnerRef("rank-0", 7), OwnerRef("rank-1", 8))
EMBED = TensorSpec("embed", (64, 24), BF16)
Q = TensorSpec("q", (24, 24), BF16)


def bits_of(state):
    return {n: t.view(torch.int32 if t.dtype == torch.float32 else torch.int16).flatten() for n, t in state.items()}


@dataclass
class Rank:
    """A rank that holds version 0, and one candidate: the first owner changes ``embed``, the second one ``q``."""

    kind: Kind = Kind.RELATIVE
    loaded: str = LOADED
    epoch: int = 1
    mood: list = field(default_factory=list)
    storage: Callable = Placement

    def __post_init__(self):
        self.policy = Policy()
        self.old = {n: t.clone() for n, t in self.policy.state_dict().items()}
        self.model = Served()
        self.model.load_weights(self.old.items())

        def load(weights):
            if self.mood:
                raise ValueError(self.mood[0])
            return self.model.load_weights(weights)

        specs = tuple(WireSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self.old.items())
        self.host = RankHost(lambda s: self.storage(self.model, load, s), state_incarnation=3)
        self.attach = Attach("a", "r", specs, self.loaded)
        self.attached = self.call(self.attach).results[0]
        for name in ("embed", "q"):
            self.policy.state_dict()[name].view(torch.int16).flatten()[5:90] ^= 0x0101
        self.new = {n: t.clone() for n, t in self.policy.state_dict().items()}
        self.requests = self.emission(self.epoch, self.kind)

    def call(self, request) -> Answer:
        return decode_answer(self.host.call(encode(request)))

    def base(self, kind):
        return Base(kind, 0, LOADED, "" if kind is Kind.RESTORE else "c")

    def item(self, spec, start, stop, kind):
        indices = torch.arange(start, stop)
        old, new = bits_of(self.old)[spec.name][start:stop], bits_of(self.new)[spec.name][start:stop]
        if kind is Kind.RELATIVE:
            return Item(spec, Operation.ADD, indices, new - old)
        return Item(spec, Operation.SET, indices, new)

    def payload(self, owner, sequence, items, kind=None, *, epoch=None, base=None, **identity):
        kind = kind or self.kind
        target = 0 if kind is Kind.RESTORE else 1
        known = {"record_id": "r", "target": target, "epoch": epoch or self.epoch, **identity}
        i = PayloadIdentity(owner=owner.owner, owner_incarnation=owner.incarnation, sequence=sequence, **known)
        return Payload(i, encode_payload(i, base or self.base(kind), items))

    def emission(self, epoch, kind):
        """Three payloads and two manifests."""
        a, b = OWNERS
        payloads = [
            self.payload(a, 0, [self.item(EMBED, 5, 40, kind)], kind, epoch=epoch),
            self.payload(a, 1, [self.item(EMBED, 40, 90, kind)], kind, epoch=epoch),
            self.payload(b, 0, [self.item(Q, 5, 90, kind)], kind, epoch=epoch),
        ]
        return [*payloads, self.seal(a, payloads[:2], [35, 50], kind), self.seal(b, payloads[2:], [85], kind)]

    def manifest(self, owner, payloads, entries, kind=None, **changes):
        kind = kind or self.kind
        sealed = tuple(
            SealedPayload(p.identity.sequence, payload_digest(p.data), n, len(p.data))
            for p, n in zip(payloads, entries, strict=True)
        )
        return Manifest(
            **{
                "record_id": "r", "target": 0 if kind is Kind.RESTORE else 1,
                "epoch": payloads[0].identity.epoch if payloads else self.epoch,
                "owner": owner.owner, "owner_incarnation": owner.incarnation, "base": self.base(kind),
                "payloads": sealed, "content_digest": "00" * 16, "changed_entries": sum(entries),
                "owned_elements": 4000, **changes,
            }
        )  # fmt: skip

    def seal(self, *args, **changes):
        m = self.manifest(*args, **changes)
        return SealedManifest(m.owner, m.epoch, encode_manifest(m))

    def order(self, epoch, base, *, record_id="r", stage=False):
        """An order to prepare, with K as it is when the leader gives it."""
        target = base.version + (base.kind is not Kind.RESTORE)
        order = Prepare(record_id, epoch, target, base, OWNERS, 3, stage)
        return PrepareRank(order, CommitRecord(record_id, 0, epoch, "l", 1, LOADED))

    def prepare(self, epoch=None, kind=None, *, stage=False):
        (result,) = self.call(self.order(epoch or self.epoch, self.base(kind or self.kind), stage=stage)).results
        assert isinstance(result, RankPrepared)

    def open(self, epoch=None, kind=None):
        self.prepare(epoch, kind)
        return self.call(OpenApply("r", epoch or self.epoch))

    @property
    def bits(self):
        return stored_bits(self.model)

    def root(self):
        digests = {m.owner: msgspec.msgpack.decode(m.data, type=Manifest).digest() for m in self.requests[3:]}
        return manifest_root(digests)


def acknowledged(answers):
    return [r for a in answers for r in a.results if isinstance(r, RankAcknowledged)]


def failed(answers):
    return [r.reason for a in answers for r in a.results if isinstance(r, RankFailed)]
