"""The event log of one actor: what is in the file, whatever happens to the process or to the disk."""

import json
import signal
import subprocess
import sys

import pytest

from dcr.protocol.event import EVENT_LOG_VERSION, Event, Start
from dcr.protocol.record import CommitRecord, Member
from dcr.protocol.step import Step
from dcr.runtime.event_log import EventLog, event_folder

START = Start(EVENT_LOG_VERSION, "policy")


def lines(folder):
    (path,) = folder.iterdir()
    return [line for line in path.read_bytes().split(b"\n") if line]


def test_a_line_holds_what_docs_event_log_says(tmp_path) -> None:
    log = EventLog(str(tmp_path), "node", "a", 7, 1 << 20)
    log.start(Start(EVENT_LOG_VERSION, "policy", ranks={"0": 7}))
    log.k = 3
    k = CommitRecord.create("policy", "c1", "d0").admit((Member("a", 7),))
    log.observe(Step("a", "OpenGate", 2, "1", version=1))
    log.observe(Step("c1", "Admit", 0, record=k, revision=2, operation_id="c1-2"))
    assert [json.loads(line) for line in lines(tmp_path)] == [
        {
            "seq": 0,
            "role": "node",
            "name": "a",
            "incarnation": 7,
            "start": {"log_version": 1, "record_id": "policy", "ranks": {"0": 7}},
        },
        {
            "seq": 1,
            "role": "node",
            "name": "a",
            "incarnation": 7,
            "k": 3,
            "step": {"actor": "a", "action": "OpenGate", "epoch": 2, "detail": "1", "version": 1},
        },
        {
            "seq": 2,
            "role": "node",
            "name": "a",
            "incarnation": 7,
            "k": 3,
            "step": {
                "actor": "c1",
                "action": "Admit",
                "epoch": 0,
                "record": {
                    "record_id": "policy",
                    "version": 0,
                    "epoch": 0,
                    "leader": "c1",
                    "fencing_token": 1,
                    "baseline_id": "d0",
                    "members": [{"engine": "a", "incarnation": 7}],
                    "open": None,
                    "committed": None,
                },
                "revision": 2,
                "operation_id": "c1-2",
            },
        },
    ]
    assert Event.decode(lines(tmp_path)[2]).step == Step("c1", "Admit", 0, record=k, revision=2, operation_id="c1-2")


def test_a_killed_process_has_lost_nothing_that_it_said(tmp_path) -> None:
    code = (
        "import os, signal, sys\n"
        "from dcr.protocol.event import Start\nfrom dcr.protocol.step import Step\n"
        "from dcr.runtime.event_log import EventLog\n"
        "log = EventLog(sys.argv[1], 'owner', 'o', 1, 1 << 20)\n"
        "log.start(Start(1, 'policy'))\n"
        "for epoch in range(1, 100):\n    log.observe(Step('o', 'Emit', epoch))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=240)
    assert killed.returncode == -signal.SIGKILL
    assert [json.loads(line)["seq"] for line in lines(tmp_path)] == list(range(100))


def test_a_second_process_of_an_actor_ends_the_line_that_the_first_left(tmp_path) -> None:
    first = EventLog(str(tmp_path), "node", "a", 7, 1 << 20)
    first.start(START)
    first.close()
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'{"seq":1,"ro')
    EventLog(str(tmp_path), "node", "a", 7, 1 << 20).start(START)
    assert lines(tmp_path)[1] == b'{"seq":1,"ro'
    assert [json.loads(line)["seq"] for line in (lines(tmp_path)[0], lines(tmp_path)[2])] == [0, 0]


def test_a_full_log_says_so_and_the_actor_goes_on(tmp_path, caplog) -> None:
    log = EventLog(str(tmp_path), "rank", "a", 7, 300)
    log.start(START)
    seen = []
    observe = log.before(seen.append)
    for epoch in range(5):
        observe(Step("a", "Fence", epoch))
    assert [s.epoch for s in seen] == list(range(5))
    last = Event.decode(lines(tmp_path)[-1])
    assert (last.action, last.full) == ("Full", True)
    assert sum(len(line) + 1 for line in lines(tmp_path)[:-1]) <= 300
    assert [r.message for r in caplog.records if "event_log_bytes_max = 300 is reached" in r.message]


def test_a_disk_that_is_full_ends_the_log_with_a_warning(tmp_path, caplog) -> None:
    (tmp_path / "owner-o-1.ndjson").symlink_to("/dev/full")
    log = EventLog(str(tmp_path), "owner", "o", 1, 1 << 20)
    log.start(START)
    log.observe(Step("o", "Emit", 1))
    (record,) = caplog.records
    assert "owner o writes its events down no more" in record.message
    assert "No space left" in record.message


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(str(tmp_path / "file" / "events"), "owner", "o", 1, 1 << 20)
    log.start(START)
    assert "Not a directory" in caplog.text


def test_an_observer_that_fails_is_logged_and_the_step_is_written_down(tmp_path) -> None:
    def fails(step):
        raise ValueError(step.action)

    EventLog(str(tmp_path), "rank", "a", 7, 1 << 20).before(fails)(Step("a", "Fence", 1))
    assert Event.decode(lines(tmp_path)[0]).action == "Fence"


@pytest.mark.parametrize("name", ["../../a", "a/b", "ü" * 90, "x" * 4000, ".."])
def test_any_name_makes_one_file_in_the_folder(tmp_path, name) -> None:
    EventLog(str(tmp_path), "node", name, 1, 1 << 20).start(START)
    assert json.loads(lines(tmp_path)[0])["name"] == name
    EventLog(str(tmp_path), "node", name + "'", 1, 1 << 20).start(START)
    assert len(list(tmp_path.iterdir())) == 2


def test_where_it_is_written() -> None:
    assert event_folder("beside", "sqlite:///run/record.db") == "/run/record.db.events"
    assert event_folder("off", "sqlite:///run/record.db") == ""
    assert event_folder("beside", "etcd://127.0.0.1:2379/dcr") == ""
    assert event_folder("/elsewhere", "etcd://127.0.0.1:2379/dcr") == "/elsewhere"
    assert event_folder("/elsewhere", "sqlite:///run/record.db") == "/elsewhere"


def test_off_writes_nothing(tmp_path) -> None:
    log = EventLog("", "node", "a", 7, 1 << 20)
    log.start(START)
    log.observe(Step("a", "OpenGate", 1))
    assert not list(tmp_path.iterdir())
