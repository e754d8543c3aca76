"""What the protocol event log costs: lines and bytes a refit, microseconds a line, and their share of a refit.

Two deployments in this process, a trainer and a torch engine each, one that writes events and one that does not, are
refitted in turn.  Their weights are small, so that the share is that of a short refit: a longer one has the same lines,
but for two a payload and rank.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from table import Row, parser, report
from torch import nn

import dcr
from dcr.protocol.event import EVENT_LOG_VERSION, Start
from dcr.protocol.identity import PayloadIdentity
from dcr.protocol.step import Step
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.event_log import EventLog

LINES = 20_000
NOT_MEASURED = (
    "refits of real models, which take longer and have the same lines but for two a payload and rank",
    "disks that stall a write: lines go to the page cache",
    "engines of several ranks in processes of their own",
)


class Policy(nn.Module):
    """A matrix that is trained, and served as it is."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements // 1024, 1024, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: object) -> set[str]:
        """The native loader."""
        for _, weight in weights:  # type: ignore[attr-defined]
            self.w.copy_(weight)
        return {"w"}


class Deployment:
    """A trainer and an engine that serves."""

    def __init__(self, folder: Path, elements: int, event_log: str) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "v0").mkdir()
        self.policy, served = Policy(elements), Policy(elements)
        save_file(self.policy.state_dict(), folder / "v0" / "model.safetensors")
        address = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
        settings = {"event_log": event_log}
        self.refit = dcr.TrainerRefit(self.policy, **address, settings=settings)  # type: ignore[arg-type]
        engine = TorchEngine(served, name="a", checkpoint=folder / "v0")
        self.node = dcr.RolloutNode(engine, **address, settings=settings)  # type: ignore[arg-type]
        self.node.wait_serving(0, timeout_s=120)
        self.version = 0

    def push(self, seed: int) -> float:
        """Seconds from the push until the engine serves what was pushed."""
        positions = torch.randint(self.policy.w.numel(), (self.policy.w.numel() // 100,))
        self.policy.w.view(-1)[positions] += float(seed)
        self.version += 1
        started = time.perf_counter()
        self.refit.push()
        self.node.wait_serving(self.version, timeout_s=120)
        return time.perf_counter() - started

    def logged(self) -> tuple[int, int]:
        """Lines and bytes of its logs."""
        data = [path.read_bytes() for path in self.folder.glob("*.events/*.ndjson")]
        return sum(d.count(b"\n") for d in data), sum(map(len, data))

    def close(self) -> None:
        """End both."""
        self.node.close()
        self.refit.close()


def line_us(folder: Path) -> float:
    """Microseconds of one line, of the kind that there are most of."""
    log = EventLog(str(folder), "rank", "a", 1, 1 << 30)
    log.start(Start(EVENT_LOG_VERSION, "default"))
    step = Step("a", "BeginWrite", 7, "rank-0/3 of epoch 7", payload=PayloadIdentity("default", 7, 7, "rank-0", 1, 3))
    started = time.perf_counter()
    for _ in range(LINES):
        log.observe(step)
    return (time.perf_counter() - started) / LINES * 1e6


def main() -> None:
    """Measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--refits", type=int, default=30, help="of each deployment (30)")
    arguments.add_argument("--elements", type=int, default=1 << 22, help="BF16 weights of each model (4 Mi)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as root:
        a_line = line_us(Path(root) / "lines")
        off = Deployment(Path(root) / "off", options.elements, "off")
        on = Deployment(Path(root) / "on", options.elements, "beside")
        for seed in range(1, 4):
            off.push(seed), on.push(seed)
        before = on.logged()
        took = [(off.push(seed), on.push(seed)) for seed in range(4, options.refits + 4)]
        after = on.logged()
        off.close()
        on.close()
    lines, size = ((b - a) / options.refits for a, b in zip(before, after, strict=True))
    without, with_log = (statistics.median(times) for times in zip(*took, strict=True))
    what = f"{options.elements:,} BF16 weights, 1 % changed, one rank, {without * 1e3:.0f} ms a refit"
    rows = [
        Row(f"lines a refit ({what})", lines, "lines"),
        Row("bytes a refit", size, "B"),
        Row("one line", a_line, "us"),
        Row("lines' share of a refit", lines * a_line / (without * 1e6) * 100, "%", aim=1.0, at_least=False),
        Row("refit with the log against without, medians", with_log / without, "x"),
    ]
    report("event_log", rows, NOT_MEASURED, as_json=options.json)


if __name__ == "__main__":
    main()
