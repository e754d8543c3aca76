"""One attempt or restore session, as one rank knows it: what it was told, what arrived, how far it is."""

from collections.abc import Container
from dataclasses import dataclass, field

from dcr.protocol.identity import Base, Manifest, PayloadIdentity
from dcr.protocol.messages import Prepare
from dcr.protocol.record import OwnerRef


@dataclass
class RankAttempt:
    """The memory that a receiver keeps from a prepare order until the next one (DESIGN D7)."""

    order: Prepare
    armed: bool
    """Storage admits this kind of payload (DESIGN D4, D5)."""
    staged: bool = False
    applying: bool = False
    manifests: dict[str, Manifest] = field(default_factory=dict)
    held: dict[PayloadIdentity, str] = field(default_factory=dict)
    """Digests of what lies in host memory (DESIGN D18)."""
    seen: dict[PayloadIdentity, str] = field(default_factory=dict)
    """Digests of what was begun to be written."""
    entries: dict[PayloadIdentity, int] = field(default_factory=dict)
    written: set[PayloadIdentity] = field(default_factory=set)
    failed: str = ""
    synchronising: bool = False
    root: str = ""

    @property
    def stage(self) -> str:
        """How far it is: fenced, staged, applying, acknowledged or failed."""
        if self.failed:
            return "failed"
        if self.root:
            return "acknowledged"
        if self.applying:
            return "applying"
        return "staged" if self.staged else "fenced"

    def lacks(self, where: Container[PayloadIdentity]) -> bool:
        """Whether some owner's manifest is missing, or a payload that one lists is not among these (DESIGN D8)."""
        if set(self.manifests) != {o.owner for o in self.order.owners}:
            return True
        return any(m.identity(p.sequence) not in where for m in self.manifests.values() for p in m.payloads)

    def expects(self, owner: str, incarnation: int) -> bool:
        """Whether this owner, as this incarnation, emits for the attempt (DESIGN D7)."""
        return OwnerRef(owner, incarnation) in self.order.owners

    def wrong_payload(self, identity: PayloadIdentity, base: Base, digest: str, entries: int) -> str:
        """What a payload of this epoch contradicts; empty if nothing (DESIGN D7)."""
        i = identity
        wrong = self._mismatch(i.target, base)
        if wrong:
            return f"payload {name_of(i)}: {wrong}"
        if digest != self.held.get(i, digest) or digest != self.seen.get(i, digest):
            return f"payload {name_of(i)} came twice with different bytes"
        m = self.manifests.get(i.owner)
        return "" if m is None else self._unlisted(m, i, digest, entries)

    def wrong_manifest(self, m: Manifest) -> str:
        """What a manifest of this epoch contradicts; empty if nothing (DESIGN D8)."""
        wrong = self._mismatch(m.target, m.base)
        if not wrong and [p.sequence for p in m.payloads] != list(range(len(m.payloads))):
            wrong = "its payloads are not numbered 0, 1, 2, ..."
        if wrong:
            return f"manifest of {m.owner}: {wrong}"
        if self.manifests.get(m.owner, m) != m:
            return f"{m.owner} sealed epoch {m.epoch} twice with different manifests"
        for i, digest in (*self.held.items(), *self.seen.items()):
            if i.owner == m.owner and (wrong := self._unlisted(m, i, digest, self.entries[i])):
                return wrong
        return ""

    def _mismatch(self, target: int, base: Base) -> str:
        if target != self.order.target:
            return f"it is for version {target}, this attempt for {self.order.target}"
        if base != self.order.base:
            return f"it was made against {base}, this attempt is against {self.order.base}"
        return ""

    @staticmethod
    def _unlisted(m: Manifest, i: PayloadIdentity, digest: str, entries: int) -> str:
        if i == m.identity(i.sequence) and 0 <= i.sequence < len(m.payloads):
            listed = m.payloads[i.sequence]
            if listed.digest == digest and listed.entries == entries:
                return ""
        return f"payload {name_of(i)} is not the one that its owner's manifest lists"


def name_of(i: PayloadIdentity) -> str:
    """A payload's name for people."""
    return f"{i.owner}/{i.sequence} of epoch {i.epoch}"
