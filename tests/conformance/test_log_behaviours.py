"""`dcr spec validate`: logs of real runs are behaviours of the specification; falsified ones are rejected, by line."""

import json
import os
import shutil

import pytest
from event_logs import GOLDEN, SPEC, Logs, rejected_at

from dcr.cli.main import main
from dcr.modelcheck.eventlog.read import RejectedError, read_logs
from dcr.modelcheck.eventlog.validate import validate
from dcr.protocol.errors import RefusedError


@pytest.fixture
def logs(tmp_path):
    return Logs(tmp_path)


def test_the_golden_logs_are_a_behaviour(capsys):
    assert main(["spec", "validate", str(GOLDEN), "--spec", str(SPEC), "--heap", "1g", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["ok"], report["lines"], report["transitions"], report["notes"]) == (True, 160, 3, [])
    assert report["steps"] > 150


def test_a_long_log_is_taken_in_parts_which_may_forget_all_but_the_present_epoch(tmp_path):
    spec = shutil.copytree(SPEC, tmp_path / "spec", ignore=shutil.ignore_patterns("traces"))
    module = spec / "RefitLog.tla"
    assert "\nKept == 32\n" in module.read_text()
    module.write_text(module.read_text().replace("\nKept == 32\n", "\nKept == 0\n"))
    told = []
    found = validate(GOLDEN, spec, heap="1g", part_steps=1, tell=lambda taken, of: told.append((taken, of)))
    assert found.ok, found
    assert told == [(100, found.steps)]  # twenty steps for each of five cells, at least


@pytest.mark.long
def test_a_wrong_line_of_a_later_part_is_named_as_it_is_in_one_piece(logs):
    path = logs.path("rank", "a")
    events, at = logs.read(path), logs.find(path, "EndWrite", 14)
    events[at + 1 : at + 1] = events[at - 1 : at + 1]
    logs.write(path, events)
    found = validate(logs.folder, SPEC, heap="1g", part_steps=1)
    assert found.steps > 100
    assert rejected_at(found, path, at + 2), found
    assert "Identity(m) \\notin k.seen" in found.why[-1]


# ---------------------------------------------------------------- what the specification forbids


def test_a_commit_without_an_acknowledgement_is_rejected(logs):
    path = logs.path("rank", "a")
    events = logs.read(path)
    del events[logs.find(path, "Acknowledge", 2)]
    logs.write(path, events)
    found = logs.validate()
    leader = logs.path("coordinator")
    assert rejected_at(found, leader, logs.find(leader, "Commit", 2) + 1), found
    assert "\\in acks" in found.why[-1]


def test_a_payload_that_is_applied_twice_is_rejected(logs):
    path = logs.path("rank", "a")
    events, at = logs.read(path), logs.find(path, "EndWrite", 4)
    events[at + 1 : at + 1] = events[at - 1 : at + 1]
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, at + 2), found
    assert "Identity(m) \\notin k.seen" in found.why[-1]
    assert f"{path.name}:{at + 1}: EndWrite of epoch 1" in found.story[-1]


def test_a_commit_that_did_not_compare_is_rejected(logs):
    path = logs.path("coordinator")
    events, at = logs.read(path), logs.find(path, "Commit", 2)
    events[at]["step"]["revision"] -= 1  # it wrote over the revision that its own attempt had made
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, at + 1), found
    assert "K.revision: 7 -> 6" in found.why[-1]


def test_a_gate_that_opens_early_is_rejected(logs):
    path = logs.path("node", "a")
    events, at = logs.read(path), logs.find(path, "OpenGate", 3)
    early = logs.find(path, "GateClosed", 2)
    opened = {**events.pop(at), "k": events[early]["k"]}
    events.insert(early + 1, opened)
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, early + 2), found
    assert "node[x.engine].opening = x.epoch" in found.why[-1]


@pytest.mark.long
def test_a_gate_that_opens_on_a_commit_that_is_still_to_come_is_rejected(logs):
    path = logs.path("node", "a")
    events, at = logs.read(path), logs.find(path, "OpenGate", 3)
    early = logs.find(path, "GateClosed", 2)
    events.insert(early + 1, events.pop(at))
    logs.write(path, events)
    assert rejected_at(logs.validate(), path, early + 2)


