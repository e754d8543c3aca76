"""Resident memory of this process while something is done."""

import ctypes
import gc
from pathlib import Path

MEMORY = Path("/proc/self")


def status(field):
    (line,) = [line for line in (MEMORY / "status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def peak_of(work):
    """Bytes that some work needs above what is resident when it begins."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    (MEMORY / "clear_refs").write_text("5")  # resets the high-water mark
    work()
    return status("VmHWM") - before
