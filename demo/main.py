"""`make demo`: train, refit three live receivers after every step, and prove every bit.

Two training ranks take real optimizer steps; a vLLM engine of one rank, one of two tensor-parallel ranks, and a plain
torch model serve, each in a process of its own.  After every step the weights are pushed, and what each receiver holds
is compared, bit for bit, with an untouched twin: a fresh model that loads the candidate's checkpoint through the
ordinary loader and was never refitted.  The checkpoint comes from the trainer's own state dict, or Megatron Bridge's
export, not from what was sent.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from demo.kill import KILL_AT_VARIABLE
from demo.process import ROOT, DemoError, Process
from demo.text import decode, encode

TRAINERS = {"fsdp2": "demo.fsdp2:Fsdp2Trainer", "megatron": "demo.megatron:MegatronTrainer"}
RANKS = 2
REFITS = 3
KILL_AT = 2
ENGINES: dict[str, dict[str, int]] = {"vllm": {}, "vllm-tp2": {"tensor_parallel_size": 2}}
"""The vLLM engines, and how each differs from the twin's usual arguments."""
VICTIM = "vllm-tp2"
TOKENS = 24
PROMPTS = ["The for statement is used to ", "An object's type is "]
START_TIMEOUT_S = 600
STEP_TIMEOUT_S = 900
BUCKET_BYTES = 96 << 10


