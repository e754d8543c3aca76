"""In a child process: its connections go through the harness's proxies, which may cut them.

What connects is found where the product makes it, for that takes no address from outside: a control channel's comes
from the registry or from the trainer's own coordinator, a relay's from the registry.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dcr.runtime.spoke import Spoke


def channel_through(module: ModuleType, address: str) -> None:
    """Have the control channel that a module makes go to a proxy, once there is a coordinator.

    Args:
        module: of the node agent, or of the owner host.
        address: of the proxy.
    """

    def spoke(*given: Any, resolve: Callable[[], str | None], **rest: Any) -> Spoke:
        return Spoke(*given, resolve=lambda: None if resolve() is None else address, **rest)

    vars(module)["Spoke"] = spoke


def relay_through(ports: Mapping[str, int]) -> None:
    """Have what this process sends to relays go to proxies; the certificates are the relays' own.

    Args:
        ports: of the proxies on loopback, by the relay's name.
    """
    from dcr.delivery.relay import node as node_module  # noqa: PLC0415 - optional dependency
    from dcr.delivery.relay import sender as sender_module  # noqa: PLC0415
    from dcr.delivery.relay.peer import Peer  # noqa: PLC0415
    from dcr.delivery.relay.tree import Node  # noqa: PLC0415

    def peer(node: Node, *rest: Any) -> Peer:
        port = ports.get(node.name)
        return Peer(node if port is None else Node(node.name, "127.0.0.1", port), *rest)

    for module in (node_module, sender_module):
        vars(module)["Peer"] = peer
