"""The content digest of a set of canonical elements (DESIGN D2): order-free, so that it does not depend on sharding.

Every element hashes to 128 bits, and the digest is the sum of these modulo 2**128.  The 128 bits are two 64-bit lanes
with their own keys and their own mixing function.  It finds accidents, whatever their shape; it is no defence against
somebody who chooses the weights, since sums of hashes can be made to collide on purpose.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dcr.data_plane.bits import bits_dtype, dtype_name, unsigned
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError

_MODULUS = 1 << 128
_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)

CHUNK_ELEMENTS = 1 << 15
"""Elements hashed at a time on a CPU: at most 8 int64 temporaries of this length, 2 MiB, are alive beside the input.

As many as torch gives to one thread, so that they stay in its cache."""
CHUNK_ELEMENTS_DEVICE = 1 << 20
"""The same on an accelerator, where each operation costs a launch: at most 64 MiB."""


@dataclass(frozen=True)
class ContentDigest:
    """A sum over elements, modulo 2**128; digests of disjoint sets add up to the digest of their union."""

    value: int = 0

    def __add__(self, other: "ContentDigest") -> "ContentDigest":
        return ContentDigest((self.value + other.value) % _MODULUS)

    def __sub__(self, other: "ContentDigest") -> "ContentDigest":
        return ContentDigest((self.value - other.value) % _MODULUS)

    def hex(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.value:032x}"

    @classmethod
    def from_hex(cls, text: str) -> "ContentDigest":
        """Read what ``hex`` wrote; ValueError on anything else."""
        if not _HEX.fullmatch(text):
            raise ValueError(f"a content digest is 32 lower-case hexadecimal digits, not {text!r}")
        return cls(int(text, 16))


def digest_keys(spec: TensorSpec) -> tuple[int, int, int, int]:
    """The four words k0, k1, k2, k3 that a tensor's elements are hashed with, as int64."""
    key = hashlib.sha256(f"{dtype_name(spec.dtype)}\0{spec.name}".encode()).digest()
    k0, k1, k2, k3 = (int.from_bytes(key[i : i + 8], "little", signed=True) for i in (0, 8, 16, 24))
    return k0, k1, k2, k3


def digest_elements(spec: TensorSpec, indices: torch.Tensor | None, bits: torch.Tensor) -> ContentDigest:
    """The digest of some elements of one canonical tensor.

    With the four 64-bit little-endian words k0, k1, k2, k3 of SHA-256 over ``dtype name, NUL, tensor name`` (UTF-8), an
    element adds ``high << 64 | low``, where ``low = splitmix(splitmix(index ^ k0) ^ k1 ^ bits)`` and
    ``high = murmur(murmur(index ^ k2) ^ k3 ^ bits)``; the bits are zero-extended to 64.

    Args:
        spec: the canonical tensor; its name and dtype go into the digest.
        indices: int64 flat indices, shape [n], or None for 0, 1, ..., n - 1.
        bits: stored bits at the indices, shape [n], of ``bits_dtype(spec.dtype)``, on the device of the indices.

    Raises:
        RefusedError: shapes or dtypes are others than these.
    """
    if bits.dtype != bits_dtype(spec.dtype) or bits.dim() != 1:
        raise RefusedError(
            f"content digest of {spec.name}: bits must be one-dimensional {bits_dtype(spec.dtype)}, "
            f"not {bits.dtype} of shape {tuple(bits.shape)}"
        )
    if indices is not None and (indices.dtype != torch.int64 or indices.shape != bits.shape):
        raise RefusedError(
            f"content digest of {spec.name}: indices must be int64 of shape {tuple(bits.shape)}, "
            f"not {indices.dtype} of shape {tuple(indices.shape)}"
        )
    k0, k1, k2, k3 = digest_keys(spec)
    chunk = CHUNK_ELEMENTS if bits.device.type == "cpu" else CHUNK_ELEMENTS_DEVICE
    total = 0
    for start in range(0, bits.numel(), chunk):
        word = unsigned(bits[start : start + chunk])
        if indices is None:
            index = torch.arange(start, start + word.numel(), dtype=torch.int64, device=bits.device)
        else:
            index = indices[start : start + chunk]
        low = _splitmix(_splitmix(index ^ k0).bitwise_xor_(k1).bitwise_xor_(word))
        high = _murmur(_murmur(index ^ k2).bitwise_xor_(k3).bitwise_xor_(word))
        # The low lane is summed in halves, so that its carries into the high lane are kept; the high lane may wrap.
        total += (int(high.sum()) << 64) + (int(_shift(low, 32).sum()) << 32) + int((low & 0xFFFFFFFF).sum())
    return ContentDigest(total % _MODULUS)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64 words; torch shifts the sign in."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mixer(first: int, factor: int, second: int, factor2: int, third: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A bijection of 64-bit words out of three xor-shifts and two odd factors; overwrites its argument."""
    factor, factor2 = (f - (1 << 64) for f in (factor, factor2))  # as int64: both have their top bit set

    def mix(x: torch.Tensor) -> torch.Tensor:
        x.bitwise_xor_(_shift(x, first)).mul_(factor)
        x.bitwise_xor_(_shift(x, second)).mul_(factor2)
        return x.bitwise_xor_(_shift(x, third))

    return mix


# The finalisers of SplitMix64 (Steele, Lea, Flood 2014) and of MurmurHash3 (Appleby).
_splitmix = _mixer(30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_murmur = _mixer(33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)
