"""One rank, written from spec/tla/RefitReceiver.tla: what K, an order and an arrival make of it."""

from dataclasses import dataclass, field

from dcr.protocol.identity import Kind, Manifest, PayloadIdentity
from dcr.protocol.messages import StorageState
from tests.unit.protocol.machines.world import OWNERS, Order, Payload

NOTHING: list[str] = []


@dataclass
class Rank:
    """``rank[e][r]``; beside it what D7, D8 and D18 have it remember of one attempt."""

    version: int | None
    loaded: str
    torn: set[str]
    fence: int = 0
    acknowledged: tuple[int, int, str] | None = None
    order: Order | None = None
    stage: str = "idle"
    held: dict[PayloadIdentity, str] = field(default_factory=dict)
    seen: dict[PayloadIdentity, str] = field(default_factory=dict)
    entries: dict[PayloadIdentity, int] = field(default_factory=dict)
    written: set[PayloadIdentity] = field(default_factory=set)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    synchronising: bool = False
    writing: Payload | None = None

    def committed_here(self, k) -> bool:
        """``CommittedHere``, with the root (D12)."""
        c = k.committed
        return c is not None and self.acknowledged == (c.epoch, c.version, c.manifest_root)

    def learn(self, k) -> None:
        """``Learned``, but for the fence."""
        if self.committed_here(k):
            self.version, self.loaded, self.torn = k.version, k.baseline_id, set()
        elif self.version is None and not self.torn and self.loaded == k.baseline_id:
            self.version = k.version

    def armed(self, o: Order) -> bool:
        """``Armed`` (D4, D5)."""
        base = o.prepare.base
        if o.kind is Kind.RELATIVE:
            return self.version == base.version and not self.torn
        if o.kind is Kind.ABSOLUTE:
            return self.version == base.version and self.torn <= {base.candidate}
        return True

    def drop(self) -> list[str]:
        dropped = ["DropStage"] if self.held else []
        self.order, self.stage, self.synchronising = None, "idle", False
        self.held, self.seen, self.entries, self.written, self.manifests = {}, {}, {}, set(), {}
        return dropped

    def fail(self) -> list[str]:
        if self.stage in ("failed", "acknowledged"):
            return NOTHING
        self.stage = "failed"
        dropped = ["DropStage"] if self.held else []
        self.held = {}
        return ["FailAttempt", *dropped, "RankFailed"]

    def all_in(self, where) -> bool:
        """Every owner's manifest is here, and every payload that one lists is among these (D8)."""
        listed = {m.identity(p.sequence) for m in self.manifests.values() for p in m.payloads}
        return set(self.manifests) == {o.owner for o in OWNERS} and listed <= set(where)

    def follows(self) -> list[str]:
        """What is due once something arrived or was written: ``Stage``, or the way to ``Acknowledge``."""
        if self.stage == "fenced" and self.order.prepare.stage and self.all_in(self.held):
            self.stage = "staged"
            return ["Stage", "RankStaged"]
        done = self.stage == "applying" and not self.writing and not self.synchronising
        if not done or not self.all_in(self.written):
            return NOTHING
        total = sum(int(m.content_digest, 16) for m in self.manifests.values())
        if self.order.kind is Kind.RESTORE and f"{total:032x}" != self.order.prepare.base.baseline_id:
            return self.fail()
        self.synchronising = True
        return ["Synchronise"]

    def agrees(self, i: PayloadIdentity, of_bytes: str, entries: int) -> bool:
        """Whether the owner's manifest, if it is here, lists just that (D8)."""
        m = self.manifests.get(i.owner)
        listed = [] if m is None else [(m.identity(p.sequence), p.digest, p.entries) for p in m.payloads]
        return m is None or (i, of_bytes, entries) in listed

    @property
    def epoch(self) -> int:
        return 0 if self.order is None else self.order.epoch

    @property
    def state(self) -> StorageState:
        return StorageState(self.version, self.loaded, tuple(sorted(self.torn)))
