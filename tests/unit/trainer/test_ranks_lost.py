"""Ranks that do not come: real processes over gloo, one of which ends."""

import subprocess
import sys

RANKS = """
import os, sys
import torch.distributed as dist
from dcr.protocol.errors import DcrError
from dcr.trainer.torch.ranks import Ranks

if child := os.fork():
    rank = 0
else:
    rank = 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
ranks = Ranks()
try:
    ranks.refuse_differing(record_id="a", checked=rank == 0)
except DcrError as error:
    if rank == 0:
        print(error)
if rank == 1:
    os._exit(0)  # as if it were killed
try:
    ranks.gather("here")
except DcrError as error:
    print(type(error).__name__, error)
os._exit(0)
"""


def test_a_rank_that_is_gone_and_one_with_other_arguments_are_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)], check=False, capture_output=True, text=True, timeout=60
    )
    differing, lost = done.stdout.splitlines()[:2]
    assert differing == "checked is True on rank 0 and False on rank 1: give all ranks the same"
    assert lost.startswith("RanksLostError rank 0 of 2: the ranks cannot meet any more, one of them is gone")
    assert "end all ranks and start the trainer again" in done.stdout
