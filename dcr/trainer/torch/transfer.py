"""The trainer's side of vLLM's own door: changed weights through the weight-transfer backend ``dcr``.

It finds, encodes and seals changes as ``TrainerRefit`` does, and leaves the rest to vLLM's interface: the engines that
``client`` speaks for get references to the payloads, and whoever calls ``send_weights`` is the coordinator.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import manifest_key, sweep
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import Base, Kind, encode_manifest
from dcr.protocol.messages import Emit
from dcr.protocol.record import OwnerRef
from dcr.runtime.emission import Emission
from dcr.runtime.settings import Settings
from dcr.runtime.transfer import TransferAttempt
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.source import TorchSource

_log = logging.getLogger("dcr.transfer")


class SendError(DcrError):
    """An engine did not take the weights; it must not serve until a later ``send_weights`` has succeeded."""


@dataclass
class DcrTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """What ``WeightTransferTrainerFactory.trainer_init`` takes for the backend ``dcr``."""

    backend: ClassVar[str] = "dcr"

    model: torch.nn.Module
    """With plain or DTensor parameters; its weights are what the engines were loaded from, version 0."""
    delivery: str
    """Address of a delivery store that the engines' workers reach too."""
    record_id: str = "default"
    set_only: tuple[str, ...] = ()
    """Canonical tensors that the engines' loader transforms."""
    process_group: dist.ProcessGroup | None = None
    settings: Settings | dict[str, object] | None = None


class DcrTransferSender(TrainerWeightTransferEngine[DcrTrainerInitInfo]):  # type: ignore[misc]  # the same
    """One on every training rank; its construction and ``send_weights`` are collective.

    Attributes:
        version: the version that the engines hold after the last ``send_weights`` that succeeded.
    """

    init_info_cls = DcrTrainerInitInfo

    def __init__(self, init_info: DcrTrainerInitInfo, client: Any) -> None:
        super().__init__(client=client, is_sender=init_info.is_sender)
        given = init_info.settings
        self._settings = given if isinstance(given, Settings) else Settings.of(given or {})
        self._init = init_info
        self._source = TorchSource(
            init_info.model,
            process_group=init_info.process_group,
            chunk_elements=self._settings.chunk_elements,
        )
        self._delivery = open_delivery(init_info.delivery)
        self._ranks = Ranks(init_info.process_group)
        self._owners = tuple(self._ranks.gather(OwnerRef(self._source.owner, time.time_ns())))
        self._incarnation = self._owners[self._ranks.rank].incarnation
        self._run = secrets.token_hex(8)
        self._epoch = 0
        self._dense = False
        self.version = 0

    @classmethod
    def trainer_init(cls, init_info: DcrTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Take the model's weights as version 0, and have every engine learn its loader.

        Raises:
            RefusedError: a ``source`` was given: changes are found in the model itself; or an engine cannot take
                them.
        """
        if source is not None:
            raise RefusedError("backend dcr finds changes in init_info.model itself: leave source out")
        sender = cls(init_info, client)
        problem = None
        if sender.is_sender:
            names = list(init_info.set_only)
            try:
                client.init_weight_transfer_engine({"record_id": init_info.record_id, "set_only": names})
            except Exception as e:  # noqa: BLE001  a client may raise anything
                problem = f"the engines cannot be refitted: {e}"
        sender._ranks.refuse_together(problem)
        return sender

    def send_weights(self) -> None:
        """Bring the engines to the present weights; generation must be paused, and no weight may change meanwhile.

        After a failure the next call sends every element, whatever the engines hold.

        Raises:
            RefusedError: changes could not be found or delivered; the engines were not touched.
            SendError: an engine failed; it must stay paused.
        """
        attempt = self._emit()
        problem = self._drive(attempt) if self.is_sender else None
        failures = [found for found in self._ranks.gather(problem) if found]
        if failures:
            self._dense = True
            raise SendError(
                f"version {attempt.target}, epoch {attempt.epoch}: {failures[0]}; keep the engines paused, and send "
                "again: the next one is dense"
            )
        digest = self._source.candidate_digest
        assert digest is not None
        self._source.fold(digest)
        self._dense = False
        self.version = attempt.target
        if self.is_sender:
            sweep(self._delivery, self._init.record_id, attempt.epoch)

    @property
    def changes(self) -> Mapping[str, ChangeCount]:
        """What this rank found changed in the last ``send_weights``: see :attr:`TrainerRefit.changes`."""
        return self._source.changes_found

    def shutdown(self) -> None:
        """Let go of the delivery store."""
        self._delivery.close()

    def _drive(self, attempt: TransferAttempt) -> str | None:
        """The three calls of one update; what went wrong, None if nothing did."""
        try:
            self.client.start_weight_update()
        except Exception as e:  # noqa: BLE001  a client may raise anything
            # vLLM refuses while a session is open, and only finishing ends one: what a caller that died left open
            # does as well, and if none is open then the update is refused.
            _log.warning("start_weight_update was refused, the update goes on in the open session: %s", e)
        try:
            self.client.update_weights({"delivery": self._init.delivery, "attempt": attempt.plain()})
            self.client.finish_weight_update(str(attempt.target))
        except Exception as e:  # noqa: BLE001  the same
            return f"{type(e).__name__}: {e}"
        return None

    def _emit(self) -> TransferAttempt:
        """Find, deliver and seal the changes on every rank."""
        init = self._init
        # Grows over restarts of the trainer too, for engines refuse what is older than they have seen.
        (self._epoch, *_) = self._ranks.gather(max(self._epoch + 1, time.time_ns()))
        shares = self._ranks.gather(self._source.baseline_digest)
        lost = self._dense or any(share is None for share in shares)
        baseline = sum((share for share in shares if share is not None), ContentDigest()).hex()
        kind = Kind.DENSE if lost else Kind.RELATIVE
        base = Base(kind, self.version, baseline, f"{self._run}-{self.version + 1}-{self._epoch}")
        target = self.version + 1
        order = Emit(
            init.record_id, self._epoch, target, base, self._settings.operation, init.set_only, self._incarnation
        )
        problem = None
        try:
            emission = Emission(order, self._source, self._incarnation, self._delivery, self._settings)
            manifest = emission.run()
            key = manifest_key(init.record_id, target, self._epoch, manifest.owner, self._incarnation)
            self._delivery.put(key, encode_manifest(manifest))
        except DcrError as e:
            problem = str(e)
        self._ranks.refuse_together(problem)
        return TransferAttempt(init.record_id, self._epoch, target, base, self._owners)
