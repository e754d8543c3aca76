"""Payload sizes: bytes a changed element and share of the checkpoint, by rate, positions and kind of update.

Whole payloads as an owner makes them, header and digests included, against the order-0 bound (entropy of uniform
positions and of the differences) and against the layout of NeMo-RL's public codec.  Sizes are exact.  Besides made-up
updates there are real ones: AdamW on FP32 masters of a small transformer that reads real text, at the rates of RL.
"""

from collections.abc import Iterator

import torch
from table import Row, parser, report
from workload import RealTraining, adam, entropy, location_entropy, payloads, peer_payload, relative, words

from dcr.data_plane.kernels.stream_choice import stream_kernels

NAME = "payload"
RATES = (0.001, 0.005, 0.01, 0.03, 0.05, 0.2)
PAPER_SHARES = {0.03: 2.37, 0.05: 3.79}
AIM_SHARES = {0.03: 1.60, 0.05: 2.45}
AIM_RATIOS = {0.01: 1.4, 0.03: 1.45, 0.05: 1.5}
ADAM_RATES = (1e-7, 5e-7, 1e-6)
REAL_RATES = (1e-6, 3e-6, 1e-5)
REAL_STEPS, WARM_UP_STEPS = 40, 120
"""Steps at each rate, the last of which is measured; and before them all, at 1e-3."""
NOT_MEASURED = (
    "a large model: the trained one has 3.3 million weights, taken here as one tensor",
    "gradients of RL: the transformer learns to predict text",
)


def rows_of(claim: str, old: torch.Tensor, new: torch.Tensor, aims: tuple[float | None, ...]) -> Iterator[Row]:
    """Rows of one update; ``aims``: the paper's share, ours, and our ratio against the peer's layout."""
    paper, aim, ratio = aims
    changed = old != new
    entries, rate = int(changed.sum()), float(changed.sum()) / old.numel()
    size = sum(len(data) for data in payloads(old, new, stream_kernels()))
    theirs = sum(len(data) for data in peer_payload(old, new))
    difference = entropy(words((new - old)[changed]))
    claim = f"{claim}, {100 * rate:.3g} % changed"
    yield Row(f"{claim}: bytes a changed element", size / entries, "B", peer=theirs / entries)
    share = 100 / (2 * old.numel())
    yield Row(f"{claim}: share of the checkpoint", size * share, "%", paper, theirs * share, aim, at_least=False)
    yield Row(f"{claim}: layout of NeMo-RL's codec / ours", theirs / size, "x", peer=1.0, aim=ratio)
    if "uniform positions" in claim or "Adam" in claim:
        bound = (location_entropy(rate) + difference) / 8
        yield Row(f"{claim}: over the order-0 bound of {bound:.3f} B", 100 * (size / entries / bound - 1), "%")


def main() -> None:
    """Measure every rate, kind of positions and kind of noise."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--elements", type=int, default=1 << 24, help="elements of the tensor (default: 2**24)")
    asked = arguments.parse_args()
    rows: list[Row] = []
    for noise in ("uniform", "gaussian"):
        for clustered in (False, True):
            where = "row-clustered positions" if clustered else "uniform positions"
            for rate in RATES:
                held = noise == "uniform" and not clustered
                aims = tuple(known.get(rate) if held else None for known in (PAPER_SHARES, AIM_SHARES, AIM_RATIOS))
                rows += rows_of(
                    f"{where}, {noise} +-1e-2", *relative(rate, asked.elements, noise=noise, rows=clustered), aims
                )
    for step in ADAM_RATES:
        rows += rows_of(f"Adam, independent gradients, at {step:g}", *adam(step, asked.elements), (None, None, None))
    training = RealTraining(WARM_UP_STEPS)
    for step in REAL_RATES:
        rows += rows_of(
            f"AdamW, trained transformer, at {step:g}", *training.steps(step, REAL_STEPS), (None, None, None)
        )
    report(NAME, rows, NOT_MEASURED, as_json=asked.json)


if __name__ == "__main__":
    main()
