"""Catching up: an engine that starts from an older version reaches the committed one by the payloads that are kept.

It happens before the engine asks to be let in, so to the protocol it is a part of loading: the engine is whatever its
storage holds afterwards, and is let in if that digests to K's baseline (DESIGN D2, D15).  Nothing rests on its being
right.  Whatever goes wrong leaves storage marked as unknown, and the engine is restored by the trainer.
"""

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.delivery.interface import Delivery
from dcr.protocol.errors import DcrError
from dcr.protocol.messages import OpenApply, StorageState
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankState
from dcr.protocol.record import CommitRecord, Member, decode_record
from dcr.runtime.catch_up_plan import CannotCatchUpError, Plan, committed_manifests, plan
from dcr.runtime.committed_attempt import CommittedAttempt
from dcr.runtime.fetch import Answers, Fetch
from dcr.runtime.rank_messages import BeginCatchUp, EndCatchUp, Learn
from dcr.runtime.ranks import RankLostError, Ranks
from dcr.runtime.reception import Inbox
from dcr.runtime.refit_status import LastMove, RefitStatus, StageStatus, utc
from dcr.runtime.registry import register_catch_up
from dcr.runtime.settings import Settings
from dcr.runtime.storage_check import StorageCheck

_log = logging.getLogger("dcr.node")
_ROUNDS_MAX = 8
"""How often it goes on because another version was committed meanwhile."""
_PATIENCE = 0.25
"""For this share of the time that a push waits for engines, one waits for an attempt that began without it to end."""
_KEPT_S = 1.0
"""When nothing has come for so long, it looks whether what it waits for was swept."""
_LOOK_S = 0.1
"""How soon it is noticed that the node is closed."""


