"""The host of one rollout rank: carries out its receiver's effects on real storage, in the process that holds it."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.header import DEFAULT_LIMITS, Limits, PayloadHeader
from dcr.data_plane.item import Item, TensorSpec
from dcr.data_plane.nvtx import stage
from dcr.data_plane.payload import decode_payload, payload_digest
from dcr.data_plane.placement.prewarm import LoaderClass
from dcr.data_plane.placement.storage import Storage
from dcr.data_plane.touched import TouchedElements
from dcr.protocol.errors import CorruptPayloadError, DcrError, RefusedError
from dcr.protocol.event import EVENT_LOG_VERSION, Start
from dcr.protocol.identity import Kind, Manifest, PayloadIdentity, decode_manifest
from dcr.protocol.messages import OpenApply, StorageState
from dcr.protocol.receiver import (
    UNKNOWN,
    ApplyStaged,
    BeginWrite,
    DropStage,
    Effect,
    Hold,
    PrepareRank,
    RankAcknowledged,
    RankFailed,
    Receiver,
    Synchronise,
)
from dcr.protocol.step import Step
from dcr.runtime.event_log import EventLog
from dcr.runtime.observer import Observer, guarded, log_step
from dcr.runtime.rank_messages import (
    Answer,
    Attach,
    Attached,
    BeginCatchUp,
    Contents,
    EndCatchUp,
    HeldBox,
    Learn,
    Orphans,
    Payload,
    ReadBack,
    Request,
    Result,
    SealedManifest,
    Undeliverable,
    WriteOn,
    decode_request,
    encode,
)
from dcr.runtime.shared_memory import read_shared
from dcr.runtime.tied_changes import TiedChanges

StorageFactory = Callable[[Sequence[TensorSpec]], Storage]

_log = logging.getLogger("dcr.rank")
_CHANGES = {Kind.RELATIVE, Kind.ABSOLUTE}
"""Kinds whose payloads hold what has changed; the others hold every element, changed or not."""
ANSWER_S = 1.0
"""After so long a rank that writes what it holds says how far it is."""
NOTHING_KNOWN = StorageState(None, "", (UNKNOWN,))
"""What may be said of a rank before a node agent has attached to it."""


class RankHost:
    """One receiver and its storage.  Threads that call at once take turns.

    The memory of what was applied is made with the storage's host and lost with it (DESIGN D7): a node agent that
    restarts attaches again and finds it; a rank that restarts has a new incarnation.

    Args:
        storage_factory: makes the way to this rank's storage from the canonical tensors.
        state_incarnation: a number new with every start of the process that holds the storage.
        limits: what one payload may hold.
        observe: called with every step, in this process.
        not_loaded: asked once, before anything is written: why storage is not what the loader was fed according to
            the node agent; empty if it is, or if the storage factory has seen to that.
        tied: given the canonical tensors that the loader skips here, and those that it loads: which of the former
            are known to be the same resident memory as one of the latter, and as which.
    """

    def __init__(
        self,
        storage_factory: StorageFactory,
        *,
        state_incarnation: int,
        limits: Limits = DEFAULT_LIMITS,
        observe: Observer = log_step,
        not_loaded: Callable[[], str] = str,
        tied: Callable[[Sequence[str], Sequence[str]], Mapping[str, str]] = lambda _skipped, _loaded: {},
    ) -> None:
        self._factory = storage_factory
        self._not_loaded = not_loaded
        self._find_tied = tied
        self._tied: Mapping[str, str] = {}
        self._incarnation = state_incarnation
        self._limits = limits
        self._watch = guarded(observe)
        self._observe = self._log_events = self._watch
        self._attach: Attach | None = None
        self._attached: Attached | None = None
        self._storage: Storage | None = None
        self._receiver: Receiver | None = None
        self._catches_up = False  # then the receiver is one that no record knows
        self._known: dict[str, TensorSpec] = {}
        self._undecoded: frozenset[str] = frozenset()  # nothing of them is held here, nor compared
        self._orphans: frozenset[str] = frozenset()
        self._turn = threading.Lock()
        self._held: dict[PayloadIdentity, bytes | memoryview] = {}
        self._held_bytes = 0
        self._touched: dict[int, TouchedElements] = {}  # of the epoch that payloads come for
        self._noted: set[PayloadIdentity] = set()
        self._tied_changes = TiedChanges({})
        self._kind = Kind.RESTORE  # of the payload that came last
        self._seconds: dict[str, float] = {}
        self._seconds_epoch = -1

    def call(self, request: bytes) -> bytes:
        """Take one request, return one answer; refusals are answers, and change nothing."""
        with self._turn:
            try:
                results = self._take(decode_request(request))
            except RefusedError as e:
                corrupt = isinstance(e, CorruptPayloadError)
                return encode(Answer((), self._state, refused=f"{type(e).__name__}: {e}", corrupt=corrupt))
            return encode(Answer(tuple(results), self._state, seconds=dict(self._seconds), held=len(self._held)))

    @property
    def _state(self) -> StorageState:
        return NOTHING_KNOWN if self._receiver is None or self._catches_up else self._receiver.state

    def _take(self, request: Request) -> list[Result]:
        if isinstance(request, Attach):
            return [self._attach_to(request)]
        receiver = self._receiver
        if receiver is None:
            raise RefusedError("the rank was sent an order before a node agent attached to it")
        match request:
            case PrepareRank():
                return self._carry_out(receiver.prepare(request.order, request.record))
            case OpenApply() | WriteOn():
                return self._open_apply(receiver, request)
            case Payload():
                return self._arrived(receiver, request)
            case SealedManifest():
                return self._carry_out(receiver.manifest(_checked_manifest(request)))
            case Undeliverable():
                return self._carry_out(receiver.undeliverable(request.epoch, request.reason))
            case Learn():
                return self._carry_out(receiver.learn(request.record))
            case Orphans():
                self._orphans = frozenset(request.names)
            case ReadBack():
                return [self._read_back()]
            case BeginCatchUp() | EndCatchUp():
                self._catch_up(receiver, request)
        return []

    def _attach_to(self, request: Attach) -> Attached:
        if self._attached is not None and self._attach is not None:
            # The bound of a stage and the event log are the agent's to choose; all else says what the storage is.
            if _what(request) != _what(self._attach):
                raise RefusedError(
                    f"engine {request.engine}: a node agent is attached already, as another engine, to another record "
                    "or with other canonical tensors; restart the engine"
                )
            self._attach = request
            if self._catches_up and self._receiver is not None:  # the agent that had begun is gone
                self._catch_up(self._receiver, EndCatchUp(""))
            return self._attached
        specs = [s.spec for s in request.specs]
        storage = self._factory(specs)
        loaded_digest = request.loaded_digest
        if loaded_digest and (why := self._not_loaded()):
            _log.warning("engine %s does not hold its checkpoint, so it is restored first: %s", request.engine, why)
            loaded_digest = ""
        prewarm = storage.prewarm()
        by_class: dict[LoaderClass, list[str]] = {c: [] for c in LoaderClass}
        for name, c in sorted(prewarm.classes.items()):
            by_class[c].append(name)
        loaded = by_class[LoaderClass.BOX] + by_class[LoaderClass.TRANSFORMING]
        self._storage = storage
        self._tied = self._find_tied(by_class[LoaderClass.SKIPPED], loaded)
        # What is sent under both names is compared, so the operation must be the same.
        set_with = [n for n, partner in self._tied.items() if partner in set(by_class[LoaderClass.TRANSFORMING])]
        self._known = {s.name: s for s in specs}
        self._undecoded = frozenset(by_class[LoaderClass.SKIPPED]) - self._tied.keys()
        self._receiver = Receiver(request.engine, request.record_id, loaded_digest)
        events = EventLog(request.event_log, "rank", request.engine, self._incarnation, request.event_log_bytes_max)
        events.start(Start(EVENT_LOG_VERSION, request.record_id))
        self._observe = self._log_events = events.before(self._watch)
        self._attach = request
        self._attached = Attached(
            self._incarnation,
            tuple(sorted(by_class[LoaderClass.TRANSFORMING] + set_with)),
            tuple(by_class[LoaderClass.SKIPPED]),
            {name: prewarm.reasons[name] for name in by_class[LoaderClass.REFUSED]},
            tuple(sorted(self._tied)),
        )
        return self._attached

    def _catch_up(self, receiver: Receiver, request: BeginCatchUp | EndCatchUp) -> None:
        """Attempts that are over are applied by a receiver of their own, whose steps are none of the record's."""
        if isinstance(request, BeginCatchUp):
            if self._catches_up or receiver.fence or receiver.version is not None:
                raise RefusedError(
                    f"{receiver.name}: this rank takes part already: it can be restored, and not catch up"
                )
            content_digest = "" if receiver.torn_by else receiver.content_digest
        elif not self._catches_up:
            raise RefusedError(f"{receiver.name}: this rank does not catch up")
        else:
            content_digest, state = request.content_digest, receiver.state
            if content_digest and (state.torn_by or state.content_digest != content_digest):
                raise RefusedError(f"{receiver.name}: storage does not hold content {content_digest}, but {state}")
        self._receiver = Receiver(receiver.name, receiver.record_id, content_digest)
        self._catches_up = isinstance(request, BeginCatchUp)
        self._observe = self._watch if self._catches_up else self._log_events

    def _arrived(self, receiver: Receiver, request: Payload) -> list[Result]:
        if isinstance(request.data, bytes):
            return self._payload(receiver, request.identity, request.data)
        data = read_shared(request.data, self._limits.payload_bytes_max)
        return self._payload(receiver, request.identity, data, request.data.digest)

    def _read_back(self) -> Contents:
        assert self._storage is not None
        with stage("read back"):
            found = self._storage.readback(self._tied)
        held = {
            name: tuple(HeldBox(h.extent.sizes, h.extent.strides, h.extent.offset, h.digest.hex()) for h in extents)
            for name, extents in found.held.items()
        }
        return Contents(held, found.wrong, found.unread)

    def _payload(
        self, receiver: Receiver, identity: PayloadIdentity, data: bytes | memoryview, received: str = ""
    ) -> list[Result]:
        """Take a payload's bytes; ``received`` is their digest as the node received them, if it shared them."""
        started = time.perf_counter()
        with stage("validate"):
            digest = payload_digest(data)
            if received and digest != received:
                raise CorruptPayloadError(f"shared memory does not hold what the node received for {identity}")
            header, items = decode_payload(data, self._limits, self._known, self._undecoded)
        if header.identity != identity:
            raise CorruptPayloadError(f"bytes fetched for {identity} are payload {header.identity}")
        self._took(identity.epoch, "decode", started)
        self._kind = header.base.kind
        if lost := self._lost(header):
            return self._carry_out(receiver.undeliverable(identity.epoch, lost))
        effects = receiver.payload(header.identity, header.base, digest, header.entries)
        return self._carry_out(effects, (identity, data), items)

    def _lost(self, header: PayloadHeader) -> str:
        """Why changes would be lost without a trace: no rank of the engine holds the tensor; empty if none would.

        A dense payload or a restore holds every element, changed or not, and says nothing of changes: what it leaves
        out here, a dense load by the same loader leaves out too.
        """
        if header.base.kind not in _CHANGES:
            return ""
        lost = sorted({i.name for i in header.items if i.entries and i.name in self._orphans})
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        if not lost:
            return ""
        return (
            f"tensor {lost[0]!r}{more} has changed, but no rank of this engine holds it: its loader skips it on all of "
            "them, and it is not known to be tied to one that is loaded; leave it out of what is trained or saved, or "
            "serve it with a model that loads it"
        )

    def _carry_out(
        self,
        effects: list[Effect],
        payload: tuple[PayloadIdentity, bytes | memoryview] | None = None,
        items: Sequence[Item] = (),
    ) -> list[Result]:
        """Carry out effects in order; what they lead to is carried out in their place.

        Args:
            effects: of the receiver.
            payload: identity and bytes of the one that the effects are about.
            items: what it decodes to, of what this rank holds.
        """
        assert self._receiver is not None
        assert self._storage is not None
        results: list[Result] = []
        for effect in effects:
            match effect:
                case Step():
                    self._observe(effect)
                case Hold():
                    assert payload is not None
                    failed = self._hold(self._receiver, *payload, items)
                    if failed:  # without these bytes nothing that follows from holding them is true
                        return results + self._carry_out(failed)
                case ApplyStaged():
                    results += self._apply_staged(self._receiver)
                case DropStage():
                    self._held, self._held_bytes, self._touched = {}, 0, {}
                case BeginWrite():
                    results += self._carry_out(self._write(self._receiver, self._storage, effect.identity, items))
                case Synchronise():
                    results += self._carry_out(self._synchronise(self._receiver, self._storage, effect.epoch))
                case _:
                    if isinstance(effect, (RankAcknowledged, RankFailed)):  # nothing more is written in this epoch
                        self._touched.pop(effect.epoch, None)
                    results.append(effect)
        return results

    def _overlap(self, identity: PayloadIdentity, items: Sequence[Item]) -> str:
        """Why a payload must not be applied beside the others of its epoch; empty if it may (DESIGN D7).

        Notes its elements, once however often it comes: it is held before it is written.
        """
        if identity.epoch not in self._touched:
            self._touched, self._noted = {identity.epoch: TouchedElements()}, set()
            self._tied_changes = TiedChanges(self._tied if self._kind in _CHANGES else {})
        if identity in self._noted:
            return ""
        self._noted.add(identity)
        self._tied_changes.add(items)
        twice = self._touched[identity.epoch].add(items)
        if not twice:
            return ""
        return (
            f"payload {identity.owner}/{identity.sequence} of epoch {identity.epoch} changes elements of {twice} that "
            "another payload of the epoch changes too, and nothing says which comes last; none of it was written: "
            "owners must not overlap"
        )

    def _hold(
        self, receiver: Receiver, identity: PayloadIdentity, data: bytes | memoryview, items: Sequence[Item]
    ) -> list[Effect]:
        """Keep a payload's bytes; beyond the bound the epoch fails, and what is held is let go (DESIGN D18)."""
        assert self._attach is not None
        if overlap := self._overlap(identity, items):
            return receiver.undeliverable(identity.epoch, overlap)
        held, bound = self._held_bytes + len(data), self._attach.stage_bytes_max
        if held > bound:
            reason = (
                f"its stage would hold {held} payload bytes in host memory, more than stage_bytes_max = {bound}: raise "
                "stage_bytes_max, or use the synchronous gate"
            )
            return receiver.undeliverable(identity.epoch, reason)
        self._held[identity] = data
        self._held_bytes = held
        return []

    def _open_apply(self, receiver: Receiver, request: OpenApply | WriteOn) -> list[Result]:
        if isinstance(request, OpenApply):
            return self._carry_out(receiver.open_apply(request.record_id, request.epoch))
        if receiver.epoch != request.epoch or receiver.stage not in {"applying", "failed"}:
            raise RefusedError(f"what is held of epoch {receiver.epoch} may not be written: it is {receiver.stage}")
        return self._apply_staged(receiver)

    def _apply_staged(self, receiver: Receiver) -> list[Result]:
        """Hand in again what is held, and let go of each payload as it is written; a failure lets go of the rest.

        For so long as an answer may take: the rest is written on ``WriteOn``, and meanwhile the node can say how far
        it is.
        """
        results: list[Result] = []
        until = time.perf_counter() + ANSWER_S
        while self._held:
            identity = next(iter(self._held))
            data = self._held.pop(identity)
            self._held_bytes -= len(data)
            try:
                results += self._payload(receiver, identity, data)
            except RefusedError as e:  # what was intact when it came is not any more: memory that went bad
                results += self._carry_out(receiver.undeliverable(identity.epoch, str(e)))
            if time.perf_counter() >= until:
                break
        return results

    def _write(
        self, receiver: Receiver, storage: Storage, identity: PayloadIdentity, items: Sequence[Item]
    ) -> list[Effect]:
        if overlap := self._overlap(identity, items):
            return receiver.write_failed(identity, overlap)
        started = time.perf_counter()
        try:
            with stage("apply"):
                storage.apply(items)
        except Exception as e:  # noqa: BLE001 - a native loader may raise anything; the epoch fails by its name
            return receiver.write_failed(identity, f"{type(e).__name__}: {e}")
        self._took(identity.epoch, "apply", started)
        return receiver.write_ended(identity)

    def _synchronise(self, receiver: Receiver, storage: Storage, epoch: int) -> list[Effect]:
        started = time.perf_counter()
        if lost := self._tied_changes.lost():
            return receiver.synchronise_failed(epoch, lost)
        try:
            storage.synchronise()
        except (DcrError, RuntimeError) as e:
            return receiver.synchronise_failed(epoch, f"{type(e).__name__}: {e}")
        self._took(epoch, "synchronise", started)
        return receiver.synchronised(epoch)

    def _took(self, epoch: int, stage: str, started: float) -> None:
        if epoch != self._seconds_epoch:
            self._seconds_epoch, self._seconds = epoch, {}
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - started


def _what(request: Attach) -> Attach:
    """The part of a request that says what the storage is."""
    return msgspec.structs.replace(request, stage_bytes_max=0, event_log="", event_log_bytes_max=0)


def _checked_manifest(request: SealedManifest) -> Manifest:
    manifest = decode_manifest(request.data)
    if (manifest.owner, manifest.epoch) != (request.owner, request.epoch):
        raise CorruptPayloadError(
            f"manifest fetched for {request.owner}, epoch {request.epoch}, is of {manifest.owner}, epoch "
            f"{manifest.epoch}"
        )
    try:
        ContentDigest.from_hex(manifest.content_digest)
    except ValueError as e:
        raise CorruptPayloadError(f"manifest of {manifest.owner}: {e}") from e
    return manifest
