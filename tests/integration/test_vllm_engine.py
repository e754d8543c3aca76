"""A real vLLM engine, refitted in place, against fresh engines that never were."""

import copy
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import vllm_support as support
from safetensors.torch import load_file
from vllm_support import BATCH, LONG_PROMPT, PROMPTS

from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import Operation, TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.rollout import cpu_vllm
from dcr.rollout.gate import GateTimeoutError
from dcr.rollout.vllm.engine import CacheResetError, EngineCallError, VllmEngine
from demo.vllm_twin import ENGINE_ARGUMENTS

pytestmark = pytest.mark.vllm

DRAIN_S = 200.0  # a bound; drains take a second on a quiet machine


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return [support.write_checkpoint(root / f"s{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def stock(checkpoints):
    with support.stock(checkpoints[0]) as answer:
        yield answer


@pytest.fixture(scope="module")
def fresh(checkpoints, twin):
    """What a fresh engine on each checkpoint holds and answers."""
    return [twin.ask(checkpoint, BATCH) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def llm(checkpoints, stock):  # which has begun to start, so that the slow imports of both run side by side
    """A real engine on the first checkpoint, its core in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in support.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the tests send functions to the worker
        from vllm import LLM  # noqa: PLC0415

        llm = LLM(model=str(checkpoints[0]), **ENGINE_ARGUMENTS)
        yield llm
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine(llm, checkpoints):
    """The engine at version 0 with an open gate; whatever a test did is undone by a dense load."""
    engine = VllmEngine(llm, name="node-a/0", gate_wait_s=DRAIN_S)
    engine.reset_caches()
    engine.open_gate(0)
    yield engine
    engine.close_gate(DRAIN_S)
    engine.shutdown()
    llm.collective_rpc(support.load_dense, args=(str(checkpoints[0]),))


def parameters(max_tokens=support.TOKENS):
    from vllm import SamplingParams  # noqa: PLC0415

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def tokens(generation):
    return [list(output.outputs[0].token_ids) for output in generation.outputs]


def running(engine, prompts, max_tokens):
    """A thread that generates, and is known to be inside the gate."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate(prompts, parameters(max_tokens))))
    thread.start()
    while engine._gate._running == 0:
        assert thread.is_alive()
        time.sleep(0.001)
    return thread, answers


def test_rank_is_reached_and_can_be_refitted_relatively(engine, checkpoints):
    answer = support.attach(engine, checkpoints[0])
    assert answer.refused == ""
    (attached,) = answer.results
    assert (attached.set_only, attached.skipped, attached.refused) == ((), (), {})
    assert support.attach(engine, checkpoints[0]).results == (attached,)


HOW = [(Operation.SET, ""), (Operation.XOR, ""), (Operation.ADD, ""), (Operation.ADD, "dense")]


@pytest.mark.parametrize("how", HOW, ids=lambda how: " ".join(how).strip())
def test_refit_equals_a_fresh_engine_bit_for_bit(engine, llm, checkpoints, fresh, how):
    assert engine.resident_digests() == fresh[0]["digests"]
    engine.close_gate(DRAIN_S)
    (changed,) = llm.collective_rpc(support.refit, args=(*map(str, checkpoints), *how))
    engine.reset_caches()
    engine.open_gate(1)
    assert changed > 100_000
    digests = engine.resident_digests()
    assert digests == fresh[1]["digests"]
    assert sum(digests[name] != fresh[0]["digests"][name] for name in digests) == 23  # every parameter
    generation = engine.generate(BATCH, parameters())
    assert generation.version == 1
    assert tokens(generation) == fresh[1]["tokens"] != fresh[0]["tokens"]
    assert [list(report["findings"]) for report in engine.layout_reports()] == [[]]


def test_gate_drains_what_runs_and_holds_what_comes_until_the_next_version(engine, llm, checkpoints, fresh):
    first, early = running(engine, BATCH, 48)
    engine.close_gate(DRAIN_S)
    first.join(DRAIN_S)
    assert early[0].version == 0
    assert [text[: support.TOKENS] for text in tokens(early[0])] == fresh[0]["tokens"]

    late = []
    second = threading.Thread(target=lambda: late.append(engine.generate(BATCH, parameters())))
    second.start()
    llm.collective_rpc(support.refit, args=(*map(str, checkpoints), Operation.ADD))
    engine.reset_caches()
    assert not late
    engine.open_gate(1)
    second.join(DRAIN_S)
    assert late[0].version == 1
    assert tokens(late[0]) == fresh[1]["tokens"]
    assert [output.num_cached_tokens for output in late[0].outputs] == [0, 0, 0]


def test_reset_forgets_the_prefix_cache(engine):
    def cached():
        return engine.generate([LONG_PROMPT], parameters(1)).outputs[0].num_cached_tokens

    assert (cached(), cached()) == (0, 64)
    with pytest.raises(RefusedError, match="resetting caches needs a closed and drained gate"):
        engine.reset_caches()
    assert cached() == 64
    engine.close_gate(DRAIN_S)
    engine.reset_caches()
    engine.open_gate(0)
    assert cached() == 0


def reset_often(engine):
    for _ in range(100):  # the engine's core may take a reset before it has begun with the request
        engine.reset_caches()


def test_reset_that_vllm_cannot_do_is_an_error(engine, llm):
    engine.close_gate(DRAIN_S)
    llm.enqueue([{"prompt_token_ids": LONG_PROMPT}], parameters(48), use_tqdm=False)  # past the gate: holds blocks
    with pytest.raises(CacheResetError, match="engine node-a/0: vLLM could not reset its prefix cache"):
        reset_often(engine)
    llm.wait_for_completion(use_tqdm=False)
    engine.reset_caches()


def test_drain_time_out_names_engine_and_stage_and_requests_finish(engine, fresh, monkeypatch):
    go, step = threading.Event(), engine._step

    def held(ids):
        assert go.wait(DRAIN_S)
        return step(ids)

    monkeypatch.setattr(engine, "_step", held)
    thread, answers = running(engine, BATCH, 48)
    with pytest.raises(GateTimeoutError, match="engine node-a/0: closing the gate, 1 requests still running"):
        engine.close_gate(0.0)
    assert engine.version is None
    with pytest.raises(RefusedError, match="closed and drained"):
        engine.reset_caches()
    go.set()
    engine.close_gate(DRAIN_S)
    thread.join(DRAIN_S)
    assert answers[0].version == 0
    assert [text[: support.TOKENS] for text in tokens(answers[0])] == fresh[0]["tokens"]


@pytest.mark.parametrize("prompt", ["The for statement", b"bytes", {"prompt_token_ids": [1, 2]}, [1, "2"]])
def test_a_prompt_that_is_no_sequence_of_token_ids_is_refused_before_vllm_sees_it(engine, prompt):
    with pytest.raises(RefusedError, match=r"engine node-a/0: prompt 1 is \w+, not a sequence of token ids: tokenize"):
        engine.generate([[5, 9], prompt], parameters(1))
    assert engine.generate(PROMPTS, parameters(1)).version == 0


@pytest.mark.parametrize("token", [-1, 256, 10**30])
def test_a_token_id_that_the_model_does_not_have_ends_no_engine(engine, token):
    """vLLM checks ids with its tokenizer, and has none here: the worker's embedding would end its process."""
    with pytest.raises(
        RefusedError, match=rf"engine node-a/0: prompt 1 holds token id {token}, and the model has 0 to"
    ):
        engine.generate([[5, 9], [3, token]], parameters(1))
    assert engine.generate([[0, 255]], parameters(1)).version == 0


def test_a_request_that_is_interrupted_while_it_is_handed_over_does_not_run_on(engine, llm, monkeypatch):
    """As by a Ctrl-C in a notebook: what ran on behind a closed gate would read weights that are being written."""
    enqueue, interrupted = llm.enqueue, threading.Event()

    def slow(*args, **kwargs):  # in a thread of the engine's
        deadline = time.monotonic() + DRAIN_S
        while not interrupted.wait(0.05) and time.monotonic() < deadline:  # one may come just before the wait begins
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return enqueue(*args, **kwargs)

    def interrupt(*_):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(llm, "enqueue", slow)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3]] * 3, parameters(120))
    finally:
        signal.signal(signal.SIGUSR1, before)
    engine.close_gate(DRAIN_S)
    engine.reset_caches()  # after the requests, in vLLM's one thread
    assert not llm.llm_engine.has_unfinished_requests()
    engine.open_gate(0)


