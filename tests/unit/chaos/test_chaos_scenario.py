"""Scenarios and points: what is read, and what a wrong one is told."""

import contextlib
import os
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.chaos.point import ACTIONS, WRITES, Point, Who
from dcr.chaos.scenario import Deployment, Do, Fault, Model, Scenario, Trainer
from dcr.chaos.scenario_file import parse_scenario, read_scenario
from dcr.protocol.errors import RefusedError

DOCS = Path(__file__).parents[3] / "docs"

GOOD = """
name: two engines
deployment:
  trainer: {ranks: 2, refits: 3, rate: 0.1}
  engines: 3
  nodes: [2, 1]
  gate: async
  settings: {ack_timeout_s: 4.0}
faults:
  - at: receiver[1] after 3 items of payload 2 in attempt 2
    restart_after_s: 0.5
  - at: coordinator between CAS sent and answered of Commit in refit 2
  - {at: "owner[0] before payload 1 in refit 3", who: store, do: fill, for_s: 1.5}
"""


def test_a_scenario_is_read():
    s = parse_scenario(GOOD.encode())
    assert s.deployment.engines_of_nodes == ((0, 1), (2,))
    assert s.deployment.all_settings["ack_timeout_s"] == 4.0
    assert s.deployment.all_settings["gate_mode"] == "async"
    assert [str(f) for f in s.faults] == [
        "kill: receiver[1] after 3 items of payload 2 in attempt 2",
        "kill: coordinator between CAS sent and answered of Commit in refit 2",
        "fill 1.5 s store: owner[0] before payload 1 in refit 3",
    ]
    assert s.faults[0].point == Point(
        Who("receiver", 1), "items", items=3, payload=2, attempt=2, refit=1, restore=False
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("engines: 3", "engine: 3", r"unknown field `engine`.*did you mean engines\?"),
        ("refits: 3", "refitz: 3", r"unknown field `refitz`.*did you mean refits\?"),
        ("engines: 3", "engines: 2", r"they hold 3 engines, and engines is 2"),
        ("gate: async", "gate: half", r"half.*deployment.gate"),
        ("ack_timeout_s", "ack_timeout", r"settings.*ack_timeout.*did you mean ack_timeout_s"),
        ("receiver[1] after", "receiver[7] after", r"there is no receiver\[7\]; receiver\[2\] is the last"),
        ("in refit 2", "in refit 9", r"there are 3 refits"),
        ("in attempt 2", "in restore", r"in restore goes from refit 2 on"),
        ("of payload 2", "of payload x", r"is no point; a point is"),
        ("of Commit", "of Seal", r"'Seal' writes no record"),
        ("receiver[1] after", "receiver[1] at Comit, after", r"says nothing here"),
        ("do: fill, for_s: 1.5", "do: fill", r"for_s belongs to"),
        (
            "do: fill, for_s: 1.5",
            "do: fill, for_s: 1.5, restart_after_s: 3",
            r"do: fill: restart_after_s belongs to kill",
        ),
        ("ack_timeout_s: 4.0", "members_min: 5", r"settings: members_min is 5, and engines is 3.*give more engines"),
        ("do: fill", "do: explode", r"explode"),
        ("who: store, do: fill, for_s: 1.5", "do: step_early", r"breaks its word at `owner\[0\] at BeginFold`"),
        ("who: store, do: fill", "who: coordinator, do: partition", r"coordinator cannot be cut off"),
        ("who: store, do: fill", 'who: "owner[0] to relay[1]", do: partition', r"transport is file, there is no relay"),
        (
            "who: store, do: fill",
            'who: "owner[0] to relay[1]", do: stall',
            r"a link of the relay, which can only be cut",
        ),
        ("who: store, do: fill", 'who: "owner[2] to relay[1]", do: partition', r"there is no owner\[2\]"),
        (
            "who: store, do: fill",
            'who: "owner[0] to relay[2]", do: partition',
            r"there is no relay\[2\]; relay\[1\] is",
        ),
        (
            "who: store, do: fill",
            'who: "relay[1]", do: partition',
            r"a link of the relay is owner\[N\] to relay\[NODE\]",
        ),
        ("who: store, do: fill, for_s: 1.5", "who: store", r"there is no store process"),
        ("who: store, do: fill, for_s: 1.5", "who: etcd", r"there is no etcd"),
        ("who: store, do: fill, for_s: 1.5", "push_error: x", r"push_error and operator come together"),
        ("rate: 0.1", "rate: 7", r"rate: 7.* is not from 0 to 1"),
        ("name: two engines", "name: ''", r"1 to 100 printable characters"),
        ("gate: async", "coordinators: 9", r"coordinators: 9 is not from 0 to 8"),
        ("gate: async", "coordinators: 2\n  control: s3", r"coordinators: none can stand by where control is s3"),
        ("ack_timeout_s: 4.0", "coordinator: elsewhere", r"settings: coordinator .*write `coordinators: 2` under depl"),
        ("ack_timeout_s: 4.0", "gate_mode: sync", r"settings: gate_mode .*write `gate: sync`"),
        ("ack_timeout_s: 4.0", "event_log: off", r"settings: event_log "),
        ("ack_timeout_s: 4.0", "zzz: 1", r"settings: .*`zzz`; known are operation, .*push_timeout_s"),
        ("gate: async", "gate: half", r"deployment.gate.*; allowed are sync, async$"),
        ("gate: async", "transport: 7", r"Expected text.*deployment.transport.*; allowed are file, s3, relay$"),
        ("do: fill", "do: explode", r"faults\[2\].do.*; allowed are kill, stall, .*, step_early$"),
        ("engines: 3", "engines: 3\n  engines: 4", r"line 6: 'engines' is there twice, first in line 5"),
        ("rate: 0.1", "rate: 0.1, rate: 0.2", r"line 4: 'rate' is there twice"),
        ('"owner[0] before payload 1 in refit 3"', "owner[0] at Seal", r'short form, .* wants quotes: at: "'),
        ("who: store", "who: owner[0]", r'short form, .* wants quotes: who: "'),
        ("payload 2 in attempt 2", "payload 2 #3", r"line 10: # begins a comment in YAML"),
        ("name: two engines", "name: '  '", r"name: 1 to 100 printable characters, and not only blanks"),
        ("name: two engines", "name: a\nseed: 9999999999", r"seed: 9999999999 is not from 0"),
        ("gate: async", "model: {engine: vllm}", r"engine: vllm starts from a checkpoint: .*checkpoint:/folder"),
        (
            "gate: async",
            "model: {engine: vllm, trainer: 'checkpoint:/x'}",
            r"an engine of vLLM has a node, and",
        ),
        ("gate: async", "model: {trainer: 'checkpoint:x/y'}", r"trainer: 'checkpoint:x/y' is neither"),
        ("engines: 3", "engines: [3]", r"Expected a whole number, got a list - at `\$.deployment.engines`"),
        ("who: store, do: fill, for_s: 1.5", "who: etcd, do: kill", r"control is sqlite, there is no etcd"),
        ("gate: async", "transport: relay\n  control: s3", r"a disk is filled where transport is file, not relay"),
    ],
)
def test_a_wrong_scenario_is_told_what_is_wrong(old, new, said):
    assert GOOD.count(old) == 1
    with pytest.raises(RefusedError, match=said):
        parse_scenario(GOOD.replace(old, new).encode())


