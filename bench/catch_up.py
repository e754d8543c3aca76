"""An engine that starts some versions behind: catching up by the payloads that are kept against a restore.

A trainer and a torch engine that serves, in this process.  A version scales 1 % or 3 % of the weights, anywhere, by
1 + 0.01 x, x uniform within -1 and 1.  Engines start from the checkpoint of the committed version, of 1, 3 and 8
versions before it, and from another one, which is restored by the trainer; in turn, several times.  Bytes are those
that their node reads from the delivery store.  A start is from the making of the node until the engine serves: the
layout is learned, the checkpoint digested and storage read back, as by every start.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from table import Row, gathered, parser, report
from torch import nn

import dcr
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.torch.engine import TorchEngine

BEHIND = (1, 3, 8)
ROWS = 16
TENSORS = 8
DRAWS = 20
NOT_MEASURED = (
    "stores that are far away: this one is a folder, whose bytes come at the speed of the page cache",
    "what a restore costs the trainer, whose processors are the same here",
    "engines of several ranks, and GPUs",
)


class Policy(nn.Module):
    """Matrices that are trained, and served as they are."""

    def __init__(self, elements: int, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        shape = (ROWS, elements // TENSORS // ROWS)
        for n in range(TENSORS):
            w = (torch.randn(shape, generator=g) * 0.02).to(torch.bfloat16)
            self.register_parameter(f"w{n}", nn.Parameter(w, requires_grad=False))

    def load_weights(self, weights: object) -> set[str]:
        """The native loader."""
        own = dict(self.named_parameters())
        for name, weight in weights:  # type: ignore[attr-defined]
            own[name].copy_(weight)
        return set(own)

    def step(self, rate: float, seed: int) -> None:
        """An update of this share of the elements."""
        g = torch.Generator().manual_seed(seed)
        for w in self.parameters():
            flat, old = w.view(-1), w.flatten().clone()
            left = (torch.rand(flat.shape, generator=g) < rate).nonzero().flatten()
            for _ in range(DRAWS):  # what rounding leaves alone is drawn again
                scale = 1 + 0.01 * (torch.rand(left.shape, generator=g) * 2 - 1)
                flat[left] = (old[left].float() * scale).to(torch.bfloat16)
                left = left[flat[left] == old[left]]


class Run:
    """A trainer, an engine that serves, and the checkpoints of its versions."""

    def __init__(self, folder: Path, elements: int, rate: float) -> None:
        self.folder, self.elements = folder, elements
        self.address = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
        self.settings = {"event_log": "off"}
        self.policy = Policy(elements)
        self.save("0", self.policy)
        self.save("another", Policy(elements, seed=1))
        self.refit = dcr.TrainerRefit(self.policy, **self.address, settings=self.settings)  # type: ignore[arg-type]
        self.serves, *_ = self.start("0", "serves", 0)
        for version in range(1, max(BEHIND) + 1):
            self.policy.step(rate, version)
            self.refit.push()
            self.save(str(version), self.policy)

    def save(self, name: str, policy: Policy) -> None:
        """Keep a checkpoint."""
        (self.folder / name).mkdir(parents=True)
        save_file({n: w.clone() for n, w in policy.state_dict().items()}, self.folder / name / "model.safetensors")

    def start(self, checkpoint: str, name: str, version: int) -> tuple[dcr.RolloutNode, float, int]:
        """Start an engine; its node, seconds until it serves, and the bytes that its node read."""
        model = Policy(self.elements, seed=1)
        if checkpoint != "another":
            model.load_weights(read_checkpoint(str(self.folder / checkpoint)))
        engine = TorchEngine(model, name=name, checkpoint=self.folder / checkpoint)
        started = time.perf_counter()
        node = dcr.RolloutNode(engine, **self.address, settings=self.settings)  # type: ignore[arg-type]
        node.wait_serving(version, timeout_s=600)
        took = time.perf_counter() - started
        for n, w in self.policy.named_parameters():
            if version and not torch.equal(model.get_parameter(n).view(torch.int16), w.view(torch.int16)):
                raise SystemExit(f"{name}, from {checkpoint}: {n} is not what was committed")
        return node, took, node.received[1]

    def close(self) -> None:
        """End everything."""
        self.serves.close()
        self.refit.close()


def rows(folder: Path, elements: int, rate: float, repeats: int) -> Iterator[Row]:
    """Measure one rate of change."""
    run = Run(folder, elements, rate)
    last = max(BEHIND)
    starts = {n: str(last - n) for n in (0, *BEHIND)}
    seconds: dict[str, list[float]] = {name: [] for name in (*starts.values(), "another")}
    size = dict.fromkeys(seconds, 0)
    for n in range(repeats + 1):  # the first round compiles and warms
        for name, took in seconds.items():
            node, one, size[name] = run.start(name, f"from-{name}-{n}", last)
            node.close()
            if n:
                took.append(one)
    run.close()
    median = {name: statistics.median(took) for name, took in seconds.items()}
    what = f"{elements:,} BF16 weights, {100 * rate:.0f} % a version"
    yield Row(f"start of an engine that is restored ({what})", median["another"], "s")
    yield Row(f"start of an engine that has nothing to do ({what})", median[starts[0]], "s")
    yield Row(f"a restore ({what})", size["another"] / 1e6, "MB")
    for behind in BEHIND:
        name, of = starts[behind], f"{behind} version{'s' if behind > 1 else ''} behind, {100 * rate:.0f} % a version"
        yield Row(f"bytes of a restore against catching up, {of}", size["another"] / size[name], "x")
        yield Row(f"start with a restore against catching up, {of}", median["another"] / median[name], "x")


def main() -> None:
    """Measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--repeats", type=int, default=5, help="starts of each engine (5)")
    arguments.add_argument("--elements", type=int, default=1 << 24, help="BF16 weights of the model (16 Mi)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = gathered(
            row
            for rate in (0.01, 0.03)
            for row in rows(Path(root) / str(rate), options.elements, rate, options.repeats)
        )
    report("catch_up", found, NOT_MEASURED, as_json=options.json)


if __name__ == "__main__":
    main()
