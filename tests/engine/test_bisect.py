"""The search for the rows that break a step, without an engine: whoever breaks it is found, and nobody else is ended."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sequences import sequence_of
from weft.engine.bisect import Bisection
from weft.engine.sequence import Sequence

TOKENS = 3


def decode(rows: list[Sequence], breaks: set[int], times: int = 1000) -> list[int]:
    """Decode these rows as an engine does; a step with one of `breaks` in it fails, so many times. Returns who was ended."""
    bisection, ended = Bisection(), []
    for _ in range(200):
        bisection.clear_proven()
        steps = [one for one in rows if not one.is_finished and bisection.may_step(one)]
        if times and any(one.id in breaks for one in steps):
            times -= 1
            if (guilty := bisection.split(steps)) is not None:
                guilty.end("error", None, 0.0)
                ended.append(guilty.id)
            continue
        for one in steps:
            one.num_in_flight += 1
            one.append(1, None)
    assert all(one.is_finished for one in rows)
    assert not bisection.groups
    assert not any(map(bisection.is_suspect, rows))
    return ended


def rows_of(count: int) -> list[Sequence]:
    return [sequence_of([1], TOKENS, number) for number in range(count)]


@settings(max_examples=60)
@given(st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_exactly_those_that_break_a_step_are_ended(count: int, breaks: set[int]) -> None:
    rows = rows_of(count)

    assert sorted(decode(rows, breaks)) == sorted(number for number in breaks if number < count)
    assert all(len(one.output) == TOKENS for one in rows if one.id not in breaks)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 11))
def test_a_fault_that_passes_before_its_row_was_alone_twice_ends_nobody(count: int, number: int) -> None:
    rows = rows_of(count)

    assert decode(rows, {number % count}, times=1) == []
    assert all(len(one.output) == TOKENS for one in rows)
