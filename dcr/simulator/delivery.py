"""The delivery store: payloads and manifests of every epoch, there for ever, fetched in any order and any number."""

from dcr.protocol.identity import Manifest
from dcr.simulator.cells import Payload

Item = Payload | Manifest


class DeliveryStore:
    """What owners delivered, by epoch."""

    def __init__(self) -> None:
        self._items: dict[int, list[tuple[str, Item]]] = {}

    def put(self, epoch: int, item: Item) -> None:
        """An item is there from now on; the same one again changes nothing."""
        items = self._items.setdefault(epoch, [])
        key = self.key(item)
        if all(k != key for k, _ in items):
            items.append((key, item))

    @staticmethod
    def key(item: Item) -> str:
        """What tells items apart."""
        if isinstance(item, Payload):
            return item.digest
        return f"manifest of {item.owner}.{item.owner_incarnation} {item.epoch} {item.content_digest}"

    def of(self, epoch: int) -> list[tuple[str, Item]]:
        """Key and item, in the order in which they were delivered."""
        return self._items.get(epoch, [])

    def anything(self, which: int) -> Item | None:
        """Some item of some epoch, the last ones more often."""
        if not self._items:
            return None
        epochs = list(self._items)
        back = which % 3 if which % 4 else which % len(epochs)
        items = self._items[epochs[-1 - back % len(epochs)]]
        return items[(which // 16) % len(items)][1]
