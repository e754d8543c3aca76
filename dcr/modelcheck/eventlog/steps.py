"""Lines as steps of the specification: each line one, with those before it that no line tells of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dcr.modelcheck.eventlog.deployment import GARBAGE, Content, Deployment
from dcr.modelcheck.eventlog.history import Write, write_of
from dcr.modelcheck.eventlog.read import Line, RejectedError
from dcr.protocol.record import CommitRecord, Direction, OwnerRef
from dcr.protocol.step import Step

Value = bool | int | str | dict[str, "Value"]

NOVERSION = -1

PASSED_OVER = {
    "Evict": "the OpenAttempt that follows says who takes part",
    "Wait": "policy",
    "RollBack": "the OpenAttempt that follows is the step",
    "ReadBack": "the write's own step follows",
    "WriteAgain": "the same write again",
    "RestoreFailed": "a restore goes on without an engine",
    "RefuseMember": "policy",
    "MemberServes": "said to people",
    "Prepare": "the last rank's Fence is the step",
}
"""Steps of the code that are none of the specification, and why."""


@dataclass(frozen=True)
class SpecStep:
    """A step of ``RefitLog.tla``, and the line that it is of."""

    name: str
    line: Line
    values: dict[str, Value]
    hidden: bool = False
    """No line tells of it: it is what the line takes for granted."""


def steps_of(deployment: Deployment, lines: list[Line]) -> Iterator[SpecStep]:
    """The steps of a run.

    Raises:
        RejectedError: a line is no event of the protocol.
    """
    mapping = _Mapping(deployment)
    for line in lines:
        yield from mapping.of(line)


def record_of(d: Deployment, k: CommitRecord, revision: int, reason: str, named: Mapping[str, int]) -> dict[str, Value]:
    """K in the model; ``named`` says what its tokens stand for."""
    tr, c = k.open, k.committed
    nobody: dict[str, Value] = dict.fromkeys(d.owners.values(), 0)
    opened: dict[str, Value] = {
        "target": 0 if tr is None else tr.target,
        "candidate": 0 if tr is None else named[tr.candidate],
        "attempts": 0 if tr is None else tr.attempts,
        "kind": "none" if tr is None else tr.kind.value,
        "direction": "none" if tr is None else tr.direction.value,
        "owners": nobody if tr is None else {**d.seats(tr.owners)},
        "stopped": tr is not None and tr.stopped,
    }
    committed: dict[str, Value] = {
        "version": 0 if c is None else c.version,
        "epoch": 0 if c is None else c.epoch,
        "candidate": 0 if c is None else named[c.candidate],
        "direction": "none" if c is None else c.direction.value,
        "members": {**d.members(() if c is None else c.members)},
        "root": {**d.seats(() if c is None else c.owners)},
    }
    return {
        "revision": revision,
        "version": k.version,
        "epoch": k.epoch,
        "leader": d.leaders[k.leader],
        "token": d.fencing(k.fencing_token),
        "baseline": {**d.contents[k.version]},
        "members": {**d.members(k.members)},
        "open": opened,
        "committed": committed,
        "reason": reason,
    }


class _Mapping:
    def __init__(self, deployment: Deployment) -> None:
        self._d = deployment
        self._k = deployment.run.history.first
        self._gate: dict[str, str] = {}  # by engine, as its lines have it
        self._node_started: set[tuple[str, int]] = set()
        self._offered = deployment.first_named[self._k.open.candidate] if self._k.open is not None else 0
        self._digests: dict[tuple[str, int, str], str] = {}  # of what an owner sealed first of a candidate

    def of(self, line: Line) -> Iterator[SpecStep]:
        e = line.event
        if e.start is not None:
            yield from self._start(line)
            return
        step = e.step
        assert step is not None
        if step.action in PASSED_OVER:
            return
        known: Callable[[Line, Step], Iterator[SpecStep]] | None = {
            "coordinator": self._lead,
            "owner": self._own,
            "node": self._serve,
            "rank": self._write,
        }.get(e.role)
        assert known is not None
        yield from known(line, step)

    # ------------------------------------------------------------ starts

    def _start(self, line: Line) -> Iterator[SpecStep]:
        e, d, start = line.event, self._d, line.event.start
        assert start is not None
        if e.role == "owner":
            version = d.version_of_share(e.name, start.baseline_digest, self._k.version)
            content: Content = dict.fromkeys(d.owner_of, GARBAGE) if version is None else d.contents[version]
            values: dict[str, Value] = {
                "owner": d.owners[e.name],
                "incarnation": d.incarnations["owner", e.name][e.incarnation],
                "version": NOVERSION if version is None else version,
                "content": {**content},
            }
            yield SpecStep("OwnerStart", line, values)
        if e.role != "node":
            return
        engine, incarnation = d.engines[e.name], d.incarnations["engine", e.name][e.incarnation]
        again = (e.name, e.incarnation) in self._node_started
        self._node_started.add((e.name, e.incarnation))
        self._gate[e.name] = "closed"
        if again:
            yield SpecStep("NodeStart", line, {"engine": engine})
            return
        state = start.state
        digest = "" if state is None or state.torn_by else state.content_digest
        if not digest:
            found: Content = dict.fromkeys(d.owner_of, GARBAGE)
        elif digest in d.by_digest:
            found = d.contents[d.by_digest[digest]]
        else:
            found = d.foreign(digest)
        yield SpecStep(
            "EngineStart",
            line,
            {"engine": engine, "incarnation": incarnation, "content": {**found}, "known": bool(digest)},
        )

    # ------------------------------------------------------------ leaders

    def _lead(self, line: Line, step: Step) -> Iterator[SpecStep]:
        by: dict[str, Value] = {"by": self._d.leaders[line.event.name], "epoch": step.epoch}
        write = write_of(line)
        if write is not None:
            yield from self._write_k(line, write, by)
        elif step.action in ("OrderOpenApply", "AttemptFailed", "EndRestore", "Publish", "FinishTransition", "Fatal"):
            yield SpecStep(step.action, line, by)
        else:
            raise RejectedError(line, "a coordinator has no such step")

    def _write_k(self, line: Line, write: Write, by: dict[str, Value]) -> Iterator[SpecStep]:
        d, k, action = self._d, write.record, line.event.action
        if line is d.run.history.created:
            return  # the model begins with it
        if action == "CreateRecord":
            raise RejectedError(line, "K was created before")
        step = line.event.step
        assert step is not None
        if why := d.run.history.wrong.get(id(line)):
            raise RejectedError(line, why)
        if k.version not in d.contents:
            raise RejectedError(line, f"version {k.version} was committed by no line")
        named = d.named[id(line)]
        values = {**by, "record": record_of(d, k, write.revision, action, named)}
        if action == "OpenAttempt" and k.open is not None and named[k.open.candidate] != self._offered:
            number = self._offered = named[k.open.candidate]
            content: dict[str, Value] = {**d.candidate(k.open.candidate, number, d.contents[k.version])}
            offered: dict[str, Value] = {"candidate": number, "content": content}
            yield SpecStep("CandidateReady", line, offered, hidden=True)
        if action == "OpenRestore":
            values["members"] = {**d.members(step.members)}
        if action == "Commit":
            values["sealed"] = d.share_sums_to(k)
        self._k = k
        yield SpecStep(action, line, values)

    # ------------------------------------------------------------ owners

    def _own(self, line: Line, step: Step) -> Iterator[SpecStep]:
        e = line.event
        values: dict[str, Value] = {"owner": self._d.owners[e.name], "epoch": step.epoch}
        match step.action:
            case "Emit":
                if self._will_seal_another(line, step.epoch):
                    yield SpecStep("StepCandidate", line, values, hidden=True)
                yield SpecStep("Emit", line, values)
            case "EndFold":
                yield SpecStep("FoldCells", line, values, hidden=True)
                yield SpecStep("EndFold", line, values)
            case "Seal" | "EmitFailed" | "BeginFold" | "LoseBaseline":
                yield SpecStep(step.action, line, values)
            case _:
                raise RejectedError(line, "an owner has no such step")

    def _will_seal_another(self, line: Line, epoch: int) -> bool:
        """The seal of this epoch has another content than the first one of the same candidate."""
        d, e = self._d, line.event
        opened = d.run.history.opened(epoch)
        tr = None if opened is None else opened.record.open
        if tr is None or tr.direction is not Direction.FORWARD:
            return False
        digest = d.sealed_share(OwnerRef(e.name, e.incarnation), epoch)
        first = self._digests.setdefault((e.name, e.incarnation, tr.candidate), digest) if digest else digest
        return first != digest

    # ------------------------------------------------------------ engines

    def _serve(self, line: Line, step: Step) -> Iterator[SpecStep]:
        name = line.event.name
        gate = self._gate.get(name, "closed")
        values: dict[str, Value] = {"engine": self._d.engines[name], "epoch": step.epoch}
        match step.action:
            case "CloseGate" | "LoseRecord":
                if gate == "closing":
                    yield SpecStep("GateStuck", line, {**values, "epoch": 0}, hidden=True)
                self._gate[name] = "closing"
                yield SpecStep(step.action, line, values)
            case "GateClosed":
                if gate == "open" and self._d.asynchronous:
                    yield SpecStep("OpenApply", line, {**values, "rank": self._d.ranks[0]}, hidden=True)
                self._gate[name] = "closed"
                yield SpecStep("GateClosed", line, values)
            case "OpenGate":
                yield SpecStep("LearnCommit", line, values, hidden=True)
                self._gate[name] = "open"
                version = NOVERSION if step.version is None else step.version
                yield SpecStep("OpenGate", line, {**values, "version": version})
            case "FailAttempt" if gate == "closing":
                self._gate[name] = "open"
                yield SpecStep("GateStuck", line, values)
            case "FailAttempt":
                for rank in self._d.ranks:
                    yield SpecStep("FailAttempt", line, {**values, "rank": rank})
            case _:
                raise RejectedError(line, "a node has no such step")

    def _write(self, line: Line, step: Step) -> Iterator[SpecStep]:
        d = self._d
        for rank in d.ranks_of(line):
            values: dict[str, Value] = {"engine": d.engines[line.event.name], "rank": rank, "epoch": step.epoch}
            match step.action:
                case "Fence":
                    yield SpecStep("Fence", line, {**values, "armed": step.armed})
                case "LearnCommit":
                    yield SpecStep("Holds", line, values)
                case "Stage" | "OpenApply" | "Acknowledge" | "FailAttempt":
                    yield SpecStep(step.action, line, values)
                case "DeliverManifest" if step.owner is not None:
                    as_ = d.incarnation(step.owner)
                    owner = d.owners.get(step.owner.owner, "")
                    yield SpecStep("DeliverManifest", line, {**values, "owner": owner, "sealed_as": as_})
                case "BeginWrite" | "EndWrite" | "FailWrite" if step.payload is not None:
                    yield from self._payload(line, step, values)
                case _:
                    raise RejectedError(line, "a rank has no such step")

    def _payload(self, line: Line, step: Step, values: dict[str, Value]) -> Iterator[SpecStep]:
        """What the last payload of an attempt carries is written cell by cell, and is done with its last."""
        i = step.payload
        assert i is not None
        cells = self._d.carried(i)
        as_ = self._d.incarnations.get(("owner", i.owner), {}).get(i.owner_incarnation, 0)
        named: dict[str, Value] = {**values, "owner": self._d.owners.get(i.owner, ""), "sealed_as": as_}
        if step.action != "BeginWrite":
            yield SpecStep(step.action, line, {**named, "cell": cells[-1]})
            return
        for n, cell in enumerate(cells):
            yield SpecStep("BeginWrite", line, {**named, "cell": cell})
            if n < len(cells) - 1:
                yield SpecStep("EndWrite", line, {**named, "cell": cell}, hidden=True)
