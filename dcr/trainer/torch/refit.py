"""The trainer's front door: every rank of a torch trainer pushes its weights to the rollout engines."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from dcr.control_plane.address import open_control_plane
from dcr.data_plane.change_counts import ChangeCount, reading_order
from dcr.delivery.address import open_delivery
from dcr.delivery.sealed import SealedDelivery
from dcr.delivery.traffic import Traffic
from dcr.protocol.errors import DcrError
from dcr.protocol.layer_changes import LAYERS_REST
from dcr.protocol.messages import Outcome
from dcr.runtime.coordinator_host import CoordinatorHost
from dcr.runtime.event_log import event_folder
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.owner_host import OwnerHost
from dcr.runtime.registry import RelayDirectory
from dcr.runtime.secret import load_or_create_secret, record_secret
from dcr.runtime.secret_path import secret_path
from dcr.runtime.settings import Settings
from dcr.runtime.source import Source
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.source import TorchSource

OTHER_LAYERS = "(other layers)"
"""What a report calls the layers together that are beyond the bound of ``dcr.protocol.layer_changes``."""


class PushError(DcrError):
    """A push did not end in a commit; the message says what stopped it, and what can be done."""


@dataclass(frozen=True)
class RefitReport:
    """How a push went.  Sums are over all owners; times, in seconds, are those of the slowest.

    Attributes:
        version: the version now committed.
        kind: kind of the attempt that committed: relative, absolute or dense; unknown if a coordinator that is gone
            committed it, and then the counts below are 0.
        attempts: attempts that this push took.
        failures: what stopped the attempts before the last.
        warnings: what went wrong after the commit; the version stands all the same.
        members: names of the engines that hold the version.
        changed_entries: elements sent.
        elements: elements of the checkpoint.
        payloads: number of payloads.
        payload_bytes: their size.
        wall_s: the whole push, on this rank.
        stages: seconds of work by stage: detect, encode, deliver, decode, apply, synchronise, fold; and blocked, for
            how long detection waited for encoding and the store.  Stages run at the same time.
        traffic: what this rank asked of the delivery store during the push; the only field that is not the same on
            every rank.
        layers: elements changed and in all, by layer in reading order, unchanged layers too, and what is beyond 256
            layers as OTHER_LAYERS.  Empty if kind is dense, for such an attempt compares nothing, or unknown.
            ``TrainerRefit.changes`` has this rank's share by tensor.
    """

    version: int
    kind: str
    attempts: int
    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    members: tuple[str, ...]
    changed_entries: int
    elements: int
    payloads: int
    payload_bytes: int
    wall_s: float
    stages: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    layers: dict[str, ChangeCount] = field(default_factory=dict)

    def json(self) -> str:
        """The report as one JSON object on one line, its fields by their names, with a rate (0 to 1) for each layer."""
        layers = {name: {**asdict(count), "rate": count.rate} for name, count in self.layers.items()}
        return json.dumps({**asdict(self), "layers": layers})


class Refit:
    """One on every training rank, once it has a source; the construction is collective.

    Args:
        source: this rank's share.
        ranks: the ranks that hold the model.
        control: address of the control plane.
        delivery: address of the delivery store.
        record_id: the commit record of this trainer; unique among trainers that share a control plane.
        settings: bounds.
        observe: called with every protocol step of this rank's roles.
    """

    def __init__(
        self,
        source: Source,
        ranks: Ranks,
        *,
        control: str,
        delivery: str,
        record_id: str,
        settings: Settings,
        observe: Observer,
    ) -> None:
        self._source = source
        self._control = open_control_plane(control)
        secret = load_or_create_secret(secret_path(control))
        self._delivery = SealedDelivery(
            open_delivery(delivery, RelayDirectory(self._control, record_id)), record_secret(secret, record_id)
        )
        events = event_folder(settings.event_log, control)
        owners: list[str] = ranks.gather(source.owner)
        self._coordinator: CoordinatorHost | None = None
        if ranks.rank == 0:
            self._coordinator = CoordinatorHost(
                record_id=record_id,
                leader=f"leader-{time.time_ns():x}-{secrets.token_hex(4)}",
                owners=owners,
                control=self._control,
                delivery=self._delivery,
                secret=secret,
                settings=settings,
                observe=observe,
                events=events,
            )
        address, *_ = ranks.gather("" if self._coordinator is None else self._coordinator.address)
        self._host = OwnerHost(
            source,
            incarnation=time.time_ns(),
            record_id=record_id,
            coordinator=address,
            control=self._control,
            delivery=self._delivery,
            secret=secret,
            settings=settings,
            observe=observe,
            events=events,
        )
        try:
            self._host.wait_connected()
        except BaseException:
            self.close()
            raise

    def push(self, *, dense: bool = False) -> RefitReport:
        """Bring every engine to the present weights; call it on every rank, and change no weight until it returns.

        Args:
            dense: send every element, whatever engines and baseline hold (the operator's way out of a stopped
                transition); it is enough to say so on the first rank.

        Raises:
            PushError: nothing was committed; the error of every rank is the same, and names what stopped the push.
            PushTimeoutError: no outcome in time.
        """
        if dense and self._coordinator is not None:
            self._coordinator.dense_next()
        started, before = time.perf_counter(), self._delivery.traffic
        outcome = self._host.push()
        if outcome.error:
            raise PushError(outcome.error)
        return _report(outcome, time.perf_counter() - started, self._delivery.traffic.since(before))

    @property
    def changes(self) -> Mapping[str, ChangeCount]:
        """What this rank found changed in the last push, by canonical tensor of which it owns elements.

        Whatever became of that push; tensors that did not change are there with 0.  The counts of all ranks add up to
        the checkpoint's.  Empty before the first push, and after a dense attempt, which compares nothing.
        """
        return self._source.changes_found

    def abandon(self) -> None:
        """Give up a stopped transition: engines that it tore are restored to the committed version.

        Call it on the first rank before pushing other weights; on the other ranks it does nothing.
        """
        if self._coordinator is not None:
            self._coordinator.abandon()

    def roll_back(self) -> None:
        """Turn an open transition back: engines that it tore get the committed version's bits, in place.

        Call it on the first rank, from another thread while ``push`` waits, which then raises ``PushError``, or after
        a stop, while the weights are still those that were pushed.  Where that cannot be done the transition is
        abandoned.  If none is open, and on the other ranks, it does nothing.
        """
        if self._coordinator is not None:
            self._coordinator.roll_back()

    def close(self) -> None:
        """End threads and connections; engines go on serving what they serve."""
        self._host.close()
        if self._coordinator is not None:
            self._coordinator.close()
        self._control.close()
        self._delivery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TrainerRefit(Refit):
    """One on every training rank of a torch trainer, made after the model; the construction is collective.

    ::

        refit = TrainerRefit(model, control="sqlite:///tmp/run/record.db", delivery="file:///tmp/run/payloads")
        report = refit.push()     # after optimizer.step(), on every rank; returns once committed and folded

    Args:
        model: a module with plain or DTensor parameters (FSDP2, tensor parallel).
        control: address of the control plane.
        delivery: address of the delivery store.
        record_id: the commit record of this trainer; unique among trainers that share a control plane.
        save_path: from a full state dict to the checkpoint's canonical tensors; see ``TorchSource``.
        process_group: the ranks that hold the model; the default group, or one rank alone.
        settings: bounds, as ``Settings`` or as a mapping of some of its fields.
        observe: called with every protocol step of this rank's roles.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        control: str,
        delivery: str,
        record_id: str = "default",
        save_path: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        settings: Settings | dict[str, object] | None = None,
        observe: Observer = log_step,
    ) -> None:
        bounds = settings if isinstance(settings, Settings) else Settings.of(settings or {})
        self.source = TorchSource(
            model, save_path=save_path, process_group=process_group, chunk_elements=bounds.chunk_elements
        )
        super().__init__(
            self.source,
            Ranks(process_group),
            control=control,
            delivery=delivery,
            record_id=record_id,
            settings=bounds,
            observe=observe,
        )


