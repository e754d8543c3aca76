"""The owner: the training rank that detects and emits the changes of its source elements (paper section 4)."""

from dataclasses import dataclass

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest
from dcr.protocol.messages import Emit, Fold, cut
from dcr.protocol.record import CommitRecord, Direction, OwnerRef
from dcr.protocol.step import Step

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class StartEmission:
    """Detect, encode and deliver; answer ``emitted`` or ``emission_failed``."""

    order: Emit


@dataclass(frozen=True)
class CancelEmission:
    """Stop emitting for this epoch; payloads already delivered do no harm, they are fenced."""

    epoch: int


@dataclass(frozen=True)
class Again:
    """Hand this order to ``emit`` again: it came while the baseline was not ready for it."""

    order: Emit


@dataclass(frozen=True)
class DeliverManifest:
    """Deliver the manifest, after its last payload; then answer ``sealed``."""

    manifest: Manifest


@dataclass(frozen=True)
class ReportSealed:
    """Send ``Sealed`` to the leader."""

    manifest: Manifest


@dataclass(frozen=True)
class ReportEmitFailed:
    """Send ``EmitFailed`` to the leader."""

    epoch: int
    reason: str
    fatal: bool
    given_up: int = 0


@dataclass(frozen=True)
class ReadRecord:
    """Read K and answer ``learned``."""


@dataclass(frozen=True)
class FoldBaseline:
    """Copy the candidate into the baseline in place; answer ``folded`` or ``fold_failed``."""

    epoch: int
    content_digest: str
    """This owner's share of the committed content digest: what the baseline must amount to afterwards."""


@dataclass(frozen=True)
class ReportFolded:
    """Send ``Folded`` to the leader; an empty digest says that the baseline was lost."""

    epoch: int
    baseline_digest: str
    reason: str


Effect = (
    Step
    | StartEmission
    | CancelEmission
    | Again
    | DeliverManifest
    | ReportSealed
    | ReportEmitFailed
    | ReadRecord
    | FoldBaseline
    | ReportFolded
)


# ---------------------------------------------------------------- the role


