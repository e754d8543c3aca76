"""Who passes an object on to whom: balanced trees over the rollout nodes, one for each root (paper section 7.1)."""

from collections.abc import Iterator, Sequence

import msgspec

from dcr.protocol.errors import RefusedError

NODES_MAX = 4096
FAN_OUT_MAX = 64
HOPS_MAX = 64
"""From the root to the farthest node; more nodes want a fan-out above 1."""


class Node(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a rollout node listens.

    Attributes:
        name: in its certificate.
        host: name or address.
        port: of its listener.
    """

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} at {self.host}:{self.port}"


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A node, and the branches that it passes objects on to."""

    node: Node
    branches: tuple["Branch", ...] = ()

    def nodes(self) -> Iterator[Node]:
        """Every node of the branch."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch.node
            waiting += branch.branches

    @property
    def height(self) -> int:
        """How many hops lie between its node and the farthest one behind it."""
        height, behind = 0, self.branches
        while behind:
            height, behind = height + 1, tuple(b for branch in behind for b in branch.branches)
        return height


def plan(nodes: Sequence[Node], root: int, fan_out: int) -> Branch:
    """The tree from one root over all nodes, as shallow as ``fan_out`` allows.

    The nodes after the root, in order and around the end, are the ones that pass objects on; so over all roots every
    node has the same work.

    Args:
        nodes: at least one, in an order that all owners share.
        root: place of the node that the owner sends to.
        fan_out: how many others one node sends to.

    Raises:
        RefusedError: no node, more than NODES_MAX, a fan-out outside 1 to FAN_OUT_MAX, or more than HOPS_MAX hops.
    """
    if not 1 <= len(nodes) <= NODES_MAX:
        raise RefusedError(f"relay: {len(nodes)} nodes; 1 to {NODES_MAX} can be sent to")
    if not 1 <= fan_out <= FAN_OUT_MAX:
        raise RefusedError(f"relay: a fan-out of {fan_out}; 1 to {FAN_OUT_MAX}")
    if fan_out == 1 and len(nodes) > HOPS_MAX + 1:
        raise RefusedError(f"relay: fan_out = 1 over {len(nodes)} nodes, at most {HOPS_MAX + 1}; raise fan_out")
    order = [*nodes[root:], *nodes[:root]]
    # As a heap lies in an array: the children of place p are at fan_out * p + 1 and after it.
    branches: list[Branch] = [Branch(node) for node in order]
    for place in reversed(range(len(order))):
        first = fan_out * place + 1
        branches[place] = Branch(order[place], tuple(branches[first : first + fan_out]))
    return branches[0]
