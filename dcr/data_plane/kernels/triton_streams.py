"""Stream kernels for CUDA, by Triton: an item is found, hashed and written where the shard is; reading is the host's.

What leaves the device is the finished streams, in one copy an item, and the entries, for their digest.  Triton is
imported with this module, and only when there are tensors on a device (``stream_choice``).
"""

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
import triton

from dcr.data_plane.codec import Bytes, ItemBytes, entry_digest, long_gap_bytes, split
from dcr.data_plane.content_digest import ContentDigest, digest_keys
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels import triton_items, triton_shards
from dcr.data_plane.kernels.stream_kernels import A, B, Difference, StreamKernels
from dcr.data_plane.staging import host_room, on, to_device, to_host
from dcr.data_plane.streams import encode_streams, low_count
from dcr.protocol.errors import DcrError

_SHARD_BLOCK = 4096
_ENTRY_BLOCK = 1024
_LAYOUTS = 4
_NUMEL_MAX = (1 << 63) - 1
_ACTIONS = {Operation.SET: triton_items.SET, Operation.XOR: triton_items.XOR, Operation.ADD: triton_items.ADD}


class TritonStreamKernels:
    """Stream kernels for tensors on one device.

    Usable from several threads; what they launch goes one after the other.

    Args:
        device: where tensors lie.
        host: the backend of the host, which decodes, and whose threads compress.
    """

    def __init__(self, device: torch.device, host: StreamKernels) -> None:
        self._device = device
        self._host = host
        self._launching = threading.Lock()

    def differences(self, old: torch.Tensor, new: torch.Tensor, start: int = 0) -> Difference:
        """See :meth:`StreamKernels.differences`; positions are counted from ``start``."""
        old, new = (_signed(bits.detach().contiguous()) for bits in (old.to(self._device), new))
        elements = new.numel()
        blocks = triton.cdiv(elements, _SHARD_BLOCK)
        found = 0
        with self._launching, on(self._device):
            ends = new.new_empty(blocks, dtype=torch.int64)
            if blocks:
                triton_shards.count_differences[(blocks,)](old, new, ends, elements, BLOCK=_SHARD_BLOCK)
                ends = ends.cumsum(0)
                found = int(ends[-1])
            positions = new.new_empty(found, dtype=torch.int64)
            before, after = new.new_empty(found), new.new_empty(found)
            if found:
                out = (positions, before, after)
                triton_shards.compact_differences[(blocks,)](old, new, ends, *out, start, elements, BLOCK=_SHARD_BLOCK)
        return Difference(positions, *(_as_bits(bits) for bits in (before, after)))

    def digest(self, spec: TensorSpec, indices: torch.Tensor, bits: torch.Tensor) -> ContentDigest:
        """See :meth:`StreamKernels.digest`."""
        entries, blocks = indices.numel(), triton.cdiv(indices.numel(), _ENTRY_BLOCK)
        if not blocks:
            return ContentDigest()
        keys = host_room(4, torch.int64, self._device)
        keys.numpy()[:] = digest_keys(spec)
        with self._launching, on(self._device):
            sums = indices.new_empty(3 * blocks)
            triton_shards.digest_entries[(blocks,)](
                indices.contiguous(),
                _signed(bits.contiguous()),
                to_device(keys, self._device),
                sums,
                entries,
                WIDTH=bits.itemsize,
                BLOCK=_ENTRY_BLOCK,
            )
            sums = to_host(sums)
        return digest_of(sums.numpy().view(np.uint64).reshape(-1, 3), np.zeros(1, np.int64))[0]

    def encode(self, item: Item) -> tuple[ItemBytes, bytes]:
        """See :meth:`StreamKernels.encode`; the digest is the host's."""
        if not item.entries:
            return ItemBytes(0, (np.empty(0, np.uint8),) * 13), entry_digest(item)
        with self._launching, on(self._device):
            written = _encode(item)
        if written is None:
            encode_streams(item, 0)  # says why
            raise DcrError(f"the Triton kernels refuse item {item.spec.name}, the reference does not: report this")
        return written, entry_digest(item)

    def decode(self, spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes) -> tuple[Item, bytes]:
        """See :meth:`StreamKernels.decode`; what comes from outside comes to the host, and is checked there."""
        return self._host.decode(spec, operation, entries, written)

    def each(self, work: Callable[[A], B], things: Sequence[A], sizes: Sequence[int]) -> list[B]:
        """See :meth:`StreamKernels.each`; on the host's threads, which launch on the caller's stream."""
        if self._device.type != "cuda":
            return self._host.each(work, things, sizes)
        stream = torch.cuda.current_stream(self._device)

        def on_stream(thing: A) -> B:
            with torch.cuda.stream(stream):
                return work(thing)

        return self._host.each(on_stream, things, sizes)