_ONE = "name: one\nfaults:\n"


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ("  - at: receiver[0] at EndWrite #3\n", 3),
        ("  - at:\n      receiver[0] at EndWrite #3\n", 4),
        ("  - at:\n      receiver[0] at\n      EndWrite\n      #3\n", 6),
        ("  [{at: receiver at EndWrite #3\n  }]\n", 3),
        ("  - {do: kill, # of the third\n     at: receiver at EndWrite #3\n    }\n", 4),
        ("  - {at: receiver at EndWrite #3}\n", 3),
        ("- who: engine[0] #3\n  at: receiver[0] at EndWrite\n", 3),
        ("  - &a\n    at: >-\n      receiver[0] at EndWrite\n    do: kill #12\nseed: 1\n", 6),
    ],
)
def test_a_count_that_yaml_takes_for_a_comment_is_refused_wherever_it_is_in_a_fault(faults, line):
    with pytest.raises(RefusedError, match=rf"^line {line}: # begins a comment in YAML, so #\d+ would be left out"):
        parse_scenario((_ONE + faults).encode())


@pytest.mark.parametrize(
    "text",
    [
        _ONE + "  - at: 'receiver[0] at EndWrite #3'  # the third\n",
        _ONE + '  - at: "receiver[0]\n      at EndWrite #3"\n',
        _ONE + "  - at: >-\n      receiver[0] at EndWrite #3\n",
        _ONE + "  # issue #3\n  - {at: 'receiver[0] at EndWrite #3', do: kill}  # 3\nseed: 1 #2 was slow\n",
        "#1\n" + _ONE + "  - at: 'receiver[0] at EndWrite #3'\n",
    ],
)
def test_a_count_in_quotes_is_one_and_a_comment_stays_one(text):
    (fault,) = parse_scenario(text.encode()).faults
    assert fault.point.count == 3


@pytest.mark.parametrize("value", ["2026-13-45", "1" * 5000])
def test_a_value_that_yaml_cannot_make_is_told_with_its_line(value):
    with pytest.raises(RefusedError, match=f"^line 3: '{value[:40]}'"):
        parse_scenario(f"name: one\nfaults:\n  - at: {value}\n".encode())


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(RefusedError, match=f"scenario {path}: not a regular file"):
            read_scenario(path)