class Demo:
    """The processes, and what has been proved of them."""

    def __init__(self, run: Path, *, trainer: str, kill: bool) -> None:
        self.run = run
        self.trainer = trainer
        self.kill = kill
        self.started = time.monotonic()
        self.control = f"sqlite://{run}/record.db"
        self.delivery = f"file://{run}/payloads"
        self.processes: list[Process] = []
        self.trainers: list[Process] = []
        self.receivers: dict[str, Process] = {}
        self.twins: dict[str, Process] = {}
        self.checkpoint_bytes = 0
        self.payload_bytes = 0
        self.proofs = 0
        self.reports: list[dict[str, Any]] = []

    # ------------------------------------------------------------ saying

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    # ------------------------------------------------------------ starting

    def process(self, name: str, module: str, *arguments: str, environment: dict[str, str] | None = None) -> Process:
        """Start a process of the demo."""
        p = Process(name, self.run, module, *arguments, progress=self.say, environment=environment)
        self.processes.append(p)
        return p

    def start(self) -> None:
        """Start everything and bring every receiver to version 0."""
        self.say(f"starting {RANKS} training ranks ({self.trainer})")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        where = ["--control", self.control, "--delivery", self.delivery]
        for rank in range(RANKS):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self.trainers.append(
                self.process(
                    f"trainer-{rank}",
                    "demo.trainer_process",
                    *["--trainer", TRAINERS[self.trainer], *where],
                    *["--bucket-bytes", str(BUCKET_BYTES)],
                    environment=environment,
                )
            )
        self.say("warm-up: the untrained policy learns to write a little")
        loss = self.all_trainers(do="warm_up")["loss"]
        self.save(0)
        self.say(f"warm-up done, loss {loss:.3f}; checkpoint of {self.checkpoint_bytes:,} bytes saved")
        self.say("starting a vLLM engine of one rank, one of two, a torch receiver, and their twins")
        for name in ENGINES:
            self.start_engine(name, kill_at=KILL_AT if self.kill and name == VICTIM else 0)
        where += ["--checkpoint", str(self.checkpoint(0))]
        self.receivers["torch"] = self.process("receiver-torch", "demo.torch_node", *where)
        self.twins["vllm"] = self.process("twin-vllm", "demo.vllm_twin")
        self.twins["torch"] = self.process("twin-torch", "demo.torch_twin")
        owned = self.all_trainers(do="connect")
        self.say(
            f"trainer connected: {owned['tensors']} canonical tensors, first rank owns {owned['owned']:,} elements"
        )
        for name, receiver in self.receivers.items():
            receiver.ask(START_TIMEOUT_S, do="wait_serving", version=0, timeout_s=START_TIMEOUT_S)
            self.say(f"receiver {name} serves version 0")

    def start_engine(self, name: str, kill_at: int = 0) -> None:
        """Start a vLLM engine from the first checkpoint, whatever version is committed.

        Args:
            name: which.
            kill_at: the refit in which its last rank is to be killed; 0 for none.
        """
        extension = {"worker_extension_cls": "demo.killable_extension.KillableExtension"} if kill_at else {}
        self.receivers[name] = self.process(
            f"receiver-{name}",
            "demo.vllm_node",
            *["--name", name, "--control", self.control, "--delivery", self.delivery],
            *["--checkpoint", str(self.checkpoint(0)), "--arguments", json.dumps({**ENGINES[name], **extension})],
            environment={KILL_AT_VARIABLE: str(kill_at)} if kill_at else None,
        )

    # ------------------------------------------------------------ one refit

    def refit(self, number: int) -> None:
        """One optimizer step, one push, one proof."""
        loss = self.all_trainers(do="step")["loss"]
        self.save(number)
        for trainer in self.trainers:
            trainer.send(do="push")
        report, *_ = [t.answer("push", STEP_TIMEOUT_S)["report"] for t in self.trainers]
        if report["version"] != number:
            raise DemoError(f"push {number} committed version {report['version']}")
        self.payload_bytes += report["payload_bytes"]
        for failure in report["failures"]:
            self.say(f"refit {number}: {failure}")
        self.prove(number, report, loss, sorted(report["members"]))
        self.reports.append({**report, "loss": loss, "checkpoint_bytes": self.checkpoint_bytes})
        if self.kill and number == KILL_AT:
            self.rejoin(number)

    def rejoin(self, number: int) -> None:
        """Start the engine anew that lost a rank; it catches up by the payloads that are kept, and rejoins."""
        failure = self.receivers[VICTIM].ask(STEP_TIMEOUT_S, do="status")["failure"]
        if not failure:
            raise DemoError(f"receiver {VICTIM} should have lost a rank in refit {number}")
        self.say(f"receiver {VICTIM}: its last rank was killed (SIGKILL) in the middle of its writes: {failure}")
        self.receivers[VICTIM].kill()
        self.say(f"receiver {VICTIM} starts again, from version 0")
        self.start_engine(VICTIM)
        self.receivers[VICTIM].ask(START_TIMEOUT_S, do="wait_serving", version=number, timeout_s=START_TIMEOUT_S)
        self.compare(number, VICTIM, self.twin_vllm(number, VICTIM)["digests"])
        self.say(f"receiver {VICTIM} came back to version {number} and serves it: bit-exact")

    # ------------------------------------------------------------ the proof

    def prove(self, number: int, report: dict[str, Any], loss: float, members: list[str]) -> None:
        """Compare every member with its twin, and print the line of this refit."""
        prompts = [encode(p) for p in PROMPTS]
        said = ""
        for name in members:
            receiver = self.receivers[name]
            receiver.ask(STEP_TIMEOUT_S, do="wait_serving", version=number, timeout_s=STEP_TIMEOUT_S)
            made = receiver.ask(STEP_TIMEOUT_S, do="generate", prompts=prompts, tokens=TOKENS)
            if made["version"] != number:
                raise DemoError(f"receiver {name} answered with version {made['version']}, not {number}")
            if name in ENGINES:
                twin = self.twin_vllm(number, name)
                self.compare(number, name, twin["digests"])
                if (made["tokens"], made["logprobs"]) != (twin["tokens"], twin["logprobs"]):
                    raise DemoError(f"version {number}: receiver {name} and its twin generate different tokens")
                sampled = receiver.ask(STEP_TIMEOUT_S, do="sample", prompt=prompts[0], tokens=2 * TOKENS, seed=number)
                said = decode(sampled["tokens"])
            else:
                self.compare(number, name, self.twin_torch(number))
        stages = {k: v for k, v in report["stages"].items() if k not in {"blocked", "synchronise"}}
        print(
            f"refit {number}: version {report['version']}  {report['kind']}  "
            f"changed {100 * report['changed_entries'] / report['elements']:.2f} %  "
            f"payload {report['payload_bytes']:,} B = {100 * report['payload_bytes'] / self.checkpoint_bytes:.2f} % "
            f"of checkpoint  in {report['wall_s']:.2f} s ("
            + ", ".join(f"{k} {v:.2f}" for k, v in stages.items())
            + f")  loss {loss:.3f}  bit-exact {'+'.join(members)}",
            flush=True,
        )
        print(f"         {PROMPTS[0]!r} -> {said!r}", flush=True)
        self.proofs += 1

    def twin_vllm(self, number: int, name: str) -> dict[str, Any]:
        """What a fresh engine of the same layout holds and answers."""
        prompts = [encode(p) for p in PROMPTS]
        checkpoint = str(self.checkpoint(number))
        twin = self.twins["vllm"]
        twin.send(checkpoint=checkpoint, prompts=prompts, max_tokens=TOKENS, arguments=ENGINES[name])
        return twin.answer("twin", START_TIMEOUT_S)

    def twin_torch(self, number: int) -> dict[str, str]:
        """Stored bits of the torch receiver's twin."""
        return self.twins["torch"].ask(START_TIMEOUT_S, do="twin", checkpoint=str(self.checkpoint(number)))["bits"]

    def compare(self, number: int, name: str, twin: dict[str, str]) -> None:
        """Every parameter and buffer of the receiver equals the twin's, bit for bit; DemoError if not."""
        held = self.receivers[name].ask(STEP_TIMEOUT_S, do="bits")["bits"]
        if not twin or held.keys() != twin.keys():
            raise DemoError(f"version {number}: receiver {name} and its twin have different tensors")
        wrong = sorted(n for n, digest in twin.items() if held[n] != digest)
        if wrong:
            raise DemoError(f"version {number}: receiver {name} differs from its twin in {len(wrong)}: {wrong[:5]}")

    # ------------------------------------------------------------ inside

    def all_trainers(self, **request: Any) -> dict[str, Any]:
        """Ask every rank at once, as collectives want it; returns the first rank's answer."""
        for trainer in self.trainers:
            trainer.send(**request)
        first, *_ = [t.answer(request["do"], STEP_TIMEOUT_S) for t in self.trainers]
        return first

    def checkpoint(self, number: int) -> Path:
        """Where the checkpoint of this version is."""
        return self.run / f"v{number}"

    def save(self, number: int) -> None:
        """Save the present weights by the trainer's own state-dict path."""
        self.all_trainers(do="save", directory=str(self.checkpoint(number)))
        files = self.checkpoint(number).glob("*.safetensors")
        self.checkpoint_bytes = sum(f.stat().st_size for f in files)

    def end(self) -> None:
        """End every process."""
        for p in self.trainers:  # together: they leave their group together
            p.close_input()
        for p in reversed(self.processes):
            p.end()


