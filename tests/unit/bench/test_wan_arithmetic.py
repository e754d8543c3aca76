"""The WAN bench's arithmetic against numbers computed by hand from the paper, and from a few small pictures."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def wan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("wan_arithmetic")


def test_the_paper_s_link_and_construction(wan):
    """247.2 GB at 0.625 GB/s are 395.52 s; 18 % and 45 % of 22.6 s are 4.068 s and 10.17 s."""
    assert pytest.approx(395.52) == wan.PAPER_CHECKPOINT_BYTES / wan.PAPER_LINK_BYTES_S
    assert wan.paper_ratio() == pytest.approx(97.227, abs=1e-3)
    assert "395.5 s" in str(wan.link_rate(1, 1.0, 1.0))
    assert "4.07 to 10.17 s: 38.9 to 97.2 times" in str(wan.link_rate(1, 1.0, 1.0))


def test_the_rate_of_a_link(wan):
    """256 MB in 100 times 0.2 s, so in 20 s: 12.8 MB/s, which are 102.4 Mbit/s."""
    link = wan.link_rate(256_000_000, 0.2, 100.0)
    assert link.bytes_s == pytest.approx(12.8e6)
    assert "102.4 Mbit/s" in str(link)


def test_what_links_ask_of_the_reference(wan):
    """Eight nodes send 30.9 GB each in 49.44 s, and then each takes 247.2 GB in 395.52 s."""
    assert wan.reference_bound_s(247_200_000_000, 8, 0.625e9) == pytest.approx(444.96)


@pytest.mark.parametrize(
    ("trainers", "nodes", "copies", "seconds"),
    [
        (8, 8, 1, 1.164),  # 5.82 GB over eight links at 0.625 GB/s
        (8, 8, 8, 9.312),  # every node takes all of it
        (8, 1, 1, 9.312),  # all of it over one node's link
        (2, 8, 1, 4.656),  # half of it from each of two
    ],
)
def test_what_links_ask_of_payloads(wan, trainers, nodes, copies, seconds):
    assert wan.payload_bound_s(5_820_000_000, trainers, nodes, 0.625e9, copies=copies) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("intervals", "covered"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(5.0, 6.0), (1.0, 3.0)], 3.0),  # apart, in no order
        ([(1.0, 3.0), (2.0, 4.0)], 3.0),  # overlapping
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 5.0)], 8.0),  # one inside another, and one after that
        ([(1.0, 2.0), (2.0, 3.0)], 2.0),  # touching
    ],
)
def test_overlaps_count_once(wan, intervals, covered):
    assert wan.covered_s(intervals) == pytest.approx(covered)


def test_a_lower_bound_is_of_the_busiest_process(wan):
    assert wan.lower_bound_s([[(0.0, 1.0), (0.5, 2.0)], [(0.0, 3.0)], []]) == pytest.approx(3.0)
    assert wan.lower_bound_s([]) == 0.0


def test_heads_of_frames(wan):
    """Full frames of 1514 bytes carry 1448 of a stream; an acknowledgement of 66 carries none."""
    assert wan.stream_bytes(1000 * 1514 + 500 * 66, 1500) == 1_448_000


def test_what_is_missing_is_named(wan, monkeypatch):
    network = importlib.import_module("wan_network")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(network.MissingError, match=r"run it as root|install the package gcc"):
        network.check_machine()
