"""Gives memory that large requests have left behind back to the system: the C library keeps it in its heaps otherwise.

Imports no mlx: the front, its children and engines use it. On systems other than Linux nothing happens.
"""

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

GROWN_BYTES = 16 << 20  # above the least that this process had: worth a look
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 10.0  # between two trims, of milliseconds: longer while they do not help
PAGE_BYTES = 4096
LARGE_BYTES = 1 << 20
NUM_HEAPS = 2
STATM = Path("/proc/self/statm")
# Of mallopt in <malloc.h>.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


class HeapKeeper:
    """Trims the heap when it has grown, and again, ever more rarely, as long as it stays grown."""

    def __init__(
        self,
        resident: Callable[[], int] | None = None,
        trim: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resident = resident or resident_bytes
        self._trim = trim or trim_heap
        self._clock = clock
        self._least = self._resident()
        self._pause = FIRST_PAUSE_SECONDS
        self._due = clock()

    def look(self) -> None:
        """Give back what is not used, if there may be much of it; takes microseconds if not, and some milliseconds if so."""
        if self._clock() < self._due or not self._is_grown():
            return
        self._trim()
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS) if self._is_grown() else FIRST_PAUSE_SECONDS
        self._due = self._clock() + self._pause

    def _is_grown(self) -> bool:
        now = self._resident()
        self._least = min(self._least, now)
        return now > self._least + GROWN_BYTES


def bound_heap() -> None:
    """Let few heaps serve all threads, and give large blocks back as soon as they are freed; call it before threads start.

    By default every thread may have a heap of its own, and blocks of up to 32 MiB stay in them once one was freed.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune is not None:
        tune(M_ARENA_MAX, NUM_HEAPS)
        tune(M_MMAP_THRESHOLD, LARGE_BYTES)


def resident_bytes() -> int:
    """Return how much memory this process has, in bytes; 0 where the system does not say."""
    return int(STATM.read_text().split()[1]) * PAGE_BYTES if sys.platform == "linux" else 0


def collect_and_trim() -> None:
    """Free what only cycles hold, and give it back: a refused request's error, its frames and so its body are such a cycle."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Let the C library give back its free memory; nothing happens where it can not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
