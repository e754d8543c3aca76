"""A scenario: what is started, which faults strike when, and what is expected; written in YAML (docs/chaos.md)."""

import re
from typing import Any, Literal

import msgspec

from dcr.chaos.model import CHECKPOINT, POLICY, SERVED, VLLM
from dcr.chaos.point import Point, Who
from dcr.protocol.errors import RefusedError
from dcr.runtime.settings import Settings

ENGINES_MAX = 64
RANKS_MAX = 16
COORDINATORS_MAX = 8
REFITS_MAX = 10_000
SECONDS_MAX = 3600.0
SEED_MAX = 1 << 31

Do = Literal["kill", "stall", "slow", "partition", "fill", "error", "duplicate", "replace", "roll_back", "step_early"]
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

    trainer: str = POLICY
    """Its state dict is the checkpoint; or ``checkpoint:/folder``, the tensors of a Hugging Face checkpoint."""
    engine: str = SERVED
    """Has a native loader, ``load_weights``, for that checkpoint; or ``vllm``, which makes engines of vLLM on it."""

    def __post_init__(self) -> None:
        folder = self.trainer.startswith(f"{CHECKPOINT}/")
        if not folder and not _FACTORY.fullmatch(self.trainer):
            raise ValueError(f"trainer: {self.trainer!r} is neither package.module:factory nor {CHECKPOINT}/folder")
        if self.engine == VLLM and not folder:
            raise ValueError(f"engine: vllm starts from a checkpoint: give the trainer {CHECKPOINT}/folder")
        if self.engine != VLLM and not _FACTORY.fullmatch(self.engine):
            raise ValueError(f"engine: {self.engine!r} is neither package.module:factory nor {VLLM}")


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
        if self.model.engine == VLLM and max(self.nodes, default=1) > 1:
            raise ValueError(f"nodes {list(self.nodes)}: an engine of vLLM has a node, and a process, of its own")
        _within("coordinators", self.coordinators, 0, COORDINATORS_MAX)
        if self.coordinators and self.control == "s3":
            raise ValueError("coordinators: none can stand by where control is s3, which keeps no leases")
        for name in self.settings.keys() & _SAID_ELSEWHERE.keys():
            raise ValueError(f"settings: {name} {_SAID_ELSEWHERE[name]}")
        try:
            members_min = Settings.of(self.all_settings).members_min
        except RefusedError as e:
            raise ValueError(f"{e}{_known_settings(self.settings)}") from e
        if members_min > self.engines:
            raise ValueError(
                f"settings: members_min is {members_min}, and engines is {self.engines}: no push could commit; give "
                "more engines, or a smaller members_min"
            )

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
        return 2.5 + 0.25 * self.coordinators

    @property
    def engines_of_nodes(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the engines of each node."""
        counts, first, found = self.nodes or (1,) * self.engines, 0, []
        for count in counts:
            found.append(tuple(range(first, first + count)))
            first += count
        return tuple(found)


def _known_settings(given: dict[str, Any]) -> str:
    """For an error: what a scenario may set, if one of these is nothing of that."""
    known = [name for name in Settings.__struct_fields__ if name not in _SAID_ELSEWHERE]
    return "" if given.keys() <= set(known) else f"; known are {', '.join(known)}"


_SAID_ELSEWHERE = {
    "coordinator": "is not given here: write `coordinators: 2` under deployment for two that live elsewhere than in "
    "the trainer, and leave it out for the trainer's own",
    "gate_mode": "is not given here: write `gate: sync` or `gate: async` under deployment",
    "event_log": "is not given here: event logs are in the folder `events` of the run, for they are checked",
}
"""Settings that follow from something else in a scenario."""

SETTINGS: dict[str, Any] = {
    "bucket_bytes": 700,
    "attempts_max": 8,  # a store that was killed may take long to start again
    "prepare_timeout_s": 8.0,
    "ack_timeout_s": 8.0,
    "fold_timeout_s": 8.0,
    "restore_timeout_s": 8.0,
    "restore_pause_timeout_s": 0.2,
    "members_timeout_s": 30.0,
    "owners_timeout_s": 15.0,
    "push_timeout_s": 120.0,
    "drain_timeout_s": 5.0,
    "delivery_timeout_s": 5.0,
    "connect_timeout_s": 60.0,
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
        self._check_seconds()
        if self.do == "fill" and victim.role != "store":
            raise ValueError("do: fill: a full disk is the store's; say who: store")
        if self.do == "partition" and victim.role == "coordinator":
            raise ValueError(
                "do: partition: the coordinator cannot be cut off from all at once: cut off an engine, an owner, the "
                "store, etcd, or a link of the relay (`owner[0] to relay[1]`)"
            )
        if self.do != "partition" and victim.to is not None:
            raise ValueError(f"do: {self.do}: {victim} is a link of the relay, which can only be cut: do: partition")
        if self.do == "step_early" and (point.kind, point.action, victim) != ("step", "BeginFold", point.who):
            raise ValueError("do: step_early: the trainer breaks its word at `owner[0] at BeginFold`")
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

    def _check_seconds(self) -> None:
        _within("for_s", self.for_s, 0.0, SECONDS_MAX)
        _within("restart_after_s", self.restart_after_s, 0.0, SECONDS_MAX)
        if (self.for_s > 0) != (self.do in _LASTING):
            raise ValueError(f"do: {self.do}: for_s belongs to {', '.join(_LASTING)}, and these need it")
        if self.restart_after_s > 0 and self.do != "kill":
            raise ValueError(
                f"do: {self.do}: restart_after_s belongs to kill: nothing else starts a process again then"
            )

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
        if not 0 < len(self.name.strip()) <= len(self.name) <= 100 or not self.name.isprintable():  # noqa: PLR2004
            raise ValueError("name: 1 to 100 printable characters, and not only blanks: it names the run's folder")
        _within("recover_within_s", self.recover_within_s, 1.0, SECONDS_MAX)
        _within("seed", self.seed, 0, SEED_MAX)
        d = self.deployment
        for fault in self.faults:
            for who in (fault.victim, fault.point.taken_by):
                _check_there(d, fault, who)
            if fault.point.restore and fault.point.refit <= 1:
                raise ValueError(f"faults: {fault}: in restore goes from refit 2 on; engines start with version 0")
            if fault.point.refit > d.trainer.refits:
                raise ValueError(f"faults: {fault}: there are {d.trainer.refits} refits")
            _check_servers(d, fault)
            if fault.do == "step_early" and d.trainer.ranks > 1:
                raise ValueError(f"faults: {fault}: of several ranks one alone would step, and the model fall apart")
            if d.coordinators and fault.do == "replace":
                raise ValueError(
                    f"faults: {fault}: the coordinators are no part of the trainer; stall the one that leads for "
                    f"longer than its lease, and another one replaces it"
                )


def _check_there(d: Deployment, fault: Fault, who: Who) -> None:
    nodes = len(d.engines_of_nodes)
    ends = [(who.role, who.index), *([] if who.to is None else [("relay", who.to)])]
    for role, index in ends:
        sizes = {"owner": d.trainer.ranks, "engine": d.engines, "receiver": d.engines, "relay": nodes}
        if index >= (size := sizes.get(role, 1)):
            raise ValueError(f"faults: {fault}: there is no {role}[{index}]; {role}[{size - 1}] is the last")
    if who.to is None:
        return
    if d.transport != "relay":
        raise ValueError(f"faults: {fault}: transport is {d.transport}, there is no relay")
    if ends[0] == ends[1]:
        raise ValueError(f"faults: {fault}: a relay has no link to itself")


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