def test_coordinators_make_the_trainers_one_live_elsewhere_with_a_lease_that_grows_with_them():
    none, two, eight = (Deployment(coordinators=n).all_settings for n in (0, 2, 8))
    assert "coordinator" not in none
    assert two["coordinator"] == eight["coordinator"] == "elsewhere"
    assert 1.0 <= two["leader_lease_s"] < eight["leader_lease_s"] < 5.0
    assert Deployment(coordinators=2, settings={"leader_lease_s": 9.0}).all_settings["leader_lease_s"] == 9.0


def test_a_coordinator_that_is_no_part_of_the_trainer_is_not_replaced_but_stalled():
    fault = Fault(at="coordinator before CAS of Commit", do="replace")
    Scenario(name="in the trainer", faults=(fault,))
    with pytest.raises(ValueError, match="stall the one that leads for longer than its lease"):
        Scenario(name="elsewhere", deployment=Deployment(coordinators=2), faults=(fault,))


# Where each fault may strike, with what else it needs.
ALLOWED = {
    "kill": {"at": "receiver[1] at BeginWrite"},
    "stall": {"at": "receiver[1] at BeginWrite", "for_s": 1.0},
    "slow": {"at": "receiver[1] at BeginWrite", "for_s": 1.0},
    "partition": {"at": "engine[1] at Prepare", "for_s": 1.0},
    "fill": {"at": "owner[0] before payload 1", "who": "store", "for_s": 1.0},
    "error": {"at": "owner[0] before payload 1"},
    "duplicate": {"at": "receiver[1] at EndWrite"},
    "replace": {"at": "coordinator before CAS of Commit"},
    "roll_back": {"at": "coordinator at OrderOpenApply"},
    "step_early": {"at": "owner[0] at BeginFold"},
}


@pytest.mark.parametrize("do", get_args(Do))
def test_a_key_that_a_fault_would_ignore_is_refused(do):
    good = ALLOWED[do]
    Fault(do=do, **good)
    if do == "kill":
        Fault(do=do, **good, restart_after_s=1.0)
    else:
        with pytest.raises(ValueError, match=f"do: {do}: restart_after_s belongs to kill"):
            Fault(do=do, **good, restart_after_s=1.0)
    if "for_s" not in good:
        with pytest.raises(ValueError, match=f"do: {do}: for_s belongs to stall, slow, partition, fill"):
            Fault(do=do, **good, for_s=1.0)
    if do not in ("kill", "stall", "partition"):  # whoever else they name would not be struck
        with pytest.raises(ValueError, match=f"do: {do}: "):
            Fault(do=do, **{**good, "who": "engine[0]"})


def test_as_many_engines_as_there_are_may_be_needed():
    Deployment(engines=5, settings={"members_min": 5})
    with pytest.raises(ValueError, match="members_min is 6, and engines is 5"):
        Deployment(engines=5, settings={"members_min": 6})


@pytest.mark.parametrize("at", ["store before CAS of Commit", "store before payload 1"])
def test_a_store_process_is_struck_where_it_has_the_record_the_payloads_or_both(at):
    for d in (Deployment(control="s3"), Deployment(transport="s3"), Deployment(control="s3", transport="s3")):
        Scenario(name="a bucket", deployment=d, faults=(Fault(at=at),))
    with pytest.raises(ValueError, match="transport is file and control sqlite, there is no store process"):
        Scenario(name="no bucket", faults=(Fault(at=at),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n- 2", "must be a mapping"),
        ("a: [", "no YAML"),
        ("\x00", "no YAML"),
        ("!!python/object:os.system x", "no YAML"),
    ],
)
def test_what_is_no_scenario_is_refused_with_its_file(tmp_path, text, said):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(RefusedError, match=f"{re.escape(str(path))}.*{said}"):
        read_scenario(path)
    with pytest.raises(RefusedError, match="No such file"):
        read_scenario(tmp_path / "none.yaml")


