"""A standby coordinator in a process of its own, which may kill or stop itself at a chosen point of its leadership."""

import logging
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlane
from dcr.delivery.address import open_delivery
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.step import Step
from dcr.runtime.event_log import event_folder
from dcr.runtime.registry import RelayDirectory
from dcr.runtime.secret import record_secret
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import Settings
from dcr.runtime.standby import Standby
from tests.faults.engine_process import _context

WAIT_S = 60.0


@dataclass(frozen=True)
class Point:
    """Where a leader ends, or is held still: at a step, before it is carried out; or around a write of K.

    ``before`` is before the compare-and-set with that reason, ``after`` between its effect and its answer.
    """

    where: str  # step, before, after
    action: str
    count: int = 1
    with_signal: int = signal.SIGKILL


class CoordinatorProcess:
    """Controls one standby; every wait is bounded."""

    def __init__(self, name: str, folder: Path, addresses: dict[str, Any], point: Point | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.process = _context.Process(target=_stand_by, args=(name, addresses, point, self.log), daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def runs(self) -> bool:
        """Whether it is neither dead nor held still, as the kernel says; from any thread."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "TtZX"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_ended(self) -> int | None:
        self.process.join(WAIT_S)
        return self.process.exitcode

    def wait_said(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.log.exists() or text not in self.log.read_text():
            assert time.monotonic() < deadline, f"coordinator {self.name} did not say {text!r}:\n{self.log.read_text()}"
            time.sleep(0.02)

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


class _Ends:
    """Sends this process its signal at the point.

    A process that is stopped in the middle of a transaction keeps SQLite's file locked for all others.  That is no part
    of what is tried: no other thread of it, such as the one that renews the lease, is in one then.

    The signal goes to the thread that has come to the point: after one that is sent to the process that thread runs on
    for a moment, and on a busy machine makes the write before which it is to be stopped.
    """

    def __init__(self, point: Point | None, control: ControlPlane) -> None:
        self._point = point
        self._between: AbstractContextManager[Any] = getattr(control, "_lock", nullcontext())
        self._left = 0 if point is None else point.count

    def reached(self, where: str, action: str) -> None:
        p = self._point
        if p is None or (where, action) != (p.where, p.action):
            return
        self._left -= 1
        if self._left == 0:
            with self._between:
                signal.pthread_kill(threading.get_ident(), p.with_signal)


def _stand_by(name: str, addresses: dict[str, Any], point: Point | None, log: Path) -> None:
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    control = open_control_plane(addresses["control"])
    ends = _Ends(point, control)
    write = control.compare_and_set

    def compare_and_set(*args: Any, **kwargs: Any) -> Any:
        ends.reached("before", kwargs["reason"])
        stored = write(*args, **kwargs)
        ends.reached("after", kwargs["reason"])
        return stored

    control.compare_and_set = compare_and_set  # type: ignore[method-assign]
    secret = run_secret(addresses["control"])
    settings = Settings.of(addresses["settings"])
    store = open_delivery(addresses["delivery"], RelayDirectory(control, "default"))

    def observe(step: Step) -> None:
        logging.getLogger("dcr").info("%s epoch=%d %s", step.action, step.epoch, step.detail)
        ends.reached("step", step.action)

    standby = Standby(
        record_id="default",
        name=name,
        control=control,
        delivery=SealedDelivery(store, record_secret(secret, "default")),
        secret=secret,
        settings=settings,
        observe=observe,
        events=event_folder(settings.event_log, addresses["control"]),
    )
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=standby.stop).start())
    standby.run()
