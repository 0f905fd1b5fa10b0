"""The number of replicas for any course of loads: within its range, one step at a time, in no hurry to shrink, and settled."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weft.serving.autoscaler import (
    FULL_SHARE,
    LESS_SECONDS,
    MAX_QUEUE_SECONDS,
    MORE_SECONDS,
    USE_SECONDS,
    Autoscaler,
    PoolLoad,
)

RANGES = st.tuples(st.integers(1, 5), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair)))
LOADS = st.builds(PoolLoad, st.floats(0, 200), st.floats(0, 12))
COURSES = st.lists(st.tuples(st.floats(0.1, 400), LOADS), max_size=60)  # seconds since the last look, and what is seen


def decisions(autoscaler: Autoscaler, course: list[tuple[float, PoolLoad]]) -> list[tuple[float, int]]:
    """Each decision with its moment, the first one before any look."""
    now, found = 0.0, [(0.0, autoscaler.target)]
    for seconds, load in course:
        now += seconds
        found.append((now, autoscaler.decide(load, now)))
    return found


def steps(found: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The changes, with their moments."""
    return [(moment, after - before) for (_, before), (moment, after) in itertools.pairwise(found) if after != before]


@given(RANGES, COURSES)
def test_the_number_stays_in_its_range_and_changes_by_one(bounds: tuple[int, int], course: list[tuple[float, PoolLoad]]) -> None:
    found = decisions(Autoscaler(*bounds), course)

    assert all(bounds[0] <= number <= bounds[1] for _, number in found)
    assert all(abs(step) == 1 for _, step in steps(found))


@given(RANGES, COURSES)
def test_a_replica_leaves_only_long_after_the_last_change(bounds: tuple[int, int], course: list[tuple[float, PoolLoad]]) -> None:
    changes = steps(decisions(Autoscaler(*bounds), course))
    before = [moment for moment, _ in changes]

    assert all(moment - earlier >= LESS_SECONDS for earlier, (moment, step) in zip(before, changes[1:], strict=False) if step < 0)


@given(RANGES, st.floats(0.1, 2))
def test_a_queue_that_stays_brings_all_replicas_and_its_end_leaves_the_least(bounds: tuple[int, int], seconds: float) -> None:
    least, most = bounds
    autoscaler = Autoscaler(least, most)
    busy = decisions(autoscaler, [(seconds, PoolLoad(1000.0, most))] * int((most + 1) * (MORE_SECONDS / seconds + 2)))
    number = int((most - least + 2) * (LESS_SECONDS + 5 * USE_SECONDS) / 10)
    idle = decisions(autoscaler, [(10.0, PoolLoad())] * number)

    assert busy[-1][1] == most
    assert idle[-1][1] == least
    assert all(later - earlier >= LESS_SECONDS for (earlier, _), (later, _) in itertools.pairwise(steps(idle)))


@given(RANGES, st.integers(0, 1200), st.integers(1, 30))
def test_under_a_steady_load_the_number_settles(bounds: tuple[int, int], percent: int, load_seconds: int) -> None:
    """Replicas that are ready some time after they are wanted; work comes at a steady pace, and waits when all are busy.

    The pace is in whole per cent of a replica's: what is too much by less takes longer than this to become a long queue.
    """
    (least, most), load = bounds, percent / 100
    autoscaler, queued = Autoscaler(least, most), 0.0
    since = {number: -load_seconds if number < least else None for number in range(most)}  # when each was wanted
    found = []
    for second in range(4000):
        num_ready = sum(moment is not None and second - moment >= load_seconds for moment in since.values())
        queued = max(0.0, queued + load - num_ready)
        number = autoscaler.decide(PoolLoad(queued, min(load, num_ready) if not queued else num_ready), float(second))
        since = {place: (moment if moment is not None else second) if place < number else None for place, moment in since.items()}
        found.append((float(second), number))
    late = {number for moment, number in found if moment > 3000}

    assert len(late) == 1
    if load < most:
        assert min(late) >= load  # else its queue would grow for ever
    assert all(number >= most or MAX_QUEUE_SECONDS * number >= queued for number in late)
    assert all(step > 0 for moment, step in steps(found) if moment < LESS_SECONDS)


def test_a_load_between_the_limits_changes_nothing() -> None:
    """Two of three would be used to more than their share, and there is no queue."""
    autoscaler = Autoscaler(1, 5)
    decisions(autoscaler, [(1.0, PoolLoad(1000.0, 3))] * 8)
    held = autoscaler.target
    found = decisions(autoscaler, [(1.0, PoolLoad(0.0, FULL_SHARE * (held - 1) + 0.1))] * 2000)

    assert held == 3
    assert not steps(found)
