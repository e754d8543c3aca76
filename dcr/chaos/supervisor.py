"""Watches a run's processes: takes what they say, strikes where a point is reached, and starts again what fell."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from dcr.chaos.checks import Checks
from dcr.chaos.fleet import Fleet
from dcr.chaos.point import SERVERS
from dcr.chaos.process import Child, ChildError, wait
from dcr.chaos.pushes import Pushes
from dcr.chaos.strike import Strike, Totals

PUMP_S = 0.1
FOLLOW_S = 1.0
"""Between two looks at the history of K, of which a control plane keeps the last thousand writes."""
_SHOWN_LATE_S = 20.0
"""How much longer a partition or a full disk lasts at most, where a busy machine lets nothing come to it in time."""
_HELD_UP_S = 1.0
"""A wait that ends so much too late was not ended by the machine in time."""


class Supervisor:
    """One thread, which everything goes through.

    Args:
        fleet: the processes.
        strikes: the faults, by their numbers.
        pushes: the trainer's.
        checks: is told what must not be.
        totals: counted here.
        tell: takes a line of progress.
        follow: reads what was written of K since; called every second, unless what was struck is still away.
    """

    def __init__(
        self,
        fleet: Fleet,
        strikes: Sequence[Strike],
        pushes: Pushes,
        *,
        checks: Checks,
        totals: Totals,
        tell: Callable[[str], None],
        follow: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._strikes = strikes
        self._pushes = pushes
        self._checks = checks
        self._totals = totals
        self._tell = tell
        self._follow = follow
        self._followed_s = time.monotonic()
        self._serving: dict[str, int | None] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._expected_deaths: set[int] = set()
        self.epoch = 0
        """K's, when the refit began: what is armed anew in a process that starts again counts from it."""

    # ------------------------------------------------------------ waiting

    def settle(self, timeout_s: float) -> None:
        """Wait until no push and no restart is under way, and every engine serves the committed version.

        Args:
            timeout_s: from now, or from when the last fault was over.

        Raises:
            ChildError: it did not come to that in time, and who is waited for; or a process ended that none struck.
        """
        began = time.monotonic()
        while waits_for := self._waits_for():
            if time.monotonic() > timeout_s + max([began, *(s.quiet_s for s in self._strikes)]):
                raise ChildError(
                    f"refit {self._pushes.refit}: after {timeout_s:g} s still waiting for {waits_for}{self._why()}"
                )
            self.pump(PUMP_S)

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something, at most so long; whether it came."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                return False
            self.pump(PUMP_S)
        return True

    def answer(self, child: Child, to: str, timeout_s: float) -> Any:
        """What a child answers to an order; ChildError if it does not."""
        if not self.wait_for(lambda: to in child.answers, timeout_s):
            raise ChildError(f"{child.name} did not answer {to!r} in {timeout_s:g} s")
        return child.answers.pop(to)

    def _waits_for(self) -> str:
        if self._timers:
            return "what was struck to come back"
        late = [c.name for c in self._fleet.children if not c.ready and not c.zombie]
        if late:
            return f"{', '.join(late)} to start"
        if self._pushes.waits_for:
            return self._pushes.waits_for
        zombies = [c.name for c in self._fleet.past if c.zombie]
        if zombies:
            return f"{', '.join(zombies)} to learn that it was replaced"
        record = self._fleet.record()
        version = None if record is None else record.version
        names = [f"engine-{i}" for n in self._fleet.nodes.values() for i in n.config.engines]
        behind = [n for n in names if version is None or self._serving.get(n) != version]
        return f"{', '.join(behind)} to serve version {version}" if behind else ""

    def _why(self) -> str:
        """What the nodes say that they are at."""
        said = []
        for node in self._fleet.nodes.values():
            if node.ready and node.exitcode is None:
                node.send("status")
                self.wait_for(lambda n=node: "status" in n.answers, 2.0)  # type: ignore[misc]
                said += [f"{name}: {text}" for name, text in node.answers.pop("status", {}).items()]
        return "".join(f"\n  {line}" for line in said)

    def pump(self, timeout_s: float) -> None:
        """Take what children say, notice who died, and do what is due: one round."""
        now = time.monotonic()
        due = [t for t in self._timers if t[0] <= now]
        self._timers = [t for t in self._timers if t[0] > now]
        for _, act in due:
            act()
        if now > self._followed_s + FOLLOW_S and not self._timers:
            self._follow()
            self._followed_s = time.monotonic()
        for child in self._fleet.children:
            child.keep_going()
        by_pipe = {c.pipe: c for c in self._fleet.children if not c.pipe.closed and not c.gone}
        by_sentinel = {c.sentinel: c for c in by_pipe.values()}
        waited_s = time.monotonic()
        ready = wait([*by_pipe, *by_sentinel], timeout_s)
        late_s = time.monotonic() - waited_s - timeout_s
        if late_s > _HELD_UP_S:
            self._totals.held_up_s += late_s
        for pipe, child in by_pipe.items():
            while pipe in ready and not pipe.closed and pipe.poll():
                message = child.receive()
                if message is None:
                    break
                self._take(child, message)
        for sentinel, child in by_sentinel.items():
            if sentinel in ready:
                self._died(child)
        self._pushes.look()

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
                self._fired(child, self._strikes[message["number"]])
            case "short":
                strike = self._strikes[message["number"]]
                strike.short_items = max(message["items"], strike.short_items or 0)
            case "failed":
                raise ChildError(f"{child.name}: {message['error']}; its log is {child.log}")

    def _zombie_told(self, child: Child, report: dict[str, Any]) -> None:
        if not report["error"]:
            raise ChildError(f"{child.name}, which was replaced, was told that it committed")
        self._tell(f"refit {self._pushes.refit}: the one that was replaced is told: {report['error'][:140]}")
        child.zombie = False
        child.kill()

    def _died(self, child: Child) -> None:
        child.gone = True
        child.zombie = False
        for message in child.kill():
            if message["what"] == "fault":  # it came, whoever was heard first: it is not to come again
                self._fired(child, self._strikes[message["number"]])
        for index in child.config.engines:
            self._serving[f"engine-{index}"] = None
        expected = child.pid in self._expected_deaths
        self._expected_deaths.discard(child.pid)  # the machine may give the number to another process
        if not expected:
            tail = f"the end of {child.log}:\n{child.log_tail}"
            raise ChildError(f"{child.name} ended by itself, status {child.exitcode}; {tail}")

    # ------------------------------------------------------------ striking

    def _fired(self, child: Child, strike: Strike) -> None:
        fault = strike.fault
        strike.fired_s = now = time.monotonic()
        takers = self._fleet.processes_of(fault.point.taken_by)
        for name in takers:
            if name != child.name:  # whoever leads next comes to the same point
                self._fleet.child(name).send("disarm", number=strike.number)
        own_role = self._fleet.processes_of(fault.victim) == takers
        victim = strike.struck = child.name if own_role else self._fleet.process_of(fault.victim)
        self._totals.faults += 1
        self._tell(f"refit {self._pushes.refit}: {strike}")
        own = victim == child.name
        end = now + fault.for_s
        match fault.do:
            case "kill":
                self._totals.kills += 1
                self._kill_at_point(child, strike, own=own)
            case "stall":
                self._stall(child, victim, end, own=own)
            case "partition":
                proxy = self._fleet.proxy(victim)
                proxy.cut()
                self._timers.append((end, lambda: self._end(strike, lambda: proxy.held > 0, self._heal)))
            case "fill":
                assert self._fleet.disk is not None
                self._fleet.disk.fill()
                shown = lambda: strike.told or not fault.push_error  # noqa: E731
                self._timers.append((end, lambda: self._end(strike, shown, self._free)))
            case "replace":
                self._replace(child)
            case "roll_back":
                self._fleet.trainers["trainer-0"].send("roll_back")
        child.send("go", number=strike.number)

    def _kill_at_point(self, child: Child, strike: Strike, *, own: bool) -> None:
        victim, at = strike.struck, time.monotonic() + strike.fault.restart_after_s
        if victim in SERVERS:
            self._fleet.server(victim).kill()
            self._timers.append((at, lambda: self._start_server(strike)))
            return
        struck = child if own else self._fleet.child(victim)
        was_zombie = struck.zombie
        self._expected_deaths.add(struck.pid)
        if not own:
            self.kill(struck)
        if was_zombie:
            return
        if victim.startswith("node"):
            self._timers.append((at, lambda: self.restart_node(victim)))
        elif victim in self._fleet.coordinators:
            self._timers.append((at, lambda: self.restart_coordinator(victim)))
        else:
            self._timers.append((at, self.restart_trainer))

    def _stall(self, child: Child, victim: str, end: float, *, own: bool) -> None:
        if victim in SERVERS:
            server = self._fleet.server(victim)
            server.stop()
            self._timers.append((end, server.go_on))
            return
        struck = child if own else self._fleet.child(victim)
        struck.stop(itself=own)
        self._timers.append((end, struck.go_on))

    def _start_server(self, strike: Strike) -> None:
        self._fleet.server(strike.struck).start()
        strike.over_s = time.monotonic()

    def _end(self, strike: Strike, shown: Callable[[], bool], act: Callable[[Strike], None]) -> None:
        """End what lasts, or let it last on for a while if it has not shown yet what it is there to show."""
        assert strike.fired_s is not None
        strike.over_s = now = time.monotonic()
        if shown() or now > strike.fired_s + strike.fault.for_s + _SHOWN_LATE_S:
            act(strike)
        else:
            strike.over_s = now + PUMP_S
            self._timers.append((strike.over_s, lambda: self._end(strike, shown, act)))

    def _free(self, _strike: Strike) -> None:
        assert self._fleet.disk is not None
        self._fleet.disk.free()

    def _heal(self, strike: Strike) -> None:
        proxy = self._fleet.proxy(strike.struck)
        if not proxy.held:
            self._checks.problems.append(f"{strike}: nothing wanted to pass while it lasted; it has shown nothing")
        proxy.heal()

    def _replace(self, first: Child) -> None:
        """Hold the trainer still, and start another one beside it, as an operator who takes it for dead."""
        for trainer in self._fleet.trainers.values():
            trainer.stop(itself=trainer is first)
            trainer.zombie = True
        self._pushes.interrupted()
        self._totals.restarts += 1
        self._fleet.start_trainer(self._pushes.checkpoint)

    def kill(self, child: Child) -> None:
        """SIGKILL, as a fault asks for or before it is replaced, unless its end was noticed; what it said is heard."""
        if not child.gone:
            self._expected_deaths.add(child.pid)
            self._died(child)

    def restart_node(self, name: str, strikes: Sequence[Strike] | None = None) -> None:
        """Start a node again; faults that have not come yet may come in the new process.

        Args:
            name: of the node.
            strikes: those of a restore, which the engines are then made to need; None where nothing is to be restored.
        """
        self._totals.restarts += 1
        self.kill(self._fleet.nodes[name])
        number, armed = self._fleet.nodes[name].config.number, self._still_armed(name, strikes)
        self._fleet.start_node(number, armed, foreign=strikes is not None)

    def restart_coordinator(self, name: str) -> None:
        """Start a coordinator again; faults that have not come yet may come in the new process."""
        self._totals.restarts += 1
        self.kill(self._fleet.coordinators[name])
        self._fleet.start_coordinator(self._fleet.coordinators[name].config.number, self._still_armed(name, None))

    def restart_trainer(self) -> None:
        """Start all ranks again: a training job whose rank is gone starts again from its last checkpoint."""
        for trainer in self._fleet.trainers.values():
            self.kill(trainer)
        self._pushes.interrupted()
        self._totals.restarts += 1
        armed = [a for name in self._fleet.trainers for a in self._still_armed(name, None)]
        self._fleet.start_trainer(self._pushes.checkpoint, armed)

    def _still_armed(self, name: str, strikes: Sequence[Strike] | None) -> list[Any]:
        processes_of = self._fleet.processes_of
        return [
            s.armed(self.epoch, processes_of)
            for s in (self._strikes if strikes is None else strikes)
            if s.fired_s is None
            and s.fault.point.refit == self._pushes.refit
            and name in processes_of(s.fault.point.taken_by)
        ]
