"""One owner's emission of one epoch: from changes to delivered payloads to a manifest (paper sections 4 to 7)."""

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from dcr.data_plane.bucket import pack
from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.encode import to_item
from dcr.data_plane.item import Change, Item, Operation
from dcr.data_plane.nvtx import stage
from dcr.data_plane.payload import encode_payload, payload_digest
from dcr.delivery.interface import Delivery, payload_key
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import Kind, Manifest, PayloadIdentity, SealedPayload
from dcr.protocol.messages import Emit
from dcr.runtime.pipeline import CancelledError, Pipeline, Stage, StageProgress
from dcr.runtime.refit_status import LastMove, RefitStatus, StageStatus
from dcr.runtime.settings import Settings
from dcr.runtime.source import Source

_T = TypeVar("_T")


class Emission:
    """Detect, encode and deliver at the same time (paper section 7.2).

    A payload leaves as soon as its bucket is full, while the next ones are encoded and found.  A rollback detects what
    the candidate changed, and sends the baseline's bits of it (DESIGN D17).

    Args:
        order: the epoch to emit.
        source: this owner's share.
        incarnation: of this owner.
        delivery: where payloads go.
        settings: ``bucket_bytes``, ``buckets_ahead``, ``encode_threads``, ``deliver_threads``, ``delivery_timeout_s``.

    Attributes:
        cancelled: set it to stop; payloads that are on their way to the store come to their end.
        seconds: of work by stage.  Stages run at the same time, so that these may add up to more than went by;
            ``blocked`` is how long detection waited for the others.
    """

    def __init__(self, order: Emit, source: Source, incarnation: int, delivery: Delivery, settings: Settings) -> None:
        self.order = order
        self.cancelled = threading.Event()
        self.seconds = {"detect": 0.0, "encode": 0.0, "deliver": 0.0, "blocked": 0.0}
        self._source = source
        self._incarnation = incarnation
        self._delivery = delivery
        self._settings = settings
        self._changes: Iterator[Change] = iter(())
        self._back = order.base.kind is not Kind.RESTORE and order.target == order.base.version
        self._pipeline: Pipeline | None = None
        self._buckets: int | None = None  # in all, once everything is found
        self._moved = LastMove()
        self._started = False
        self._ended: RefitStatus | None = None
        self.begun = False
        """True once a payload may have left."""
        self.found: ContentDigest | None = None
        """The candidate's content, if this emission found it, whether or not it came to its end."""
        self.changes_found: Mapping[str, ChangeCount] = dict[str, ChangeCount]()
        """What the candidate changed, by canonical tensor; empty unless this emission compared, and to the end."""

    def run(self, candidate_digest: ContentDigest | None = None) -> Manifest:
        """Emit everything and return the manifest, which is not delivered yet.

        Args:
            candidate_digest: what an earlier attempt with this candidate found to be its content; None if none did.

        Raises:
            CancelledError: ``cancelled`` was set.
            DcrError: detection was refused, the candidate is not what it was, or the store failed.
        """
        self._started = True
        try:
            return self._run(candidate_digest)
        finally:
            # What comes after it, the fold for one, goes over the same elements and is none of it.
            self._ended, self._pipeline = msgspec.structs.replace(self.status, held_up_by=""), None

    @property
    def over(self) -> bool:
        """Whether ``run`` has ended, however."""
        return self._ended is not None

    @property
    def status(self) -> RefitStatus:
        """How far it is, or was when it ended; from any thread."""
        if self._ended is not None:
            return self._ended
        pipeline = self._pipeline
        through = {} if pipeline is None else pipeline.progress()
        encode, deliver = (through.get(name, StageProgress()) for name in ("encode", "deliver"))
        compared, elements = self._source.compared
        detect = StageStatus(
            "detect", compared if self._started else 0, "elements", elements, seconds=self.seconds["detect"]
        )
        stages = (detect, self._of("encode", encode), self._of("deliver", deliver))
        return self._moved.status(self.order.epoch, self._what, stages, self._held_up_by(encode, deliver))

    def _of(self, name: str, p: StageProgress) -> StageStatus:
        return StageStatus(name, p.done, "payloads", self._buckets, p.bytes, p.waiting, p.seconds)

    @property
    def _what(self) -> str:
        o = self.order
        if o.base.kind is Kind.RESTORE:
            return f"restoring version {o.target}"
        versions = f"back to version {o.target}" if self._back else f"version {o.base.version} -> {o.target}"
        return f"{versions}, {o.base.kind.value}"

    def _held_up_by(self, encode: StageProgress, deliver: StageProgress) -> str:
        """The last stage that others wait for: one that has work waiting, or else the first that is at work."""
        if deliver.waiting or (deliver.running and self._buckets is not None and not encode.running + encode.waiting):
            return f"deliver: {deliver.running} payloads are on their way to the store"
        if encode.waiting or (encode.running and self._buckets is not None):
            return "encode"
        return "detect"

    def _run(self, candidate_digest: ContentDigest | None) -> Manifest:
        o = self.order
        if candidate_digest is not None and o.base.kind is not Kind.RESTORE:
            self._check_candidate(candidate_digest)
        try:
            payloads = self._deliver()
        except (CancelledError, DcrError):
            if self.begun:
                self._finish_detection()
            raise
        restore = o.base.kind is Kind.RESTORE
        if not restore:
            self.found = self._source.candidate_digest
            if candidate_digest not in (None, self.found):
                raise RefusedError(self._stepped)
            self.changes_found = self._source.changes_found
        digest = self._source.baseline_digest if restore or self._back else self.found
        assert digest is not None
        return Manifest(
            record_id=o.record_id,
            target=o.target,
            epoch=o.epoch,
            owner=self._source.owner,
            owner_incarnation=self._incarnation,
            base=o.base,
            payloads=tuple(payloads),
            content_digest=digest.hex(),
            changed_entries=sum(p.entries for p in payloads),
            owned_elements=self._source.owned_elements,
        )

    def _deliver(self) -> list[SealedPayload]:
        """Find, encode and deliver payload by payload; the lines that the manifest has of them."""
        o, bounds = self.order, self._settings
        stages = (
            Stage("encode", self._encode, bounds.encode_threads, lambda encoded: encoded[0].size_bytes),
            Stage("deliver", self._send, bounds.deliver_threads, lambda sealed: sealed.size_bytes),
        )
        name = f"dcr-{self._source.owner}-epoch-{o.epoch}"
        pipeline = Pipeline(
            name, stages, ahead=bounds.buckets_ahead, cancelled=self.cancelled, stop_timeout_s=bounds.delivery_timeout_s
        )
        self._pipeline = pipeline
        with pipeline:
            try:
                number = -1
                for number, items in enumerate(self._timed(pack(self._items(), bounds.bucket_bytes), "detect")):
                    found = time.perf_counter()
                    pipeline.put((number, items))
                    self.seconds["blocked"] += time.perf_counter() - found
                self._buckets = number + 1
                return pipeline.join()
            finally:
                for stage_name, progress in pipeline.progress().items():
                    self.seconds[stage_name] = progress.seconds

    def _encode(self, bucket: tuple[int, Sequence[Item]]) -> tuple[SealedPayload, bytes]:
        number, items = bucket
        with stage("encode"):
            data = encode_payload(self._identity(number), self.order.base, items)
        with stage("seal"):
            digest = payload_digest(data)
        return SealedPayload(number, digest, sum(i.entries for i in items), len(data)), data

    def _send(self, encoded: tuple[SealedPayload, bytes]) -> SealedPayload:
        sealed, data = encoded
        self.begun = True
        with stage("send"):
            self._delivery.put(payload_key(self._identity(sealed.sequence)), data)
        return sealed

    def _identity(self, sequence: int) -> PayloadIdentity:
        o = self.order
        return PayloadIdentity(o.record_id, o.target, o.epoch, self._source.owner, self._incarnation, sequence)

    def _finish_detection(self) -> None:
        """Learn the candidate's content although nothing more is sent: what was sent may have torn members with it."""
        if self.order.base.kind is not Kind.RESTORE:
            for _ in self._timed(self._changes, "detect"):
                pass
            self.found = self._source.candidate_digest

    def _check_candidate(self, expected: ContentDigest) -> None:
        """Refuse weights that were stepped since an earlier attempt, before a payload of them leaves (DESIGN D10).

        Members torn by them would carry the same candidate's name, and the changed set of the right weights, which
        does not cover what the stepped ones changed, would be taken to repair them.
        """
        for _ in self._timed(self._source.changes(self.order.base.kind), "detect"):
            if self.cancelled.is_set():
                raise CancelledError
        if self._source.candidate_digest != expected:
            raise RefusedError(self._stepped)

    @property
    def _stepped(self) -> str:
        return (
            f"candidate changed: the weights owned by {self._source.owner} were stepped between two attempts; "
            "keep them as they are until push() returns"
        )

    def _items(self) -> Iterator[Item]:
        set_only = frozenset(self.order.set_only)
        relative = Operation(self.order.operation)
        self._changes = self._source.changes(self.order.base.kind)
        for found in self._changes:
            change = self._turned_back(found) if self._back else found
            if change.indices.numel():
                yield to_item(change, self.order.base.kind, change.spec.name not in set_only, relative)

    def _turned_back(self, change: Change) -> Change:
        assert change.old is not None, "a rollback is absolute: its changes are found against the baseline"
        return dataclasses.replace(change, new=change.old)

    def _timed(self, iterator: Iterator[_T], name: str) -> Iterator[_T]:
        """Count the time spent inside an iterator, and not in its consumer."""
        while True:
            started = time.perf_counter()
            try:
                with stage(name):
                    value = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds[name] += time.perf_counter() - started
            yield value
