"""The checks of a run, each given what it must not accept; and a page that says hostile names as they are."""

import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dcr.chaos import bits, timeline
from dcr.chaos.bits import Twins, combined, load, stored_bits
from dcr.chaos.checks import Checks
from dcr.chaos.journal import Journal, entries
from dcr.chaos.model import make, train_step
from dcr.chaos.report import FaultReport, RunReport, Table, Totals, details
from dcr.chaos.timeline import write_timeline
from dcr.protocol.errors import RefusedError
from dcr.rollout.node import describe

ENGINE = "dcr.chaos.model:served"


@pytest.fixture
def run(tmp_path):
    """A run's folder with three checkpoints, and its checks."""
    policy = make("dcr.chaos.model:policy")
    digests = {}
    for name in ("v0", "c1", "c2"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        state = {n: t.detach().clone() for n, t in policy.state_dict().items()}
        save_file(state, folder / "model.safetensors")
        digests[name] = describe(iter(state.items()))[1]
        train_step(policy, len(digests), 0.2)
    checks = Checks(tmp_path, Twins(ENGINE))
    checks.begin(tmp_path / "checkpoints/v0")
    assert checks.won(1, digests["c1"])
    return SimpleNamespace(folder=tmp_path, checks=checks, digests=digests)


def engine(run, name="v0"):
    model = make(ENGINE)
    load(model, run.folder / "checkpoints" / name)
    return model


def test_one_flipped_bit_is_noticed(run):
    model = engine(run, "c1")
    shown = {"version": 1, "bits": stored_bits(model), "bytes": 10}
    run.checks.bits({"engine-0": shown}, 1)
    assert run.checks.problems == []
    assert run.checks.bytes == 10
    model.qk.view(torch.int16)[3, 3] ^= 1
    run.checks.bits({"engine-0": {**shown, "bits": stored_bits(model)}}, 1)
    run.checks.bits({"engine-0": {**shown, "version": 0}}, 1)
    assert run.checks.problems == [
        "engine-0: other bits than version 1 in qk",
        "engine-0 serves version 0, and 1 is committed",
    ]


def test_a_buffer_or_a_name_more_is_noticed(run):
    found = stored_bits(engine(run))
    run.checks.bits({"e": {"version": 0, "bits": {**found, "more": ""}, "bytes": 1}}, 0)
    assert run.checks.problems == ["e: other bits than version 0 in more"]
    assert "table" in found


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["0", "1"], ""),
        (["0", "1", "0"], "answered with version 0 after 1, 1 times"),
        (["0", "7"], "answered with version 7, which was never committed, 1 times"),
        (["0 torn", "0 torn"], "answered from storage that is not version 0, 2 times"),
    ],
)
def test_requests_are_held_to_their_labels(run, lines, said):
    whole = {v: combined(run.checks._twins.bits(c)) for v, c in run.checks.versions.items()}
    text = ""
    for line in lines:
        version, _, digest = line.partition(" ")
        text += f"1.5 {version} {digest or whole.get(int(version), 'x')}\n"
    (run.folder / "engine-0-1.requests").write_text(text + "1.6 0 cut in the mid")
    run.checks.requests()
    assert run.checks.answers == len(lines)
    assert run.checks.problems == ([f"engine-0-1: {said}"] if said else [])


def test_an_answer_is_held_to_each_version_that_was_won(run):
    """Also to one of which the trainer was never told; its twin is made when it was won, once."""
    run.checks.begin(run.folder / "checkpoints/v0")
    assert run.checks.won(1, run.digests["c1"])
    assert run.checks.won(2, run.digests["c2"])
    assert run.checks.latest == 2
    shutil.rmtree(run.folder / "checkpoints/c1")  # as a soak does
    assert run.checks.won(1, run.digests["c1"])
    whole = {v: combined(stored_bits(engine(run, name))) for v, name in ((0, "v0"), (2, "c2"))}
    text = f"1.0 0 {whole[0]}\n1.1 1 {run.checks._whole[1]}\n1.2 2 {whole[2]}\n1.3 2 {whole[0]}\n"
    (run.folder / "engine-1-1.requests").write_text(text)
    run.checks.requests()
    assert run.checks.problems == ["engine-1-1: answered from storage that is not version 2, 1 times"]


def test_twins_are_remembered_for_a_while(run, monkeypatch):
    monkeypatch.setattr(bits, "TWINS_MAX", 2)
    twins = Twins(ENGINE)
    first = [twins.bits(run.folder / "checkpoints" / name) for name in ("v0", "c1", "c2")]
    assert len(twins._bits) == 2
    again = [twins.bits(run.folder / "checkpoints" / name) for name in ("v0", "c1", "c2")]
    assert again == first
    assert first[0] != first[1]


def test_a_model_that_is_none_is_named():
    for factory, said in (
        ("dcr.nothing:x", "No module"),
        ("dcr.chaos.model:nope", "nope"),
        ("builtins:dict", "not a torch"),
    ):
        with pytest.raises(RefusedError, match=said):
            make(factory)


