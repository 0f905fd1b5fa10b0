"""Resumed = uninterrupted: an answer that another engine began, or that had to make room, goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from driver import SMALL, Run, adapter_for, random_prompts
from weft.engine.faults import Rule
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.memory.spec import MAX_STEP_TOKENS
from weft.model.adapter import Adapter

MARK = 77
PROMPT, *OTHERS = ([token for token in prompt if token != MARK] for prompt in random_prompts(128, (30, 9, 17, 40), seed=12))
TOKENS = 24
# What is drawn depends on the position, and on how often each token was there.
HOT = Sampling(
    temperature=1.0,
    seed=5,
    max_tokens=TOKENS,
    ignore_eos=True,
    frequency_penalty=1.0,
    presence_penalty=0.5,
    repetition_penalty=1.3,
)


@pytest.fixture(scope="module", params=["qwen3_5", "gear"])  # emitted tokens are prefilled, or decoded again
def adapter(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint(request.param))


def uninterrupted(adapter: Adapter) -> tuple[list[int], np.ndarray]:
    run = Run(adapter, keep_logits=True)
    sequence = run.engine.submit(PROMPT, HOT)
    run.finish()
    return sequence.output, run.logits_of(sequence)


@pytest.mark.parametrize("settle_first", [True, False])
@pytest.mark.parametrize("count", [1, 7, TOKENS - 1])
def test_an_answer_that_was_begun_elsewhere_goes_on_and_tells_only_what_is_new(
    adapter: Adapter, count: int, settle_first: bool
) -> None:
    whole, logits = uninterrupted(adapter)
    run = Run(adapter, dataclasses.replace(SMALL, settle_first=settle_first), keep_logits=True)
    for prompt in OTHERS:
        run.submit(prompt, 12)
    (sequence,) = run.engine.submit_all(Submit((90,), PROMPT, (HOT,), emitted=(tuple(whole[:count]),)))
    run.finish()

    assert sequence.output == whole
    assert [event.token for event in run.engine.take_events() if event.sequence == 90] == whole[count:]
    assert np.array_equal(run.logits_of(sequence, count), logits[count:])


def test_an_answer_that_made_room_goes_on_and_tells_nothing_twice(adapter: Adapter) -> None:
    whole, _ = uninterrupted(adapter)
    run = Run(adapter)
    after = MAX_STEP_TOKENS + 4  # so that its tokens, where they are decoded again, need more than one step
    run.engine.faults.rules = [Rule("decode", MARK, after=after, times=1)]
    sequence = run.engine.submit(PROMPT, HOT)
    run.submit([*OTHERS[0], MARK], TOKENS)  # its fault takes all rows back
    run.finish()

    assert sequence.is_preempted
    assert sequence.output == whole
    assert [event.token for event in run.engine.take_events() if event.sequence == sequence.id] == whole
