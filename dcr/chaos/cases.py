"""What may befall a refit: the shipped faults, for every role at every point that it comes to."""

from dataclasses import dataclass, field, replace
from typing import Any

from dcr.chaos.scenario import Fault

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


def _after(cause: Fault, *then: str, name: str = "", **more: Any) -> Case:
    """A kill at a point that only something else leads to."""
    return Case(name or f"kill {then[0]}", (cause, *(Fault(at=at) for at in then)), **more)


_TORN = Fault(at="receiver[1] after 1 items of payload 1")
_ITEM_FAILS = Fault(at="receiver[1] after 1 items of payload 1", do="error")
_TWO: dict[str, Any] = {"coordinators": (2,)}
_STOPS = (("attempts_max", 1),)
_STOPPED = Fault(at="receiver[1] at BeginWrite", push_error="the transition stopped", operator="resume")

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
    _after(Fault(at="engine[1] in a request", do="slow", for_s=7.0), "engine[1] at FailAttempt", gates=("sync",)),
    _after(
        Fault(at="etcd at FinishTransition", do="stall", for_s=12.0),
        "engine[1] at LoseRecord",
        controls=("etcd",),
    ),
)
OWNERS = (
    *(_kill(f"owner[0] at {a}") for a in ("Emit", "Seal", "BeginFold", "EndFold")),
    *(_kill(f"owner[0] {at}") for at in ("before payload 0", "before payload 2", "during manifest")),
    _after(Fault(at="owner[0] before payload 1", do="error"), "owner[0] at EmitFailed"),
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
            Fault(at="receiver[0] at BeginWrite", restart_after_s=1.5),
            Fault(at="receiver[1] at BeginWrite", restart_after_s=1.5),
            Fault(at="coordinator at Wait"),
        ),
    ),
    _after(Fault(at="coordinator at Publish"), "coordinator at TakeOver"),
    _kill("coordinator at CreateRecord in refit 0", start=True),
    _kill("coordinator between CAS sent and answered of OpenAttempt"),
    _kill("coordinator between CAS sent and answered of Commit", controls=BUCKET_TOO),
    *(_kill(f"coordinator before CAS of {a}") for a in ("OpenAttempt", "Commit")),
    *(_kill(f"coordinator between CAS sent and answered of {a} in restore") for a in ("OpenRestore", "Admit")),
    _kill("coordinator between CAS sent and answered of CreateRecord in refit 0", start=True),
    _after(
        Fault(at="coordinator between CAS sent and answered of Commit", do="error"),
        "coordinator at ReadBack",
    ),
    _after(Fault(at="coordinator before CAS of Commit", do="error"), "coordinator at WriteAgain"),
    Case("stop, then resume", (_STOPPED,), settings=_STOPS),
    Case(
        "kill coordinator at Abandon",
        (
            Fault(at="receiver[1] at BeginWrite", push_error="the transition stopped", operator="abandon"),
            Fault(at="coordinator at Abandon"),
        ),
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
            Fault(at="receiver[1] after 1 items of payload 1", do="slow", for_s=0.3),
            Fault(at="coordinator at OrderOpenApply", do="roll_back", push_error="rolled back", operator="resume"),
        ),
    ),
    Case(
        "kill coordinator at RollBack",
        (Fault(at="coordinator at OrderOpenApply", do="roll_back"), Fault(at="coordinator at RollBack")),
    ),
)
COORDINATORS = (
    Case(
        "kill coordinator at Stop",
        (Fault(at="receiver[1] at BeginWrite"), Fault(at="coordinator at Stop")),
        settings=_STOPS,
    ),
    Case(
        "kill coordinator elsewhere at Stop",  # the trainer lives, and is told
        (
            Fault(at="receiver[1] at BeginWrite"),
            Fault(at="coordinator at Stop", push_error="the transition stopped", operator="resume"),
        ),
        settings=_STOPS,
        **_TWO,
    ),
    *(replace(case, coordinators=COORDINATORS_ELSEWHERE) for case in _COORDINATORS),
    Case(
        "replace the coordinator before its commit",
        (Fault(at="coordinator before CAS of Commit", do="replace"),),
        controls=BUCKET_TOO,
    ),
    *(
        Case(f"stall coordinator past its lease {at}", (Fault(at=f"coordinator {at}", do="stall", for_s=4.0),), **_TWO)
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
    Case("partition engine[1]", (Fault(at="engine[1] at Prepare", do="partition", for_s=2.0),)),
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
CASES = (*RECEIVERS, *ENGINES, *OWNERS, *COORDINATORS, *STALLS, *SERVERS)

NOT_SHIPPED = {
    "LoseBaseline": "the trainer would have to break its word, and change weights between its push and its fold",
    "Fatal": "a leader that was replaced notices first, as a rule, that its lease is another's, and ends without it",
    "RefuseMember": "an engine that can never take part: the deployment would stay without it",
}
"""Actions of the protocol at which no shipped case strikes, and why."""
