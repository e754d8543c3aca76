"""The control channel: connections that keep messages in order, break, and are noticed late."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LATE_MAX = 6
"""So many orders of connections that are gone are still to come to one party."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What a coordinator hears when a connection of this incarnation has ended."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Connected:
    """What a coordinator hears first on a connection: from here on its orders go there.

    Until then they go to the connection before, so that an order that was meant for a dead incarnation never reaches
    the next one (``dcr.runtime.hub``).
    """

    link: "Link"


class Link:
    """One connection of a party to a coordinator, as long as it stands.

    Args:
        inbox: what is on its way to the coordinator from this party, over this connection and those before it, in
            order: a loss is told before whatever the next connection brings.
        incarnation: of the party.
    """

    __slots__ = ("down", "inbox", "incarnation", "open")

    def __init__(self, inbox: deque[Any], incarnation: int) -> None:
        self.inbox = inbox
        self.incarnation = incarnation
        self.down: deque[Any] = deque()
        self.open = True

    def send_up(self, report: object) -> None:
        """A report on its way."""
        if self.open:
            self.inbox.append(report)

    def send_down(self, order: object) -> None:
        """An order on its way."""
        if self.open:
            self.down.append(order)

    def breaks(self, lost: int) -> None:
        """The connection ends; so many of the last reports never arrive, and the coordinator hears of it."""
        if not self.open:
            return
        self.open = False
        while lost and self.inbox and not isinstance(self.inbox[-1], Lost | Connected):
            self.inbox.pop()
            lost -= 1
        self.inbox.append(Lost(self.incarnation))


def late(orders: Iterable[Any], kept: int) -> list[Any]:
    """What of the orders on a connection that is gone may still come: the first few."""
    return [*orders][: kept % (LATE_MAX + 1)]


def message_name(message: object) -> str:
    """A message's kind and epoch, for people."""
    epoch = getattr(message, "epoch", None)
    who = getattr(message, "engine", "") or getattr(message, "owner", "")
    return " ".join(x for x in (type(message).__name__, who and f"of {who}", f"epoch {epoch}" if epoch else "") if x)
