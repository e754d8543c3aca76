"""A file of many traces: one ITF document a line, all of them compressed as one Zstandard frame (`.itf.jsonl.zst`).

Successive states repeat one another and so do traces, hence one frame: a hundred traces take a few kilobytes.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import zstandard

from dcr.modelcheck.itf import ITF_BYTES_MAX, ItfError, dump_trace, load_trace
from dcr.modelcheck.trace import Trace
from dcr.modelcheck.types import Type

_LEVEL = 19
_WINDOW_LOG = 24
_HEADER_BYTES_MAX = 18


def write_traces(path: Path, traces: Iterable[Trace], types: Mapping[str, Type], source: str) -> int:
    """Write traces to a file; the same traces give the same bytes.

    Returns:
        The file's size in bytes.

    Raises:
        ItfError: A value that is not of its variable's type; nothing was written.
    """
    lines = b"".join(dump_trace(trace, types, source) + b"\n" for trace in traces)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_WINDOW_LOG, enable_ldm=True, write_checksum=True
    )
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(lines)
    path.write_bytes(packed)
    return len(packed)


def read_traces(path: Path) -> Iterator[Trace]:
    """Read a file's traces one after the other; only one is held at a time.

    Raises:
        ItfError: Not a file that `write_traces` wrote whole, or a trace that is none.
    """
    try:
        packed = path.open("rb")
    except OSError as error:
        raise ItfError(f"{path}: {error.strerror}; name a file of traces") from None
    with packed:
        try:
            expected = zstandard.get_frame_parameters(packed.read(_HEADER_BYTES_MAX)).content_size
            packed.seek(0)
            reader = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).stream_reader(packed)
            lines = io.BufferedReader(reader, buffer_size=1 << 20)
            while line := lines.readline(ITF_BYTES_MAX):
                expected -= len(line)
                try:
                    trace = load_trace(line)
                except ItfError as error:
                    raise ItfError(f"{path}: {error}") from None
                yield trace
        except zstandard.ZstdError as error:
            raise ItfError(f"{path}: not a Zstandard frame of traces ({error}); make the file again") from None
    if expected:
        raise ItfError(f"{path}: {expected} bytes of traces are missing at its end; make the file again")
