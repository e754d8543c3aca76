"""A run: who took part, by name and incarnation, and what each wrote down."""

from collections import defaultdict
from dataclasses import dataclass, field

from dcr.modelcheck.eventlog.history import History
from dcr.modelcheck.eventlog.read import Line, Logs
from dcr.protocol.errors import RefusedError
from dcr.protocol.event import Event
from dcr.protocol.record import OwnerRef
from dcr.protocol.step import Step

READS_K = ("CloseGate", "OpenGate")
"""Steps that a node takes on reading K, at the revision that the line names."""


def _check_one_each(logs: Logs) -> None:
    """Two files of one actor: the one would hide what is missing from the other."""
    files: dict[tuple[str, str, int], str] = {}
    for chain in logs.chains:
        e, file = chain[0].event, chain[0].path.name
        if (other := files.setdefault((e.role, e.name, e.incarnation), file)) != file:
            raise RefusedError(
                f"{other} and {file} are both of {e.role} {e.name}, of one start of it: keep the original"
            )


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
        _check_one_each(logs)
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
            if line.event.k > last and line.event.action in READS_K:
                self.notes.append(
                    f"{line.place}: not checked from here on: it read K at revision {line.event.k}, and the last write "
                    f"that a leader's log tells of is revision {last}"
                )
                return list(chain[:at])
        return list(chain)

    def _seal_what_was_read(self) -> None:
        """A seal may have been delivered and not written down: ranks that read it did.

        Its owner was killed, failed the epoch because the seal did not get to everybody, or had the next order first.
        """
        sent: dict[tuple[OwnerRef, int], int] = defaultdict(int)
        delivered: set[tuple[OwnerRef, int]] = set()
        for line in (x for lines in self.ranks.values() for x in lines):
            step = line.event.step
            if step is not None and step.owner is not None:
                delivered.add((step.owner, step.epoch))
            if step is not None and (i := step.payload) is not None:
                key = (OwnerRef(i.owner, i.owner_incarnation), i.epoch)
                sent[key] = max(sent[key], i.sequence + 1)
        by_epoch: dict[tuple[OwnerRef, int], list[Line]] = defaultdict(list)
        for name, by in self.owners.items():
            for incarnation, lines in by.items():
                for line in lines:
                    if line.event.step is not None:
                        by_epoch[OwnerRef(name, incarnation), line.event.step.epoch].append(line)
        for ref, epoch in sorted(delivered):
            lines = self.owners.get(ref.owner, {}).get(ref.incarnation, [])
            of_epoch = by_epoch[ref, epoch]
            actions = [line.event.action for line in of_epoch]
            if actions == ["Emit"]:
                at = lines.index(of_epoch[0]) + 1
                why = "not written down: " + ("the owner was gone" if at == len(lines) else "the next order came first")
            elif actions == ["Emit", "EmitFailed"]:
                at, why = lines.index(of_epoch[1]), "not written down: it did not get to everybody"
            else:
                continue
            step = Step(ref.owner, "Seal", epoch, payloads=sent[ref, epoch])
            event = Event(0, "owner", ref.owner, ref.incarnation, step=step)
            lines.insert(at, Line(of_epoch[-1].path, of_epoch[-1].number, event, why))

    @property
    def chains(self) -> list[list[Line]]:
        """Every actor's lines."""
        of_nodes = [lines for by in self.nodes.values() for lines in by.values()]
        of_owners = [lines for by in self.owners.values() for lines in by.values()]
        return [*self.leaders.values(), *of_owners, *of_nodes, *self.ranks.values()]