class CatchUp:
    """One engine's way from what its loader was fed to the committed version; its gate is closed.

    ::

        read K -> plan -> [torn] -> (prepare, open_apply, payloads, manifests, acknowledge, learn)* -> read K ...
               -> read back -> [as loaded]

    Every attempt is applied by a receiver of its own in each rank, with the checks of an attempt; the receiver that
    the record knows holds nothing that is known meanwhile.

    Args:
        engine: which one.
        record_id: the record.
        control: where K is.
        inbox: the delivery store.
        ranks: of the engine, attached to.
        storage: reads them back.
        settings: bounds.
        stop: set when the node is closed.

    Attributes:
        doing: what the engine does instead of joining, for people; empty if nothing.
    """

    def __init__(  # noqa: PLR0917 - what it stands between
        self,
        engine: Member,
        record_id: str,
        control: ControlPlane,
        inbox: Inbox,
        ranks: Ranks,
        storage: StorageCheck,
        settings: Settings,
        stop: threading.Event,
    ) -> None:
        self._engine = engine.engine
        self._incarnation = engine.incarnation
        self._record_id = record_id
        self._control = control
        self._inbox = inbox
        self._ranks = ranks
        self._storage = storage
        self._settings = settings
        self._stop = stop
        self.doing = ""
        self._patient_until: float | None = None
        self._moved = LastMove()
        self._plan: Plan | None = None
        self._at = 0  # which attempt of the plan
        self._fetch: Fetch | None = None
        self._seconds: dict[str, float] = {}  # of the attempts before

    def run(self) -> None:
        """Catch up, if there is anything to catch up with; if it cannot, the engine is as one that loaded nothing.

        Raises:
            RankLostError: a rank did not answer.
        """
        state = self._ranks.state
        if state.version is not None:  # an earlier node's engine: it takes part already
            return
        held = "" if state.torn_by else state.content_digest
        self._say("")  # of an earlier node that was killed
        try:
            first = self._next(held)
        except RankLostError:
            raise
        except DcrError as e:
            _log.info("engine %s does not catch up by what is kept, so it is restored: %s", self._engine, e)
            first = None
        except Exception as e:  # noqa: BLE001 - nothing was written yet: a restore needs nothing of what is kept
            _log.exception("engine %s, looking for what is kept", self._engine)
            why = f"{type(e).__name__}: {e}"
            _log.warning("engine %s does not catch up by what is kept, so it is restored: %s", self._engine, why)
            first = None
        if first is None:
            self.doing = ""
            return
        began = time.perf_counter()
        try:
            self._caught_up(first)
        except RankLostError:
            raise
        except DcrError as e:
            self._give_up(str(e))
        except Exception as e:  # noqa: BLE001 - storage is marked: a restore makes good whatever was done
            _log.exception("engine %s, catching up", self._engine)
            self._give_up(f"{type(e).__name__}: {e}")
        else:
            _log.info("engine %s has caught up in %.3f s", self._engine, time.perf_counter() - began)
        finally:
            self._plan = self._fetch = None
            self.doing = ""
            self._say("")

    def status(self) -> RefitStatus | None:
        """How far it is; None if it is not under way.  From any thread."""
        p, at, fetch = self._plan, self._at, self._fetch
        if p is None:
            return None
        before = min(at, len(p.attempts))
        payloads, size = sum(p.payloads[:before]), sum(p.sizes[:before])
        seconds = dict(self._seconds)
        if fetch is not None and at < len(p.attempts):
            payloads, size = payloads + fetch.payloads, size + fetch.bytes
        total = sum(p.payloads)
        stages = (
            StageStatus("receive", payloads, "payloads", total, size),
            StageStatus("decode", payloads, "payloads", total, seconds=seconds.get("decode", 0.0)),
            StageStatus("apply", payloads, "payloads", total, seconds=seconds.get("apply", 0.0)),
        )
        if before == len(p.attempts):
            held = "reading storage back"
        elif fetch is None or fetch.with_ranks:
            held = "decode and apply"
        else:
            held = f"receive: {fetch.waits_for}"
        epoch = p.attempts[min(at, len(p.attempts) - 1)].epoch
        return self._moved.status(epoch, f"catches up {p}", stages, held)

    # ------------------------------------------------------------ inside

    def _caught_up(self, first: Plan) -> None:
        """Raises DcrError if storage does not hold the committed version then; it is marked by then."""
        found: Plan | None = first
        self._each(self._ranks.call(BeginCatchUp()))
        for _ in range(_ROUNDS_MAX):
            if found is None:
                break
            self._follow(found)
            last = found
            found = self._next(last.content_digest)  # more may have been committed meanwhile
        self._storage.holds(last.version, last.content_digest)
        self._each(self._ranks.call(EndCatchUp(last.content_digest)))

    def _follow(self, p: Plan) -> None:
        self._plan, self._at, self._moved = p, 0, LastMove()
        _log.info("engine %s catches up %s", self._engine, p)
        self.doing, began = f"catches up {p}", utc(time.time())
        for attempt in p.attempts:
            self._say(f"{p}; now with version {attempt.target}; since {began}")
            self._apply(attempt)
            self._at += 1
            self._inbox.passed(attempt.epoch)
            _log.info("engine %s has what leads to version %d", self._engine, attempt.target)

    def _apply(self, attempt: CommittedAttempt) -> None:
        """One attempt, as its members applied it."""
        order = attempt.order(self._incarnation)
        prepared = self._each(self._ranks.call(PrepareRank(order, attempt.opened())))
        if not all(any(isinstance(r, RankPrepared) for r in a.results) for a in prepared.values()):
            raise CannotCatchUpError(f"not every rank was prepared for epoch {attempt.epoch}")
        self._each(self._ranks.call(OpenApply(attempt.record_id, attempt.epoch)))
        s = self._settings
        fetch = self._fetch = Fetch(
            order, self._inbox, self._ranks.call, ahead=s.fetch_ahead, timeout_s=s.delivery_timeout_s
        )
        acknowledged: set[str] = set()
        moved = looked = time.monotonic()
        while acknowledged != set(self._ranks.names):
            steps = fetch.step()
            now = time.monotonic()
            if steps:
                moved = looked = now
            elif now - looked > _KEPT_S:
                self._check_kept(attempt, fetch, now - moved)
                looked = time.monotonic()
            for answers in steps:
                for rank, answer in self._each(answers).items():
                    if any(isinstance(r, RankAcknowledged) for r in answer.results):
                        acknowledged.add(rank)
            if fetch.done and acknowledged != set(self._ranks.names):
                raise CannotCatchUpError(f"epoch {attempt.epoch} was not acknowledged by every rank")
            self._pause(0.0 if steps else s.fetch_poll_s)
        for stage, seconds in self._ranks.seconds.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        learned = self._ranks.call(Learn(attempt.committed()))
        self._fetch = None
        whole = StorageState(attempt.target, attempt.content_digest, ())
        for rank, answer in self._each(learned).items():
            states = [r.state for r in answer.results if isinstance(r, RankState)]
            if states != [whole]:
                raise CannotCatchUpError(f"rank {rank} does not hold version {attempt.target} then: {states}")

    def _check_kept(self, attempt: CommittedAttempt, fetch: Fetch, waited_s: float) -> None:
        """All of it was delivered long ago, and is swept as others commit: then nothing of it comes any more."""
        committed_manifests(self._look, attempt)
        if waited_s > 2 * self._settings.delivery_timeout_s:
            raise CannotCatchUpError(f"{fetch.waits_for} did not come in {waited_s:.0f} s")

    def _each(self, answers: Answers) -> Answers:
        """What every rank answered, if none refused or failed."""
        for rank, answer in answers.items():
            failed = next((r.reason for r in answer.results if isinstance(r, RankFailed)), "")
            if why := answer.refused or failed:
                raise CannotCatchUpError(why if len(self._ranks.names) == 1 else f"rank {rank}: {why}")
        return answers

    def _give_up(self, reason: str) -> None:
        _log.warning("engine %s could not catch up, so it is restored: %s", self._engine, reason)
        self._ranks.call(EndCatchUp(""))

    def _say(self, how_far: str) -> None:
        """For ``dcr record show``; nothing depends on it."""
        with contextlib.suppress(DcrError):
            register_catch_up(self._control, self._record_id, self._engine, how_far)

    # ------------------------------------------------------------ what is read

    def _next(self, held: str) -> Plan | None:
        """What leads from this content to the committed version; None if it is that, or nothing is committed."""
        record = self._read()
        while record is not None and record.baseline_id == held and self._waits(record):
            self._pause(self._settings.record_poll_s)
            record = self._read()
        if record is None or record.baseline_id == held:
            return None
        if not self._inbox.keeps:
            raise CannotCatchUpError("a relay keeps no payloads")
        return plan(self._look, record, held)

    def _waits(self, record: CommitRecord) -> bool:
        """Whether an attempt is under way without this engine: joining now, it would be behind once that is committed.

        Not for long: its leader may be gone, or may have lost every member and wait for engines.
        """
        under_way = record.open is not None and not record.open.stopped
        if not under_way or not self._inbox.keeps or any(m.engine == self._engine for m in record.members):
            return False
        now = time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + _PATIENCE * self._settings.members_timeout_s
            self.doing = f"waits for the attempt of epoch {record.epoch} to end, which began without it"
            _log.info("engine %s %s", self._engine, self.doing)
        return now < self._patient_until

    def _read(self) -> CommitRecord | None:
        told = False
        while True:
            try:
                stored = self._control.read(self._record_id)
            except ControlPlaneUnavailableError as e:
                if not told:
                    _log.warning("engine %s could not read the record, and tries again: %s", self._engine, e)
                told = True
                self._pause(self._settings.record_poll_s)
            else:
                return None if stored is None else decode_record(stored.body)

    def _look(self, keys: Sequence[str], size_max: int) -> list[bytes | None]:
        """Read several objects of the store at once."""

        def read(key: str, store: Delivery) -> bytes | None:
            return store.get(key, size_max)

        timeout_s = self._settings.delivery_timeout_s
        asked = [self._inbox.ask(partial(read, key)) for key in keys]
        since, left = time.monotonic(), len(asked)
        while left:
            found = concurrent.futures.wait(asked, _LOOK_S, concurrent.futures.ALL_COMPLETED)
            self._pause(0.0)
            if len(found.not_done) < left:
                since, left = time.monotonic(), len(found.not_done)
            if left and time.monotonic() - since > timeout_s:
                raise CannotCatchUpError(f"the store has not answered for {timeout_s} s")
        return [future.result() for future in asked]

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise CannotCatchUpError("its node was closed")
