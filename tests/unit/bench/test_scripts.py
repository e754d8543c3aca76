"""Every script under bench/ starts from the project's root as a user calls it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARTS = {"table.py", "workload.py", "gpu_exactness.py", "gpu_refit.py"}
PARTS |= {path.name for path in (ROOT / "bench").glob("wan_*.py")}
"""What scripts share."""
SCRIPTS = sorted(path.name for path in (ROOT / "bench").glob("*.py") if path.name not in PARTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_says_what_it_measures(script):
    command = [sys.executable, f"bench/{script}", "--help"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage:" in done.stdout


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 3)])
def test_the_wan_bench_says_what_it_is_and_what_is_missing_before_it_loads_anything_large(arguments, status):
    command = [sys.executable, "-X", "importtime", "bench/wan.py", *arguments]
    nothing = {"PATH": "/nowhere"}  # neither gcc nor ip, where it is not the rights that are missing
    done = subprocess.run(command, cwd=ROOT, env=nothing, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr[-2000:]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "wan_network" in imported
    assert not imported & {"torch", "numba", "boto3"}
