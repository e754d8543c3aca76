"""The OpenAI server, and an ordinary client that streams while a real trainer refits the engine under it."""

import threading

import openai
import pytest
import torch
import vllm_support as support
from serve_process import Client, serve, write_tokenizer
from transformers import Qwen3MoeForCausalLM
from vllm_support import LONG_PROMPT, PROMPTS, TOKENS

import dcr

pytestmark = pytest.mark.vllm

PROMPT = PROMPTS[0]
STREAM = 450  # tokens; the context holds 512
MORE_MAX = 6


class Trainer:
    """A plain torch policy whose every step is another random change; keeps a checkpoint of each version."""

    def __init__(self, checkpoint, run):
        self._run = run
        self._model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self.checkpoints = [checkpoint]
        addresses = {"control": f"sqlite://{run}/record.db", "delivery": f"file://{run}/payloads"}
        self.refit = dcr.TrainerRefit(self._model, **addresses, settings={"gate_mode": "async"})

    def step(self):
        generator = torch.Generator().manual_seed(len(self.checkpoints))
        with torch.no_grad():
            for _, weight in sorted(self._model.named_parameters()):
                where = torch.rand(weight.shape, generator=generator) < 0.3
                noise = 0.1 * torch.randn(weight.shape, generator=generator)
                weight.add_(torch.where(where, noise, 0.0).to(weight.dtype))
        checkpoint = self._run / f"v{len(self.checkpoints)}"
        self._model.save_pretrained(checkpoint)
        self.checkpoints.append(checkpoint)

    def push(self):
        report = self.refit.push()
        assert report.members == ("node-a",)
        return report.version


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def checkpoint(run):
    checkpoint = support.write_checkpoint(run / "v0", 0)
    write_tokenizer(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def address(checkpoint, run, twin):
    with serve(checkpoint, run, "--dcr-on-close", "keep", "--dcr-gate-wait-s", "3") as address:
        yield address


@pytest.fixture(scope="module")
def shut_out(address):
    """What a client is answered before any trainer has come, streaming or not."""
    refusals = []
    for streaming in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as refusal:
            Client(address, retries=0).request(PROMPT, TOKENS, **streaming)
        refusals.append(refusal.value)
    return refusals


@pytest.fixture(scope="module")
def trainer(checkpoint, run, address, shut_out):
    trainer = Trainer(checkpoint, run)
    with trainer.refit:
        yield trainer


def test_a_gate_that_stays_closed_is_a_503_that_says_when_to_come_again(shut_out):
    for error in shut_out:
        assert error.status_code == 503
        assert error.response.headers["retry-after"] == "1"
        assert "engine node-a: a request waited 3.0 s at the closed gate" in error.message
        assert "no coordinator reached" in error.message
        assert "x-dcr-version" not in error.response.headers


@pytest.mark.parametrize("refits", [2, pytest.param(10, marks=pytest.mark.long)])
def test_streams_through_refits_are_what_each_version_says(address, trainer, twin, refits):
    first = len(trainer.checkpoints) - 1
    client = Client(address, retries=5)
    claims = {}  # by version: (prompt and tokens so far, tokens that followed)
    spanning, seen = 0, set()
    assert client.complete(LONG_PROMPT, TOKENS)[1] == str(first)
    target = first
    # What has streamed may reach a busy client late, after the refit that it was to span: then there is another one.
    while target < first + refits or (not (spanning and target in seen) and target < first + refits + MORE_MAX):
        target += 1
        trainer.step()
        pushed = []
        push = threading.Thread(target=lambda pushed=pushed: pushed.append(trainer.push()))
        while not pushed:
            tokens, segments, label = [], [], []
            for new, versions in client.stream(PROMPT, STREAM):
                assert versions[: len(label)] == label  # a label only grows
                if versions != label:
                    segments.append((versions[-1], len(tokens)))
                label = versions
                tokens += new
                if len(tokens) > 20 and not push.is_alive() and not pushed:
                    push.start()
            assert len(tokens) == STREAM
            assert [version for version, _ in segments] == label
            spanning += len(label) > 1
            seen |= set(label)
            for (version, start), end in zip(segments, [*(s for _, s in segments[1:]), STREAM], strict=True):
                piece = tokens[start : min(end, start + TOKENS)]
                claims.setdefault(version, []).append(([*PROMPT, *tokens[:start]], piece))
        push.join()
        assert pushed == [target]
        tokens, header = client.complete(LONG_PROMPT, TOKENS)  # cached under the version before
        assert header == str(target)
        claims.setdefault(target, []).append((LONG_PROMPT, tokens))
    assert spanning >= 1
    assert seen == set(range(first, target + 1))
    answers = set()
    for version, made in claims.items():
        prompts = [prompt for prompt, _ in made]
        said = twin.ask(trainer.checkpoints[version], prompts, alone=True, max_model_len=512)["tokens"]
        for (_, piece), expected in zip(made, said, strict=True):
            assert piece == expected[: len(piece)]
        answers.add(tuple(said[-1]))
    assert len(answers) == target - first + 1  # the versions do say different things


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_engine_of_two_ranks_is_served_and_refitted(checkpoint, tmp_path, twin):
    with serve(checkpoint, tmp_path, "--dcr-on-close", "wait", "--tensor-parallel-size", "2") as address:
        trainer = Trainer(checkpoint, tmp_path)
        client = Client(address, retries=5)
        with trainer.refit:
            for version in (1, 2):
                trainer.step()
                assert trainer.push() == version
                tokens, header = client.complete(LONG_PROMPT, TOKENS)
                assert header == str(version)
                said = twin.ask(trainer.checkpoints[version], [LONG_PROMPT], tensor_parallel_size=2, max_model_len=512)
                assert tokens == said["tokens"][0]
