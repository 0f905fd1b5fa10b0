"""One prompt, several answers: computed once, and whoever leaves leaves the work to the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from driver import SMALL, Run, adapter_for, answers, random_prompts
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter

PROMPT = random_prompts(128, (70,), seed=3)[0]


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


def fork(run: Run, count: int, prompt: list[int] = PROMPT, **sampling: object) -> list[Sequence]:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return run.engine.submit_all(Submit(tuple(range(100, 100 + count)), prompt, (chosen,) * count))


def count_chunks(run: Run) -> list[int]:
    """Tokens of every prompt chunk from now on."""
    counts: list[int] = []
    prefill = run.adapter.prefill

    def counting(tokens: list[int], caches: object) -> object:
        counts.append(len(tokens))
        return prefill(tokens, caches)  # type: ignore[arg-type]

    run.engine.runner.adapter.prefill = counting  # type: ignore[method-assign,assignment]
    return counts


@pytest.fixture
def fresh(adapter: Adapter) -> Adapter:
    """An adapter whose methods may be watched."""
    return copy.copy(adapter)


def test_the_prompt_is_computed_once_for_all_forks(fresh: Adapter) -> None:
    expected = answers(fresh, [PROMPT], 6)[0]
    run = Run(fresh)
    counts = count_chunks(run)
    sequences = fork(run, 5)
    run.finish()

    assert sum(counts) == len(PROMPT) - 1
    assert [sequence.output for sequence in sequences] == [expected] * 5


def test_more_forks_than_rows_are_answered_too(adapter: Adapter) -> None:
    run = Run(adapter)
    sequences = fork(run, SMALL.max_rows + 5)
    run.finish()

    assert {tuple(sequence.output) for sequence in sequences} == {tuple(answers(adapter, [PROMPT], 6)[0])}


@pytest.mark.parametrize("turns", [0, 1, 5, 40])
def test_when_the_first_fork_leaves_its_work_is_inherited(fresh: Adapter, turns: int) -> None:
    run = Run(fresh)
    counts = count_chunks(run)
    run.submit(PROMPT[:20], 30)
    sequences = fork(run, 3)
    for _ in range(turns):
        run.turn()
    run.engine.cancel(sequences[0])
    run.finish()

    assert sum(counts) == len(PROMPT) - 1 + 19
    assert [sequence.output for sequence in sequences[1:]] == [answers(fresh, [PROMPT], 6)[0]] * 2


def test_forks_that_all_leave_during_the_prompt_leave_nothing_behind(adapter: Adapter) -> None:
    run = Run(adapter)
    run.submit(PROMPT[:20], 10)
    sequences = fork(run, 3)
    for _ in range(5):
        run.turn()
    for sequence in sequences:
        run.engine.cancel(sequence)
    run.finish()

    assert [sequence.finish for sequence in sequences] == ["cancelled"] * 3


def test_forks_of_a_prompt_of_one_token_are_answered(adapter: Adapter) -> None:
    run = Run(adapter)
    sequences = fork(run, 3, PROMPT[:1])
    run.finish()

    assert [sequence.output for sequence in sequences] == [answers(adapter, [PROMPT[:1]], 6)[0]] * 3


def test_prompt_logprobs_are_those_the_model_gives_each_token_after_the_ones_before(adapter: Adapter) -> None:
    run = Run(adapter, keep_logits=True)
    subject, tail = PROMPT[:30], PROMPT[30:36]
    scored = run.submit(subject + tail, 1, prompt_logprobs=2)
    run.submit(PROMPT[:9], 20)
    run.finish()
    forced = Run(adapter, keep_logits=True)
    rows = []
    for end in range(30, 36):  # the oracle: one solo request for each place, its logits read directly
        sequence = forced.submit((subject + tail)[:end], 1)
        forced.finish()
        rows.append(forced.logits_of(sequence)[0])

    values = [row - np.log(np.exp(row - row.max()).sum()) - row.max() for row in rows]
    assert [entry.token for entry in scored.prompt_logprobs] == (subject + tail)[1:]
    told = scored.prompt_logprobs[29:]
    np.testing.assert_allclose(
        [entry.logprob for entry in told], [value[token] for value, token in zip(values, tail, strict=True)], atol=1e-4
    )
    assert [entry.top[0][0] for entry in told] == [int(value.argmax()) for value in values]
    assert all(len(entry.top) == 2 for entry in told)


def test_a_request_for_no_tokens_ends_with_its_prompt(adapter: Adapter) -> None:
    run = Run(adapter)
    scored = run.submit(PROMPT, 0, prompt_logprobs=0)
    read = run.submit(PROMPT[:1], 0)
    run.finish()

    assert (scored.finish, scored.output, len(scored.prompt_logprobs)) == ("length", [], len(PROMPT) - 1)
    assert (read.finish, read.output) == ("length", [])
    prompts = run.engine.take_prompt_events()
    assert prompts[-1].computed == len(PROMPT) - 1
    assert prompts[-1].logprobs == tuple(scored.prompt_logprobs)
    assert all(event.logprobs is None for event in prompts[:-1])


def test_prompt_logprobs_do_not_change_the_answer(adapter: Adapter) -> None:
    run = Run(adapter)
    plain, scored = run.submit(PROMPT, 8), run.submit(PROMPT, 8, prompt_logprobs=3)
    run.finish()

    assert plain.output == scored.output
