"""The node agent of one engine: carries out the node role's effects on its gate and ranks (DESIGN D9)."""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import groupby

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.item import TensorSpec
from dcr.protocol import node as role
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.event import EVENT_LOG_VERSION, Start
from dcr.protocol.identity import Kind
from dcr.protocol.messages import CompareContents, OpenApply, Report, decode_order, encode_message
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, RankState
from dcr.protocol.record import Member, decode_record
from dcr.protocol.step import Step
from dcr.runtime.catch_up import CatchUp
from dcr.runtime.channel import Peer
from dcr.runtime.channel_address import ChannelAddress
from dcr.runtime.contents import ReadbackError, ReadbackReport
from dcr.runtime.event_log import EventLog
from dcr.runtime.fetch import Answers, Fetch
from dcr.runtime.gate_keeper import GateKeeper
from dcr.runtime.leader_wait import LeaderWait
from dcr.runtime.meeting import Meeting
from dcr.runtime.node_events import Arrived, Asked, Connected, Looked, Tables
from dcr.runtime.node_reports import NodeReports
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.progress import EngineStatus, Progress
from dcr.runtime.rank_messages import Attach, Learn, WireSpec
from dcr.runtime.ranks import Engine, RankLostError, Ranks
from dcr.runtime.reception import Inbox
from dcr.runtime.registry import leader_address
from dcr.runtime.secret import record_secret
from dcr.runtime.serving_wait import NodeError, ServingWait
from dcr.runtime.settings import Settings
from dcr.runtime.spoke import Spoke
from dcr.runtime.storage_check import StorageCheck

_log = logging.getLogger("dcr.node")


