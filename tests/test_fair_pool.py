"""Threads that owners use by turns."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest

from waiting import HANG_SECONDS
from weft.fair_pool import FairPool


class Busy:
    """A pool of one thread that does nothing until it is let go; notes whose work is done in which order."""

    def __init__(self) -> None:
        self.pool, self._go_on, self.done = FairPool(1, "test"), threading.Event(), list[str]()
        self.first = self.pool.submit("first", self._go_on.wait)

    def add(self, owner: str) -> Future[None]:
        return self.pool.submit(owner, lambda: self.done.append(owner))

    def finish(self, *futures: Future[None]) -> list[str]:
        self._go_on.set()
        for future in futures:
            future.result(HANG_SECONDS)
        return self.done


def test_one_piece_of_work_waits_for_one_of_another_owner_not_for_all() -> None:
    busy = Busy()
    flood = [busy.add("flood") for _ in range(10)]
    other = [busy.add("other") for _ in range(2)]

    assert busy.finish(*flood, *other)[:5] == ["flood", "other", "flood", "other", "flood"]


def test_what_is_cancelled_before_it_has_begun_is_dropped() -> None:
    busy = Busy()
    dropped, kept = busy.add("dropped"), busy.add("kept")
    assert dropped.cancel()

    assert busy.finish(kept) == ["kept"]


def test_a_result_is_returned_and_an_error_raised() -> None:
    pool = FairPool(1, "test")

    assert pool.submit("one", lambda: 3).result(HANG_SECONDS) == 3
    with pytest.raises(ZeroDivisionError):
        pool.submit("one", lambda: 1 // 0).result(HANG_SECONDS)
    pool.close()


def test_whoever_waits_when_it_is_closed_is_told() -> None:
    busy = Busy()
    waiting = busy.add("waiting")
    busy.pool.close()
    busy.finish()

    with pytest.raises(CancelledError):
        waiting.result(HANG_SECONDS)
