"""The coordinator host: carries out the coordinator role's effects; by default in the trainer's first rank."""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from dcr.control_plane.interface import ControlPlane
from dcr.control_plane.lease import LeadershipLostError, Lease
from dcr.data_plane.payload import WIRE_VERSION
from dcr.delivery.interface import Delivery
from dcr.delivery.meeting import leave_sign
from dcr.protocol import coordinator_effects as effects_
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.event import EVENT_LOG_VERSION, Start
from dcr.protocol.messages import (
    Acknowledged,
    AttemptFailed,
    CandidateReady,
    ContentsCompared,
    ContentsShown,
    Intervene,
    Join,
    Order,
    Outcome,
    Prepared,
    Serving,
    Staged,
    Verify,
    cut,
    decode_report,
    encode_message,
)
from dcr.protocol.record import OwnerRef
from dcr.protocol.step import Step
from dcr.runtime.channel import Connected, Disconnected, HubEvent, Peer, Received
from dcr.runtime.channel_address import ChannelAddress
from dcr.runtime.committed_attempt import CommittedAttempt
from dcr.runtime.event_log import EventLog
from dcr.runtime.fleet_status import FleetStatus, fleet_status, not_admitted
from dcr.runtime.hub import Hub
from dcr.runtime.intervention import intervened
from dcr.runtime.kept_order import KeptOrder
from dcr.runtime.leader_record import LeaderError, LeaderRecord
from dcr.runtime.leadership import Leadership, take_lease, why_lost
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.registry import leader_address, register_leader, register_meeting
from dcr.runtime.roster import roster, why_stranger
from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings
from dcr.runtime.sweeper import Sweeper
from dcr.runtime.verification import Verification

_log = logging.getLogger("dcr.coordinator")
_STATUS_S = 0.2
"""How old the status may be."""
_SILENT_S = 10.0
"""A node that is connected for so long and asks for nothing is told of."""
_MEMBER_REPORTS = (Join, Prepared, Staged, Acknowledged, AttemptFailed, Serving, ContentsCompared)
_SWEEPS = ("Commit", "OpenAttempt", "OpenRestore")
"""Writes of K after which older epochs are nobody's any more."""
_ABOUT_LEADING = "this coordinator leads no more"


