"""A step that fails is taken apart until the guilty row is alone; everybody else goes on, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driver import SMALL, Run, adapter_for, answers, random_prompts
from weft.engine.engine import MAX_FAILED_TURNS
from weft.engine.faults import Faults, InjectedFault, Point, Rule
from weft.engine.sequence import Sequence
from weft.errors import InternalError
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter

MARK = 77
TOKENS = 14
PROMPTS = [[token for token in prompt if token != MARK] for prompt in random_prompts(128, [5, 40, 17, 60, 33, 8, 21, 50], seed=9)]
ON_A_GPU = {"settle_first": False, "group_tokens": 64}  # and prompts in one forward
POINTS: list[Point] = ["prefill", "decode", "sampler", "snapshot", "restore", "logits", "accept"]


@pytest.fixture(scope="module", params=["qwen3_5", "gear", "llama", "gemma2"])
def adapter(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint(request.param))


@pytest.fixture(scope="module")
def undisturbed(adapter: Adapter) -> list[list[int]]:
    return answers(adapter, PROMPTS, TOKENS)


def started(adapter: Adapter, guilty: int, rule: Rule, num_tokens: int = TOKENS, **settings: Any) -> tuple[Run, list[Any]]:
    run = Run(adapter, replace(SMALL, cache_bytes=1 << 20, **settings))
    run.engine.faults.rules = [rule]
    prompts = [[*prompt, MARK, 3] if place == guilty else prompt for place, prompt in enumerate(PROMPTS)]
    return run, [run.submit(prompt, num_tokens) for prompt in prompts]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("guilty", "order"), [(0, {}), (5, {}), (5, ON_A_GPU)], ids=["0", "5", "5-overlapped"])
def test_exactly_the_guilty_row_fails(
    adapter: Adapter, undisturbed: list[list[int]], point: Point, guilty: int, order: dict[str, Any]
) -> None:
    after = 7 if point in ("decode", "sampler", "logits", "accept") else 0
    run, rows = started(adapter, guilty, Rule(point, MARK, after=after), **order)
    if point == "restore":  # nobody restores what it computed itself
        run.finish()
        rows[guilty] = run.submit([*PROMPTS[guilty], MARK, 3, 9], TOKENS)
    run.finish()

    assert rows[guilty].finish == "error"
    assert all(row.output == undisturbed[place] for place, row in enumerate(rows) if place != guilty)
    assert not run.engine.bisection.groups
    tree = run.engine.prefix.tree
    assert tree is None or not any(node.pins for node in tree.nodes())
    if tree is not None and point != "restore":  # there another one computed it
        assert not any(MARK in node.tokens for node in tree.nodes())  # nobody may go on from what it computed


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_fault_that_passes_costs_nobody_anything(adapter: Adapter, pipelined: bool) -> None:
    # Long enough that enough rows share the step: it fails as a whole and as a half, then passes.
    run, rows = started(adapter, 6, Rule("decode", MARK, after=11, times=2), num_tokens=25, pipelined=pipelined)
    run.finish()

    prompts = [[*prompt, MARK, 3] if place == 6 else prompt for place, prompt in enumerate(PROMPTS)]
    assert [row.output for row in rows] == answers(adapter, prompts, 25)


def test_a_layer_that_raises_amid_a_forward_is_undone(adapter: Adapter) -> None:
    run, rows = started(adapter, 2, Rule("turn", 999))
    decode, strikes = adapter.decode, iter([False] * 6 + [True])

    def broken(tokens: Any, batch: Any) -> Any:
        logits = decode(tokens, batch)  # all layers have written their states
        if next(strikes, False):
            raise InjectedFault("a layer")
        return logits

    adapter.decode = broken  # type: ignore[method-assign]
    try:
        run.finish()
    finally:
        del adapter.decode  # type: ignore[method-assign]

    prompts = [[*prompt, MARK, 3] if place == 2 else prompt for place, prompt in enumerate(PROMPTS)]
    assert [row.output for row in rows] == answers(adapter, prompts, TOKENS)


def test_one_bad_row_among_waiting_and_cancelled_ones(adapter: Adapter) -> None:
    run, rows = started(adapter, 1, Rule("decode", MARK, after=4), max_rows=3)
    for turn in range(200):
        run.turn()
        if turn == 30:
            run.engine.cancel(rows[4])
    run.finish()

    expected = answers(adapter, PROMPTS, TOKENS)
    assert rows[1].finish == "error"
    assert all(row.output == expected[place] for place, row in enumerate(rows) if place not in (1, 4))


def test_an_engine_that_only_fails_says_so(checkpoint: Callable[[str], Path]) -> None:
    run = Run(adapter_for(checkpoint("llama")))
    run.engine.faults = run.engine.runner.faults = Faults([Rule("decode", token) for token in range(128)])
    for prompt in PROMPTS * 3:
        run.submit(prompt, 5)

    with pytest.raises(InternalError, match="10 turns failed"):
        run.finish()


def test_a_step_that_succeeds_resets_the_count_of_failed_turns(checkpoint: Callable[[str], Path]) -> None:
    run = Run(adapter_for(checkpoint("llama")))
    run.engine.faults.rules = [Rule("decode", MARK)]

    def serve(*marked: bool) -> list[str | None]:
        """One request after the other; a marked one fails, then once more alone, so it takes two turns to end."""
        sequences = []
        for is_marked in marked:
            sequences.append(run.submit([5, MARK if is_marked else 6, 7], 3))
            run.finish()
        return [sequence.finish for sequence in sequences]

    assert serve(True, True, True, True) == ["error"] * 4
    assert run.engine.num_failed_turns == MAX_FAILED_TURNS - 2
    assert serve(False) == ["length"]
    assert run.engine.num_failed_turns == 0
    assert serve(True, True, True, True) == ["error"] * 4
    with pytest.raises(InternalError, match="10 turns failed"):
        serve(True)


@pytest.mark.parametrize("exact", [True, False])
def test_long_answers_are_gone_on_with_as_prompts(checkpoint: Callable[[str], Path], exact: bool) -> None:
    adapter = adapter_for(checkpoint("qwen3_5"))
    assert adapter.decodes_like_prefill  # if exact, only such models do so
    run, rows = started(adapter, 3, Rule("decode", MARK, after=12, times=1), max_replayed_tokens=6, exact=exact)
    run.finish()

    prompts = [[*prompt, MARK, 3] if place == 3 else prompt for place, prompt in enumerate(PROMPTS)]
    assert [row.output for row in rows] == answers(adapter, prompts, TOKENS)


def test_those_on_trial_are_let_in_before_more_urgent_ones_that_wait_for_them(checkpoint: Callable[[str], Path]) -> None:
    run = Run(adapter_for(checkpoint("llama")), replace(SMALL, max_rows=2))
    run.engine.faults.rules = [Rule("decode", MARK, after=3, times=1)]
    chosen = (Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),)
    prompts = [[*PROMPTS[0], MARK], *PROMPTS[1:5]]

    def submit(number: int, priority: int) -> Sequence:
        return run.engine.submit_all(Submit((number,), prompts[number], chosen, priority=priority))[0]

    rows = [submit(0, 0), submit(1, 0)]
    while not rows[0].output:
        run.turn()
    rows += [submit(number, 5) for number in (2, 3, 4)]  # more than there are rows
    run.finish()

    assert [row.output for row in rows] == answers(run.adapter, prompts, TOKENS)


def test_those_on_trial_are_let_in_before_prompts_that_wait_for_them(checkpoint: Callable[[str], Path]) -> None:
    adapter = adapter_for(checkpoint("qwen3_5"))
    per_row = 1.3 * adapter.row_bytes(60 + TOKENS)
    run, rows = started(
        adapter, 1, Rule("decode", MARK, after=4, times=1), memory_bytes=int((adapter.weights_bytes + 3 * per_row) / 0.9)
    )
    run.finish()

    prompts = [[*prompt, MARK, 3] if place == 1 else prompt for place, prompt in enumerate(PROMPTS)]
    assert [row.output for row in rows] == answers(adapter, prompts, TOKENS)
