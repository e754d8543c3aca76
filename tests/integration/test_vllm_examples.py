"""The examples beside vLLM run as they stand."""

import os
import re
import subprocess
import sys

import pytest
import vllm_support as support

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def run(example, tmp_path):
    checkpoint = support.write_checkpoint(tmp_path / "v0", 0)
    environment = {**os.environ, **support.ENVIRONMENT, "PYTHONPATH": str(support.ROOT)}
    command = [sys.executable, f"examples/{example}", str(checkpoint)]
    done = subprocess.run(
        command, cwd=support.ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_async_llm(tmp_path):
    said = run("async_llm.py", tmp_path)
    pushed = re.findall(r"^trainer: version (\d), (\d+) bytes sent$", said, re.MULTILINE)
    assert [version for version, _ in pushed] == ["1", "2", "3"]
    answers = re.findall(r"^rollout: tokens (.*),$", said, re.MULTILINE)
    parts = [re.findall(r"(\d+) to (\d+) by version (\d)", answer) for answer in answers]
    for answer in parts:
        assert [start for start, _, _ in answer] == ["0", *(end for _, end, _ in answer[:-1])]
        assert answer[-1][1] == "400"
        assert [version for *_, version in answer] == sorted({version for *_, version in answer})
    assert [version for *_, version in parts[-1]] == ["3"]


def test_weight_transfer(tmp_path):
    said = run("weight_transfer.py", tmp_path)
    answers = re.findall(r"^version (\w+): tokens (\[.*\])$", said, re.MULTILINE)
    assert [version for version, _ in answers] == ["default", "1", "2", "3"]
    assert len({tokens for _, tokens in answers}) == 4
