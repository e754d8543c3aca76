"""vLLM's own door: a weight-transfer engine that applies one sealed attempt through the same rank host as a node's.

A worker makes it from ``weight_transfer_config={"backend": "dcr"}``, one on every rank.  The calls of vLLM's
reinforcement-learning interface mean::

    init_weight_transfer_engine(init_info)   attach: learn the loader, check the layout
    start_weight_update()                    nothing is written
    update_weights(update_info)              prepare, fetch every payload and manifest, apply, synchronise, acknowledge
    finish_weight_update(version)            the caller says: every rank has acknowledged, this is committed

What one rank checks for itself holds here as it does behind a node agent: fence, base, digests, completeness, and that
storage which a failed attempt tore takes no relative payload (DESIGN D4 to D8).  What takes a record and a leader does
not: the caller is the coordinator.  It must pause generation first, resume it only after every rank has finished, reset
caches in between, and never finish an update that failed anywhere; no gate, lease, membership or restore is behind this
door (``docs/vllm.md``).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.header import DEFAULT_LIMITS
from dcr.delivery.address import open_delivery
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import decode_manifest
from dcr.protocol.messages import OpenApply, Prepare
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankState
from dcr.protocol.record import CommitRecord, Committed, Member
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.node import describe
from dcr.rollout.vllm.extension import DcrWorkerExtension
from dcr.rollout.vllm.rank_calls import check_caches
from dcr.runtime.fetch import Fetch
from dcr.runtime.rank_messages import (
    Answer,
    Attach,
    Attached,
    Learn,
    Request,
    Result,
    SealedManifest,
    Undeliverable,
    WireSpec,
    decode_answer,
    encode,
)
from dcr.runtime.store_inbox import StoreInbox
from dcr.runtime.transfer import TransferAttempt

ENGINE = "vllm"
"""How errors call this engine: no record knows it by a name."""
_CALLER = "caller of vLLM's weight-transfer interface"
_RANK = "0"
"""Each rank is an engine of its own behind this door."""
_POLL_S = 0.004


class TransferError(DcrError):
    """An update did not reach this rank whole; storage may be torn, and generation must not be resumed."""


@dataclass
class DcrInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """What ``init_weight_transfer_engine`` takes."""

    record_id: str = "default"
    """Names the trainer's baseline; payloads of another one are refused."""
    set_only: list[str] = field(default_factory=list)
    """Canonical tensors that the trainer sends as ``set`` only; must include those that this loader transforms."""
    delivery_timeout_s: float = 60.0
    """How long a payload or manifest may stay out of sight, seconds."""


@dataclass
class DcrUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # the same
    """What ``update_weights`` takes: references to payloads and manifests, whole and sealed by now."""

    delivery: str
    """Address of the delivery store."""
    attempt: dict[str, Any]
    """``TransferAttempt`` as JSON values."""


@dataclass(frozen=True)
class _Acknowledged:
    attempt: TransferAttempt
    root: str
    content_digest: str


