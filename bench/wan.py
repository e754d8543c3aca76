"""Delivery across clusters: refits over a WAN against moving the whole checkpoint (the paper's sections 8.5 to 8.7).

    python bench/wan.py [--json] [--full]      about six minutes; needs root, gcc and iproute2, ends with 3 without

Network namespaces are the nodes of a training and a rollout cluster, and an object store (SeaweedFS) of its own; a
switch in user space is the WAN between them, and gives every node's link a rate, a delay and loss.  The store stands
apart from both clusters, as a cloud's does: what trainers put and what nodes get each go over their own links.  In
every round take turns: the reference (each training node uploads its share of the checkpoint, each rollout node then
downloads all of it, through the same S3 client, several objects and parts at once, no disk, no loading), and refits of
real owners and engines over the store and the relay.  docs/wan.md has the rest.
"""

import os
import signal
import sys
from pathlib import Path

from table import parser
from wan_arithmetic import paper_ratio
from wan_child import import_once
from wan_network import MissingError, check_machine, sweep

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # of the demonstration and the tests, whose processes and store these are
MISSING = 3


def main() -> int:
    """Measure, unless something is missing."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--full", action="store_true", help="all sizes and numbers of nodes, about an hour")
    arguments.add_argument("--gib", type=float, help="one point alone: the checkpoint's size, GiB")
    arguments.add_argument("--nodes", type=int, help="one point alone: the nodes of each side")
    arguments.add_argument("--rounds", type=int, default=3, help="of one point alone (default: 3)")
    arguments.add_argument("--delay-ms", type=float, default=10.0, help="one way between clusters (default: 10)")
    arguments.add_argument("--loss", type=float, default=0.01, help="of frames on a link, percent (default: 0.01)")
    arguments.add_argument(
        "--ratio",
        type=float,
        default=paper_ratio(),
        help="checkpoint over one link / single-core construction of a share (default: the paper's, %(default).0f)",
    )
    arguments.add_argument("--timeline", type=Path, default=ROOT / "run" / "wan", help="folder for timelines")
    asked = arguments.parse_args()
    if asked.gib is not None and not 0.05 <= asked.gib <= 4:
        arguments.error(f"--gib {asked.gib:g}: from 0.05 to 4 can be measured on one machine")
    if asked.nodes is not None and not 1 <= asked.nodes <= 8:
        arguments.error(f"--nodes {asked.nodes}: from 1 to 8 a side")
    if asked.rounds < 1:
        arguments.error(f"--rounds {asked.rounds}: at least one")
    try:
        check_machine()
    except MissingError as e:
        print(e)
        return MISSING
    # Imported here, for torch takes seconds, and who asks for help or has to be root need not wait for it.
    from wan_rounds import run, say  # noqa: PLC0415

    from tests.object_store import ENVIRONMENT  # noqa: PLC0415

    os.environ.update(ENVIRONMENT)  # credentials of the store, for all processes
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "bench")))
    import_once(["wan_process", "dcr.delivery.s3", "dcr.delivery.relay.address"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in sweep():
        say(f"removed what an earlier run left: {name}")
    run(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
