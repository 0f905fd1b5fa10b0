"""Cached = cold, for every architecture: what a prompt's beginning was taken from does not change a bit of what follows.

The longer tests look at some of the zoo only, `make conformance` at all of it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver import SMALL, Run, random_prompts
from thoroughness import ALL
from weft.config import EngineConfig
from weft.engine.sequence import Sequence
from weft.memory.disk import DiskTier
from weft.memory.spec import KeyValues, SlidingWindow
from weft.model.adapter import Adapter, Chunk
from weft.model.saved_state import LayerCaches, arrays_of, leaves
from zoo import EXAMINED, HOUSED, VOCABULARY

CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
TRUNK, *TAILS = random_prompts(VOCABULARY, (52, 9, 30, 1, 14), seed=7)  # chunks are 16: the trunk ends inside one
OVERLAPPED = dataclasses.replace(CACHED, settle_first=False, group_tokens=48)  # as on a GPU, prompts in one forward
SOME = ["llama", "qwen3_5", "gemma3_text", "deepseek_v3", "falcon_h1", "gpt_oss"]
each_order = pytest.mark.parametrize(
    ("name", "config"),
    [*((name, CACHED) for name in EXAMINED), *((name, OVERLAPPED) for name in (EXAMINED if ALL else SOME))],
    ids=lambda value: ("plain" if value.settle_first else "overlapped") if isinstance(value, EngineConfig) else None,
)
PROMPTS = [TRUNK, *(TRUNK + tail for tail in TAILS), TRUNK[:33], TRUNK]
TOKENS = 6

Answer = tuple[list[int], np.ndarray]


@pytest.fixture(scope="module")
def cold(build: Callable[[str], Adapter]) -> Callable[[str], list[Answer]]:
    def answers(name: str) -> list[Answer]:
        found = []
        for prompt in PROMPTS if name in EXAMINED else PROMPTS[:4]:
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
    """Tokens of every prompt chunk from now on, but those that are computed for their logits."""
    counts: list[int] = []
    adapter = copy.copy(run.engine.runner.adapter)
    prefill = adapter.prefill

    def counting(tokens: list[int], caches: object) -> object:
        counts.append(len(tokens))
        return prefill(tokens, caches)  # type: ignore[arg-type]

    together = adapter.prefill_together

    def counting_all(chunks: list[list[int]], rows: Any, starts: list[int], whole: Any = ()) -> Chunk:
        counts.extend(len(chunk) - (at in whole) for at, chunk in enumerate(chunks))
        return together(chunks, rows, starts, whole)

    adapter.prefill = counting  # type: ignore[method-assign,assignment]
    adapter.prefill_together = counting_all  # type: ignore[method-assign]
    run.engine.runner.adapter = adapter
    return counts


@each_order
def test_one_after_the_other(
    build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str, config: EngineConfig
) -> None:
    run = Run(build(name), config, keep_logits=True)
    counts = computed(run)
    sequences = []
    for prompt in PROMPTS:
        sequences.append(run.submit(prompt, TOKENS))
        run.finish()

    check(run, sequences, cold(name))
    if build(name).can_be_saved:
        assert sequences[-1].timings.cached_tokens == len(TRUNK) - 1  # the same again: nothing is computed
        assert all(sequence.timings.cached_tokens >= 48 for sequence in sequences[1:5])
    assert sum(counts) == sum(
        len(prompt) - 1 - sequence.timings.cached_tokens for prompt, sequence in zip(PROMPTS, sequences, strict=True)
    )
    prefixes = run.engine.prefix.tree
    assert prefixes is None or not any(node.pins for node in prefixes.nodes())


@each_order
def test_all_at_once(
    build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str, config: EngineConfig
) -> None:
    run = Run(build(name), config, keep_logits=True)
    counts = computed(run)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, sequences, cold(name))
    if build(name).can_be_saved:  # the trunk once, and each tail once
        assert sum(counts) <= 48 + sum(len(prompt) - 1 - 48 for prompt in PROMPTS[:5]) + 16
    assert sum(counts) == sum(
        len(prompt) - 1 - sequence.timings.cached_tokens for prompt, sequence in zip(PROMPTS, sequences, strict=True)
    )


@pytest.mark.parametrize("name", HOUSED)
def test_cut_where_they_part(build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str) -> None:
    prompts = PROMPTS if name in EXAMINED else PROMPTS[:4]
    run = Run(build(name), dataclasses.replace(CACHED, chunk_tokens=64), keep_logits=True)
    counts = computed(run)
    sequences = [run.submit(prompt, TOKENS) for prompt in prompts]
    run.finish()

    check(run, sequences, cold(name))
    if build(name).can_be_saved and build(name).cuts_freely:
        # One prompt ends a token behind the cut: the last tokens before it are computed again, for none is computed alone.
        assert sum(counts) <= len(TRUNK) + sum(len(tail) for tail in TAILS) + 20


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_after_a_prompt_of_two_tokens(build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str) -> None:
    """Its first token was computed alone, which some models do in another way: no longer prompt begins with that."""
    run = Run(build(name), CACHED, keep_logits=True)
    run.submit(TRUNK[:2], 1)
    run.finish()
    sequence = run.submit(TRUNK, TOKENS)
    run.finish()

    assert sequence.timings.cached_tokens == 0
    check(run, [sequence], cold(name)[:1])


@pytest.mark.parametrize("name", ["qwen3_5", "gear", "llama"])
@pytest.mark.parametrize("budget", [1, 20_000, 100_000])
def test_with_too_little_room(
    build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str, budget: int
) -> None:
    run = Run(build(name), dataclasses.replace(CACHED, cache_bytes=budget), keep_logits=True)
    sequences = []
    for prompt in PROMPTS * 2:
        sequences.append(run.submit(prompt, TOKENS))
        run.turn()
    run.finish()

    check(run, sequences, cold(name) * 2)
    assert run.engine.prefix.tree is not None
    assert run.engine.prefix.tree.held_bytes <= budget
    assert run.engine.prefix.tree.held_bytes == sum(node.nbytes for node in run.engine.prefix.tree.nodes())


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


def disk_at(folder: Path) -> DiskTier:
    disk = DiskTier(folder, "0" * 32, 1 << 30)
    disk.open()
    return disk


@pytest.mark.parametrize("name", EXAMINED)
def test_after_a_restart(build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str, tmp_path: Path) -> None:
    first = Run(build(name), CACHED, disk=disk_at(tmp_path))
    for prompt in PROMPTS[:2]:
        first.submit(prompt, 1)
    first.finish()
    assert first.disk is not None
    first.disk.close(10)

    run = Run(build(name), CACHED, keep_logits=True, disk=disk_at(tmp_path))
    counts = computed(run)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, sequences, cold(name))
    assert run.disk is not None
    run.disk.close(10)
    assert (run.disk.num_damaged, run.disk.num_foreign) == (0, 0)
    if build(name).can_be_saved:
        assert sequences[0].timings.cached_tokens == len(TRUNK) - 1
        assert sequences[1].timings.cached_tokens == len(PROMPTS[1]) - 1
        assert sum(counts) <= sum(len(prompt) - 1 - 48 for prompt in PROMPTS[2:5]) + 16 + 32  # states amid the trunk are not kept


@pytest.mark.parametrize("name", EXAMINED)
def test_after_an_abort_and_after_making_room(
    build: Callable[[str], Adapter], cold: Callable[[str], list[Answer]], name: str
) -> None:
    run = Run(build(name), CACHED, keep_logits=True)
    leaving = run.submit(PROMPTS[2], TOKENS)
    for _ in range(12):
        run.turn()
    run.engine.cancel(leaving)
    again = run.submit(PROMPTS[2], TOKENS)
    run.finish()
    tree = run.engine.prefix.tree
    if tree is not None:
        tree.shrink(tree.held_bytes // 2)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, [again, *sequences], [cold(name)[2], *cold(name)])


def measured(adapter: Adapter, caches: LayerCaches) -> int:
    """Bytes of a row's states as it is seated; where layers can not be read, of all its arrays."""
    if adapter.unreadable is not None:
        return sum(array.nbytes for cache in leaves(caches) for array in arrays_of(cache))
    contents = [content for content in adapter.contents(caches) if content is not None]
    pairs = [(one.keys, one.values) if isinstance(one, KeyValues) else one for one in contents]
    return sum(array.nbytes for arrays in pairs for array in arrays if array is not None)


def spare(adapter: Adapter, tokens: int) -> int:
    """Bytes of the places that the rings of sliding windows have beside those of their tokens."""
    rings = [spec for spec in adapter.specs if isinstance(spec, SlidingWindow)]
    places = [(min(tokens, ring.window + ring.spare) - min(tokens, ring.window), ring) for ring in rings]
    return sum(count * plane.heads * plane.dim * plane.dtype.size for count, ring in places for plane in (ring.keys, ring.values))


@pytest.mark.parametrize("name", HOUSED)
def test_predicted_bytes_are_measured_bytes(build: Callable[[str], Adapter], name: str) -> None:
    adapter = build(name)
    for tokens in (20, 72):
        caches = adapter.new_caches(tokens)
        for start in range(0, tokens, 16):
            adapter.prefill([1 + place % 90 for place in range(start, min(start + 16, tokens))], caches)[0].finish()

        assert adapter.row_bytes(tokens) == pytest.approx(measured(adapter, caches) + spare(adapter, tokens), rel=0.02)
