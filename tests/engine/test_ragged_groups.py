"""Chunks of different lengths in one forward: who joins whom, and how many tokens, without a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sequences import sequence_of
from weft.config import EngineConfig, EngineSettings
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.scheduler import ChunkRules, Plan, Scheduler
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Image, Submit
from weft.memory.prefix_tree import PrefixTree

CONFIG = EngineConfig(
    max_rows=200, slab_tokens=256, chunk_tokens=100, unsliced_tokens=10, group_tokens=300, group_tokens_beside=200,
    group_tokens_short=40,
)  # fmt: skip
SERVED = EngineConfig.resolve(EngineSettings(model="", max_rows=128), "cuda", is_row_invariant=True)


def scheduler_of(config: EngineConfig = CONFIG, *, ragged: bool = True, has_checkpoints: bool = False) -> Scheduler:
    budget = MemoryBudget(lambda tokens: tokens, 0)
    return Scheduler(config, budget, Bisection(), ChunkRules(groups_ragged=ragged, has_checkpoints=has_checkpoints))


def add(scheduler: Scheduler, *lengths: int) -> list[Sequence]:
    first = len(scheduler.running) + len(scheduler.waiting)
    found = [sequence_of([first + at] * length, 9, first + at) for at, length in enumerate(lengths)]
    for one in found:
        scheduler.add(one)
    return found


def plan_of(scheduler: Scheduler, **given: Any) -> Plan:
    scheduler.admit(0.0)
    return scheduler.plan(**given)


def counts(plan: Plan) -> list[int]:
    assert plan.chunk is not None
    return [plan.chunk.count, *(row.count for row in plan.beside)]


def decoding(scheduler: Scheduler) -> Sequence:
    """A row that decodes from now on."""
    (one,) = add(scheduler, 1)
    scheduler.admit(0.0)
    return one


def compute(scheduler: Scheduler, plan: Plan) -> None:
    assert plan.chunk is not None
    for row in (plan.chunk, *plan.beside):
        row.sequence.num_computed += row.count
        scheduler.finish_chunk(row)


def test_chunks_of_different_lengths_share_a_forward() -> None:
    scheduler = scheduler_of()
    add(scheduler, 81, 31, 51, 31)

    assert counts(plan_of(scheduler)) == [80, 30, 50, 30]


def test_where_a_model_does_not_take_them_only_equally_long_ones_do() -> None:
    scheduler = scheduler_of(ragged=False)
    add(scheduler, 31, 81, 51, 31)

    assert counts(plan_of(scheduler)) == [30, 30]


def test_a_new_prompt_joins_one_that_goes_on() -> None:
    scheduler = scheduler_of()
    first, _ = add(scheduler, 161, 81)
    first.num_computed = 100

    assert counts(plan_of(scheduler)) == [60, 80]


def test_a_forward_has_no_more_tokens_than_it_may_and_smaller_chunks_fill_it() -> None:
    scheduler = scheduler_of()
    add(scheduler, 101, 101, 91, 51, 11)

    assert counts(plan_of(scheduler)) == [100, 10, 100, 90]  # what is short comes first, and 50 more are too many


@pytest.mark.parametrize(("length", "expected"), [(101, [100, 90]), (11, [10, 20])])
def test_beside_a_row_that_decodes_it_has_fewer(length: int, expected: list[int]) -> None:
    scheduler = scheduler_of()
    decoding(scheduler)
    add(scheduler, length, 91, 21)
    plan = plan_of(scheduler)

    assert counts(plan)[: len(expected)] == expected
    assert sum(counts(plan)) <= (CONFIG.group_tokens_short if length == 11 else CONFIG.group_tokens_beside)  # type: ignore[operator]
    assert (plan.slice_seconds is None) == (length == 11)


def test_without_other_settings_it_has_those_of_one_chunk_there() -> None:
    scheduler = scheduler_of(dataclasses.replace(CONFIG, group_tokens_beside=None, group_tokens_short=None))
    decoding(scheduler)
    add(scheduler, 61, 31, 31)
    assert counts(plan_of(scheduler)) == [60, 30]

    short = scheduler_of(dataclasses.replace(CONFIG, group_tokens_beside=None, group_tokens_short=None))
    decoding(short)
    add(short, 6, 5, 4)
    assert counts(plan_of(short)) == [5, 4]


def test_a_short_rest_of_a_prompt_joins_the_next_forward_before_others_do() -> None:
    scheduler = scheduler_of(dataclasses.replace(CONFIG, unsliced_tokens=32), has_checkpoints=True)
    sequences = add(scheduler, 60, 61, 62, 91, 92, 93, 94, 95)
    plan = plan_of(scheduler)
    compute(scheduler, plan)
    following = plan_of(scheduler)

    begun = {row.sequence for row in (plan.chunk, *plan.beside) if row is not None}
    rests = [one for one in sequences if one in begun and not one.is_prefilled]
    assert rests
    assert [row.sequence for row in following.beside[: len(rests)]] == rests
    assert following.chunk is not None
    assert following.chunk.sequence not in begun  # who has waited longer is still the first


# The rules of groups.


def submitted(scheduler: Scheduler, number: int, length: int, **given: Any) -> Sequence:
    sampling = Sampling(temperature=0.0, prompt_logprobs=given.pop("prompt_logprobs", None))
    one = Sequence(Submit((number,), [number] * length, (sampling,), **given), 0, 9, frozenset(), now=0.0)
    scheduler.add(one)
    return one


def test_prompts_of_another_tenant_do_not_join() -> None:
    scheduler = scheduler_of()
    submitted(scheduler, 1, 31, tenant="one")
    submitted(scheduler, 2, 51, tenant="other")
    submitted(scheduler, 3, 41, tenant="one")
    plan = plan_of(scheduler)

    assert {row.sequence.tenant for row in plan.beside} <= {plan.chunk.sequence.tenant if plan.chunk else ""}


def test_prompts_with_images_or_log_probabilities_do_not_join() -> None:
    scheduler = scheduler_of()
    submitted(scheduler, 1, 31)
    submitted(scheduler, 2, 51, prompt_logprobs=0)
    submitted(scheduler, 3, 41, images=(Image(2, 1, 1, b"", b"x" * 32),))
    submitted(scheduler, 4, 21)

    assert counts(plan_of(scheduler)) == [30, 20]


def test_a_prompt_whose_forward_failed_or_that_is_suspected_does_not_join() -> None:
    scheduler = scheduler_of()
    _, failed, suspect, _ = add(scheduler, 31, 51, 61, 21)
    scheduler.apart.add(failed)
    assert counts(plan_of(scheduler)) == [30, 60, 20]

    scheduler.bisection.split([suspect])
    plan = plan_of(scheduler)
    assert plan.chunk is not None
    assert (plan.chunk.sequence, plan.beside) == (suspect, ())


def test_a_prompt_that_is_amid_a_chunk_or_waits_for_the_disk_does_not_join() -> None:
    class Amid:
        has_caches = is_amid_chunk = True

    scheduler = scheduler_of()
    _, amid, loading, _ = add(scheduler, 31, 51, 61, 21)
    amid.memory, loading.prefix.is_loading = Amid(), True

    assert counts(plan_of(scheduler)) == [30, 20]


def test_of_prompts_with_the_same_next_tokens_one_computes_them() -> None:
    scheduler, root = scheduler_of(), PrefixTree(1000, lambda: 0.0).root("", "")
    same = [sequence_of([7] * 60, 9, 1), sequence_of([7] * 60, 9, 2), sequence_of([8] * 60, 9, 3)]
    for one in same:
        scheduler.add(one)
        one.prefix.node = root
    plan = plan_of(scheduler)

    assert [row.sequence.id for row in plan.beside] == [3]
    same[0].prefix.is_private = same[1].prefix.is_private = True
    assert [row.sequence.id for row in plan_of(scheduler).beside] == [2, 3]


def test_a_prompt_that_is_to_be_cut_where_others_diverge_does_not_join() -> None:
    scheduler = scheduler_of()
    _, cut, _ = add(scheduler, 31, 51, 21)

    assert counts(plan_of(scheduler, best_cut=lambda one, *_: 20 if one is cut else None)) == [30, 20]


# Many arrivals.


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_128_prompts_that_come_at_once_take_eleven_forwards_at_most(has_checkpoints: bool) -> None:
    scheduler = scheduler_of(SERVED, has_checkpoints=has_checkpoints)
    sequences = add(scheduler, *(216 + 37 * at % 80 for at in range(128)))
    forwards, first_steps = [], 0
    while not all(one.is_prefilled for one in sequences):
        plan = plan_of(scheduler)
        first_steps = first_steps or (len(forwards) if plan.steps else 0)
        forwards.append(sum(counts(plan)))
        compute(scheduler, plan)

    assert len(forwards) <= 11
    assert max(forwards[:2]) <= 8192  # nobody decodes yet
    assert max(forwards[2:]) <= 4096
    assert min(forwards[:6]) > 3500  # enough lines to keep the device busy
    assert first_steps <= 2  # nobody waits for the last to be computed
