"""Prompts computed in one forward have the bits that each has alone, whoever joins, leaves or fails among them.

The longer tests look at some of the zoo only, `make conformance` at all of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver import SMALL, Clock, Run, random_prompts
from failing_layers import FAILURES, failing
from weft.config import EngineConfig
from weft.engine.faults import Rule
from weft.engine.scheduler import tail_end
from weft.engine.sequence import Sequence
from weft.errors import InternalError
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.memory.grouped import LineKeyValues, PromptLines
from weft.model.adapter import Adapter
from weft.model.loader import load
from zoo import EXAMINED, PROMISED, VOCABULARY

Build = Callable[[str], Adapter]
Answer = tuple[list[int], np.ndarray]
each_examined = pytest.mark.parametrize("name", EXAMINED)

GROUPED = dataclasses.replace(SMALL, group_tokens=64)
SERVED = dataclasses.replace(GROUPED, cache_bytes=1 << 30, settle_first=False)  # with a cache, in the order of a GPU
LENGTHS = (20, 20, 36, 7, 36, 20, 30, 2, 2)
MARK = 77
PROMPTS = [[token for token in prompt if token != MARK][:length] for prompt, length in
           zip(random_prompts(VOCABULARY, [length + 9 for length in LENGTHS], seed=21), LENGTHS, strict=True)]  # fmt: skip
TOKENS = 9


@pytest.fixture(scope="module")
def solo(build: Build) -> Callable[[str], list[Answer]]:
    def answers(name: str) -> list[Answer]:
        found = []
        for prompt in PROMPTS:
            run = Run(build(name), keep_logits=True)
            sequence = run.submit(prompt, TOKENS)
            run.finish()
            found.append((sequence.output, run.logits_of(sequence)))
        return found

    return functools.cache(answers)


Solo = Callable[[str], list[Answer]]


def forwards_of(run: Run) -> list[list[int]]:
    """The tokens of each row in every forward of prompts together from now on, but those that are computed for their logits."""
    found: list[list[int]] = []
    adapter = run.engine.runner.adapter
    together = adapter.prefill_together

    class Counting(type(adapter)):  # type: ignore[misc]
        def prefill_together(self, chunks: list[list[int]], rows: Any, starts: list[int], whole: Any = ()) -> Any:
            if len(chunks) > 1:
                found.append([len(chunk) - (at in whole) for at, chunk in enumerate(chunks)])
            return together(chunks, rows, starts, whole)

    counting = object.__new__(Counting)
    counting.__dict__ = adapter.__dict__
    run.engine.runner.adapter = counting
    return found


def check(run: Run, sequences: list[Sequence], expected: list[Answer]) -> None:
    for sequence, (tokens, logits) in zip(sequences, expected, strict=True):
        assert sequence.output == tokens
        assert np.array_equal(run.logits_of(sequence), logits)


@pytest.mark.parametrize("config", [GROUPED, SERVED], ids=["plain", "cached-overlapped"])
@each_examined
def test_prompts_that_come_together_have_their_own_bits(build: Build, solo: Solo, name: str, config: EngineConfig) -> None:
    if build(name).grouping != "exact":
        pytest.skip("its layers take one mask, or one offset, for all rows: its prompts are computed one by one")
    run = Run(build(name), config, keep_logits=True)
    forwards = forwards_of(run)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, sequences, solo(name))
    assert forwards


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_moe"])
def test_where_all_layers_are_fused_prompts_of_any_lengths_share_a_forward(build: Build, solo: Solo, name: str) -> None:
    run = Run(build(name), SERVED, keep_logits=True)
    run.submit([*PROMPTS[2][:20], MARK, MARK], 1)  # the third prompt goes on from a part of it
    run.finish()
    forwards = forwards_of(run)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, sequences, solo(name))
    assert sequences[2].timings.cached_tokens > 0
    assert len({*forwards[0]}) > 1
    assert max(map(sum, forwards)) <= SERVED.group_tokens


def test_a_model_whose_lines_do_not_have_their_own_bits_computes_equally_long_prompts_together(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines_of = PromptLines.__init__

    def misplaced(lines: PromptLines, *given: Any) -> None:
        lines_of(lines, *given)
        lines.positions = lines.positions[::-1]

    monkeypatch.setattr(PromptLines, "__init__", misplaced)
    adapter = Adapter(load(checkpoint("llama")), with_vision=False)

    assert adapter.ragged is None
    assert adapter.grouping == "exact"


def test_lines_of_several_prompts_have_no_windows() -> None:
    lines = PromptLines([[1, 2], [3]], [0, 0])

    assert LineKeyValues(lines, [None, None]).make_mask(3) is None
    with pytest.raises(InternalError, match="window"):
        LineKeyValues(lines, [None, None]).make_mask(3, window_size=2)


def test_promised_architectures_compute_prompts_together(build: Build) -> None:
    """All but those whose layers take one mask or one offset for all rows, or share keys between layers."""
    apart = {name for name in PROMISED if build(name).grouping != "exact"}

    assert apart == {"gemma3n", "gemma4_text", "plamo2", "kimi_linear", "deepseek_v3", "glm4_moe_lite"}


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "falcon_h1"])
def test_chunks_computed_together_beside_a_row_that_decodes_are_interrupted_at_every_layer(
    build: Build, solo: Solo, name: str
) -> None:
    run = Run(build(name), dataclasses.replace(GROUPED, chunk_tokens=40), keep_logits=True)
    neighbour = run.submit(PROMPTS[3], 60)
    while len(neighbour.output) < 2:
        run.turn()
    forwards, first = forwards_of(run), len(neighbour.output)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS[:2]]
    while not any(sequence.output for sequence in sequences):
        run.turn()
    steps = len(neighbour.output) - first
    run.finish()

    check(run, sequences, solo(name)[:2])
    assert forwards == [[19, 19]]  # as many tokens as a chunk may have
    assert steps >= 2  # it went on meanwhile


def test_beside_rows_that_decode_a_forward_has_no_more_tokens_than_a_chunk(build: Build) -> None:
    run = Run(build("llama"), dataclasses.replace(GROUPED, group_tokens=1000, chunk_tokens=48, unsliced_tokens=8))
    forwards = forwards_of(run)
    for prompt in PROMPTS[:2]:
        run.submit([*prompt, 1], 1)
    run.finish()
    assert forwards == [[20, 20]]
    forwards.clear()
    run.submit([5, 6, 7], 80)
    run.turn()
    for prompt in random_prompts(VOCABULARY, [20] * 6 + [5] * 6, seed=3):
        run.submit(prompt, 2)
    run.finish()

    assert forwards
    assert all(sum(counts) <= (8 if counts[0] <= 8 else 48) for counts in forwards)
    assert any(len({*counts}) > 1 for counts in forwards)


def first_end(run: Run) -> int:
    """Where the first chunk of a prompt of 20 tokens ends."""
    return tail_end(20) if run.engine.scheduler.rules.has_checkpoints else 19


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_one_that_leaves_amid_a_chunk_costs_the_others_nothing(build: Build, solo: Solo, name: str, turns: int) -> None:
    run = Run(build(name), dataclasses.replace(SERVED, chunk_tokens=64), keep_logits=True)
    neighbour = run.submit(PROMPTS[3], 60)
    while len(neighbour.output) < 2:
        run.turn()
    forwards = forwards_of(run)
    leaving, *staying = [run.submit(prompt, TOKENS) for prompt in (PROMPTS[5], *PROMPTS[:2])]
    while not leaving.is_amid_chunk:
        run.turn()
    for _ in range(turns):
        run.turn()
    run.engine.cancel(leaving)
    again = run.submit(PROMPTS[5], TOKENS)
    run.finish()

    check(run, [*staying, again], [*solo(name)[:2], solo(name)[5]])
    assert [first_end(run)] * 3 in forwards
    assert len(neighbour.output) == 60


@pytest.mark.parametrize("failure", ["raise", "evaluate", "evaluate late"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("has_neighbour", [False, True])
def test_of_prompts_computed_together_the_one_that_fails_fails_alone(
    build: Build, solo: Solo, name: str, failure: str, has_neighbour: bool
) -> None:
    adapter = build(name)
    run = Run(adapter, dataclasses.replace(SERVED, chunk_tokens=64), keep_logits=True, expected=(ValueError, RuntimeError))
    neighbour = run.submit(PROMPTS[3], TOKENS) if has_neighbour else None
    while neighbour is not None and not neighbour.output:
        run.turn()
    forwards = forwards_of(run)
    used = {token for prompt in PROMPTS for token in prompt} | {token for tokens, _ in solo(name) for token in tokens}
    unused = min({*range(VOCABULARY)} - used - {*(neighbour.output if neighbour else ())})
    with failing(adapter.model, unused, FAILURES[failure]):
        prompts = (PROMPTS[0], [*PROMPTS[5][:8], unused, *PROMPTS[5][9:]], PROMPTS[1])
        first, guilty, last = (run.submit(prompt, TOKENS) for prompt in prompts)
        run.finish()

    assert guilty.finish == "error"
    check(run, [first, last], solo(name)[:2])
    assert neighbour is None or neighbour.output == solo(name)[3][0]
    assert forwards[0] == [first_end(run)] * 3
    assert not run.engine.scheduler.apart


def test_a_prompt_that_fails_before_its_chunk_begins_is_left_out_of_the_forward(build: Build, solo: Solo) -> None:
    run = Run(build("llama"), GROUPED, keep_logits=True)
    run.engine.faults.rules = [Rule("prefill", MARK)]
    forwards = forwards_of(run)
    first, guilty, last = (run.submit(prompt, TOKENS) for prompt in (PROMPTS[0], [MARK, *PROMPTS[5][1:]], PROMPTS[1]))
    run.finish()

    assert guilty.finish == "error"
    check(run, [first, last], solo("llama")[:2])
    assert len(forwards[0]) == 2


def test_what_prompts_share_is_computed_once_all_the_same(build: Build) -> None:
    run = Run(build("qwen3_5"), dataclasses.replace(SERVED, chunk_tokens=64), clock=Clock())
    forwards = forwards_of(run)
    trunk = PROMPTS[2][:24]
    run.submit(PROMPTS[4], 2)  # as long, and another
    sequences = [run.submit([*trunk, *tail], 2) for tail in random_prompts(VOCABULARY, [12] * 4, seed=8)]
    run.finish()

    assert [one.timings.cached_tokens for one in sequences].count(0) == 1
    assert sum(one.timings.cached_tokens >= len(trunk) for one in sequences) == 3
    assert forwards == [[tail_end(36), 19], [11] * 4]  # what they share once, first beside another prompt; then their tails


def test_prompts_of_different_tenants_are_not_computed_together(build: Build) -> None:
    run = Run(build("llama"), GROUPED)
    forwards = forwards_of(run)
    choice = (Sampling(temperature=0.0, max_tokens=2, ignore_eos=True),)
    for number, prompt in enumerate((PROMPTS[0], PROMPTS[1], PROMPTS[5])):
        run.engine.submit_all(Submit((number,), prompt, choice, tenant="one" if number else "other"))
    run.finish()

    assert forwards == [[16, 16], [3, 3]]


def test_log_probabilities_of_a_prompt_are_its_own_forward(build: Build) -> None:
    run = Run(build("llama"), GROUPED)
    forwards = forwards_of(run)
    for prompt in PROMPTS[:2]:
        run.submit(prompt, 2, prompt_logprobs=0)
    run.finish()

    assert forwards == []
