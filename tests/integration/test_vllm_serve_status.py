"""What a server without a trainer, and with a wrong one, says of itself; at last its supervisor is killed."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection

import pytest
import torch
import vllm_support as support
from serve_process import NAME, Server, write_tokenizer
from torch import nn

import dcr

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("status")


@pytest.fixture(scope="module")
def server(run):
    """It is named no worker extension: that is chosen by platform."""
    checkpoint = support.write_checkpoint(run / "v0", 0)
    write_tokenizer(checkpoint)
    server = Server(checkpoint, run, "--dcr-gate-wait-s", "0.3")
    try:
        server.wait_listening()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def alone(server):
    """What it says while there is no trainer: of its health, its status, and to a request."""
    return server.get("/health"), server.get("/dcr/status"), ask(server)


@pytest.fixture(scope="module")
def refused(server, run, alone):
    """The same, once a trainer of another model leads the record."""
    other = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    settings = {"restores_max": 1, "members_timeout_s": 1.0}
    addresses = {"control": f"sqlite://{run}/record.db", "delivery": f"file://{run}/payloads"}
    with dcr.TrainerRefit(other, **addresses, settings=settings):
        deadline = time.monotonic() + 200
        while not server.get("/dcr/status")[1]["failed"]:
            assert time.monotonic() < deadline, server.get("/dcr/status")
            time.sleep(0.1)
        return server.get("/health"), server.get("/dcr/status"), ask(server)


def ask(server, path="/v1/completions", **more):
    """Status code and error of a request for tokens."""
    body = json.dumps({"model": NAME, **(more or {"prompt": [5, 9], "max_tokens": 2})}).encode()
    request = urllib.request.Request(f"{server.address}{path}", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    return error.value.code, error.value.read().decode()


def test_a_server_without_a_trainer_is_well_and_says_whom_it_waits_for(alone):
    (health, body), (code, status), (refusal, said) = alone
    assert (health, code, refusal) == (200, 200, 503)
    assert body == status
    expected = {"engine": "node-a", "version": None, "gate": "closed", "failed": False, "last_error": ""}
    expected["refit"] = None
    assert {key: status[key] for key in expected} == expected
    assert set(status) == {*expected, "reason", "since"}
    assert status["reason"].startswith("no coordinator reached: it has no connection to a trainer that leads record")
    assert status["reason"] in said
    assert "a request waited 0.3 s at the closed gate" in said


def test_a_server_whose_engine_was_refused_is_not_well_and_says_why(refused):
    (health, body), (code, status), (refusal, said) = refused
    assert (health, code, refusal) == (503, 200, 503)
    assert body == status
    assert (status["gate"], status["version"], status["failed"]) == ("closed", None, True)
    assert status["reason"].startswith("it is out of service: ")
    assert "weight" in status["reason"]  # the tensor that it does not have
    assert status["reason"] in said
    assert status["reason"].removeprefix("it is out of service: ") in status["last_error"]


def test_a_web_socket_is_refused(server):
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/v1/realtime", headers={**upgrade, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    assert connection.getresponse().status == 403


def test_a_background_response_which_would_be_given_out_unlabelled_is_refused_by_name(server):
    code, said = ask(server, "/v1/responses", input="t5 t9", background=True)
    assert code == 400
    assert json.loads(said)["error"]["param"] == "background"


def test_the_secret_of_the_run_is_nowhere_in_what_it_says(server, run, alone, refused):
    secret = (run / "record.db.secret").read_bytes()
    said = f"{alone}{refused}{server.log()}"
    for form in (secret.hex(), repr(secret)[2:-1]):
        assert form not in said


def test_nothing_outlives_the_supervisor_when_it_is_killed(server, refused):
    assert len(server.alive()) >= 4  # supervisor, server, engine core, worker
    os.kill(server.pid, signal.SIGKILL)
    assert server.ended(30) == -signal.SIGKILL
    server.wait_gone(30.0)
