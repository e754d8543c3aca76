"""Orders, records and answers of one engine, and a node that serves version 0."""

import copy

import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Prepare, StorageState
from dcr.protocol.node import LetIn, Node, OpenGate, ReadRecord, ReportServing, StopFetch
from dcr.protocol.receiver import RankState
from dcr.protocol.record import CommitRecord, Member, OpenTransition, OwnerRef
from dcr.protocol.step import Step

OWNERS = (OwnerRef("o", 1),)
ME = (Member("e", 1),)
CLEAN = StorageState(0, "d0", ())
TORN = StorageState(0, "d0", ("w",))
K0 = CommitRecord.create("policy", "c", "d0").admit(ME)


def opened(k: CommitRecord, attempts: int = 1, members: tuple[Member, ...] = ME) -> CommitRecord:
    return k.open_attempt(
        OpenTransition(k.version + 1, "w", attempts, Kind.RELATIVE, OWNERS, 0, ("add",), pushes=(1,) * len(OWNERS)),
        members,
    )


K1 = opened(K0)
RESTORE1 = K0.open_restore()


def prepare(epoch: int, kind: Kind = Kind.RELATIVE, *, stage: bool = False, incarnation: int = 1) -> Prepare:
    target = 0 if kind is Kind.RESTORE else 1
    return Prepare("policy", epoch, target, Base(kind, 0, "d0", "w"), OWNERS, incarnation, stage)


def rank(
    state: StorageState, fence: int = 0, *, here: bool = False, epoch: int = 0, stage: str = "idle"
) -> dict[str, RankState]:
    return {"0": RankState(state, fence, here, epoch, stage)}


def steps(effects: list) -> list[str]:
    return [e.action for e in effects if isinstance(e, Step)]


def without_steps(effects: list) -> list:
    return [e for e in effects if not isinstance(e, Step)]


def handed(n: Node, order: Prepare, record: CommitRecord) -> list:
    """Hand an order on; the orders to the ranks."""
    assert n.order(order) == [ReadRecord()]
    return n.read(record)


def refused(n: Node, call: str, *arguments: object, why: str) -> None:
    """The call is refused and changes nothing but what waits to be carried out."""
    waiting = {"opening", "_pending"}
    before = copy.deepcopy({k: v for k, v in vars(n).items() if k not in waiting})
    with pytest.raises(RefusedError, match=why):
        getattr(n, call)(*arguments)
    assert {k: v for k, v in vars(n).items() if k not in waiting} == before


def serving(ranks: tuple[str, ...] = ("0",)) -> Node:
    n = Node("e", 1, "policy", ranks)
    assert n.read(K0) == []
    assert n.learned(K0, dict.fromkeys(ranks, rank(CLEAN)["0"])) == [StopFetch(0), OpenGate(0, 0)]
    assert n.gate == "closed"
    effects = n.gate_ready(0)
    assert steps(effects[:1]) == ["OpenGate"]
    assert without_steps(effects) == [LetIn(0), ReportServing(0, 0)]
    assert (n.gate, n.serving) == ("open", 0)
    return n
