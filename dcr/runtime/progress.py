"""What an operator sees of one engine: a line in the log at each turn, and why its gate is not open."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dcr.protocol import node as role
from dcr.protocol.identity import Kind
from dcr.protocol.messages import Prepare, StorageState
from dcr.protocol.record import CommitRecord, Member
from dcr.protocol.step import Step
from dcr.runtime.catch_up import CatchUp
from dcr.runtime.fetch import Fetch
from dcr.runtime.gate_keeper import GateKeeper
from dcr.runtime.meeting import Meeting
from dcr.runtime.ranks import Ranks
from dcr.runtime.refit_status import LastMove, RefitStatus, StageStatus, Told, utc
from dcr.runtime.spoke import Spoke

_log = logging.getLogger("dcr.node")
_COMMIT = "the commit"
_RESETTING = "reset_caches (the gate's opening)"
_LETTING_IN = "open_gate (the gate's opening)"
_AGAIN_FIRST_S, _AGAIN_LAST_S = 1.0, 60.0
"""An engine that stays out of service for one reason is told of again after so many seconds; then each pause is twice
the one before, up to the second number."""


class EngineStatus(Told, frozen=True):
    """One engine as of now; nothing in it is secret."""

    engine: str
    version: int | None
    """The version being served; None while the gate lets nobody in."""
    gate: str
    """``open``, ``closing`` (those inside still run) or ``closed``."""
    reason: str
    """Why the gate is not open; empty while it is."""
    since: str
    """Since when the gate is as it is, or the engine is out of service: UTC, ISO 8601."""
    failed: bool
    """The engine is out of service: it does not serve again by itself.  Unless its caches could not be reset, as the
    reason then says: that is tried again at every look at the record."""
    last_error: str
    """The last thing that went wrong, which may be over; empty if nothing did."""
    refit: RefitStatus | None = None
    """How far the attempt or restore is that is under way here; None if none is."""

    def __str__(self) -> str:
        serves = f"serves version {self.version}" if self.version is not None else f"gate {self.gate}"
        failed = ", out of service" if self.failed else ""
        why = "" if not self.reason else f": {self.reason}"
        last = "" if not self.last_error or self.last_error in self.reason else f"; last error: {self.last_error}"
        refit = "" if self.refit is None else f"; {self.refit}"
        return f"engine {self.engine} {serves} since {self.since}{failed}{why}{last}{refit}"


class Progress:
    """Follows one engine's node role; fed by the agent's thread, asked from any.

    Args:
        node: the role.
        ranks: the engine's ranks.
        gate: its gate and its lease.
        spoke: the connection to the leader.
        meeting: whether it may join.
        record_id: the record that the engine obeys.
        catch_up: what it does before it joins.
    """

    def __init__(  # noqa: PLR0917 - all that there is to tell of
        self,
        node: role.Node,
        ranks: Ranks,
        gate: GateKeeper,
        spoke: Spoke,
        meeting: Meeting,
        record_id: str,
        catch_up: CatchUp,
    ) -> None:
        self._node = node
        self._ranks = ranks
        self._gate = gate
        self._spoke = spoke
        self._meeting = meeting
        self._record_id = record_id
        self._catch_up = catch_up
        self._order: Prepare | None = None
        self._fetch: Fetch | None = None
        self._moved = LastMove()
        self._resetting: float | None = None  # since when
        self._ended = ""  # what is waited for once this engine has done what it could of the order
        self._record: CommitRecord | None = None
        self._since = time.time()
        self._closing = self._since
        self.left = False
        """The agent obeys nobody any more, and lets nobody in, whatever the role holds the gate for."""
        self.failure = ""
        """Why the engine cannot go on; empty while it can."""
        self._last_error = (0.0, "")  # when, and what
        self._tell_again = self._tell_pause = 0.0  # when, on the monotonic clock, and how long after the last time

    # ------------------------------------------------------------ what happens

    def joins(self, state: StorageState) -> None:
        """The leader is told what the engine is."""
        _log.info("engine %s asks record %r to let it in: %s", self._node.engine, self._record_id, _held(state))

    def ordered(self, order: Prepare) -> None:
        """Every rank is told to prepare."""
        self._order, self._fetch, self._ended = order, None, ""
        self._moved = LastMove()
        _log.info("engine %s prepares epoch %d: %s", self._node.engine, order.epoch, _what(order))

    def fetches(self, fetch: Fetch) -> None:
        """Payloads are fetched from here on."""
        self._fetch = fetch

    def learned(self, record: CommitRecord) -> None:
        """Every rank has learned K."""
        self._record = record
        if self._order is not None and record.epoch > self._order.epoch:
            self._order = self._fetch = None

    def closes(self) -> None:
        """The gate begins to close."""
        self._closing = time.time()

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """The gate is ordered to open, and the engine's caches are reset before it is."""
        self._resetting = time.time()
        try:
            yield
        finally:
            self._resetting = None

    def took(self, effect: role.Effect) -> None:
        """The agent has carried this out."""
        name = self._node.engine
        match effect:
            case Step(action="GateClosed"):
                drained_s = time.time() - self._closing
                self._since = self._closing
                _log.info("engine %s: gate closed, after %.0f ms of draining", name, 1e3 * drained_s)
            case role.ReportPrepared():
                _log.info("engine %s prepared epoch %d", name, effect.epoch)
            case role.ReportAcknowledged():
                self._ended = _COMMIT
                seconds = self._ranks.seconds
                stages = ", ".join(f"{stage} {s:.3f} s" for stage, s in sorted(seconds.items()))
                _log.info(
                    "engine %s applied epoch %d: %d bytes in %.3f s (%s); delivery to its host meanwhile: %s",
                    name,
                    effect.epoch,
                    0 if self._fetch is None else self._fetch.bytes,
                    sum(seconds.values()),
                    stages,
                    "nothing" if self._fetch is None else self._fetch.traffic,
                )
            case role.ReportFailed():
                self._ended = "the next attempt: this one failed here"
                self.went_wrong(f"epoch {effect.epoch} failed here: {effect.reason}")
                _log.warning("engine %s: epoch %d failed here: %s", name, effect.epoch, effect.reason)
            case role.LetIn():
                self._order = self._fetch = None
                closed, self._since = self._since, time.time()
                _log.info(
                    "engine %s serves version %d; its gate was closed for %.0f ms",
                    name,
                    effect.version,
                    1e3 * (self._since - closed),
                )
            case role.ReportServing():
                self.failure = ""

    def went_wrong(self, text: str) -> None:
        """Something failed that need not be the end."""
        self._last_error = time.time(), text

    def gives_up(self, reason: str) -> None:
        """The engine is out of service; of one that tries again and again, this comes each time.

        What has not changed since the last time keeps its times, and is logged less and less often.
        """
        now, same = time.monotonic(), self.failure == reason
        if not same or self._last_wrong[1] != reason:  # something else went wrong since: then this is the last again
            self.went_wrong(reason)  # first: who sees that it failed sees this
        if not self.failure:
            self._since = time.time()
        self.failure = reason
        if same and now < self._tell_again:
            return
        self._tell_pause = min(2 * self._tell_pause, _AGAIN_LAST_S) if same else _AGAIN_FIRST_S
        self._tell_again = now + self._tell_pause
        still = f"still out of service, since {utc(self._since)}" if same else "out of service"
        _log.error("engine %s is %s: %s", self._node.engine, still, reason)

    # ------------------------------------------------------------ what is asked

    @property
    def last_error(self) -> str:
        """What went wrong last, with its time: UTC, ISO 8601; empty if nothing did.

        What keeps an engine out of service, and goes wrong again each time it is tried, has the time of the first.
        It stays when the leader is gone: that nobody leads is no error of this engine.
        """
        at, text = self._last_wrong
        return f"{utc(at)} {text}" if text else ""

    @property
    def _last_wrong(self) -> tuple[float, str]:
        """When something went wrong last, on the wall clock, and what."""
        elsewhere = (self._spoke.refused, self._meeting.last_problem)
        return max([self._last_error, *(found for found in elsewhere if found is not None)])

    @property
    def serving(self) -> int | None:
        """The version being served; None while the gate lets nobody in."""
        nobody = self.left or self._gate.withheld or self._gate.opening_since is not None
        return None if nobody else self._node.serving

    @property
    def hangs(self) -> str:
        """What keeps the gate from opening though it was ordered to, which should be quick; empty if nothing does."""
        if (opening := self._opening) is None:
            return ""
        call, since = opening
        return f"{call}, which has not returned for {time.time() - since:.0f} s"

    @property
    def _opening(self) -> tuple[str, float] | None:
        """Which of the engine's functions that open the gate is running, and since when."""
        resetting, letting_in = self._resetting, self._gate.opening_since
        if resetting is not None:
            return _RESETTING, resetting
        return None if letting_in is None else (_LETTING_IN, letting_in)

    def status(self) -> EngineStatus:
        """The engine as of now."""
        serving, closing = self.serving, self._node.gate == "closing"
        gate = "closing" if closing else "closed" if serving is None else "open"
        reason = self.why() if gate != "open" or self.failure else ""
        version = serving if gate == "open" else None
        failed = bool(self.failure)
        return EngineStatus(
            self._node.engine, version, gate, reason, utc(self._since), failed, self.last_error, self.refit()
        )

    def refit(self) -> RefitStatus | None:
        """How far the attempt or restore is that is under way; None if none is."""
        order, fetch = self._order, self._fetch
        if self.failure:
            return None
        if order is None:
            return self._catch_up.status()
        taken, total, size = (0, None, 0) if fetch is None else (fetch.payloads, fetch.total, fetch.bytes)
        seconds = self._ranks.seconds if taken else {}  # else they may be those of an older epoch
        writes = self._node.applying == order.epoch
        written = taken if not order.stage or self._ended == _COMMIT else taken - self._ranks.held if writes else 0
        received = StageStatus("receive", taken, "payloads", total, 0 if fetch is None else fetch.traffic.bytes_down)
        decoded = StageStatus("decode", taken, "payloads", total, seconds=seconds.get("decode", 0.0))
        applied = StageStatus("apply", written, "payloads", total, seconds=seconds.get("apply", 0.0))
        staged = (StageStatus("stage", taken, "payloads", total, size),) if order.stage else ()
        held = self._held_up_by(order, fetch)
        return self._moved.status(order.epoch, _what(order), (received, decoded, *staged, applied), held)

    def _held_up_by(self, order: Prepare, fetch: Fetch | None) -> str:
        """What the attempt waits for here."""
        if (opening := self._opening) is not None:
            return opening[0]
        applying = self._node.applying == order.epoch
        if self._ended:
            return self._ended
        if fetch is None:
            return "prepare: this engine's gate and ranks, or those of others"
        if fetch.with_ranks:
            return "decode and apply" if not order.stage else "decode"
        if not fetch.done:
            return f"receive: {fetch.waits_for}"
        return "apply" if applying else "the other engines, and the leader's order to apply"

    def why(self) -> str:
        """What an engine that does not serve waits for."""
        order, record, node = self._order, self._record, self._node
        if self.failure:
            return f"it is out of service: {self.failure}"
        if hangs := self.hangs:  # before the lease, which runs out meanwhile: the record is read in the same thread
            return f"it waits for {hangs}"
        if self._gate.stale and record is not None:
            since = time.time() - self._gate.age_s
            return f"lease of the record lost: it was last read at {utc(since)} ({self.last_error or 'no error'})"
        if self._catch_up.doing:
            return f"it has not joined yet: it {self._catch_up.doing}"
        if not self._spoke.connected:
            trouble, last = self._spoke.trouble, self.last_error
            before = f"; its last error: {last}" if last and not last.endswith(trouble) else ""
            return (
                f"no coordinator reached: it has no connection to a trainer that leads record {self._record_id!r}; is "
                f"one running, with the same control plane? ({trouble}){before}"
            )
        if self._meeting.problem:
            return f"it does not ask to be let in: {self._meeting.problem}"
        if order is not None:
            return f"{_what(order)}, epoch {order.epoch}"
        if record is None or Member(node.engine, node.incarnation) not in record.members:
            return f"the coordinator has not admitted this engine yet; {_held(self._ranks.state)}"
        if record.open is not None:
            return f"a transition is open (version {record.version} -> {record.open.target}); {self._held()}"
        return f"{self._held()}; see the trainer's log for what it does"

    def _held(self) -> str:
        return f"its gate is {self._node.gate}, {_held(self._ranks.state)}"


def _held(state: StorageState) -> str:
    held = "no known version" if state.version is None else f"version {state.version}"
    torn = f", torn by {', '.join(state.torn_by)}" if state.torn_by else ""
    return f"its storage holds {held}{torn}"


def _what(order: Prepare) -> str:
    """What an order is for."""
    base = order.base
    if base.kind is Kind.RESTORE:
        return f"restoring version {order.target}"
    back = order.target == base.version
    versions = f"back to version {order.target}" if back else f"version {base.version} -> {order.target}"
    return f"a transition is being applied: {versions}, {base.kind.value}"
