"""Long rows decode in the arrays they were prefilled in, and leave these to the conversation's next turn.

What their answers are compared with is computed on copies, as short rows are. The limit is low here: a small model's row is long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import scripted
from driver import SMALL, Run, answers, random_prompts, restored
from weft.engine import runner
from weft.engine.faults import Rule
from weft.engine.row_memory import RowMemory
from weft.engine.sequence import Sequence
from weft.memory.slabs import Slab
from weft.model.adapter import Adapter

Build = Callable[[str], Adapter]
CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30, chunk_tokens=64)
LONG, SHORT, TAIL = random_prompts(128, (100, 9, 20), seed=5)
MARK = 77  # a token that only one prompt has


@pytest.fixture(params=["llama", "qwen3", "qwen3_5"])
def adapter(request: pytest.FixtureRequest, build: Build, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    monkeypatch.setattr(runner, "HANDOVER_TOKENS", 50)
    found = build(request.param)
    if found.fused is None:
        pytest.skip("needs weft's own operations")
    return found


def on_copies(adapter: Adapter, prompts: list[list[int]], tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    with monkeypatch.context() as changed:
        changed.setattr(runner, "HANDOVER_TOKENS", 1 << 20)
        return answers(adapter, prompts, tokens)


def slab_of(row: Sequence) -> Slab:
    assert isinstance(row.memory, RowMemory)
    assert row.memory.state.slab is not None
    return row.memory.state.slab


def address_of(array: mx.array) -> int:
    return np.array(array, copy=False).ctypes.data


def decoding(run: Run, row: Sequence) -> None:
    while row.num_output < 2:  # the first token may come with the prompt
        run.turn()


def test_a_long_row_decodes_in_its_own_arrays_and_a_short_one_in_a_copy(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(adapter, CACHED)
    rows = [run.submit(prompt, 12) for prompt in (LONG, SHORT)]
    for row in rows:
        decoding(run, row)

    assert [slab_of(row).is_handed_over for row in rows] == [True, False]
    run.finish()
    assert [row.output for row in rows] == on_copies(adapter, [LONG, SHORT], 12, monkeypatch)


def test_steps_of_a_long_row_change_the_arrays_in_place_that_it_was_prefilled_in(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    row = run.submit(LONG, 12)
    while not row.is_prefilled:
        run.turn()
    assert isinstance(row.memory, RowMemory)
    assert row.memory.own is not None
    address = address_of(next(cache.keys for cache in row.memory.own if type(cache) is KVCache))
    decoding(run, row)
    for _ in range(4):
        run.turn()

    assert address_of(slab_of(row).layers[min(slab_of(row).layers)].keys) == address


def test_the_next_turn_goes_on_in_the_arrays_that_the_last_one_decoded_in(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(adapter, CACHED)
    first = run.submit(LONG, 12)
    run.finish()
    counts = restored(run)
    second = run.submit([*LONG, *first.output, *TAIL], 12)
    run.finish()

    assert counts == []
    assert second.timings.cached_tokens == len(LONG) - 1
    assert second.output == on_copies(adapter, [second.prompt], 12, monkeypatch)[0]


def test_a_row_that_outgrows_its_arrays_leaves_them_to_the_next_turn_while_it_decodes(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "HANDOVER_ROOM", 0)
    tokens = 256 - len(LONG) + 20  # a cache has room for a multiple of 256
    run = Run(adapter, CACHED)
    row = run.submit(LONG, tokens)
    while row.num_output < tokens - 5:
        run.turn()
    assert not slab_of(row).is_handed_over
    counts = restored(run)
    other = run.submit([*LONG, *TAIL], 12)
    run.finish()

    assert counts == []
    assert row.output == on_copies(adapter, [LONG], tokens, monkeypatch)[0]
    assert other.output == on_copies(adapter, [other.prompt], 12, monkeypatch)[0]


def test_drafts_that_are_refused_leave_nothing_behind_in_the_arrays(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    right = on_copies(adapter, [LONG], 24, monkeypatch)
    run = Run(adapter, CACHED)
    scripted.add_drafts(run, right, [scripted.right_then_wrong])
    first = run.submit(LONG, 24)
    run.finish()
    second = run.submit([*LONG, *TAIL], 12)
    run.finish()

    assert first.output == right[0]
    assert second.output == on_copies(adapter, [second.prompt], 12, monkeypatch)[0]


def test_the_arrays_of_a_row_that_failed_are_given_to_nobody(adapter: Adapter) -> None:
    """The second row computes no chunk of its own, so what it begins from stays in the tree."""
    run = Run(adapter, CACHED)
    run.submit([*LONG, MARK, *TAIL], 2)
    run.finish()
    run.engine.faults.rules = [Rule("logits", MARK, after=2)]
    second = run.submit([*LONG, MARK, *TAIL], 12)
    run.finish()

    assert (second.finish, second.timings.cached_tokens) == ("error", len(second.prompt) - 1)
    assert run.engine.prefix.retained.held_bytes == 0  # type: ignore[attr-defined]


def test_rows_of_one_prompt_and_rows_that_come_and_go_have_their_own_answers(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[*LONG, *TAIL], LONG, [*LONG, *SHORT], SHORT, [*LONG, *TAIL], [*LONG[:60], *TAIL]]
    right = on_copies(adapter, prompts, 16, monkeypatch)
    run = Run(adapter, CACHED)
    rows = []
    for prompt in prompts:
        rows.append(run.submit(prompt, 16))
        for _ in range(5):
            run.turn()
    run.finish()

    assert [row.output for row in rows] == right