def test_a_step_is_the_same_for_the_same_seed():
    one, other, third = (make("dcr.chaos.model:policy") for _ in range(3))
    train_step(one, 5, 0.1)
    train_step(other, 5, 0.1)
    train_step(third, 6, 0.1)
    assert stored_bits(one) == stored_bits(other) != stored_bits(third)
    assert one.embed.isnan().any()


class Reader(HTMLParser):
    """Collects tags and what loads something."""

    def __init__(self):
        super().__init__()
        self.tags, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [(name, value) for name, value in attrs if name in ("src", "href", "action", "data")]


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=y>$verdict ${title} \"'"


def test_a_hostile_name_is_shown_and_does_nothing(tmp_path):
    journal = Journal(tmp_path / "node-0-1.journal")
    journal.say("start", who="node-0")
    journal.say("step", who="receiver[0]", action=HOSTILE, epoch=3, detail=HOSTILE)
    journal.say("serving", who="engine[0]", detail="4")
    journal.say("fault", who="receiver[0]", action="kill", detail=HOSTILE)
    trainer = Journal(tmp_path / "trainer-0-1.journal")
    trainer.say("pushed", who="coordinator", action="relative", detail=f"version {HOSTILE}")
    (tmp_path / "engine-0-1.requests").write_text("1.0 4 abc\n")
    began = next(iter(entries(tmp_path / "node-0-1.journal"))).t
    report = RunReport(
        name=HOSTILE,
        ok=False,
        deployment=HOSTILE,
        folder=str(tmp_path),
        problems=(HOSTILE,),
        notes=(HOSTILE,),
        faults=(FaultReport(HOSTILE, 0.1, None, None),),
        began_s=began,
    )
    page = write_timeline(tmp_path, report).read_text()
    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert reader.loads == []
    assert "http" not in page.replace("http-equiv", "")
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("ok", "validated", "verdict", "said"),
    [
        (True, True, "ok", "every check held<"),
        (True, False, "ok, logs not validated", "event logs not validated<"),
        (False, True, "WRONG", "1 problems<"),
        (False, False, "WRONG", "1 problems<"),
    ],
)
def test_what_was_not_validated_is_said_in_the_row_and_on_the_page(tmp_path, ok, validated, verdict, said):
    Journal(tmp_path / "node-0-1.journal").say("start", who="node-0")
    report = RunReport(
        name="run",
        ok=ok,
        deployment="file",
        folder=str(tmp_path),
        problems=() if ok else ("bits",),
        validated=validated,
        logs="a behaviour" if validated else "not validated: no Java",
    )
    assert Table([("run", "file")]).row(report).endswith(f" s  {verdict}")
    assert any("no Java" in line for line in details(report)) != validated
    page = write_timeline(tmp_path, report).read_text()
    assert said in page
    assert ("no Java" in page) != validated
    assert Totals.of([report], 1.0).logs_validated == validated


def test_a_run_is_named_whole_in_the_table_and_so_is_its_page_if_nothing_is_wrong():
    name = "an engine dies in the middle of its writes, and comes back"
    report = RunReport(name=name, ok=True, deployment="file", folder="/run/it", validated=True)
    table = Table([("short", "file"), (name, "file")])
    assert table.row(report).startswith(f"{name} file ")
    assert table.header.index("deployment") == len(name) + 1
    assert Table([("short", "file")]).header.startswith("scenario deployment faults")
    assert Table([(500 * "x", "file")]).header.index("deployment") == 81
    assert list(details(report)) == []
    assert list(details(report, page=True)) == ["  see    /run/it/timeline.html"]
    assert str(Totals.of([report], 1.0)).startswith("1 run, 0 failed")
    assert str(Totals.of([report, report], 1.0)).startswith("2 runs, 0 failed")


def test_the_page_of_a_long_run_has_its_first_steps_and_every_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "STEPS_MAX", 10)
    journals = [Journal(tmp_path / f"node-{n}-1.journal") for n in range(2)]
    for step in range(40):
        journals[step % 2].say("step", who=f"receiver[{step % 2}]", action=f"Step{step:02}")
    journals[0].say("fault", who="receiver[0]", action="kill")
    page = write_timeline(tmp_path, RunReport(name="run", ok=True, deployment="", folder=str(tmp_path))).read_text()
    shown = sorted(set(re.findall(r"Step\d\d", page)))
    assert shown == [f"Step{step:02}" for step in range(10)]
    assert page.count('class="fault"') == 1
    assert "the first 10 of 41 steps, and every fault" in page


def test_a_half_written_entry_is_left_out(tmp_path):
    journal = Journal(tmp_path / "a.journal")
    journal.say("start", who="x")
    with (tmp_path / "a.journal").open("a") as file:
        file.write('{"t":1,"wh')
    assert [e.what for e in entries(tmp_path / "a.journal")] == ["start"]
