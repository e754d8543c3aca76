"""One run of a scenario: refits under fire, restarts, and how long each fault was felt."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dcr.chaos.bits import Twins
from dcr.chaos.checks import Checks
from dcr.chaos.fleet import Fleet, use_few_threads
from dcr.chaos.point import SERVERS
from dcr.chaos.process import Child, ChildError, wait
from dcr.chaos.scenario import Fault, Scenario
from dcr.chaos.trigger import Armed
from dcr.protocol.errors import DcrError
from dcr.protocol.record import CommitRecord

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
_LATE_S = 3.0
"""How long a point that comes after everything serves again is waited for."""
_PUMP_S = 0.1


@dataclass
class Strike:
    """A fault, and what came of it; times on the monotonic clock, seconds."""

    number: int
    fault: Fault
    fired_s: float | None = None
    committed_s: float | None = None
    recovered_s: float | None = None


@dataclass
class Totals:
    """What a run did."""

    commits: int = 0
    kills: int = 0
    faults: int = 0
    retries: int = 0
    pushes: int = 0
    restarts: int = 0
    kinds: list[str] = field(default_factory=list)


class Run:
    """Runs a scenario.

    Args:
        scenario: what to run.
        folder: for everything that it leaves; made anew.
        tell: takes a line of progress.
        bug: what is broken on purpose; empty for nothing.
    """

    def __init__(self, scenario: Scenario, folder: Path, tell: Callable[[str], None], bug: str = "") -> None:
        self.scenario = scenario
        self.strikes = [Strike(n, f) for n, f in enumerate(scenario.faults)]
        self.totals = Totals()
        self.began_s = time.monotonic()
        use_few_threads()
        self.fleet = Fleet(scenario, folder, bug)
        self.checks = Checks(folder, Twins(scenario.deployment.model.engine))
        self.checks.versions[0] = self.fleet.first
        self._tell = tell
        self._checkpoint = self.fleet.first
        self._candidate = self.fleet.first
        self._steps = 0
        self._serving: dict[str, int | None] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._expected_deaths: set[int] = set()
        self._refit = 0
        self._pushing = False
        self._push_when_ready = False
        self._operated: set[int] = set()
        self._last_report: dict[str, Any] = {}

    def run(self) -> None:
        """Run it; what is wrong is in ``checks.problems`` afterwards."""
        try:
            self._start()
            for refit in range(1, self.scenario.deployment.trainer.refits + 1):
                self._refit = refit
                self._one_refit()
        except DcrError as e:
            self.checks.problems.append(str(e))
        try:
            self.checks.history(self.fleet.history(), self._record())
        except DcrError as e:
            self.checks.problems.append(f"the record's history could not be read: {e}")
        finally:
            self.fleet.close()
        self.checks.requests()

    # ------------------------------------------------------------ the plan

    def _start(self) -> None:
        here = [s for s in self.strikes if s.fault.point.refit == 0]
        armed: dict[str, list[Armed]] = {}
        for strike in here:
            armed.setdefault(self._taker(strike), []).append(self._arming(strike, 0))
        trainer = [a for name, some in armed.items() if name.startswith("trainer") for a in some]
        self.fleet.start(trainer, armed)
        self._settle(START_TIMEOUT_S)
        self._recovered(here)

    def _one_refit(self) -> None:
        here = [s for s in self.strikes if s.fault.point.refit == self._refit]
        for strike in here:
            if strike.fault.point.restore:
                self._in_restore(strike)
        normal = [s for s in here if not s.fault.point.restore]
        self._arm(normal)
        self._begin_push()
        self._settle(self.scenario.recover_within_s)
        self._wait_for(lambda: not self._unfired(normal), _LATE_S)
        self._settle(self.scenario.recover_within_s)
        self._recovered(normal)
        self._compare()

    def _in_restore(self, strike: Strike) -> None:
        """An engine is started anew, so that it is restored; the fault strikes meanwhile."""
        taker = self._taker(strike)
        record = self._record()
        if taker.startswith("trainer"):
            self._arm([strike])
            victim = f"node-{len(self.fleet.nodes) - 1}"
            self._kill(self.fleet.nodes[victim])
            self._restart_node(victim)
        else:
            self._kill(self.fleet.nodes[taker])
            self._restart_node(taker, [self._arming(strike, record.epoch + strike.fault.point.attempt)])
        self._wait_for(lambda: strike.fired_s is not None, self.scenario.recover_within_s)
        self._settle(self.scenario.recover_within_s)
        self._recovered([strike])
        self._compare()

    def _recovered(self, strikes: list[Strike]) -> None:
        now = time.monotonic()
        for strike in strikes:
            if strike.fired_s is None:
                self.checks.problems.append(f"the fault never came: {strike.fault}")
                continue
            strike.recovered_s = now
            took = now - strike.fired_s - strike.fault.for_s - strike.fault.restart_after_s
            if took > self.scenario.recover_within_s:
                self.checks.problems.append(f"{strike.fault}: recovered after {took:.1f} s")

    def _compare(self) -> None:
        record = self._record()
        self.checks.committed(record)
        for node in self.fleet.nodes.values():
            node.send("bits")
        for node in self.fleet.nodes.values():
            self._wait_for(lambda n=node: "bits" in n.answers, ANSWER_TIMEOUT_S)  # type: ignore[misc]
            if "bits" not in node.answers:
                raise ChildError(f"{node.name} did not show its bits in {ANSWER_TIMEOUT_S:g} s")
            self.checks.bits(node.answers["bits"], record.version)

    def _record(self) -> CommitRecord:
        record = self.fleet.record()
        if record is None:
            raise ChildError("there is no record, although everything serves")
        return record

    # ------------------------------------------------------------ arming

    def _taker(self, strike: Strike) -> str:
        return self.fleet.process_of(strike.fault.point.taken_by)

    def _arming(self, strike: Strike, epoch_min: int) -> Armed:
        fault, point = strike.fault, strike.fault.point
        taker = point.taken_by
        own = self.fleet.process_of(fault.victim) == self._taker(strike)
        kind = "again" if fault.do == "duplicate" else point.kind
        return Armed(
            number=strike.number,
            role=taker.role,
            index=taker.index,
            kind=kind,
            action=point.action,
            count=point.count,
            items=point.items,
            payload=point.payload,
            epoch_min=epoch_min,
            do=fault.do,
            for_s=fault.for_s,
            own=own,
        )

    def _arm(self, strikes: list[Strike]) -> None:
        """Faults of an attempt wait for its epoch: every attempt has one of its own, and nothing else is under way."""
        epoch = self._record().epoch
        of: dict[str, list[Armed]] = {}
        for strike in strikes:
            armed = self._arming(strike, epoch + strike.fault.point.attempt)
            of.setdefault(self._taker(strike), []).append(armed)
        for name, armed_there in of.items():
            child = self.fleet.child(name)
            child.send("arm", armed=msgspec.to_builtins(armed_there))
            self._wait_for(lambda c=child: "armed" in c.answers, ANSWER_TIMEOUT_S)  # type: ignore[misc]
            if child.answers.pop("armed", None) is None:
                raise ChildError(f"{name} could not be armed in {ANSWER_TIMEOUT_S:g} s")

    def _unfired(self, strikes: list[Strike]) -> bool:
        return any(s.fired_s is None for s in strikes)

    # ------------------------------------------------------------ pushing

    def _begin_push(self, *, step: bool = True, dense: bool = False) -> None:
        if step:
            self._steps += 1
            self._candidate = self.fleet.folder / "checkpoints" / f"c{self._steps}"
        rate, seed = self.scenario.deployment.trainer.rate, self.scenario.seed * 1_000_003 + self._steps
        for trainer in self.fleet.trainers.values():
            if step:
                trainer.send("step", seed=seed, rate=rate, checkpoint=str(self._candidate))
            trainer.send("push", dense=dense)
        self._pushing = True
        self.totals.pushes += 1

    def _pushed(self) -> None:
        """Every training rank has the outcome."""
        reports = [t.answers.pop("push") for t in self.fleet.trainers.values()]
        self._pushing = False
        report = self._last_report = reports[0]
        if not report["error"]:
            self._checkpoint = self._candidate
            self.totals.commits += 1
            self.totals.retries += report["attempts"] - 1
            self.totals.kinds.append(report["kind"])
            self._note_commit()
            retried = f", {report['attempts']} attempts" if report["attempts"] > 1 else ""
            self._tell(f"refit {self._refit}: version {report['version']} committed, {report['kind']}{retried}")
            return
        self.totals.retries += 1
        for strike in self.strikes:
            fault = strike.fault
            due = strike.fired_s is not None and strike.number not in self._operated
            if due and fault.push_error and fault.push_error in report["error"]:
                self._operated.add(strike.number)
                self._tell(f"refit {self._refit}: as it should, {report['error'][:120]}")
                if fault.operator == "abandon":
                    self.fleet.trainers["trainer-0"].send("abandon")
                self._begin_push(step=fault.operator == "abandon", dense=fault.operator == "dense")
                return
        raise ChildError(f"refit {self._refit} failed: {report['error']}")

    def _note_commit(self) -> None:
        now = time.monotonic()
        for strike in self.strikes:
            if strike.fired_s is not None and strike.committed_s is None:
                strike.committed_s = now
        for child in [c for c in self.fleet.past if c.zombie and c.stopped]:
            child.go_on()  # its place is taken: it must be told so, and do no harm

    # ------------------------------------------------------------ striking

    def _fired(self, child: Child, number: int) -> None:
        strike = self.strikes[number]
        fault, victim = strike.fault, self.fleet.process_of(strike.fault.victim)
        strike.fired_s = now = time.monotonic()
        self.totals.faults += 1
        self._tell(f"refit {self._refit}: {fault}")
        own = victim == self._taker(strike)
        end = now + fault.for_s
        match fault.do:
            case "kill":
                self.totals.kills += 1
                self._kill_at_point(child, victim, fault, own=own)
            case "stall":
                self._stall(child, victim, end, own=own)
            case "partition":
                name = victim if victim in SERVERS else self.fleet.process_of(fault.victim)
                self.fleet.proxy(name).cut()
                self._timers.append((end, self.fleet.proxy(name).heal))
            case "fill":
                assert self.fleet.disk is not None
                self.fleet.disk.fill()
                self._timers.append((end, self.fleet.disk.free))
            case "replace":
                self._replace()
        child.send("go", number=number)

    def _kill_at_point(self, child: Child, victim: str, fault: Fault, *, own: bool) -> None:
        if victim in SERVERS:
            server = self.fleet.server(victim)
            server.kill()
            self._timers.append((time.monotonic() + fault.restart_after_s, server.start))
            return
        struck = child if own else self.fleet.child(victim)
        self._expected_deaths.add(struck.pid)
        if not own:
            self._kill(struck)
        at = time.monotonic() + fault.restart_after_s
        if victim.startswith("node"):
            self._timers.append((at, lambda: self._restart_node(victim)))
        else:
            self._timers.append((at, self._restart_trainer))

    def _stall(self, child: Child, victim: str, end: float, *, own: bool) -> None:
        if victim in SERVERS:
            server = self.fleet.server(victim)
            server.stop()
            self._timers.append((end, server.go_on))
            return
        struck = child if own else self.fleet.child(victim)
        struck.stop()
        self._timers.append((end, struck.go_on))

    def _replace(self) -> None:
        for trainer in self.fleet.trainers.values():
            trainer.stop()
            trainer.zombie = True
        self._pushing = False
        self._push_when_ready = True
        self.totals.restarts += 1
        self.fleet.start_trainer(self._checkpoint)

    def _kill(self, child: Child) -> None:
        self._expected_deaths.add(child.pid)
        child.kill()
        self._gone(child)

    def _gone(self, child: Child) -> None:
        for index in child.config.engines:
            self._serving[f"engine-{index}"] = None

    def _restart_node(self, name: str, armed: list[Armed] | None = None) -> None:
        self.totals.restarts += 1
        self.fleet.start_node(self.fleet.nodes[name].config.number, armed or [])

    def _restart_trainer(self) -> None:
        """All ranks: a training job whose rank is gone starts again from its last checkpoint."""
        for trainer in self.fleet.trainers.values():
            self._kill(trainer)
        self._push_when_ready = self._push_when_ready or self._pushing
        self._pushing = False
        self.totals.restarts += 1
        self.fleet.start_trainer(self._checkpoint)

    # ------------------------------------------------------------ waiting

    def _settle(self, timeout_s: float) -> None:
        """Wait until no push and no restart is under way, and every engine serves the committed version.

        Raises:
            ChildError: it did not come to that in time; names who is waited for.
        """
        began = time.monotonic()

        def deadline() -> float:
            faults = [s for s in self.strikes if s.fired_s is not None]
            return timeout_s + max(
                [began, *(s.fired_s + s.fault.for_s + s.fault.restart_after_s for s in faults if s.fired_s is not None)]
            )

        while self._waits_for():
            if time.monotonic() > deadline():
                raise ChildError(f"refit {self._refit}: after {timeout_s:g} s still waiting for {self._waits_for()}")
            self._pump(_PUMP_S)

    def _waits_for(self) -> str:
        if self._timers:
            return "what was struck to come back"
        late = [c.name for c in self.fleet.children if not c.ready and not c.zombie]
        if late:
            return f"{', '.join(late)} to start"
        if self._pushing or self._push_when_ready:
            return "the push to end"
        zombies = [c.name for c in self.fleet.past if c.zombie]
        if zombies:
            return f"{', '.join(zombies)} to learn that it was replaced"
        record = self.fleet.record()
        version = None if record is None else record.version
        names = [f"engine-{i}" for n in self.fleet.nodes.values() for i in n.config.engines]
        behind = [n for n in names if version is None or self._serving.get(n) != version]
        return f"{', '.join(behind)} to serve version {version}" if behind else ""

    def _wait_for(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            self._pump(_PUMP_S)

    def _pump(self, timeout_s: float) -> None:
        """Take what children say, notice who died, and do what is due; returns after one round."""
        now = time.monotonic()
        due = [t for t in self._timers if t[0] <= now]
        self._timers = [t for t in self._timers if t[0] > now]
        for _, act in due:
            act()
        by = {c.pipe: c for c in self.fleet.children if c.exitcode is None or c.pid not in self._expected_deaths}
        by_sentinel = {c.sentinel: c for c in by.values()}
        ready = wait([*by, *by_sentinel], timeout_s)
        for pipe, child in by.items():
            while pipe in ready and not pipe.closed and pipe.poll():
                message = child.receive()
                if message is None:
                    break
                self._take(child, message)
        for sentinel, child in by_sentinel.items():
            if sentinel in ready:
                self._died(child)
        if self._push_when_ready and all(t.ready for t in self.fleet.trainers.values()):
            self._push_when_ready = False
            self._begin_push()
        if self._pushing and all("push" in t.answers for t in self.fleet.trainers.values()):
            self._pushed()

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        match message["what"]:
            case "ready":
                child.ready = True
            case "armed":
                child.answers["armed"] = True
            case "answer":
                child.answers[message["to"]] = message["value"]
                if child.zombie and message["to"] == "push":
                    self._zombie_told(child, message["value"])
            case "serving":
                self._serving.update(message["versions"])
                for engine, why in message["failures"].items():
                    raise ChildError(f"{engine} is out of service: {why}")
            case "fault":
                self._fired(child, message["number"])
            case "failed":
                raise ChildError(f"{child.name}: {message['error']}; its log is {child.log}")

    def _zombie_told(self, child: Child, report: dict[str, Any]) -> None:
        if report["error"]:
            self._tell(f"refit {self._refit}: the one that was replaced is told: {report['error'][:120]}")
        else:
            self.checks.problems.append(f"{child.name}, which was replaced, was told that it committed")
        child.zombie = False
        child.kill()

    def _died(self, child: Child) -> None:
        if child.pid in self._expected_deaths:
            self._gone(child)
            return
        tail = f"the end of {child.log}:\n{child.log_tail}"
        raise ChildError(f"{child.name} ended by itself, status {child.exitcode}; {tail}")
