"""The example of the README runs as it stands, and says what the README shows."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, "examples/refit.py"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    trained = re.findall(
        r"^trainer: version (\d), \d+ of 262144 elements changed, \d+ bytes", done.stdout, re.MULTILINE
    )
    assert trained == ["1", "2", "3"]
    served = re.findall(r"^rollout: version (\d), sum of weights ([-+.\d]+)$", done.stdout, re.MULTILINE)
    assert served[-1][0] == "3"
    assert len({total for _, total in served}) == len({version for version, _ in served})
