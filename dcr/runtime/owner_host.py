"""The owner host: on every training rank, carries out the owner role's effects."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.data_plane.change_counts import by_layer, in_words, layer_of
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.nvtx import stage
from dcr.delivery.interface import Delivery, manifest_key
from dcr.protocol import owner as role
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.event import EVENT_LOG_VERSION, Start
from dcr.protocol.identity import Kind, Manifest, encode_manifest
from dcr.protocol.layer_changes import LAYERS_MAX, LAYERS_REST, LayerChanges
from dcr.protocol.messages import (
    CONTROL_VERSION,
    CandidateReady,
    Emit,
    Fold,
    Outcome,
    OwnerJoin,
    Report,
    ShowContents,
    Withdraw,
    decode_order,
    encode_message,
)
from dcr.protocol.record import OwnerRef, decode_record
from dcr.protocol.step import Step
from dcr.runtime.channel import Peer
from dcr.runtime.channel_address import ChannelAddress
from dcr.runtime.emission import Emission
from dcr.runtime.event_log import EventLog
from dcr.runtime.following import Following
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.offer import Offer, OwnerError, PushTimeoutError
from dcr.runtime.owner_answers import show_contents, why_refused
from dcr.runtime.owner_reports import report_of
from dcr.runtime.pin import Pin
from dcr.runtime.pipeline import CancelledError
from dcr.runtime.refit_status import RefitStatus
from dcr.runtime.registry import leader_address
from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings
from dcr.runtime.source import Source
from dcr.runtime.spoke import Spoke

_log = logging.getLogger("dcr.owner")


@dataclass(frozen=True)
class _Do:
    """Run this on the role's thread; it returns effects."""

    act: Callable[[], Sequence[role.Effect]]


