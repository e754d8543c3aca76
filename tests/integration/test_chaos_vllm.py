"""`dcr chaos` with engines of vLLM: one dies in the middle of a payload, and holds the bits of an untouched one."""

import json

import pytest
from vllm_models import write_checkpoint

from tests.faults.chaos_command import chaos
from tests.faults.conftest import SPEC

SCENARIO = {
    "name": "an engine of vLLM dies in the middle of a payload",
    "deployment": {
        "trainer": {"refits": 2},
        "model": {"engine": "vllm"},
        "settings": {
            "bucket_bytes": 20_000,
            "prepare_timeout_s": 60.0,
            "ack_timeout_s": 60.0,
            "members_timeout_s": 120.0,
            "connect_timeout_s": 120.0,
        },
    },
    "faults": [{"at": "receiver[1] after 1 item of payload 1"}],
    "recover_within_s": 240,
}


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "gate"), [("qwen3-moe", "sync"), ("qwen3-tied", "async")])
def test_an_engine_of_vllm_dies_in_the_middle_of_a_payload(tmp_path, model, gate):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", 0, model)
    deployment = {**SCENARIO["deployment"], "gate": gate}
    deployment["model"] = {"engine": "vllm", "trainer": f"checkpoint:{checkpoint}"}
    (tmp_path / "s.yaml").write_text(json.dumps({**SCENARIO, "deployment": deployment}))
    status, report, said = chaos(tmp_path / "left", "run", tmp_path / "s.yaml", "--spec", SPEC, timeout_s=1100)
    assert status == 0, said
    (run,) = report["runs"]
    assert (run["kills"], run["restarts"], run["commits"]) == (1, 1, 2)
    assert run["requests"] > 10
    assert run["bytes_compared"] > 4 * 200_000  # two refits of two engines
    assert run["logs"].startswith("a behaviour of the specification")
