"""One attempt or one restore session, while it is under way."""

import re
from dataclasses import dataclass, field

from dcr.protocol.identity import Base, Kind, manifest_root
from dcr.protocol.layer_changes import LayerChanges, add_layers
from dcr.protocol.messages import Sealed
from dcr.protocol.record import Member, OwnerRef

_OF_ONE_ATTEMPT = re.compile(r"epoch \d+|\d{9,}|\d+(\.\d+)? s\b")
"""What differs where the same thing fails again: epochs, also as they stand in keys, incarnations, and seconds."""


def digest_sum(shares: list[str]) -> str:
    """The content digest of the whole from the owners' shares (DESIGN D2); empty if a share is missing."""
    if not shares or not all(shares):
        return ""
    return f"{sum(int(s, 16) for s in shares) % (1 << 128):032x}"


@dataclass
class Session:
    """What a coordinator has heard of one epoch."""

    epoch: int
    base: Base
    target: int
    attempt: int
    """How many attempts of the transition K counts, this one included; 0 for a restore."""
    members: set[Member]
    owners: tuple[OwnerRef, ...]
    operation: str
    set_only: tuple[str, ...]
    stage: bool = False
    """Asynchronous gate: members stage everything before they may write (DESIGN D18)."""
    prepared: set[Member] = field(default_factory=set)
    staged: set[Member] = field(default_factory=set)
    applying: bool = False
    roots: dict[Member, str] = field(default_factory=dict)
    sealed: dict[str, Sealed] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    broken: str = ""
    """Why it cannot be completed as it was opened; empty as long as it can."""
    hopeless: bool = False
    """It cannot be completed by whoever is left either.  An attempt needs every member, a restore only its owners."""
    fatal: bool = False
    """Another attempt with this candidate cannot succeed either."""
    reported: bool = False
    """An owner or engine reported an error, which may well come again at once; nobody was lost or late."""

    @property
    def restore(self) -> bool:
        """True for a restore session."""
        return self.base.kind is Kind.RESTORE

    @property
    def back(self) -> bool:
        """True for an attempt that goes back to the committed version (DESIGN D17)."""
        return not self.restore and self.target == self.base.version

    @property
    def ready(self) -> bool:
        """True when every member may be ordered to write (DESIGN D6, D18)."""
        return (self.staged if self.stage else self.prepared) >= self.members

    @property
    def unsealed(self) -> list[str]:
        """Owners that have not sealed."""
        return [o.owner for o in self.owners if o.owner not in self.sealed]

    @property
    def content_digest(self) -> str:
        """Content digest of the target over all owners' shares; empty until all have sealed."""
        return "" if self.unsealed else digest_sum([r.content_digest for r in self.sealed.values()])

    @property
    def root(self) -> str:
        """The root over the owners' manifests."""
        assert not self.unsealed
        return manifest_root({o: r.manifest_digest for o, r in self.sealed.items()})

    @property
    def acknowledged(self) -> bool:
        """True when every member has acknowledged."""
        return bool(self.members) and set(self.roots) >= self.members

    @property
    def complete(self) -> bool:
        """True when every owner has sealed and every member has acknowledged just that."""
        if self.unsealed or not self.acknowledged:
            return False
        return all(root == self.root for root in self.roots.values())

    @property
    def late(self) -> tuple[list[Member], str]:
        """Members that a time-out leaves to blame, and what was waited for."""
        preparing = sorted(self.members - self.prepared)
        if not self.applying and preparing:
            members, stage = preparing, "prepare"
        elif self.unsealed and (self.applying or self.stage):
            return [], f"{', '.join(self.unsealed)} did not seal epoch {self.epoch}"
        elif self.applying:
            members, stage = sorted(self.members - set(self.roots)), "acknowledge"
        else:
            members, stage = sorted(self.members - self.staged), "stage"
        return members, f"{', '.join(m.engine for m in members)} did not {stage} epoch {self.epoch}"

    def summary(self, attempts: int) -> dict[str, float | int | str | list[str]]:
        """What a report of a push that took so many attempts says of the session that was committed."""
        sealed = list(self.sealed.values())
        return {
            "kind": self.base.kind.value,
            "attempts": attempts,
            "members": sorted(m.engine for m in self.members),
            "changed_entries": sum(r.changed_entries for r in sealed),
            "elements": sum(r.owned_elements for r in sealed),
            "payloads": sum(r.payloads for r in sealed),
            "payload_bytes": sum(r.payload_bytes for r in sealed),
            **{f"seconds_{k}": v for k, v in sorted(self.seconds.items())},
        }

    @property
    def layers(self) -> tuple[LayerChanges, ...]:
        """What changed, by layer, over all owners that have sealed."""
        return add_layers(self.sealed[o].layers for o in sorted(self.sealed))

    def break_off(self, reason: str, *, fatal: bool = False) -> None:
        """It cannot be completed any more, by nobody; the first reason stands."""
        self.broken = self.broken or reason
        self.hopeless = True
        self.fatal |= fatal

    def drop(self, m: Member, reason: str) -> None:
        """This member cannot take part any more: an attempt is broken by it, a restore goes on without it."""
        self.broken = self.broken or f"{m.engine} {reason}"
        if not self.restore:
            self.hopeless = True
            return
        self.members.discard(m)

    def took(self, seconds: dict[str, float]) -> None:
        """Keep the longest time of each stage."""
        for stage, s in seconds.items():
            self.seconds[stage] = max(self.seconds.get(stage, 0.0), s)


def why_stopped(failures: list[str]) -> str:
    """What a push that stopped tells its caller: what is served now, what can be done, and each reason once."""
    return (
        "the transition stopped; clean engines serve the committed version, torn ones stay gated. "
        "Call push() to resume it with the same weights, push(dense=True) to send every element, roll_back() to give "
        "torn engines the committed bits in place, or abandon(); what begin_push() copied cannot be resumed once the "
        "weights have changed. "
        f"What happened: {_each_once(failures)}"
    )


def waits_for_operator(failures: list[str]) -> str:
    """What is said of a transition that stopped while its push waits for an operator (DESIGN D14)."""
    return (
        "the transition stopped, and its push waits; clean engines serve the committed version, torn ones stay gated. "
        "`dcr transition resume` goes on with it, `dense` sends every element, `abandon` and `roll-back` end it. "
        f"What happened: {_each_once(failures)}"
    )


def _each_once(failures: list[str]) -> str:
    attempts: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for failure in failures:
        attempt, _, reason = failure.partition(": ")
        alike = _OF_ONE_ATTEMPT.sub("", reason)
        attempts.setdefault(alike, []).append(attempt)
        reasons[alike] = reason
    return "; ".join(f"{', '.join(which)}: {reasons[alike]}" for alike, which in attempts.items())


def why_rolled_back(version: int, how: str) -> str:
    """What a push whose transition was turned back to this version tells its caller."""
    return (
        f"the transition to version {version + 1} was rolled back to version {version} on the operator's order: {how}. "
        "The weights that were pushed are not committed"
    )
