"""The content digest against a slow reference on Python integers, written from the docstring and the DESIGN alone."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane import content_digest
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError

M64 = (1 << 64) - 1
BITS = {torch.bfloat16: torch.int16, torch.uint8: torch.uint8, torch.float32: torch.int32, torch.float64: torch.int64}
NAMES = {torch.bfloat16: "bfloat16", torch.uint8: "uint8", torch.float32: "float32", torch.float64: "float64"}


def splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def murmur(z: int) -> int:
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & M64
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & M64
    return z ^ (z >> 33)


def reference(name: str, dtype: torch.dtype, elements: list[tuple[int, int]]) -> int:
    """Elements are (flat index, unsigned bits)."""
    k = struct.unpack("<4Q", hashlib.sha256(NAMES[dtype].encode() + b"\0" + name.encode()).digest())
    total = 0
    for index, bits in elements:
        low = splitmix(splitmix(index ^ k[0]) ^ k[1] ^ bits)
        high = murmur(murmur(index ^ k[2]) ^ k[3] ^ bits)
        total += (high << 64) | low
    return total % (1 << 128)


def tensor(dtype: torch.dtype, words: list[int]) -> torch.Tensor:
    """Unsigned words as a tensor of stored bits."""
    width = dtype.itemsize
    raw = b"".join(w.to_bytes(width, "little") for w in words)
    return torch.frombuffer(bytearray(raw), dtype=BITS[dtype]) if raw else torch.empty(0, dtype=BITS[dtype])


@st.composite
def elements(draw):
    dtype = draw(st.sampled_from(list(BITS)))
    indices = draw(st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=40))
    top = (1 << 8 * dtype.itemsize) - 1
    words = draw(st.lists(st.integers(0, top), min_size=len(indices), max_size=len(indices)))
    return draw(st.text(max_size=8)), dtype, indices, words


@settings(max_examples=150, deadline=None)
@given(elements(), st.randoms(use_true_random=False))
def test_equals_the_reference_in_any_order_and_any_sharding(case, random):
    name, dtype, indices, words = case
    spec = TensorSpec(name, (2**63 - 1,), dtype)
    expected = reference(name, dtype, list(zip(indices, words, strict=True)))
    assert digest_elements(spec, torch.tensor(indices, dtype=torch.int64), tensor(dtype, words)).value == expected

    order = list(range(len(indices)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    total = ContentDigest()
    for part in (order[:cut], order[cut:]):
        i = torch.tensor([indices[k] for k in part], dtype=torch.int64)
        total += digest_elements(spec, i, tensor(dtype, [words[k] for k in part]))
    assert total.value == expected


def test_chunks_and_implicit_indices_equal_the_reference(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    n = 1000
    bits = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16, generator=generator)
    expected = reference("w", torch.bfloat16, [(i, int(b) & 0xFFFF) for i, b in enumerate(bits)])
    spec = TensorSpec("w", (n,), torch.bfloat16)
    for chunk in (1, 7, 999, 1000, 1001):
        monkeypatch.setattr(content_digest, "CHUNK_ELEMENTS", chunk)
        assert digest_elements(spec, None, bits).value == expected
        assert digest_elements(spec, torch.arange(n), bits).value == expected


def test_pinned_value():
    """Digests are kept in records: this number may change only together with the wire version."""
    bits = torch.tensor([0x3F01, 0x3F02, -32768], dtype=torch.int16)
    digest = digest_elements(TensorSpec("a", (3,), torch.bfloat16), None, bits)
    assert digest.hex() == "ac524f7d53b9c68c3086cce82f17b599"


@pytest.mark.parametrize("bit", range(16))
def test_every_bit_name_dtype_and_position_counts(bit):
    spec = TensorSpec("w", (64,), torch.bfloat16)
    bits = torch.arange(64, dtype=torch.int16)
    plain = digest_elements(spec, None, bits)
    flipped = bits.clone()
    flipped[5] ^= tensor(torch.bfloat16, [1 << bit])[0]
    assert digest_elements(spec, None, flipped) != plain
    swapped = bits.clone()
    swapped[[bit, bit + 1]] = bits[[bit + 1, bit]]
    assert digest_elements(spec, None, swapped) != plain
    assert digest_elements(TensorSpec("v", (64,), torch.bfloat16), None, bits) != plain
    assert digest_elements(TensorSpec("w", (64,), torch.float16), None, bits) != plain
    assert digest_elements(TensorSpec("w", (8, 8), torch.bfloat16), None, bits) == plain


def test_an_update_brings_the_digest_forward_from_the_changed_entries_alone():
    spec = TensorSpec("w", (500,), torch.float32)
    old = torch.arange(500, dtype=torch.int32) * 77777
    new = old.clone()
    where = torch.tensor([0, 3, 250, 499])
    new[where] ^= 0x40
    forward = digest_elements(spec, None, old) - digest_elements(spec, where, old[where])
    forward += digest_elements(spec, where, new[where])
    assert forward == digest_elements(spec, None, new)
    assert ContentDigest() - forward + forward == ContentDigest()


def test_half_of_the_output_bits_flip_with_one_input_bit():
    spec = TensorSpec("w", (2048,), torch.bfloat16)
    base = torch.zeros(1, dtype=torch.int16)
    flips = 0
    for i in range(2048):
        index = torch.tensor([i])
        a, b = (digest_elements(spec, index, base + d).value for d in (0, 1))
        flips += (a ^ b).bit_count()
    assert abs(flips / 2048 - 64) < 1  # one standard error of the mean is 0.125


def test_hex_round_trip_and_refusals():
    digest = ContentDigest(0xABC)
    assert ContentDigest.from_hex(digest.hex()) == digest
    for text in ("", "0" * 31, "0" * 33, "A" * 32, "0x" + "0" * 30, "0_" * 16, " " + "0" * 31, "\u0660" * 32):
        with pytest.raises(ValueError, match="32 lower-case"):
            ContentDigest.from_hex(text)


def test_wrong_dtypes_and_shapes_are_refused():
    spec = TensorSpec("layer.w", (4,), torch.bfloat16)
    good = torch.zeros(4, dtype=torch.int16)
    for indices, bits in (
        (None, torch.zeros(4, dtype=torch.int32)),
        (None, torch.zeros((2, 2), dtype=torch.int16)),
        (torch.zeros(3, dtype=torch.int64), good),
        (torch.zeros(4, dtype=torch.int32), good),
    ):
        with pytest.raises(RefusedError, match=r"layer\.w"):
            digest_elements(spec, indices, bits)
