"""Processes of the demo: each speaks JSON lines, one request and one answer a line, and logs to a file of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # six processes share the cores: more threads only wait for each other
    "TOKENIZERS_PARALLELISM": "false",
}
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class DemoError(Exception):
    """A process of the demo failed; the message names it and its log."""


class Process:
    """One child process.  Every wait has a limit; when it ends by itself, whoever waits is told."""

    def __init__(
        self,
        name: str,
        run: Path,
        module: str,
        *arguments: str,
        progress: Callable[[str], None],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._progress = progress
        self._log = run / f"{name}.log"
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        self._answers: Queue[dict[str, Any] | None] = Queue(1000)
        threading.Thread(target=self._read, name=f"read-{name}", daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            answer = json.loads(line)
            if "progress" in answer:
                self._progress(answer["progress"])
            else:
                self._answers.put(answer)
        self._answers.put(None)

    def send(self, **request: Any) -> None:
        """Send a request; ``answer`` waits for what comes back."""
        assert self._child.stdin is not None
        try:
            print(json.dumps(request), file=self._child.stdin, flush=True)
        except BrokenPipeError:
            self._fail("has ended")

    def answer(self, what: str, limit_s: float) -> dict[str, Any]:
        """The next answer; DemoError if the process failed, ended, or did not answer in time."""
        try:
            answer = self._answers.get(timeout=limit_s)
        except Empty:
            self._fail(f"did not answer in {limit_s:.0f} s ({what})")
        if answer is None:
            self._fail(f"ended with status {self._child.wait(10)} ({what})")
        if "error" in answer:
            self._fail(f"failed ({what}): {answer['error']}")
        return answer

    def ask(self, limit_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(**request)
        return self.answer(str(request.get("do", "")), limit_s)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        os.kill(self._child.pid, signal.SIGKILL)
        self._child.wait(30)

    def close_input(self) -> None:
        """Close its input, which tells it to end."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()

    def end(self, timeout_s: float = 30.0) -> None:
        """Close its input and wait; kill it if it does not end in time."""
        self.close_input()
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def _fail(self, why: str) -> NoReturn:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise DemoError(f"process {self.name} {why}; its log is {self._log} and ends:\n{tail}")


def serve(handlers: dict[str, Handler]) -> None:
    """In a child: answer requests by the handler that ``do`` names, until the input ends.

    Standard output belongs to the answers; whatever else prints there is sent to the log.
    """
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        try:
            answer = handlers[request["do"]](request)
        except Exception as e:  # noqa: BLE001 - told to the parent, which ends the demo with it
            answer = {"error": f"{type(e).__name__}: {e}"}
        tell({**answer, "seconds": time.monotonic() - started})


def tell(answer: dict[str, Any]) -> None:
    """Write one line to the parent."""
    print(json.dumps(answer), file=_answers, flush=True)


_answers = sys.stdout


def claim_output() -> None:
    """In a child, before anything is imported that prints: keep standard output for the answers."""
    global _answers  # noqa: PLW0603 - the process has one standard output
    _answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
