"""The model of a run: its parties under the specification's names, its payloads as cells, its contents as numbers."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from dcr.modelcheck.eventlog.read import Line
from dcr.modelcheck.eventlog.run import Run
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, PayloadIdentity
from dcr.protocol.record import CommitRecord, Member, OwnerRef
from dcr.protocol.session import digest_sum

GARBAGE = -1
FOREIGN = 1_000_000
"""From here on values stand for contents that no version has."""
NOBODY = 1_000_000
"""From here on numbers stand for incarnations that no log is of."""
CELLS_MAX = 20_000

Content = dict[str, int]
_WHOLE = (Kind.DENSE.value, Kind.RESTORE.value)


class Deployment:
    """What the specification's constants and numbers stand for in one run.

    A cell is a payload by its number: cell i of an owner is what its payload i carries.  An attempt with fewer payloads
    than another one of the same candidate carries the rest in its last one.

    Args:
        run: who took part.

    Raises:
        RefusedError: the run is none that the specification can be held to.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._nobodys: dict[tuple[str, int], int] = {}
        self.engines = {name: f"e{i}" for i, name in enumerate(sorted(run.nodes), 1)}
        self.owners = {name: f"o{i}" for i, name in enumerate(sorted(self._owner_names()), 1)}
        self.leaders = {name: f"c{i}" for i, name in enumerate(self._leader_names(), 1)}
        self.incarnations = {
            **{("engine", name): {i: n for n, i in enumerate(by, 1)} for name, by in run.nodes.items()},
            **{("owner", name): {i: n for n, i in enumerate(by, 1)} for name, by in run.owners.items()},
        }
        starts = [lines[0].event.start for by in run.nodes.values() for lines in by.values()]
        self._rank_names = {
            engine: sorted({rank for lines in by.values() for s in [lines[0].event.start] if s for rank in s.ranks})
            for engine, by in run.nodes.items()
        }
        self.rank_count = max((len(s.ranks) for s in starts if s is not None), default=1)
        modes = sorted({s.gate_mode for chain in run.leaders.values() if (s := chain[0].event.start)})
        if len(modes) > 1:
            raise RefusedError("leaders of one run had different gate modes: the specification has one")
        self.asynchronous = modes == ["async"]
        self._kinds: dict[int, tuple[str, str]] = {}  # epoch -> (kind, candidate)
        for w in run.history.writes:
            if w.line.event.action == "OpenRestore":
                self._kinds[w.record.epoch] = (Kind.RESTORE.value, "")
            elif w.line.event.action == "OpenAttempt" and w.record.open is not None:
                self._kinds[w.record.epoch] = (w.record.open.kind.value, w.record.open.candidate)
        h = run.history
        self._tokens = sorted({h.first.fencing_token, *(w.record.fencing_token for w in h.writes)})
        self._count()
        self._number_candidates()
        self._number_contents()

    # ------------------------------------------------------------ who

    def _owner_names(self) -> set[str]:
        """Of all owners.  Each owns the same elements throughout: the specification knows no other."""
        named: set[str] = set()
        for w in self.run.history.writes:
            step, tr = w.line.event.step, w.record.open
            of = step.owners if step is not None and step.owners else () if tr is None else tr.owners
            found = {o.owner for o in of}
            if named and found and found != named:
                raise RefusedError(
                    f"{w.line.place}: the trainer has other ranks than before ({', '.join(sorted(found))} instead of "
                    f"{', '.join(sorted(named))}), so that each owns other elements: such a run cannot be checked"
                )
            named |= found
        return {*self.run.owners, *named}

    def _leader_names(self) -> list[str]:
        h = self.run.history
        names = dict.fromkeys([h.first.leader, *(w.record.leader for w in h.writes), *self.run.leaders])
        return list(names)

    @property
    def ranks(self) -> list[str]:
        """Names of the ranks of every engine; those of one with fewer stand for its last one again."""
        return [f"r{i}" for i in range(1, self.rank_count + 1)]

    def ranks_of(self, line: Line) -> list[str]:
        """The model's ranks that a rank's line is about."""
        e = line.event
        _, name = self.run.engine_of[e.name, e.incarnation]
        names = self._rank_names[e.name]
        at = names.index(name)
        return self.ranks[at:] if at == len(names) - 1 else [self.ranks[at]]

    def engine_incarnation(self, line: Line) -> int:
        """Of the engine that a rank's line is of."""
        e = line.event
        incarnation, _ = self.run.engine_of[e.name, e.incarnation]
        return self.incarnations["engine", e.name][incarnation]

    def incarnation(self, of: Member | OwnerRef) -> int:
        """1, 2, 3, ... in rising order; one that no log is of has a number that is nobody's."""
        kind, name = ("engine", of.engine) if isinstance(of, Member) else ("owner", of.owner)
        known = self.incarnations.get((kind, name), {})
        if of.incarnation in known:
            return known[of.incarnation]
        return self._nobodys.setdefault((name, of.incarnation), NOBODY + len(self._nobodys))

    def members(self, members: Iterable[Member]) -> dict[str, int]:
        """A roster of the model."""
        found = {m.engine: self.incarnation(m) for m in members}
        return {short: found.get(name, 0) for name, short in self.engines.items()}

    def seats(self, owners: Iterable[OwnerRef]) -> dict[str, int]:
        """The same of owners."""
        found = {o.owner: self.incarnation(o) for o in owners}
        return {short: found.get(name, 0) for name, short in self.owners.items()}

    # ------------------------------------------------------------ payloads

    def _count(self) -> None:
        """How many payloads each owner sealed, or is known to have sent, and how many cells it needs."""
        self._foreign: dict[str, int] = {}
        self.sealed: dict[tuple[str, int, int], int] = {}
        self._shares_sealed: dict[tuple[str, int, int], str] = {}
        seen: dict[tuple[str, int, int], int] = defaultdict(int)
        for name, by in self.run.owners.items():
            for incarnation, lines in by.items():
                for line in lines:
                    step = line.event.step
                    if step is not None and step.action == "Seal":
                        self.sealed[name, incarnation, step.epoch] = step.payloads
                        self._shares_sealed.setdefault((name, incarnation, step.epoch), step.content_digest)
        for lines in self.run.ranks.values():
            for line in lines:
                step = line.event.step
                if step is not None and step.payload is not None:
                    i = step.payload
                    key = (i.owner, i.owner_incarnation, i.epoch)
                    seen[key] = max(seen[key], i.sequence + 1)
        counts = {key: max(self.sealed.get(key, 0), seen.get(key, 0)) for key in {*self.sealed, *seen}}
        self.cells = {name: max((n for (o, _, _), n in counts.items() if o == name), default=1) for name in self.owners}
        if sum(self.cells.values()) > CELLS_MAX:
            raise RefusedError(
                f"an attempt of {sum(self.cells.values())} payloads: at most {CELLS_MAX} can be checked; larger "
                "buckets (bucket_bytes) make fewer payloads"
            )
        self._changed: dict[tuple[str, str], int] = {}
        for (name, _, epoch), n in counts.items():
            kind, candidate = self._kinds.get(epoch, ("", ""))
            if candidate:
                whole = self.cells[name] if kind in _WHOLE else n
                self._changed[name, candidate] = max(self._changed.get((name, candidate), 0), whole)

    def cell(self, owner: str, number: int) -> str:
        """The model's name of what an owner's payload with this number carries."""
        return f"{self.owners[owner]}.{number}"

    @property
    def owner_of(self) -> dict[str, str]:
        """By cell the owner, in the model's names."""
        return {self.cell(name, i): short for name, short in self.owners.items() for i in range(self.cells[name])}

    def carried(self, i: PayloadIdentity) -> list[str]:
        """The cells that a payload writes: one, or, by the last one of an attempt, what is left."""
        if i.owner not in self.owners:
            return [f"{i.owner}.{i.sequence}"]
        sealed = self.sealed.get((i.owner, i.owner_incarnation, i.epoch))
        kind, candidate = self._kinds.get(i.epoch, ("", ""))
        total = self.cells[i.owner] if kind in _WHOLE else self._changed.get((i.owner, candidate), 0)
        last = i.sequence if sealed is None or i.sequence != sealed - 1 else max(i.sequence, total - 1)
        return [self.cell(i.owner, n) for n in range(i.sequence, last + 1)]

    def fencing(self, token: int) -> int:
        """A fencing token of K, numbered among those that K ever had.

        A lease that its leader never wrote K under, for it was killed before, has a token too (DESIGN D16); the
        specification counts those alone that K had.
        """
        return 1 + bisect_left(self._tokens, token)

    # ------------------------------------------------------------ contents

    def _number_candidates(self) -> None:
        """A candidate's number: a new one for each transition, for one that was abandoned may be offered again."""
        k = self.run.history.first
        known = [c for c in (k.committed and k.committed.candidate, k.open and k.open.candidate) if c]
        numbers = {token: n for n, token in enumerate(dict.fromkeys(known), 1)}
        self.first_named = dict(numbers)
        self.named: dict[int, dict[str, int]] = {}
        """By id of a write's line, what its tokens stand for."""
        last = len(numbers)
        for w in self.run.history.writes:
            c, tr = w.record.committed, w.record.open
            if tr is not None and (k.open is None or k.open.candidate != tr.candidate):
                last += 1
                numbers[tr.candidate] = last
            tokens = [x.candidate for x in (c, tr) if x is not None]
            self.named[id(w.line)] = {token: numbers[token] for token in tokens if token in numbers}
            k = w.record

    def _number_contents(self) -> None:
        """Every version's content, by number and by digest; and of which versions an owner's share is known."""
        h = self.run.history
        version, cells = h.first.version, self.owner_of
        self.first_content: Content = dict.fromkeys(cells, 0)
        self.contents = {version: self.first_content}
        self.by_digest = {h.first.baseline_id: version}
        self.shares: dict[tuple[str, str], list[int]] = defaultdict(list)
        starts = {name: s for name, by in self.run.owners.items() if (s := self._first_share(by))}
        if digest_sum(list(starts.values())) == h.first.baseline_id and starts.keys() == self.owners.keys():
            for name, share in starts.items():
                self.shares[name, share].append(version)
        for w in h.writes:
            c = w.record.committed
            if w.line.event.action != "Commit" or c is None or w.record.version == version:
                continue
            number = self.named[id(w.line)][c.candidate]
            self.contents[w.record.version] = self.candidate(c.candidate, number, self.contents[version])
            version = w.record.version
            self.by_digest[w.record.baseline_id] = version
            for o in c.owners:
                if share := self.sealed_share(o, c.epoch):
                    self.shares[o.owner, share].append(version)

    @staticmethod
    def _first_share(by: dict[int, list[Line]]) -> str:
        start = next(iter(by.values()))[0].event.start
        return "" if start is None else start.baseline_digest

    def sealed_share(self, o: OwnerRef, epoch: int) -> str:
        """An owner's share of what it sealed in an epoch; empty if that is not known."""
        return self._shares_sealed.get((o.owner, o.incarnation, epoch), "")

    def candidate(self, token: str, number: int, base: Content) -> Content:
        """What the weights are, cell by cell, where they are offered under this token over a version's content."""
        content = dict(base)
        for name in self.owners:
            for i in range(self._changed.get((name, token), 0)):
                content[self.cell(name, i)] = number
        return content

    def share_sums_to(self, record: CommitRecord) -> bool:
        """Whether K's digest is the sum of what the owners of its last commit sealed, as far as that is known."""
        c = record.committed
        assert c is not None
        shares = [self.sealed_share(o, c.epoch) for o in c.owners]
        return not all(shares) or digest_sum(shares) == record.baseline_id

    def version_of_share(self, owner: str, share: str, now: int) -> int | None:
        """The version that an owner's baseline is; None if it is none that is known."""
        versions = self.shares.get((owner, share), []) if share else []
        return now if now in versions else max((v for v in versions if v < now), default=None)

    def foreign(self, digest: str) -> Content:
        """A content that no version has."""
        number = self._foreign.setdefault(digest, FOREIGN + len(self._foreign))
        return dict.fromkeys(self.owner_of, number)