@pytest.mark.long
def test_an_order_of_an_epoch_that_has_passed_is_rejected(logs):
    path = logs.path("rank", "b")
    events, at = logs.read(path), logs.find(path, "Fence", 3)
    events.insert(at + 1, events[logs.find(path, "Fence", 1)])
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, at + 2), found


@pytest.mark.long
def test_a_fold_before_its_commit_is_rejected(logs):
    path = logs.path("owner")
    events, at = logs.read(path), logs.find(path, "BeginFold", 2)
    sealed = logs.find(path, "Emit", 2)
    events[sealed:sealed] = [events.pop(at), events.pop(at)]
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, sealed + 1), found


@pytest.mark.long
def test_a_version_that_is_not_the_one_committed_is_not_served(logs):
    path = logs.path("node", "b")
    events, at = logs.read(path), logs.find(path, "OpenGate", 3)
    events[at]["step"]["version"] = 1
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, at + 1), found
    assert "node[x.engine].version = x.version" in found.why[-1]


@pytest.mark.long
def test_an_acknowledgement_of_a_dead_incarnation_commits_nothing(logs):
    """Engine a is started anew before it acknowledges: what commits is an acknowledgement of the one before."""
    path, rank, leader = logs.path("node", "a"), logs.path("rank", "a"), logs.path("coordinator")
    text = leader.read_text()
    incarnation = logs.read(path)[0]["incarnation"]
    first = text.index('"epoch":2,"record"')
    leader.write_text(text[:first] + text[first:].replace(str(incarnation), str(incarnation + 1)))
    found = logs.validate()
    assert not found.ok
    assert rank.name not in found.rejected


@pytest.mark.long
def test_a_seal_of_other_weights_is_rejected(logs):
    path = logs.path("owner")
    events, at = logs.read(path), logs.find(path, "Seal", 2)
    events[at]["step"]["content_digest"] = "0" * 32
    logs.write(path, events)
    leader = logs.path("coordinator")
    found = logs.validate()
    assert rejected_at(found, leader, logs.find(leader, "Commit", 2) + 1), found
    assert "x.sealed" in found.why[-1]


@pytest.mark.long
def test_a_payload_that_was_never_emitted_is_rejected(logs):
    path = logs.path("rank", "a")
    events, at = logs.read(path), logs.find(path, "BeginWrite", 3)
    for event in events[at : at + 2]:
        event["step"]["payload"]["owner_incarnation"] += 1
    logs.write(path, events)
    found = logs.validate()
    assert rejected_at(found, path, at + 1), found


# ---------------------------------------------------------------- what kills leave is a behaviour


def taken_over(logs, *, revisions, leases=1):
    """Another leader finds K so many revisions and epochs later than the last line of the first one's log has it.

    Its own lease is the so-manieth since.
    """
    path = logs.path("coordinator")
    last = [e for e in logs.read(path) if e.get("step", {}).get("record")][-1]["step"]
    record = last["record"]
    leader = "leader-2"
    token, epoch = record["fencing_token"] + leases, record["epoch"] + revisions
    k = {**record, "leader": leader, "fencing_token": token, "epoch": epoch}
    step = {"actor": leader, "action": "TakeOver", "epoch": k["epoch"], "record": k}
    step |= {"revision": last["revision"] + revisions, "operation_id": "leader-2-1"}
    return logs.folder / f"coordinator-{leader}-0.ndjson", [
        {"role": "coordinator", "name": leader, "incarnation": 0, "start": logs.read(path)[0]["start"]},
        {"role": "coordinator", "name": leader, "incarnation": 0, "step": step},
    ]


