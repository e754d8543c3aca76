"""Bugs that are built into a scenario's processes on purpose, to show that the harness notices each.

Each takes one rule of the protocol away where it is kept, and comes with a scenario that needs the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcr.chaos.scenario import Deployment, Fault, Scenario, Trainer
from dcr.control_plane.interface import ConflictError
from dcr.control_plane.sqlite import SqliteControlPlane
from dcr.data_plane.content_digest import ContentDigest
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Manifest, PayloadIdentity
from dcr.protocol.receiver import Receiver
from dcr.rollout.gate import Gate
from dcr.runtime.owner_host import OwnerHost


@dataclass(frozen=True)
class Bug:
    """A rule that is broken, and the scenario that shows it.

    Attributes:
        sentence: what the bug is.
        make: breaks the rule in this process.
        scenario: in which the harness must notice.
        notices: of these it must say one, in part: what shows first depends on who is faster.
    """

    sentence: str
    make: Callable[[], None]
    scenario: Scenario
    notices: tuple[str, ...]


def plant(name: str) -> None:
    """Break a rule in this process; RefusedError if there is no such bug."""
    if name not in BUGS:
        raise RefusedError(f"no bug {name!r}; there are {', '.join(BUGS)}")
    BUGS[name].make()


def _apply_twice() -> None:
    payload = Receiver.payload

    def forgetful(self: Receiver, identity: PayloadIdentity, *rest: Any) -> Any:
        attempt = self._attempt
        if attempt is not None:
            attempt.seen.pop(identity, None)
        return payload(self, identity, *rest)

    vars_of(Receiver, payload=forgetful)


def _write_without_compare() -> None:
    write = SqliteControlPlane.compare_and_set

    def blind(self: SqliteControlPlane, record_id: str, _revision: int | None, body: bytes, **rest: Any) -> Any:
        rest["lease"] = None
        while True:
            stored = self.read(record_id)
            try:
                return write(self, record_id, None if stored is None else stored.revision, body, **rest)
            except ConflictError:  # somebody wrote in between
                continue

    vars_of(SqliteControlPlane, compare_and_set=blind)


def _gate_open() -> None:
    def close(self: Gate, drain_timeout_s: float) -> None:
        """Requests go on."""

    def check_drained(self: Gate, stage: str) -> None:
        """Nobody looks."""

    def open_(self: Gate, version: int) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()

    vars_of(Gate, close=close, check_drained=check_drained, open=open_)


def _fold_early() -> None:
    seal = OwnerHost._seal  # noqa: SLF001 - the rule is kept there

    def seal_and_fold(self: OwnerHost, m: Manifest) -> None:
        seal(self, m)
        if m.target != m.base.version:
            self._source.fold(ContentDigest.from_hex(m.content_digest))

    vars_of(OwnerHost, _seal=seal_and_fold)


def vars_of(of: type, **methods: Callable[..., Any]) -> None:
    """Replace methods of a class."""
    for name, method in methods.items():
        setattr(of, name, method)


def _proof(name: str, *faults: Fault, refits: int = 1) -> Scenario:
    return Scenario(
        name=f"bug {name}",
        deployment=Deployment(trainer=Trainer(refits=refits)),
        faults=faults,
        recover_within_s=8,
    )


BUGS = {
    "apply-twice": Bug(
        "a receiver without deduplication",
        _apply_twice,
        _proof("apply-twice", Fault(at="receiver[0] at EndWrite", do="duplicate")),
        ("engine-0: other bits than version 1",),
    ),
    "write-without-compare": Bug(
        "a coordinator that writes the record without a compare-and-set",
        _write_without_compare,
        _proof("write-without-compare", Fault(at="coordinator before CAS of Commit", do="replace")),
        ("makes version 1 of 1", "which was replaced, was told that it committed"),
    ),
    "gate-open": Bug(
        "an engine whose gate stays open while it is written",
        _gate_open,
        _proof("gate-open", Fault(at="receiver[0] after 1 items of payload 1", do="slow", for_s=2.0)),
        ("engine-0-1: answered from storage that is not version 0",),
    ),
    "fold-early": Bug(
        "an owner that folds what it has sealed, and not what is committed",
        _fold_early,
        _proof(
            "fold-early",
            Fault(at="receiver[0] after 1 items of payload 1", do="slow", for_s=3.0),
            Fault(at="receiver[1] at Acknowledge"),
        ),
        ("engine-0: other bits than version 1",),
    ),
}
