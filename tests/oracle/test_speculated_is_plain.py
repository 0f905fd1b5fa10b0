"""Drafts change how many tokens a step gives, never which: every architecture, tokens and bits, with drafts right and wrong.

The drafts come from a script that knows the right answer. A model whose steps of several tokens are not as many steps of one
must not verify drafts, and says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

import scripted
from driver import SMALL, Run, random_prompts
from thoroughness import ALL
from weft.config import EngineConfig
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter
from zoo import EXAMINED, HOUSED, PROMISED, VOCABULARY

Build = Callable[[str], Adapter]
Solo = Callable[[str], list[tuple[list[int], np.ndarray]]]
each_promised = pytest.mark.parametrize("name", HOUSED if ALL else PROMISED)

PROMPTS = random_prompts(VOCABULARY, (21, 7, 40, 5, 13, 33), seed=4)
TOKENS = 30  # with a window of 12 the ring is crossed more than once
SCRIPTS = [
    scripted.always_right,
    scripted.always_wrong,
    scripted.right_then_wrong,
    scripted.now_and_then,
    scripted.too_much,
    scripted.at_random(1),
]
CHOICES = [
    Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
    Sampling(temperature=1.0, seed=3, max_tokens=TOKENS, ignore_eos=True, logprobs=3),
    Sampling(temperature=0.8, seed=4, top_p=0.9, max_tokens=TOKENS, ignore_eos=True, frequency_penalty=1, repetition_penalty=1.2),
    Sampling(temperature=0.7, seed=5, top_k=9, min_p=0.02, max_tokens=TOKENS, ignore_eos=True, presence_penalty=0.4),
    Sampling(temperature=0.9, seed=6, max_tokens=TOKENS, min_tokens=9, stop_token_ids=tuple(range(0, VOCABULARY, 3))),
    Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logit_bias={5: 2.0, 9: -4.0}),
]


@pytest.fixture(scope="module")
def solo(build: Build) -> Solo:
    """A function from a name to what each of PROMPTS answers alone and without drafts, with logits."""

    def answer(name: str) -> list[tuple[list[int], np.ndarray]]:
        found = []
        for prompt, sampling in zip(PROMPTS, CHOICES, strict=True):
            run = Run(build(name), keep_logits=True)
            sequence = run.engine.submit(prompt, sampling)
            run.finish()
            found.append((sequence.output, run.logits_of(sequence)))
        return found

    return functools.cache(answer)


def speculating(adapter: Adapter, answers: list[list[int]], config: EngineConfig = SMALL) -> Run:
    """An engine in which the request number i has drafts by SCRIPTS[i], made of answers[i]."""
    run = Run(adapter, config, keep_logits=True)
    scripted.add_drafts(run, answers, SCRIPTS[: len(answers)])
    return run


def submit(run: Run, number: int) -> Sequence:
    return run.engine.submit_all(Submit((number,), PROMPTS[number], (CHOICES[number],)))[0]


def skip_unverified(adapter: Adapter) -> None:
    """A model that does not verify drafts says why; there is nothing to compare."""
    if adapter.step_tokens == 1:
        assert adapter.unverified
        pytest.skip(adapter.unverified)


OVERLAPPED = dataclasses.replace(SMALL, cache_bytes=1 << 30, settle_first=False)


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, SMALL) for name in EXAMINED), *((name, OVERLAPPED) for name in (HOUSED if ALL else PROMISED))],
    ids=lambda value: ("cached-overlapped" if value.cache_bytes else "plain") if isinstance(value, EngineConfig) else None,
)
def test_drafts_change_neither_tokens_nor_a_single_bit_of_the_logits(
    build: Build, solo: Solo, name: str, config: EngineConfig
) -> None:
    adapter = build(name)
    skip_unverified(adapter)
    run = speculating(adapter, [tokens for tokens, _ in solo(name)], config)
    sequences = [submit(run, number) for number in range(len(PROMPTS))]
    neighbour = run.submit(PROMPTS[0], 40)  # has no drafts
    run.finish()

    for sequence, (tokens, logits) in zip(sequences, solo(name), strict=True):
        assert sequence.output == tokens, sequence.id
        assert np.array_equal(run.logits_of(sequence), logits), sequence.id
    assert neighbour.output[:TOKENS] == solo(name)[0][0]


@each_promised
def test_right_drafts_save_steps(build: Build, solo: Solo, name: str) -> None:
    adapter = build(name)
    skip_unverified(adapter)
    run = speculating(adapter, [solo(name)[0][0]])
    sequence = submit(run, 0)
    while not sequence.is_prefilled:
        run.turn()
    turns = 0
    while not sequence.is_finished:
        run.turn()
        turns += 1

    assert turns <= 1 + -(-TOKENS // adapter.step_tokens)
    assert sequence.output == solo(name)[0][0]


@each_promised
def test_rows_that_come_and_go_while_others_have_drafts_change_nobody(build: Build, solo: Solo, name: str) -> None:
    adapter = build(name)
    skip_unverified(adapter)
    answers = [tokens for tokens, _ in solo(name)]
    run = speculating(adapter, answers)
    chance = np.random.default_rng(7)
    live: list[Sequence] = []
    done: list[Sequence] = []
    for number in [int(number) for number in chance.permutation(len(PROMPTS))] * 3:
        if all(one.id != number for one in live):
            live.append(submit(run, number))
        for _ in range(int(chance.integers(1, 4))):
            run.turn()
        if len(live) > 2 and chance.random() < 0.5:
            run.engine.cancel(live[int(chance.integers(len(live)))])
        done += [one for one in live if one.is_finished]
        live = [one for one in live if not one.is_finished]
    run.finish()

    assert len(done) >= 4
    for sequence in done + live:
        assert sequence.output == answers[sequence.id][: len(sequence.output)], sequence.id


@each_promised
def test_emitted_tokens_replayed_by_fours_are_those_replayed_one_by_one(build: Build, solo: Solo, name: str) -> None:
    adapter = build(name)
    tokens, logits = solo(name)[0]
    run = Run(adapter, keep_logits=True)
    run.engine.max_replayed_tokens = 1 << 30
    plans = scripted.note_plans(run)
    neighbour = run.submit(PROMPTS[2], TOKENS)
    (sequence,) = run.engine.submit_all(Submit((90,), PROMPTS[0], (CHOICES[0],), emitted=(tuple(tokens[:19]),)))
    run.finish()

    assert sequence.output == tokens
    assert np.array_equal(run.logits_of(sequence, 19), logits[19:])
    assert len(neighbour.output) == TOKENS
    assert (max(plan.step_tokens for plan in plans) > 1) == (adapter.step_tokens > 1)
