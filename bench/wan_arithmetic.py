"""What the WAN bench computes: the link's rate, the reference, bounds, volumes and their ratios."""

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

PAPER_CHECKPOINT_BYTES, PAPER_LINK_BYTES_S = 247.2e9, 5e9 / 8
PAPER_LATENCY_S = 22.6
PAPER_CONSTRUCTION_SHARE = 0.18, 0.45
"""Of the refit latency, at least and at most, in the paper's section 8.7."""
FRAME_HEAD_BYTES = 14 + 20 + 32
"""Of a frame that carries TCP over IPv4: Ethernet, IP, and TCP with time stamps."""


@dataclass(frozen=True)
class LinkRate:
    """The rate of one node's link at which moving a checkpoint is to construction as it is in the paper.

    Attributes:
        ratio: moving the whole checkpoint over one node's link, over the construction of one node's share.
        construct_s: single-core seconds of the latter, here.
        bytes_s: the rate.
    """

    ratio: float
    construct_s: float
    bytes_s: float

    def __str__(self) -> str:
        paper_s = PAPER_CHECKPOINT_BYTES / PAPER_LINK_BYTES_S
        low, high = (share * PAPER_LATENCY_S for share in PAPER_CONSTRUCTION_SHARE)
        return (
            f"paper: {PAPER_CHECKPOINT_BYTES * 1e-9:.1f} GB at {PAPER_LINK_BYTES_S * 8e-9:g} Gbit/s are "
            f"{paper_s:.1f} s, "
            f"construction {low:.2f} to {high:.2f} s: {paper_s / high:.1f} to {paper_s / low:.1f} times as much; here "
            f"construction of a share takes {self.construct_s:.3f} s of one core, times {self.ratio:.1f} is "
            f"{self.ratio * self.construct_s:.2f} s for the checkpoint: {self.bytes_s * 8e-6:.1f} Mbit/s"
        )


def paper_ratio() -> float:
    """Moving the 120B checkpoint over construction, where the paper's construction is shortest."""
    return PAPER_CHECKPOINT_BYTES / PAPER_LINK_BYTES_S / (PAPER_CONSTRUCTION_SHARE[0] * PAPER_LATENCY_S)


def link_rate(checkpoint_bytes: int, construct_s: float, ratio: float) -> LinkRate:
    """The rate at which the checkpoint takes ``ratio`` times the construction of a node's share."""
    return LinkRate(ratio, construct_s, checkpoint_bytes / (ratio * construct_s))


def reference_bound_s(checkpoint_bytes: int, trainers: int, bytes_s: float) -> float:
    """Seconds that links alone ask of the full reference: every trainer sends its share, then every node takes all."""
    return checkpoint_bytes / bytes_s * (1 / trainers + 1)


def payload_bound_s(payload_bytes: int, trainers: int, nodes: int, bytes_s: float, *, copies: int) -> float:
    """Seconds that links alone ask of a refit's payloads.

    Args:
        payload_bytes: of all owners together.
        trainers: training nodes, among which they are spread evenly.
        nodes: rollout nodes, over whose links what crosses is spread evenly.
        bytes_s: rate of every node's link.
        copies: how often each payload crosses: once over the relay, ``nodes`` times from a store.
    """
    return max(payload_bytes / trainers, payload_bytes * copies / nodes) / bytes_s


def covered_s(intervals: Iterable[Interval]) -> float:
    """Seconds that intervals cover together, where they overlap only once."""
    total, end = 0.0, float("-inf")
    for begins, ends in sorted(intervals):
        total += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    return total


def lower_bound_s(by_process: Iterable[Iterable[Interval]]) -> float:
    """The paper's lower bound (section 8.7): what the intervals of the busiest process cover."""
    return max((covered_s(intervals) for intervals in by_process), default=0.0)


def stream_bytes(frame_bytes: int, frames: int) -> int:
    """Bytes of TCP streams in frames that an interface counted: without heads, repeated segments included."""
    return frame_bytes - frames * FRAME_HEAD_BYTES
