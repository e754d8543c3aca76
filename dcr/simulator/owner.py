"""One training rank: an owner around concrete weights and a concrete baseline, and what must be true of them."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcr.protocol import owner as roles
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
from dcr.protocol.record import OwnerRef
from dcr.simulator.cells import MODULUS, RECORD_ID, Cells, Payload, content_digest, emission, mixed
from dcr.simulator.invariants import holds

if TYPE_CHECKING:
    from dcr.protocol.record import CommitRecord
    from dcr.simulator.deployment import Deployment
    from dcr.simulator.network import Link
    from dcr.simulator.schedule import Move

_TAKEN_MAX = 8
"""So many of the last orders may come again."""


class SimulatedOwner:
    """Carries out the effects of ``Owner``, one small step at a time.

    Args:
        world: the deployment.
        name: of the owner.
        trainer: number of the trainer that it is a rank of.
        indices: its cells.
        weights: what the process found when it started.
        baselined: these weights are its baseline; otherwise it has none.
    """

    def __init__(
        self, world: "Deployment", name: str, trainer: int, indices: list[int], weights: Cells, *, baselined: bool
    ) -> None:
        self.world = world
        self.name = name
        self.trainer = trainer
        self.id = f"{name}.{trainer}"
        self.indices = indices
        self.link: Link | None = None
        self.late: deque[Any] = deque()
        self.stalled = self.cut = False
        self.taken: deque[tuple[int, Emit | Fold]] = deque(maxlen=_TAKEN_MAX)  # by which incarnation
        self.start(weights, baselined=baselined)

    def start(self, weights: Cells, *, baselined: bool) -> None:
        """A new incarnation, which knows these weights and nothing else: K and the leader tell it the rest."""
        self.incarnation = self.world.next_owner_incarnation(self.name)
        self.weights = weights
        self.blank = not baselined
        self.baseline: Cells | None = dict(weights) if baselined else None
        digest = "" if self.baseline is None else content_digest(self.baseline)
        self.role = roles.Owner(self.name, self.incarnation, RECORD_ID, digest)
        self.emitting: tuple[Emit, list[Payload | Manifest]] | None = None
        self.found: dict[str, str] = {}  # content of the last candidate of which anything was delivered, by its token
        self.compared = ""  # content of the weights that the emission under way compares with the baseline
        self.manifest: Manifest | None = None  # emitted, not yet delivered
        self.folds: list[tuple[roles.FoldBaseline, list[int]]] = []
        self.reads: list[CommitRecord | None] = []
        self.begun: set[int] = set()  # epochs that it emitted
        self.pushes = 0
        self.pushing = False
        self.stepped = False  # while it pushed
        self.sealed = False  # since it pushed
        self.late.clear()

    # ------------------------------------------------------------ the trainer's calls

    def train(self, salt: int) -> None:
        """An optimizer step: some cells change, some go back to what the baseline says."""
        for i in self.indices:
            x = mixed(salt + self.incarnation, i)
            if x % 4 == 1 and self.baseline is not None:
                self.weights[i] = self.baseline[i]
            elif x % 4 > 1:
                self.weights[i] = (x >> 2) % MODULUS

    def push(self) -> None:
        """``push()`` is called on this rank."""
        self.pushes += 1
        self.pushing = True
        self.stepped = self.sealed = False
        self._send(CandidateReady(self.name, self.incarnation, self.pushes))

    def give_up(self, salt: int) -> None:
        """The push times out on this rank, or is interrupted; training goes on."""
        self.pushing = False
        self.run(self.role.give_up(self.pushes))
        self._send(Withdraw(self.name, self.incarnation, self.pushes))
        self.train(salt)

    def step_candidate(self, salt: int) -> bool:
        """The trainer breaks its word and steps; what it steps was changed before, or is again what it was (D10).

        Before anything was sealed only the pin tells the two apart, so that is not done.
        """
        if self.pushing and not self.sealed:
            return False
        base = self.baseline
        changed = [i for i in self.indices if base is None or self.weights[i] != base[i]]
        if not changed:
            return False
        i = changed[salt % len(changed)]
        back = base is not None and salt % 5
        self.weights[i] = base[i] if base is not None and back else (self.weights[i] + 1) % MODULUS
        self.stepped = self.pushing
        return True

    # ------------------------------------------------------------ orders

    def joins(self) -> list[object]:
        """What an owner sends on every connection."""
        first = OwnerJoin(self.name, self.incarnation, CONTROL_VERSION, self.role.baseline_digest)
        return [first, *([CandidateReady(self.name, self.incarnation, self.pushes)] if self.pushing else [])]

    def stray(self, which: int) -> bool:
        """An order that an older incarnation took comes again, as it may in the specification.

        Owners begin without a baseline there: one that began with one is told nothing of the kind here.  Of orders to
        emit only dense ones come again, for the others are obeyed by the incarnation that they name.
        """
        before = [order for incarnation, order in self.taken if incarnation < self.incarnation]
        before = [order for order in before if isinstance(order, Fold) or order.base.kind is Kind.DENSE]
        if not before or not self.blank:
            return False
        self.take(before[-1 - which % len(before)])
        return True

    def take(self, order: Any) -> None:
        """The leader's order arrives."""
        if isinstance(order, Emit | Fold):
            self.taken.append((self.incarnation, order))
        match order:
            case Emit():
                self._may_refuse(self.role.emit, order)
            case Fold():
                self._may_refuse(self.role.fold, order)
            case Outcome():
                self._outcome(order)

    def _outcome(self, o: Outcome) -> None:
        mine = o.push == 0 or (o.incarnation, o.push) == (self.incarnation, self.pushes)
        if not self.pushing or not mine:
            return
        self.pushing = False
        self.world.outcomes.append(o)
        if not o.error and not self.stepped:
            same = self.weights == self.world.share(o.version, self.indices)
            holds(same, "PushCommitted", lambda: f"{self.id}: push() returned, and other weights were committed")
        if not o.error and not o.summary.get("warnings"):
            holds(not self._owes_fold(), "PinHeld", lambda: f"{self.id}: push() returned before its fold, unwarned")

    def _owes_fold(self) -> bool:
        """K says that a seal of this incarnation was committed, and it is not folded here to the end (DESIGN D10)."""
        k, r = self.world.store.record, self.role
        c = None if k is None else k.committed
        if c is None or c.epoch not in r.sealed_epochs or OwnerRef(self.name, self.incarnation) not in c.owners:
            return False
        return r.folding or r.folded_epoch != c.epoch

    def _may_refuse(self, call: Callable[[Any], list[roles.Effect]], order: object) -> None:
        r = self.role
        before = (r.base, r.fence, r.folding, r.baseline_digest, r.emitting)
        try:
            effects = call(order)
        except RefusedError as e:
            after, why = (r.base, r.fence, r.folding, r.baseline_digest, r.emitting), str(e)
            holds(before == after, "RefusedChangesNothing", lambda: f"{self.id}: {why}: {before} -> {after}")
            return
        self.run(effects)

    # ------------------------------------------------------------ effects

    def run(self, effects: list[roles.Effect]) -> None:
        """Carry out what the owner asks for."""
        for e in effects:
            match e:
                case roles.StartEmission():
                    self._start(e.order)
                case roles.CancelEmission():
                    self.emitting = None
                case roles.Again():
                    self._may_refuse(self.role.emit, e.order)
                case roles.DeliverManifest():
                    self.manifest = e.manifest
                case roles.ReportSealed():
                    self.sealed |= e.manifest.target != e.manifest.base.version
                    self._send(self._sealed(e.manifest))
                case roles.ReportEmitFailed():
                    self._send(EmitFailed(self.name, self.incarnation, e.epoch, e.reason, e.fatal, e.given_up))
                case roles.ReadRecord():
                    self.reads.append(None)
                case roles.FoldBaseline():
                    self.world.note_fold()
                    self.folds.append((e, list(self.indices)))
                case roles.ReportFolded():
                    self._send(Folded(self.name, self.incarnation, e.epoch, e.baseline_digest, e.reason, {}))
                case _:
                    self.world.saw(e)
        self.check()

    def _sealed(self, m: Manifest) -> Sealed:
        size = len(m.payloads)
        return Sealed(
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

    def _send(self, report: object) -> None:
        if self.link is not None:
            self.link.send_up(report)

    def _start(self, order: Emit) -> None:
        kind, candidate = order.base.kind, order.base.candidate
        back = kind is not Kind.RESTORE and order.target == order.base.version
        self.compared = content_digest(self.weights)
        # A stopped transition may be turned back while nobody pushes, or while the next push waits: only what was found
        # of the candidate tells that the weights are still those.
        held = self.pushing
        if back and candidate in self.found:
            held = self.found[candidate] == self.compared
        if kind is not Kind.RESTORE and not held:
            push = 0 if self.pushing else self.pushes
            self.run(self.role.emission_failed(order.epoch, "no candidate", fatal=True, given_up=push))
            return
        if kind is not Kind.DENSE:
            holds(not self.role.folding, "BaselineExact", lambda: f"{self.id} emits while its baseline is being folded")
            base = order.base.version
            exact = base in self.world.history and self.baseline == self.world.share(base, self.indices)
            holds(exact, "BaselineExact", lambda: f"{self.id} emits against a baseline that is not version {base}")
        holds(order.epoch not in self.begun, "EmittedOnce", lambda: f"{self.id} emits epoch {order.epoch} again")
        self.begun.add(order.epoch)
        payloads, manifest = emission(order, self.name, self.incarnation, self.weights, self.baseline)
        if kind is not Kind.RESTORE:
            sent = self.world.share(order.target, self.indices) if back else dict(self.weights)
            self.world.emitted[order.epoch, self.name, self.incarnation] = sent
        self.emitting = (order, [*payloads, manifest])

    # ------------------------------------------------------------ steps

    def emission_step(self, *, fail: bool = False) -> bool:
        """Deliver the next payload, or the manifest."""
        if self.manifest is not None:
            m, self.manifest = self.manifest, None
            if fail:
                self.run(self.role.emission_failed(m.epoch, "the manifest could not be delivered"))
                return True
            self.world.delivery.put(m.epoch, m)
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
            self.world.delivery.put(order.epoch, item)
        return True

    def read_step(self, at: int) -> bool:
        """Read K, or hand in the K that was read."""
        if at >= len(self.reads) or self.world.store.record is None:
            return False
        record = self.reads[at]
        if record is None:
            self.reads[at] = self.world.store.record
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
            self.world.actions.add("FoldCell")
            self.check()
            return True
        self.folds.pop(0)
        found = "" if self.baseline is None else content_digest(self.baseline)
        if fail or found != order.content_digest:
            self.baseline = None
        if fail:
            self.run(self.role.fold_failed(order.epoch, "the copy failed"))
        else:
            self.run(self.role.folded(order.epoch, found))
        return True

    # ------------------------------------------------------------ what can happen

    def moves(self) -> "list[Move]":
        """What can happen here by itself."""
        if self.stalled:
            return []
        out: list[Move] = []
        if not self.cut:
            if self.link is not None and self.link.down:
                out.append(("take", self.id, 0))
            if self.emitting is not None or self.manifest is not None:
                out.append(("emit", self.id, 0))
            if self.reads:
                out.append(("read", self.id, 0))
        if self.folds:
            out.append(("fold", self.id, 0))
        return out

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """BaselineExact: a baseline that is not being folded is the committed version that its owner says."""
        r = self.role
        if not r.baseline_digest or r.folding:
            return
        base = self.baseline
        same = base is not None and content_digest(base) == r.baseline_digest
        holds(same, "BaselineExact", lambda: f"{self.id}: its baseline does not digest to what it says")
        if r.base is not None:
            exact = r.base in self.world.history and base == self.world.share(r.base, self.indices)
            holds(exact, "BaselineExact", lambda: f"{self.id}: its baseline is not version {r.base}")
