"""What may befall a refit: the shipped faults, for every role at every point that it comes to."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dcr.chaos.scenario import Fault
from dcr.protocol.leader import REWRITES_MAX

TRANSPORTS = ("file", "s3", "relay")
CONTROLS = ("sqlite", "etcd")
BUCKET_TOO = (*CONTROLS, "s3")
"""Control planes of cases that are also run with the record in a bucket: a write there takes longer."""
COORDINATORS_ELSEWHERE = (0, 2)
GATES = ("sync", "async")


@dataclass(frozen=True)
class Case:
    """Faults that strike in one refit, and where they can.

    Attributes:
        name: of the case.
        faults: of refit 1; the matrix gives them their refit.
        ranks: of the trainer.
        settings: that the deployment needs; cases that need other ones are not run in the same deployment.
        start: whether they strike while the deployment starts, which needs one of its own.
    """

    name: str
    faults: tuple[Fault, ...]
    transports: tuple[str, ...] = TRANSPORTS
    controls: tuple[str, ...] = CONTROLS
    gates: tuple[str, ...] = GATES
    coordinators: tuple[int, ...] = (0,)
    ranks: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    start: bool = False
    quick: bool = field(default=False, compare=False)


def _kill(at: str, **more: Any) -> Case:
    return Case(f"kill {at}", (Fault(at=at),), **more)


def _after(causes: Fault | tuple[Fault, ...], at: str, **more: Any) -> Case:
    """A kill at a point that only something else leads to."""
    first = (causes,) if isinstance(causes, Fault) else causes
    return Case(f"kill {at}", (*first, Fault(at=at)), **more)


_TORN = Fault(at="receiver[1] after 1 items of payload 1")
_ITEM_FAILS = Fault(at="receiver[1] after 1 items of payload 1", do="error")
_BREAKS_ITS_WORD = Fault(at="owner[0] at BeginFold", do="step_early")
_NO_ANSWER = (Fault(at="coordinator before CAS of Commit", do="error"),) * (REWRITES_MAX + 1)
"""A leader that is not told of its write so often gives up."""
_RESTORE_FAILS = Fault(at="receiver[1] after 1 items of payload 0 in restore", do="error")
_TWO: dict[str, Any] = {"coordinators": (2,)}
_RELAY: dict[str, Any] = {"transports": ("relay",)}
_STOPS = (("attempts_max", 1),)
_UNDER_WAY = Fault(at="receiver[1] after 1 items of payload 1", do="slow", for_s=2.0)
"""The attempt is not over before the operator is heard."""
_REFUSES: dict[str, Any] = {"settings": (("restores_max", 1),)}
_STOPPED = Fault(at="receiver[1] at BeginWrite", push_error="the transition stopped", operator="resume")
_ABANDONED = Fault(at="receiver[1] at BeginWrite", push_error="the transition stopped", operator="abandon")


def _cut(link: str, for_s: float, payload: int = 1) -> Fault:
    """As its sender comes to this payload: another owner's may all be through by then."""
    sender = link.split(maxsplit=1)[0] if link.startswith("owner") else "owner[0]"
    return Fault(at=f"{sender} before payload {payload}", who=link, do="partition", for_s=for_s)


