"""The policy of the WAN bench, as it is trained, saved and served: layers of two BF16 matrices."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.index_map import Box, IndexMap
from dcr.data_plane.item import Change, TensorSpec
from dcr.data_plane.nonfinite import NonFinite
from dcr.data_plane.tracker import Tracker
from dcr.protocol.identity import Kind
from dcr.trainer.share import OwnedShard, Share

ROWS, WIDTH = 1024, 2048
HALVES = ("gate", "up")
LAYER_BYTES = 2 * ROWS * WIDTH * len(HALVES)
_FILE_LAYERS = 16
_DRAWS = 40


def write_checkpoint(folder: Path, layers: int) -> None:
    """A checkpoint of normal weights, as engines load it and trainers start from it."""
    for first in range(0, layers, _FILE_LAYERS):
        tensors = {}
        for layer in range(first, min(first + _FILE_LAYERS, layers)):
            for place, half in enumerate(HALVES):
                random = torch.Generator().manual_seed(2 * layer + place)
                values = torch.randn(ROWS, WIDTH, generator=random) * 0.02
                tensors[f"layers.{layer}.{half}.weight"] = values.to(torch.bfloat16)
        save_file(tensors, _file(folder, first))


def _file(folder: Path, layer: int) -> Path:
    return folder / f"{layer // _FILE_LAYERS:04}.safetensors"


class Trained:
    """One training rank's rows of every matrix, and its share of the checkpoint: a ``runtime.source.Source``.

    The projection is stated, since learning it from the save path is a trainer's one-time work and not measured here.

    Args:
        checkpoint: folder of ``write_checkpoint``.
        layers: how many it holds.
        rank: of this process.
        ranks: how many there are.
        chunk_elements: elements compared at once.
    """

    def __init__(self, checkpoint: Path, layers: int, rank: int, ranks: int, chunk_elements: int) -> None:
        first, end = rank * ROWS // ranks, (rank + 1) * ROWS // ranks
        names = sorted(f"layers.{number}.{half}.weight" for number in range(layers) for half in HALVES)
        bases = range(0, len(names) * ROWS * WIDTH, ROWS * WIDTH)
        self._rows: list[torch.Tensor] = []
        shards = []
        for number, (name, base) in enumerate(zip(names, bases, strict=True)):
            with safe_open(_file(checkpoint, int(name.split(".")[1])), framework="pt") as tensors:
                self._rows.append(tensors.get_slice(name)[first:end].clone())
            box = Box.of(((end - first) * WIDTH,), (1,), (1,), 0, base + first * WIDTH)
            tracker = Tracker(name, self._rows[-1], chunk_elements=chunk_elements)
            shards.append(OwnedShard(number, tracker, (IndexMap.union([box]),)))
        self.specs = tuple(TensorSpec(name, (ROWS, WIDTH), torch.bfloat16) for name in names)
        self.owner = f"rank-{rank}"
        self._share = Share(self.owner, self.specs, bases, shards)
        self.owned_elements = self._share.owned_elements

    def step(self, rate: float, seed: int) -> None:
        """Change a share of this rank's elements, anywhere, by a factor 1 + 0.01 x, x uniform within -1 and 1."""
        random = torch.Generator().manual_seed(seed)
        for rows in self._rows:
            weights = rows.view(-1)
            chosen = (torch.rand(weights.numel(), generator=random) < rate).nonzero().view(-1)
            old = weights[chosen]
            new, left = old.clone(), torch.arange(old.numel())
            for _ in range(_DRAWS):  # what rounding leaves alone is drawn again
                x = torch.rand(left.numel(), generator=random) * 2 - 1
                new[left] = (old[left].float() * (1 + 0.01 * x)).to(torch.bfloat16)
                left = left[new[left] == old[left]]
            weights[chosen] = new

    @property
    def baseline_digest(self) -> ContentDigest | None:
        """See ``Source``, as for all that follows."""
        return self._share.baseline_digest

    @property
    def baseline_digests(self) -> Mapping[str, ContentDigest] | None:  # noqa: D102
        return self._share.baseline_digests

    @property
    def candidate_digest(self) -> ContentDigest | None:  # noqa: D102
        return self._share.candidate_digest

    @property
    def compared(self) -> tuple[int, int]:  # noqa: D102
        return self._share.compared

    @property
    def changes_found(self) -> Mapping[str, ChangeCount]:  # noqa: D102
        return self._share.changes_found

    def changes(self, kind: Kind) -> Iterator[Change]:  # noqa: D102
        return self._share.changes(kind, lambda: self._rows.__getitem__)

    def nonfinite(self) -> Mapping[str, NonFinite]:  # noqa: D102
        return self._share.nonfinite(lambda: self._rows.__getitem__)

    def snapshot(self) -> None:  # noqa: D102
        self._share.snapshot(lambda: self._rows.__getitem__)

    def hold(self) -> None:  # noqa: D102
        self._share.hold()

    def fold(self, expected: ContentDigest) -> None:  # noqa: D102
        self._share.fold(expected, lambda: self._rows.__getitem__)


class Served(nn.Module):
    """As it is served: both matrices of a layer in one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.empty(2 * ROWS, WIDTH, dtype=torch.bfloat16), requires_grad=False) for _ in range(layers)
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The native loader: checkpoint tensors in, names of what was written out."""
        written = set()
        for name, weight in weights:
            _, number, half, _ = name.split(".")
            first = ROWS * HALVES.index(half)
            self.layers[int(number)].data[first : first + ROWS].copy_(weight)
            written.add(f"layers.{number}")
        return written