def test_threads_generate_together_while_the_node_agent_calls(engine, fresh):
    answers = {}

    def ask(which):
        prompts = PROMPTS if which % 2 else [LONG_PROMPT]
        answers[which] = engine.generate(prompts, parameters()).outputs

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    digests = [engine.resident_digests() for _ in range(3)]
    for thread in threads:
        thread.join(DRAIN_S)
    assert digests == [fresh[0]["digests"]] * 3
    # Which requests share a step differs from run to run, and with it rounding: the tokens are not compared.
    asked = {which: [output.prompt_token_ids for output in outputs] for which, outputs in answers.items()}
    assert asked == {which: PROMPTS if which % 2 else [LONG_PROMPT] for which in range(6)}
    lengths = {len(output.outputs[0].token_ids) for outputs in answers.values() for output in outputs}
    assert lengths == {support.TOKENS}


def test_checkpoint_tensors_are_what_the_loader_was_fed(engine, checkpoints):
    wanted = load_file(checkpoints[0] / "model.safetensors")
    fed = dict(engine.checkpoint_tensors())
    assert fed.keys() == wanted.keys()

    def content(tensors):
        total = ContentDigest()
        for name, tensor in tensors.items():
            total += digest_elements(
                TensorSpec(name, tuple(tensor.shape), tensor.dtype), None, support.bit_view(tensor).flatten()
            )
        return total

    assert content(fed) == content(wanted)