RECEIVERS = (
    *(_kill(f"receiver[1] at {a}") for a in ("Fence", "OpenApply", "EndWrite", "DeliverManifest")),
    _kill("receiver[1] at BeginWrite", controls=BUCKET_TOO),
    _kill("receiver[1] at Stage", gates=("async",)),
    *(_kill(f"receiver[1] at {a}") for a in ("Acknowledge", "LearnCommit")),
    _kill("receiver[1] after 1 items of payload 0"),
    _kill("receiver[1] after 1 items of payload 2"),
    _kill("receiver[1] at BeginWrite in restore"),
    _kill("receiver[1] at Acknowledge in restore"),
    _after(_ITEM_FAILS, "receiver[1] at FailWrite"),
    _after(_ITEM_FAILS, "receiver[1] at FailAttempt"),
)
ENGINES = (
    _kill("engine[1] at CloseGate", gates=("sync",)),  # an asynchronous one is closed by the order to apply
    *(_kill(f"engine[1] at {a}") for a in ("GateClosed", "Prepare", "OpenGate")),
    _kill("engine[1] in a request"),
    _after(Fault(at="engine[1] in a request", do="slow", for_s=30.0), "engine[1] at FailAttempt", gates=("sync",)),
    Case(
        "kill engine[1] at LoseRecord",  # its gate is open as etcd goes; the leader may be another then
        (
            Fault(at="engine[1] at OpenGate", who="etcd", restart_after_s=6.0),
            Fault(at="engine[1] at LoseRecord", restart_after_s=12.0),
        ),
        controls=("etcd",),
        **_TWO,
    ),
)
OWNERS = (
    *(_kill(f"owner[0] at {a}") for a in ("Emit", "Seal", "BeginFold", "EndFold")),
    *(_kill(f"owner[0] {at}") for at in ("before payload 0", "before payload 2", "during manifest")),
    _after(Fault(at="owner[0] before payload 1", do="error"), "owner[0] at EmitFailed"),
    _after(_BREAKS_ITS_WORD, "owner[0] at LoseBaseline"),
    Case("the trainer breaks its word, and the next push is dense", (_BREAKS_ITS_WORD,)),
    *(_kill(f"owner[1] at {a}", ranks=2) for a in ("Emit", "Seal", "BeginFold", "EndFold")),
    *(_kill(f"owner[1] {at}", ranks=2) for at in ("before payload 1", "during manifest")),
)
_COORDINATORS = (
    _kill("coordinator at OpenAttempt", controls=BUCKET_TOO),
    *(
        _kill(f"coordinator at {a}")
        for a in ("OrderOpenApply", "Commit", "Publish", "FinishTransition", "MemberServes")
    ),
    *(_kill(f"coordinator at {a} in restore") for a in ("OpenRestore", "EndRestore", "Admit")),
    _after(
        Fault(at="receiver[1] at BeginWrite in restore"),
        "coordinator at RestoreFailed in restore",
    ),
    *(_after(_TORN, f"coordinator at {a}") for a in ("AttemptFailed", "Evict", "OpenAttempt in attempt 2")),
    Case(
        "kill coordinator at Wait",
        (
            Fault(at="receiver[0] at BeginWrite", restart_after_s=4.0),
            Fault(at="receiver[1] at BeginWrite", restart_after_s=4.0),
            Fault(at="coordinator at Wait"),
        ),
    ),
    _after(Fault(at="coordinator at Publish"), "coordinator at TakeOver"),
    _kill("coordinator at CreateRecord in refit 0", start=True),
    _kill("coordinator between CAS sent and answered of OpenAttempt"),
    _kill("coordinator between CAS sent and answered of Commit", controls=BUCKET_TOO),
    *(_kill(f"coordinator before CAS of {a}") for a in ("OpenAttempt", "Commit")),
    *(
        case
        for at in ("coordinator before CAS of", "coordinator between CAS sent and answered of")
        for case in (
            _kill(f"{at} CreateRecord in refit 0", start=True),
            _after(Fault(at="coordinator at Publish"), f"{at} TakeOver"),
            _kill(f"{at} OpenRestore in restore"),
            _kill(f"{at} Admit in restore"),
            _after(_ABANDONED, f"{at} Abandon", settings=_STOPS),
        )
    ),
    _after(_NO_ANSWER, "coordinator at Fatal"),
    _after(_RESTORE_FAILS, "coordinator at RefuseMember in restore", **_REFUSES),
    Case(
        "kill engine[1] as it is refused",
        (_RESTORE_FAILS, Fault(at="coordinator at RefuseMember in restore", who="engine[1]")),
        transports=("file", "s3"),  # over a relay, what is sent at once may still go to the node that is gone
        **_REFUSES,
    ),
    _after(
        Fault(at="coordinator between CAS sent and answered of Commit", do="error"),
        "coordinator at ReadBack",
    ),
    _after(Fault(at="coordinator before CAS of Commit", do="error"), "coordinator at WriteAgain"),
    Case("stop, then resume", (_STOPPED,), settings=_STOPS),
    Case(
        "kill coordinator at Abandon",
        (_ABANDONED, Fault(at="coordinator at Abandon")),
        settings=_STOPS,
    ),
    Case(
        "stop, then dense",
        (Fault(at="receiver[1] at BeginWrite", push_error="the transition stopped", operator="dense"),),
        settings=_STOPS,
    ),
    Case(
        "roll back",
        (
            _UNDER_WAY,
            Fault(at="coordinator at OrderOpenApply", do="roll_back", push_error="rolled back", operator="resume"),
        ),
    ),
)
_TURNED_BACK = Fault(at="coordinator at OrderOpenApply", do="roll_back")
_STOP_POINTS = ("coordinator at Stop", "coordinator between CAS sent and answered of Stop")
COORDINATORS = (
    *(_after(Fault(at="receiver[1] at BeginWrite"), at, settings=_STOPS) for at in _STOP_POINTS),
    *(
        Case(
            f"kill {at}, elsewhere",  # the trainer lives, and is told
            (
                Fault(at="receiver[1] at BeginWrite"),
                Fault(at=at, push_error="the transition stopped", operator="resume"),
            ),
            settings=_STOPS,
            **_TWO,
        )
        for at in (*_STOP_POINTS, "coordinator before CAS of Stop")  # whoever leads next has the attempts that are left
    ),
    Case("kill coordinator at RollBack", (_UNDER_WAY, _TURNED_BACK, Fault(at="coordinator at RollBack"))),
    Case(
        "kill coordinator at RollBack, elsewhere",  # likewise: whoever leads next obeys the order
        (
            _UNDER_WAY,
            msgspec.structs.replace(_TURNED_BACK, push_error="rolled back", operator="resume"),
            Fault(at="coordinator at RollBack"),
        ),
        **_TWO,
    ),
    *(replace(case, coordinators=COORDINATORS_ELSEWHERE) for case in _COORDINATORS),
    Case(
        "replace the coordinator before its commit",
        (Fault(at="coordinator before CAS of Commit", do="replace"),),
        controls=BUCKET_TOO,
    ),
    Case(
        "kill the replaced coordinator at Fatal",  # where a lease tells it first, it comes to no such step
        (Fault(at="coordinator before CAS of Commit", do="replace"), Fault(at="coordinator at Fatal")),
        controls=("s3",),
        transports=("file", "s3"),
    ),
    *(
        Case(f"stall coordinator past its lease {at}", (Fault(at=f"coordinator {at}", do="stall", for_s=6.0),), **_TWO)
        for at in ("at OrderOpenApply", "before CAS of Commit", "between CAS sent and answered of Commit")
    ),
    Case("kill the leader at BeginWrite", (Fault(at="receiver[1] at BeginWrite", who="coordinator"),), **_TWO),
    Case(
        "kill one coordinator after the other",
        (Fault(at="coordinator at OpenAttempt"), Fault(at="coordinator at OpenAttempt in attempt 3")),
        **_TWO,
    ),
)
STALLS = (
    Case("stall receiver[1]", (Fault(at="receiver[1] at BeginWrite", do="stall", for_s=1.0),)),
    Case("stall coordinator", (Fault(at="coordinator at OrderOpenApply", do="stall", for_s=1.5),)),
    Case("stall owner[1]", (Fault(at="owner[1] at Emit", do="stall", for_s=1.0),), ranks=2),
    Case(
        "stall engine[1] until it is evicted", (Fault(at="engine[1] at Prepare", do="stall", for_s=12.0),), quick=False
    ),
    Case("slow receiver[1]", (Fault(at="receiver[1] after 1 items of payload 1", do="slow", for_s=0.5),)),
    Case("a payload comes twice", (Fault(at="receiver[1] at EndWrite", do="duplicate"),)),
    Case(
        "the store's disk is full",
        (
            Fault(
                at="owner[0] before payload 1",
                who="store",
                do="fill",
                for_s=1.0,
                push_error="No space left on device",
                operator="resume",
            ),
        ),
        transports=("file",),
        settings=_STOPS,
    ),
    Case("the store fails", (Fault(at="owner[0] before payload 1", do="error"),)),
    Case("the manifest fails", (Fault(at="owner[0] during manifest", do="error"),)),
)
SERVERS = (
    Case("kill store before a payload", (Fault(at="store before payload 1"),), transports=("s3",)),
    Case("kill store during the manifest", (Fault(at="store during manifest"),), transports=("s3",)),
    Case("stall store", (Fault(at="store before payload 1", do="stall", for_s=1.0),), transports=("s3",)),
    Case("partition store", (Fault(at="store before payload 1", do="partition", for_s=1.0),), transports=("s3",)),
    *(
        Case(f"kill store {at}", (Fault(at=f"store {at}"),), controls=("s3",), transports=("file", "s3"))
        for at in ("before CAS of Commit", "between CAS sent and answered of Commit")
    ),
    Case(
        "partition store before a commit",
        (Fault(at="store before CAS of Commit", do="partition", for_s=1.0),),
        transports=("file", "s3"),
        controls=("s3",),
    ),
    Case("kill etcd before a commit", (Fault(at="etcd before CAS of Commit"),), controls=("etcd",)),
    Case("kill etcd after a commit", (Fault(at="etcd between CAS sent and answered of Commit"),), controls=("etcd",)),
    Case("stall etcd", (Fault(at="etcd before CAS of OpenAttempt", do="stall", for_s=1.0),), controls=("etcd",)),
    Case("partition etcd", (Fault(at="etcd before CAS of Commit", do="partition", for_s=1.0),), controls=("etcd",)),
)
PARTITIONS = (
    Case("partition engine[1]", (Fault(at="engine[1] at Prepare", do="partition", for_s=2.0),)),
    *(
        Case(f"partition owner[{n}] for {s:g} s", (Fault(at=f"owner[{n}] at Emit", do="partition", for_s=s),), ranks=2)
        for n, s in ((0, 2.0), (1, 2.0), (1, 12.0))  # the control channel gives a silent peer 10 s
    ),
    *(
        Case(f"partition {link} for {for_s:g} s", (_cut(link, for_s),), ranks=ranks, **_RELAY)
        for link, ranks in (("owner[0] to relay[1]", 1), ("owner[1] to relay[0]", 2), ("relay[0] to relay[1]", 1))
        for for_s in (1.0, 4.0)  # shorter and longer than what a peer may be silent
    ),
    Case(
        "partition the owner from every relay",
        tuple(_cut(f"owner[0] to relay[{n}]", 4.0, payload=n) for n in (0, 1)),
        **_RELAY,
    ),
)
CASES = (*RECEIVERS, *ENGINES, *OWNERS, *COORDINATORS, *STALLS, *SERVERS, *PARTITIONS)
