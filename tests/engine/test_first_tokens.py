"""A prompt's last token is computed with its last chunk, where that has a step's bits: its answer begins without a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from driver import SMALL, Run, random_prompts, restored
from weft.engine.faults import Rule
from weft.engine.prefix import RetainedCaches
from weft.engine.runner import Runner
from weft.engine.scheduler import Plan
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter
from weft.model.saved_state import LayerCaches

Build = Callable[[str], Adapter]
CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30, group_tokens=64)
PROMPTS = random_prompts(128, (40, 9, 23, 2, 1, 17), seed=3)
TOKENS, MARK = 6, 120
each_model = pytest.mark.parametrize("name", ["llama", "qwen3", "llama:4bit-32"])


@pytest.fixture
def by_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Adapter, list[int]], tuple[list[int], np.ndarray]]:
    """Answers alone whose first tokens are a step's."""

    def answer(adapter: Adapter, prompt: list[int]) -> tuple[list[int], np.ndarray]:
        with monkeypatch.context() as changed:
            changed.setattr(Adapter, "trunk", None)
            run = Run(adapter, keep_logits=True)
            sequence = run.submit(prompt, TOKENS)
            run.finish()
        return sequence.output, run.logits_of(sequence)

    return answer


def steps_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows in every decode step from now on."""
    found: list[int] = []
    forward = Runner.forward

    def counted(runner: Runner, plan: Plan, last: Any) -> Any:
        if plan.steps:
            found.append(len(plan.steps))
        return forward(runner, plan, last)

    monkeypatch.setattr(Runner, "forward", counted)
    return found


@each_model
def test_first_tokens_that_come_with_the_prompt_have_the_bits_of_a_step(name: str, build: Build, by_steps: Any) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    begun = []
    first_step = run.engine.runner.first_step
    run.engine.runner.first_step = lambda ends: begun.extend(ends) or first_step(ends)  # type: ignore[method-assign,func-returns-value]
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    assert {*begun} == {one for one in sequences if len(one.request.prompt) > 1}
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        tokens, logits = by_steps(build(name), prompt)
        assert sequence.output == tokens
        assert np.array_equal(run.logits_of(sequence), logits)


def test_an_answer_of_one_token_needs_no_step(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(monkeypatch)
    run = Run(build("llama"), CACHED)
    sequences = [run.submit(PROMPTS[0], 1), run.submit(PROMPTS[2], 3)]
    run.finish()

    assert [len(one.output) for one in sequences] == [1, 3]
    assert steps == [1, 1]


@pytest.mark.parametrize(("wanted", "num_asked"), [({}, 1), ({"prompt_logprobs": 0}, 0), ({"max_tokens": 0}, 0)])
def test_a_prompt_that_wants_something_else_of_its_last_chunk_keeps_its_last_token_for_a_step(
    wanted: dict[str, int], num_asked: int, build: Build
) -> None:
    run = Run(build("llama"), CACHED)
    asked = []
    together = run.adapter.prefill_together
    run.engine.runner.adapter = noting = object.__new__(Adapter)
    noting.__dict__ = {**run.adapter.__dict__, "prefill_together": lambda *given: asked.append(given) or together(*given)}  # type: ignore[func-returns-value]
    sequence = run.submit(PROMPTS[0], **{"tokens": 3, **wanted})
    run.finish()

    assert sequence.finish == "length"
    assert len(asked) == num_asked


@each_model
@pytest.mark.parametrize("further", [0, 1])
def test_whoever_takes_over_a_chunk_has_its_own_last_token(name: str, further: int, build: Build, by_steps: Any) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    other = [*PROMPTS[5][:-1], (PROMPTS[5][-1] + further) % 128]
    (second,) = taken_over(run, PROMPTS[5], other, num_answers=1)
    run.finish()

    tokens, logits = by_steps(build(name), other)
    assert second.output == tokens
    assert np.array_equal(run.logits_of(second), logits)


@pytest.mark.parametrize(("cache_bytes", "size"), [(1, 17), (1 << 30, 17), (1 << 30, 2)])
def test_all_answers_to_a_prompt_that_takes_over_a_chunk_follow_from_its_own_last_token(
    cache_bytes: int, size: int, build: Build, by_steps: Any
) -> None:
    """Further answers go on in a copy of the first one's states where the tree has none: it is full, or the prompt too short."""
    run = Run(build("llama"), dataclasses.replace(CACHED, cache_bytes=cache_bytes))
    leaving = PROMPTS[5][:size]
    other = [*leaving[:-1], (leaving[-1] + 1) % 128]
    answers = taken_over(run, leaving, other, num_answers=3)
    run.finish()

    assert [one.output for one in answers] == [by_steps(build("llama"), other)[0]] * 3


