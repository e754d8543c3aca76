"""Addresses of object stores: what is read from them, what is refused, and that no secret is shown."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.delivery.address import open_delivery
from dcr.delivery.s3_address import S3Address
from dcr.protocol.errors import RefusedError
from dcr.s3.requests import _client


def test_an_address_and_its_defaults():
    place = S3Address.parse(
        "s3://weights/a/b?endpoint=http://127.0.0.1:8333&region=eu-1&part_bytes=6000000&tries_max=3"
    )
    assert (place.bucket, place.prefix, place.region) == ("weights", "a/b/", "eu-1")
    assert (place.endpoint, place.part_bytes, place.tries_max) == ("http://127.0.0.1:8333", 6_000_000, 3)
    assert str(place) == "s3://weights/a/b/ at http://127.0.0.1:8333"
    for whole in ("s3://weights", "s3://weights/", "s3://weights?retry_timeout_s=2.5"):
        assert S3Address.parse(whole).prefix == ""
    assert S3Address.parse("s3://weights") == S3Address(bucket="weights")
    assert S3Address.parse("s3://weights?look_pause_s=0&look_pause_max_s=0").look_pause_s == 0


def test_the_page_lists_every_field_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "delivery.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z_]+)` \| `?([^|`]*?)`? \|", page, re.MULTILINE))
    fields = {f.name: str(f.default) for f in dataclasses.fields(S3Address) if f.name not in {"bucket", "prefix"}}
    assert listed == fields | {"endpoint": "Amazon's", "region": "boto3's"}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://", "bucket's name"),
        ("s3://Upper/x", "bucket's name"),
        ("s3://b@d/x", "before the bucket"),
        ("s3://weights/../x", "none beginning with a dot"),
        ("s3://weights/a//b", "must be segments"),
        ("s3://weights/" + "x" * 401, "400 characters"),
        ("s3://weights/a#b", "of the form s3://bucket/prefix"),
        ("s3://weights?" + "x" * 5000, "more than 4096 characters"),
        ("s3://weights?parts_bytes=8000000", "unknown field parts_bytes; known are addressing, answer_timeout_s"),
        ("s3://weights?bucket=other", "unknown field bucket"),
        ("s3://weights?region=a&region=b", "field region is there twice"),
        ("s3://weights?region=", None),
        ("s3://weights?region=EU WEST", "name like us-east-1"),
        ("s3://weights?part_bytes=1", "part_bytes must be from 5.24288e\\+06 to 1.07374e\\+09"),
        ("s3://weights?part_bytes=8e6", "part_bytes must be a whole number"),
        ("s3://weights?tries_max=0", "tries_max must be from 1 to 1000"),
        ("s3://weights?retry_timeout_s=nan", "retry_timeout_s must be a number"),
        ("s3://weights?retry_timeout_s=inf", "retry_timeout_s must be from 0.1 to 3600"),
        ("s3://weights?look_pause_s=2", "look_pause_max_s must not be less"),
        ("s3://weights?addressing=there", "one of path, virtual, auto"),
        ("s3://weights?endpoint=127.0.0.1:8333", "of the form http://host:port"),
        ("s3://weights?endpoint=http://h:99999", "of the form http://host:port"),
        ("s3://weights?endpoint=http://h/bucket", "of the form http://host:port"),
        ("s3://weights?endpoint=ftp://h", "of the form http://host:port"),
        ("s3://[", "form"),
    ],
)
def test_what_an_address_may_not_say(address, said):
    if said is None:
        S3Address.parse(address)
        return
    with pytest.raises(RefusedError, match=said):
        S3Address.parse(address)
    with pytest.raises(RefusedError):
        open_delivery(address)


SECRETS = [
    "s3://{}:{}@weights/p",
    "s3://{}@weights/p?region={}",
    "s3://weights/p?aws_access_key_id={}&aws_secret_access_key={}",
    "s3://weights/p?SECRET={}{}",
    "s3://weights/p?session_token={}{}",
    "s3://weights/p?{}={}",
    "s3://weights/p?{}{}",
    "s3://weights/p?tries_max={}{}",
    "s3://weights/p?region={}!{}",
    "s3://weights/p?endpoint=http://{}:{}@host",
    "s3://weights/p?endpoint=http://host:{}{}",
    "s3://{}:{}/weights",
    "s3://weights/{}:{}@x",
    "s3://weights/{}#{}",
    "https://{}:{}@host/weights",
    "file://{}:{}@host/weights",
]


@given(st.sampled_from(SECRETS), st.from_regex(r"AKIA[A-Z0-9]{16}", fullmatch=True), st.integers(10**19, 10**20))
def test_what_may_be_a_secret_is_refused_and_not_shown(form, key, secret):
    with pytest.raises(RefusedError) as error:
        open_delivery(form.format(key, secret))
    said = str(error.value)
    assert key not in said
    assert str(secret) not in said
    assert error.value.__cause__ is None


def test_what_botocore_says_of_credentials_is_not_among_our_lines_unless_somebody_wants_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    logger = logging.getLogger("botocore")
    place = S3Address.parse("s3://weights?endpoint=http://127.0.0.1:1")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()  # as setLevel does
    _client(place)
    assert not [r for r in caplog.records if r.name.startswith("botocore")]
    logger.setLevel(logging.INFO)
    _client(place)
    assert "Found credentials in environment variables" in caplog.text
