"""Who waits for another's chunk is known, turn by turn: the page draws it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from driver import SMALL, Run, adapter_for, random_prompts
from weft.engine.host import memory_in_use
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter

CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
TRUNK, OTHER = random_prompts(128, (60, 40), seed=3)


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


def test_a_prompt_follows_another_only_while_both_need_the_same_chunk(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    leader, follower, stranger = (run.submit(prompt, 2) for prompt in ([*TRUNK, 1, 2], [*TRUNK, 3, 4], OTHER))
    seen = []
    while not all(one.is_prefilled for one in (leader, follower, stranger)):
        run.turn()
        following = run.engine.scheduler.following
        seen.append([one in following and not one.is_prefilled for one in (leader, follower, stranger)])
    run.finish()

    assert any(any(flags[:2]) for flags in seen)  # one of the two computes, the other follows
    assert not any(all(flags[:2]) for flags in seen)
    assert not any(flags[2] for flags in seen)


def test_a_prompt_whose_every_token_must_be_read_follows_nobody(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    run.submit([*TRUNK, 1, 2], 2)
    reader = run.engine.submit_all(Submit((99,), [*TRUNK, 3, 4], (Sampling(temperature=0.0, max_tokens=2, prompt_logprobs=0),)))[
        0
    ]
    flags = []
    while not reader.is_prefilled:
        run.turn()
        flags.append(reader in run.engine.scheduler.following)
    run.finish()

    assert not any(flags)


def test_the_budget_and_what_is_promised_of_it_are_told(adapter: Adapter) -> None:
    run = Run(adapter, dataclasses.replace(CACHED, memory_bytes=1 << 30))
    idle = memory_in_use(run.engine)
    run.submit(TRUNK, 4)
    run.turn()
    busy = memory_in_use(run.engine)
    run.finish()

    assert (idle["budget"], idle["promised"]) == (1 << 30, 0)
    assert busy["promised"] > 0
    assert idle["budget"] > idle["reserve"] > 0
    assert "budget" not in memory_in_use(Run(adapter, CACHED).engine)  # without an end there is no share to tell
