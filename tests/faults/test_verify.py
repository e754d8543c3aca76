"""``dcr verify``: engines against the owners' baseline by digests; what is said of each thing that goes wrong."""

import json
import threading
from pathlib import Path

import pytest
import torch

from dcr import PushError
from dcr.cli.main import main
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import Verify, encode_message
from dcr.runtime.contents_table import TABLE_BYTES_MAX, decode_table, encode_table
from dcr.runtime.serving_wait import NodeError
from tests.faults.test_node_ranks import Sharded, fresh, single
from tests.faults.thread_fleet import WAIT_S, forge, unsealed

LATE = "no answer within 3 s (the coordinator's verify_timeout_s) of: engine sharded"


def ask(fleet, capsys, *more):
    """The command as a user gives it: exit status, what it printed, and its JSON."""
    status = main(["verify", "--control", fleet.addresses["control"], "--json", *more])
    out = capsys.readouterr().out.strip().splitlines()
    return status, "\n".join(out[:-1]), json.loads(out[-1])


@pytest.fixture
def run(fleet_of, node_of):
    """A trainer, an engine of two ranks and one of one rank, all at version 1."""

    def make(**settings):
        fleet = fleet_of(**settings)
        sharded, one = Sharded(fleet, "sharded"), single(fleet, "one")
        node = node_of(fleet, [sharded, one])
        node.wait_serving(0, WAIT_S)
        fleet.step()
        fleet.push()
        node.wait_serving(1, WAIT_S)
        return fleet, sharded, one, node

    return make


def test_engines_that_hold_the_committed_version(run, capsys):
    fleet, sharded, _, _ = run()
    status, said, report = ask(fleet, capsys)
    assert (status, report["ok"], report["version"], report["error"]) == (0, True, 1, "")
    skipped = {"sharded": set(), "one": {"scale"}}  # by their loaders
    assert {e["engine"] for e in report["engines"]} == set(skipped)
    for engine in report["engines"]:
        unread = skipped[engine["engine"]]
        held = {n: t for n, t in fleet.states[1].items() if n not in unread}
        assert (engine["tensors"], engine["different_count"], engine["reason"]) == (len(held), 0, "")
        assert engine["elements"] == sum(t.numel() for t in held.values())
        assert set(engine["unread"]) == unread
    assert "2 of 2 admitted engines hold version 1" in said
    assert sharded.bits() == fresh(fleet, 1)


def test_one_wrong_bit_is_named_and_its_engine_serves_no_more(run, capsys):
    fleet, sharded, _, node = run()
    sharded.shards[1].up.data.view(torch.int16)[3, 4] ^= 1
    status, said, report = ask(fleet, capsys)
    assert status == 1
    found = {e["engine"]: e for e in report["engines"]}
    assert list(found["sharded"]["different"]) == ["up"]
    assert found["one"]["different_count"] == 0
    assert "DIFFERS  sharded: 1 tensors are not those of version 1" in said
    assert "    up: its bits are not those that the owners have committed" in said
    fleet.wait(lambda: "sharded" in node.failures and sharded.gate.version is None)
    assert "does not hold what is committed" in node.failures["sharded"]
    assert node.wait_serving(1, WAIT_S, engine="one") == 1
    with pytest.raises(NodeError, match="up: its bits are not those"):
        node.wait_serving(1, WAIT_S, engine="sharded")


def test_owners_digests_are_brought_forward_and_are_those_of_the_weights(run, capsys):
    """After three versions the table in the store is what the state dict digests to, element by element."""
    fleet, *_, node = run()
    for version in (2, 3):
        fleet.step()
        fleet.push()
        node.wait_serving(version, WAIT_S)
    assert ask(fleet, capsys)[0] == 0
    (table,) = Path(fleet.payloads).glob("default/*/contents/rank-0/*/*")
    expected = {}
    for name, tensor in fleet.states[3].items():
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        bits = tensor.contiguous().flatten().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        expected[name] = digest_elements(spec, None, bits)
    assert decode_table(unsealed(table)) == expected
    assert sum(expected.values(), ContentDigest()).hex() == fleet.record().baseline_id
    assert ask(fleet, capsys)[0] == 0
    assert len(list(Path(fleet.payloads).glob("default/*/contents/*/*/*"))) == 1, "asking again stores nothing more"


