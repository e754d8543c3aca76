"""The owner host: on every training rank, carries out the owner role's effects."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
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
    EmitFailed,
    Fold,
    Folded,
    Outcome,
    OwnerJoin,
    Report,
    Sealed,
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
from dcr.runtime.owner_answers import show_contents, why_refused
from dcr.runtime.pipeline import CancelledError
from dcr.runtime.refit_status import RefitStatus
from dcr.runtime.registry import leader_address
from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings
from dcr.runtime.source import Source
from dcr.runtime.spoke import Spoke

_log = logging.getLogger("dcr.owner")


class OwnerError(DcrError):
    """This rank's owner failed in a way that it does not know; the push on this rank cannot go on."""


class PushTimeoutError(DcrError):
    """A push did not end in time on this rank; what became of it is in the commit record."""


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
        self._push = 0
        self._dense = False
        self._starting = True
        self._waiting = False
        self._refusal: str | None = None  # why what is pushed may not become a version; None: not known yet
        self._outcome: Outcome | None = None
        self._fault = ""
        self._changed = threading.Condition()
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
    def unled(self) -> str:
        """Why a push that waits has lost its own trainer's coordinator; ``Following`` tells of one elsewhere."""
        alone = self._following is None and self._waiting and not self._spoke.connected
        return self._spoke.trouble if alone else ""

    def push(self, *, dense: bool = False) -> Outcome:
        """Offer the weights as a candidate and wait for the outcome; they must not change until this returns.

        Args:
            dense: ask for every element to be sent (DESIGN D14).

        Raises:
            PushTimeoutError: no outcome within ``push_timeout_s``.
            OwnerError: something unforeseen failed on this rank.
            RefusedError: this owner is closed.
        """
        with self._changed:
            self._check_open()
            self._push += 1
            self._dense = dense
            self._outcome = None
            self._fault = ""
            self._refusal = None if self._settings.refuse_nonfinite else ""
            self._waiting = True
            push = self._push
        if self._settings.refuse_nonfinite:
            self._work.put(lambda: self._look_through(push))
        else:
            self._post(self._ready)
        try:
            outcome = self._wait_outcome()
        finally:
            # A push that ends without an outcome (time-out, interrupt) takes its candidate back.
            self._waiting = False
            if self._latest() is None:
                self._withdraw()
        return outcome

    def _withdraw(self) -> None:
        if self._emission is not None and self._emission.order.base.kind is not Kind.RESTORE:
            self._emission.cancelled.set()  # at once: the weights may change from here on
        push = self._push
        self._post(lambda: self._give_up(push))

    def _give_up(self, push: int) -> Sequence[role.Effect]:
        self._send(Withdraw(self._source.owner, self._incarnation, push))
        return self._role.give_up(push)

    def _wait_outcome(self) -> Outcome:
        with self._changed:
            self._changed.wait_for(
                lambda: self._outcome or self._fault or self._stop.is_set(), self._settings.push_timeout_s
            )
            outcome = self._latest()
            if outcome is None:
                self._check_open()
                if self._fault:
                    raise OwnerError(f"{self._source.owner}: {self._fault}; its log has the whole story")
                raise PushTimeoutError(
                    f"{self._source.owner}: push {self._push} has no outcome after {self._settings.push_timeout_s} s; "
                    f"connected to the coordinator: {self._spoke.connected}"
                )
            return outcome

    def _latest(self) -> Outcome | None:
        return self._outcome

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise RefusedError(
                f"{self._source.owner}: this trainer's refit is closed; nothing can be pushed through it"
            )

    def close(self) -> None:
        """End threads and connection; a push that waits is refused."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._emission is not None:
            self._emission.cancelled.set()
        self._spoke.close()
        for t in self._threads:
            t.join(self._settings.drain_timeout_s)
        if not any(t.is_alive() for t in self._threads):
            self._event_log.close()

    # ------------------------------------------------------------ loops

    def _post(self, act: Callable[[], Sequence[role.Effect]]) -> None:
        self._events.put(_Do(act), timeout=self._settings.connect_timeout_s)

    def _loop(self) -> None:
        next_look = 0.0
        while not self._stop.is_set():
            if self._following is not None and time.monotonic() >= next_look:
                next_look = time.monotonic() + self._settings.record_poll_s
                self._follow(self._following)
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                self._do(event.act())
            except RefusedError as e:
                _log.warning("refused: %s", e)
            except Exception as e:  # noqa: BLE001 - told to whoever waits; the next order may still be obeyed
                _log.exception("owner %s", self._source.owner)
                with self._changed:
                    self._fault = f"{type(e).__name__}: {e}"
                    self._changed.notify_all()

    def _worker(self) -> None:
        while not self._stop.is_set():
            try:
                job = self._work.get(timeout=0.1)
            except queue.Empty:
                continue
            job()

    # ------------------------------------------------------------ events

    def _connected(self) -> list[role.Effect]:
        self._send(OwnerJoin(self._source.owner, self._incarnation, CONTROL_VERSION, self._role.baseline_digest))
        return self._ready()

    def _ready(self) -> list[role.Effect]:
        if self._waiting and self._refusal is not None:
            name, incarnation = self._source.owner, self._incarnation
            self._send(CandidateReady(name, incarnation, self._push, refused=self._refusal, dense=self._dense))
        return []

    def _look_through(self, push: int) -> None:
        """Find out whether the weights that are pushed may become a version, and then offer them."""
        refusal = why_refused(self._source)

        def offer() -> list[role.Effect]:
            if push == self._push:
                self._refusal = refusal
            return self._ready()

        self._post(offer)

    def _follow(self, following: Following) -> None:
        """Another leader may have come; or another trainer, and then no leader tells how the push ends."""
        problem = following.look()
        bounds, pushing = self._settings, "whose push waits" if self._waiting else ""
        waits = "which starts" if self._starting else pushing
        following.tell(waits, bounds.connect_timeout_s if self._starting else bounds.push_timeout_s)
        if problem and self._waiting:
            with self._changed:
                self._outcome = Outcome(self._record_id, 0, -1, "", problem, {})
                self._changed.notify_all()

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
                with self._changed:
                    # An outcome may come late, or twice: only one of this very push is an answer to it.
                    mine = (order.incarnation, order.push) == (self._incarnation, self._push) or order.push == 0
                    if self._waiting and order.record_id == self._record_id and mine:
                        self._outcome = order
                        self._changed.notify_all()
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
                    self._send(self._report(effect))
                case role.ReadRecord():
                    self._read_record()
                case role.FoldBaseline():
                    self._work.put(lambda f=effect: self._fold(f))  # type: ignore[misc]

    def _report(self, effect: role.ReportSealed | role.ReportEmitFailed | role.ReportFolded) -> Report:
        name, incarnation = self._source.owner, self._incarnation
        match effect:
            case role.ReportSealed():
                return self._sealed(effect.manifest)
            case role.ReportEmitFailed():
                return EmitFailed(name, incarnation, effect.epoch, effect.reason, effect.fatal, effect.given_up)
            case role.ReportFolded():
                seconds = dict(self._seconds)
                return Folded(name, incarnation, effect.epoch, effect.baseline_digest, effect.reason, seconds)

    def _emit(self, emission: Emission) -> None:
        epoch = emission.order.epoch
        if emission.cancelled.is_set():
            return
        candidate = emission.order.base.candidate
        if not self._holds_candidate(emission.order):
            # Whoever holds no candidate still (its push timed out, or was interrupted) must not make one up.
            reason = f"{self._source.owner} has no candidate: its push was given up"
            push = 0 if self._waiting else self._push
            self._post(lambda: self._role.emission_failed(epoch, reason, fatal=True, given_up=push))
            return
        try:
            manifest = emission.run(self._found.get(candidate))
        except CancelledError:
            return
        except Exception as e:  # noqa: BLE001 - whatever the trainer's tensors raise ends the epoch by its name
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
        return order.base.kind is Kind.RESTORE or (self._waiting and self._refusal == "")

    def _seal(self, m: Manifest) -> None:
        key = manifest_key(m.record_id, m.target, m.epoch, m.owner, m.owner_incarnation)
        try:
            self._delivery.put(key, encode_manifest(m))
        except DcrError as e:
            reason = f"{m.owner}: its manifest could not be delivered: {e}"
            self._post(lambda: self._role.emission_failed(m.epoch, reason))
            return
        self._post(lambda: self._role.sealed(m))

    def _sealed(self, m: Manifest) -> Sealed:
        return Sealed(
            owner=m.owner,
            incarnation=self._incarnation,
            epoch=m.epoch,
            manifest_digest=m.digest(),
            content_digest=m.content_digest,
            payloads=len(m.payloads),
            payload_bytes=sum(p.size_bytes for p in m.payloads),
            changed_entries=m.changed_entries,
            owned_elements=m.owned_elements,
            seconds=self._seconds,
            layers=self._layers,
        )

    def _fold(self, effect: role.FoldBaseline) -> None:
        started = time.perf_counter()
        try:
            with stage("fold"):
                self._source.fold(ContentDigest.from_hex(effect.content_digest))
        except Exception as e:  # noqa: BLE001 - a baseline that may be half folded is lost, whatever the error
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