@pytest.mark.long
def test_an_attempt_with_an_owner_comes_before_that_owner_starts_again(logs):
    """Before it the leader admits an engine that started anew, and then it is gone with its owner."""
    leader, owner, node, rank = (
        logs.path(*which) for which in (("coordinator",), ("owner",), ("node", "b"), ("rank", "b"))
    )
    events, new = logs.read(leader), 1_900_000_000_000_000_000
    commit, before = (events[logs.find(leader, action, 3)] for action in ("Commit", "OpenAttempt"))
    k = commit["step"]["record"]
    first, ranks = logs.read(node)[0], {"0": new}
    state = {**first["start"]["state"], "content_digest": k["baseline_id"]}
    start = {**first, "incarnation": new, "start": {**first["start"], "ranks": ranks, "state": state}}
    logs.write(node.with_name(f"node-b-{new}.ndjson"), [start])
    logs.write(rank.with_name(f"rank-b-{new}.ndjson"), [{**logs.read(rank)[0], "incarnation": new}])
    k = {**k, "members": [k["members"][0], {"engine": "b", "incarnation": new}]}
    admit = {**commit["step"], "action": "Admit", "record": k, "revision": 10, "operation_id": "admit"}
    offered = {**before["step"]["record"]["open"], "target": 4, "candidate": "v4-another"}
    opened = {**admit, "action": "OpenAttempt", "epoch": 4, "revision": 11, "operation_id": "open"}
    opened["record"] = {**k, "epoch": 4, "open": offered}
    logs.write(leader, [*events, {**commit, "step": admit}, {**commit, "step": opened}])
    logs.write(*taken_over(logs, revisions=1))
    again = {**logs.read(owner)[0], "incarnation": new}
    logs.write(owner.with_name(f"owner-rank-0-{new}.ndjson"), [again])
    found = logs.validate()
    assert found.ok, found


@pytest.mark.long
def test_a_gate_that_closed_for_want_of_the_record_opens_again(logs):
    path = logs.path("node", "a")
    events, at = logs.read(path), logs.find(path, "OpenGate", 3)
    opened = events[at]
    closing = [{**opened, "step": {**opened["step"], "action": action}} for action in ("LoseRecord", "GateClosed")]
    for event in closing:
        del event["step"]["version"], event["step"]["detail"]
    events[at + 1 : at + 1] = [*closing, opened]
    logs.write(path, events)
    found = logs.validate()
    assert found.ok, found


@pytest.mark.long
def test_a_trainer_that_died_before_its_fold_owes_none_when_it_is_back(logs):
    leader, owner = logs.path("coordinator"), logs.path("owner")
    logs.write(leader, logs.read(leader)[: logs.find(leader, "Commit", 3) + 1])
    events = logs.read(owner)
    sealed = events[logs.find(owner, "Seal", 2)]["step"]["content_digest"]
    logs.write(owner, events[: logs.find(owner, "BeginFold", 3)])
    incarnation = events[0]["incarnation"] + 10**12
    back = {**events[0], "incarnation": incarnation, "start": {**events[0]["start"], "baseline_digest": sealed}}
    logs.write(logs.folder / f"owner-rank-0-{incarnation}.ndjson", [back])
    path, lines = taken_over(logs, revisions=1)
    for action, epoch in (("Publish", 4), ("FinishTransition", 3)):
        lines.append({**lines[1], "step": {"actor": "leader-2", "action": action, "epoch": epoch}})
    logs.write(path, lines)
    found = logs.validate()
    assert found.ok, found


@pytest.mark.long
def test_a_restore_that_its_leader_died_with_is_read_off_the_record(logs):
    logs.write(*taken_over(logs, revisions=2))
    found = logs.validate()
    assert found.ok, found


@pytest.mark.long
@pytest.mark.parametrize("leases", [1, 2])
def test_a_leader_that_died_before_its_takeover_had_a_lease_and_wrote_nothing(logs, leases):
    logs.write(*taken_over(logs, revisions=1, leases=leases))
    found = logs.validate()
    assert found.ok, found


@pytest.mark.long
@pytest.mark.parametrize("leases", [0, -1])
def test_a_takeover_without_a_newer_lease_is_rejected(logs, leases):
    path, lines = taken_over(logs, revisions=1, leases=leases)
    logs.write(path, lines)
    found = logs.validate()
    assert rejected_at(found, path, 2), found


@pytest.mark.long
def test_a_seal_that_got_to_some_only_was_delivered_to_those(logs):
    leader, owner = logs.path("coordinator"), logs.path("owner")
    logs.write(leader, logs.read(leader)[: logs.find(leader, "Commit", 3)])
    events, at = logs.read(owner), logs.find(owner, "Seal", 3)
    failed = {"actor": "rank-0", "action": "EmitFailed", "epoch": 3}
    logs.write(owner, [*events[:at], {**events[at], "step": failed}])
    for name in ("a", "b"):
        rank, node = logs.path("rank", name), logs.path("node", name)
        logs.write(rank, logs.read(rank)[: logs.find(rank, "DeliverManifest", 3) + 1])
        logs.write(node, logs.read(node)[: logs.find(node, "Prepare", 3) + 1])
    found = logs.validate()
    assert found.ok, found


