"""A report in words: a few aligned lines, and everything still in ``repr`` and in JSON."""

import json
from dataclasses import replace

from dcr.data_plane.change_counts import ChangeCount
from dcr.delivery.traffic import Traffic
from dcr.trainer.torch.refit_report import RefitReport

REPORT = RefitReport(
    version=4,
    kind="absolute",
    attempts=2,
    failures=("relative attempt of epoch 6: a was lost",),
    warnings=(),
    members=("a", "b"),
    changed_entries=30,
    elements=1000,
    payloads=3,
    payload_bytes=3 << 20,
    wall_s=1.5,
    stages={"detect": 0.25, "encode": 1.0},
    traffic=Traffic(4, {}, 3145900, 0),
    layers={"0": ChangeCount(20, 500), "1": ChangeCount(0, 300), "2": ChangeCount(10, 100)},
)


def test_it_is_a_few_aligned_lines():
    assert str(REPORT).splitlines() == [
        "version 4: absolute, 2 attempts, 1.50 s",
        "  engines  2: a, b",
        "  sent     30 of 1000 elements (3 %), 3 payloads, 3.0 MiB",
        "  stages   detect 0.25 s, encode 1.00 s",
        "  store    4 requests, 3145900 bytes up, 0 bytes down",
        "  layers   2 of 3 changed, most 2 10 %, 0 4 %, 1 0 %",
        "  failures relative attempt of epoch 6: a was lost",
    ]


def test_repr_and_json_have_everything():
    assert repr(REPORT).startswith("RefitReport(version=4, kind='absolute', attempts=2")
    assert "ChangeCount" in repr(REPORT)
    assert json.loads(REPORT.json())["layers"]["2"] == {"changed": 10, "elements": 100, "rate": 0.1}


def test_a_dense_one_says_why():
    dense = replace(REPORT, kind="dense", why_dense="the operator ordered it", layers={})
    assert str(dense).splitlines()[1] == "  dense    the operator ordered it"
    assert json.loads(dense.json())["why_dense"] == "the operator ordered it"


def test_many_engines_and_nothing_known_stay_short():
    many = RefitReport(1, "unknown", 0, (), (), tuple(f"engine-{n}" for n in range(300)), 0, 0, 0, 0, 0.1)
    assert len(str(many)) < 400
    assert "300: engine-0, engine-1" in str(many)
    assert "and 292 more" in str(many)
