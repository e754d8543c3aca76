"""The trainer's front door: every rank of a torch trainer pushes its weights to the rollout engines."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from dcr.control_plane.address import open_control_plane
from dcr.data_plane.change_counts import ChangeCount
from dcr.delivery.address import open_delivery
from dcr.delivery.meeting import leave_sign
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.messages import Intervention
from dcr.protocol.record import OwnerRef
from dcr.runtime.coordinator_host import CoordinatorHost
from dcr.runtime.event_log import event_folder
from dcr.runtime.fleet_status import FleetStatus
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.offer import Offer
from dcr.runtime.operator import intervene
from dcr.runtime.owner_host import OwnerHost
from dcr.runtime.progress_log import ProgressLog, Steps, Stuck
from dcr.runtime.refit_status import RefitStatus, Told
from dcr.runtime.registry import RelayDirectory, register_meeting
from dcr.runtime.roster import Roster, close_roster, register_roster, withdraw_roster
from dcr.runtime.secret import record_secret
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import Settings
from dcr.runtime.source import Source
from dcr.runtime.stopped_push import StoppedPush
from dcr.runtime.terms import terms
from dcr.trainer.torch.pending_push import PendingPush
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.refit_report import RefitReport
from dcr.trainer.torch.source import TorchSource

_log = logging.getLogger("dcr.trainer")


class TrainerStatus(Told, frozen=True):
    """What a push is at, as one rank knows it, as of now."""

    emission: RefitStatus | None
    """What this rank emits, or emitted last: detect, encode, deliver; None before the first."""
    fleet: FleetStatus | None
    """Whom the coordinator waits for; None where it does not run: on other ranks than the first, and on that if it runs
    elsewhere (``dcr transition show`` asks it)."""

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.emission, self.fleet) if part is not None)


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
        step: told of each step of the construction.

    Raises:
        DcrError: on every rank alike, naming the rank that has it: an address, the secret, the setting ``channel`` or
            the lease of leadership is no good, or a rank does not reach the first one.
        RanksLostError: a rank is gone, or did not come.
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
        step: Callable[[str], None],
    ) -> None:
        self._source = source
        with ExitStack() as opened:  # what fails on one rank fails on all, and leaves nothing open on any
            step("opens the control plane and the delivery")
            self._control = ranks.together(lambda: open_control_plane(control))
            opened.callback(self._control.close)
            secret = ranks.together(lambda: run_secret(control))
            directory = RelayDirectory(self._control, record_id)
            store = ranks.together(lambda: open_delivery(delivery, directory))
            self._delivery = SealedDelivery(store, record_secret(secret, record_id))
            opened.callback(self._delivery.close)
            events = event_folder(settings.event_log, control)
            others = (
                f"waits until all {ranks.count} ranks have come so far" if ranks.count > 1 else "starts its threads"
            )
            step(others)
            self._record_id, self._secret, self._settings = record_id, secret, settings
            self._ranks = ranks
            self._first = ranks.rank == 0
            me = OwnerRef(source.owner, time.time_ns())
            owners = ranks.gather(me)

            def coordinator() -> CoordinatorHost | None:
                if not self._first:
                    return None
                if settings.coordinator == "elsewhere":
                    opened.callback(self._close_roster, self._ask_for_coordinator(owners))
                    return None
                withdraw_roster(self._control, record_id)
                return CoordinatorHost(
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

            self._coordinator = ranks.together(coordinator)
            if self._coordinator is not None:
                opened.callback(self._coordinator.close)
            address, *_ = ranks.gather(None if self._coordinator is None else self._coordinator.address)
            self._host = ranks.together(
                lambda: OwnerHost(
                    source,
                    incarnation=me.incarnation,
                    record_id=record_id,
                    coordinator=address,
                    control=self._control,
                    delivery=self._delivery,
                    secret=secret,
                    settings=settings,
                    observe=observe,
                    events=events,
                )
            )
            opened.callback(self._host.close)
            self._pending: PendingPush | None = None  # of begin_push, the last one
            self._copies = False  # whether there may be a copy on any rank
            self._stopped = StoppedPush(source.owner, record_id, self._control, secret, settings)
            self._progress = ProgressLog(_log, "dcr-progress", self._under_way)
            opened.callback(self._progress.close)
            step(f"connects to the coordinator {'that leads' if address is None else 'in the first rank'}")
            ranks.together(self._host.wait_connected)
            self._opened = opened.pop_all()

    def _ask_for_coordinator(self, owners: Sequence[OwnerRef]) -> Roster:
        """Say where this trainer delivers, what a coordinator must have in common with it, and whom to lead."""
        name = f"trainer-{time.time_ns():x}-{secrets.token_hex(4)}"
        register_meeting(self._control, self._record_id, leave_sign(self._delivery, self._record_id, name))
        asks = terms(self._settings, self._secret, self._record_id)
        return register_roster(self._control, self._record_id, owners, asks)

    def _close_roster(self, asked: Roster) -> None:
        try:
            close_roster(self._control, self._record_id, asked)
        except DcrError as e:
            _log.warning("record %r: coordinators could not be told that this trainer ends: %s", self._record_id, e)

    def push(self, *, dense: bool = False) -> RefitReport:
        """Bring every engine to the present weights; call it on every rank, and change no weight until it returns.

        Args:
            dense: send every element, whatever engines and baseline hold (the operator's way out of a stopped
                transition); it is enough to say so on the first rank.

        Raises:
            RefusedError: ``begin_push`` was called, and its ``result()`` was not taken; or the refit is closed.
            PushError: nothing was committed; the error of every rank is the same, and names what stopped the push.
            PushTimeoutError: no outcome in time.
        """
        self._refuse_pending()
        if self._copies:
            self._ranks.together(self._host.hold)
            self._copies = False
        self._prepare()
        offer = self._host.offer(dense=dense)
        try:
            return self._told_of(offer).result()
        finally:
            # A push that is interrupted takes its candidate back.
            self._host.give_up(offer, RefusedError(f"{self._source.owner}: push() was interrupted"))

    def begin_push(self, *, dense: bool = False) -> PendingPush:
        """Copy the present weights, and bring every engine to the copy; weights may change as soon as this returns.

        Collective: every rank calls it at the same point of its program, and no rank copies before all have come, or
        returns before all have copied.  So where an optimizer step needs all ranks the copies are of one step.

        The copy, one of what this rank owns in host memory, is made when it is needed first and used again by the next
        ``begin_push``; ``push`` and ``close`` give it back.  Of a push that failed it stays, so that the transition can
        be rolled back, until the next one begins.

        Args:
            dense: as for ``push``.

        Raises:
            RefusedError: on every rank alike, and no push began: ``result()`` of the last one was not taken, its
                candidate is still read, or a rank cannot copy its weights (one rank alone raises what it met).
            RanksLostError: a rank is gone, or did not come.
        """

        def ready() -> None:
            self._refuse_pending()
            self._host.release()

        self._ranks.together(ready)
        self._prepare()
        self._copies = True
        self._ranks.together(self._host.snapshot)
        self._pending = self._told_of(self._host.offer(dense=dense))
        return self._pending

    def _prepare(self) -> None:
        """What a trainer does before its weights are read."""

    def _refuse_pending(self) -> None:
        # By what the program did, not by whether the push has ended: of that ranks hear one after the other.
        if self._pending is not None and not self._pending.told:
            raise RefusedError(
                f"{self._source.owner}: the push that begin_push() began last is pending: take its result() first, on "
                "every rank"
            )

    def _told_of(self, offer: Offer) -> PendingPush:
        return PendingPush(self._host, offer, self._delivery, lambda: self._fleet)

    @property
    def status(self) -> TrainerStatus:
        """How far a push is on this rank, and whom the coordinator waits for; from any thread, while a push goes on.

        The logger ``dcr.trainer`` has the same, every ten seconds of what takes longer.
        """
        return TrainerStatus(self._host.status, self._fleet)

    @property
    def _fleet(self) -> FleetStatus | None:
        return None if self._coordinator is None else self._coordinator.status

    def _under_way(self) -> Mapping[str, str | Stuck]:
        status, found = self.status, dict[str, str | Stuck]()
        if self._first and self._host.waiting and (stopped := self._stopped.look()) is not None:
            return {"transition": stopped}
        if self._host.emitting and status.emission is not None:
            found["emission"] = f"{self._source.owner}, {status.emission}"
        if unled := self._host.unled:
            found["coordinator"] = f"{self._source.owner}, its push waits, and no coordinator is connected: {unled}"
        if status.fleet is not None and status.fleet.waits_for:
            found["fleet"] = f"coordinator, {status.fleet}"
        return found

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

        Raises:
            OperatorError: the coordinator is elsewhere, and could not be asked.
        """
        if self._coordinator is not None:
            self._coordinator.abandon()
        elif self._first:
            self._order(Intervention.ABANDON)

    def roll_back(self) -> None:
        """Turn an open transition back: engines that it tore get the committed version's bits, in place.

        Call it on the first rank, from another thread while ``push`` waits or after ``begin_push``, and the push ends
        in ``PushError``, whether it was opened or not, unless it is committed by then; or after a stop, while the
        weights are still those that were pushed or a snapshot holds them.  Where that cannot be done the transition is
        abandoned.  If no push waits and none is open, and on the other ranks, it does nothing.

        Raises:
            OperatorError: no push waits here, the coordinator is elsewhere, and it could not be asked.
        """
        # An order says nothing of a push that is not opened yet, and may miss the leader; this stands, whoever leads.
        taken_back = self._first and self._host.take_back("rolled back on the trainer's order")
        if self._coordinator is not None:
            self._coordinator.roll_back()
        elif self._first and not taken_back:
            self._order(Intervention.ROLL_BACK)

    def _order(self, what: Intervention) -> None:
        """Ask the leader, wherever it is, as an operator would."""
        answer = intervene(
            self._control,
            self._record_id,
            self._secret,
            what,
            channel=self._settings.channel,
            connect_s=self._settings.connect_timeout_s,
            answer_s=self._settings.connect_timeout_s,
        )
        if answer.refused:
            _log.info("%s of record %r: nothing to be done: %s", what, self._record_id, answer.refused)

    def close(self) -> None:
        """End threads and connections; engines go on serving what they serve, and a push that is pending is given up.

        Coordinators that run elsewhere are told that this trainer asks for none any more.
        """
        self._opened.close()

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

        pending = refit.begin_push()     # or: returns once the weights are copied; train on, and before the next one
        report = pending.result()        # on every rank

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
        ranks = Ranks(process_group)
        bounds = ranks.together(lambda: settings if isinstance(settings, Settings) else Settings.of(settings or {}))
        with Steps(_log, f"refit of record {record_id!r}") as step:
            self.source = TorchSource(
                model,
                save_path=save_path,
                process_group=process_group,
                chunk_elements=bounds.chunk_elements,
                step=step,
            )
            super().__init__(
                self.source,
                ranks,
                control=control,
                delivery=delivery,
                record_id=record_id,
                settings=bounds,
                observe=observe,
                step=step,
            )
