"""Decode and apply: one shard in place, against the paper's way: scratch, scatter, dense XOR.

Ours decodes whole payloads, checks them (digest, bounds, every form, entry digests) and writes the changed elements
where they lie.  The paper's way, in torch, decompresses gaps and masks of a chunk, scatters into a zeroed scratch and
XORs it over the chunk; it checks nothing.  The floor is what is left when nothing is decoded or checked but zstd's
frames and the entry digests: these, and one pass over the places of what was decoded.

First the rate grows at a fixed size, then the size at a fixed number of changes: the cost must follow the changes.
Ways take turns in every round; with one core, in processor time.
"""

from collections.abc import Iterator

import numpy as np
import torch
import zstandard
from table import Row, gathered, parser, report
from workload import CHUNK_ELEMENTS, Race, payloads, peer_payload, relative, spec_of

from dcr.data_plane import codec
from dcr.data_plane.index_map import Box
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.numba_cpu import NumbaKernels
from dcr.data_plane.kernels.numba_streams import NumbaStreamKernels
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.payload import decode_payload, read_header

NAME = "apply"
RATES = (0.0001, 0.001, 0.01, 0.03, 0.05, 0.1)
AIM = 4.0
AIMED = (0.01, 0.03, 0.05)
GROWTH = (1, 2, 4, 8)
NOT_MEASURED = ("a GPU", "several boxes a tensor (bench/apply_vllm.py has real placements)")
NOTES = (
    "the floor holds for every design with this wire format on one core: where 'scratch + dense XOR / floor' is below",
    "the aim, the aim is out of reach.  At 3 and 5 % the changed elements lie in 62 and 80 % of all cache lines, so",
    "placing them alone moves nearly what the dense XOR moves",
    "above the floor it is the index of an entry, 8 bytes that are written once and read three times; decoding twice,",
    "to check and to place, in parts that stay in cache, would save some of it; more cores lower all of it alike",
    "with a fixed number of changes it is the items that grow with the size, one a chunk, and their bookkeeping",
)


class Frames:
    """The streams of payloads as they travel."""

    def __init__(self, made: list[bytes]) -> None:
        self._frames = []
        for data in made:
            at = len(data)
            for stream in reversed(read_header(data).streams):
                at -= stream.wire_bytes
                self._frames.append((stream, memoryview(data)[at : at + stream.wire_bytes]))

    def decompress(self) -> None:
        """All of them."""
        for stream, wire in self._frames:
            codec.decompress(stream.codec, wire, stream.raw_bytes)


class Shard:
    """A flat tensor that payloads are applied to in place."""

    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits.clone()
        box = PlacedBox(Box.of([bits.numel()], [1], [2], 0, self.bits.data_ptr()))
        self._table = BoxTable.of([PlacedTensor(bits.numel(), 2, (box,))])
        self._streams, self._boxes = NumbaStreamKernels(1), NumbaKernels(1)
        self._known = {spec.name: spec for spec in [spec_of(bits.numel())]}

    def apply(self, made: list[bytes]) -> None:
        """Decode, check and apply payloads."""
        for data in made:
            decoded = [self.decode(data)]
            self.check(decoded)
            self.place(decoded)

    def decode(self, data: bytes) -> Records:
        """One payload's entries."""
        items = decode_payload(data, known=self._known, kernels=self._streams)[1]
        return Records.of([0] * len(items), items)

    def place(self, decoded: list[Records]) -> None:
        """Apply what was decoded."""
        for records in decoded:
            self._boxes.place(self._table, records)

    def check(self, decoded: list[Records]) -> None:
        """What every apply asks first, whoever decoded."""
        for records in decoded:
            if self._boxes.first_disordered(self._table, records) is not None:
                raise RuntimeError("what was decoded is out of order")


class Scratch:
    """The paper's way."""

    def __init__(self, bits: torch.Tensor, entries: list[int]) -> None:
        self.bits = bits.clone()
        self._entries = entries
        self._scratch = torch.zeros(min(CHUNK_ELEMENTS, bits.numel()), dtype=torch.int16)

    def apply(self, made: list[bytes]) -> None:
        """Decompress, scatter and XOR chunk by chunk."""
        for chunk, (frame, entries) in enumerate(zip(made, self._entries, strict=True)):
            raw = zstandard.ZstdDecompressor().decompress(frame)
            gaps = np.frombuffer(raw, np.uint16, entries)
            masks = torch.from_numpy(np.frombuffer(raw, np.int16, entries, 2 * entries).copy())
            where = torch.from_numpy(np.cumsum(gaps.astype(np.int64) + 1) - 1)
            target = self.bits[chunk * CHUNK_ELEMENTS : (chunk + 1) * CHUNK_ELEMENTS]
            scratch = self._scratch[: target.numel()].zero_()
            scratch.index_copy_(0, where, masks)
            target.bitwise_xor_(scratch)


