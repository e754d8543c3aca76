"""The lines of a run in one order that their contents prove: no clock is asked.

What must come before what:

- an actor's lines, one after the other; those of an incarnation before the start of the next;
- the writes of K, by revision;
- what a node does on reading K, between the write that made that revision and the next one; what a rank does of an
  epoch that K must be at, between the write that began it and the one that ended it;
- an order before who obeys it, an answer before what needs it, a payload or seal before who reads it.

Messages may be read late, and never early; so of lines that may be next a leader's comes last, and the start of a new
incarnation after that: everything that could have happened before it, happens before it.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcr.modelcheck.eventlog.history import History, Write
from dcr.modelcheck.eventlog.read import Line, Logs
from dcr.protocol.event import Event
from dcr.protocol.record import Member, OwnerRef
from dcr.protocol.step import Step

_ORDER = {"rank": 0, "owner": 1, "node": 2, "coordinator": 3}
_START = 4
_READS_K = ("CloseGate", "OpenGate")


@dataclass
class Run:
    """Who took part, and what each wrote down.

    Attributes:
        history: K, write by write.
        nodes: chains of node agents by engine, and by incarnation in rising order.
        ranks: chains of ranks by (engine, incarnation of the rank).
        owners: chains of owners by name, and by incarnation.
        leaders: chains of coordinators by name.
        engine_of: the engine incarnation that a rank incarnation belongs to, and the rank's name.
        notes: what is to be said about what was read.
    """

    history: History
    nodes: dict[str, dict[int, list[Line]]] = field(default_factory=lambda: defaultdict(dict))
    ranks: dict[tuple[str, int], list[Line]] = field(default_factory=dict)
    owners: dict[str, dict[int, list[Line]]] = field(default_factory=lambda: defaultdict(dict))
    leaders: dict[str, list[Line]] = field(default_factory=dict)
    engine_of: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, logs: Logs) -> "Run":
        """From the files; see ``History`` for what is raised."""
        run = cls(History(line for chain in logs.chains for line in chain), notes=list(logs.notes))
        for chain in logs.chains:
            e = chain[0].event
            lines = run._known(chain)
            match e.role:
                case "node":
                    run.nodes[e.name][e.incarnation] = lines
                case "rank":
                    run.ranks[e.name, e.incarnation] = lines
                case "owner":
                    run.owners[e.name][e.incarnation] = lines
                case _:
                    run.leaders[e.name] = lines
        for by in (*run.nodes.values(), *run.owners.values()):
            for incarnation in sorted(by):
                by[incarnation] = by.pop(incarnation)
        for engine, by in run.nodes.items():
            for incarnation, lines in by.items():
                start = lines[0].event.start
                for rank, its in ({} if start is None else start.ranks).items():
                    run.engine_of.setdefault((engine, its), (incarnation, rank))
        for key in [k for k in run.ranks if k not in run.engine_of]:
            chain_of = run.ranks.pop(key)
            if len(chain_of) > 1:
                run.notes.append(f"{chain_of[0].path.name}: not checked: no node agent's log names this rank")
        run._seal_what_was_read()
        return run

    def _known(self, chain: tuple[Line, ...]) -> list[Line]:
        """The lines up to the first that read a K of which no leader's log tells."""
        last = self.history.last_revision
        for at, line in enumerate(chain):
            if line.event.k > last and line.event.action in _READS_K:
                self.notes.append(
                    f"{line.place}: not checked from here on: it read K at revision {line.event.k}, and the last write "
                    f"that a leader's log tells of is revision {last}"
                )
                return list(chain[:at])
        return list(chain)

    def _seal_what_was_read(self) -> None:
        """An owner that was killed may have delivered a seal, and not have written it down: ranks that read it did."""
        read: dict[tuple[OwnerRef, int], int] = defaultdict(int)
        for lines in self.ranks.values():
            for line in lines:
                step = line.event.step
                if step is not None and step.owner is not None:
                    read[step.owner, step.epoch] += 0
                if step is not None and step.payload is not None:
                    i = step.payload
                    ref = OwnerRef(i.owner, i.owner_incarnation)
                    if (ref, i.epoch) in read or step.action == "BeginWrite":
                        read[ref, i.epoch] = max(read[ref, i.epoch], i.sequence + 1)
        delivered = {
            (step.owner, step.epoch)
            for lines in self.ranks.values()
            for line in lines
            if (step := line.event.step) is not None and step.owner is not None
        }
        for ref, epoch in sorted(delivered):
            lines = self.owners.get(ref.owner, {}).get(ref.incarnation, [])
            steps = [line.event.step for line in lines if line.event.step is not None]
            last = steps[-1] if steps else None
            if last is not None and last.action == "Emit" and last.epoch == epoch:
                step = Step(ref.owner, "Seal", epoch, payloads=read[ref, epoch])
                event = Event(0, "owner", ref.owner, ref.incarnation, step=step)
                lines.append(Line(lines[-1].path, lines[-1].number, event, "not written down: the owner was gone"))

    @property
    def chains(self) -> list[list[Line]]:
        """Every actor's lines."""
        of_nodes = [lines for by in self.nodes.values() for lines in by.values()]
        of_owners = [lines for by in self.owners.values() for lines in by.values()]
        return [*self.leaders.values(), *of_owners, *of_nodes, *self.ranks.values()]


