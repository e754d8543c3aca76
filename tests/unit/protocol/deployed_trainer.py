"""One training rank of a deployment: an owner around concrete weights and a concrete baseline."""

from typing import TYPE_CHECKING

from cells import MODULUS, RECORD_ID, Payload, content_digest, emission

from dcr.protocol import owner as owners
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.messages import (
    CONTROL_VERSION,
    CandidateReady,
    Emit,
    EmitFailed,
    Fold,
    Folded,
    Outcome,
    OwnerJoin,
    Sealed,
    Withdraw,
)
from dcr.protocol.step import Step

if TYPE_CHECKING:
    from deployment import Deployment

    from dcr.protocol.record import CommitRecord


class DeployedOwner:
    """Carries out the effects of ``Owner``, one small step at a time."""

    def __init__(self, d: "Deployment", name: str, indices: list[int]) -> None:
        self.d = d
        self.name = name
        self.indices = indices
        self.incarnation = 0
        self.start(resumed=True)

    def share(self, version: int) -> dict[int, int]:
        """This owner's cells of a committed version."""
        return {i: self.d.history[version][i] for i in self.indices}

    def start(self, *, resumed: bool) -> None:
        """A new incarnation: at the committed version with a baseline, or with other weights and none."""
        self.incarnation += 1
        self.weights = self.share(max(self.d.history))
        self.baseline: dict[int, int] | None = dict(self.weights) if resumed else None
        digest = content_digest(self.baseline) if self.baseline is not None else ""
        self.role = owners.Owner(self.name, self.incarnation, RECORD_ID, digest)
        self.emitting: tuple[Emit, list[Payload | Manifest]] | None = None
        self.found: dict[str, str] = {}  # content of the last candidate of which anything was delivered, by its token
        self.compared = ""  # content of the weights that the emission under way compares with the baseline
        self.manifest: Manifest | None = None  # emitted, not yet delivered
        self.folds: list[tuple[owners.FoldBaseline, list[int]]] = []
        self.reads: list[CommitRecord | None] = []
        self.pushes = 0
        self.pushing = False
        self.stepped = False  # while it pushed
        self.sealed = False  # since it pushed

    # ------------------------------------------------------------ push

    def train(self) -> None:
        """Any number of this owner's cells change; one in three goes back to what the baseline says."""
        r = self.d.random
        for i in r.sample(self.indices, r.randint(0, len(self.indices))):
            back = self.baseline is not None and r.random() < 0.3
            self.weights[i] = self.baseline[i] if self.baseline is not None and back else r.randrange(MODULUS)

    def push(self) -> None:
        self.pushes += 1
        self.pushing = True
        self.stepped = self.sealed = False
        self._send(CandidateReady(self.name, self.incarnation, self.pushes))

    def give_up(self) -> None:
        """The push times out on this rank, or is interrupted; training goes on."""
        self.pushing = False
        self.run(self.role.give_up(self.pushes))
        self._send(Withdraw(self.name, self.incarnation, self.pushes))
        self.train()

    def joins(self) -> list[object]:
        """What an owner sends on every connection."""
        first = OwnerJoin(self.name, self.incarnation, CONTROL_VERSION, self.role.baseline_digest)
        return [first, *([CandidateReady(self.name, self.incarnation, self.pushes)] if self.pushing else [])]

    def order(self, order: object) -> None:
        """The leader's order arrives."""
        match order:
            case Emit():
                self._may_refuse(self.role.emit, order)
            case Fold():
                self._may_refuse(self.role.fold, order)
            case Outcome():
                self._outcome(order)

    def _outcome(self, o: Outcome) -> None:
        if not self.pushing or (o.incarnation, o.push) != (self.incarnation, self.pushes):
            return
        self.pushing = False
        self.d.outcomes.append(o)
        if not o.error and not self.stepped:
            assert self.weights == self.share(o.version), f"{self.name}: push returned, other weights were committed"

    def _may_refuse(self, call: object, order: object) -> None:
        try:
            effects = call(order)
        except RefusedError:
            return
        self.run(effects)

    # ------------------------------------------------------------ effects

    def run(self, effects: list) -> None:
        for e in effects:
            match e:
                case Step():
                    self.d.saw(e)
                case owners.StartEmission():
                    self._start(e.order)
                case owners.CancelEmission():
                    self.emitting = None
                case owners.Again():
                    self._may_refuse(self.role.emit, e.order)
                case owners.DeliverManifest():
                    self.manifest = e.manifest
                case owners.ReportSealed():
                    m = e.manifest
                    self.sealed |= m.target != m.base.version
                    size = len(m.payloads)
                    self._send(
                        Sealed(
                            self.name,
                            self.incarnation,
                            m.epoch,
                            m.digest(),
                            m.content_digest,
                            size,
                            size * 8,
                            m.changed_entries,
                            m.owned_elements,
                            {},
                        )
                    )
                case owners.ReportEmitFailed():
                    self._send(EmitFailed(self.name, self.incarnation, e.epoch, e.reason, e.fatal, e.given_up))
                case owners.ReadRecord():
                    self.reads.append(None)
                case owners.FoldBaseline():
                    k = self.d.store.record
                    assert k is not None
                    assert k.committed is not None
                    if not k.committed.operation_id.startswith(f"{self.d.coordinator.leader}-"):
                        self.d.actions["a fold that another leader ordered"] += 1
                    self.folds.append((e, list(self.indices)))
                case owners.ReportFolded():
                    self._send(Folded(self.name, self.incarnation, e.epoch, e.baseline_digest, e.reason, {}))
                case _:
                    raise AssertionError(e)

    def _send(self, report: object) -> None:
        self.d.links[self.name].send_up(report)

    def _start(self, order: Emit) -> None:
        kind, candidate = order.base.kind, order.base.candidate
        back = kind is not Kind.RESTORE and order.target == order.base.version
        self.compared = content_digest(self.weights)
        # A stopped transition may be turned back while nobody pushes, or while the next push waits: only what was found
        # of the candidate tells that the weights are still those.
        holds = self.pushing
        if back and candidate in self.found:
            holds = self.found[candidate] == self.compared
        if kind is not Kind.RESTORE and not holds:
            self.run(
                self.role.emission_failed(
                    order.epoch, "no candidate", fatal=True, given_up=0 if self.pushing else self.pushes
                )
            )
            return
        if kind is not Kind.DENSE:
            assert not self.role.folding, "an emission while the baseline is being folded"
            assert self.baseline == self.share(order.base.version), "BaselineExact: emission against another baseline"
        payloads, manifest = emission(order, self.name, self.incarnation, self.weights, self.baseline)
        self.d.targets[order.epoch] = order.target
        if kind is not Kind.RESTORE:
            sent = self.share(order.target) if back else self.weights
            self.d.emitted.setdefault(order.epoch, {}).update(sent)
        self.emitting = (order, [*payloads, manifest])

    # ------------------------------------------------------------ steps

    def emission_step(self, *, fail: bool = False) -> bool:
        """Deliver the next payload, or the manifest."""
        if self.manifest is not None:
            m, self.manifest = self.manifest, None
            self.d.pool.setdefault(m.epoch, []).append(m)
            self.run(self.role.sealed(m))
            return True
        if self.emitting is None:
            return False
        order, left = self.emitting
        if fail:
            self.emitting = None
            self.run(self.role.emission_failed(order.epoch, "the link is down"))
            return True
        item = left.pop(0)
        if order.base.kind is not Kind.RESTORE:
            self.found = {order.base.candidate: self.compared}
        if isinstance(item, Manifest):
            self.emitting = None
            self.run(self.role.emitted(item, self.compared))
        else:
            self.d.pool.setdefault(order.epoch, []).append(item)
        return True

    def read_step(self, at: int) -> bool:
        if at >= len(self.reads) or self.d.store.record is None:
            return False
        record = self.reads[at]
        if record is None:
            self.reads[at] = self.d.store.record
        else:
            del self.reads[at]
            self.run(self.role.learned(record))
        return True

    def fold_step(self, *, fail: bool = False) -> bool:
        """Copy one cell of the candidate into the baseline, or end the fold."""
        if not self.folds:
            return False
        order, left = self.folds[0]
        if left and not fail:
            i = left.pop()
            if self.baseline is None:
                self.baseline = dict.fromkeys(self.indices, 0)
            self.baseline[i] = self.weights[i]
            return True
        self.folds.pop(0)
        assert self.baseline is not None or fail
        found = "" if self.baseline is None else content_digest(self.baseline)
        if fail or found != order.content_digest:
            self.baseline = None
        self.run(
            self.role.fold_failed(order.epoch, "the copy failed") if fail else self.role.folded(order.epoch, found)
        )
        return True