def _report(outcome: Outcome, wall_s: float, traffic: Traffic) -> RefitReport:
    s = dict(outcome.summary)

    def names(key: str) -> tuple[str, ...]:
        value = s.get(key, [])
        assert isinstance(value, list)
        return tuple(value)

    def count(key: str) -> int:
        value = s[key]
        assert isinstance(value, int)
        return value

    prefix = "seconds_"
    return RefitReport(
        version=outcome.version,
        kind=str(s["kind"]),
        attempts=count("attempts"),
        failures=names("failures"),
        warnings=names("warnings"),
        members=names("members"),
        changed_entries=count("changed_entries"),
        elements=count("elements"),
        payloads=count("payloads"),
        payload_bytes=count("payload_bytes"),
        wall_s=wall_s,
        stages={
            k.removeprefix(prefix): float(v) for k, v in s.items() if k.startswith(prefix) and isinstance(v, float)
        },
        traffic=traffic,
        layers=_layers(outcome),
    )


def _layers(outcome: Outcome) -> dict[str, ChangeCount]:
    in_order = sorted(outcome.layers, key=lambda one: (one.layer == LAYERS_REST, reading_order(one.layer)))
    return {one.layer or OTHER_LAYERS: ChangeCount(one.changed, one.elements) for one in in_order}
