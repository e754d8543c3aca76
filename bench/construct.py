"""Construction: from two versions of a BF16 shard to payloads, against reading both and against the peers' pipeline.

The peers' pipeline in torch: ne, nonzero, gather, u16 gaps, XOR, one zstd-1 frame a chunk.  Ours is what an owner runs
between its baseline and the store: compare and compact, items, gaps and values, zstd-1, entry and payload digests; the
content digest is a row of its own, since peers have none.  Reading both arrays once is a compiled loop that does
nothing else; the floor is that and what the wire format asks for whoever writes it: zstd over the streams, and the
digest over all entries.  Ways take turns in every round; with one core in processor time, with all by the clock.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba as nb
import numpy as np
import torch
from table import Row, gathered, parser, report
from workload import BUCKET_BYTES, CHUNK_ELEMENTS, Race, cores, items, payloads, peer_payload, relative

from dcr.data_plane import codec
from dcr.data_plane.bucket import pack
from dcr.data_plane.item import Item
from dcr.data_plane.kernels.numba_streams import NumbaStreamKernels

NAME = "construct"
RATES = (0.01, 0.03, 0.05)
AIM_PIPELINE = 7.0
AIM_READ = {0.01: 0.65, 0.03: 0.6, 0.05: 0.5}
NOT_MEASURED = (
    "projection from the training layout to the checkpoint's",
    "a GPU",
    "the store, which takes payloads while the next ones are made",
)
NOTES = (
    "beyond reading both arrays an entry costs mostly its index: 8 bytes that are written, read for the gaps and",
    "read for the digest, mostly from outside the second-level cache, and zstd: 1.5 bytes at 0.9 GB/s",
    "encoding a part of a chunk while its indices are in cache would save a write and a read;",
    "it needs an encoder that goes on where it stopped, through projection and buckets, instead of whole items",
)


def streams_of(buckets: list[list[Item]], kernels: NumbaStreamKernels) -> list[codec.Bytes]:
    """The streams of all payloads before compression."""
    columns = (zip(*(kernels.encode(item)[0].parts for item in bucket), strict=True) for bucket in buckets)
    return [np.concatenate(column) for bucket in columns for column in bucket]


@nb.njit(nogil=True)
def touch(a: Any, b: Any) -> Any:
    """Read two arrays of uint64 and nothing else."""
    total = np.uint64(0)
    for i in range(np.uint64(a.size)):
        total |= a[i] ^ b[i]
    return total


def read_both(old: torch.Tensor, new: torch.Tensor, pool: ThreadPoolExecutor) -> None:
    """Read both arrays once, chunk by chunk, on a pool's threads."""
    a, b = (tensor.numpy().view(np.uint64) for tensor in (old, new))
    step = CHUNK_ELEMENTS // 4
    list(pool.map(lambda start: touch(a[start : start + step], b[start : start + step]), range(0, a.size, step)))


def rows_of(rate: float, threads: int, elements: int, rounds: tuple[int, int]) -> Iterator[Row]:
    """Rows of one rate and number of threads."""
    old, new = relative(rate, elements, noise="uniform", rows=False)
    kernels, pool = NumbaStreamKernels(threads), ThreadPoolExecutor(threads)
    torch.set_num_threads(threads)
    found = list(items(old, new, kernels))
    buckets = list(pack(iter(found), BUCKET_BYTES))
    parts, raws = [item for bucket in buckets for item in bucket], streams_of(buckets, kernels)
    entries = sum(item.entries for item in found)

    def construct() -> None:
        for data in payloads(old, new, kernels):
            hashlib.sha256(data).hexdigest()

    def detect() -> None:
        for _ in items(old, new, kernels):
            pass

    def content() -> None:
        for item in found:
            kernels.digest(item.spec, item.indices, item.values)
            kernels.digest(item.spec, item.indices, item.values)

    ways = {
        "read": lambda: read_both(old, new, pool),
        "peers": lambda: peer_payload(old, new),
        "detect": detect,
        "bytes": lambda: payloads(old, new, kernels),
        "construct": construct,
        "content": content,
        "encode": lambda: [kernels.encode(item) for item in parts],
        "digest": lambda: [codec.entry_digest(item) for item in parts],
        "zstd": lambda: [codec.compress(raw) for raw in raws],
    }
    race = Race(ways, warmups=rounds[0], rounds=rounds[1])
    processor = threads == 1
    claim = f"{100 * rate:g} % changed, {threads} {'core' if threads == 1 else 'cores'}"
    gigabytes = 2 * elements / 1e9
    aimed = threads == 1
    yield Row(
        f"{claim}: peers' pipeline / ours",
        race.ratio("peers", "bytes", processor=processor),
        "x",
        peer=1.0,
        aim=AIM_PIPELINE if aimed else None,
    )
    yield Row(
        f"{claim}: the same with the payload's SHA-256", race.ratio("peers", "construct", processor=processor), "x"
    )
    yield Row(
        f"{claim}: reading both arrays / ours",
        race.ratio("read", "bytes", processor=processor),
        "",
        aim=AIM_READ[rate] if aimed else None,
    )
    yield Row(
        f"{claim}: reading both arrays / compare and compact", race.ratio("read", "detect", processor=processor), ""
    )
    for name, what in (
        ("read", "reading both arrays"),
        ("detect", "compare and compact"),
        ("bytes", "ours"),
        ("construct", "ours with SHA-256"),
        ("peers", "peers' pipeline"),
        ("content", "content digests of old and new entries alone"),
    ):
        yield Row(f"{claim}: {what}", gigabytes / race.seconds(name, processor=processor), "GB/s of shard")
    if threads == 1:
        yield from split(claim, race, entries)


def split(claim: str, race: Race, entries: int) -> Iterator[Row]:
    """Where the time goes, an entry, and how far it is to the floor."""
    names = ("bytes", "read", "detect", "encode", "digest", "zstd")
    whole, read, detect, encode, digest, zstd = (race.seconds(name, processor=True) for name in names)
    yield Row(f"{claim}: floor / ours", (read + zstd + digest) / whole, "")
    for what, seconds in (
        ("all", whole),
        ("reading both arrays", read),
        ("compare and compact beyond reading", detect - read),
        ("gaps and codes", encode - digest),
        ("entry digest", digest),
        ("zstd", zstd),
        ("buckets, joining, header, and what falls out of cache between the stages", whole - detect - encode - zstd),
    ):
        yield Row(f"{claim}: an entry: {what}", 1e9 * seconds / entries, "ns")


def main() -> None:
    """Measure every rate with one core and with all."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--elements", type=int, default=1 << 26, help="elements of the shard (default: 2**26)")
    arguments.add_argument("--rounds", type=int, default=10, help="rounds that count (default: 10)")
    arguments.add_argument("--warmups", type=int, default=5, help="rounds before (default: 5)")
    asked = arguments.parse_args()
    rows = gathered(
        row
        for rate in RATES
        for threads in dict.fromkeys((1, cores()))
        for row in rows_of(rate, threads, asked.elements, (asked.warmups, asked.rounds))
    )
    report(NAME, rows, NOT_MEASURED, as_json=asked.json, notes=NOTES)


if __name__ == "__main__":
    main()
