"""Ranks that do not come, and a refit that fails on one of them: real processes over gloo."""

import json
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
        [sys.executable, "-c", RANKS, str(tmp_path)], check=False, capture_output=True, text=True, timeout=280
    )
    differing, lost = done.stdout.splitlines()[:2]
    assert differing == "checked is True on rank 0 and False on rank 1: give all ranks the same"
    assert lost.startswith("RanksLostError rank 0 of 2: the ranks cannot meet any more, one of them is gone")
    assert "end all ranks and start the trainer again" in done.stdout


REFITS = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from dcr import TrainerRefit
from dcr.protocol.errors import DcrError

folder = sys.argv[1]
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
good = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads", "settings": {}}
nobody = f"tls://{folder}/nobody?listen=127.0.0.1:7100"
cases = {
    "no certificates on rank 0": ({"settings": {"channel": nobody}}, {}),
    "no such delivery on rank 1": ({}, {"delivery": "gs://bucket/run"}),
    "no such setting on rank 1": ({}, {"settings": {"lease": 1}}),
    "rank 0 may not make its file": ({"control": "sqlite:///proc/1/no/record.db"}, {}),
}
said = []
for case, changes in cases.items():
    try:
        TrainerRefit(torch.nn.Linear(3, 2), **{**good, **changes[rank]})
    except DcrError as error:
        said.append((case, type(error).__name__, str(error)))
refit = TrainerRefit(torch.nn.Linear(3, 2), **good)
said.append(("good", "", ""))
Path(f"{folder}/said-{rank}").write_text(json.dumps(said))
dist.barrier()
refit.close()
if rank == 0:
    os.wait()
os._exit(0)
"""


def test_a_refit_that_fails_on_one_rank_fails_alike_on_all(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", REFITS, str(tmp_path)], check=False, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    said, on_the_other = (json.loads((tmp_path / f"said-{rank}").read_text()) for rank in (0, 1))
    assert said == on_the_other
    expected = (
        ("no certificates on rank 0", 0, "RefusedError", "nobody"),
        ("no such delivery on rank 1", 1, "RefusedError", "delivery address"),
        ("no such setting on rank 1", 1, "RefusedError", "lease"),
        ("rank 0 may not make its file", 0, "ControlPlaneUnavailableError", "record.db"),
        ("good", 0, "", ""),  # the ranks are in step still
    )
    for (case, rank, kind, text), (case_said, kind_said, text_said) in zip(expected, said, strict=True):
        assert (case_said, kind_said) == (case, kind)
        assert text_said.startswith(f"rank {rank}: " if kind else "")
        assert text in text_said
