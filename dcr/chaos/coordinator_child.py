"""A coordinator that lives elsewhere than in the trainer: it stands by and leads, as `dcr coordinator` does."""

import threading
from typing import Any

from dcr.chaos.child import RECORD, Line
from dcr.chaos.hooks import WatchedControlPlane
from dcr.chaos.trainer_child import resources
from dcr.control_plane.address import open_control_plane
from dcr.delivery.address import open_delivery
from dcr.delivery.sealed import SealedDelivery
from dcr.runtime.event_log import event_folder
from dcr.runtime.registry import RelayDirectory
from dcr.runtime.secret import record_secret
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import Settings
from dcr.runtime.standby import Standby


def serve_coordinator(line: Line) -> None:
    """Say that it is ready, obey, and lead whenever no other one does.

    Raises:
        DcrError: it led and failed by itself, or what it needs could not be opened.
    """
    config = line.config
    settings = Settings.of(config.settings)
    control = WatchedControlPlane(open_control_plane(config.control), line.trigger)
    secret = run_secret(config.control)
    store = open_delivery(config.delivery, RelayDirectory(control, RECORD))
    standby = Standby(
        record_id=RECORD,
        name=config.name,
        control=control,
        delivery=SealedDelivery(store, record_secret(secret, RECORD)),
        secret=secret,
        settings=settings,
        observe=line.trigger.observer("coordinator", config.number),
        events=event_folder(settings.event_log, config.control),
    )

    def act(order: dict[str, Any]) -> Any:
        if order["do"] == "resources":
            return resources()
        raise ValueError(f"a coordinator takes no order {order['do']!r}")

    threading.Thread(target=line.serve, args=(act,), name="chaos-orders", daemon=True).start()
    line.journal.say("ready", who=config.name)
    line.tell("ready")
    standby.run()
