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