def in_order(run: Run) -> list[Line]:
    """All lines, each after everything that must come before it.

    Where the lines contradict each other, the one that speaks of what is furthest in the future comes too early: then
    the specification has no step for it.
    """
    return _Sorter(run).sorted()


class _Sorter:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: list[Line] = []
        self._number: dict[int, int] = {}  # by id of the line
        self._after: dict[int, set[int]] = defaultdict(set)
        self._waits: dict[int, set[int]] = defaultdict(set)
        self._chain: dict[int, int] = {}
        for number, chain in enumerate(run.chains):
            for line in chain:
                self._add(line, number)
            self._in_turn(chain)
        for w in run.history.writes:
            if w.line.unlogged:
                self._add(w.line, len(run.chains))
        self._by: dict[tuple[str, int], list[Line]] = defaultdict(list)
        for line in self._lines:
            if line.event.step is not None:
                self._by[line.event.action, line.event.step.epoch].append(line)
        self._edges()

    def _add(self, line: Line, chain: int) -> None:
        self._number[id(line)] = len(self._lines)
        self._chain[len(self._lines)] = chain
        self._lines.append(line)

    def _put(self, first: Line | Write | None, then: Line | Write | None) -> None:
        a, b = (x.line if isinstance(x, Write) else x for x in (first, then))
        if a is None or b is None or a is b or id(a) not in self._number or id(b) not in self._number:
            return
        self._after[self._number[id(a)]].add(self._number[id(b)])
        self._waits[self._number[id(b)]].add(self._number[id(a)])

    def _in_turn(self, lines: Iterable[Line | Write]) -> None:
        last: Line | Write | None = None
        for line in lines:
            self._put(last, line)
            last = line

    # ------------------------------------------------------------ what must come before what

    def _edges(self) -> None:
        h = self._run.history
        self._in_turn(([h.created] if h.created is not None else []) + list(h.writes))
        for w in h.writes:
            self._write(w)
        for name, line in ((n, x) for n, chain in self._run.leaders.items() for x in chain):
            if line.event.action in ("Publish", "FinishTransition"):
                self._after_commit(name, line)
        for by in (*self._run.nodes.values(), *self._run.owners.values()):
            incarnations = list(by.values())
            for old, new in zip(incarnations, incarnations[1:], strict=False):
                self._put(old[-1], new[0])
        for (engine, incarnation), lines in self._run.ranks.items():
            self._rank(self._node_of(engine, incarnation), lines)
            engine_incarnation, _ = self._run.engine_of[engine, incarnation]
            later = [x for i, x in self._run.nodes[engine].items() if i > engine_incarnation]
            if later:
                self._put(lines[-1], later[0][0])
        for by in self._run.nodes.values():
            for lines in by.values():
                self._node(lines)
        for by in self._run.owners.values():
            for lines in by.values():
                self._owner(lines)

    def _node_of(self, engine: str, rank_incarnation: int) -> list[Line]:
        incarnation, _ = self._run.engine_of[engine, rank_incarnation]
        return self._run.nodes[engine][incarnation]

    def _started(self, m: Member | OwnerRef) -> Line | None:
        by, name = (self._run.nodes, m.engine) if isinstance(m, Member) else (self._run.owners, m.owner)
        lines = by.get(name, {}).get(m.incarnation)
        return None if lines is None else lines[0]

    def _ranks_of(self, m: Member) -> set[int]:
        return {its for (engine, its), (of, _) in self._run.engine_of.items() if (engine, of) == (m.engine, m.incarnation)}

    def _write(self, w: Write) -> None:
        step, k = w.line.event.step, w.record
        assert step is not None
        named: list[Member | OwnerRef] = [*k.members, *step.members, *step.owners]
        if k.open is not None and w.line.event.action == "OpenAttempt":
            named += k.open.owners
        if w.line.event.action in ("OpenAttempt", "OpenRestore", "Admit"):
            for m in named:
                self._put(self._started(m), w)
        if w.line.event.action == "Commit":
            for o in k.committed.owners if k.committed is not None else ():
                self._answers("Seal", k.epoch, {o.incarnation}, o.owner, w.line)
        if w.line.event.action in ("Commit", "Admit"):
            for m in k.members:
                for epoch in [k.epoch] if w.line.event.action == "Commit" else range(k.epoch + 1):
                    self._answers("Acknowledge", epoch, self._ranks_of(m), m.engine, w.line)
        if w.line.event.action == "OpenAttempt":
            for order in self._by["OrderOpenApply", k.epoch]:
                for m in k.members:
                    for action in ("Fence", "Stage"):
                        self._answers(action, k.epoch, self._ranks_of(m), m.engine, order)

    def _answers(self, action: str, epoch: int, incarnations: set[int], name: str, then: Line) -> None:
        for line in self._by.get((action, epoch), ()):
            if line.event.name == name and line.event.incarnation in incarnations and not self._hopeless(line):
                self._put(line, then)

    @staticmethod
    def _hopeless(line: Line) -> bool:
        return line.event.step is not None and not line.event.step.armed

    def _after_commit(self, leader: str, line: Line) -> None:
        """Owners fold what was published, and a transition ends when they have."""
        chain = self._run.leaders[leader]
        before = [w for w in self._run.history.writes if w.line in chain[: chain.index(line)]]
        c = before[-1].record.committed if before else self._run.history.first.committed
        if c is None:
            return
        if line.event.action == "Publish":
            told = {x.event.name for x in self._by["BeginFold", c.epoch] if self._waits_for_publication(x)}
            for x in self._by["BeginFold", c.epoch]:
                if x.event.name not in told:
                    self._put(line, x)
            return
        first = next((x for x in self._by.get(("FinishTransition", c.epoch), ()) if x.event.name == leader), None)
        if line is first:
            for action in ("EndFold", "LoseBaseline"):
                for x in self._by.get((action, c.epoch), ()):
                    self._put(x, line)

    def _waits_for_publication(self, line: Line) -> bool:
        waits = self._waits[self._number[id(line)]]
        return any(self._lines[i].event.action == "Publish" for i in waits)

    def _owner(self, lines: list[Line]) -> None:
        h = self._run.history
        for line in lines:
            step = line.event.step
            if step is None:
                continue
            if step.action in ("Emit", "EmitFailed"):
                self._put(h.opened(step.epoch), line)
            elif step.action == "BeginFold":
                commit = h.committed(step.epoch)
                self._put(commit, line)
                if commit is not None:
                    self._put(line, h.commit_after(commit))

    def _node(self, lines: list[Line]) -> None:
        h = self._run.history
        for line in lines:
            if line.event.action in _READS_K:
                self._put(h.written(line.event.k), line)
                self._put(line, h.written(line.event.k + 1))
            elif line.event.action == "GateClosed" and line.event.step is not None:
                for order in self._by.get(("OrderOpenApply", line.event.step.epoch), ()):
                    if self._closes_to_apply(lines, line):
                        self._put(order, line)

    @staticmethod
    def _closes_to_apply(lines: list[Line], line: Line) -> bool:
        """With an asynchronous gate it is the order to apply that closes it, and no line tells of that."""
        gate = [x for x in lines[: lines.index(line)] if x.event.action in ("OpenGate", "CloseGate", "LoseRecord")]
        return bool(gate) and gate[-1].event.action == "OpenGate"

    def _rank(self, node: list[Line], lines: list[Line]) -> None:
        h = self._run.history
        self._put(node[0], lines[0])
        for line in lines:
            step = line.event.step
            if step is None:
                continue
            match step.action:
                case "Fence":
                    self._put(h.opened(step.epoch), line)
                    self._put(line, h.passed(step.epoch))
                    self._fence(node, line, step.epoch)
                case "OpenApply":
                    for order in self._by.get(("OrderOpenApply", step.epoch), ()):
                        self._put(order, line)
                    for closed in node:
                        if closed.event.step is not None and closed.event.step.epoch == step.epoch:
                            if closed.event.action == "GateClosed":
                                self._put(closed, line)
                case "BeginWrite" if step.payload is not None:
                    i = step.payload
                    self._answers("Emit", step.epoch, {i.owner_incarnation}, i.owner, line)
                case "DeliverManifest" if step.owner is not None:
                    self._answers("Seal", step.epoch, {step.owner.incarnation}, step.owner.owner, line)
                case "LearnCommit":
                    commit = h.committed(step.epoch)
                    self._put(commit, line)
                    if commit is not None:
                        self._put(line, h.commit_after(commit))

    def _fence(self, node: list[Line], line: Line, epoch: int) -> None:
        """A node's lines before its ranks are prepared, and the one that says that they are."""
        prepared = [x for x in node if x.event.action == "Prepare" and x.event.step and x.event.step.epoch == epoch]
        opened = self._run.history.opened(epoch)
        if prepared:
            at = node.index(prepared[0])
            self._put(node[at - 1] if at else None, line)
            self._put(line, prepared[0])
        elif opened is not None:
            before = [
                x
                for x in node
                if x.event.k < opened.revision
                or (x.event.action in ("CloseGate", "GateClosed") and x.event.step and x.event.step.epoch == epoch)
            ]
            self._put(before[-1] if before else None, line)

    # ------------------------------------------------------------ the order

    def _key(self, number: int) -> tuple[int, int, int]:
        line = self._lines[number]
        late = line.event.start is not None and number != 0 and self._second(line)
        return (_START if late else _ORDER[line.event.role], self._chain[number], number)

    def _second(self, line: Line) -> bool:
        """A start of another incarnation than the first, which ends the one before."""
        e = line.event
        by = self._run.nodes.get(e.name) if e.role == "node" else self._run.owners.get(e.name)
        return bool(by) and e.incarnation != next(iter(by))

    def sorted(self) -> list[Line]:
        waits = {number: set(self._waits[number]) for number in range(len(self._lines))}
        ready = [self._key(number) for number, before in waits.items() if not before]
        heapq.heapify(ready)
        done: list[Line] = []
        taken: set[int] = set()
        while len(taken) < len(self._lines):
            number = heapq.heappop(ready)[2] if ready else self._least_likely(waits, taken)
            if number in taken:
                continue
            taken.add(number)
            done.append(self._lines[number])
            for later in self._after[number]:
                waits[later].discard(number)
                if not waits[later] and later not in taken:
                    heapq.heappush(ready, self._key(later))
        return done

    def _least_likely(self, waits: dict[int, set[int]], taken: set[int]) -> int:
        """Of lines that wait for each other, the first of an actor that waits for the latest write of K."""
        heads: dict[int, int] = {}
        for number in range(len(self._lines)):
            if number not in taken:
                heads.setdefault(self._chain[number], number)
        revisions = {id(w.line): w.revision for w in self._run.history.writes}

        def future(number: int) -> int:
            return max((revisions.get(id(self._lines[i]), 0) for i in waits[number]), default=0)

        return max(heads.values(), key=lambda number: (future(number), -number))
