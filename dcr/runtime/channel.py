"""The control channel: one hub (the coordinator) and its spokes (owners, nodes), over loopback TCP or TLS.

Messages are opaque bytes.  A message is delivered at most once, in order, or lost with its connection: whoever sends
says again what matters when the peer is connected again.  The bytes on the wire are specified in
docs/control-channel.md.
"""

from dcr.runtime.frame import ChannelError, ChannelTimeoutError
from dcr.runtime.handshake import Peer
from dcr.runtime.hub import Connected, Disconnected, Hub, HubEvent, Received
from dcr.runtime.link import ChannelSettings
from dcr.runtime.spoke import Spoke

__all__ = [
    "ChannelError",
    "ChannelSettings",
    "ChannelTimeoutError",
    "Connected",
    "Disconnected",
    "Hub",
    "HubEvent",
    "Peer",
    "Received",
    "Spoke",
]
