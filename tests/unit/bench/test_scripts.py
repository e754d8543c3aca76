"""Every script under bench/ starts from the project's root as a user calls it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARTS = {"table.py", "workload.py", "gpu_exactness.py", "gpu_refit.py"}
PARTS |= {path.name for path in (ROOT / "bench").glob("wan_*.py")}
"""What scripts share."""
SCRIPTS = sorted(path.name for path in (ROOT / "bench").glob("*.py") if path.name not in PARTS)
# A process a script would pay for torch each time; a fork after it has the same fresh view of bench and of dcr.
HELP = """
import contextlib, importlib, json, os, runpy, sys
others, scripts, folder = json.load(sys.stdin)
for name in others:
    with contextlib.suppress(Exception):  # what needs more than an import
        importlib.import_module(name)
assert not [name for name in sys.modules if name.split(".")[0] == "dcr"]
for script in scripts:
    pid = os.fork()
    if pid == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{folder}/{script}.{number}", os.O_CREAT | os.O_WRONLY), number)
        status = 1
        try:
            sys.argv, sys.path[0] = [f"bench/{script}", "--help"], "bench"
            runpy.run_path(f"bench/{script}", run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(script, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def imported_from_elsewhere():
    """What scripts import at their top, of others' packages; but for vLLM, which reads the environment of each."""
    found, own = set(), {"dcr", "demo", "tests", "vllm"} | {path.stem for path in (ROOT / "bench").glob("*.py")}
    for path in (ROOT / "bench").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return sorted(name for name in found if name.split(".")[0] not in own)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Status, output and errors of each script that is asked what it does."""
    folder = tmp_path_factory.mktemp("said")
    done = subprocess.run(
        [sys.executable, "-c", HELP],
        cwd=ROOT,
        input=json.dumps([imported_from_elsewhere(), SCRIPTS, str(folder)]),
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
    )
    statuses = dict(line.split() for line in done.stdout.splitlines())
    return {name: (int(statuses[name]), *((folder / f"{name}.{n}").read_text() for n in (1, 2))) for name in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_says_what_it_measures(said, script):
    status, out, errors = said[script]
    assert status == 0, errors[-2000:]
    assert "usage:" in out


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 3)])
def test_the_wan_bench_says_what_it_is_and_what_is_missing_before_it_loads_anything_large(arguments, status):
    command = [sys.executable, "-X", "importtime", "bench/wan.py", *arguments]
    nothing = {"PATH": "/nowhere"}  # neither gcc nor ip, where it is not the rights that are missing
    done = subprocess.run(command, cwd=ROOT, env=nothing, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr[-2000:]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "wan_network" in imported
    assert not imported & {"torch", "numba", "boto3"}
