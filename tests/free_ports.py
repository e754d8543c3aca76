"""Ports for servers that tests kill and start again on the same port."""

import random
import socket
from collections.abc import Sequence


def free_ports(count: int, among: Sequence[int], host: str = "127.0.0.1", offset: int = 0) -> list[int]:
    """Ports at which nobody listens now.

    Args:
        count: how many.
        among: these; below those that the system gives out to whoever connects or listens anywhere, so that none of
            them is taken while its server is down.
        host: on this address.
        offset: the port so much above each must be free too.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(among, len(among)):
        try:
            for one in {port, port + offset}:
                with socket.socket() as s:
                    s.bind((host, one))
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} free ports from {among[0]} to {among[-1]}")
