"""Fetching one attempt, payload by payload, from what the host receives into the ranks of one engine."""

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from dcr.data_plane.nvtx import stage
from dcr.delivery.interface import DeliveryError
from dcr.delivery.traffic import Traffic
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import PayloadIdentity, decode_manifest
from dcr.protocol.messages import Prepare
from dcr.protocol.record import OwnerRef
from dcr.runtime.incoming import Incoming
from dcr.runtime.rank_messages import Answer, Payload, SealedManifest, Shared, Undeliverable

_log = logging.getLogger("dcr.node")

_TRIES_MAX = 3
_SILENT_S = 10.0
"""After so long without anything of an owner, the log says so."""

Answers = Mapping[str, Answer]
"""What the ranks of an engine answered to one request, by rank."""


class Fetch:
    """Everything that an attempt's owners emit, in the order in which it comes into sight.

    Keys follow from identities, so that payloads are found while the owner is still emitting, without listing; the
    manifest, which is delivered last, says how many there are.

    Args:
        order: the attempt.
        inbox: where payloads and manifests come from.
        call: hands a request to every rank of the engine.
        ahead: how many payloads of each owner are read from the store before they are asked for.
        timeout_s: how long the next payload that an owner's manifest lists may stay out of sight; counted for each
            owner by itself, from when its last one came.

    Attributes:
        bytes: payload bytes that the ranks have taken so far.
        payloads: how many payloads those were.
        with_ranks: whether the ranks have one at this moment.
    """

    def __init__(
        self,
        order: Prepare,
        inbox: Incoming,
        call: Callable[[Payload | SealedManifest | Undeliverable], Answers],
        *,
        ahead: int,
        timeout_s: float,
    ) -> None:
        self.order = order
        self.bytes = 0
        self.payloads = 0
        self.with_ranks = False
        self._inbox = inbox
        self._call = call
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._before = inbox.traffic
        self._owners = [_Source(o) for o in order.owners]

    @property
    def done(self) -> bool:
        """True when everything that the manifests list has reached the ranks."""
        return all(s.done for s in self._owners)

    @property
    def total(self) -> int | None:
        """How many payloads the manifests list; None while one has not come."""
        totals = [s.total for s in self._owners]
        return None if None in totals else sum(total for total in totals if total is not None)

    @property
    def waits_for(self) -> str:
        """What has not come yet, for people."""
        left = [s for s in self._owners if not s.done]
        named = ", ".join(
            f"payload {s.next}{'' if s.total is None else f' of {s.total}'} of {s.ref.owner}" for s in left[:4]
        )
        return named + (f" and {len(left) - 4} more owners" if len(left) > 4 else "")  # noqa: PLR2004 - enough to see

    @property
    def traffic(self) -> Traffic:
        """What was asked of the store since this began, for other engines of the host too."""
        return self._inbox.traffic.since(self._before)

    def step(self) -> list[Answers]:
        """Fetch what is in sight now, at most one object an owner; an empty list means that nothing was."""
        answers: list[Answers] = []
        for source in self._owners:
            if source.done:
                continue
            try:
                answers += self._one(source)
            except (DeliveryError, RefusedError) as e:
                answers.append(self._call(Undeliverable(self.order.epoch, f"fetching from {source.ref.owner}: {e}")))
                source.failed = True
        return answers

    def _one(self, source: "_Source") -> list[Answers]:
        o, ref = self.order, source.ref
        identity = PayloadIdentity(o.record_id, o.target, o.epoch, ref.owner, ref.incarnation, source.next)
        with stage("fetch"):
            data = self._inbox.payload(identity)
        if data is not None:
            source.waits_since = None
            # While the ranks work on this one, those after it come in.
            end = source.next + 1 + self._ahead
            following = range(source.next + 1, end if source.total is None else min(end, source.total))
            self._inbox.ahead(msgspec.structs.replace(identity, sequence=n) for n in following)
            return self._payload(source, Payload(identity, data))
        if source.total is not None:
            now = time.monotonic()
            source.waits_since = source.waits_since or now
            if now - source.waits_since > self._timeout_s:
                source.failed = True
                reason = (
                    f"payload {source.next} of the {source.total} that {ref.owner} lists did not come in "
                    f"{self._timeout_s} s"
                )
                return [self._call(Undeliverable(o.epoch, reason))]
            return []
        with stage("fetch"):
            manifest = self._inbox.manifest(o, ref)
        if manifest is not None:
            return self._manifest(source, SealedManifest(ref.owner, o.epoch, manifest))
        self._tell_of_silence(source)
        return []

    def _tell_of_silence(self, source: "_Source") -> None:
        """Say once that nothing of an owner has come: it may be at work still, or deliver to somewhere else."""
        if source.next or source.told or time.monotonic() - self._began < _SILENT_S:
            return
        source.told = True
        _log.warning(
            "epoch %d: nothing of %s has come in %.0f s: either it is still finding the first changes, or it does not "
            "deliver to where this node looks; compare delivery and record_id of both sides",
            self.order.epoch,
            source.ref.owner,
            _SILENT_S,
        )

    def _payload(self, source: "_Source", request: Payload) -> list[Answers]:
        answers, good = self._deliver(source, request)
        if good:
            self.bytes += request.data.size if isinstance(request.data, Shared) else len(request.data)
            self.payloads += 1
            self._inbox.payload_taken(request.identity)
            source.next += 1
        else:
            self._inbox.payload_again(request.identity)
        return answers

    def _manifest(self, source: "_Source", request: SealedManifest) -> list[Answers]:
        answers, good = self._deliver(source, request)
        if good:
            self._inbox.manifest_taken(self.order, source.ref)
            source.total = len(decode_manifest(request.data).payloads)
        else:
            self._inbox.manifest_again(self.order, source.ref)
        return answers

    def _deliver(self, source: "_Source", request: Payload | SealedManifest) -> tuple[list[Answers], bool]:
        """Hand an object to the ranks; what they answered, and whether all of them took it."""
        self.with_ranks = True
        answers = self._call(request)
        self.with_ranks = False
        refused = {rank: a for rank, a in answers.items() if a.refused}
        if not refused:
            source.tries = 0
            return [answers], True
        source.tries += 1
        if all(a.corrupt for a in refused.values()) and source.tries < _TRIES_MAX:
            # What the store holds may be good, and only this copy of it bad; a rank that took it ignores another.
            taken = {rank: a for rank, a in answers.items() if rank not in refused}
            return [taken] if taken else [], False
        source.failed = True
        rank, first = next(iter(refused.items()))
        reason = first.refused if len(answers) == 1 else f"rank {rank}: {first.refused}"
        return [answers, self._call(Undeliverable(self.order.epoch, reason))], False


class _Source:
    """How far one owner's emission has been fetched."""

    def __init__(self, ref: OwnerRef) -> None:
        self.ref = ref
        self.next = 0
        self.total: int | None = None
        self.tries = 0
        self.failed = False
        self.told = False
        """The log knows that nothing of it has come."""
        self.waits_since: float | None = None
        """When it was seen first that the next payload, which is listed, is not there yet."""

    @property
    def done(self) -> bool:
        return self.failed or (self.total is not None and self.next >= self.total)