class OwnerHost:
    """One rank's owner.  One thread runs the role, another the work that takes long, so that a fence is obeyed at once.

    Args:
        source: this rank's share.
        incarnation: new with every start of this process.
        record_id: the record it obeys.
        coordinator: where this trainer's own coordinator is reached (``CoordinatorHost.address``); None if it has none,
            and whichever leads takes this owner for the one that the trainer's roster names.  Owners never follow
            another trainer's, or the weights of two trainers could be mixed in one version.
        control: control plane.
        delivery: where payloads go.
        secret: the secret of the run.
        settings: bounds.
        observe: called with every step of the owner role.
        events: folder in which the owner writes its steps down; empty to write none.

    Raises:
        RefusedError: the credentials that the setting ``channel`` names are no good.
    """

    def __init__(
        self,
        source: Source,
        *,
        incarnation: int,
        record_id: str,
        coordinator: str | None,
        control: ControlPlane,
        delivery: Delivery,
        secret: bytes,
        settings: Settings,
        observe: Observer = log_step,
        events: str = "",
    ) -> None:
        credentials = ChannelAddress.parse(settings.channel).credentials()
        self._source = source
        self._incarnation = incarnation
        self._record_id = record_id
        self._control = control
        self._delivery = delivery
        self._settings = settings
        baseline = source.baseline_digest
        share = "" if baseline is None else baseline.hex()
        self._role = role.Owner(source.owner, incarnation, record_id, share)
        self._event_log = EventLog(events, "owner", source.owner, incarnation, settings.event_log_bytes_max)
        self._event_log.start(Start(EVENT_LOG_VERSION, record_id, baseline_digest=share))
        self._observe = self._event_log.before(observe)
        self._emission: Emission | None = None
        self._seconds: dict[str, float] = {}
        self._layer_of = layer_of(source.specs, LAYERS_MAX, LAYERS_REST)
        self._layers: tuple[LayerChanges, ...] = ()  # of what was emitted last
        self._found: dict[str, ContentDigest] = {}  # content of the last candidate that was emitted whole, by token
        self._begun = ""  # token of the candidate of which something may have been delivered last
        self._starting = True
        self._next_look = 0.0
        self._offer: Offer | None = None  # the last one
        self._pin = Pin(source, self._needed, self._post, settings)
        self._stop = threading.Event()
        self._events: queue.Queue[_Do] = queue.Queue(settings.events_max)
        self._work: queue.Queue[Callable[[], None]] = queue.Queue(settings.events_max)
        self._threads = [
            threading.Thread(target=self._loop, name=f"dcr-owner-{source.owner}", daemon=True),
            threading.Thread(target=self._worker, name=f"dcr-emission-{source.owner}", daemon=True),
        ]
        self._spoke = Spoke(
            record_secret(secret, record_id),
            Peer("owner", source.owner, incarnation),
            lambda data: self._post(lambda: self._order(data)),
            resolve=lambda: leader_address(control, record_id) if coordinator is None else coordinator,
            credentials=credentials,
            on_connect=lambda: self._post(self._connected),
        )
        me = OwnerRef(source.owner, incarnation)
        self._following = Following(control, record_id, me, self._spoke) if coordinator is None else None
        for t in self._threads:  # last: what they carry out needs everything above
            t.start()

    # ------------------------------------------------------------ for the trainer

    def wait_connected(self) -> None:
        """Wait until the coordinator has this owner's connection; ChannelTimeoutError after ``connect_timeout_s``."""
        try:
            (self._following or self._spoke).wait_connected(self._settings.connect_timeout_s)
        finally:
            self._starting = False

    @property
    def status(self) -> RefitStatus | None:
        """How far the emission that began last is; None before the first."""
        emission = self._emission
        return None if emission is None else emission.status

    @property
    def emitting(self) -> bool:
        """Whether an emission is under way."""
        emission = self._emission
        return emission is not None and not emission.over and not emission.cancelled.is_set()

    @property
    def waiting(self) -> bool:
        """Whether a push waits for its outcome."""
        return self._offer is not None and self._offer.waiting

    @property
    def unled(self) -> str:
        """Why a push that waits has lost its own trainer's coordinator; ``Following`` tells of one elsewhere."""
        alone = self._following is None and self.waiting and not self._spoke.connected
        return self._spoke.trouble if alone else ""

    def release(self) -> None:
        """Before the next push: wait until what a snapshot pins for the last one is needed no more; see ``Pin``."""
        self._check_open()
        self._pin.release()

    def snapshot(self) -> None:
        """Pin what is offered next by a copy of it, which is taken now."""
        self._pin.snapshot()

    def hold(self) -> None:
        """Let go of a snapshot: what is offered next stays as it is until its push has ended."""
        self.release()
        self._pin.hold()

    def offer(self, *, dense: bool = False) -> Offer:
        """Offer the pinned weights as a candidate; no other offer waits.

        Args:
            dense: ask for every element to be sent (DESIGN D14).

        Raises:
            RefusedError: this owner is closed.
        """
        self._check_open()
        number = 1 if self._offer is None else self._offer.number + 1
        offer = self._offer = Offer(number, dense=dense, timeout_s=self._settings.push_timeout_s)
        if self._settings.refuse_nonfinite:
            self._work.put(lambda: self._look_through(offer))
        else:
            offer.refusal = ""
            self._post(self._ready)
        return offer

    def wait(self, offer: Offer, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the outcome of an offer.

        Args:
            offer: what ``offer`` returned.
            timeout_s: wait no longer than this; None for ``push_timeout_s`` from when it was made.

        Returns:
            None if it waits still.

        Raises:
            PushTimeoutError: no outcome within ``push_timeout_s``.
            OwnerError: something unforeseen failed on this rank.
            RefusedError: this owner was closed meanwhile.
        """
        while not offer.wait(timeout_s):
            self._end_late(offer)
            if timeout_s is not None:
                break
        return None if offer.waiting else offer.outcome

    def take_back(self, why: str) -> bool:
        """Have the push that waits turned back, or ended before it is opened, whoever leads then; False if none waits.

        The candidate stays pinned until it has ended.  It may have been committed by now: then it ends so.
        """
        offer = self._offer
        if offer is None or not offer.waiting:
            return False
        offer.taken_back = f"{self._source.owner}: {why}"
        self._post(self._ready)
        return True

    def give_up(self, offer: Offer, why: DcrError) -> None:
        """End an offer that waits without an outcome, and take its candidate back."""
        if offer.end(why):
            if self._emission is not None and self._emission.order.base.kind is not Kind.RESTORE:
                self._emission.cancelled.set()  # at once: the weights may change from here on
            self._post(lambda: self._withdraw(offer))

    def _withdraw(self, offer: Offer) -> Sequence[role.Effect]:
        self._send(Withdraw(self._source.owner, self._incarnation, offer.number))
        return self._role.give_up(offer.number)

    def _end_late(self, offer: Offer) -> None:
        if offer.late:
            late = PushTimeoutError(
                f"{self._source.owner}: push {offer.number} has no outcome after {self._settings.push_timeout_s} s; "
                f"connected to the coordinator: {self._spoke.connected}"
            )
            self.give_up(offer, late)

    def _needed(self) -> str:
        """Why the candidate of the last push is still needed although that has ended, as the role and K have it."""
        folded = not self._role.folding and max(self._role.sealed_epochs, default=0) <= self._role.folded_epoch
        if self._offer is None or (self._offer.committed and folded):
            return ""
        stored = self._control.read(self._record_id)
        return "" if stored is None else self._role.needs_candidate(decode_record(stored.body))

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise RefusedError(self._closed)

    @property
    def _closed(self) -> str:
        return f"{self._source.owner}: this trainer's refit is closed; nothing can be pushed through it"

    def close(self) -> None:
        """End threads and connection; a push that waits is given up, which the leader hears of."""
        self._stop.set()
        if self._offer is not None and self._offer.end(RefusedError(self._closed)):
            self._send(Withdraw(self._source.owner, self._incarnation, self._offer.number))
        if self._emission is not None:
            self._emission.cancelled.set()
        self._spoke.close()
        for t in self._threads:
            t.join(self._settings.drain_timeout_s)
        if not any(t.is_alive() for t in self._threads):
            self._event_log.close()
        self._pin.close()

    # ------------------------------------------------------------ loops

    def _post(self, act: Callable[[], Sequence[role.Effect]]) -> None:
        self._events.put(_Do(act), timeout=self._settings.connect_timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._guarded(self._turn)

    def _turn(self) -> None:
        if self._following is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._settings.record_poll_s
            self._follow(self._following)
        if self._offer is not None:
            self._end_late(self._offer)
        try:
            event = self._events.get(timeout=0.1)
        except queue.Empty:
            return
        self._do(event.act())

    def _guarded(self, act: Callable[[], None]) -> None:
        """Whatever it raises, its thread lives on: the next order may still be obeyed."""
        try:
            act()
        except RefusedError as e:
            _log.warning("refused: %s", e)
        except BaseException as e:  # noqa: BLE001 - told to whoever waits
            _log.exception("owner %s", self._source.owner)
            if self._offer is not None:
                fault = f"{self._source.owner}: {type(e).__name__}: {e}; its log has the whole story"
                self.give_up(self._offer, OwnerError(fault))

    def _worker(self) -> None:
        while not self._stop.is_set():
            try:
                job = self._work.get(timeout=0.1)
            except queue.Empty:
                continue
            self._guarded(job)

    # ------------------------------------------------------------ events

    def _connected(self) -> list[role.Effect]:
        self._send(OwnerJoin(self._source.owner, self._incarnation, CONTROL_VERSION, self._role.baseline_digest))
        return self._ready()

    def _ready(self) -> list[role.Effect]:
        o = self._offer
        if o is not None and o.waiting and (o.taken_back or o.refusal is not None):
            name, incarnation = self._source.owner, self._incarnation
            refused = o.taken_back or o.refusal or ""
            self._send(CandidateReady(name, incarnation, o.number, refused=refused, dense=o.dense))
        return []

    def _look_through(self, offer: Offer) -> None:
        """Find out whether the weights that are pushed may become a version, and then offer them."""
        with self._pin.reading:
            offer.refusal = why_refused(self._source)
        self._post(self._ready)

    def _follow(self, following: Following) -> None:
        """Another leader may have come; or another trainer, and then no leader tells how the push ends."""
        problem = following.look()
        bounds, pushing = self._settings, "whose push waits" if self.waiting else ""
        waits = "which starts" if self._starting else pushing
        following.tell(waits, bounds.connect_timeout_s if self._starting else bounds.push_timeout_s)
        if problem and self._offer is not None:
            self._offer.end(Outcome(self._record_id, 0, -1, "", problem, {}))

    def _order(self, data: bytes) -> Sequence[role.Effect]:
        order = decode_order(data)
        match order:
            case Emit():
                return self._role.emit(order)
            case Fold():
                return self._role.fold(order)
            case ShowContents():
                if order.record_id != self._record_id:
                    raise RefusedError(f"{self._source.owner}: order of record {order.record_id!r}")
                self._work.put(lambda: self._show(order.epoch))
                return []
            case Outcome():
                # An outcome may come late, or twice: only one of this very push is an answer to it.
                o = self._offer
                mine = o is not None and (order.incarnation, order.push) == (self._incarnation, o.number)
                if o is not None and order.record_id == self._record_id and (mine or order.push == 0):
                    o.end(order)
                return []
            case _:
                raise RefusedError(f"{self._source.owner}: an owner takes no {type(order).__name__} order")

    # ------------------------------------------------------------ effects

    def _do(self, effects: Sequence[role.Effect]) -> None:
        for effect in effects:
            match effect:
                case Step():
                    self._observe(effect)
                case role.StartEmission():
                    emission = Emission(effect.order, self._source, self._incarnation, self._delivery, self._settings)
                    self._emission = emission
                    self._work.put(lambda e=emission: self._emit(e))  # type: ignore[misc]
                case role.CancelEmission():
                    if self._emission is not None:
                        self._emission.cancelled.set()
                case role.Again():
                    self._post(lambda e=effect: self._role.emit(e.order))  # type: ignore[misc]
                case role.DeliverManifest():
                    self._work.put(lambda m=effect.manifest: self._seal(m))  # type: ignore[misc]
                case role.ReportSealed() | role.ReportEmitFailed() | role.ReportFolded():
                    self._send(report_of(effect, self._source.owner, self._incarnation, self._seconds, self._layers))
                case role.ReadRecord():
                    self._read_record()
                case role.FoldBaseline():
                    self._work.put(lambda f=effect: self._fold(f))  # type: ignore[misc]

    def _emit(self, emission: Emission) -> None:
        epoch = emission.order.epoch
        if emission.cancelled.is_set():
            return
        candidate = emission.order.base.candidate
        if not self._holds_candidate(emission.order):
            # Whoever holds no candidate still (its push timed out, or was interrupted) must not make one up.
            reason = f"{self._source.owner} has no candidate: its push was given up"
            push = 0 if self._offer is None or self._offer.waiting else self._offer.number
            self._post(lambda: self._role.emission_failed(epoch, reason, fatal=True, given_up=push))
            return
        try:
            with nullcontext() if emission.order.base.kind is Kind.RESTORE else self._pin.reading:
                manifest = emission.run(self._found.get(candidate))
        except CancelledError:
            return
        except BaseException as e:  # noqa: BLE001 - whatever the model's code raises ends the epoch by its name
            reason, fatal = f"{self._source.owner}: {type(e).__name__}: {e}", isinstance(e, RefusedError)
            self._post(lambda: self._role.emission_failed(epoch, reason, fatal=fatal))
            return
        finally:
            if emission.begun and candidate:
                self._begun = candidate
            if emission.found is not None:
                self._found = {candidate: emission.found}
        self._seconds = dict(emission.seconds)
        self._layers = self._counted(emission)
        found = "" if emission.found is None else emission.found.hex()
        self._post(lambda: self._role.emitted(manifest, found))

    def _counted(self, emission: Emission) -> tuple[LayerChanges, ...]:
        """What an emission changed by layer, which the log hears too."""
        counts = emission.changes_found
        layers = by_layer(counts, self._layer_of)
        if counts:
            epoch, kind = emission.order.epoch, emission.order.base.kind
            _log.info("%s, %s attempt of epoch %d: %s", self._source.owner, kind, epoch, in_words(counts, layers))
        return tuple(LayerChanges(layer, count.changed, count.elements) for layer, count in layers.items())

    def _holds_candidate(self, order: Emit) -> bool:
        """True if the weights may be taken for the candidate, as far as the order is about one.

        A rollback may come when the push has ended in a stop, or when the next one waits already.  If anything of the
        candidate left here, only its content tells whether the weights are still those: it must have been found.
        """
        candidate = order.base.candidate
        if order.base.kind is not Kind.RESTORE and order.target == order.base.version and candidate == self._begun:
            return candidate in self._found
        offered = self._offer is not None and self._offer.waiting and self._offer.refusal == ""
        return order.base.kind is Kind.RESTORE or offered

    def _seal(self, m: Manifest) -> None:
        key = manifest_key(m.record_id, m.target, m.epoch, m.owner, m.owner_incarnation)
        try:
            self._delivery.put(key, encode_manifest(m))
        except DcrError as e:
            reason = f"{m.owner}: its manifest could not be delivered: {e}"
            self._post(lambda: self._role.emission_failed(m.epoch, reason))
            return
        self._post(lambda: self._role.sealed(m))

    def _fold(self, effect: role.FoldBaseline) -> None:
        started = time.perf_counter()
        try:
            with stage("fold"), self._pin.reading:
                self._source.fold(ContentDigest.from_hex(effect.content_digest))
        except BaseException as e:  # noqa: BLE001 - a baseline that may be half folded is lost, whatever the error
            reason = f"{type(e).__name__}: {e}"
            self._post(lambda: self._role.fold_failed(effect.epoch, reason))
            return
        self._seconds = {"fold": time.perf_counter() - started}
        digest = self._source.baseline_digest
        assert digest is not None
        self._post(lambda: self._role.folded(effect.epoch, digest.hex()))

    def _show(self, epoch: int) -> None:
        """Deliver the digests of what is committed, by tensor; between folds, for those run in this thread too."""
        self._send(show_contents(self._source, self._delivery, self._record_id, self._incarnation, epoch))

    def _read_record(self) -> None:
        try:
            stored = self._control.read(self._record_id)
        except ControlPlaneUnavailableError as e:
            # The order to fold is not repeated, so the read is.
            _log.warning("%s could not read the record, and tries again: %s", self._source.owner, e)
            time.sleep(0.2)
            if not self._stop.is_set():
                self._post(lambda: [role.ReadRecord()])
            return
        if stored is not None:
            self._do(self._role.learned(decode_record(stored.body)))

    def _send(self, report: Report) -> None:
        self._spoke.send(encode_message(report))
