"""The server's end, by signals at every moment and by kills: within a bound, and no process outlives it."""

import os
import re
import signal
import threading
import time
import urllib.request

import pytest
import torch
import vllm_support as support
from serve_process import END_S, NAME, Server, write_tokenizer
from transformers import Qwen3MoeForCausalLM

import dcr
from dcr.delivery.sealed import SEAL_BYTES
from dcr.rollout.vllm.supervisor import STARTING_S

pytestmark = pytest.mark.vllm

INFO = {"VLLM_LOGGING_LEVEL": "INFO"}
SOON_S = STARTING_S + 15.0  # and the time to see it on a busy machine
GONE_S = 30.0  # of what was killed, on such a one


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    checkpoint = support.write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "v0", 0)
    write_tokenizer(checkpoint)
    return checkpoint


@pytest.fixture
def start(checkpoint, tmp_path):
    started = []

    def start(*options):
        started.append(Server(checkpoint, tmp_path, *options, environment=INFO))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def train(checkpoint, tmp_path):
    """Starts a trainer that changes every weight and pushes, without a pause, for as long as the engine takes part."""
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    addresses = {"control": f"sqlite://{tmp_path}/record.db", "delivery": f"file://{tmp_path}/payloads"}
    settings = {"gate_mode": "async", "members_timeout_s": 20.0, "ack_timeout_s": 20.0, "attempts_max": 1}
    stop = threading.Event()

    def push():
        with dcr.TrainerRefit(model, **addresses, settings=settings) as refit:
            while not stop.is_set():
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.neg_()
                try:
                    refit.push()
                except dcr.PushError:  # the engine has ended
                    return

    thread = threading.Thread(target=push)
    yield thread.start
    stop.set()
    thread.join(100)
    assert not thread.is_alive()


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("Injected <class", signal.SIGTERM),  # the worker is there, and loads the model
        pytest.param("", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("non-default args", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("spawn_main", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("VLLM::EngineCore", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_while_it_starts_ends_all_of_it(start, moment, number):
    server = start()
    if moment.startswith(("spawn", "VLLM")):
        server.wait_alive(moment)
    else:
        server.wait_logged(moment)
    server.signal(number)
    assert server.ended(SOON_S) == (128 + signal.SIGTERM if moment else -signal.SIGTERM)
    assert server.alive() == {}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_at_any_moment_of_the_start_ends_all_of_it(start, ranks):
    started = time.monotonic()
    server = start("--tensor-parallel-size", str(ranks))
    server.wait_listening()
    whole_s = time.monotonic() - started
    server.kill()
    for part in range(1, 12):
        server = start("--tensor-parallel-size", str(ranks))
        time.sleep(whole_s * part / 11)
        server.signal((signal.SIGTERM, signal.SIGINT)[part % 2])
        server.ended(SOON_S if part < 9 else END_S)
        assert server.alive() == {}


def test_a_signal_in_the_middle_of_a_refit_ends_all_of_it(start, train, tmp_path):
    server = start("--dcr-on-close", "keep")
    server.wait_listening()
    train()
    server.wait_logged("serves version 2")  # of many
    server.signal(signal.SIGTERM)
    assert server.ended(END_S) == 0
    assert server.alive() == {}
    for said in (
        "engine node-a asks record 'default' to let it in: its storage holds",
        "engine node-a prepares epoch",
        "version 0 -> 1, relative",
        "engine node-a prepared epoch",
        "engine node-a: gate closed, after",
        "engine node-a serves version 1; its gate was closed for",
    ):
        assert said in server.log()
    epoch, sent, seconds = re.search(r"applied epoch (\d+): (\d+) bytes in ([0-9.]+) s", server.log()).groups()
    payloads = (tmp_path / "payloads").glob(f"*/*/{int(epoch):020}/**/*.payload")
    assert int(sent) == sum(payload.stat().st_size - SEAL_BYTES for payload in payloads) > 0
    assert float(seconds) > 0


@pytest.mark.long
def test_a_second_signal_does_not_wait_for_running_requests(start, train):
    server = start("--shutdown-timeout", "100", "--dcr-on-close", "keep")
    server.wait_listening()
    train()
    server.wait_logged("serves version")
    body = b'{"model": "%s", "prompt": [5, 9], "max_tokens": 500, "ignore_eos": true, "stream": true}' % NAME.encode()
    request = urllib.request.Request(f"{server.address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read(5) == b"data:"
        engine = server.wait_alive("VLLM::EngineCore")
        os.kill(engine, signal.SIGSTOP)  # it answers nobody any more: the server waits for it
        server.signal(signal.SIGTERM)
        time.sleep(1.0)
        assert engine in server.alive()
        server.signal(signal.SIGINT)
        assert server.ended(GONE_S) == 128 + signal.SIGTERM  # of 100
        assert server.alive() == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "moment", "ranks"),
    [
        ("supervisor", "listening on", 2),
        ("server", "listening on", 2),
        ("supervisor", "Injected <class", 2),
        ("server", "non-default args", 1),
    ],
)
def test_nothing_outlives_a_part_of_it_that_is_killed(start, victim, moment, ranks):
    server = start("--tensor-parallel-size", str(ranks))
    server.wait_logged(moment)
    pids = [pid for pid, line in server.alive().items() if "dcr.rollout.vllm.serve" in line]
    (inner,) = set(pids) - {server.pid}
    os.kill(server.pid if victim == "supervisor" else inner, signal.SIGKILL)
    assert server.ended(SOON_S) == (-signal.SIGKILL if victim == "supervisor" else 128 + signal.SIGKILL)
    server.wait_gone(GONE_S)
