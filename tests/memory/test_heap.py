"""When the heap is trimmed. How much that gives back is the C library's affair; `make redteam` measures it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from driver import Clock
from weft.memory.heap import FIRST_PAUSE_SECONDS, GROWN_BYTES, LONGEST_PAUSE_SECONDS, HeapKeeper


class Process:
    """A process that has so much memory, of which so much is free."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.used, self.free, self.num_trims = 100 << 20, 0, 0
        self.keeper = HeapKeeper(lambda: self.used + self.free, self.trim, self.clock)

    def trim(self) -> None:
        self.free = 0
        self.num_trims += 1

    def look(self, seconds: float) -> None:
        """Look once a second for so long."""
        for _ in range(round(seconds)):
            self.clock.now += 1
            self.keeper.look()


def test_what_large_requests_left_behind_is_given_back() -> None:
    process = Process()
    process.free = 2 * GROWN_BYTES
    process.look(1)

    assert process.free == 0


def test_it_is_given_back_too_if_it_was_still_used_when_the_heap_was_trimmed_first() -> None:
    process = Process()
    process.used += 2 * GROWN_BYTES
    process.look(1)
    process.used -= 2 * GROWN_BYTES
    process.free = 2 * GROWN_BYTES
    process.look(2 * FIRST_PAUSE_SECONDS)

    assert process.free == 0


def test_a_process_that_needs_more_is_seldom_trimmed() -> None:
    process = Process()
    process.used += 2 * GROWN_BYTES
    process.look(1000)

    assert process.num_trims <= 5 + 1000 / LONGEST_PAUSE_SECONDS


def test_one_that_has_not_grown_never_is() -> None:
    process = Process()
    process.look(1000)

    assert process.num_trims == 0


FREES = """
from weft.memory.heap import bound_heap, resident_bytes

bound_heap()
for _ in range(3):  # by default the second one would stay in the heap, below a small one that is kept
    large = bytearray(b"x") * (24 << 20)
    before = resident_bytes()
    kept = bytearray(b"x") * 1000
    del large
    assert resident_bytes() < before - (20 << 20)
    del kept
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads what Linux tells of a process")
def test_of_a_bounded_heap_large_blocks_are_given_back_when_they_are_freed() -> None:
    subprocess.run([sys.executable, "-c", FREES], check=True)  # in a process in which nothing else allocates


CYCLES = """
from weft.memory.heap import collect_and_trim, resident_bytes

def refuse():
    body = bytearray(b"x") * (24 << 20)
    try:
        raise ValueError("too long")
    except ValueError as error:
        kept = error  # whose traceback has this frame

refuse()
before = resident_bytes()
collect_and_trim()
assert resident_bytes() < before - (20 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads what Linux tells of a process")
def test_what_errors_and_their_frames_hold_is_given_back() -> None:
    subprocess.run([sys.executable, "-c", CYCLES], check=True)
