"""What is the bucket's alone: its address, its objects, who is let in, and what is told of a bucket put back."""

import dataclasses
import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dcr.control_plane.address import beside, open_control_plane, open_existing, secret_file
from dcr.control_plane.interface import ControlPlaneUnavailableError
from dcr.control_plane.s3_address import S3RecordAddress
from dcr.control_plane.s3_objects import Kept, decode
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import contents_key, epoch_prefix, sweep
from dcr.protocol.errors import RefusedError
from dcr.runtime.event_log import event_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "s3_record.json"


def write(plane, expected, operation_id, record_id="run"):
    return plane.compare_and_set(record_id, expected, b"K", operation_id=operation_id, actor="t", reason="r")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://B/x", "control plane address: the bucket's name"),
        ("s3://bucket/x?part_bytes=8388608", "unknown field part_bytes; known are addressing, answer_timeout_s"),
        ("s3://bucket/x?secret=run.secret", "secret must be the absolute path of a file"),
        ("s3://bucket/x?endpoint=http://h/p", "endpoint must be"),
        ("s3://bucket/x?endpoint=http://10.0.0.9:8333", "http://10.0.0.9:8333 is not this machine.*https://host:port"),
    ],
)
def test_what_an_address_may_not_say(address, said):
    with pytest.raises(RefusedError, match=said):
        open_control_plane(address)


@pytest.mark.parametrize(
    "address",
    ["s3://K:VERYSECRET@bucket/x", "s3://bucket/x?aws_secret_access_key=VERYSECRET", "s3://bucket/x?secret=VERYSECRET"],
)
def test_no_secret_is_shown(address):
    with pytest.raises(RefusedError) as refused:
        secret_file(address)
    assert "VERYSECRET" not in str(refused.value)


def test_the_secret_is_brought_and_nothing_lies_beside(caplog):
    with pytest.raises(RefusedError, match=r"control plane s3://bucket/x/ at https://h: .*dcr certs secret"):
        secret_file("s3://bucket/x?endpoint=https://h")
    assert secret_file("s3://bucket/x?secret=/etc/dcr/run.secret") == (Path("/etc/dcr/run.secret"), False)
    assert beside("s3://bucket/x", ".events") is None
    with caplog.at_level(logging.INFO, "dcr"):
        assert event_folder("beside", "s3://bucket/x") == ""
    assert "the record is in no file" in caplog.text


def test_the_page_lists_every_field_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "control-plane.md").read_text()
    section = page.split("\n## S3\n")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `([a-z_]+)` \| `?([^|`]*?)`? \| [^|]+\|$", section, re.MULTILINE))
    fields = {f.name: str(f.default) for f in dataclasses.fields(S3RecordAddress) if f.name not in {"bucket", "prefix"}}
    assert listed == fields | {"endpoint": "Amazon's", "region": "boto3's", "secret": "-"}


def test_who_is_not_let_in_is_refused_by_name(bucket, running_store, monkeypatch):
    where = f"endpoint={running_store.endpoint}"
    with pytest.raises(RefusedError, match=r"s3://not-there/ .*opening it: no such bucket"):
        open_existing(f"s3://not-there?{where}")
    with pytest.raises(ControlPlaneUnavailableError, match="opening it: unreachable, after 4 tries"):
        open_control_plane(f"s3://{bucket}?endpoint=http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(RefusedError, match=r"opening it: refused, after 1 try.*docs/control-plane.md"):
        open_control_plane(f"s3://{bucket}?{where}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(RefusedError, match=r"opening it: .*credentials"):
        open_control_plane(f"s3://{bucket}?{where}")


def objects(store, bucket):
    client = store.client()
    keys = [found["Key"] for found in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
    return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read().hex() for key in keys}


def test_the_objects_are_what_the_page_says(s3_place, running_store, bucket, monkeypatch):
    """Against a golden file: another dcr must read them."""
    clock = SimpleNamespace(time=lambda: 1_700_000_000.5, sleep=time.sleep)
    monkeypatch.setattr("dcr.control_plane.s3.time", clock)
    plane = s3_place.open(history_max=2)
    for revision, operation in enumerate(("a/1", "b", "ü" * 200, "d")):
        plane.compare_and_set(
            "run 1",
            revision or None,
            bytes([revision]),
            operation_id=operation,
            actor="leader",
            reason="Commit",
            version=revision,
            digest="0f",
        )
    plane.register("run 1", "leader", "address", b"127.0.0.1:7")
    plane.register("run 1", "k", "ü" * 200, b"")
    found = objects(running_store, bucket)
    assert found == json.loads(GOLDEN.read_text())
    assert [key.rpartition("/")[2] for key in found if "/history/" in key] == [f"{n:020d}" for n in (2, 3)]


@pytest.mark.parametrize("change", ["put back", "removed"])
def test_a_bucket_that_was_put_back_is_told(s3_place, running_store, bucket, change):
    plane, client = s3_place.open(), running_store.client()
    key = "runs/a/run/control/record"
    write(plane, None, "a")
    old = client.get_object(Bucket=bucket, Key=key)
    data, metadata = old["Body"].read(), old["Metadata"]
    write(plane, 1, "b")
    if change == "removed":
        client.delete_object(Bucket=bucket, Key=key)
    else:
        client.put_object(Bucket=bucket, Key=key, Body=data, Metadata=metadata)
    for act in (lambda: plane.read("run"), lambda: write(plane, 2, "c")):
        with pytest.raises(ControlPlaneUnavailableError, match="after it was at 2: the bucket was put back"):
            act()


def test_what_something_else_wrote_is_refused_and_left_alone(s3_place, running_store, bucket):
    plane, client = s3_place.open(), running_store.client()
    of_that_name = {"Bucket": bucket, "Key": "runs/a/run/control/record"}
    client.put_object(**of_that_name, Body=b"x")
    for act in (lambda: plane.read("run"), lambda: write(plane, None, "a")):
        with pytest.raises(RefusedError, match="something else wrote it"):
            act()
    assert client.get_object(**of_that_name)["Body"].read() == b"x"
    client.put_object(**of_that_name, Body=b"x", Metadata={"dcr-xxh3-128": "00"})
    with pytest.raises(ControlPlaneUnavailableError, match=r"damaged answer, after 4 tries.*not those that"):
        plane.read("run")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"layout": 2, "what": "ever"}, "record: layout 2, this dcr knows 1; use the dcr that wrote it"),
        ({"layout": 1, "what": "ever"}, "record: holds nothing that this dcr can read"),
        (7, "record: holds nothing that this dcr can read"),
    ],
)
def test_what_another_dcr_wrote_is_refused(value, said):
    with pytest.raises(RefusedError, match=said):
        decode(msgspec.msgpack.encode(value), Kept, "record")


def test_payloads_and_record_share_a_place_and_a_sweep_leaves_the_record(s3_place, running_store, bucket):
    plane = s3_place.open()
    write(plane, None, "a")
    write(plane, 1, "b")
    plane.register("run", "node", "x", b"1")
    before = objects(running_store, bucket)
    delivery = open_delivery(s3_place.address)
    try:
        delivery.put(contents_key("run", 3, "rank-0", 1, "d"), b"payload")
        assert delivery.segments("run/") == ["00000000000000000003", "control"]
        sweep(delivery, "run", 9)
        assert delivery.keys(epoch_prefix("run", 3)) == []
    finally:
        delivery.close()
    assert objects(running_store, bucket) == before
