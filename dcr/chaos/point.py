"""Where a fault strikes: a protocol point, written as a sentence (docs/chaos.md, *Points*)."""

import re
from dataclasses import dataclass, replace
from typing import Any

from dcr.protocol.errors import RefusedError

ACTIONS: dict[str, tuple[str, ...]] = {
    "coordinator": (
        *("CreateRecord", "TakeOver", "OpenAttempt", "Evict", "Wait", "RollBack", "OrderOpenApply", "AttemptFailed"),
        *("Commit", "Publish", "Stop", "Abandon", "FinishTransition", "OpenRestore", "RestoreFailed", "EndRestore"),
        *("Admit", "ReadBack", "WriteAgain", "RefuseMember", "MemberServes", "Fatal"),
    ),
    "owner": ("Emit", "Seal", "EmitFailed", "BeginFold", "EndFold", "LoseBaseline"),
    "engine": ("CloseGate", "LoseRecord", "GateClosed", "OpenGate", "Prepare", "FailAttempt"),
    "receiver": (
        *("Fence", "Stage", "OpenApply", "BeginWrite", "EndWrite", "FailWrite", "DeliverManifest", "Acknowledge"),
        *("FailAttempt", "LearnCommit"),
    ),
}
"""The protocol's actions by the role that takes them: docs/protocol.md, *Actions*.  Its nodes are ``engine`` here."""

SERVERS = ("store", "etcd")
ROLES = (*ACTIONS, *SERVERS)
_NUMBERED = ("owner", "engine", "receiver")
_COUNT_MAX = 100_000

_FORMS = """\
ROLE at ACTION, ROLE at ACTION #COUNT, receiver[N] after N items of payload P, engine[N] in a request,
owner[N] before payload P, owner[N] during manifest, coordinator before CAS, coordinator between CAS sent and answered
(both also: of ACTION); then, where wanted: in attempt A, in refit R, in restore"""

_WHO = re.compile(r"(?P<role>[a-z]+)(\[(?P<index>\d{1,4})\])?")
_LINK = re.compile(r"(?P<role>owner|relay)\[(?P<index>\d{1,4})\] to relay\[(?P<to>\d{1,4})\]")
_WHERE = (
    ("step", re.compile(r"at (?P<action>\w+)( #(?P<count>\d{1,6}))?")),
    ("items", re.compile(r"after (?P<items>\d{1,6}) items? of payload (?P<payload>\d{1,6})")),
    ("payload", re.compile(r"before payload (?P<payload>\d{1,6})")),
    ("request", re.compile(r"in a request")),
    ("manifest", re.compile(r"during( the)? manifest")),
    ("cas_sent", re.compile(r"before CAS( of (?P<action>\w+))?")),
    ("cas_done", re.compile(r"between CAS sent and answered( of (?P<action>\w+))?")),
)
_WHEN = re.compile(r" in (?:attempt (?P<attempt>\d{1,3})|refit (?P<refit>\d{1,6})|(?P<restore>restore))")
WHERE_ROLES = {
    "items": ("receiver",),
    "payload": ("owner", "store"),
    "request": ("engine",),
    "manifest": ("owner", "store"),
    "cas_sent": ("coordinator", "etcd", "store"),
    "cas_done": ("coordinator", "etcd", "store"),
}
WRITES = ("CreateRecord", "TakeOver", "OpenAttempt", "Commit", "Stop", "Abandon", "OpenRestore", "Admit")
"""Actions that write K, each with one compare-and-set."""


@dataclass(frozen=True)
class Who:
    """A role, and which of several: ``receiver[1]``; the first if nothing else is said.

    With ``to`` it is the relay's connections from there to the relay of that node: ``owner[0] to relay[1]``.
    """

    role: str
    index: int = 0
    to: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Who":
        """Read ``role``, ``role[index]`` or ``role[index] to relay[node]``; RefusedError for anything else."""
        link = _LINK.fullmatch(text)
        if link is not None:
            return cls(link["role"], int(link["index"]), int(link["to"]))
        found = _WHO.fullmatch(text)
        if found is None or found["role"] not in ROLES:
            roles = ", ".join(f"{r}[N]" if r in _NUMBERED else r for r in ROLES)
            raise RefusedError(
                f"{text!r} is nobody: {roles}; a link of the relay is owner[N] to relay[NODE], or relay[NODE] to "
                "relay[NODE]"
            )
        if found["index"] is not None and found["role"] not in _NUMBERED:
            raise RefusedError(f"{text!r}: there is one {found['role']}, without a number")
        return cls(found["role"], int(found["index"] or 0))

    def __str__(self) -> str:
        if self.to is not None:
            return f"{self.role}[{self.index}] to relay[{self.to}]"
        return f"{self.role}[{self.index}]" if self.role in _NUMBERED else self.role


