"""Orders, payloads and seals for one rank, and a receiver that is open for them."""

import copy

import msgspec
import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload
from dcr.protocol.messages import Prepare, StorageState
from dcr.protocol.receiver import BeginWrite, RankFailed, RankPrepared, Receiver
from dcr.protocol.record import CommitRecord, Member, OpenTransition, OwnerRef
from dcr.protocol.step import Step

D0, D1 = "0" * 31 + "a", "0" * 31 + "b"
OWNERS = (OwnerRef("o0", 1), OwnerRef("o1", 1))
MEMBERS = (Member("e", 1),)
RELATIVE = Base(Kind.RELATIVE, 0, D0, "w")
ABSOLUTE = Base(Kind.ABSOLUTE, 0, D0, "w")
RESTORE = Base(Kind.RESTORE, 0, D0, "")
K0 = CommitRecord.create("policy", "c", D0).admit(MEMBERS)


def opened(attempts: int, k: CommitRecord, kind: Kind = Kind.RELATIVE) -> CommitRecord:
    return k.open_attempt(
        OpenTransition(k.version + 1, "w", attempts, kind, OWNERS, 0, ("add",), pushes=(1,) * len(OWNERS)), MEMBERS
    )


def prepare(epoch: int, base: Base = RELATIVE, *, stage: bool = False) -> Prepare:
    return Prepare("policy", epoch, base.version + (base.kind is not Kind.RESTORE), base, OWNERS, 1, stage)


def at(epoch: int) -> CommitRecord:
    """K at this epoch: version 0, and no more than that is known of it."""
    return msgspec.structs.replace(K0, epoch=epoch)


def identity(epoch: int, sequence: int = 0, owner: str = "o0") -> PayloadIdentity:
    return PayloadIdentity("policy", 1, epoch, owner, 1, sequence)


def manifest(epoch: int, owner: str, payloads: int, base: Base = RELATIVE, share: str = "00") -> Manifest:
    listed = tuple(SealedPayload(n, f"x{n}", 1, 8) for n in range(payloads))
    return Manifest("policy", prepare(epoch, base).target, epoch, owner, 1, base, listed, share, payloads, 3)


def ready(epoch: int = 1, base: Base = RELATIVE) -> Receiver:
    """A receiver loaded with version 0, prepared and open for this epoch."""
    r = Receiver("e", "policy", D0, payloads_max=3)
    assert without_steps(r.prepare(prepare(epoch, base), at(epoch))) == [RankPrepared(epoch, StorageState(0, D0, ()))]
    assert r.open_apply("policy", epoch) == [Step("e", "OpenApply", epoch)]
    return r


def without_steps(effects: list) -> list:
    return [e for e in effects if not isinstance(e, Step)]


def write(r: Receiver, i: PayloadIdentity, base: Base = RELATIVE) -> list:
    assert without_steps(r.payload(i, base, f"x{i.sequence}", 1)) == [BeginWrite(i)]
    return without_steps(r.write_ended(i))


def refused(r: Receiver, call: str, *arguments: object, why: str) -> None:
    """The call is refused and changes nothing."""
    before = copy.deepcopy(vars(r))
    with pytest.raises(RefusedError, match=why):
        getattr(r, call)(*arguments)
    assert vars(r) == before


def failure(effects: list) -> str:
    (e,) = without_steps(effects)
    assert isinstance(e, RankFailed)
    return e.reason
