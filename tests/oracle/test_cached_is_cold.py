"""Cached = cold, for every architecture: what a prompt's beginning was taken from does not change a bit of what follows."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from driver import SMALL, Run, adapter_for, random_prompts
from weft.engine.sequence import Sequence
from weft.model.adapter import Adapter
from zoo import ARCHITECTURES, VOCABULARY

CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
TRUNK, *TAILS = random_prompts(VOCABULARY, (52, 9, 30, 1, 14), seed=7)  # chunks are 16: the trunk ends inside one
PROMPTS = [TRUNK, *(TRUNK + tail for tail in TAILS), TRUNK[:33], TRUNK]
TOKENS = 6

Answer = tuple[list[int], np.ndarray]


@pytest.fixture(scope="module")
def build(checkpoint: Callable[[str], Path]) -> Callable[[str], Adapter]:
    def make(name: str) -> Adapter:
        adapter = adapter_for(checkpoint(name))
        adapter.context_length = 4096
        return adapter

    return functools.cache(make)


@pytest.fixture(scope="module")
def cold(build: Callable[[str], Adapter]) -> Callable[[str], list[Answer]]:
    def answers(name: str) -> list[Answer]:
        found = []
        for prompt in PROMPTS:
            run = Run(build(name), keep_logits=True)
            sequence = run.submit(prompt, TOKENS)
            run.finish()
            found.append((sequence.output, run.logits_of(sequence)))
        return found

    return functools.cache(answers)


def check(run: Run, sequences: list[Sequence], expected: list[Answer]) -> None:
    for sequence, (tokens, logits) in zip(sequences, expected, strict=True):
        assert sequence.output == tokens
        assert (run.logits_of(sequence) == logits).all()


def computed(run: Run) -> list[int]:
    """Tokens of every prompt chunk from now on."""
    counts: list[int] = []
    adapter = copy.copy(run.engine.runner.adapter)
    prefill = adapter.prefill

    def counting(tokens: list[int], caches: object) -> object:
        counts.append(len(tokens))
        return prefill(tokens, caches)  # type: ignore[arg-type]

    adapter.prefill = counting  # type: ignore[method-assign,assignment]
    run.engine.runner.adapter = adapter
    return counts


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_after_the_other(build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    counts = computed(run)
    sequences = []
    for prompt in PROMPTS:
        sequences.append(run.submit(prompt, TOKENS))
        run.finish()

    check(run, sequences, cold(name))
    if build(name).can_be_saved:
        assert sequences[-1].num_cached == len(TRUNK) - 1  # the same again: nothing is computed
        assert all(sequence.num_cached >= 48 for sequence in sequences[1:5])
    assert sum(counts) == sum(len(prompt) - 1 - sequence.num_cached for prompt, sequence in zip(PROMPTS, sequences, strict=True))
    prefixes = run.engine.prefixes
    assert prefixes is None or not any(node.pins for node in prefixes.nodes())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_at_once(build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    counts = computed(run)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, sequences, cold(name))
    if build(name).can_be_saved:  # the trunk once, and each tail once
        assert sum(counts) <= 48 + sum(len(prompt) - 1 - 48 for prompt in PROMPTS[:5]) + 16


@pytest.mark.parametrize("name", ["qwen3_5", "gear", "llama"])
@pytest.mark.parametrize("budget", [1, 20_000, 100_000])
def test_with_too_little_room(
    build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str, budget: int
) -> None:
    run = Run(build(name), dataclasses.replace(SMALL, cache_bytes=budget), keep_logits=True)
    sequences = []
    for prompt in PROMPTS * 2:
        sequences.append(run.submit(prompt, TOKENS))
        run.turn()
    run.finish()

    check(run, sequences, cold(name) * 2)
    assert run.engine.prefixes is not None
    assert run.engine.prefixes.held_bytes <= budget
    assert run.engine.prefixes.held_bytes == sum(node.nbytes for node in run.engine.prefixes.nodes())


@pytest.mark.parametrize("name", ["qwen3_5", "gear"])
@pytest.mark.parametrize("turns", [1, 3, 9])
def test_after_one_that_left(build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str, turns: int) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    neighbour = run.submit(TRUNK[:5], 40)
    leaving = run.submit(PROMPTS[2], TOKENS)
    for _ in range(4 * turns):
        run.turn()
    run.engine.cancel(leaving)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, sequences, cold(name))
    assert len(neighbour.output) == 40