class NodeAgent:
    """One engine's agent; one thread does everything, in order, so that no order overtakes a write.

    Args:
        engine: the serving runtime's adapter.
        name: the engine's name, unique among the record's engines.
        record_id: the record it obeys.
        control: control plane.
        inbox: what the host receives, for this engine.
        secret: the secret of the run.
        specs: all canonical tensors of the engine's checkpoint.
        loaded_digest: content digest of what its loader was fed; empty if unknown.
        settings: bounds.
        observe: called with every step of the node role.
        checkpoint: content digests by tensor of what its loader was fed; storage that is taken to hold that is read
            back and compared before the engine joins.
        events: folder in which agent and ranks write their steps down; empty to write none.

    Raises:
        RefusedError: a rank cannot be attached to, or the credentials that the setting ``channel`` names are no good.
        ReadbackError: storage does not hold what the loader was fed; nothing was written.
        RankLostError: a rank did not answer.
        DcrError: the gate of an engine that an earlier agent left open would not close.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        record_id: str,
        control: ControlPlane,
        inbox: Inbox,
        secret: bytes,
        specs: Sequence[TensorSpec],
        loaded_digest: str,
        settings: Settings,
        observe: Observer = log_step,
        checkpoint: Mapping[str, ContentDigest] | None = None,
        events: str = "",
    ) -> None:
        credentials = ChannelAddress.parse(settings.channel).credentials()
        self._engine = engine
        self._name = name
        self._record_id = record_id
        self._control = control
        self._inbox = inbox
        self._settings = settings
        self._stop = threading.Event()
        self._wait = ServingWait(name, self._stop)
        self._gate = GateKeeper(
            engine,
            name,
            drain_timeout_s=settings.drain_timeout_s,
            lease_s=settings.serve_lease_s,
            changed=self._wait.look,
        )
        # The role starts with a closed gate; an agent before this one may have left it open.
        self._gate.close()
        tensors = tuple(WireSpec.of(s) for s in specs)
        self._ranks = Ranks(engine, name)
        events_max = settings.event_log_bytes_max
        self.attached = self._ranks.attach(
            Attach(name, record_id, tensors, loaded_digest, settings.stage_bytes_max, events, events_max)
        )
        self._storage = StorageCheck(self._ranks, name, self.attached.incarnation, specs)
        self._unread = False  # whether storage was written in a way that asks for a readback before it serves
        if checkpoint is not None and self._storage.as_loaded(loaded_digest):
            self._storage.read_back(checkpoint)
        self._role = role.Node(name, self.attached.incarnation, record_id, self._ranks.names)
        self._event_log = EventLog(events, "node", name, self.attached.incarnation, events_max)
        self._observe = self._event_log.before(observe)
        self._fetch: Fetch | None = None
        self._warned = ""
        self._unled = LeaderWait(_log, control, record_id)
        self._loaded = threading.Event()  # what storage holds when the engine joins is there
        self._catch_up = CatchUp(
            Member(name, self.attached.incarnation), record_id, control, inbox, self._ranks, self._storage, settings,
            self._stop,
        )  # fmt: skip
        self._events: queue.Queue[Arrived | Connected | Looked | Asked | Tables] = queue.Queue(settings.events_max)
        self._spoke = Spoke(
            record_secret(secret, record_id),
            Peer("node", name, self.attached.incarnation),
            lambda data: self._events.put(Arrived(data), timeout=settings.connect_timeout_s),
            # Not before there is something to tell it.
            resolve=lambda: leader_address(control, record_id) if self._loaded.wait() else None,
            credentials=credentials,
            on_connect=lambda: self._events.put(Connected(), timeout=settings.connect_timeout_s),
        )
        self._reports = NodeReports(name, self.attached, self._ranks, self._send)
        self._meeting = Meeting(
            name,
            record_id,
            control,
            inbox,
            lambda problem: self._events.put(Looked(problem), timeout=settings.connect_timeout_s),
            self._join,
        )
        self._progress = Progress(
            self._role, self._ranks, self._gate, self._spoke, self._meeting, record_id, self._catch_up
        )
        self._thread = threading.Thread(target=self._run, name=f"dcr-node-{name}", daemon=True)
        self._gate.start()
        self._thread.start()

    # ------------------------------------------------------------ for users

    @property
    def serving(self) -> int | None:
        """The version being served; None while the gate is closed."""
        return self._progress.serving

    @property
    def failure(self) -> str:
        """Why this engine cannot go on; empty while it can."""
        return self._progress.failure

    @property
    def hangs(self) -> str:
        """What keeps the gate from opening though it was ordered to, which should be quick; empty if nothing does."""
        return self._progress.hangs

    @property
    def status(self) -> EngineStatus:
        """What the engine does now, and why it does not serve if it does not."""
        return self._progress.status()

    def wait_serving(self, version: int, timeout_s: float) -> int:
        """Wait until this version or a later one is served, and return it.

        Raises:
            NodeError: the engine was refused or failed, or the time ran out.
        """
        return self._wait.for_version(self._progress, version, timeout_s)

    def readback(self, timeout_s: float) -> ReadbackReport:
        """Read storage back now, and compare it with the version that it is taken to hold; requests run meanwhile.

        Args:
            timeout_s: how long to wait for the answer: what the agent is at comes first.

        Raises:
            ReadbackError: it does not hold that version; the gate is closed by now, or closing, and the engine is out.
            RefusedError: it is not taken to hold any: an attempt is under way or has failed.
            NodeError: the engine is out already, or the time ran out.
        """
        asked = Asked(Future())
        if self._progress.failure or not self._thread.is_alive():
            raise NodeError(f"engine {self._name}: {self._progress.failure or 'its node is closed'}")
        self._events.put(asked, timeout=timeout_s)
        try:
            return asked.answer.result(timeout_s)
        except FutureTimeoutError:
            raise NodeError(f"engine {self._name}: no readback after {timeout_s} s: {self._progress.why()}") from None

    @property
    def ended(self) -> bool:
        """Whether nothing of the agent touches the engine any more: closed, and in no call to it that hangs."""
        return self._stop.is_set() and not self._thread.is_alive() and self._gate.ended

    def close(self) -> None:
        """End the agent's thread and connection; the engine's gate stays as it is.

        A rank that hangs is waited for no longer than ``drain_timeout_s``; ``ended`` says whether it was long enough.
        """
        self._stop.set()
        self._loaded.set()
        self._gate.stop()
        self._wait.look()
        self._spoke.close()
        self._thread.join(self._settings.drain_timeout_s)
        self._gate.join(self._settings.drain_timeout_s)
        if not self._thread.is_alive():
            self._event_log.close()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        next_poll = 0.0
        try:
            self._load()
            while not self._stop.is_set():
                busy = self._fetch is not None and self._fetch_step()
                try:
                    wait = 0.0 if busy else self._settings.fetch_poll_s if self._fetch is not None else 0.05
                    event = self._events.get(timeout=wait) if wait else self._events.get_nowait()
                    self._take(event)
                except queue.Empty:
                    pass
                if time.monotonic() >= next_poll:
                    next_poll = time.monotonic() + self._settings.record_poll_s
                    self._do([role.ReadRecord()])
                    self._check_lease()
                    self._follow_leader()
                self._meeting.look()
        except ReadbackError as e:
            self._give_up(str(e))
            self._leave()
        except RankLostError as e:
            self._give_up(f"lost with a rank of it: {e}; start the engine anew")
            self._leave()
        except BaseException as e:  # noqa: BLE001 - an engine's code may raise anything; told to whoever waits for it
            _log.exception("node agent of engine %s", self._name)
            self._give_up(f"its node agent failed: {type(e).__name__}: {e}")
            self._leave()

    def _load(self) -> None:
        """Bring storage to the committed version, if that can be done without the trainer; then the engine begins."""
        try:
            self._catch_up.run()
        finally:
            ranks, state = self._ranks.incarnations, self._ranks.state
            self._event_log.start(Start(EVENT_LOG_VERSION, self._record_id, ranks=ranks, state=state))
            self._loaded.set()

    def _leave(self) -> None:
        """Serve no more, and let nobody wait for orders that nobody obeys."""
        self._fetch = None
        self._progress.left = True
        self._inbox.leave()
        # The connection first: the leader goes on without this engine while its gate drains.
        for close in (self._spoke.close, self._gate.close):
            try:
                close()
            except BaseException as e:  # noqa: BLE001 - it may be the engine's code again that ended the agent
                _log.warning("engine %s, leaving: %s: %s", self._name, type(e).__name__, e)

    def _take(self, event: Arrived | Connected | Looked | Asked | Tables) -> None:
        match event:
            case Connected():
                self._meeting.begin()
            case Looked():
                self._meeting.found(event.problem)
            case Asked():
                self._storage.answer(event.answer, self._role.applying is not None, self._progress.why)
            case Tables():
                self._compare(event)
            case Arrived():
                self._obey(event)

    def _obey(self, event: Arrived) -> None:
        try:
            order = decode_order(event.data)
            if isinstance(order, CompareContents):
                wait_s = self._settings.connect_timeout_s
                self._inbox.tables(order.tables, lambda found: self._events.put(Tables(order, found), timeout=wait_s))
            else:
                self._do(self._role.order(order))  # type: ignore[arg-type]
        except RefusedError as e:
            _log.warning("order refused: %s", e)

    def _compare(self, event: Tables) -> None:
        answer = self._storage.compare(event.order, event.found)
        self._send(answer)
        if error := self._storage.error(answer):
            raise error

    def _do(self, effects: Sequence[role.Effect]) -> None:
        for order, same in groupby(effects, key=lambda e: e.order if isinstance(e, role.ToRank) else None):
            if order is None:
                for effect in same:
                    self._carry_out(effect)
                    self._progress.took(effect)
            else:
                # Every rank is given the same order: one call carries it to all of them.
                assert tuple(e.rank for e in same if isinstance(e, role.ToRank)) == self._ranks.names
                self._order(order)
        self._wait.look()

    def _carry_out(self, effect: role.Effect) -> None:  # noqa: C901, PLR0912 - one branch an effect
        match effect:
            case Step():
                self._observe(effect)
            case role.CloseGate():
                self._close_gate(effect.epoch)
            case role.OpenGate():
                self._open_gate(effect.epoch)
            case role.LetIn():
                self._gate.open(effect.version)
            case role.ReadRecord():
                self._read_record()
            case role.StartFetch():
                wanted = self._settings.readback
                if wanted == "always" or (wanted == "restore" and effect.order.base.kind is Kind.RESTORE):
                    self._unread = True
                ahead, timeout_s = self._settings.fetch_ahead, self._settings.delivery_timeout_s
                self._fetch = Fetch(effect.order, self._inbox, self._ranks.call, ahead=ahead, timeout_s=timeout_s)
                self._progress.fetches(self._fetch)
            case role.StopFetch():
                if self._fetch is not None and self._fetch.order.epoch <= effect.epoch:
                    self._fetch = None
                self._inbox.passed(effect.epoch)
            case role.AskToJoin():
                self._meeting.ask()
            case role.GiveUp():
                self._give_up(effect.reason)
            case role.ToRank():
                raise AssertionError("orders to ranks go out together: see _do")
            case _:
                self._reports.report(effect)

    # ------------------------------------------------------------ effects

    def _close_gate(self, epoch: int) -> None:
        self._progress.closes()
        try:
            self._gate.close(self._role.serving)
        except DcrError as e:
            self._do(self._role.gate_stuck(str(e)))
            return
        self._do(self._role.gate_closed(epoch))

    def _open_gate(self, epoch: int) -> None:
        if self._unread:
            self._storage.read_back()
            self._unread = False
        try:
            with self._progress.resetting():
                self._engine.reset_caches()
        except BaseException as e:  # noqa: BLE001 - a user's function may raise anything; the gate then stays closed
            self._do(self._role.gate_stuck(f"its caches could not be reset: {type(e).__name__}: {e}"))
            return
        try:
            effects = self._role.gate_ready(epoch)
        except RefusedError as e:
            self._warn(str(e))
            return
        # The step is said before the gate opens: a watcher that stops the process at it finds the gate closed.
        self._do(effects)

    def _read_record(self) -> None:
        asked_at = time.monotonic()  # it may be no newer than this when it comes
        try:
            stored = self._control.read(self._record_id)
        except ControlPlaneUnavailableError as e:
            self._warn(f"engine {self._name} could not read the record, and tries again: {e}")
            self._progress.went_wrong(f"the record could not be read: {e}")
            return
        if stored is None:
            return
        self._gate.renew(asked_at)
        record = decode_record(stored.body)
        self._event_log.k = stored.revision
        if self._fetch is not None and self._fetch.order.epoch < record.epoch:
            self._fetch = None  # that attempt can be committed no more
        self._inbox.passed(record.epoch - 1)
        try:
            effects = self._role.read(record)
        except RefusedError as e:
            self._warn(str(e))
        else:
            self._do(effects)
        answers = self._ranks.call(Learn(record))
        states = {rank: r for rank, a in answers.items() for r in a.results if isinstance(r, RankState)}
        for rank in answers.keys() - states.keys():  # it has started anew, or obeys another record
            raise RankLostError(f"rank {rank} would not learn the record: {answers[rank].refused}")
        self._progress.learned(record)
        self._do(self._role.learned(record, states))
        serving = self._role.serving
        if self._gate.withheld and serving is not None:
            self._gate.open(serving)  # nothing was written since it was open, and it was not closed meanwhile

    def _check_lease(self) -> None:
        """Serve nothing that may be stale: the record has not been read for too long (DESIGN D16)."""
        lease = self._settings.serve_lease_s
        if self._gate.stale:
            effects = self._role.record_lost()
            if effects:
                _log.warning("engine %s closes its gate: the record was not read for %s s", self._name, lease)
            self._do(effects)

    def _follow_leader(self) -> None:
        """Another trainer may lead this record by now; the old one may not know it yet."""
        try:
            self._spoke.follow()
        except ControlPlaneUnavailableError as e:
            self._warn(f"engine {self._name} could not look up the leader: {e}")
            return
        if self._spoke.connected:
            self._unled.over(f"engine {self._name}")
        else:
            serves = "nothing" if self.serving is None else f"version {self.serving}"
            self._unled.look(f"engine {self._name}, which serves {serves},", "and waits on until one comes")

    def _warn(self, text: str) -> None:
        """Log once what goes on being true."""
        if text != self._warned:
            self._warned = text
            _log.warning("%s", text)

    def _order(self, order: PrepareRank | OpenApply) -> None:
        if isinstance(order, PrepareRank):
            self._progress.ordered(order.order)
        self._settle(self._ranks.call(order), order.order.epoch if isinstance(order, PrepareRank) else order.epoch)

    def _fetch_step(self) -> bool:
        fetch = self._fetch
        assert fetch is not None
        answers = fetch.step()
        for answer in answers:
            self._settle(answer)
        if self._fetch is fetch and fetch.done:
            self._fetch = None
        return bool(answers)

    def _settle(self, answers: Answers, ordered: int | None = None) -> None:
        """Tell the role what each rank answered; one may refuse, or fail, while the others go on."""
        for rank, answer in answers.items():
            if answer.refused:
                _log.warning("engine %s, rank %s: %s", self._name, rank, answer.refused)
                if ordered is not None:  # an order that is refused will not be carried out: nobody need wait for it
                    self._do(self._role.rank_failed(rank, RankFailed(ordered, answer.refused)))
            for result in answer.results:
                match result:
                    case RankPrepared():
                        self._do(self._role.rank_prepared(rank, result))
                    case RankStaged():
                        self._do(self._role.rank_staged(rank, result))
                    case RankAcknowledged():
                        self._do(self._role.rank_acknowledged(rank, result))
                    case RankFailed():
                        self._do(self._role.rank_failed(rank, result))

    # ------------------------------------------------------------ the leader

    def _join(self) -> None:
        if self._spoke.connected:  # else the next connection begins with it
            self._progress.joins(self._ranks.state)
            self._reports.join()

    def _send(self, report: Report) -> None:
        self._spoke.send(encode_message(report))

    def _give_up(self, reason: str) -> None:
        self._progress.gives_up(reason)
        self._wait.look()
