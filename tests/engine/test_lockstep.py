"""Ranks of a sharded engine in step: what rank 0 says counts, and a rank that is elsewhere takes no part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque

import pytest

from waiting import HANG_SECONDS
from weft.engine.lockstep import (
    AgreedChannel,
    AgreedMasks,
    AgreedMessages,
    AgreedRows,
    AgreedTime,
    FollowingRank,
    LeadingRank,
    OutOfStep,
)
from weft.engine.ranks import BEAT_SECONDS, SILENT_SECONDS, RankWatch
from weft.ipc.messages import Cancel, Loading, Shutdown, ToEngine, ToFront


class Process:
    """A follower's process."""

    def __init__(self, returncode: int | None = None) -> None:
        self.returncode = returncode

    def poll(self) -> int | None:
        return self.returncode


class Inner:
    """The front's end."""

    def __init__(self) -> None:
        self.sent: list[ToFront] = []

    def receive(self, _: float) -> list[ToEngine]:
        return [Cancel((3, 4)), Shutdown()]

    def send(self, message: ToFront) -> None:
        self.sent.append(message)


def ranks() -> tuple[LeadingRank, FollowingRank]:
    sent: deque[bytes] = deque()
    return LeadingRank(sent.append), FollowingRank(sent.popleft)


def test_a_rank_reads_the_clock_of_rank_0() -> None:
    leader, follower = ranks()
    times = [leader.clock() for _ in range(3)]

    assert [follower.clock() for _ in range(3)] == times


def test_threads_that_compile_read_a_clock_of_their_own() -> None:
    leader, follower = ranks()
    read: list[float] = []
    thread = threading.Thread(target=lambda: read.append(leader.clock()))
    thread.start()
    thread.join()
    now = leader.clock()

    assert follower.clock() == now
    assert len(read) == 1


def test_all_ranks_receive_what_rank_0_receives_and_only_rank_0_is_heard() -> None:
    leader, follower = ranks()
    inner = Inner()
    received = AgreedChannel(leader, inner).receive(0.0)
    followed = AgreedChannel(follower, None)
    followed.send(Loading("x"))

    assert followed.receive(0.0) == received == [Cancel((3, 4)), Shutdown()]
    assert inner.sent == []


def test_what_masks_took_at_rank_0_counts_for_all() -> None:
    leader, follower = ranks()
    leader.agree(AgreedMasks({0: 0.5}))

    assert follower.agree(AgreedMasks({1: 0.25})).seconds == {0: 0.5}


def test_a_rank_that_would_compute_other_rows_takes_no_part() -> None:
    leader, follower = ranks()
    leader.agree(AgreedRows([(1, 20, 7), (2, 9, 3)]))

    with pytest.raises(OutOfStep, match=r"rank 0 computes \[\(1, 20, 7\), \(2, 9, 3\)\]"):
        follower.agree(AgreedRows([(2, 9, 3), (1, 20, 7)]))


def test_a_rank_that_does_something_else_takes_no_part() -> None:
    leader, follower = ranks()
    leader.agree(AgreedTime(1.0))

    with pytest.raises(OutOfStep, match="rank 0 has a AgreedTime where this rank has a AgreedMessages"):
        follower.agree(AgreedMessages([]))


def test_no_border_takes_a_lost_step_for_the_failure_of_a_row() -> None:
    assert not issubclass(OutOfStep, Exception)


def test_the_end_of_a_rank_is_the_end_of_all() -> None:
    watch = RankWatch([Process(), Process(-9)])  # type: ignore[list-item]

    assert watch.reason_to_end({1, 2}) == "rank 2 ended with status -9"


def test_a_silent_rank_is_the_end_of_all() -> None:
    watch = RankWatch([Process(), Process()])  # type: ignore[list-item]
    watch.reason_to_end({1, 2})
    reasons = [watch.reason_to_end({1}) for _ in range(int(SILENT_SECONDS / BEAT_SECONDS))]

    assert reasons[-1] == "rank 2 is silent for 3 s"
    assert set(reasons[:-1]) == {None}


def test_a_rank_that_still_loads_is_not_taken_for_silent() -> None:
    watch = RankWatch([Process()])  # type: ignore[list-item]

    assert {watch.reason_to_end(set()) for _ in range(1000)} == {None}


WATCH_A_STOPPED_RANK = """
import os, signal, subprocess, sys
from weft.engine.ranks import RankWatch

class HeardOnce:
    polls = 0
    def poll(self, wait):
        self.polls += 1
        return self.polls <= 2  # the first beat is read, then there are no others
    def recv(self):
        return bytes([1])

rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
os.kill(rank.pid, signal.SIGSTOP)
print(rank.pid, flush=True)
RankWatch([rank]).run(HeardOnce())
"""


def test_a_silent_rank_does_not_outlive_its_engine() -> None:
    """One that is stopped does not see that the engine is gone. It has the engine's output too, which is read to its end."""
    command = [sys.executable, "-c", WATCH_A_STOPPED_RANK]
    try:
        engine = subprocess.run(command, stdout=subprocess.PIPE, timeout=HANG_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        os.kill(int(late.output), signal.SIGKILL)
        raise

    assert engine.returncode == 1