def test_a_table_that_was_changed_in_the_store_is_refused(run, capsys):
    fleet, *_ = run()
    assert ask(fleet, capsys)[0] == 0
    (table,) = Path(fleet.payloads).glob("default/*/contents/rank-0/*/*")
    held = decode_table(unsealed(table))
    name = next(iter(held))
    table.chmod(0o600)
    table.write_bytes(encode_table({**held, name: held[name] + ContentDigest(1)}))
    status, _, report = ask(fleet, capsys)
    assert (status, report["engines"]) == (3, []), "no engine is blamed for a bad table"
    assert "rank-0 could not deliver its content digests" in report["error"]


def test_a_table_that_changes_after_its_owner_delivered_it_blames_no_engine(run, capsys):
    fleet, sharded, _, _ = run()
    delivery = fleet.refit._host._delivery
    put = delivery.put

    def put_and_change(key, data):
        put(key, data)
        forge(fleet.payloads / key, lambda data: data[:-1] + bytes([data[-1] ^ 1]))

    delivery.put = put_and_change
    status, _, report = ask(fleet, capsys)
    assert status == 3
    assert len(report["engines"]) == 2
    for engine in report["engines"]:
        assert "its bytes are not those that its owner delivered" in engine["reason"]
        assert engine["different_count"] == 0
    assert sharded.gate.version == 1


def test_a_store_that_fails_in_a_way_that_nobody_foresaw_ends_no_thread(run, capsys):
    """The owner's thread still emits and folds, and an engine's reader still reads."""
    fleet, _, _, node = run()
    for delivery, call in ((fleet.refit._host._delivery, "put"), (node._reception._delivery, "get")):

        def broken(*_arguments):
            raise RuntimeError("out of order")

        whole = getattr(delivery, call)
        setattr(delivery, call, broken)
        status, said, report = ask(fleet, capsys)
        assert status == 3
        assert "RuntimeError: out of order" in said + json.dumps(report)
        setattr(delivery, call, whole)
    assert ask(fleet, capsys)[0] == 0
    fleet.step()
    fleet.push()
    assert node.wait_serving(2, WAIT_S) == 2


def test_while_a_transition_is_under_way_nothing_is_compared(run, capsys):
    fleet, *_, node = run()
    said = []
    fleet.once("OpenApply", lambda _: said.append(ask(fleet, capsys)))

    def push():
        fleet.step()
        fleet.push()

    pushing = threading.Thread(target=push)
    pushing.start()
    pushing.join(WAIT_S)
    node.wait_serving(2, WAIT_S)
    status, _, report = said[0]
    assert status == 3
    assert "a transition to version 2 is under way; ask again" in report["error"]
    assert ask(fleet, capsys)[0] == 0


def test_an_engine_that_is_not_reached_is_named(run, capsys):
    fleet, _, _, node = run()
    node.close()
    fleet.wait(lambda: not [p for p in fleet.refit._coordinator._hub.peers() if p.role == "node"])
    status, said, report = ask(fleet, capsys)
    assert status == 3
    assert {e["reason"] for e in report["engines"]} == {"not connected"}
    assert "UNKNOWN  one: not connected" in said


def test_a_transition_that_stopped_and_who_is_not_admitted_are_named(run, node_of, capsys):
    fleet, *_ = run(attempts_max=1)
    fleet.step()
    place, away = fleet.payloads / "default", fleet.payloads / "away"
    place.rename(away)
    place.touch()  # no folder, so that nothing can be put there
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.push()
    place.unlink()
    away.rename(place)
    node_of(fleet, [single(fleet, "late")])
    fleet.wait(lambda: "late" in fleet.refit._coordinator._role.fleet.engines)
    status, said, report = ask(fleet, capsys)
    assert (status, {e["engine"] for e in report["engines"]}) == (0, {"sharded", "one"})
    assert list(report["not_compared"]) == ["late"]
    assert "late was not compared: not admitted: holds " in said
    assert report["transition"] == "the transition to version 2 has stopped"
    assert f"{report['transition']}: dcr transition show --control ... --record-id default" in said