class Owner:
    """One owner and its share of the baseline.

    ::

        emit -> [Emit] -> emitted -> sealed -> [Seal]   ...   fold -> learned(K) -> [BeginFold] -> folded -> [EndFold]

    Args:
        name: the owner's name.
        incarnation: new with every start of the process that holds the baseline.
        record_id: the record whose orders this owner obeys.
        baseline_digest: its share of the baseline's content digest; empty if it has no baseline.
        base: the version that the baseline holds; None if that is not known yet.  Then the first order that needs the
            baseline tells, for the leader has compared its digest with K's.

    Attributes:
        base: the version of the baseline; None if there is none, or if it is not known.
        folding: the mark of a fold (DESIGN D13): the baseline is no version's.
        folded_epoch: the committed epoch that was folded last, or is being folded; 0 if none was.
        fence: the epoch of the last order that was obeyed.
    """

    def __init__(
        self, name: str, incarnation: int, record_id: str, baseline_digest: str, base: int | None = None
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.record_id = record_id
        self.baseline_digest = baseline_digest
        self.base = base if baseline_digest else None
        self.folding = False
        self.folded_epoch = 0
        self.fence = 0
        self._emitting: Emit | None = None
        self._kept: Emit | None = None  # waits for the fold that is under way or owed
        self._sealed: dict[int, Manifest] = {}  # by epoch, of the last candidate that was sealed
        self._candidate = ""  # token of the candidate that was emitted last
        self._given_up = ("", 0)  # candidate and number of the push that was given up here last
        self._fold_epoch = 0  # ordered, K not yet read
        self._fold_content = ""  # what the baseline must amount to after the fold under way
        self._last_fold: ReportFolded | None = None

    @property
    def emitting(self) -> int:
        """The epoch that is being emitted; 0 if none is."""
        return 0 if self._emitting is None else self._emitting.epoch

    @property
    def sealed_epochs(self) -> tuple[int, ...]:
        """Epochs that this incarnation sealed with its last candidate: what it can fold if K says so."""
        return tuple(sorted(self._sealed))

    def needs_candidate(self, record: CommitRecord) -> str:
        """Why the last candidate may still be emitted or folded, as K stands; empty if it may not (DESIGN D10).

        A stopped transition has fenced its last attempt; what follows is for the next push, or the operator, to say.
        """
        tr, c = record.open, record.committed
        if self.folding:
            return f"epoch {self.folded_epoch} is being folded"
        if tr is not None and not tr.stopped and tr.candidate == self._candidate != "":
            return f"its transition to version {tr.target} is open"
        if (
            c is not None
            and c.direction is Direction.FORWARD
            and c.epoch in self._sealed
            and c.epoch > self.folded_epoch
        ):
            return f"epoch {c.epoch} was committed and is not folded yet"
        return ""

    # ------------------------------------------------------------ emission

    def emit(self, order: Emit) -> list[Effect]:
        """Emit: once per epoch (DESIGN D7), never while the baseline is folded (D13).

        An order that has to wait for a fold is kept, and given back as ``Again`` when the fold is over.

        Raises:
            RefusedError: another record, a fenced epoch, or an order against a version before the baseline's; nothing
                is changed.
        """
        self._check_record(order.record_id)
        if order.epoch < self.fence:
            raise RefusedError(f"{self.name}: order of epoch {order.epoch} refused: the fence is at {self.fence}")
        if order.epoch == self.fence:
            return []  # a repeated order: this epoch was or is being emitted
        base = order.base
        if self.folding or self._owes_fold(base):
            if self._kept is None or self._kept.epoch < order.epoch:
                self._kept = order
            return []
        if base.kind is not Kind.DENSE and self.base is not None and self.base > base.version:
            raise RefusedError(
                f"{self.name}: a {base.kind.value} order against version {base.version} was refused: "
                f"the baseline holds version {self.base}"
            )
        effects: list[Effect] = []
        if self._emitting is not None:
            effects.append(CancelEmission(self._emitting.epoch))
        self._emitting = self._kept = None
        self.fence = order.epoch
        cannot = self._why_not(base)
        if order.incarnation != self.incarnation and base.kind is not Kind.DENSE:
            # Meant for one that has died, whose baseline the leader knew; of this one's it has heard nothing yet.
            cannot = f"{self.name} was started again: the order is for incarnation {order.incarnation}"
        if cannot:
            push = self._given_up[1] if self._was_given_up(base) else 0
            return [*effects, *self._emit_failed(order.epoch, cannot, fatal=push > 0, given_up=push)]
        if base.kind is not Kind.DENSE:
            self.base = base.version
        self._candidate = base.candidate or self._candidate
        self._emitting = order
        return [*effects, Step(self.name, "Emit", order.epoch, base.kind.value), StartEmission(order)]

    def emitted(self, manifest: Manifest, candidate_digest: str = "") -> list[Effect]:
        """Every payload is delivered; seal the epoch, unless the candidate is not what it was (DESIGN D10).

        Args:
            manifest: what is to be sealed.
            candidate_digest: for a rollback, whose content is the baseline's: the content of the weights in which the
                changed set was found.
        """
        order = self._emitting
        if order is None or manifest.epoch != order.epoch:
            return []
        found = candidate_digest if _of_baseline(manifest) else manifest.content_digest
        for sealed in self._sealed.values():
            if found and sealed.base.candidate == manifest.base.candidate and sealed.content_digest != found:
                self._emitting = None
                reason = (
                    f"candidate changed: the weights owned by {self.name} were stepped between the attempts of epochs "
                    f"{sealed.epoch} and {manifest.epoch}; keep them as they are until push() returns"
                )
                return self._emit_failed(manifest.epoch, reason, fatal=True)
        return [DeliverManifest(manifest)]

    def sealed(self, manifest: Manifest) -> list[Effect]:
        """Seal: the manifest is delivered (DESIGN D8)."""
        if self._emitting is None or manifest.epoch != self._emitting.epoch:
            return []
        self._emitting = None
        if not _of_baseline(manifest):
            self._sealed = {e: m for e, m in self._sealed.items() if m.base.candidate == manifest.base.candidate}
            self._sealed[manifest.epoch] = manifest
        share, count = manifest.content_digest, len(manifest.payloads)
        step = Step(self.name, "Seal", manifest.epoch, payloads=count, content_digest=share)
        return [step, ReportSealed(manifest)]

    def emission_failed(self, epoch: int, reason: str, *, fatal: bool = False, given_up: int = 0) -> list[Effect]:
        """EmitFailed: this epoch cannot be sealed.

        Args:
            epoch: the one of ``StartEmission``.
            reason: why, for people.
            fatal: another attempt with these weights cannot succeed either.
            given_up: the push that was given up on this rank, if that is why.
        """
        if self._emitting is None or epoch != self._emitting.epoch:
            return []
        self._emitting = None
        return self._emit_failed(epoch, cut(reason), fatal=fatal, given_up=given_up)

    def give_up(self, push: int) -> list[Effect]:
        """This push was given up on this rank: its weights may be others now (DESIGN D10).

        Whoever leads may not have heard of it and order another attempt with the same candidate: that fails by name.
        """
        self._given_up = (self._candidate, push)
        if self._kept is not None and self._kept.base.kind is not Kind.RESTORE:
            self._kept = None  # the leader hears that this push is no more; what comes next is another candidate
        order = self._emitting
        if order is None or order.base.kind is Kind.RESTORE:
            return []
        return [
            CancelEmission(order.epoch),
            *self.emission_failed(order.epoch, self._why_not(order.base), fatal=True, given_up=push),
        ]

    # ------------------------------------------------------------ the fold

    def fold(self, order: Fold) -> list[Effect]:
        """An order to fold.  K decides what is folded, and the fence does not matter: a commit stands (DESIGN D13).

        Raises:
            RefusedError: another record.
        """
        self._check_record(order.record_id)
        if self.folding:
            return []  # a repeated order
        if self._last_fold is not None and self._last_fold.epoch == order.epoch:
            return [self._last_fold]
        self._fold_epoch = order.epoch
        return [ReadRecord()]

    def learned(self, record: CommitRecord) -> list[Effect]:
        """BeginFold: K was read and says that a seal of this incarnation was committed, and it was ordered to fold."""
        c = record.committed
        if self.folding or record.record_id != self.record_id or c is None or c.epoch != self._fold_epoch:
            return []
        mine = OwnerRef(self.name, self.incarnation) in c.owners and c.epoch in self._sealed
        if c.direction is not Direction.FORWARD or not mine or c.epoch == self.folded_epoch:
            return []
        self._fold_epoch = 0
        # The mark stands before the first byte: a half-folded baseline neither detects nor restores.
        self.folding = True
        self.base, self.folded_epoch = c.version, c.epoch
        self._fold_content = self._sealed[c.epoch].content_digest
        return [Step(self.name, "BeginFold", c.epoch), FoldBaseline(c.epoch, self._fold_content)]

    def folded(self, epoch: int, baseline_digest: str) -> list[Effect]:
        """EndFold: the baseline holds the committed version; LoseBaseline if it digests to anything else.

        Args:
            epoch: the one of ``FoldBaseline``.
            baseline_digest: what the baseline amounts to after its last byte.
        """
        assert self.folding
        if baseline_digest != self._fold_content:
            return self.fold_failed(epoch, "what was folded is not what was committed")
        self.folding = False
        self.baseline_digest = baseline_digest
        self._last_fold = ReportFolded(epoch, baseline_digest, "")
        return [Step(self.name, "EndFold", epoch), self._last_fold, *self._again()]

    def fold_failed(self, epoch: int, reason: str) -> list[Effect]:
        """LoseBaseline: what was folded is not what was committed; the next transition must be dense (D17)."""
        assert self.folding
        reason = cut(reason)
        self.folding = False
        self.baseline_digest, self.base = "", None
        self._last_fold = ReportFolded(epoch, "", reason)
        return [Step(self.name, "LoseBaseline", epoch, reason), self._last_fold, *self._again()]

    # ------------------------------------------------------------ inside

    def _owes_fold(self, base: Base) -> bool:
        """True if the order is against a version that this owner sealed and has still to fold."""
        behind = self.base is None or self.base < base.version
        sealed = any(m.target == base.version and epoch > self.folded_epoch for epoch, m in self._sealed.items())
        return base.kind is not Kind.DENSE and behind and sealed

    def _was_given_up(self, base: Base) -> bool:
        return base.candidate != "" and base.candidate == self._given_up[0]

    def _why_not(self, base: Base) -> str:
        """Why nothing can be emitted against this base; empty if it can."""
        if self._was_given_up(base):
            return f"{self.name} has no candidate: its push was given up"
        if base.kind is Kind.DENSE:
            return ""
        if not self.baseline_digest:
            return f"{self.name} cannot emit: it has no baseline, and a {base.kind.value} order needs one"
        if self.base is not None and self.base != base.version:
            return f"{self.name} cannot emit: its baseline holds version {self.base}, not {base.version}"
        return ""

    def _again(self) -> list[Effect]:
        order, self._kept = self._kept, None
        return [] if order is None else [Again(order)]

    def _emit_failed(self, epoch: int, reason: str, *, fatal: bool, given_up: int = 0) -> list[Effect]:
        return [Step(self.name, "EmitFailed", epoch, reason), ReportEmitFailed(epoch, reason, fatal, given_up)]

    def _check_record(self, record_id: str) -> None:
        if record_id != self.record_id:
            raise RefusedError(f"{self.name}: order of record {record_id!r}; this owner obeys {self.record_id!r}")


def _of_baseline(m: Manifest) -> bool:
    """True for a restore and for a rollback: what is sent is the baseline's content, not the candidate's (D15, D17)."""
    return m.target == m.base.version
