"""``python -m dcr.rollout.vllm.serve`` in a process of its own, over a checkpoint with a tokenizer, and its client."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import vllm_support as support
from transformers import PreTrainedTokenizerFast

from dcr.chaos.servers import free_ports

START_S = 240.0
END_S = 60.0  # what the server says of itself is 20, and a busy machine takes its time
NAME = "policy"


def write_tokenizer(checkpoint, vocabulary=256):
    """One word a token: ``t0``, ``t1``, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", bos_token="t1").save_pretrained(checkpoint)


def text_of(tokens):
    return " ".join(f"t{token}" for token in tokens)


@contextmanager
def serve(checkpoint, run, *options):
    """Start the server; yields its address once it listens.  It must end at a signal, and leave nothing behind."""
    server = Server(checkpoint, run, *options)
    try:
        server.wait_listening()
        yield server.address
        server.signal(signal.SIGTERM)
        assert server.ended(END_S) == 0
        assert server.alive() == {}
    finally:
        server.kill()


class Server:
    """The command, just started."""

    def __init__(self, checkpoint, run, *options, environment=None):
        (port,) = free_ports(1)
        arguments = {
            "--dtype": "bfloat16",
            "--block-size": "32",
            "--max-model-len": "512",
            "--max-num-seqs": "4",
            "--max-num-batched-tokens": "512",
            "--served-model-name": NAME,
            "--port": str(port),
            "--dcr-name": "node-a",
            "--dcr-control": f"sqlite://{run}/record.db",
            "--dcr-delivery": f"file://{run}/payloads",
        }
        flat = [word for pair in arguments.items() for word in pair]
        command = [sys.executable, "-m", "dcr.rollout.vllm.serve", str(checkpoint), "--enforce-eager", *flat, *options]
        self.address = f"http://127.0.0.1:{port}"
        self._log = run / "serve.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=support.ROOT,
                env={**os.environ, **support.ENVIRONMENT, "PYTHONPATH": str(support.ROOT), **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def log(self):
        return self._log.read_text(errors="replace")

    def alive(self):
        """Every process that descends from the command, whoever its parent is now: command line by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.pid:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_alive(self, said):
        """Wait for a process whose command line has this in it; its pid."""
        return self._wait(lambda: next((pid for pid, line in self.alive().items() if said in line), None))

    def wait_logged(self, said):
        self._wait(lambda: said in self.log())

    def wait_listening(self):
        def listens():
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                return self.get("/health")[0] == 200

        self._wait(listens)

    def get(self, path):
        """Status code and body of an answer, as JSON."""
        return get(self.address, path)

    def signal(self, number):
        os.kill(self.pid, number)

    def ended(self, timeout_s):
        """Wait for the command's end; its exit status."""
        return self._process.wait(timeout_s)

    def wait_gone(self, timeout_s):
        """Wait until no process of it is left."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            assert time.monotonic() < deadline, self.alive()
            time.sleep(0.05)

    def kill(self):
        """Whatever is left of it."""
        for pid in [self.pid, *self.alive()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(60)

    def _wait(self, done):
        deadline = time.monotonic() + START_S
        while not (result := done()):
            assert self._process.poll() is None, f"the server ended:\n{self.log()[-3000:]}"
            assert time.monotonic() < deadline, f"the server is not there yet:\n{self.log()[-3000:]}"
            time.sleep(0.05)
        return result


def get(address, path):
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Client:
    """An ordinary ``openai.OpenAI``, and what it is asked here."""

    def __init__(self, address, *, retries):
        self._client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=retries, timeout=START_S)

    def request(self, prompt, max_tokens, **more):
        extra = {"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False}
        arguments = {"model": NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        return self._client.completions.with_raw_response.create(**arguments, extra_body=extra, **more)

    def complete(self, prompt, max_tokens):
        """Tokens of an answer in one piece, and its header."""
        raw = self.request(prompt, max_tokens)
        choice = raw.parse().choices[0]
        assert choice.text.split() == text_of(choice.token_ids).split()
        return choice.token_ids, raw.headers["x-dcr-version"]

    def stream(self, prompt, max_tokens):
        """Yields (new tokens, versions so far) as events come; first of all the header, with no tokens."""
        raw = self.request(prompt, max_tokens, stream=True)
        yield [], [int(version) for version in raw.headers["x-dcr-version"].split(",")]
        for event in raw.parse():
            for choice in event.choices:
                yield choice.token_ids or [], event.dcr_versions
