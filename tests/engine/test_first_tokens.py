"""A prompt's last token is computed with its last chunk, where that has a step's bits: its answer begins without a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from driver import SMALL, Run, random_prompts
from weft.engine.prefix import RetainedCaches
from weft.engine.runner import Runner
from weft.engine.scheduler import Plan
from weft.model.adapter import Adapter
from weft.model.saved_state import LayerCaches

Build = Callable[[str], Adapter]
CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30, group_tokens=64)
PROMPTS = random_prompts(128, (40, 9, 23, 2, 1, 17), seed=3)
TOKENS = 6
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
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

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


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 0}, {"max_tokens": 0}])
def test_a_prompt_that_wants_something_else_of_its_last_chunk_keeps_its_last_token_for_a_step(
    wanted: dict[str, int], build: Build
) -> None:
    run = Run(build("llama"), CACHED)
    asked = []
    together = run.adapter.prefill_together
    run.engine.runner.adapter = noting = object.__new__(Adapter)
    noting.__dict__ = {**run.adapter.__dict__, "prefill_together": lambda *given: asked.append(given) or together(*given)}  # type: ignore[func-returns-value]
    sequence = run.submit(PROMPTS[0], **{"tokens": 3, **wanted})
    run.finish()

    assert sequence.finish == "length"
    assert asked == []


@each_model
def test_whoever_takes_over_a_chunk_has_its_own_last_token(name: str, build: Build, by_steps: Any) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    neighbour = run.submit(PROMPTS[1], 60)
    while not neighbour.output:
        run.turn()
    leaving, other = PROMPTS[5], [*PROMPTS[5][:-1], (PROMPTS[5][-1] + 1) % 128]
    first, second = run.submit(leaving, TOKENS), run.submit(other, TOKENS)
    while not first.is_amid_chunk:
        run.turn()
    run.engine.cancel(first)
    run.finish()

    assert first.output == []
    tokens, logits = by_steps(build(name), other)
    assert second.output == tokens
    assert np.array_equal(run.logits_of(second), logits)


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
