"""Payloads of wire version 1 that never change: arithmetic, no generator, so that anybody can make them again.

``python -m tests.unit.data_plane.golden`` writes those that are missing from tests/golden/payloads, and no others.
"""

from pathlib import Path

import torch

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import encode_payload
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from tests.unit.data_plane.strategies import bits

FOLDER = Path(__file__).parents[3] / "tests/golden/payloads"
RELATIVE = Base(Kind.RELATIVE, 7, "00ff", "c")
DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)


def positions(step: int, count: int) -> list[int]:
    """Gaps from 0 to a few times ``step``, in an order that looks like none."""
    at, found = -1, []
    for k in range(count):
        at += 1 + (k * k * 7919 + k * 104_729) % (3 * step)
        found.append(at)
    return found


def values(operation: Operation, width: int, count: int) -> list[int]:
    """Small differences of both signs, some that take a byte more and a few that take a word."""
    top = 1 << 8 * width
    found = []
    for k in range(count):
        if operation is Operation.SET:
            found.append((0x3F80 + k * k * 31) * 0x9E3779B97F4A7C15 % top)
        else:
            size = 1 + (k * 13) % 5 + (k % 7 == 0) * (k % 90) + (k % 31 == 0) * k * 0x1003F
            found.append((size if k % 2 else -size) % top or 1)
    return found


def made(name, operation, dtype, indices, numel=None):
    spec = TensorSpec(name, (indices[-1] + 1 if numel is None else numel,), dtype)
    words = bits(dtype, values(operation, dtype.itemsize, len(indices)))
    return Item(spec, operation, torch.tensor(indices, dtype=torch.int64), words)


def identity(sequence: int) -> PayloadIdentity:
    return PayloadIdentity("golden", 8, 3, "rank-0", 1, sequence)


def cases() -> dict[str, tuple[PayloadIdentity, Base, list[Item]]]:
    """Name -> what ``encode_payload`` takes."""
    found = {}
    for operation in Operation:
        items = [
            made(f"{operation}.{dtype}", operation, dtype, positions(9 * (k + 1), 500 + k))
            for k, dtype in enumerate(DTYPES)
        ]
        found[f"{operation}_every_dtype"] = (identity(0), RELATIVE, items)
    steps = {"codec_0": 100, "codec_1": 800, "codec_2": 15_000, "codec_3": 500_000, "long_gaps": 1 << 26}
    found["every_codec"] = (
        identity(1),
        RELATIVE,
        [made(name, Operation.ADD, torch.bfloat16, positions(step, 301)) for name, step in steps.items()],
    )
    far = [0, 1, 1 << 32, (1 << 32) + 1016, 1 << 40, (1 << 62) - 1]
    found["past_32_bits"] = (
        identity(2),
        RELATIVE,
        [
            made("far", Operation.ADD, torch.float32, far, 1 << 62),
            made("edge", Operation.XOR, torch.int64, far[:2], 1 << 32),
        ],
    )
    whole = list(range(70_000))
    found["dense"] = (
        identity(3),
        Base(Kind.DENSE, 7, "", "c"),
        [made("whole", Operation.SET, torch.bfloat16, whole), made("scalar", Operation.SET, torch.float32, [0])],
    )
    found["empty"] = (identity(4), Base(Kind.RESTORE, 7, "00ff", ""), [])
    return found


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        path = FOLDER / f"{name}.dcrp"
        if not path.exists():
            path.write_bytes(encode_payload(*case))


if __name__ == "__main__":
    main()
