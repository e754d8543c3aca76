"""`dcr chaos` as an operator runs it: in a process of its own, from which all its children are forked."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def chaos(folder, *arguments, timeout_s, cwd=ROOT):
    """The exit status, the JSON of the last line, and all that was printed."""
    command = [sys.executable, "-m", "dcr.cli.main", "chaos", *map(str, arguments), "--folder", str(folder), "--json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    print(done.stdout)  # runs, kills, retries and bytes compared, for whoever runs the tests with -s or sees them fail
    *_, last = done.stdout.splitlines() or [done.stderr]
    return done.returncode, json.loads(last), done.stdout + done.stderr
