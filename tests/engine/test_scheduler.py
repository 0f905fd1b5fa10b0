"""Who runs next, without a model: the scheduler imports no mlx and reads no clock of its own."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequences import sequence_of
from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.scheduler import ChunkRules, Plan, Scheduler
from weft.engine.sequence import Sequence

CONFIG = EngineConfig(max_rows=3, slab_tokens=256, chunk_tokens=10, unsliced_tokens=5)


def scheduler_of() -> Scheduler:
    return Scheduler(CONFIG, MemoryBudget(lambda tokens: tokens, 0), Bisection())


def plan_of(scheduler: Scheduler, now: float = 0.0) -> Plan:
    scheduler.admit(now)
    return scheduler.plan()


def sequence(number: int, prompt: int, tokens: int = 5) -> Sequence:
    return sequence_of([1] * prompt, tokens, number)


def test_chunk_ends_are_multiples_from_the_start_and_the_last_token_is_left_for_the_batch() -> None:
    scheduler = scheduler_of()
    one = sequence(0, 27)
    scheduler.add(one)
    ends = []
    while (chunk := plan_of(scheduler).chunk) is not None:
        one.num_computed += chunk.count
        ends.append(one.num_computed)
        scheduler.finish_chunk(chunk)

    assert ends == [10, 20, 26]
    assert list(plan_of(scheduler).steps) == [one]


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_no_chunk_has_one_token_unless_the_prompt_has_no_more(has_checkpoints: bool) -> None:
    scheduler = Scheduler(
        CONFIG, MemoryBudget(lambda tokens: tokens, 0), Bisection(), ChunkRules(has_checkpoints=has_checkpoints)
    )
    for length, boundary in itertools.product(range(2, 70), range(70)):
        one = sequence(0, length)
        one.boundaries = (boundary,) if 0 < boundary < length - 1 else ()
        sizes = [end - start for start, end in itertools.pairwise([0, *scheduler.chunk_ends(one)])]

        assert sum(sizes) == length - 1
        assert min(sizes) > 1 or length == 2, (length, boundary)


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_chunk_ends_at_a_boundary_wherever_it_is(has_checkpoints: bool) -> None:
    """Also right behind a multiple of the chunk size or the checkpoint near a prompt's end, as no chunk has one token."""
    scheduler = Scheduler(
        CONFIG, MemoryBudget(lambda tokens: tokens, 0), Bisection(), ChunkRules(has_checkpoints=has_checkpoints)
    )
    for length in range(5, 90):
        for boundary in range(2, length - 2):
            one = sequence(0, length)
            one.boundaries = (boundary,)

            assert boundary in scheduler.chunk_ends(one), (length, boundary)


def test_prompts_take_turns_chunk_by_chunk() -> None:
    scheduler = scheduler_of()
    for number in range(2):
        scheduler.add(sequence(number, 31))
    turns = []
    while (chunk := plan_of(scheduler).chunk) is not None:
        turns.append(chunk.sequence.id)
        chunk.sequence.num_computed += chunk.count
        scheduler.finish_chunk(chunk)

    assert turns == [0, 1, 0, 1, 0, 1]


def test_only_prompts_that_end_soon_are_announced() -> None:
    scheduler = scheduler_of()
    for number, length in enumerate((11, 30, 900)):
        scheduler.add(sequence(number, length))
    chunk = plan_of(scheduler).chunk
    assert chunk is not None
    assert plan_of(scheduler).upcoming == (11, 30)

    chunk.sequence.num_computed += chunk.count  # the first is in memory: it comes no more
    scheduler.finish_chunk(chunk)
    assert plan_of(scheduler).upcoming == (30,)


def test_a_chunk_beside_steps_has_a_time_limit_and_alone_it_has_none() -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence(0, 45))
    assert plan_of(scheduler).slice_seconds is None

    scheduler.add(sequence(1, 1))
    scheduler.measure_step(0.5, 1)
    plan = plan_of(scheduler)
    assert plan.chunk is not None
    assert plan.slice_seconds == CONFIG.gap_factor * scheduler.step_seconds
    plan.chunk.sequence.num_computed += plan.chunk.count
    scheduler.finish_chunk(plan.chunk)
    while (plan := plan_of(scheduler)).chunk is not None and plan.chunk.count > 5:
        plan.chunk.sequence.num_computed += plan.chunk.count
        scheduler.finish_chunk(plan.chunk)
    assert plan.chunk is not None
    assert plan.slice_seconds is None  # a short one is done at once


def test_short_chunks_go_before_the_steps_while_several_wait_but_not_for_ever() -> None:
    scheduler = Scheduler(dataclasses.replace(CONFIG, max_rows=9), MemoryBudget(lambda tokens: tokens, 0), Bisection())
    scheduler.add(sequence(0, 1, tokens=100))
    for number in range(1, 8):
        scheduler.add(sequence(number, 4))
    has_steps = []
    while (plan := plan_of(scheduler)).chunk is not None:
        has_steps.append(bool(plan.steps))
        plan.chunk.sequence.num_computed += plan.chunk.count
        scheduler.finish_chunk(plan.chunk)

    assert has_steps == [False, False, False, True, False, False, True]


def test_a_sequence_whose_last_token_is_in_flight_is_not_asked_again() -> None:
    scheduler = scheduler_of()
    one = sequence(0, 1, tokens=2)
    scheduler.add(one)
    assert len(plan_of(scheduler).steps) == 1

    one.output.append(7)
    one.num_in_flight = 1
    one.num_computed = 2
    assert plan_of(scheduler).steps == ()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 45), st.integers(1, 6)), min_size=1, max_size=12))
def test_everybody_ends_in_order_of_admission_and_nobody_is_computed_twice(asked: list[tuple[int, int]]) -> None:
    scheduler = scheduler_of()
    sequences = [sequence(number, prompt, tokens) for number, (prompt, tokens) in enumerate(asked)]
    for one in sequences:
        scheduler.add(one)
    computed = dict.fromkeys(range(len(sequences)), 0)
    for now in range(10_000):
        scheduler.drop_finished()
        if scheduler.idle:
            break
        plan = plan_of(scheduler, float(now))
        assert plan.steps or plan.chunk is not None
        assert len(scheduler.running) <= CONFIG.max_rows
        if plan.chunk is not None:
            assert plan.chunk.start == plan.chunk.sequence.num_computed
            plan.chunk.sequence.num_computed += plan.chunk.count
            computed[plan.chunk.sequence.id] += plan.chunk.count
            scheduler.finish_chunk(plan.chunk)
        for one in plan.steps:
            one.num_computed += 1
            computed[one.id] += 1
            one.num_in_flight += 1
            one.append(9, None)

    assert all(one.finish == "length" for one in sequences)
    assert all(computed[one.id] == len(one.prompt) + one.max_tokens - 1 for one in sequences)
    admitted = [one.timings.admitted for one in sequences]
    assert admitted == sorted(admitted)  # type: ignore[type-var]