class CoordinatorHost:
    """One coordinator, its hub, and its thread: it leads once, for the ranks of one start of a trainer.

    Args:
        record_id: the record to lead.
        leader: a name new with every start.
        owners: all owners, as the incarnations that the trainer has started; no other is let in.
        control: control plane.
        delivery: delivery store, swept of old epochs after a commit.
        secret: the secret of the run.
        settings: bounds.
        observe: called with every step of the coordinator role.
        events: folder in which the coordinator writes its steps down; empty to write none.
        lease: the one to lead by, of this leader, where several coordinators wait for the trainer's roster: it leads
            for as long as the roster is that of ``owners``, and whom it leads finds its successor in the registry.
            The trainer has said where it delivers.  None in a trainer that has its own: the lease of an older leader is
            taken over at once, an end of the leadership ends every push, and it says where this trainer delivers.

    Attributes:
        ended: set when it leads no more by itself; ``failure`` says why.

    Raises:
        RefusedError: the credentials that the setting ``channel`` names are no good, or it cannot listen there.
        LeaseHeldError: others that start take the lease of leadership again and again.
        ControlPlaneUnavailableError: the control plane could not be asked.
    """

    def __init__(
        self,
        *,
        record_id: str,
        leader: str,
        owners: Sequence[OwnerRef],
        control: ControlPlane,
        delivery: Delivery,
        secret: bytes,
        settings: Settings,
        observe: Observer = log_step,
        events: str = "",
        lease: Lease | None = None,
    ) -> None:
        channel = ChannelAddress.parse(settings.channel)
        credentials = channel.credentials()
        self._record_id = record_id
        self._leader = leader
        self._control = control
        self._settings = settings
        self._owners = tuple(sorted(owners))
        names = [o.owner for o in self._owners]
        self._succeeded = lease is not None  # somebody else may lead the same owners after this one
        self._event_log = EventLog(events, "coordinator", leader, 0, settings.event_log_bytes_max)
        self._event_log.start(Start(EVENT_LOG_VERSION, record_id, gate_mode=settings.gate_mode))
        self._observe = self._event_log.before(observe)
        others = tuple(o for o in ("add", "xor") if o != settings.operation)
        self._role = Coordinator(
            record_id,
            leader,
            names,
            wire_version=WIRE_VERSION,
            operations=(settings.operation, *others),
            members_min=settings.members_min,
            attempts_max=settings.attempts_max,
            restores_max=settings.restores_max,
            gate_mode=settings.gate_mode,
            stop_waits=settings.stopped_push == "wait",
            rejoin_waits=self._succeeded,
        )
        self._peers: dict[tuple[str, str], Peer] = {}
        self._verification = Verification(
            record_id,
            names,
            lambda role, name, order: self._send(role, name, encode_message(order)),
            lambda: not_admitted(self._role, self._nodes),
            settings.verify_timeout_s,
        )
        self._kept = KeptOrder(control, record_id)
        self._deadline: tuple[float, int] | None = None
        self.failure = ""
        self.lost = False
        """It leads no more because somebody else may, and not because it failed."""
        self.ended = threading.Event()
        self._status = fleet_status(self._role)
        self._silent: dict[Peer, float] = {}  # nodes that ask for nothing, and when that is told
        self._stop = threading.Event()
        self._events: queue.Queue[Callable[[], Sequence[effects_.Effect]]] = queue.Queue(settings.events_max)
        try:
            self._hub = Hub(
                record_secret(secret, record_id),
                self._heard,
                listen=channel.listen,
                advertise=channel.advertise,
                credentials=credentials,
                refuse=self._why_not,
            )
        except OSError as e:
            raise RefusedError(
                f"setting channel: listening at {channel.listen}: {e.strerror}; give an address of this machine, and a "
                f"port that is free"
            ) from e
        self._sweeper = Sweeper(delivery, record_id, settings.retain_versions)
        with contextlib.ExitStack() as half_done:
            half_done.callback(self._hub.close)
            half_done.callback(self._sweeper.close)
            held = lease or take_lease(control, record_id, leader, settings.leader_lease_s)
            self._leadership = Leadership(control, held, self._lease_lost)
            half_done.callback(self._leadership.close)
            self._record = LeaderRecord(
                control,
                self._role,
                held,
                lambda effects: self._post(lambda: effects),
                self._stop,
                before_attempt=self._kept.look,
            )
            if not self._succeeded:
                register_meeting(control, record_id, leave_sign(delivery, record_id, leader))
            register_leader(control, record_id, self._hub.address)
            half_done.pop_all()
        self._thread = threading.Thread(target=self._loop, name="dcr-coordinator", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where owners and nodes reach it; see ``channel_address.HubAddress``."""
        return self._hub.address

    @property
    def status(self) -> FleetStatus:
        """Whom it waits for, as of a moment ago."""
        return self._status

    def abandon(self) -> None:
        """Abandon a stopped transition; torn engines are restored (DESIGN D17)."""
        self._post(self._role.abandon)

    def roll_back(self) -> None:
        """Turn the open transition back to the committed version, if one is open (DESIGN D17)."""
        self._post(self._role.roll_back)

    def close(self) -> None:
        """End the thread and every connection."""
        self._stop.set()
        self._hub.close()
        self._thread.join(self._settings.drain_timeout_s)
        self._sweeper.close()
        self._leadership.close()
        if not self._thread.is_alive():
            self._event_log.close()

    # ------------------------------------------------------------ events

    def _post(self, act: Callable[[], Sequence[effects_.Effect]]) -> None:
        self._events.put(act, timeout=self._settings.connect_timeout_s)

    def _heard(self, event: HubEvent) -> None:
        self._post(lambda: self._on_channel(event))

    def _on_channel(self, event: HubEvent) -> Sequence[effects_.Effect]:
        peer = event.peer
        match event:
            case Connected():
                self._peers[peer.role, peer.name] = peer
                return []
            case Disconnected():
                if self._peers.get((peer.role, peer.name)) == peer:
                    del self._peers[peer.role, peer.name]
                _log.info("%s %s disconnected: %s", peer.role, peer.name, event.reason)
                self._verification.lost(peer)
                if peer.role == "operator":
                    return []
                if peer.role == "owner":
                    return self._role.owner_lost(peer.name, peer.incarnation)
                return self._role.member_lost(peer.name, peer.incarnation)
            case Received():
                return self._on_report(peer, event.message)

    def _on_report(self, peer: Peer, data: bytes) -> Sequence[effects_.Effect]:
        report = decode_report(data)
        # A peer speaks for itself alone: the channel has proved who it is.
        if isinstance(report, Verify):
            if peer.role != "operator":
                raise RefusedError(f"{peer} asked for a verification, which is an operator's to ask")
            self._verification.begin(peer, report, self._role.record)
            return []
        if isinstance(report, Intervene):
            return self._intervene(peer, report)
        if isinstance(report, _MEMBER_REPORTS):
            if ("node", report.engine, report.incarnation) != (peer.role, peer.name, peer.incarnation):
                raise RefusedError(f"{peer} sent a report in the name of engine {report.engine}")
            if isinstance(report, ContentsCompared):
                self._verification.compared(report)
                return []
            return self._role.member_report(report)
        if ("owner", report.owner, report.incarnation) != (peer.role, peer.name, peer.incarnation):
            raise RefusedError(f"{peer} sent a report in the name of owner {report.owner}")
        if isinstance(report, ContentsShown):
            self._verification.shown(report)
            return []
        if self.failure and isinstance(report, CandidateReady):
            self._tell_failure(peer.name)
        return self._role.owner_report(report)

    def _intervene(self, operator: Peer, order: Intervene) -> Sequence[effects_.Effect]:
        if operator.role != "operator":
            raise RefusedError(f"{operator} gave an order about the transition, which is an operator's to give")
        self._status = fleet_status(self._role)
        answer, effects = intervened(self._role, order, self._status, self._kept, self._nodes)
        self._send("operator", operator.name, encode_message(answer))
        return effects

    def _why_not(self, peer: Peer) -> str:
        """Why a peer is not let in: an owner of another trainer, which may have started a moment ago."""
        return why_stranger(self._owners, peer.name, peer.incarnation) if peer.role == "owner" else ""

    def _loop(self) -> None:
        next_look = next_status = 0.0
        while not self._stop.is_set():
            wait = 0.1
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + _STATUS_S
                try:
                    self._take_stock()
                except Exception:  # noqa: BLE001 - what is told of must not suffer from the telling
                    _log.exception("coordinator %s: its status could not be told", self._leader)
            self._act(self._verification.look)
            if time.monotonic() >= next_look and not self.failure:
                next_look = time.monotonic() + self._settings.record_poll_s
                self._act(self._look)
            if self._deadline is not None:
                deadline, number = self._deadline
                wait = min(wait, deadline - time.monotonic())
                if wait <= 0:
                    self._deadline = None
                    self._act(lambda n=number: self._role.expired(n))  # type: ignore[misc]
                    continue
            try:
                self._act(self._events.get(timeout=wait))
            except queue.Empty:
                continue

    @property
    def _nodes(self) -> list[tuple[str, int]]:
        """Names and incarnations of the engines whose nodes are connected."""
        return [(peer.name, peer.incarnation) for (role, _), peer in self._peers.items() if role == "node"]

    def _take_stock(self) -> None:
        """Bring the status up to date, and tell once of what nobody would look for there."""
        next_dense = self._status.next_dense
        nodes = {peer for (role, _), peer in self._peers.items() if role == "node"}
        self._status = fleet_status(self._role, self._nodes, self._hub.refused)
        if self._status.next_dense not in ("", next_dense):
            _log.warning("%s: the next push sends every element: %s", self._record_id, self._status.next_dense)
        now = time.monotonic()
        silent = {peer for peer in nodes if peer.name in self._status.not_joined}
        self._silent = {peer: self._silent.get(peer, now + _SILENT_S) for peer in silent}
        for peer, due in self._silent.items():
            if now >= due:
                self._silent[peer] = math.inf
                _log.warning(
                    "%s is connected and has not asked to be let in for %.0f s: does it look where this trainer "
                    "delivers? Its own log says why",
                    peer,
                    _SILENT_S,
                )

    def _act(self, act: Callable[[], Sequence[effects_.Effect]]) -> None:
        try:
            effects = list(act())
            while effects and not self.failure:  # who leads no more writes and orders nothing
                effects = self._do(effects)
        except RefusedError as e:
            _log.warning("refused: %s", e)
        except LeaderError as e:
            self._lead_no_more(str(e), lost=e.lost)
        except BaseException as e:  # noqa: BLE001 - told to every owner, so that no push waits in vain
            _log.exception("coordinator %s", self._leader)
            self._lead_no_more(f"the coordinator failed: {type(e).__name__}: {e}")

    # ------------------------------------------------------------ effects

    def _do(self, effects: Sequence[effects_.Effect]) -> list[effects_.Effect]:
        """Carry out effects in order; returns the effects of the control plane's answers."""
        more: list[effects_.Effect] = []
        for effect in effects:
            match effect:
                case Step():
                    self._observe(effect)
                    if effect.action in _SWEEPS:
                        c = None if self._role.record is None else self._role.record.committed
                        self._sweeper.sweep(effect.epoch - self._settings.retain_epochs, 0 if c is None else c.epoch)
                    if effect.action == "OpenAttempt":
                        more += self._due()  # before anything of it can be committed
                case effects_.ReadRecord():
                    more += self._record.read()
                case effects_.WriteRecord():
                    if effect.reason == "Commit" and self._role.record is not None:
                        self._sweeper.leave(CommittedAttempt.of(self._role.record, effect.record))
                    more += self._record.write(effect)
                case effects_.SendMember():
                    self._send("node", effect.engine, encode_message(effect.order))
                case effects_.SendOwner():
                    self._send("owner", effect.owner, encode_message(self._explained(effect.order)))
                case effects_.StartTimer():
                    seconds = float(getattr(self._settings, f"{effect.name}_timeout_s"))
                    self._deadline = (time.monotonic() + effect.times * seconds, effect.number)
                case effects_.Fatal():
                    self._lead_no_more(effect.reason, lost=not self._leadership.stands)
        return more

    def _explained(self, order: Order) -> Order:
        """A push that failed is also told of who is there and takes no part: perhaps that is what was missing."""
        if not isinstance(order, Outcome):
            return order
        # Whoever hears that a push is over, and looks, is not to see it go on.
        self._status = fleet_status(self._role, self._nodes, self._hub.refused)
        if not order.error or not self._status.strangers:
            return order
        return msgspec.structs.replace(order, error=cut(f"{order.error}; {self._status.strangers}"))

    def _send(self, role: str, name: str, data: bytes) -> bool:
        peer = self._peers.get((role, name))
        return peer is not None and self._hub.send(peer, data)

    def _look(self) -> list[effects_.Effect]:
        """Somebody else may lead by now, though this one had nothing to write; or lead nobody, by an older address."""
        effects = self._record.look()
        if effects:
            return effects
        try:
            if self._succeeded:
                self._look_at_roster()
            if leader_address(self._control, self._record_id) != self.address:
                register_leader(self._control, self._record_id, self.address)
        except DcrError as e:
            _log.warning("coordinator %s could not look at the registry: %s", self._leader, e)
            return []
        return self._due()

    def _due(self) -> list[effects_.Effect]:
        """What an operator ordered of an earlier leader."""
        try:
            return self._kept.due(self._role)
        except DcrError as e:
            _log.warning("coordinator %s could not look for an operator's order: %s", self._leader, e)
            return []

    def _look_at_roster(self) -> None:
        asked = roster(self._control, self._record_id)
        if asked is None or asked.owners != self._owners:
            raise LeaderError("the trainer that it leads was started again, or is replaced", lost=True)
        if asked.closed:
            raise LeaderError("the trainer that it leads was closed", lost=True)

    def _lease_lost(self, error: LeadershipLostError) -> None:
        def act() -> Sequence[effects_.Effect]:
            raise LeaderError(why_lost(error), lost=True) from error

        with contextlib.suppress(queue.Full):  # the next write finds it out too
            self._post(act)

    def _lead_no_more(self, reason: str, *, lost: bool = False) -> None:
        """Let every peer look for the next leader; owners that have none are told, so that no push waits in vain."""
        if self.failure:
            return
        self.failure, self.lost = reason, lost
        level = logging.WARNING if lost and self._succeeded else logging.ERROR
        _log.log(level, "coordinator %s leads no more: %s", self._leader, reason)
        for role, name in list(self._peers):
            if role == "owner" and not (lost and self._succeeded):
                self._tell_failure(name)
            else:
                self._hub.drop(self._peers[role, name], _ABOUT_LEADING)
        if not lost:
            self._leadership.close()  # who renewed it on would be taken for a leader that is well
        self.ended.set()

    def _tell_failure(self, owner: str) -> None:
        error = f"the coordinator leads no more: {self.failure}"
        self._send("owner", owner, encode_message(Outcome(self._record_id, 0, -1, "", error, {})))
