"""`dcr record`, against records that were written by hand."""

import json

import pytest

from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.protocol.record import CommitRecord, encode_record

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
    assert f"version 0, digest {K.baseline_id}  by leader-1, operation op2" in out[0]
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
    status, out = told(capsys, "show", "--control", address, "--record", "other")
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