def test_the_actions_of_each_role_are_those_of_the_protocol():
    rows = re.findall(
        r"^\| `(\w+)` \| (coordinator|owner|node|receiver) \|", (DOCS / "protocol.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 40
    documented = {role: {a for a, r in rows if r == role} for role in ("coordinator", "owner", "node", "receiver")}
    documented["engine"] = documented.pop("node")
    assert {role: set(actions) for role, actions in ACTIONS.items()} == documented


def test_the_page_shows_a_scenario_and_names_every_key():
    page = (DOCS / "chaos.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(parse_scenario(shown.encode()).faults) == 3
    for struct in (Scenario, Deployment, Fault):
        for key in set(struct.__struct_fields__) - {"deployment"}:
            assert re.search(rf"`(deployment\.)?{key}`", page), key
    for what in get_args(Do):
        assert f"| `{what}` |" in page


FIELDS = {
    (): Scenario,
    ("deployment",): Deployment,
    ("deployment", "trainer"): Trainer,
    ("deployment", "model"): Model,
    ("faults", 0): Fault,
}
EVERY_FIELD = [(*place, name) for place, struct in FIELDS.items() for name in struct.__struct_fields__]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([10**30, -(10**30), 1e308]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.binary(max_size=4), st.dates())
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(SCALARS, SCALARS, max_size=2))


@pytest.mark.parametrize("path", EVERY_FIELD, ids=lambda path: ".".join(map(str, path)))
@settings(max_examples=12)
@given(value=VALUES)
def test_whatever_a_field_has_is_read_or_refused_by_name(path, value):
    data = {
        "name": "one",
        "deployment": {"trainer": {"ranks": 1}, "model": {}},
        "faults": [{"at": "receiver[1] at BeginWrite"}],
    }
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    refused = ""
    try:
        parse_scenario(yaml.safe_dump(data).encode())
    except RefusedError as e:
        refused = str(e)
    place = "faults[0]" if len(path) > 1 and path[0] == "faults" else str(path[-1])
    assert not refused or place in refused or "no YAML" in refused


@given(st.binary(max_size=80))
def test_no_file_is_more_than_refused(data):
    with contextlib.suppress(RefusedError):
        parse_scenario(data)


def test_a_scenario_with_itself_in_it_is_refused():
    with pytest.raises(RefusedError, match="settings"):
        parse_scenario(b"name: a\ndeployment:\n  settings: &a {x: *a}")
    with pytest.raises(RefusedError):
        parse_scenario(b"name: a\nfaults: &a [*a]")


def test_a_link_of_the_relay_is_a_victim_and_nobody_at_whose_moment_anything_happens():
    link = Who.parse("relay[0] to relay[1]")
    assert (link, str(link)) == (Who("relay", 0, 1), "relay[0] to relay[1]")
    d = Deployment(transport="relay")
    cut = Fault(at="owner[0] before payload 1", who=str(link), do="partition", for_s=1.0)
    Scenario(name="a link", deployment=d, faults=(cut,))
    with pytest.raises(ValueError, match="a relay has no link to itself"):
        Scenario(name="none", deployment=d, faults=(msgspec.structs.replace(cut, who="relay[1] to relay[1]"),))
    with pytest.raises(RefusedError, match="is nobody"):
        Point.parse("relay[0] at Emit")


def test_of_several_ranks_none_steps_early_alone():
    fault = Fault(at="owner[0] at BeginFold", do="step_early")
    Scenario(name="one rank", faults=(fault,))
    with pytest.raises(ValueError, match="of several ranks one alone would step"):
        Scenario(name="two", deployment=Deployment(trainer=Trainer(ranks=2)), faults=(fault,))


@st.composite
def points(draw):
    numbers = st.integers(0, 999)
    attempt, refit = draw(st.integers(1, 99)), draw(st.integers(0, 99))
    restore = draw(st.booleans())
    when = {"attempt": attempt, "refit": refit, "restore": restore}
    kind = draw(st.sampled_from(["step", "items", "payload", "manifest", "request", "cas_sent", "cas_done"]))
    if kind == "step":
        role = draw(st.sampled_from(sorted(ACTIONS)))
        who = Who(role, 0 if role == "coordinator" else draw(numbers))
        return Point(who, kind, draw(st.sampled_from(ACTIONS[role])), count=draw(st.integers(1, 999)), **when)
    if kind == "items":
        return Point(Who("receiver", draw(numbers)), kind, items=draw(numbers), payload=draw(numbers), **when)
    if kind == "request":
        return Point(Who("engine", draw(numbers)), kind, **when)
    if kind in ("payload", "manifest"):
        role = draw(st.sampled_from(["owner", "store"]))
        payload = draw(numbers) if kind == "payload" else 0
        return Point(Who(role, draw(numbers) if role == "owner" else 0), kind, payload=payload, **when)
    return Point(
        Who(draw(st.sampled_from(["coordinator", "etcd", "store"]))), kind, draw(st.sampled_from(["", *WRITES])), **when
    )


@given(points())
def test_a_point_says_what_it_is(point):
    assert Point.parse(str(point)) == point


@given(st.text(max_size=60))
def test_no_text_is_more_than_refused(text):
    with contextlib.suppress(RefusedError):
        Point.parse(text)


def test_a_server_is_struck_at_a_moment_of_its_users():
    assert Point.parse("store during manifest").taken_by == Who("owner")
    assert Point.parse("etcd between CAS sent and answered").taken_by == Who("coordinator")
    assert Point.parse("store at BeginWrite").taken_by == Who("receiver")
