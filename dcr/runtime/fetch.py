"""Fetching one attempt from the delivery store, payload by payload, into the rank."""

import time
from collections.abc import Callable

from dcr.delivery.interface import Delivery, DeliveryError, manifest_key, payload_key
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import PayloadIdentity, decode_manifest
from dcr.protocol.messages import Prepare
from dcr.protocol.record import OwnerRef
from dcr.runtime.rank_messages import Answer, Payload, SealedManifest, Undeliverable

MANIFEST_BYTES_MAX = 64 << 20
_TRIES_MAX = 3


class Fetch:
    """Everything that an attempt's owners emit, in the order in which it comes into sight.

    Keys follow from identities, so that payloads are found while the owner is still emitting, without listing; the
    manifest, which is delivered last, says how many there are.

    Args:
        order: the attempt.
        delivery: the store.
        call: hands a request to the rank.
        payload_bytes_max: larger objects are refused before they are read.
        timeout_s: how long a payload that its owner's manifest lists may stay out of sight.
    """

    def __init__(
        self,
        order: Prepare,
        delivery: Delivery,
        call: Callable[[Payload | SealedManifest | Undeliverable], Answer],
        *,
        payload_bytes_max: int,
        timeout_s: float,
    ) -> None:
        self.order = order
        self._delivery = delivery
        self._call = call
        self._payload_bytes_max = payload_bytes_max
        self._timeout_s = timeout_s
        self._owners = [_Source(o) for o in order.owners]
        self._missing_since: float | None = None
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        """True when everything that the manifests list has reached the rank."""
        return all(s.done for s in self._owners)

    def step(self) -> list[Answer]:
        """Fetch what is in sight now, at most one object an owner; an empty list means that nothing was."""
        answers: list[Answer] = []
        for source in self._owners:
            if source.done:
                continue
            started = time.perf_counter()
            try:
                answers += self._one(source)
            except (DeliveryError, RefusedError) as e:
                answers.append(self._call(Undeliverable(self.order.epoch, f"fetching from {source.ref.owner}: {e}")))
                source.failed = True
            if answers:
                self.seconds += time.perf_counter() - started
        return answers

    def _one(self, source: "_Source") -> list[Answer]:
        o, ref = self.order, source.ref
        identity = PayloadIdentity(o.record_id, o.target, o.epoch, ref.owner, ref.incarnation, source.next)
        data = self._delivery.get(payload_key(identity), self._payload_bytes_max)
        if data is not None:
            self._missing_since = None
            return self._deliver(source, Payload(identity, data))
        if source.total is not None:
            now = time.monotonic()
            self._missing_since = self._missing_since or now
            if now - self._missing_since > self._timeout_s:
                source.failed = True
                reason = f"payload {source.next} of {ref.owner} is listed but did not come in {self._timeout_s} s"
                return [self._call(Undeliverable(o.epoch, reason))]
            return []
        data = self._delivery.get(
            manifest_key(o.record_id, o.target, o.epoch, ref.owner, ref.incarnation), MANIFEST_BYTES_MAX
        )
        if data is None:
            return []
        answers = self._deliver(source, SealedManifest(ref.owner, o.epoch, data))
        if answers and not source.failed:
            source.total = len(decode_manifest(data).payloads)
        return answers

    def _deliver(self, source: "_Source", request: Payload | SealedManifest) -> list[Answer]:
        answer = self._call(request)
        if not answer.refused:
            source.tries = 0
            if isinstance(request, Payload):
                source.next += 1
            return [answer]
        source.tries += 1
        if answer.corrupt and source.tries < _TRIES_MAX:
            return []  # what the store holds may be good, and only this copy of it bad
        source.failed = True
        return [answer, self._call(Undeliverable(self.order.epoch, answer.refused))]


class _Source:
    """How far one owner's emission has been fetched."""

    def __init__(self, ref: OwnerRef) -> None:
        self.ref = ref
        self.next = 0
        self.total: int | None = None
        self.tries = 0
        self.failed = False

    @property
    def done(self) -> bool:
        return self.failed or (self.total is not None and self.next >= self.total)
