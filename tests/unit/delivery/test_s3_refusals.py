"""What a store, or something that answers in its place, may say beside what it should: each is named for what it is."""

import datetime as dt

import botocore.auth
import pytest

from dcr.delivery.address import open_delivery
from dcr.delivery.interface import DeliveryError
from tests.bad_network import error_body


@pytest.fixture
def s3_of(bucket, network):
    opened = []

    def make(more="&tries_max=2", endpoint=network.endpoint):
        opened.append(open_delivery(f"s3://{bucket}/p?endpoint={endpoint}{more}"))
        return opened[-1]

    yield make
    for delivery in opened:
        delivery.close()


def test_a_clock_that_is_wrong_is_named(s3_of, monkeypatch, running_store):
    delivery = s3_of()
    delivery.put("before", b"x")
    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: now(*a, **k) + dt.timedelta(minutes=20))
    for act in (lambda: delivery.put("k", b"x"), lambda: delivery.get("before", 1), s3_of):
        with pytest.raises(DeliveryError, match=r"clocks differ, after 1 try .*403 RequestTimeTooSkewed.*\(NTP\)"):
            act()
    monkeypatch.undo()
    assert delivery.get("before", 1) == b"x"
    assert delivery.get("k", 1) is None


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (400, "ExpiredToken", r"credentials expired, after 1 try .*check what boto3 finds"),
        (403, "InvalidToken", r"credentials expired, after 1 try "),
        (507, "InsufficientStorage", r"store full, after 2 tries .*free some space"),
        (403, "AccessDenied", r"refused, after 1 try .*the rights that docs/delivery.md lists"),
    ],
)
def test_what_changes_in_the_middle_is_named_and_over_when_it_is_over(s3_of, network, status, code, said):
    delivery = s3_of()
    delivery.put("before", b"x")
    network.answer("said", status, error_body(code))
    network.once("said", times=99)
    for act in (lambda: delivery.put("k", b"x"), lambda: delivery.get("before", 1), lambda: delivery.keys("k/")):
        with pytest.raises(DeliveryError, match=said):
            act()
    network.quiet()
    assert delivery.get("before", 1) == b"x"
    assert delivery.get("k", 1) is None
    delivery.put("k", b"x")


def test_a_policy_without_lists_is_named_when_the_store_is_opened(s3_of, network):
    network.answer("denied", 403, error_body("AccessDenied"))
    network.once("denied", lambda r: "list-type=2" in r.path)
    with pytest.raises(DeliveryError, match=r"opening it: refused, after 1 try .*docs/delivery.md lists"):
        s3_of()


@pytest.mark.parametrize("size", [5, (5 << 20) + 1])
def test_a_page_in_place_of_an_answer_is_no_answer(s3_of, network, size):
    """A portal or a wrong server says 200 to everything: nothing must be taken for stored, or for read."""
    delivery, data = s3_of("&tries_max=2&part_bytes=5242880"), b"x" * size
    delivery.put("before", data)
    network.answer("page", 200, b"<html><body>please log in</body></html>", "text/html")
    network.once("page", times=999)
    acts = (
        lambda: delivery.put("k", data),
        lambda: delivery.get("before", size),
        lambda: delivery.keys("k/"),
        lambda: delivery.delete_prefix("before/"),
        lambda: delivery.tidy("before/"),
        s3_of,
    )
    for act in acts:
        with pytest.raises(DeliveryError, match=r"damaged answer, after \d tries .*what lies between here and the"):
            act()
    network.quiet()
    assert delivery.get("before", size) == data
    assert delivery.get("k", size) is None
    delivery.put("k", data)
    assert delivery.get("k", size) == data


def test_a_page_in_place_of_the_answer_to_a_deletion_leaves_nothing_undone(s3_of, network):
    delivery = s3_of("")
    for n in range(3):
        delivery.put(f"k/{n}", b"x")
    network.answer("page", 200, b"<html></html>", "text/html")
    network.once("page", lambda r: r.method == "POST")
    delivery.delete_prefix("k/")
    assert delivery.keys("k/") == []
    assert network.faults() == {"page": 1}


def test_a_page_at_one_step_of_a_put_is_gone_over(s3_of, network):
    delivery, data = s3_of("&part_bytes=5242880"), b"y" * ((5 << 20) + 1)
    network.answer("page", 200, b"<html></html>", "text/html")
    for number, match in enumerate(
        [lambda r: r.path.endswith("?uploads"), lambda r: "partNumber=1" in r.path, lambda r: r.method == "POST"]
    ):
        network.once("page", match)
        delivery.put(f"k/{number}", data)
        assert delivery.get(f"k/{number}", len(data)) == data
    assert network.faults() == {"page": 3}