@dataclass(frozen=True)
class Point:
    """A moment in the life of a role.

    Attributes:
        who: whom the sentence names; ``taken_by`` has whose moment it is.
        kind: ``step``, ``items``, ``payload``, ``manifest``, ``request``, ``cas_sent`` or ``cas_done``.
        action: of a step, or that a compare-and-set must be of; empty for any.
        count: the how-manieth time, from 1.
        items: after so many items of a payload; ``items`` alone.
        payload: which payload, from 0: ``items`` and ``payload``.
        attempt: of the refit, from 1: earlier ones are let pass.
        refit: in which, from 1; 0 while the deployment starts.
        restore: while an engine is restored, before the refit.
    """

    who: Who
    kind: str
    action: str = ""
    count: int = 1
    items: int = 0
    payload: int = 0
    attempt: int = 1
    refit: int = 1
    restore: bool = False

    @classmethod
    def parse(cls, text: str) -> "Point":
        """Read a sentence such as ``receiver[1] after 3 items of payload 2``; RefusedError if it is none."""
        words = " ".join(text.split())
        name, _, rest = words.partition(" ")
        who = Who.parse(name)
        for kind, form in _WHERE:
            found = form.match(rest)
            if found is None:
                continue
            given = {k: v for k, v in found.groupdict().items() if v is not None}
            action = given.pop("action", "")
            numbers: dict[str, Any] = {k: int(v) for k, v in given.items()}
            point = cls(who, kind, action, **numbers)
            return _checked(_when(point, rest[found.end() :], words), words)
        raise RefusedError(f"{words!r} is no point; a point is\n{_FORMS}")

    @property
    def taken_by(self) -> Who:
        """Whose moment it is: a server's faults strike at moments of those that use it."""
        if self.who.role not in SERVERS:
            return self.who
        if self.kind in WHERE_ROLES:
            return Who(WHERE_ROLES[self.kind][0])
        return Who(next(role for role, actions in ACTIONS.items() if self.action in actions))

    def __str__(self) -> str:
        where = {
            "step": f"at {self.action}" + (f" #{self.count}" if self.count > 1 else ""),
            "items": f"after {self.items} items of payload {self.payload}",
            "payload": f"before payload {self.payload}",
            "manifest": "during manifest",
            "request": "in a request",
            "cas_sent": "before CAS",
            "cas_done": "between CAS sent and answered",
        }[self.kind]
        of = f" of {self.action}" if self.kind.startswith("cas") and self.action else ""
        attempt = f" in attempt {self.attempt}" if self.attempt > 1 else ""
        when = " in restore" if self.restore else ""
        refit = "" if self.refit == 1 else f" in refit {self.refit}"
        return f"{self.who} {where}{of}{attempt}{when}{refit}"


def _when(point: Point, rest: str, words: str) -> Point:
    while rest:
        found = _WHEN.match(rest)
        if found is None:
            raise RefusedError(f"{words!r}: {rest.strip()!r} says nothing here; a point is\n{_FORMS}")
        if found["restore"]:
            point = replace(point, restore=True)
        if found["attempt"]:
            point = replace(point, attempt=int(found["attempt"]))
        if found["refit"]:
            point = replace(point, refit=int(found["refit"]))
        rest = rest[found.end() :]
    return point


def _checked(point: Point, words: str) -> Point:
    role = point.who.role
    if point.kind == "step":
        allowed = ACTIONS.get(role) or tuple(a for actions in ACTIONS.values() for a in actions)
        if point.action not in allowed:
            raise RefusedError(f"{words!r}: {role} takes no step {point.action!r}; its steps are {', '.join(allowed)}")
    elif role not in WHERE_ROLES[point.kind]:
        raise RefusedError(f"{words!r}: that is a point of {' or '.join(WHERE_ROLES[point.kind])}, not of {role}")
    elif point.action and point.action not in WRITES:
        raise RefusedError(f"{words!r}: {point.action!r} writes no record; those that do are {', '.join(WRITES)}")
    if not 1 <= point.count <= _COUNT_MAX or point.attempt < 1:
        raise RefusedError(f"{words!r}: counts and attempts begin with 1")
    return point
