"""The owner: the training rank that detects and emits the changes of its source elements (paper section 4)."""

from dataclasses import dataclass

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.messages import Emit, Fold, cut
from dcr.protocol.record import CommitRecord
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

        emit -> [Emit] -> emitted -> [Seal] -> sealed   ...   fold -> learned(K) -> [BeginFold] -> folded -> [EndFold]

    Args:
        name: the owner's name.
        incarnation: new with every start of the process that holds the baseline.
        record_id: the record whose orders this owner obeys.
        baseline_digest: its share of the baseline's content digest; empty if it has no baseline.
    """

    def __init__(self, name: str, incarnation: int, record_id: str, baseline_digest: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.record_id = record_id
        self.baseline_digest = baseline_digest
        self.folding = False
        self.fence = 0
        self._emitting: Emit | None = None
        self._sealed: dict[int, Manifest] = {}  # by epoch, of the open transition
        self._fold_epoch: int | None = None
        self._last_fold: ReportFolded | None = None

    def emit(self, order: Emit) -> list[Effect]:
        """Emit: once per epoch (DESIGN D7).

        Raises:
            RefusedError: another record, a fenced epoch, a fold under way (D13), or no baseline for this kind.
        """
        self._check(order.record_id, order.epoch)
        if order.epoch == self.fence:
            return []  # a repeated order: this epoch was or is being emitted
        effects: list[Effect] = []
        if self._emitting is not None:
            effects.append(CancelEmission(self._emitting.epoch))
        self.fence = order.epoch
        self._emitting = None
        kind = order.base.kind
        if self.folding:
            return [*effects, self._cannot(order, "its baseline is being folded")]
        if kind is not Kind.DENSE and not self.baseline_digest:
            return [*effects, self._cannot(order, f"it has no baseline, and a {kind.value} attempt needs one")]
        self._emitting = order
        return [*effects, Step(self.name, "Emit", order.epoch, kind.value), StartEmission(order)]

    def emitted(self, manifest: Manifest) -> list[Effect]:
        """Every payload is delivered; seal the epoch, unless the candidate is not what it was (DESIGN D10)."""
        order = self._emitting
        if order is None or manifest.epoch != order.epoch:
            return []
        for sealed in self._sealed.values():
            if (
                manifest.base.kind is not Kind.RESTORE
                and sealed.base.candidate == manifest.base.candidate
                and sealed.content_digest != manifest.content_digest
            ):
                self._emitting = None
                reason = (
                    f"candidate changed: the weights owned by {self.name} were stepped between the attempts of epochs "
                    f"{sealed.epoch} and {manifest.epoch}; keep them as they are until push() returns"
                )
                return [
                    Step(self.name, "EmitFailed", manifest.epoch, "candidate changed"),
                    ReportEmitFailed(manifest.epoch, reason, fatal=True),
                ]
        return [DeliverManifest(manifest)]

    def sealed(self, manifest: Manifest) -> list[Effect]:
        """Seal: the manifest is delivered (DESIGN D8)."""
        if self._emitting is None or manifest.epoch != self._emitting.epoch:
            return []
        self._emitting = None
        if manifest.base.kind is not Kind.RESTORE:
            self._sealed = {e: m for e, m in self._sealed.items() if m.base.candidate == manifest.base.candidate}
            self._sealed[manifest.epoch] = manifest
        return [Step(self.name, "Seal", manifest.epoch), ReportSealed(manifest)]

    def emission_failed(self, epoch: int, reason: str, *, fatal: bool = False) -> list[Effect]:
        """EmitFailed: this epoch cannot be sealed."""
        reason = cut(reason)
        if self._emitting is None or epoch != self._emitting.epoch:
            return []
        self._emitting = None
        return [Step(self.name, "EmitFailed", epoch, reason), ReportEmitFailed(epoch, reason, fatal)]

    def fold(self, order: Fold) -> list[Effect]:
        """An order to fold; nothing is folded before K was read (DESIGN D13).

        Raises:
            RefusedError: another record, or an epoch below the fence.
        """
        self._check(order.record_id, order.epoch)
        if self.folding:
            return []  # a repeated order
        if self._last_fold is not None and self._last_fold.epoch == order.epoch:
            return [self._last_fold]
        self._fold_epoch = order.epoch
        return [ReadRecord()]

    def learned(self, record: CommitRecord) -> list[Effect]:
        """K was read: fold if its committed epoch is one that this incarnation sealed."""
        if self._fold_epoch is None or record.record_id != self.record_id:
            return []
        c = record.committed
        if c is None or c.epoch not in self._sealed:
            return []
        m = self._sealed[c.epoch]
        self._fold_epoch = None
        # The mark stands before the first byte: a half-folded baseline neither detects nor restores.
        self.folding = True
        return [Step(self.name, "BeginFold", c.epoch), FoldBaseline(c.epoch, m.content_digest)]

    def folded(self, epoch: int, baseline_digest: str) -> list[Effect]:
        """EndFold: the baseline holds the committed version."""
        assert self.folding
        self.folding = False
        self.baseline_digest = baseline_digest
        self._sealed = {}
        self._last_fold = ReportFolded(epoch, baseline_digest, "")
        return [Step(self.name, "EndFold", epoch), self._last_fold]

    def fold_failed(self, epoch: int, reason: str) -> list[Effect]:
        """LoseBaseline: what was folded is not what was committed; the next transition must be dense (D17)."""
        assert self.folding
        reason = cut(reason)
        self.folding = False
        self.baseline_digest = ""
        self._sealed = {}
        self._last_fold = ReportFolded(epoch, "", reason)
        return [Step(self.name, "LoseBaseline", epoch, reason), self._last_fold]

    def _cannot(self, order: Emit, reason: str) -> Effect:
        return ReportEmitFailed(order.epoch, f"{self.name} cannot emit: {reason}", fatal=False)

    def _check(self, record_id: str, epoch: int) -> None:
        if record_id != self.record_id:
            raise RefusedError(f"{self.name}: order of record {record_id!r}; this owner obeys {self.record_id!r}")
        if epoch < self.fence:
            raise RefusedError(f"{self.name}: order of epoch {epoch} refused: the fence is at {self.fence}")
