"""The paper's Table 2: sizes of changed words after zstd level 1, as overwrites, as XOR and as differences.

20 million standard-normal BF16 values, FP32 noise of size a, rounded back.  Overwrites and XOR words are one
little-endian stream in input order, as in the paper; differences, and our own XOR and ``set``, are the value streams of
wire version 1.  Sizes are exact.
"""

from collections.abc import Iterator

import numpy as np
import torch
from table import Row, parser, report
from workload import BASE, IDENTITY, entropy, items, squeezed, table2, words

from dcr.data_plane.codec import STREAMS
from dcr.data_plane.item import Operation
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.payload import encode_payload, read_header

NAME = "table2"
NOISES = (1e-4, 1e-3, 1e-2)
PAPER_OVERWRITE = {1e-4: 0.74, 1e-3: 7.02, 1e-2: 25.70}
PAPER_XOR = {1e-4: 0.33, 1e-3: 3.23, 1e-2: 14.93}
PAPER_RATIO = {1e-4: 2.21, 1e-3: 2.18, 1e-2: 1.72}
AIMS = {1e-4: 3.9, 1e-3: 3.8, 1e-2: 2.6}
VALUES_FROM = STREAMS.index("nibbles")


def value_bytes(old: torch.Tensor, new: torch.Tensor, operation: Operation) -> int:
    """Bytes on the wire of the value streams of one payload with all changes."""
    kernels = stream_kernels()
    header = read_header(encode_payload(IDENTITY, BASE, list(items(old, new, kernels, operation)), kernels))
    return sum(stream.wire_bytes for stream in header.streams if stream.stream >= VALUES_FROM)


def rows_of(noise: float, elements: int) -> Iterator[Row]:
    """Rows of one size of noise."""
    old, new = table2(noise, elements)
    changed = old != new
    before, after = words(old[changed]), words(new[changed])
    scale = 20_000_000 / elements / 1e6
    overwrite, xor = len(squeezed(after)), len(squeezed(before ^ after))
    ours = {operation: value_bytes(old, new, operation) for operation in Operation}
    claim = f"a = {noise:g}, {100 * changed.float().mean():.3g} % changed"
    yield Row(f"{claim}: overwrites, the paper's layout", overwrite * scale, "MB", PAPER_OVERWRITE[noise])
    yield Row(f"{claim}: XOR, the paper's layout", xor * scale, "MB", PAPER_XOR[noise])
    yield Row(f"{claim}: set", ours[Operation.SET] * scale, "MB", PAPER_OVERWRITE[noise])
    yield Row(f"{claim}: xor", ours[Operation.XOR] * scale, "MB", PAPER_XOR[noise])
    yield Row(f"{claim}: add", ours[Operation.ADD] * scale, "MB")
    for name, symbols in (("overwrite", after), ("XOR", before ^ after), ("difference", after - before)):
        bound = entropy(np.asarray(symbols)) / 8 * after.size
        yield Row(f"{claim}: order-0 bound of the {name}", bound * scale, "MB")
    yield Row(f"{claim}: XOR against overwrites", overwrite / xor, "x", PAPER_RATIO[noise])
    yield Row(
        f"{claim}: add against overwrites", overwrite / ours[Operation.ADD], "x", PAPER_RATIO[noise], aim=AIMS[noise]
    )


def main() -> None:
    """Measure the three sizes of noise."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--elements", type=int, default=20_000_000, help="elements (default: 20 million)")
    asked = arguments.parse_args()
    rows = [row for noise in NOISES for row in rows_of(noise, asked.elements)]
    report(NAME, rows, ("positions, which Table 2 leaves out", "other seeds"), as_json=asked.json)


if __name__ == "__main__":
    main()
