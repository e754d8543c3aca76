"""`dcr record`, against records that were written by hand."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.protocol.identity import Kind
from dcr.protocol.record import CommitRecord, Direction, Member, OpenTransition, OwnerRef, encode_record

GOLDEN = Path(__file__).parents[2] / "golden"
K = CommitRecord.create("default", "leader-1", "0a" * 16)


@pytest.fixture
def address(tmp_path):
    """A record of three writes, the last of a commit."""
    address = f"sqlite://{tmp_path}/record.db"
    plane = open_control_plane(address)
    for revision, reason in enumerate(("CreateRecord", "TakeOver", "Commit")):
        plane.compare_and_set(
            "default",
            revision or None,
            encode_record(K),
            operation_id=f"op{revision}",
            actor="leader-1",
            reason=reason,
            version=0,
            digest=K.baseline_id,
        )
    plane.close()
    return address


def told(capsys, *arguments):
    status = main(["record", *arguments])
    out = capsys.readouterr().out.splitlines()
    return status, out


def test_show_is_for_people(address, capsys):
    status, out = told(capsys, "show", "--control", address)
    assert status == 0
    assert out[0] == "record default: version 0, epoch 0, revision 3"
    assert "  lease      nobody holds one" in out
    assert "  committed  nothing yet" in out


def test_history_newest_first_and_commits_alone(address, capsys):
    status, out = told(capsys, "history", "--control", address)
    assert status == 0
    assert [line.split()[0] for line in out] == ["3", "2", "1"]
    assert "Commit" in out[0]
    assert f"then at version 0, digest {K.baseline_id}  by leader-1, operation op2" in out[0]
    _, out = told(capsys, "history", "--control", address, "--commits", "--json")
    (entry,) = json.loads(out[-1])["history"]
    assert entry.pop("time_s") > 1e9
    assert entry == {
        "revision": 3,
        "operation_id": "op2",
        "actor": "leader-1",
        "reason": "Commit",
        "version": 0,
        "digest": K.baseline_id,
    }


def test_a_history_names_the_version_that_stands_after_each_write(tmp_path, capsys, monkeypatch):
    """Two transitions, of which the second is turned back; what people read is in a golden file."""
    k, written = K, []

    def then(reason, record):
        written.append((reason, record))
        return record

    def opened(k, **more):
        refs = (OwnerRef("rank-0", 1),)
        attempts = 1 if k.open is None else k.open.attempts + 1
        tr = OpenTransition(
            target=k.version + 1,
            candidate=f"v{k.version + 1}-c",
            attempts=attempts,
            kind=Kind.RELATIVE if attempts == 1 else Kind.ABSOLUTE,
            owners=refs,
            wire_version=1,
            operations=("add",),
            pushes=(1,),
            **more,
        )
        return k.open_attempt(tr, k.members)

    k = then("CreateRecord", k)
    k = then("Admit", k.admit((Member("a", 1),)))
    k = then("OpenAttempt", opened(k))
    k = then("Commit", k.commit("0b" * 16, "ff" * 32, "op"))
    k = then("OpenAttempt", opened(k))
    k = then("TakeOver", k.take_over("leader-2"))
    k = then("OpenAttempt", opened(k, direction=Direction.BACK))
    k = then("Commit", k.commit(k.baseline_id, "ff" * 32, "op"))
    address = f"sqlite://{tmp_path}/history.db"
    with closing(open_control_plane(address)) as plane:
        for number, (reason, record) in enumerate(written):
            monkeypatch.setattr("dcr.control_plane.sqlite.time.time", lambda at=number: 1_800_000_000.0 + at)
            plane.compare_and_set(
                "default",
                number or None,
                encode_record(record),
                operation_id=f"op{number}",
                actor=record.leader,
                reason=reason,
                version=record.version,
                digest=record.baseline_id,
            )
    _, out = told(capsys, "history", "--control", address)
    assert "\n".join(out) + "\n" == (GOLDEN / "record_history.txt").read_text()


def test_the_older_name_of_the_option_is_taken(address, capsys):
    assert told(capsys, "show", "--control", address, "--record", "default")[0] == 0
    assert told(capsys, "show", "--control", address, "--record", "other")[0] == 1


def test_export_is_one_document_with_json_and_without(address, capsys):
    plane = open_control_plane(address)
    plane.acquire("default", "leader-2", 60)
    plane.close()
    _, (plain,) = told(capsys, "export", "--control", address)
    _, (line,) = told(capsys, "export", "--control", address, "--json")
    document, command = json.loads(plain), json.loads(line)
    assert command == {"command": "record", "ok": True, "kind": "export", **document}
    assert list(document) == [
        *("document_version", "record_id", "revision", "operation_id", "record", "lease", "history"),
    ]
    assert (document["document_version"], document["revision"], document["operation_id"]) == (1, 3, "op2")
    assert document["record"]["leader"] == "leader-1"
    assert document["lease"] == {"holder": "leader-2", "token": 1, "lease_s": 60.0}
    assert [e["revision"] for e in document["history"]] == [3, 2, 1]


def test_what_is_not_there_and_what_cannot_be_read(tmp_path, address, capsys):
    status, out = told(capsys, "show", "--control", address, "--record-id", "other")
    assert (status, out) == (1, ["there is no record 'other' at this address"])
    missing = f"sqlite://{tmp_path}/no.db"
    assert main(["record", "history", "--control", missing]) == 3
    assert "there is no" in capsys.readouterr().err
    assert not (tmp_path / "no.db").exists()
    assert main(["record", "show", "--control", "etcd://u:SECRET@h:1/p"]) == 3
    assert "SECRET" not in capsys.readouterr().err
    plane = open_control_plane(address)
    plane.compare_and_set("strange", None, b"\xff", operation_id="a", actor="t", reason="r")
    plane.close()
    assert main(["record", "show", "--control", address, "--record", "strange"]) == 3
    assert "no commit record" in capsys.readouterr().err
