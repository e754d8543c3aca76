"""The project around the code: what a newcomer and the integration run rely on."""

import ast
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dcr", "demo", "scripts", "tests", "bench")
LINES_MAX = 500


def test_readme_names_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^make demo$", readme, re.MULTILINE)
    assert re.search(r"^make test$", readme, re.MULTILINE)


def test_the_integration_run_is_make_test():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    assert lines[0] == "#!/usr/bin/env bash"
    assert code == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=99).stdout


def test_make_help_lists_every_target():
    targets = ["help", "install", "demo", "lint", "test", "test-long", "soak", "traces", "mutation", "bench", "clean"]
    assert re.findall(r"^  ([a-z-]+) +\w", make("help"), re.MULTILINE) == targets
    make("--dry-run", *targets)


def test_demo_passes_the_kill_and_the_trainer_through():
    said = make("--dry-run", "demo", "KILL=1", "TRAINER=megatron")
    assert re.search(r"^KILL=1 TRAINER=megatron .*-m demo\.main$", said, re.MULTILINE)


def test_constraints_are_exact_and_are_what_is_installed():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    wrong = [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", pin)]
    assert wrong == []
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert len(names) == len(set(names))
    differ = {pin: version(pin.split("==")[0]) for pin in pins if version(pin.split("==")[0]) != pin.split("==")[1]}
    assert differ == {}


def test_the_mutation_environment_has_the_same_releases():
    def pins(file):
        lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
        return {re.sub(r"[-_.]+", "-", name).lower(): pinned for name, pinned in (line.split("==") for line in lines)}

    ours, mutation = pins("constraints.txt"), pins("constraints-mutation.txt")
    assert {name: pin for name, pin in mutation.items() if ours.get(name, pin) != pin} == {}
    assert f'mutation = ["mutmut=={mutation["mutmut"]}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.timeout(600)  # a process a module, some of which import vLLM
def test_every_module_of_dcr_imports_alone():
    paths = sorted((ROOT / "dcr").rglob("*.py"))
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths]
    # One process a module would pay for torch and vLLM each time; a fork after them has the same fresh view of dcr.
    script = """
import importlib, os, sys
others, modules = (text.split() for text in sys.stdin.read().split(";"))
for name in others:
    module, _, what = name.partition(":")
    try:
        getattr(importlib.import_module(module), what or "__name__")
    except Exception:
        pass  # what needs more than an import
assert not [name for name in sys.modules if name.split(".")[0] == "dcr"]
for name in modules:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {error!r}", flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        print(f"{name}: died", flush=True)
print("tried", len(modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=" ".join(imported_from_elsewhere(paths)) + ";" + " ".join(modules),
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.stdout == f"tried {len(modules)}\n", done.stdout + done.stderr


def imported_from_elsewhere(paths):
    """What modules of dcr import at their top, of other packages: `module`, or `module:name`, which may load more."""
    found = set()
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return sorted(name for name in found if re.split("[.:]", name)[0] != "dcr")


def test_a_file_is_read_in_one_sitting():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 20
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: lines for path, lines in long.items() if lines > LINES_MAX} == {}


def test_no_two_test_files_have_one_name():
    """Pytest imports them by name alone: `pytest` over all of them would stop at the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