def race(rate: float, elements: int, rounds: tuple[int, int]) -> tuple[Race, int]:
    """Both ways on one update, checked, and how many elements it changes."""
    old, new = relative(rate, elements, noise="uniform", rows=False)
    changed = old != new
    entries = [int(part.sum()) for part in changed.split(CHUNK_ELEMENTS)]
    forth, back = (payloads(a, b, NumbaStreamKernels(1)) for a, b in ((old, new), (new, old)))
    masks = peer_payload(old, new)
    ours, theirs = Shard(old), Scratch(old, entries)
    ours.apply(forth)
    theirs.apply(masks)
    if not torch.equal(ours.bits, new) or (rate > 0.0005 and not torch.equal(theirs.bits, new)):
        raise RuntimeError(f"{rate}: applying gave other bits")  # below, some gaps do not fit into the peers' 16 bits
    steps = [back, forth]

    def apply() -> None:
        steps.reverse()
        ours.apply(steps[1])  # forth and back, so that every round starts from real bits

    frames, other = Frames(forth), Shard(old)
    decoded = [other.decode(data) for data in forth]
    ways = {
        "ours": apply,
        "scratch": lambda: theirs.apply(masks),
        "decode": lambda: [other.decode(data) for data in forth],
        "check": lambda: other.check(decoded),
        "floor: zstd": frames.decompress,
        "floor: entry digest": lambda: [codec.entry_digest(item) for records in decoded for item in records.items],
        "floor: place": lambda: other.place(decoded),
    }
    return Race(ways, warmups=rounds[0], rounds=rounds[1]), sum(entries)


def rows_of(elements: int, rounds: tuple[int, int]) -> Iterator[Row]:
    """Rows of all rates, and of all sizes."""
    for rate in RATES:
        ran, entries = race(rate, elements, rounds)
        claim = f"{100 * rate:g} % of {elements >> 20} Mi elements"
        aim = AIM if rate in AIMED else None
        yield Row(
            f"{claim}: scratch + dense XOR / ours",
            ran.ratio("scratch", "ours", processor=True),
            "x",
            paper=1.0,
            aim=aim,
        )
        seconds = ran.seconds("ours", processor=True)
        yield Row(f"{claim}: ours", 2 * elements / 1e9 / seconds, "GB/s of shard")
        yield Row(f"{claim}: ours, an entry", 1e9 * seconds / entries, "ns")
        parts = {name: ran.seconds(name, processor=True) for name in ran.processor if name not in {"ours", "scratch"}}
        for name, part in parts.items():
            yield Row(f"{claim}: an entry: {name}", 1e9 * part / entries, "ns")
        least = sum(part for name, part in parts.items() if name.startswith("floor"))
        yield Row(f"{claim}: floor / ours", least / seconds, "")
        scratch = ran.seconds("scratch", processor=True)
        yield Row(f"{claim}: scratch + dense XOR / floor", scratch / least, "x")
        yield Row(f"{claim}: scratch + dense XOR", 1e3 * scratch, "ms")
    changes = elements // 8 // 1000
    first = 0.0
    for growth in GROWTH:
        size = elements // 8 * growth
        ran, entries = race(changes / size, size, rounds)
        seconds = ran.seconds("ours", processor=True)
        first = first or seconds / entries
        claim = f"{changes} changes in {size >> 20} Mi elements"
        yield Row(f"{claim}: ours, an entry", 1e9 * seconds / entries, "ns")
        yield Row(f"{claim}: ours, times the smallest size's", seconds / entries / first, "x")
        yield Row(f"{claim}: scratch + dense XOR", 1e3 * ran.seconds("scratch", processor=True), "ms")


def main() -> None:
    """Measure by rate and by size."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--elements", type=int, default=1 << 26, help="elements of the shard (default: 2**26)")
    arguments.add_argument("--rounds", type=int, default=10, help="rounds that count (default: 10)")
    arguments.add_argument("--warmups", type=int, default=3, help="rounds before (default: 3)")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    rows = gathered(rows_of(asked.elements, (asked.warmups, asked.rounds)))
    report(NAME, rows, NOT_MEASURED, as_json=asked.json, notes=NOTES)


if __name__ == "__main__":
    main()