def taken_over(run: Run, leaving: list[int], other: list[int], num_answers: int) -> list[Sequence]:
    """Cancel a prompt amid its chunk, beside a row that decodes; returns the answers to the prompt that takes the chunk over."""
    neighbour = run.submit(PROMPTS[1], 60)
    while not neighbour.output:
        run.turn()
    run.submit(PROMPTS[4] * 14, 2)  # beside another prompt those of two tokens are amid a chunk too
    first = run.submit(leaving, TOKENS)
    greedy = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = run.engine.submit_all(Submit(tuple(range(1000, 1000 + num_answers)), other, (greedy,) * num_answers))
    while not first.is_amid_chunk:
        run.turn()
    run.engine.cancel(first)
    assert found[0].is_amid_chunk
    assert first.output == []
    return found


def test_if_a_first_step_fails_no_prompt_that_is_not_in_it_is_suspected(build: Build) -> None:
    """A prompt that has further chunks was computed in one forward with one that ends."""
    run = Run(build("llama"), dataclasses.replace(CACHED, chunk_tokens=64, group_tokens=64, row_cost=0.2, unsliced_tokens=32))
    engine = run.engine
    unmarked = [[token % MARK for token in prompt] for prompt in PROMPTS]
    neighbour = run.submit(unmarked[1], 100)
    while not neighbour.output:
        run.turn()
    (longer,) = engine.submit_all(Submit((1000,), unmarked[0] * 10, (Sampling(temperature=0, max_tokens=2),), tenant="other"))
    while not longer.num_computed:
        run.turn()
    engine.faults.rules.append(Rule("decode", MARK, times=1))
    (ending,) = engine.submit_all(Submit((1001,), [5, 6, MARK, 9, 3], (Sampling(temperature=0, max_tokens=2),), tenant="other"))
    while not engine.bisection.groups:
        run.turn()

    assert engine.bisection.groups == [[ending]]
    assert longer.num_computed
    run.finish()
    assert [one.finish for one in (neighbour, longer, ending)] == ["length"] * 3


def test_retained_caches_end_where_the_cached_prompt_ends(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, set[int]]] = []
    keep = RetainedCaches.keep

    def noted(retained: RetainedCaches, node: Any, caches: LayerCaches, size: int) -> None:
        kept.append((node.length, {cache.offset for cache in caches}))
        keep(retained, node, caches, size)

    monkeypatch.setattr(RetainedCaches, "keep", noted)
    run = Run(build("llama"), CACHED)
    first = run.submit(PROMPTS[0], TOKENS)
    run.finish()
    again = run.submit([*PROMPTS[0], *first.output, 5, 6, 7], TOKENS)
    run.finish()

    assert kept[0] == (len(PROMPTS[0]) - 1, {len(PROMPTS[0]) - 1})
    assert again.timings.cached_tokens == len(PROMPTS[0]) - 1


@pytest.mark.parametrize("tokens", [2, 3])
def test_after_a_short_answer_too_the_next_turn_copies_nothing_out_of_the_tree(tokens: int, build: Build) -> None:
    run = Run(build("llama"), CACHED)
    first = run.submit(PROMPTS[0], tokens)
    run.finish()
    copied = restored(run)
    run.submit([*PROMPTS[0], *first.output, 5, 6, 7], TOKENS)
    run.finish()

    assert copied == []


def test_a_row_that_is_suspected_of_failing_steps_begins_its_answer_by_a_step(
    build: Build, by_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_steps(build("llama"), PROMPTS[1])
    steps = steps_of(monkeypatch)
    run = Run(build("llama"), CACHED, keep_logits=True)
    suspect = run.submit(PROMPTS[1], TOKENS)
    run.engine.bisection.split([suspect])
    while not suspect.output:
        run.turn()
    assert steps == [1]
    run.finish()

    assert suspect.output == expected[0]
    assert np.array_equal(run.logits_of(suspect), expected[1])