def digest_of(sums: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]", firsts: np.ndarray) -> list[ContentDigest]:
    """Content digests of groups of blocks.

    Args:
        sums: uint64, shape [blocks, 3 or more]: high lanes, upper and lower halves of low lanes.
        firsts: int64, the first block of every group.
    """
    # Halves again, so that no sum overflows, however many blocks there are; high lanes may.
    high = np.add.reduceat(sums[:, 0], firsts)
    lanes = [np.add.reduceat(part, firsts) for k in (1, 2) for part in (sums[:, k] >> 32, sums[:, k] & 0xFFFFFFFF)]
    totals = zip(high.tolist(), *(lane.tolist() for lane in lanes), strict=True)
    return [
        ContentDigest(((h << 64) + (u1 << 64) + (u0 << 32) + (l1 << 32) + l0) % (1 << 128))
        for h, u1, u0, l1, l0 in totals
    ]


def _encode(item: Item) -> ItemBytes | None:
    """The streams of an item that has entries; None if it may not be written."""
    indices, values = item.indices.contiguous(), _signed(item.values.contiguous())
    entries, width, action = item.entries, values.itemsize, _ACTIONS[item.operation]
    blocks = triton.cdiv(entries, _ENTRY_BLOCK)
    forms = {"ACTION": action, "WIDTH": width, "BLOCK": _ENTRY_BLOCK}
    counts = indices.new_empty(triton_items.ROWS * blocks)
    triton_items.survey[(blocks,)](indices, values, counts, entries, min(item.spec.numel, _NUMEL_MAX), blocks, **forms)
    ends = counts.view(triton_items.ROWS, blocks).cumsum(1)
    totals: list[int] = ends[:, -1].tolist()
    if totals[triton_items.ROW_DISORDERED] or totals[triton_items.ROW_ZERO]:
        return None
    layout = low_count(totals[triton_items.ROW_FAR : triton_items.ROW_GAP_BYTES], entries)
    pairs, long_bytes = (entries + 1) // 2, long_gap_bytes(item.spec)
    words = entries if action == triton_items.SET else totals[triton_items.ROW_WORDS]
    # As STREAMS has them, but for the long gaps: these come first, where the memory is aligned to them.
    sizes = (
        totals[triton_items.ROW_LONG + layout] * long_bytes,
        layout * pairs,
        totals[triton_items.ROW_GAP_BYTES + layout],
        0 if action == triton_items.SET else pairs,
        totals[triton_items.ROW_ESCAPES],
        *(words,) * width,
    )
    low_at, gaps_at, nibbles_at, escapes_at, planes_at, *_ = accumulate(sizes)
    out = indices.new_empty(sum(sizes), dtype=torch.uint8)
    at = (low_at, gaps_at, nibbles_at, escapes_at, planes_at)
    triton_items.write[(blocks,)](
        indices, values, ends, out, entries, blocks, words, *at, LOW=layout, LONG_BYTES=long_bytes, **forms
    )
    host: Bytes = to_host(out).numpy()
    long_gaps, low, *rest = split(host, sizes)
    unused = (np.empty(0, np.uint8),) * (8 - width)
    gaps, nibbles, escapes, *planes = rest
    return ItemBytes(layout, (low, gaps, long_gaps, nibbles, escapes, *planes, *unused))


def _signed(bits: torch.Tensor) -> torch.Tensor:
    """As the kernels load them."""
    return bits.view(torch.int8) if bits.dtype == torch.uint8 else bits


def _as_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.uint8) if bits.dtype == torch.int8 else bits