def trainer_name(name: str) -> str:
    """One of ``TRAINERS``; nothing is the first of them."""
    if name and name not in TRAINERS:
        raise argparse.ArgumentTypeError(f"no trainer {name!r}; choose one of {', '.join(TRAINERS)}")
    return name or next(iter(TRAINERS))


def main() -> int:
    """Run the demo; the exit status is 0 only if every refit was proved bit-exact."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--trainer",
        type=trainer_name,
        default=os.environ.get("TRAINER", ""),
        help=f"one of {', '.join(TRAINERS)} (also TRAINER=... in the environment)",
    )
    arguments.add_argument(
        "--kill",
        action="store_true",
        default=os.environ.get("KILL", "") not in ("", "0"),
        help=f"kill a rank of {VICTIM} in the middle of refit {KILL_AT} (also KILL=1 in the environment)",
    )
    arguments.add_argument("--run", type=Path, default=ROOT / "run" / "demo", help="folder for record, payloads, logs")
    arguments.add_argument(
        "--json",
        action="store_true",
        help="end with one JSON object on a line: every push's whole report, by layer too",
    )
    a = arguments.parse_args()
    shutil.rmtree(a.run, ignore_errors=True)
    a.run.mkdir(parents=True)
    demo = Demo(a.run.resolve(), trainer=a.trainer, kill=a.kill)
    try:
        demo.start()
        for number in range(1, REFITS + 1):
            demo.refit(number)
    except KeyboardInterrupt:
        print("demo interrupted", file=sys.stderr)
        return 130
    except DemoError as e:
        print(f"demo failed: {e}", file=sys.stderr)
        return 1
    finally:
        demo.end()
    share = 100 * demo.payload_bytes / (REFITS * demo.checkpoint_bytes)
    print(
        f"bit-exact {demo.proofs}/{REFITS} refits, {len(demo.receivers)} receivers, payload {share:.2f} % of checkpoint"
    )
    if a.json:
        said = {
            "bit_exact": demo.proofs,
            "refits": REFITS,
            "receivers": sorted(demo.receivers),
            "reports": demo.reports,
        }
        print(json.dumps(said))
    return 0 if demo.proofs == REFITS else 1


if __name__ == "__main__":
    sys.exit(main())
