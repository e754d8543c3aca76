"""The fold after a commit, where it takes over what detection found, against one that digests every change again.

Beside it, what a push costs more that looks for NaN and infinities before it offers the weights.

Both folds do the same to the same weights: a share that has detected the candidate, and one that has not, whose fold
projects and digests the changes itself.  They take turns, on one core, in processor time.
"""

from collections.abc import Iterator
from statistics import median
from time import process_time

import torch
from table import Row, gathered, parser, report
from workload import CHUNK_ELEMENTS

from dcr.data_plane.bits import bit_view
from dcr.data_plane.index_map import Box, IndexMap
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.tracker import Tracker
from dcr.protocol.identity import Kind
from dcr.trainer.share import OwnedShard, Share
from dcr.trainer.snapshot import Live

NAME = "fold"
RATES = (0.01, 0.03, 0.05)
NOT_MEASURED = ("a GPU, where the fold digests as before", "several boxes a tensor, which make projection dearer")


def share_of(weights: torch.Tensor) -> Share:
    """The owner of one tensor."""
    spec, count = TensorSpec("weight", tuple(weights.shape), weights.dtype), weights.numel()
    tracker = Tracker("weight", weights, chunk_elements=CHUNK_ELEMENTS)
    shard = OwnedShard(0, tracker, (IndexMap.union([Box.of((count,), (1,), (1,), 0, 0)]),))
    return Share("owner", (spec,), (0,), (shard,))


def rows_of(rate: float, elements: int, rounds: tuple[int, int]) -> Iterator[Row]:
    """Rows of one share of changed elements."""
    torch.manual_seed(0)
    weights = torch.randn(elements).to(torch.bfloat16)
    knows, digests = share_of(weights), share_of(weights)

    def look() -> Live:
        return lambda _number: weights

    times: dict[str, list[float]] = {"detect": [], "knows": [], "digests": [], "nonfinite": []}
    for turn in range(sum(rounds)):
        bit_view(weights)[torch.rand(elements) < rate] += 1
        begun = process_time()
        for _ in knows.changes(Kind.RELATIVE, look):
            pass
        detected = process_time()
        expected = knows.candidate_digest
        assert expected is not None
        knows.fold(expected, look)
        folded = process_time()
        digests.fold(expected, look)
        ended = process_time()
        if knows.nonfinite(look):
            raise RuntimeError("there is nothing to find")
        looked = process_time()
        if turn >= rounds[0]:
            spent = (detected - begun, folded - detected, ended - folded, looked - ended)
            for way, seconds in zip(times, spent, strict=True):
                times[way].append(seconds)
    if knows.baseline_digests != digests.baseline_digests:
        raise RuntimeError("the two folds disagree")
    claim = f"{100 * rate:g} % of {elements >> 20} Mi elements changed"
    ratio = median(slow / fast for slow, fast in zip(times["digests"], times["knows"], strict=True))
    yield Row(f"{claim}: a fold that digests again / one that takes over", ratio, "x")
    yield Row(f"{claim}: detection / the fold that takes over", median(times["detect"]) / median(times["knows"]), "x")
    looking = median(look / detect for look, detect in zip(times["nonfinite"], times["detect"], strict=True))
    yield Row(f"{claim}: looking for NaN and infinities (refuse_nonfinite) / detection", looking, "x")
    yield Row(f"{claim}: the fold that takes over", 2e-9 * elements / median(times["knows"]), "GB/s of shard")


def main() -> None:
    """Measure every rate."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--elements", type=int, default=1 << 25, help="elements of the shard (default: 2**25)")
    arguments.add_argument("--rounds", type=int, default=10, help="rounds that count (default: 10)")
    arguments.add_argument("--warmups", type=int, default=3, help="rounds before (default: 3)")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    rows = gathered(row for rate in RATES for row in rows_of(rate, asked.elements, (asked.warmups, asked.rounds)))
    report(NAME, rows, NOT_MEASURED, as_json=asked.json)


if __name__ == "__main__":
    main()
