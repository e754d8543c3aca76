"""What the Triton kernels have in common: codes of words, and the hash of an element; all of it inlined.

Integers are int64 unless they are words.  A word is signed where it is loaded, as torch has it, and uint64 after that.
"""

import triton
import triton.language as tl


@triton.jit
def widened(word, WIDTH: tl.constexpr):
    """A signed word of ``WIDTH`` bytes, zero-extended to uint64."""
    wide = word.to(tl.int64)
    if WIDTH < 8:
        wide &= (1 << (8 * WIDTH)) - 1
    return wide.to(tl.uint64, bitcast=True)


@triton.jit
def code_of(word, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """The code of a value of ``add`` or ``xor``; that of a zero means nothing (docs/wire-format.md)."""
    if ADDS:
        signed = word.to(tl.int64)
        code = ((signed << 1) ^ (signed >> 63)).to(tl.uint64, bitcast=True)
    else:
        code = widened(word, WIDTH)
    return code - 1


@triton.jit
def _splitmix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _murmur(x):
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def hashed(keys, index, word, inside):
    """The lanes of elements, as :func:`dcr.data_plane.content_digest.digest_elements` defines them; 0 outside.

    Args:
        keys: pointer to the four words of a tensor, int64.
        index: int64.
        word: uint64.
        inside: which elements there are.

    Returns:
        High lane, low lane; uint64.
    """
    k0 = tl.load(keys).to(tl.uint64, bitcast=True)
    k1 = tl.load(keys + 1).to(tl.uint64, bitcast=True)
    k2 = tl.load(keys + 2).to(tl.uint64, bitcast=True)
    k3 = tl.load(keys + 3).to(tl.uint64, bitcast=True)
    number = index.to(tl.uint64, bitcast=True)
    low = _splitmix(_splitmix(number ^ k0) ^ k1 ^ word)
    high = _murmur(_murmur(number ^ k2) ^ k3 ^ word)
    nothing = tl.zeros_like(word)
    return tl.where(inside, high, nothing), tl.where(inside, low, nothing)