class _Rank(DcrWorkerExtension):
    """The rank host of a worker that vLLM gives the model alone."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self.model_runner = self
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.get_model = lambda: model


class DcrTransferEngine(WeightTransferEngine[DcrInitInfo, DcrUpdateInfo]):  # type: ignore[misc]  # the same
    """One rank behind vLLM's interface; see the module."""

    init_info_cls = DcrInitInfo
    update_info_cls = DcrUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = _Rank(model, vllm_config)
        self._init: DcrInitInfo | None = None
        self._incarnation = 0
        self._acknowledged: _Acknowledged | None = None
        self._last: _Acknowledged | None = None  # the same, until another attempt is prepared
        self._content = ContentDigest()  # the sum of the manifests' shares

    def init_transfer_engine(self, init_info: DcrInitInfo) -> None:
        """Attach.

        Raises:
            RefusedError: weights are not in their loader's layout, a canonical tensor cannot be refitted in place, or
                one that the loader transforms is not among ``set_only``; or the engine has caches that its caller
                could not reset.
        """
        self._together(lambda: self._attach(init_info))

    def _attach(self, init_info: DcrInitInfo) -> None:
        check_caches(ENGINE, self.vllm_config)
        specs, digest, _ = describe(read_checkpoint(self.model_config.model))
        tensors = tuple(WireSpec.of(spec) for spec in specs)
        (attached,) = self._call(Attach(ENGINE, init_info.record_id, tensors, digest))
        assert isinstance(attached, Attached)
        if attached.refused:
            name, reason = next(iter(attached.refused.items()))
            more = f"; and {len(attached.refused) - 1} more" if len(attached.refused) > 1 else ""
            raise RefusedError(f"{name} cannot be refitted in place: {reason}{more}")
        if missing := sorted(set(attached.set_only) - set(init_info.set_only)):
            raise RefusedError(
                f"this loader transforms {', '.join(missing)}, which only set is exact for: name them in set_only"
            )
        self._incarnation = attached.incarnation
        self._init = init_info

    def start_weight_update(self) -> None:
        """Begin a session; RefusedError before ``init_weight_transfer_engine``."""
        self._together(self._start)

    def _start(self) -> None:
        if self._init is None:
            raise RefusedError("start_weight_update came before init_weight_transfer_engine: call that first")
        self._acknowledged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Apply one attempt; in place of vLLM's, which synchronises an accelerator that need not be there."""
        self._together(lambda: self._receive(self.parse_update_info(update_info)))

    def receive_weights(self, update_info: DcrUpdateInfo) -> None:
        """Prepare, fetch, apply, synchronise, acknowledge.

        A later attempt in the same session takes the place of an earlier one: what a caller that died left open needs
        no ending.  The one acknowledged last is acknowledged again if it is sent again, as when its answer was lost.

        Raises:
            RefusedError: ``init_weight_transfer_engine`` has not succeeded, or the attempt is fenced, or not one that
                this storage may take; nothing was written.
            TransferError: it failed on the way, here or on another rank; storage may be torn, and takes a dense attempt
                only.
        """
        self._together(lambda: self._receive(update_info))

    @torch.no_grad()
    def _receive(self, update_info: DcrUpdateInfo) -> None:
        self._acknowledged = None
        if self._init is None:
            raise RefusedError("update_weights came before init_weight_transfer_engine: call that first")
        attempt = TransferAttempt.of(update_info.attempt)
        if self._last is not None and self._last.attempt == attempt:
            self._acknowledged = self._last
            return
        delivery = open_delivery(update_info.delivery)
        try:
            order = Prepare(
                attempt.record_id, attempt.epoch, attempt.target, attempt.base, attempt.owners, self._incarnation
            )
            base = attempt.base
            before = CommitRecord(attempt.record_id, base.version, attempt.epoch, _CALLER, 1, base.baseline_id)
            prepared = self._call(PrepareRank(order, before))
            self._last = None
            for result in prepared:
                if isinstance(result, RankFailed):
                    raise RefusedError(result.reason)
            self._call(OpenApply(attempt.record_id, attempt.epoch))
            self._content = ContentDigest()
            fetch = Fetch(
                order,
                StoreInbox(delivery, DEFAULT_LIMITS.payload_bytes_max),
                lambda request: {_RANK: self._take(request)},
                ahead=0,
                timeout_s=self._init.delivery_timeout_s,
            )
            self._fetch(fetch, attempt)
        finally:
            delivery.close()

    def finish_weight_update(self) -> None:
        """The caller says that every rank has acknowledged: storage holds the target from here on.

        Raises:
            RefusedError: this rank has acknowledged nothing since ``start_weight_update``.
            TransferError: another rank has not.
        """
        self._together(self._finish)

    def _finish(self) -> None:
        done = self._acknowledged
        if done is None:
            raise RefusedError("finish_weight_update without an update that was applied whole: nothing is committed")
        a = done.attempt
        member = (Member(ENGINE, self._incarnation),)
        pushes = (0,) * len(a.owners)  # nobody waits for the outcome: the caller has it
        committed = Committed(a.target, a.epoch, a.base.candidate, member, done.root, _CALLER, a.owners, pushes=pushes)
        record = CommitRecord(
            a.record_id, a.target, a.epoch, _CALLER, 1, done.content_digest, member, committed=committed
        )
        (state,) = self._call(Learn(record))
        assert isinstance(state, RankState)
        if not (state.committed_here and state.state.clean):
            raise TransferError(f"storage holds {state.state}, not version {a.target} of epoch {a.epoch}")
        self._acknowledged = None

    def shutdown(self) -> None:
        """Nothing is held between calls."""

    def _together(self, job: Callable[[], None]) -> None:
        """Do this on every rank, and fail on every rank if it fails on one.

        vLLM reads the ranks' answers in order and stops at a failure: the answers of later ranks are taken for those to
        the next call.  The first rank's is always of this call, and so it speaks for all of them.
        """
        failure: Exception | None = None
        try:
            job()
        except Exception as error:  # noqa: BLE001  the other ranks wait to be told
            failure = error
        ranks = self.vllm_config.parallel_config.world_size
        if ranks > 1:
            said: list[str] = [""] * ranks
            dist.all_gather_object(said, "" if failure is None else str(failure), group=get_world_group().cpu_group)
            if failure is None and any(said):
                others = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
                failure = TransferError(f"another rank failed: {others}")
        if failure is not None:
            raise failure

    def _fetch(self, fetch: Fetch, attempt: TransferAttempt) -> None:
        assert self._init is not None
        moved = time.monotonic()
        while self._acknowledged is None:
            answers = fetch.step()
            for answer in answers:
                for result in answer[_RANK].results:
                    if isinstance(result, RankFailed):
                        raise TransferError(f"epoch {attempt.epoch} failed here: {result.reason}")
                    if isinstance(result, RankAcknowledged):
                        self._acknowledged = self._last = _Acknowledged(attempt, result.root, self._content.hex())
            if answers:
                moved = time.monotonic()
            elif time.monotonic() - moved > self._init.delivery_timeout_s:
                reason = f"nothing more came in {self._init.delivery_timeout_s} s, and manifests are missing"
                self._call(Undeliverable(attempt.epoch, reason))
                raise TransferError(f"epoch {attempt.epoch} failed here: {reason}")
            else:
                time.sleep(_POLL_S)

    def _take(self, request: Request) -> Answer:
        _, raw = self._rank.dcr_call(0, encode(request))
        answer = decode_answer(raw)
        if answer.broken:
            raise TransferError(f"{type(request).__name__}: {answer.broken}; restart the engine")
        if isinstance(request, SealedManifest) and not answer.refused:
            self._content += ContentDigest.from_hex(decode_manifest(request.data).content_digest)
        return answer

    def _call(self, request: Request) -> tuple[Result, ...]:
        answer = self._take(request)
        if answer.refused:
            raise RefusedError(answer.refused)
        return answer.results
