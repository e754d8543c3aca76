"""``python -m dcr.rollout.vllm.serve`` in a process of its own, over a checkpoint with a tokenizer, and its client."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai
import vllm_support as support
from transformers import PreTrainedTokenizerFast

from demo.vllm_twin import ENGINE_ARGUMENTS

START_S = 240.0
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
    """Start the server; yields its address once it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "--dtype": "bfloat16",
        "--block-size": "32",
        "--max-model-len": "512",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "512",
        "--worker-extension-cls": ENGINE_ARGUMENTS["worker_extension_cls"],
        "--served-model-name": NAME,
        "--port": str(port),
        "--dcr-name": "node-a",
        "--dcr-control": f"sqlite://{run}/record.db",
        "--dcr-delivery": f"file://{run}/payloads",
    }
    flat = [word for pair in arguments.items() for word in pair]
    command = [sys.executable, "-m", "dcr.rollout.vllm.serve", str(checkpoint), "--enforce-eager", *flat, *options]
    environment = {**os.environ, **support.ENVIRONMENT, "PYTHONPATH": str(support.ROOT)}
    with (run / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=support.ROOT, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_listening(process, address, run / "serve.log")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(50)  # less than what a node waits for a call that nobody answers any more
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _wait_listening(process, address, log):
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"the server does not listen:\n{log.read_text()[-3000:]}"
            time.sleep(0.1)


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
