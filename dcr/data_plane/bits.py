"""Stored bits: tensors seen as integers of their own width, so that NaN payloads and -0.0 are bits like any others."""

from collections.abc import Iterator

import torch

from dcr.protocol.errors import RefusedError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The dtypes of the Hugging Face safetensors format that have a whole number of bytes an element.
_NAMES = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
}
_BY_DTYPE = {dtype: name for name, dtype in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that travels on the wire for a dtype; RefusedError for one that does not travel."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise RefusedError(f"dtype {dtype} cannot be refitted; supported: {', '.join(sorted(_NAMES))}") from None


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name from the wire; RefusedError for an unknown name."""
    try:
        return _NAMES[name]
    except KeyError:
        raise RefusedError(f"unknown dtype name {name!r}; supported: {', '.join(sorted(_NAMES))}") from None


def width(dtype: torch.dtype) -> int:
    """Bytes an element: 1, 2, 4 or 8."""
    dtype_name(dtype)
    return dtype.itemsize


def bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype that holds the stored bits: uint8, int16, int32 or int64."""
    return _BITS[width(dtype)]


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage seen as integers of the same width; same shape, no copy."""
    return tensor.detach().view(bits_dtype(tensor.dtype))


def flat_part(stored: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) in logical (row-major) order, flat; whatever the strides, no others are copied."""
    if stored.is_contiguous():
        return stored.view(-1)[start:stop]
    row = stored.numel() // stored.shape[0]
    first, end = start // row, -(-stop // row)
    if end - first == 1:
        return flat_part(stored[first], start - first * row, stop - first * row)
    whole, beyond = -(-start // row), stop // row  # rows that are taken as a whole, and the one after them
    parts = [stored[whole:beyond].reshape(-1)]
    if first < whole:
        parts.insert(0, flat_part(stored[first], start - first * row, row))
    if beyond < end:
        parts.append(flat_part(stored[beyond], 0, stop - beyond * row))
    return torch.cat(parts)


def row_chunks(tensor: torch.Tensor, most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Elements of a tensor in order, flat, each chunk with its first position: whole rows where these are shorter."""
    row = 1
    for size in reversed(tensor.shape):
        if row * size > most:
            break
        row *= size
    step = most // row * row if row else most
    for start in range(0, tensor.numel(), step):
        yield start, flat_part(tensor, start, min(start + step, tensor.numel()))


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Stored bits zero-extended to int64 words of the same shape; 8-byte bits come back as they are, not copied."""
    return bits if bits.dtype == torch.int64 else bits.to(torch.int64) & ((1 << 8 * bits.itemsize) - 1)