def test_engines_that_cannot_be_refitted_are_refused_by_name(llm):
    def but(**changes):
        config = copy.copy(llm.llm_engine.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        for name, value in changes.items():
            object.__setattr__(config.parallel_config, name, value)
        return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))

    with pytest.raises(RefusedError, match="engine x: data_parallel_size=2; start one engine for each replica"):
        VllmEngine(but(data_parallel_size=2), name="x")
    with pytest.raises(RefusedError, match="engine x: nnodes=2; its ranks must run on one host"):
        VllmEngine(but(nnodes=2), name="x")
    with pytest.raises(RefusedError, match="DcrWorkerExtension"):
        VllmEngine(but(worker_extension_cls=""), name="x")


def test_failure_in_the_worker_names_engine_and_call(engine):
    with pytest.raises(EngineCallError, match="engine node-a/0: dcr_nonsense failed in vLLM"):
        engine._rpc("dcr_nonsense", ())
    assert engine.generate(PROMPTS, parameters(1)).version == 0


def test_stock_engine_answers_alike_and_is_refused_by_name(checkpoints, stock, twin, fresh):
    answer = stock()
    assert answer["tokens"] == twin.ask(checkpoints[0], PROMPTS)["tokens"]
    assert answer["after"] == answer["before"] != fresh[0]["digests"]
    assert answer["refused"].startswith("RepackedError")
    assert "cpu_extension.DcrCpuWorkerExtension" in answer["refused"]
    for tensor in (
        "self_attn.qkv_proj.weight: removed",
        "self_attn.o_proj.weight: removed",
        "mlp.gate.weight: removed",
        "embed_tokens.weight: cpu_linear computes with a private copy",
        "lm_head.weight: cpu_linear computes with a private copy",
        "experts.routed_experts.w13_weight: rewritten after loading, elsewhere: an update would write",
        "experts.routed_experts.w2_weight: rewritten after loading, elsewhere: an update would write",
    ):
        assert tensor in answer["refused"]
    assert ["model.layers.1.self_attn.qkv_proj", "weight"] in answer["found"]


@pytest.mark.usefixtures("llm")  # vLLM is imported with its environment set
class TestPatches:
    def test_another_version_is_refused(self, monkeypatch):
        import vllm  # noqa: PLC0415
        from vllm.model_executor.layers import utils  # noqa: PLC0415

        before = utils.dispatch_cpu_unquantized_gemm
        monkeypatch.setattr(vllm, "__version__", "0.33.0")
        with pytest.raises(RefusedError, match=r"for vLLM 0\.32\.0, not 0\.33\.0"):
            cpu_vllm.install_loader_layout()
        assert utils.dispatch_cpu_unquantized_gemm is before

    def test_a_missing_target_is_refused_and_nothing_is_patched(self, monkeypatch):
        from vllm.model_executor.layers import utils  # noqa: PLC0415
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415

        before = utils.dispatch_cpu_unquantized_gemm
        monkeypatch.delattr(cpu_moe, "CPUUnquantizedExperts")
        with pytest.raises(RefusedError, match=r"no CPUUnquantizedExperts\.process_weights_after_loading"):
            cpu_vllm.install_loader_layout()
        assert utils.dispatch_cpu_unquantized_gemm is before

    def test_environment_set_too_late_is_refused(self):
        with pytest.raises(RefusedError, match="imported already"):
            cpu_vllm.set_environment()
        mine = {"VLLM_CPU_KVCACHE_SPACE": "4"}
        cpu_vllm.set_environment(mine)
        assert mine["VLLM_CPU_KVCACHE_SPACE"] == "4"
        assert mine["HF_HUB_OFFLINE"] == "1"
