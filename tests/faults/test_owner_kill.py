"""One of two training ranks is killed in the middle of its emission, or holds no numbers: a named end, nothing torn."""

import multiprocessing as mp
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from dcr import PushError, RolloutNode, TrainerRefit
from dcr.control_plane.address import open_control_plane
from dcr.data_plane.tracker import Tracker
from dcr.delivery.folder import FolderDelivery
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import CommitRecord, decode_record
from dcr.protocol.step import Step
from dcr.rollout.torch.engine import TorchEngine
from tests.faults.coordinator_process import CoordinatorProcess
from tests.faults.models import Policy, Served, dense, stored_bits
from tests.faults.thread_fleet import SETTINGS, WAIT_S

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "dcr.trainer.torch.refit", "tests.faults.models"])
ANSWER_S = 120.0


class Rank:
    """A training rank in a process of its own."""

    def __init__(self, rank: int, folder: Path, addresses: dict[str, Any]) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_train, args=(rank, folder, addresses, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def silent(self, seconds: float) -> bool:
        return not self._pipe.poll(seconds)

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"a training rank did not answer in {ANSWER_S:g} s")
        return self._pipe.recv()


def _train(rank, folder, addresses, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", world_size=2, rank=rank)
    policy = Policy()
    refit = TrainerRefit(policy, **addresses)
    put = FolderDelivery.put
    owned = {name for (name, _), owner in refit.source.ownership.owner.items() if owner == rank}
    changes, stepped = refit.source.changes, threading.Event()
    refit.source.changes = lambda kind: (stepped.wait(30), changes(kind))[1]  # type: ignore[method-assign]
    stepped.set()
    pipe.send(owned)
    while True:
        command, *args = pipe.recv()
        if command in ("kill at payload", "hang at payload"):
            (sequence,) = args

            def dying_put(self, key, data, sequence=sequence, command=command) -> None:
                if key.endswith(f"{sequence:020d}.payload"):
                    if command == "hang at payload":
                        threading.Event().wait()  # until it is killed
                    os.kill(os.getpid(), signal.SIGKILL)
                put(self, key, data)

            FolderDelivery.put = dying_put  # type: ignore[method-assign]
        elif command == "step":
            step(policy, *args)
        elif command == "put":
            put_into(policy, *args)
        elif command == "push":
            try:
                report = refit.push()
                pipe.send((report.version, report.kind))
            except PushError as e:
                pipe.send(str(e))
        elif command == "begin":
            stepped.clear()
            try:
                pending = refit.begin_push()
                pipe.send("begun")
            except RefusedError as e:
                pipe.send(str(e))
            step(policy, *args)
            stepped.set()
        elif command == "no memory":

            def fail(*_, copy=Tracker.copy) -> None:
                Tracker.copy = copy  # type: ignore[method-assign]
                raise MemoryError("nothing left")

            Tracker.copy = fail  # type: ignore[method-assign]
        elif command == "result":
            try:
                report = pending.result()
                pipe.send((report.version, report.kind))
            except PushError as e:
                pipe.send(str(e))


def step(policy: Policy, seed: int, names: set[str]) -> None:
    """The same step on every rank, in these tensors only."""
    kept = {n: t.clone() for n, t in policy.state_dict().items() if n not in names}
    policy.step(seed)
    policy.load_state_dict(kept, strict=False)


def put_into(policy: Policy, name: str, values: list[float]) -> None:
    """Set the first elements of a tensor."""
    with torch.no_grad():
        policy.get_parameter(name).view(-1)[: len(values)] = torch.tensor(values)


class Run:
    def __init__(self, folder: Path, settings: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.addresses: dict[str, Any] = {
            "control": f"sqlite://{folder}/record.db",
            "delivery": f"file://{folder}/payloads",
            "settings": {**SETTINGS, "owners_timeout_s": 3.0, **(settings or {})},
        }
        elsewhere = (settings or {}).get("coordinator") == "elsewhere"
        self.coordinators = [CoordinatorProcess("first", folder, self.addresses)] if elsewhere else []
        self.policy = Policy()
        checkpoint = folder / "v0"
        checkpoint.mkdir()
        save_file(dict(self.policy.state_dict()), checkpoint / "model.safetensors")
        self.ranks = [Rank(r, folder, self.addresses) for r in (0, 1)]
        self.model = Served()
        self.model.load_weights(self.policy.state_dict().items())
        self.wrote = threading.Event()
        engine = TorchEngine(self.model, name="a", checkpoint=checkpoint, observe=self._observe)
        self.node = RolloutNode(engine, **self.addresses)
        self.owned = [r.answer() for r in self.ranks]
        self._steps = 0

    def _observe(self, done: Step) -> None:
        if done.action == "EndWrite":
            self.wrote.set()

    def step(self, seed: int, names: set[str]) -> None:
        step(self.policy, seed, names)
        for r in self.ranks:
            r.send("step", seed, names)

    def put(self, name: str, values: list[float]) -> None:
        put_into(self.policy, name, values)
        for r in self.ranks:
            r.send("put", name, values)

    def push(self) -> None:
        for r in self.ranks:
            r.send("push")

    def begin(self) -> dict[str, torch.Tensor]:
        """A push of a snapshot, after which every rank changes every weight before it is read; what was pushed."""
        pushed = {n: t.clone() for n, t in self.policy.state_dict().items()}
        self._steps += 1
        everything = self.owned[0] | self.owned[1]
        step(self.policy, 100 + self._steps, everything)
        for r in self.ranks:
            r.send("begin", 100 + self._steps, everything)
        return pushed

    def answers(self, command: str = "") -> list[Any]:
        for r in self.ranks if command else ():
            r.send(command)
        return [r.answer() for r in self.ranks]

    def check(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        assert self.node.wait_serving(version, WAIT_S) == version
        assert stored_bits(self.model) == dense(weights)

    def record(self) -> CommitRecord:
        control = open_control_plane(self.addresses["control"])
        stored = control.read("default")
        control.close()
        assert stored is not None
        return decode_record(stored.body)

    def close(self) -> None:
        self.node.close()
        for r in self.ranks:
            r.process.kill()
            r.process.join(30)
        for c in self.coordinators:
            c.close()


@pytest.fixture
def run(tmp_path: Path):
    r = Run(tmp_path)
    yield r
    r.close()


@pytest.mark.parametrize("torn", [False, True])
def test_an_owner_killed_in_the_middle_of_its_emission(run: Run, torn: bool) -> None:
    everything = run.owned[0] | run.owned[1]
    assert run.owned[0]
    assert run.owned[1]
    run.check(0, run.policy.state_dict())
    run.step(1, everything)
    run.push()
    assert [r.answer() for r in run.ranks] == [(1, "relative")] * 2
    committed = {n: t.clone() for n, t in run.policy.state_dict().items()}
    run.check(1, committed)

    # Torn: both ranks emit, and the second dies before its second payload, once the engine has written one.  Not torn:
    # it alone has something to emit, and dies before its first payload is delivered.
    run.ranks[1].send(*(("hang at payload", 1) if torn else ("kill at payload", 0)))
    run.step(2, everything if torn else run.owned[1])
    run.wrote.clear()
    run.push()
    if torn:
        assert run.wrote.wait(WAIT_S)
        run.ranks[1].process.kill()
    error = run.ranks[0].answer()
    assert "owner rank-1 was lost" in error
    assert "time-out: no connection to rank-1" in error
    run.ranks[1].process.join(WAIT_S)
    assert run.ranks[1].process.exitcode == -signal.SIGKILL
    assert run.record().version == 1

    if torn:
        assert run.node.version is None
        # The trainer starts again, on one rank, from the committed weights: the engine is restored.
        run.ranks[0].process.kill()
        run.ranks[0].process.join(WAIT_S)
        run.policy.load_state_dict(committed)
        with TrainerRefit(run.policy, **run.addresses) as refit:
            run.check(1, committed)
            run.policy.step(3)
            assert refit.push().kind == "relative"
            run.check(2, run.policy.state_dict())
    else:
        run.check(1, committed)  # it goes on serving, with nobody to push to it


def test_weights_that_are_no_numbers_on_one_rank_are_refused_on_both_and_nothing_is_sent(tmp_path: Path) -> None:
    run = Run(tmp_path, {"refuse_nonfinite": True})
    try:
        numbers = (run.owned[0] | run.owned[1]) - {"embed"}  # whose steps bring NaN on purpose
        bad = min(run.owned[1] - {"embed"})
        run.check(0, dict(run.policy.state_dict()))
        before = run.record()
        run.step(1, numbers)
        run.put(bad, [float("nan"), float("-inf"), float("inf")])
        run.push()
        errors = [r.answer() for r in run.ranks]
        assert errors[0] == errors[1]
        assert f"rank-1 brings 1 NaN, 2 infinite elements in 1 tensors: {bad} (1 NaN, 2 infinite)" in errors[0]
        assert "nothing was opened or sent" in errors[0]
        assert run.record() == before
        assert not list(run.folder.glob("payloads/**/*.payload"))
        assert run.node.version == 0
        run.put(bad, [0.5, 0.25, 0.125])
        run.push()
        assert [r.answer() for r in run.ranks] == [(1, "relative")] * 2
        run.check(1, dict(run.policy.state_dict()))
    finally:
        run.close()


def test_ranks_copy_together_or_not_at_all_and_what_they_copied_is_served(run: Run) -> None:
    first, second = run.ranks
    run.check(0, dict(run.policy.state_dict()))
    before = run.record()
    run.step(1, run.owned[0] | run.owned[1])
    stopped = second.process.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)  # it comes late
    pushed = run.begin()
    assert first.silent(0.5)
    assert run.record() == before
    os.kill(stopped, signal.SIGCONT)
    assert run.answers() == ["begun", "begun"]
    assert run.answers("result") == [(1, "relative")] * 2
    run.check(1, pushed)

    pushed = run.begin()  # the weights that training went on to
    assert run.answers() == ["begun", "begun"]
    first.send("result")
    assert first.answer() == (2, "relative")
    run.check(2, pushed)
    run.begin()
    refused = run.answers()  # on the second rank the last push is pending still
    assert refused[0] == refused[1]
    assert refused[0].startswith("rank 1: rank-1: the push that begin_push() began last is pending")
    assert run.record().version == 2
    second.send("result")
    assert second.answer() == (2, "relative")

    run.push()  # of the live weights, which gives both copies back
    assert run.answers() == [(3, "relative")] * 2
    second.send("no memory")
    run.begin()
    assert run.answers() == ["rank 1: MemoryError: nothing left"] * 2
    run.push()  # of the live weights, although there is a copy on the first rank
    assert run.answers() == [(4, "relative")] * 2
    run.check(4, dict(run.policy.state_dict()))

    second.send("kill at payload", 1)
    run.step(2, run.owned[0] | run.owned[1])
    run.begin()
    assert run.answers() == ["begun", "begun"]
    first.send("result")
    error = first.answer()
    assert "owner rank-1 was lost" in error
    assert "time-out: no connection to rank-1" in error
    assert run.record().version == 4
    assert run.node.version is None  # torn


@pytest.fixture
def run_elsewhere(tmp_path: Path):
    r = Run(tmp_path, {"coordinator": "elsewhere", "leader_lease_s": 4.0, "owners_timeout_s": 10.0})
    yield r
    r.close()


@pytest.mark.long
def test_the_leader_is_killed_while_both_ranks_push_and_again_with_one_of_them(run_elsewhere: Run) -> None:
    run = run_elsewhere
    everything = run.owned[0] | run.owned[1]
    run.check(0, run.policy.state_dict())
    first, second = *run.coordinators, CoordinatorProcess("second", run.folder, run.addresses)
    run.coordinators.append(second)
    second.wait_said("stands by: first")
    run.step(1, everything)
    first.signal(signal.SIGSTOP)  # so that the push begins, and is not over, when it is killed
    run.push()
    first.signal(signal.SIGKILL)
    assert [r.answer() for r in run.ranks] == [(1, "relative")] * 2
    committed = {n: t.clone() for n, t in run.policy.state_dict().items()}
    run.check(1, committed)

    third = CoordinatorProcess("third", run.folder, run.addresses)
    run.coordinators.append(third)
    third.wait_said("stands by: second")
    run.step(2, everything)
    second.signal(signal.SIGSTOP)
    run.push()
    run.ranks[1].process.kill()
    second.signal(signal.SIGKILL)
    assert run.ranks[0].answer() == "time-out: no connection to rank-1"
    assert run.record().version == 1
    run.check(1, committed)
