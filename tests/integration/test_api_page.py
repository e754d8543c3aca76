"""docs/api.md: its two programs run as they stand, and it names all that is public of the front doors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcr import MegatronRefit, PendingPush, RefitReport, RolloutNode, TrainerRefit
from dcr.runtime.progress import EngineStatus

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
LIMIT_S = 200


def programs() -> dict[str, str]:
    found = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    return dict(found)


def test_the_two_programs_run_in_either_order(tmp_path):
    (tmp_path / "run").mkdir()
    assert sorted(programs()) == ["rollout.py", "trainer.py"]
    started = []
    for name in ("rollout.py", "trainer.py"):
        (tmp_path / name).write_text(programs()[name])
        started.append(
            subprocess.Popen(
                [sys.executable, name, "run"],
                cwd=tmp_path,
                env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        (rolled, why), (trained, reason) = (process.communicate(timeout=LIMIT_S) for process in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], why + reason
    assert trained == "".join(f"version {v} is served by node-a\n" for v in (1, 2, 3))
    answers = re.findall(r"^version (\d) answers (-?[\d.]+)$", rolled, re.MULTILINE)
    assert len(answers) == 4
    assert answers[-1][0] == "3"
    weight = load_file(tmp_path / "run" / "model.safetensors")["weight"]
    first = (torch.ones(1, 256, dtype=torch.bfloat16) @ weight.t()).sum()
    assert answers[0][0] != "0" or answers[0][1] == f"{first:.4f}"


@pytest.mark.parametrize("what", [TrainerRefit, MegatronRefit, PendingPush, RolloutNode, RefitReport, EngineStatus])
def test_everything_public_is_named(what):
    names = {name for name in dir(what) if not name.startswith("_")} - set(dir(object))
    names |= set(getattr(what, "__dataclass_fields__", {})) | set(getattr(what, "__struct_fields__", ()))
    unnamed = {name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE)}
    assert unnamed <= {"engine", "inspect"}
