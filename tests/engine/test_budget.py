"""One book of bytes: who is let in, who has to make room, and what can never fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver import SMALL, Run, adapter_for, answers, random_prompts
from sequences import sequence_of
from weft.engine.budget import MemoryBudget
from weft.engine.sequence import Sequence
from weft.errors import InsufficientMemory
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.memory.spec import LayerSpec, Recurrent
from weft.model.adapter import Adapter


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


def row(prompt: int, max_tokens: int = 10_000) -> Sequence:
    return sequence_of([1] * prompt, max_tokens)


def ledger_of(rows: float, adapter: Adapter, tokens: int = 200) -> int:
    """A budget with room for so many rows of so many tokens."""
    book = MemoryBudget(adapter.row_bytes, adapter.weights_bytes)
    return int((adapter.weights_bytes + rows * book.bytes_of(tokens)) / 0.9) + 2


def test_prompt_and_expected_answer_are_reserved_and_more_when_they_are_used_up() -> None:
    book = MemoryBudget(lambda tokens: 10 * tokens, 0, 1_000_000)
    one = row(100)
    assert book.needed(one) == 1.3 * 10 * (100 + 256)
    one.output = [1] * 256
    assert book.needed(one) == 1.3 * 10 * (100 + 512)
    assert book.needed(row(100, max_tokens=3)) == int(1.3 * 10 * 103)


def test_recurrent_states_are_charged_once_for_each_request_however_short_it_is() -> None:
    """As many states as Qwen3.5-122B has, of four megabytes each."""
    states: list[LayerSpec] = [Recurrent((((64, 128, 128), mx.float32),))] * 36
    book = MemoryBudget(lambda tokens: sum(spec.bytes_at(tokens) for spec in states), 0, 10 * 2**30)
    short, long = row(2, max_tokens=1), row(20_000)
    assert book.needed(short) == book.needed(long) == int(1.3 * 36 * 4 * 2**20)
    per_row = book.needed(short)

    assert MemoryBudget(book.row_bytes, 0, per_row).max_row_tokens(4096) == 0  # so any prompt is refused
    roomy = MemoryBudget(book.row_bytes, 0, int(2.5 * per_row / 0.9))
    assert roomy.fits(short, [long])
    assert not roomy.fits(short, [long, long])


@given(st.integers(1, 5000), st.integers(0, 100_000), st.integers(1, 50))
def test_the_longest_row_is_the_longest_that_fits(context: int, budget: int, per_token: int) -> None:
    book = MemoryBudget(lambda tokens: 1000 + per_token * tokens, 500, budget)
    most = book.max_row_tokens(context)

    room = book.room_bytes
    assert room is not None
    assert most == context or book.bytes_of(most + 1) > room
    assert most == 0 or book.bytes_of(most) <= room


def test_sixty_four_long_requests_all_finish_with_room_for_a_few(adapter: Adapter) -> None:
    prompts = random_prompts(adapter.vocab_size, [60 + number for number in range(64)], seed=5)
    config = dataclasses.replace(SMALL, memory_bytes=ledger_of(3, adapter), cache_bytes=1 << 20)
    run = Run(adapter, config)
    rows = [run.submit(prompt, 12) for prompt in prompts]
    most = 0
    while not run.engine.idle:
        run.turn()
        most = max(most, len(run.engine.scheduler.running))
        assert not run.engine.budget.is_over(run.engine.scheduler.running)
        tree = run.engine.prefix.tree
        assert tree is not None
        room = run.engine.budget.room_bytes
        assert room is not None
        pinned = sum(node.nbytes for node in tree.nodes() if node.pins)
        assert run.engine.budget.reserved(run.engine.scheduler.running) + tree.held_bytes - pinned <= room

    assert 2 <= most <= 6
    assert [one.output for one in rows] == answers(adapter, prompts, 12)


def test_rows_that_outgrow_what_was_expected_make_room_youngest_first(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.budget.EXPECTED_TOKENS", 8)
    prompts = random_prompts(adapter.vocab_size, [20, 20, 20, 20], seed=6)
    config = dataclasses.replace(SMALL, memory_bytes=ledger_of(2.5, adapter, 90))
    run = Run(adapter, config)
    rows = [run.submit(prompt, 60) for prompt in prompts]
    taken_back: list[int] = []
    preempt = run.engine._preempt

    def noting(sequence: Sequence) -> None:
        taken_back.append(sequence.id)
        preempt(sequence)

    run.engine._preempt = noting  # type: ignore[method-assign]
    run.finish()

    assert taken_back
    assert rows[0].id not in taken_back
    assert [one.output for one in rows] == answers(adapter, prompts, 60)


def test_what_can_never_fit_is_refused_with_the_numbers(adapter: Adapter) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, memory_bytes=ledger_of(1, adapter, 100)))
    limit = run.engine.limits.memory_tokens
    assert limit is not None
    assert 100 <= limit < 110

    with pytest.raises(InsufficientMemory, match=f"enough for {limit} tokens"):
        run.submit([1] * 50, 80)
    with pytest.raises(InsufficientMemory, match="do not fit into memory"):
        run.submit([1] * 120, 1)
    whole = run.engine.submit(
        [1] * 50, Sampling(temperature=0.0, ignore_eos=True)
    )  # of no stated length: it ends where memory does
    run.finish()
    assert whole.finish == "length"
    assert len(whole.output) == limit - 50


def test_a_client_without_a_row_does_not_wait_for_one_that_has_them_all(adapter: Adapter) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, max_rows=4))
    prompts = random_prompts(adapter.vocab_size, [100] * 12, seed=7)
    chosen = (Sampling(temperature=0.0, max_tokens=100, ignore_eos=True),)
    flood = [run.engine.submit_all(Submit((number,), prompt, chosen, client="flood"))[0] for number, prompt in enumerate(prompts)]
    for _ in range(100):
        run.turn()
    (short,) = run.engine.submit_all(
        Submit((99,), [5, 6, 7], (Sampling(temperature=0.0, max_tokens=3, ignore_eos=True),), client="other")
    )
    turns = 0
    while not short.is_finished:
        run.turn()
        turns += 1
    assert turns < 20
    assert sum(one.is_finished for one in flood) == 0
    run.finish()

    assert [one.output for one in flood] == answers(adapter, prompts, 100)


def test_clients_are_served_alike_and_the_urgent_before_them(adapter: Adapter) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, max_rows=1))
    chosen = (Sampling(temperature=0.0, max_tokens=4, ignore_eos=True),)
    asked = [("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 5)]
    order: list[int] = []
    rows = [
        run.engine.submit_all(Submit((number,), [3, 4, 5], chosen, client=client, priority=priority))[0]
        for number, (client, priority) in enumerate(asked)
    ]
    while not run.engine.idle:
        run.turn()
        order += [one.id for one in rows if one.is_finished and one.id not in order]

    assert order == [4, 0, 3, 1, 2]


@pytest.mark.parametrize("pipelined", [True, False])
def test_rows_that_sit_out_for_another_tenant_have_the_answers_they_would_have_alone(adapter: Adapter, pipelined: bool) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, max_rows=8, row_cost=0.5, pipelined=pipelined))
    chosen = (Sampling(temperature=0.0, max_tokens=24, ignore_eos=True),)
    prompts = [[number, 4, 5, 6] for number in range(10, 18)]
    rows = []
    for number, prompt in enumerate(prompts):
        rows += run.engine.submit_all(Submit((number,), prompt, chosen, tenant="chat" if not number else "flood"))
    lead = 0
    while not run.engine.idle:
        run.turn()
        lead = max(lead, len(rows[0].output) - min(len(row.output) for row in rows))

    assert lead > 5  # some sat out
    assert [row.output for row in rows] == answers(adapter, prompts, 24)
