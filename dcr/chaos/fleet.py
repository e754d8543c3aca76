"""The processes of one scenario: what is started with what, and started again; and where all of it lies."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from dcr.chaos.child import RECORD, ChildConfig
from dcr.chaos.disk import Disk
from dcr.chaos.model import CHECKPOINT, make, train_step
from dcr.chaos.point import SERVERS, Who
from dcr.chaos.process import Child, ChildError
from dcr.chaos.proxy import Proxy
from dcr.chaos.run_folder import FolderError
from dcr.chaos.scenario import Scenario
from dcr.chaos.servers import BUCKET, S3_ENVIRONMENT, Etcd, Server, Store
from dcr.chaos.trainer_child import save
from dcr.chaos.trigger import Armed
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError, HistoryEntry
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import CommitRecord, decode_record
from dcr.runtime.channel_address import HubAddress
from dcr.runtime.registry import RelayDirectory, leader_address
from dcr.runtime.secret import load_or_create_secret
from dcr.runtime.shared_memory import SharedMemory

_RELAY = "heartbeat_s=0.5&peer_timeout_s=3&connect_timeout_s=3&fan_out=1"
_S3 = "region=us-east-1&retry_timeout_s=4&connect_timeout_s=1&answer_timeout_s=2&look_pause_s=0.01&look_pause_max_s=0.1"
_S3_RECORD = "region=us-east-1&connect_timeout_s=1&answer_timeout_s=2"
_WRITTEN_MEANWHILE_MAX = 8
"""Writes of K between a look at its revision and one at its history."""
_END = {"owner": "trainer-{}", "relay": "node-{}"}
"""The process at the sending end of a link of the relay."""
_RELAY_NAME = "node-{}"
"""Of the relay of a node, in its certificate."""
_FOREIGN_SEED = 987_654_321
_LEADER_TIMEOUT_S = 20.0
_LOOK_S = 0.05


class Fleet:
    """Everything of one run under one folder.

    Args:
        scenario: what to start.
        folder: of the run, empty or not there yet (``RunFolder``).
        bug: what is broken on purpose; empty for nothing.

    Raises:
        MissingServerError: a server that the scenario needs is not installed.
        RefusedError: a model cannot be made.
        FolderError: the checkpoints cannot be written.
    """

    def __init__(self, scenario: Scenario, folder: Path, bug: str = "") -> None:
        self.scenario = scenario
        self.folder = folder
        self.nodes: dict[str, Child] = {}
        self.trainers: dict[str, Child] = {}
        self.coordinators: dict[str, Child] = {}
        """Those that live elsewhere than in the trainer; one of them leads."""
        self.past: list[Child] = []
        """Processes that were replaced."""
        self.starts = 0
        self._bug = bug
        self._starts: dict[str, int] = {}
        self._servers: dict[str, Server] = {}
        self._proxies: dict[str, Proxy] = {}
        self._links: dict[tuple[str, str], Proxy] = {}
        """Those between a process and the relay of a node."""
        self.disk: Disk | None = None
        self._control: ControlPlane | None = None
        self.events = folder / "events"
        self.first = folder / "checkpoints" / "v0"
        self._foreign = folder / "foreign"
        model = make(scenario.deployment.model.trainer)
        of = scenario.deployment.model.trainer
        beside = Path(of.removeprefix(CHECKPOINT)) if of.startswith(CHECKPOINT) else None
        try:
            save(model, self.first, beside)
            train_step(model, _FOREIGN_SEED, 0.5)
            save(model, self._foreign, self.first)
        except (OSError, SafetensorError) as e:
            raise FolderError(f"{folder}: the checkpoints of version 0 cannot be written: {e}") from e

    # ------------------------------------------------------------ starting

    def start(self, armed: Sequence[Armed], of: dict[str, list[Armed]]) -> None:
        """Start servers, coordinators, trainer and nodes.

        Args:
            armed: at the trainer.
            of: at coordinators and nodes, by their names.
        """
        d = self.scenario.deployment
        if d.store_process:
            self._serve("store", Store(self.folder / "store"))
        if d.control == "etcd":
            self._serve("etcd", Etcd(self.folder / "etcd"))
        if d.transport == "relay":
            self._issue()
        if any(f.do == "fill" for f in self.scenario.faults):
            self.disk = Disk(self.folder)
        with _environment(self._credentials):
            self._control = open_control_plane(self._control_address(direct=True))
        self._set_proxies()
        for number in range(d.coordinators):
            self.start_coordinator(number, of.get(f"coordinator-{number}", []))
        self.start_trainer(self.first, armed)
        for number in range(len(d.engines_of_nodes)):
            self.start_node(number, of.get(f"node-{number}", []))

    def start_trainer(self, checkpoint: Path, armed: Sequence[Armed] = ()) -> None:
        """Start every training rank from a checkpoint."""
        d = self.scenario.deployment
        rendezvous = self.folder / f"rendezvous-{self._starts.get('trainer-0', 0)}"
        for rank in range(d.trainer.ranks):
            name = f"trainer-{rank}"
            if name in self.trainers:
                self.past.append(self.trainers[name])
            self.trainers[name] = self._child(
                "trainer",
                name,
                rank,
                armed,
                checkpoint=str(checkpoint),
                delivery=self._delivery_address("trainer"),
                factory=d.model.trainer,
                ranks=d.trainer.ranks,
                rendezvous=str(rendezvous),
            )

    def start_coordinator(self, number: int, armed: Sequence[Armed] = ()) -> None:
        """Start a coordinator, which leads when no other one does."""
        name = f"coordinator-{number}"
        if name in self.coordinators:
            self.past.append(self.coordinators[name])
        delivery = self._delivery_address(name)
        self.coordinators[name] = self._child("coordinator", name, number, armed, delivery=delivery)

    def start_node(self, number: int, armed: Sequence[Armed] = (), *, foreign: bool = False) -> None:
        """Start a node, its engines loaded from version 0 as any engine that starts anew.

        Args:
            number: of the node.
            armed: what strikes in it.
            foreign: load weights that were never pushed: no commits lead on from them, so they cannot catch up.
        """
        d = self.scenario.deployment
        name = f"node-{number}"
        if name in self.nodes:
            self.past.append(self.nodes[name])
        self.nodes[name] = self._child(
            "node",
            name,
            number,
            armed,
            checkpoint=str(self._foreign if foreign else self.first),
            delivery=self._delivery_address(name),
            factory=d.model.engine,
            engines=d.engines_of_nodes[number],
        )

    def _child(self, role: str, name: str, number: int, armed: Sequence[Armed], **fields: object) -> Child:
        self._starts[name] = start = self._starts.get(name, 0) + 1
        self.starts += 1
        config = ChildConfig(
            role=role,
            name=name,
            number=number,
            start=start,
            folder=str(self.folder),
            control=self._control_address(),
            settings={**self.scenario.deployment.all_settings, "event_log": str(self.events)},
            environment=self._credentials,
            armed=tuple(armed),
            bug=self._bug,
            channel=self._proxies[name].address if name in self._proxies else "",
            relays={to: proxy.port for (end, to), proxy in self._links.items() if end == name},
            **fields,  # type: ignore[arg-type]
        )
        return Child(config)

    def _serve(self, name: str, server: Server) -> None:
        self._servers[name] = server
        server.start()
        if any(f.do == "partition" and f.victim.role == name for f in self.scenario.faults):
            self._proxies[name] = Proxy(lambda: ("127.0.0.1", server.port))

    def _set_proxies(self) -> None:
        """Put one before every control channel and every link of the relay that a fault cuts."""
        for victim in {f.victim for f in self.scenario.faults if f.do == "partition"}:
            name = self.process_of(victim)
            if victim.to is not None:
                end, to = _END[victim.role].format(victim.index), _RELAY_NAME.format(victim.to)
                self._proxies[name] = self._links[end, to] = Proxy(partial(self._relay, to))
            elif victim.role not in SERVERS and name not in self._proxies:
                self._proxies[name] = Proxy(self._leader)

    def _issue(self) -> None:
        from dcr.credentials.authority import create_authority, issue  # noqa: PLC0415 - optional dependency

        authority = self.folder / "authority"
        create_authority(authority)
        d = self.scenario.deployment
        coordinators = [f"coordinator-{number}" for number in range(d.coordinators)]
        nodes = [f"node-{number}" for number in range(len(d.engines_of_nodes))]
        for name in ("trainer", *coordinators, *nodes):
            issue(authority, self.folder / "credentials" / name, name)

    # ------------------------------------------------------------ where things are

    def _control_address(self, *, direct: bool = False) -> str:
        control = self.scenario.deployment.control
        if control == "sqlite":
            return f"sqlite://{self.folder}/record.db"
        secret = self.folder / "run.secret"
        load_or_create_secret(secret)
        if control == "s3":
            endpoint = f"http://127.0.0.1:{self._port('store', direct=direct)}"
            return f"s3://{BUCKET}/record?endpoint={endpoint}&{_S3_RECORD}&secret={secret}"
        return f"etcd://127.0.0.1:{self._port('etcd', direct=direct)}/chaos?secret={secret}"

    def _delivery_address(self, name: str) -> str:
        match self.scenario.deployment.transport:
            case "s3":
                endpoint = f"http://127.0.0.1:{self._port('store')}"
                return f"s3://{BUCKET}/payloads?endpoint={endpoint}&{_S3}"
            case "relay":
                return f"relay://{self.folder}/credentials/{name}?{_RELAY}"
            case _:
                return f"file://{self.disk.payloads if self.disk else self.folder / 'payloads'}"

    def _port(self, server: str, *, direct: bool = False) -> int:
        proxy = self._proxies.get(server)
        return self._servers[server].port if direct or proxy is None else proxy.port

    @property
    def _credentials(self) -> dict[str, str]:
        return S3_ENVIRONMENT if self.scenario.deployment.store_process else {}

    def _leader(self) -> tuple[str, int] | None:
        assert self._control is not None
        address = leader_address(self._control, RECORD)
        if address is None:
            return None
        at = HubAddress.parse(address).at
        return at.host, at.port

    def _relay(self, name: str) -> tuple[str, int] | None:
        from dcr.delivery.relay.sender import decode_node  # noqa: PLC0415 - optional dependency

        assert self._control is not None
        entry = RelayDirectory(self._control, RECORD).nodes().get(name)
        if entry is None:
            return None
        node = decode_node(entry)
        return node.host, node.port

    # ------------------------------------------------------------ who

    @property
    def children(self) -> list[Child]:
        """Every process that is there now, zombies included."""
        zombies = [c for c in self.past if c.zombie]
        return [*self._present, *zombies]

    @property
    def everyone(self) -> list[Child]:
        """Every process that ever was."""
        return [*self.past, *self._present]

    @property
    def _present(self) -> list[Child]:
        return [*self.trainers.values(), *self.coordinators.values(), *self.nodes.values()]

    def processes_of(self, who: Who) -> tuple[str, ...]:
        """The names of the processes in which a role may live: any coordinator that lives elsewhere may lead."""
        count = self.scenario.deployment.coordinators
        if who.role == "coordinator" and count:
            return tuple(f"coordinator-{number}" for number in range(count))
        return (self.process_of(who),)

    def process_of(self, who: Who) -> str:
        """The name of the process in which a role lives now: the coordinator's is the one that leads.

        A link of the relay has a name of its own, which is its proxy's.

        Raises:
            ChildError: of several coordinators none leads, and none came to lead in a bounded time.
        """
        if who.to is not None:
            return str(who)
        match who.role:
            case "coordinator":
                return self._leading() if self.scenario.deployment.coordinators else "trainer-0"
            case "owner":
                return f"trainer-{who.index}"
            case "engine" | "receiver":
                of = self.scenario.deployment.engines_of_nodes
                return f"node-{next(number for number, engines in enumerate(of) if who.index in engines)}"
            case _:
                return who.role

    def child(self, name: str) -> Child:
        """The process of this name."""
        return self.trainers.get(name) or self.coordinators.get(name) or self.nodes[name]

    def _leading(self) -> str:
        assert self._control is not None
        deadline = time.monotonic() + _LEADER_TIMEOUT_S
        while True:
            with contextlib.suppress(ControlPlaneUnavailableError):
                lease = self._control.leader(RECORD)
                # A leader's name is that of its process, a hyphen and what makes it one of a kind (Standby).
                led_by = "" if lease is None else lease.holder
                name = next((n for n in self.coordinators if led_by.startswith(f"{n}-")), "")
                if name and not self.coordinators[name].gone:
                    return name
            if time.monotonic() > deadline:
                raise ChildError(f"for {_LEADER_TIMEOUT_S:g} s no coordinator has led, and a fault is to strike it")
            time.sleep(_LOOK_S)

    def server(self, name: str) -> Server:
        """The server of this name."""
        return self._servers[name]

    def proxy(self, name: str) -> Proxy:
        """What cuts the process of this name off."""
        return self._proxies[name]

    # ------------------------------------------------------------ the record

    def record(self, timeout_s: float = 20.0) -> CommitRecord | None:
        """K, read by the harness itself; None while there is none.

        Raises:
            DcrError: the control plane cannot be asked for so long.
        """
        assert self._control is not None
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                stored = self._control.read(RECORD)
            except RefusedError:
                raise
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                continue
            return None if stored is None else decode_record(stored.body)

    def history(self, after: int) -> list[HistoryEntry]:
        """The writes of K after this revision that the control plane still has, oldest first.

        Raises:
            DcrError: the control plane cannot be asked.
        """
        assert self._control is not None
        stored = self._control.read(RECORD)
        if stored is None or stored.revision <= after:
            return []
        entries = self._control.history(RECORD, stored.revision - after + _WRITTEN_MEANWHILE_MAX)
        return [entry for entry in entries[::-1] if entry.revision > after]

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """End every process, server and proxy, and unmount; what they wrote stays."""
        for child in self.everyone:
            child.kill()
        for proxy in self._proxies.values():
            proxy.close()
        if self._control is not None:
            self._control.close()
        for server in self._servers.values():
            server.kill()
        if self.disk is not None:
            self.disk.close()
        SharedMemory(RECORD, time.time_ns()).close()  # sweeps what the killed nodes left


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Give the harness, which reads the record itself, the credentials that its children have, while it opens it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def use_few_threads() -> None:
    """The harness computes twins beside the processes that it judges: one thread is enough."""
    torch.set_num_threads(1)
