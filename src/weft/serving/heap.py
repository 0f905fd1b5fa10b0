"""Gives memory that large requests have left behind back to the system: the C library keeps it in its heaps otherwise."""

import asyncio
import ctypes
import sys
from pathlib import Path

LOOK_SECONDS = 5.0
GROWN_BYTES = 32 << 20  # since memory was given back last
STATM = Path("/proc/self/statm")


async def keep_heap_small() -> None:
    """Look now and then whether this process has grown, and give back what it does not use; until cancelled. Linux only."""
    if sys.platform != "linux":
        return
    smallest = resident_bytes()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if resident_bytes() > smallest + GROWN_BYTES:
            await asyncio.to_thread(trim_heap)
            smallest = resident_bytes()


def resident_bytes() -> int:
    """Return how much memory this process has, in bytes."""
    return int(STATM.read_text().split()[1]) * 4096


def trim_heap() -> None:
    """Let the C library give back its free memory; nothing happens where it can not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
