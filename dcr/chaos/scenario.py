"""A scenario: what is started, which faults strike when, and what is expected; written in YAML (docs/chaos.md)."""

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from dcr.chaos.point import SERVERS, Point, Who
from dcr.protocol.errors import RefusedError
from dcr.runtime.settings import Settings

FILE_BYTES_MAX = 1 << 20
ENGINES_MAX = 64
RANKS_MAX = 16
COORDINATORS_MAX = 8
REFITS_MAX = 10_000
SECONDS_MAX = 3600.0

Do = Literal["kill", "stall", "slow", "partition", "fill", "error", "duplicate", "replace", "roll_back"]
Operator = Literal["", "resume", "abandon", "dense"]
_LASTING = ("stall", "slow", "partition", "fill")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: {value} is not from {least:g} to {most:g}")


class Trainer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The training side: ranks that hold the same weights, each in a process."""

    ranks: int = 1
    refits: int = 2
    """Optimizer steps, each with a push that must end committed."""
    rate: float = 0.05
    """Share of the elements that a step changes."""

    def __post_init__(self) -> None:
        _within("ranks", self.ranks, 1, RANKS_MAX)
        _within("refits", self.refits, 1, REFITS_MAX)
        _within("rate", self.rate, 0.0, 1.0)


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The user's own models, by ``package.module:factory``; each factory takes nothing and returns a torch module."""

    trainer: str = "dcr.chaos.model:policy"
    """Its state dict is the checkpoint."""
    engine: str = "dcr.chaos.model:served"
    """Has a native loader, ``load_weights``, for that checkpoint."""

    def __post_init__(self) -> None:
        for side in (self.trainer, self.engine):
            if not _FACTORY.fullmatch(side):
                raise ValueError(f"{side!r} is not package.module:factory")


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is started."""

    trainer: Trainer = Trainer()
    engines: int = 2
    nodes: tuple[int, ...] = ()
    """How many of the engines each node has; a node for each if nothing is said."""
    transport: Literal["file", "s3", "relay"] = "file"
    control: Literal["sqlite", "etcd", "s3"] = "sqlite"
    coordinators: int = 0
    """Processes that stand by to lead, as ``dcr coordinator`` does; with none the trainer's first rank leads."""
    gate: Literal["sync", "async"] = "sync"
    settings: dict[str, Any] = {}
    """Fields of ``dcr.runtime.settings.Settings``, over those that the harness sets."""
    model: Model = Model()

    def __post_init__(self) -> None:
        _within("engines", self.engines, 1, ENGINES_MAX)
        if self.nodes and (sum(self.nodes) != self.engines or min(self.nodes) < 1):
            held = sum(self.nodes)
            raise ValueError(f"nodes {list(self.nodes)}: they hold {held} engines, and engines is {self.engines}")
        _within("coordinators", self.coordinators, 0, COORDINATORS_MAX)
        if self.coordinators and self.control == "s3":
            raise ValueError("coordinators: none can stand by where control is s3, which keeps no leases")
        if "coordinator" in self.settings:
            raise ValueError("settings: coordinator follows from deployment.coordinators: say how many there are")
        try:
            Settings.of(self.all_settings)
        except RefusedError as e:
            raise ValueError(str(e)) from e

    @property
    def all_settings(self) -> dict[str, Any]:
        """Those of the harness, short enough that a fault is got over in seconds, and over them the scenario's."""
        elsewhere = {"coordinator": "elsewhere", "leader_lease_s": self._lease_s, "rejoin_timeout_s": 5.0}
        return {**SETTINGS, "gate_mode": self.gate, **(elsewhere if self.coordinators else {}), **self.settings}

    @property
    def store_process(self) -> bool:
        """Whether there is a store that runs as a process: payloads, the record or both are in a bucket."""
        return "s3" in (self.transport, self.control)

    @property
    def _lease_s(self) -> float:
        """Short, so that a takeover takes seconds; longer where more processes want a processor to renew it in time."""
        return 1.5 + 0.25 * self.coordinators

    @property
    def engines_of_nodes(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the engines of each node."""
        counts, first, found = self.nodes or (1,) * self.engines, 0, []
        for count in counts:
            found.append(tuple(range(first, first + count)))
            first += count
        return tuple(found)


SETTINGS: dict[str, Any] = {
    "bucket_bytes": 700,
    "prepare_timeout_s": 8.0,
    "ack_timeout_s": 8.0,
    "fold_timeout_s": 8.0,
    "restore_timeout_s": 8.0,
    "restore_pause_timeout_s": 0.2,
    "members_timeout_s": 30.0,
    "owners_timeout_s": 3.0,
    "push_timeout_s": 120.0,
    "drain_timeout_s": 5.0,
    "delivery_timeout_s": 5.0,
    "connect_timeout_s": 20.0,
    "record_poll_s": 0.1,
    "serve_lease_s": 3.0,
}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault."""

    at: str
    """The point, as ``Point.parse`` reads it."""
    do: Do = "kill"
    who: str = ""
    """Whom it strikes, if not the one that the point names."""
    for_s: float = 0.0
    """How long a stall, a slow thread, a partition or a full disk lasts, seconds."""
    restart_after_s: float = 0.0
    """When a process that was killed is started again, seconds."""
    push_error: str = ""
    """The refit must end with a PushError that has this text; then the operator acts, and it is pushed again."""
    operator: Operator = ""
    """What the operator does after that error: push again (``resume``), ``abandon`` first, or push ``dense``."""

    def __post_init__(self) -> None:
        try:
            point, victim = self.point, self.victim
        except RefusedError as e:
            raise ValueError(str(e)) from e
        _within("for_s", self.for_s, 0.0, SECONDS_MAX)
        _within("restart_after_s", self.restart_after_s, 0.0, SECONDS_MAX)
        if (self.for_s > 0) != (self.do in _LASTING):
            raise ValueError(f"do: {self.do}: for_s belongs to {', '.join(_LASTING)}, and these need it")
        if self.do == "fill" and victim.role != "store":
            raise ValueError("do: fill: a full disk is the store's; say who: store")
        if self.do == "partition" and victim.role not in ("engine", "receiver", *SERVERS):
            raise ValueError(f"do: partition: {victim} cannot be cut off; an engine, the store or etcd can")
        if self.do in ("replace", "roll_back") and victim.role != "coordinator":
            raise ValueError(f"do: {self.do}: that is done to the coordinator")
        if self.do in ("slow", "error", "duplicate") and victim != point.taken_by:
            raise ValueError(f"do: {self.do}: it strikes whoever comes to the point, {point.taken_by}")
        if self.do == "error" and point.kind == "step":
            raise ValueError("do: error: errors come from what is called: at a payload, an item, a manifest or a CAS")
        if self.do == "duplicate" and (point.kind, point.action) != ("step", "EndWrite"):
            raise ValueError("do: duplicate: a payload comes twice at `receiver[N] at EndWrite`")
        if bool(self.operator) != bool(self.push_error):
            raise ValueError("push_error and operator come together: after the error somebody must do something")

    @property
    def point(self) -> Point:
        """Where it strikes."""
        return Point.parse(self.at)

    @property
    def victim(self) -> Who:
        """Whom it strikes."""
        return Who.parse(self.who) if self.who else self.point.who

    def __str__(self) -> str:
        what = f"{self.do} {self.for_s:g} s" if self.for_s else self.do
        whom = "" if self.victim == self.point.who else f" {self.victim}"
        return f"{what}{whom}: {self.point}"


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment, the faults that it lives through, and within what time it must."""

    name: str
    deployment: Deployment = Deployment()
    faults: tuple[Fault, ...] = ()
    recover_within_s: float = 45.0
    """From a fault to the next commit that every engine serves, seconds; what a stall lasts is not counted."""
    seed: int = 0
    """Of the training steps."""

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 100 or not self.name.isprintable():  # noqa: PLR2004 - a name, no story
            raise ValueError("name: 1 to 100 printable characters")
        _within("recover_within_s", self.recover_within_s, 1.0, SECONDS_MAX)
        d = self.deployment
        for fault in self.faults:
            for who in (fault.victim, fault.point.taken_by):
                size = {"owner": d.trainer.ranks, "engine": d.engines, "receiver": d.engines}.get(who.role, 1)
                if who.index >= size:
                    raise ValueError(f"faults: {fault}: there is no {who}; {who.role}[{size - 1}] is the last")
            if fault.point.restore and fault.point.refit <= 1:
                raise ValueError(f"faults: {fault}: in restore goes from refit 2 on; engines start with version 0")
            if fault.point.refit > d.trainer.refits:
                raise ValueError(f"faults: {fault}: there are {d.trainer.refits} refits")
            _check_servers(d, fault)
            if d.coordinators and fault.do == "replace":
                raise ValueError(
                    f"faults: {fault}: the coordinators are no part of the trainer; stall the one that leads for "
                    f"longer than its lease, and another one replaces it"
                )


def _check_servers(d: Deployment, fault: Fault) -> None:
    victim = fault.victim
    if victim.role == "etcd" and d.control != "etcd":
        raise ValueError(f"faults: {fault}: control is {d.control}, there is no etcd")
    if victim.role != "store":
        return
    if fault.do == "fill":
        if d.transport != "file":
            raise ValueError(f"faults: {fault}: a disk is filled where transport is file, not {d.transport}")
    elif not d.store_process:
        raise ValueError(
            f"faults: {fault}: transport is {d.transport} and control {d.control}, there is no store process"
        )


def read_scenario(path: Path) -> Scenario:
    """Read a scenario's file.

    Raises:
        RefusedError: it cannot be read, is no YAML, has an unknown key or a value that is not allowed; names the file,
            the key and what is allowed.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise RefusedError(f"scenario {path}: {e.strerror}") from e
    if len(data) > FILE_BYTES_MAX:
        raise RefusedError(f"scenario {path}: {len(data)} bytes, more than {FILE_BYTES_MAX}")
    try:
        return parse_scenario(data)
    except RefusedError as e:
        raise RefusedError(f"scenario {path}: {e}") from e


def parse_scenario(data: bytes) -> Scenario:
    """Read a scenario's text; RefusedError names the key and what is allowed."""
    try:
        values = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise RefusedError(f"no YAML: {e}") from e
    if not isinstance(values, dict):
        raise RefusedError("no scenario: it must be a mapping with name, deployment and faults")
    try:
        return msgspec.convert(values, Scenario)
    except msgspec.ValidationError as e:
        raise RefusedError(f"{e}{_hint(str(e))}") from e


_KEYS = {k for s in (Scenario, Deployment, Trainer, Model, Fault) for k in s.__struct_fields__}


def _hint(error: str) -> str:
    unknown = re.search(r"unknown field `(\w+)`", error)
    if unknown is None:
        return ""
    place = error.rpartition("$")[2]
    struct: type[msgspec.Struct] = Scenario
    for key, of in (("faults", Fault), ("trainer", Trainer), ("model", Model), ("deployment", Deployment)):
        if key in place:
            struct = of
            break
    near = difflib.get_close_matches(unknown[1], struct.__struct_fields__, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"; {meant}known are {', '.join(struct.__struct_fields__)}"
