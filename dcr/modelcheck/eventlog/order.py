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
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from dcr.modelcheck.eventlog.history import Write
from dcr.modelcheck.eventlog.read import Line
from dcr.modelcheck.eventlog.run import READS_K, Run
from dcr.protocol.record import CommitRecord, Member, OwnerRef

_ORDER = {"rank": 0, "owner": 1, "node": 2, "coordinator": 3}
_START = 4
_GATE = ("OpenGate", "CloseGate", "LoseRecord")


def in_order(run: Run) -> list[Line]:
    """All lines, each after everything that must come before it.

    Where the lines contradict each other, the one that speaks of what is furthest in the future comes too early: then
    the specification has no step for it.
    """
    return _Sorter(run).sorted()


def _role(line: Line) -> int:
    return _ORDER[line.event.role]


def _named(m: Member | OwnerRef) -> tuple[str, str, int]:
    return ("engine", m.engine, m.incarnation) if isinstance(m, Member) else ("owner", m.owner, m.incarnation)


class _Sorter:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: list[Line] = []
        self._number: dict[int, int] = {}  # by id of the line
        self._after: dict[int, set[int]] = defaultdict(set)
        self._waits: dict[int, set[int]] = defaultdict(set)
        self._chain: dict[int, int] = {}
        self._late: set[tuple[int, int]] = set()
        for number, chain in enumerate(run.chains):
            for line in chain:
                self._add(line, number)
            self._in_turn(chain)
        for w in run.history.writes:
            if w.line.unlogged:
                self._add(w.line, len(run.chains))
        self._index()
        self._edges()

    def _add(self, line: Line, chain: int) -> None:
        self._number[id(line)] = len(self._lines)
        self._chain[len(self._lines)] = chain
        self._lines.append(line)

    def _index(self) -> None:
        """What is asked of every line is looked up."""
        self._by: dict[tuple[str, int], list[Line]] = defaultdict(list)
        self._acknowledged: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Epochs that a rank acknowledged, by its engine and incarnation."""
        for line in self._lines:
            e = line.event
            if e.step is not None:
                self._by[e.action, e.step.epoch].append(line)
                if e.action == "Acknowledge":
                    self._acknowledged[e.name, e.incarnation].append(e.step.epoch)
        self._ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
        """Incarnations of the ranks of an engine's incarnation."""
        for (engine, its), (incarnation, _) in self._run.engine_of.items():
            self._ranks[engine, incarnation].add(its)
        self._gate: dict[int, str] = {}
        """By number of a node's line, what it did last about its gate before."""
        for chain in (lines for by in self._run.nodes.values() for lines in by.values()):
            last = ""
            for line in chain:
                self._gate[self._number[id(line)]] = last
                last = line.event.action if line.event.action in _GATE else last
        self._next_start: dict[tuple[str, str, int], Line] = {}
        """By what was started, its name and incarnation, the start of the next incarnation."""
        for kind, started in (("engine", self._run.nodes), ("owner", self._run.owners)):
            for name, by in started.items():
                for (old, _), (_, lines) in pairwise(by.items()):
                    self._next_start[kind, name, old] = lines[0]

    def _until(self, line: Line, write: Write | None) -> None:
        """What a line says was so until this write, which need not wait for a line that comes too late."""
        self._put(line, write)
        if write is not None and id(write.line) in self._number:
            self._late.add((self._number[id(line)], self._number[id(write.line)]))

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
        written = {id(w.line): number for number, w in enumerate(h.writes)}
        # Of two leaders that published one commit, the older one did so first.
        in_turn = sorted(
            self._run.leaders.values(),
            key=lambda chain: min((written[id(x)] for x in chain if id(x) in written), default=len(written)),
        )
        for chain in in_turn:
            self._after_commits(chain)
            self._before_the_next_leader(chain)
        for by in (*self._run.nodes.values(), *self._run.owners.values()):
            for old, new in pairwise(list(by.values())):
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
        return self._ranks.get((m.engine, m.incarnation), set())

    def _write(self, w: Write) -> None:
        step, k, action = w.line.event.step, w.record, w.line.event.action
        assert step is not None
        if action in ("OpenAttempt", "OpenRestore", "Admit"):
            opening = k.open.owners if k.open is not None and action == "OpenAttempt" else ()
            named: tuple[Member | OwnerRef, ...] = (*k.members, *step.members, *step.owners, *opening)
            for m in named:
                self._put(self._started(m), w)
            self._before_the_next_start(w, opening)
        if action == "OpenAttempt":
            self._ready(k)
        if action == "Commit":
            for o in k.committed.owners if k.committed is not None else ():
                self._answers("Seal", k.epoch, {o.incarnation}, o.owner, w.line)
        if action in ("Commit", "Admit"):
            for m in k.members:
                ranks = self._ranks_of(m)
                known = sorted({epoch for its in ranks for epoch in self._acknowledged[m.engine, its]})
                for epoch in [k.epoch] if action == "Commit" else known[: bisect_right(known, k.epoch)]:
                    self._answers("Acknowledge", epoch, ranks, m.engine, w.line)

    def _before_the_next_start(self, w: Write, opening: Sequence[OwnerRef]) -> None:
        """Whom a write takes in, as this incarnation, had not started again: it would take the new one."""
        step = w.line.event.step
        before = self._run.history.at(w.revision - 1)
        known = (self._run.history.first if before is None else before.record).members
        admitted = [m for m in w.record.members if m not in known] if w.line.event.action == "Admit" else []
        named: tuple[Member | OwnerRef, ...] = (*opening, *(() if step is None else step.owners), *admitted)
        for m in named:
            self._put(w, self._next_start.get(_named(m)))

    def _ready(self, k: CommitRecord) -> None:
        """Members are ordered to write when all of them are prepared or have staged."""
        for order in self._by.get(("OrderOpenApply", k.epoch), ()):
            for m in k.members:
                for action in ("Fence", "Stage"):
                    self._answers(action, k.epoch, self._ranks_of(m), m.engine, order)

    def _answers(self, action: str, epoch: int, incarnations: set[int], name: str, then: Line) -> None:
        """What these actors did first of this kind is what was answered; whatever is there twice comes too late."""
        waiting = set(incarnations)
        for line in self._by.get((action, epoch), ()):
            if line.event.name == name and line.event.incarnation in waiting and not self._hopeless(line):
                waiting.discard(line.event.incarnation)
                self._put(line, then)

    @staticmethod
    def _hopeless(line: Line) -> bool:
        return line.event.step is not None and not line.event.step.armed

    def _after_commits(self, chain: list[Line]) -> None:
        """Owners fold what was published, and a transition ends when they have."""
        written = {id(w.line): w.record.committed for w in self._run.history.writes}
        c = self._run.history.first.committed
        finished: set[int] = set()
        for line in chain:
            c = written.get(id(line), c)
            epoch = 0 if c is None else c.epoch
            if line.event.action == "Publish":
                for x in self._by.get(("BeginFold", epoch), ()):
                    if not self._waits_for_publication(x):
                        self._put(line, x)
            elif line.event.action == "FinishTransition" and epoch not in finished:
                finished.add(epoch)
                for action in ("EndFold", "LoseBaseline"):
                    for x in self._by.get((action, epoch), ()):
                        self._put(x, line)
                for owner in () if c is None else c.owners:
                    self._put(self._gone_unfolded(owner, epoch), line)

    def _gone_unfolded(self, owner: OwnerRef, epoch: int) -> Line | None:
        """The start that tells that an owner died before it folded a commit: it owes no fold from here on."""
        folds = [x for action in ("EndFold", "LoseBaseline") for x in self._by.get((action, epoch), ())]
        if any((x.event.name, x.event.incarnation) == (owner.owner, owner.incarnation) for x in folds):
            return None
        later = [lines for i, lines in self._run.owners.get(owner.owner, {}).items() if i > owner.incarnation]
        return later[0][0] if later else None

    def _before_the_next_leader(self, chain: list[Line]) -> None:
        """What a leader did after its last write, but for finding out that it is replaced, it did while it led."""
        mine = {id(w.line): w for w in self._run.history.writes}
        last = max((n for n, line in enumerate(chain) if id(line) in mine), default=None)
        if last is not None:
            replaced = self._run.history.after(mine[id(chain[last])].revision)
            for line in chain[last + 1 :]:
                if line.event.action != "Fatal":
                    self._until(line, replaced)

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
                self._while_committed(line, step.epoch)

    def _node(self, lines: list[Line]) -> None:
        h = self._run.history
        for line in lines:
            if line.event.action in READS_K:
                self._put(h.at(line.event.k), line)
                self._until(line, h.after(line.event.k))
                if line.event.action == "OpenGate":
                    self._holds(line)
            elif line.event.action == "GateClosed" and line.event.step is not None:
                for order in self._by.get(("OrderOpenApply", line.event.step.epoch), ()):
                    if self._last_of_gate(line) == "OpenGate":  # no line tells of the order to apply that closes it
                        self._put(order, line)

    def _holds(self, opened: Line) -> None:
        """A gate that opens in the epoch of a restore opens on what its ranks acknowledged: they need no admission."""
        w = self._run.history.at(opened.event.k)
        m = Member(opened.event.name, opened.event.incarnation)
        if w is not None:
            self._answers("Acknowledge", w.record.epoch, self._ranks_of(m), m.engine, opened)

    def _last_of_gate(self, line: Line) -> str:
        """What a node did last about its gate before this line of it."""
        return self._gate.get(self._number[id(line)], "")

    def _of(self, node: list[Line], action: str, epoch: int) -> list[Line]:
        """A node's lines of an action and epoch."""
        chain = self._chain[self._number[id(node[0])]]
        return [x for x in self._by.get((action, epoch), ()) if self._chain[self._number[id(x)]] == chain]

    def _rank(self, node: list[Line], lines: list[Line]) -> None:
        h = self._run.history
        self._put(node[0], lines[0])
        fenced: set[int] = set()
        for line in lines:
            step = line.event.step
            if step is None:
                continue
            match step.action:
                case "Fence":
                    self._put(h.opened(step.epoch), line)
                    self._until(line, h.passed(step.epoch))
                    if step.epoch not in fenced:
                        self._fence(node, line, step.epoch)
                    fenced.add(step.epoch)
                case "OpenApply":
                    closed = self._of(node, "GateClosed", step.epoch)
                    # What closed because K was not reached may have closed long after the epoch was applied.
                    to_apply = [x for x in closed if self._last_of_gate(x) != "LoseRecord"] or closed[:1]
                    for x in (*self._by.get(("OrderOpenApply", step.epoch), ()), *to_apply):
                        self._put(x, line)
                case "BeginWrite" if step.payload is not None:
                    i = step.payload
                    self._answers("Emit", step.epoch, {i.owner_incarnation}, i.owner, line)
                case "DeliverManifest" if step.owner is not None:
                    self._answers("Seal", step.epoch, {step.owner.incarnation}, step.owner.owner, line)
                case "LearnCommit":
                    self._while_committed(line, step.epoch)

    def _while_committed(self, line: Line, epoch: int) -> None:
        """It was taken while K named this commit."""
        h = self._run.history
        commit = h.committed(epoch)
        self._put(commit, line)
        if commit is not None:
            self._until(line, h.commit_after(commit))

    def _fence(self, node: list[Line], line: Line, epoch: int) -> None:
        """A node's lines before its ranks are prepared, and the one that says that they are."""
        prepared = self._of(node, "Prepare", epoch)
        opened = self._run.history.opened(epoch)
        if prepared:
            at = self._number[id(prepared[0])]
            self._put(None if prepared[0] is node[0] else self._lines[at - 1], line)
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
        by = (self._run.nodes if e.role == "node" else self._run.owners).get(e.name, {})
        return e.incarnation != next(iter(by), e.incarnation)

    def sorted(self) -> list[Line]:
        """Every line once, after all that must come before it."""
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
        """Of actors' next lines that wait for what must come after them, the one that is likeliest to come too early.

        A write of K that waits only for lines that speak of what was before it goes on: they come too late.
        """
        heads: dict[int, int] = {}
        for number in range(len(self._lines)):
            if number not in taken:
                heads.setdefault(self._chain[number], number)
        revisions = {id(w.line): w.revision for w in self._run.history.writes}

        def future(number: int) -> int:
            return max((revisions.get(id(self._lines[i]), 0) for i in waits[number]), default=0)

        circular = [number for number in heads.values() if self._reaches(number, waits[number])]
        for number in circular:
            if all((i, number) in self._late for i in waits[number]):
                return number
        found = circular or list(heads.values())
        return max(found, key=lambda n: (future(n), self._lines[n].event.role == "node", -_role(self._lines[n]), -n))

    def _reaches(self, number: int, those: set[int]) -> bool:
        """Whether one of those must come after a line."""
        seen, waiting = {number}, [number]
        while waiting:
            for later in self._after[waiting.pop()] - seen:
                if later in those:
                    return True
                seen.add(later)
                waiting.append(later)
        return False