def test_a_difference_is_proven_whatever_is_not_known_of_others(run, capsys):
    """Status 1, and not 3: an engine that differs differs, though another does not answer."""
    fleet, sharded, one, _ = run(verify_timeout_s=3.0)
    go = threading.Event()
    sharded.hurt = lambda _: go.wait(WAIT_S)
    dict(one.model.named_parameters())["embed"].data.view(torch.int16)[3, 4] ^= 1
    status, said, report = ask(fleet, capsys)
    go.set()
    sharded.hurt = lambda _: None
    assert (status, report["ok"], report["error"]) == (1, False, LATE)
    assert "DIFFERS  one" in said


def test_an_engine_that_does_not_answer_is_named_in_time(run, capsys):
    fleet, sharded, _, _ = run(verify_timeout_s=3.0)
    go = threading.Event()
    sharded.hurt = lambda _: go.wait(WAIT_S)
    status, _, report = ask(fleet, capsys)
    go.set()
    sharded.hurt = lambda _: None
    assert status == 3
    assert report["error"] == LATE
    assert [e["engine"] for e in report["engines"]] == ["one"]


def test_who_cannot_be_asked_is_said_and_nothing_is_made(run, capsys, tmp_path):
    run()
    for control, record, why in (
        ("sqlite://{0}/nothing/record.db", "default", "there is no"),
        ("sqlite://{0}", "default", "there is no"),
        ("sqlite://{0}/record.db.secret", "default", "record.db.secret"),
        ("sqlite://{0}/record.db", "another", "no leader of record 'another' could be reached in 1 s"),
        ("etcd://{0}/record.db", "default", "control plane"),
    ):
        before = sorted(p.name for p in tmp_path.iterdir())
        arguments = ["--control", control.format(tmp_path), "--record-id", record, "--connect-s", "1", "--json"]
        assert main(["verify", *arguments]) == 3
        assert why in capsys.readouterr().err
        assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_only_an_operator_may_ask(run):
    fleet, *_ = run()
    coordinator = fleet.refit._coordinator
    (owner,) = [p for p in coordinator._hub.peers() if p.role == "owner"]
    with pytest.raises(RefusedError, match="which is an operator's to ask"):
        coordinator._on_report(owner, encode_message(Verify("default")))


def test_two_at_a_time_do_not_mix(run, capsys):
    fleet, sharded, _, _ = run()
    go, there = threading.Event(), threading.Event()

    def wait(_request):
        there.set()
        go.wait(WAIT_S)

    sharded.hurt = wait
    first = []
    asking = threading.Thread(target=lambda: first.append(main(["verify", "--control", fleet.addresses["control"]])))
    asking.start()
    assert there.wait(WAIT_S)
    status, _, report = ask(fleet, capsys)
    assert (status, report["error"]) == (3, "another verification is under way; ask again when it is over")
    go.set()
    sharded.hurt = lambda _: None
    asking.join(WAIT_S)
    assert first == [0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode_table({"a": ContentDigest(1)})[:-1],
        encode_table({"a": ContentDigest(1)}).replace(b"\x01", b"\x02", 1),
        encode_table({"a": ContentDigest(1), "b": ContentDigest(2)}).replace(b"\xa1b", b"\xa1a"),
    ],
    ids=["empty", "no msgpack", "cut", "format 2", "one name twice"],
)
def test_what_is_no_table_is_refused(data):
    with pytest.raises(RefusedError, match="table of content digests"):
        decode_table(data)


def test_a_table_is_bounded():
    names = {f"{'x' * 900}{i}": ContentDigest(i) for i in range(TABLE_BYTES_MAX // 900)}
    with pytest.raises(RefusedError, match=f"{TABLE_BYTES_MAX} at most"):
        encode_table(names)