@pytest.mark.long
@pytest.mark.parametrize("read", [True, False])
def test_a_seal_whose_owner_went_on_with_the_next_attempt_was_delivered_if_somebody_read_it(logs, read):
    """A manifest is in the store, and the order of the next attempt comes before that is written down."""
    leader, owner = logs.path("coordinator"), logs.path("owner")
    events, at = logs.read(leader), logs.find(leader, "OpenAttempt", 3)
    step = events[at]["step"]
    again = {**step["record"], "epoch": 4, "open": {**step["record"]["open"], "attempts": 2, "kind": "absolute"}}
    failed = {**step, "action": "AttemptFailed"}
    for field in ("record", "revision", "operation_id"):
        del failed[field]
    opened = {**step, "epoch": 4, "record": again, "revision": step["revision"] + 1, "operation_id": "again"}
    before = events[: logs.find(leader, "OrderOpenApply", 3) + 1]
    logs.write(leader, [*before, {**events[at], "step": failed}, {**events[at], "step": opened}])
    events, at = logs.read(owner), logs.find(owner, "Seal", 3)
    emit = {"actor": "rank-0", "action": "Emit", "epoch": 4}
    logs.write(owner, [*events[:at], {**events[at], "step": emit}])
    for name in ("a", "b"):
        rank, node = logs.path("rank", name), logs.path("node", name)
        delivered = logs.find(rank, "DeliverManifest", 3)
        logs.write(rank, logs.read(rank)[: delivered + 1])
        logs.write(node, logs.read(node)[: logs.find(node, "Prepare", 3) + 1])
        if not read:  # acknowledged without it
            changed = logs.read(rank)
            changed[delivered]["step"] = {"actor": name, "action": "Acknowledge", "epoch": 3}
            logs.write(rank, changed)
    found = logs.validate()
    assert found.ok is read, found
    assert read or "manifests" in found.why[-1]


# ---------------------------------------------------------------- files


def test_a_missing_line_shows_by_its_number(logs):
    path = logs.path("rank", "a")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    found = validate(logs.folder, SPEC)
    assert rejected_at(found, path, 6)
    assert "event 6 follows event 4" in found.why[0]


def test_half_a_line_at_the_end_is_left_out_and_said(logs):
    path = logs.path("rank", "a")
    path.write_bytes(path.read_bytes()[:-20])
    (note,) = read_logs(logs.folder).notes
    assert note.startswith(f"{path.name}:")
    assert "killed" in note


def test_half_a_line_elsewhere_is_damage(logs):
    path = logs.path("rank", "a")
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4][:30] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(RefusedError, match=f"{path.name}:5.*only the last line"):
        read_logs(logs.folder)


def test_a_log_of_another_version_is_not_read(logs):
    path = logs.path("rank", "a")
    path.write_text(path.read_text().replace('"log_version":1', '"log_version":2'))
    with pytest.raises(RefusedError, match="event log version 2"):
        read_logs(logs.folder)


def test_a_log_without_its_start_is_rejected(logs):
    path = logs.path("rank", "a")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(RejectedError, match="lines before it are missing"):
        read_logs(logs.folder)


@pytest.mark.parametrize(("folder", "said"), [("nowhere", "no such folder"), (".", "was event_log off?")])
def test_nothing_to_validate_is_said(tmp_path, folder, said, capsys):
    assert main(["spec", "validate", str(tmp_path / folder)]) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_among_logs_is_refused_by_name(tmp_path, make, capsys):
    make(tmp_path / "odd.ndjson")
    assert main(["spec", "validate", str(tmp_path)]) == 3
    assert f"{tmp_path}/odd.ndjson: not a regular file" in capsys.readouterr().err


def test_logs_of_two_records_are_refused(logs):
    path = logs.path("owner")
    path.write_text(path.read_text().replace('"record_id":"default"', '"record_id":"other"'))
    with pytest.raises(RefusedError, match="records default, other"):
        read_logs(logs.folder)


@pytest.mark.parametrize("role", ["rank", "node", "owner", "coordinator"])
def test_two_logs_of_one_actor_are_refused(logs, role):
    """Else a whole copy would stand for one from which something was taken away."""
    path = logs.path(role, "a" if role in {"rank", "node"} else "")
    copy = path.with_name(f"{role}-zzz.ndjson")
    shutil.copy(path, copy)
    with pytest.raises(RefusedError, match=f"{path.name} and {copy.name} are both of {role}"):
        logs.validate()
