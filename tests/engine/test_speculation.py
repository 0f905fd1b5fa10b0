"""What drafts may not change beside the tokens: where answers end, what is told, who fails, and what is left in memory.

The drafts come from a script that knows the right answers. That tokens and bits are those of plain steps is shown for every
architecture in `oracle/test_speculated_is_plain.py`; here it is looked for where drafts meet an end, a fault or a NaN.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import scripted
from driver import SMALL, Clock, Run, answers, random_prompts
from failing_layers import FAILURES, failing
from weft.config import DRAFT_SOURCES
from weft.engine.budget import MemoryBudget
from weft.engine.draft_policy import DraftPolicy
from weft.engine.faults import InjectedFault, Point, Rule
from weft.engine.sequence import Line, Sequence
from weft.engine.speculation import Draft
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit, TokenEvent
from weft.memory.spec import MAX_STEP_TOKENS
from weft.model.adapter import Adapter, Way

Build = Callable[[str], Adapter]
MARK, POISON = 70, 51  # tokens that no prompt and no answer has
TOKENS = 24
PROMPTS = random_prompts(128, (21, 7, 40, 13), seed=4)
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def adapter(build: Build) -> Adapter:
    return build("qwen3_5")


@pytest.fixture(scope="module")
def plain(adapter: Adapter) -> list[list[int]]:
    return answers(adapter, PROMPTS, TOKENS)


MARKED = [[MARK, *prompt] if place == 1 else prompt for place, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def marked_plain(adapter: Adapter) -> list[list[int]]:
    return answers(adapter, MARKED, TOKENS)


def speculating(adapter: Adapter, right: list[list[int]], scripts: list[scripted.Script], **settings: Any) -> Run:
    run = Run(adapter, dataclasses.replace(SMALL, **settings))
    scripted.add_drafts(run, right, scripts)
    return run


def answer(adapter: Adapter, prompt: list[int], tokens: int, **sampling: Any) -> Sequence:
    """The finished sequence of a prompt that is alone and has no drafts."""
    run = Run(adapter)
    sequence = run.submit(prompt, tokens, **sampling)
    run.finish()
    return sequence


def with_drafts(adapter: Adapter, right: list[int], prompt: list[int], tokens: int, **sampling: Any) -> Sequence:
    """The finished sequence of a prompt whose drafts are these tokens, right or not."""
    run = speculating(adapter, [right], [scripted.always_right])
    sequence = run.submit(prompt, tokens, **sampling)
    run.finish()
    return sequence


def num_wasted(sequence: Sequence) -> int:
    """Draft tokens that were verified and did not count."""
    return sum(sequence.drafting.drafted.values()) - sum(sequence.drafting.accepted.values())


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 10, 17])
def test_max_tokens_inside_a_draft_ends_the_answer_and_no_draft_reaches_beyond(
    adapter: Adapter, plain: list[list[int]], tokens: int
) -> None:
    sequence = with_drafts(adapter, plain[0], PROMPTS[0], tokens)

    assert (sequence.output, sequence.finish) == (plain[0][:tokens], "length")
    assert num_wasted(sequence) == 0


def test_the_end_of_the_context_inside_a_draft_ends_the_answer(build: Build) -> None:
    short = copy.copy(build("gpt2"))  # its positions are rows of a table, which ends there
    short.context_length = 512
    prompts = [(PROMPTS[0] * 30)[:500], PROMPTS[1]]
    right = [answer(short, prompt, 12).output for prompt in prompts]
    run = speculating(short, right, [scripted.always_right] * 2)
    at_the_end = run.engine.submit(prompts[0], Sampling(temperature=0.0, ignore_eos=True))
    neighbour = run.submit(prompts[1], 12)
    run.finish()

    assert (at_the_end.output, at_the_end.finish) == (right[0], "length")
    assert neighbour.output == right[1]
    assert num_wasted(at_the_end) == 0


@pytest.mark.parametrize("place", [1, 4, 9])
def test_a_stop_token_inside_a_draft_ends_the_answer_and_is_never_drafted(
    adapter: Adapter, plain: list[list[int]], place: int
) -> None:
    stop = plain[0][place]
    sequence = with_drafts(adapter, plain[0], PROMPTS[0], TOKENS, stop_token_ids=(stop,))

    assert sequence.output == plain[0][: plain[0].index(stop)]
    assert sequence.ending is not None
    assert (sequence.ending.reason, sequence.ending.stop_token) == ("stop", stop)
    assert num_wasted(sequence) == 0


@pytest.mark.parametrize("sampling", [{}, HOT], ids=["greedy", "hot"])
def test_min_tokens_holds_stop_tokens_back_for_each_line_of_a_draft_by_itself(adapter: Adapter, sampling: dict[str, Any]) -> None:
    free = answer(adapter, PROMPTS[0], TOKENS, **sampling).output
    for place in (4, 6):  # before the stop token may come, and behind as many draft tokens as must come
        held_back = {"stop_token_ids": (free[place],), "min_tokens": 6, **sampling}
        expected = answer(adapter, PROMPTS[0], TOKENS, **held_back)
        sequence = with_drafts(adapter, expected.output + free, PROMPTS[0], TOKENS, **held_back)

        assert (expected.output == free[:6]) == (place == 6)
        assert (sequence.output, sequence.ending) == (expected.output, expected.ending)
        assert sum(sequence.drafting.accepted.values()) > 3


@pytest.mark.parametrize("script", [scripted.always_right, scripted.right_then_wrong])
def test_log_probabilities_behind_draft_tokens_are_those_of_plain_steps(adapter: Adapter, script: scripted.Script) -> None:
    chosen = {"logprobs": 3, **HOT}
    expected = answer(adapter, PROMPTS[2], TOKENS, **chosen)
    run = speculating(adapter, [expected.output], [script])
    sequence = run.submit(PROMPTS[2], TOKENS, **chosen)
    run.finish()

    assert sequence.output == expected.output
    assert sequence.logprobs == expected.logprobs


def test_random_numbers_and_penalties_of_a_line_are_those_of_its_place(adapter: Adapter) -> None:
    chosen = {**HOT, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    expected = answer(adapter, PROMPTS[1], TOKENS, **chosen).output
    sequence = with_drafts(adapter, expected, PROMPTS[1], TOKENS, **chosen)

    assert sequence.output == expected
    assert num_wasted(sequence) == 0


def test_a_line_counts_the_draft_tokens_before_it() -> None:
    request = Submit((0,), [5, 6], (Sampling(frequency_penalty=1.0),))
    sequence = Sequence(request, 0, 9, frozenset(), now=0.0)
    sequence.begin_step(1)
    sequence.begin_step(1)
    sequence.append(7, None)
    sequence.begin_step(1)
    lines = [Line(sequence, (7, 8, 7)[:count]) for count in range(4)]

    assert [line.num_tokens - 1 - len(sequence.prompt) for line in lines] == [line.num_output for line in lines]
    assert [line.num_tokens for line in lines] == [4, 5, 6, 7]
    assert [line.token_counts[7] for line in lines] == [1, 2, 2, 3]  # type: ignore[index]
    assert sequence.token_counts == {7: 1}


def events_of(run: Run) -> dict[int, list[TokenEvent]]:
    found: dict[int, list[TokenEvent]] = {}
    for event in run.engine.take_events():
        found.setdefault(event.sequence, []).append(event)
    return found


def test_every_token_is_told_once_in_order_and_nothing_after_the_end(adapter: Adapter, plain: list[list[int]]) -> None:
    scripts = [scripted.always_right, scripted.right_then_wrong, scripted.at_random(3), scripted.now_and_then]
    run = speculating(adapter, plain, scripts)
    limits = [TOKENS, 11, 5, TOKENS]
    rows = [run.submit(prompt, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    run.finish()

    found = events_of(run)
    for row in rows:
        events = found[row.id]
        assert [event.token for event in events] == row.output == plain[row.id][: limits[row.id]]
        assert [event.finish for event in events] == [None] * (len(row.output) - 1) + ["length"]
        assert events[-1].timings is row.timings


def test_a_row_that_is_cancelled_amid_its_drafts_tells_nothing_more_and_changes_nobody(
    adapter: Adapter, plain: list[list[int]]
) -> None:
    run = speculating(adapter, plain, [scripted.always_right] * 3)
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS[:3]]
    while len(rows[1].output) < 4:
        run.turn()
    told = len(rows[1].output)
    run.engine.cancel(rows[1])
    run.finish()

    events = events_of(run)
    assert [event.token for event in events[1]] == [*plain[1][:told], None]
    assert [event.finish for event in events[1] if event.finish] == ["cancelled"]
    assert [rows[0].output, rows[2].output] == [plain[0], plain[2]]


def test_drafts_of_ids_that_are_no_tokens_are_never_computed(adapter: Adapter, plain: list[list[int]]) -> None:
    for wrong in (-1, adapter.vocab_size, 10**9):
        run = speculating(adapter, plain, [lambda right, _, count, wrong=wrong: (*right[:2], wrong, *right)[:count]])  # type: ignore[misc]
        plans = scripted.note_plans(run)
        row = run.submit(PROMPTS[0], TOKENS)
        run.finish()

        assert row.output == plain[0]
        assert {len(plan.drafts[row]) for plan in plans if row in plan.drafts} <= {1, 2}


# --- going back ------------------------------------------------------------------------------------------------------


def poisoning(output: mx.array, tokens: mx.array, token: int) -> mx.array:
    """A layer that gives no numbers for this token."""
    return mx.where((tokens == token)[..., None], mx.nan, output)


def poisonous(right: tuple[int, ...], number: int, count: int) -> tuple[int, ...]:
    """A few right tokens, then some whose keys, values and states are NaN; now and then nothing, or all right."""
    size = (0, 3, 7, 1, 7)[number % 5]
    return right[:count] if number % 7 == 6 else (*right[: number % 3], *[POISON] * 7)[: min(size, count)]


# With full attention, sliding windows (rings), recurrent layers; one is read slab by slab, under masks.
@pytest.mark.parametrize(("name", "way"), [("qwen3_5", "seam"), ("gemma3_text", "seam"), ("gear", "seam"), ("llama", "plain")])
@pytest.mark.parametrize("beside", [0, 3])
def test_not_a_number_in_draft_tokens_that_do_not_count_is_in_no_later_token(
    build: Build, name: str, way: Way, beside: int
) -> None:
    adapter = copy.copy(build(name))
    adapter.way = way
    prompts = PROMPTS[: 1 + beside]
    alone = [Run(adapter, keep_logits=True) for _ in prompts]
    expected = [run.submit(prompt, TOKENS) for run, prompt in zip(alone, prompts, strict=True)]
    for run in alone:
        run.finish()
    assert not any(POISON in one.output for one in expected)
    run = Run(adapter, keep_logits=True)
    scripted.add_drafts(run, [one.output for one in expected], [poisonous, scripted.now_and_then, poisonous, poisonous])
    with failing(adapter.model, POISON, poisoning):
        rows = [run.submit(prompt, TOKENS) for prompt in prompts]
        run.finish()

    for row, one, own in zip(rows, expected, alone, strict=True):
        assert row.error is None
        assert row.output == one.output
        assert np.array_equal(run.logits_of(row), own.logits_of(one))
    assert any(row.is_preempted for row in rows)  # what a NaN was beside is computed anew
    assert not any(row.is_preempted for row in rows[1:2])


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text"])
def test_not_a_number_in_places_of_draft_tokens_that_do_not_count_is_overwritten(build: Build, name: str) -> None:
    """As where each token reads its own places only, so that the tokens before are finite."""
    adapter = copy.copy(build(name))
    adapter.fused = None  # so that steps are asked for here; tests/engine/test_fused_steps.py has the same for the others
    expected = [answer(adapter, prompt, TOKENS).output for prompt in PROMPTS]
    decode = adapter.decode

    def spoiling(tokens: mx.array, batch: Any) -> mx.array:
        logits = decode(tokens, batch)
        for part in batch.parts if batch.tokens > 1 else ():
            for row, first in zip(part.rows, part.first, strict=True):
                for held in part.slab.layers.values():
                    for array in (held.keys, held.values):
                        for place in range(first + 2, first + batch.tokens):
                            array[row.slot, :, place % array.shape[2]] = mx.nan
        logits[:, 2:] = mx.nan
        return logits

    adapter.decode = spoiling  # type: ignore[method-assign]
    run = speculating(adapter, expected, [lambda right, number, count: (*right[:1], *[POISON] * 6)[: count * (number % 2)]] * 4)
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    assert [row.output for row in rows] == expected
    assert not any(row.is_preempted for row in rows)
    assert num_wasted(rows[0]) > 10


def poisoning_repeats(output: mx.array, tokens: mx.array, _: int) -> mx.array:
    """A layer that gives no numbers for a token that repeats the one before it in the same forward."""
    is_repeat = mx.concatenate([mx.zeros_like(tokens[:, :1]) > 0, tokens[:, 1:] == tokens[:, :-1]], axis=1)
    return mx.where(is_repeat[..., None], mx.nan, output)


@pytest.mark.parametrize("name", ["qwen3_5"])  # its answers repeat no token, so a prompt of them is finite
def test_not_a_number_in_what_fills_a_row_beside_drafts_costs_the_row_nothing(build: Build, name: str) -> None:
    adapter = build(name)
    expected = [answer(adapter, prompt, TOKENS).output for prompt in PROMPTS[:2]]
    run = Run(adapter)
    scripted.add_drafts(run, expected, [scripted.always_right])  # the second row has none, and repeats its last token
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS[:2]]
    while not all(row.is_prefilled for row in rows):
        run.turn()
    with failing(adapter.model, POISON, poisoning_repeats):
        run.finish()

    assert [row.error for row in rows] == [None, None]
    assert [row.output for row in rows] == expected
    assert rows[1].is_preempted


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text"])
def test_eight_tokens_then_one_then_eight(build: Build, name: str) -> None:
    adapter = build(name)
    expected = answer(adapter, PROMPTS[0], 40).output
    # A draft of seven tokens after every tenth token, and after the one that may be under way then.
    run = speculating(adapter, [expected], [lambda right, _, count: right[: count * ((40 - len(right)) % 10 in (1, 2))]])
    plans = scripted.note_plans(run)
    row = run.submit(PROMPTS[0], 40)
    run.finish()

    assert row.output == expected
    assert re.fullmatch("(1+8){3,}1*", "".join(str(plan.step_tokens) for plan in plans if plan.steps))


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "gpt_oss", "gear", "mamba2"])
def test_a_model_whose_steps_can_go_back_verifies_drafts_of_seven_tokens(build: Build, name: str) -> None:
    assert build(name).unverified is None
    assert build(name).step_tokens == MAX_STEP_TOKENS


@pytest.mark.parametrize(
    ("name", "words"), [("mamba", "keeps its state after the last token only"), ("gemma2", "its rows decode alone")]
)
def test_a_model_whose_steps_can_not_go_back_verifies_none_and_says_why(build: Build, name: str, words: str) -> None:
    adapter = build(name)
    run = Run(adapter, dataclasses.replace(SMALL, speculate=DRAFT_SOURCES))
    plans = scripted.note_plans(run)
    repetitive = PROMPTS[1] * 4
    row = run.submit(repetitive, TOKENS)
    run.finish()

    assert all(words in reason for reason in run.engine.speculation.unused.values())
    assert set(run.engine.speculation.unused) == {*DRAFT_SOURCES}
    assert {plan.step_tokens for plan in plans} == {1}
    assert row.output == answer(adapter, repetitive, TOKENS).output
    assert row.timings.drafts is None


def test_steps_of_constant_width_verify_no_drafts(adapter: Adapter, plain: list[list[int]]) -> None:
    run = speculating(adapter, plain, [scripted.always_right] * 4, width=8, speculate=DRAFT_SOURCES)
    plans = scripted.note_plans(run)
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    assert [row.output for row in rows] == plain
    assert {plan.step_tokens for plan in plans} == {1}
    assert "constant width" in run.engine.speculation.unused["lookup"]


# --- faults ----------------------------------------------------------------------------------------------------------


def marked(adapter: Adapter, right: list[list[int]], *rules: Rule) -> tuple[Run, list[Sequence]]:
    """An engine with rows that have drafts; the second has a mark in its prompt, for which these faults are armed."""
    scripts = [scripted.always_right, scripted.always_right, scripted.right_then_wrong, scripted.at_random(5)]
    run = speculating(adapter, right, scripts)
    run.engine.faults.rules = list(rules)
    return run, [run.submit(prompt, TOKENS) for prompt in MARKED]


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_a_source_that_fails_costs_its_row_the_draft_and_nobody_an_answer(
    adapter: Adapter, marked_plain: list[list[int]], after: int
) -> None:
    run, rows = marked(adapter, marked_plain, Rule("draft", MARK, after=after))
    run.finish()

    assert [row.output for row in rows] == marked_plain
    assert not run.engine.last_failure
    assert bool(rows[1].timings.drafts) == (after > 0)
    assert rows[0].timings.drafts is not None


class Raising(scripted.ScriptedSource):
    """A source that fails for one sequence, in another place each time."""

    num_calls = 0

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        self._fail_for(sequence)
        return super().draft(sequence, count)

    def _fail_for(self, sequence: Sequence) -> None:
        self.num_calls += 1
        if sequence.id == 1 and self.num_calls % 3:
            raise (ValueError, RecursionError, MemoryError, RuntimeError)[self.num_calls % 4]("on purpose")


def test_whatever_a_source_raises_is_its_own_affair(adapter: Adapter, plain: list[list[int]]) -> None:
    run = Run(adapter)
    source = scripted.add_drafts(run, plain, [scripted.always_right] * 4)
    run.engine.speculation.sources = [Raising(source.answers, source.scripts)]
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    assert [row.output for row in rows] == plain
    assert not run.engine.last_failure


@pytest.mark.parametrize("after", [0, 3, 11])
@pytest.mark.parametrize("point", ["decode", "mask", "accept", "logits", "sampler"])
def test_a_fault_amid_drafts_ends_the_guilty_row_only(
    adapter: Adapter, marked_plain: list[list[int]], point: Point, after: int
) -> None:
    right = marked_plain
    run, rows = marked(adapter, right, Rule(point, MARK, after=after))
    run.finish()

    assert rows[1].finish == "error"
    assert rows[1].output == right[1][: len(rows[1].output)]
    assert len(rows[1].output) >= after
    if point == "accept":  # armed between two tokens of one step
        assert len(rows[1].output) == after
    assert [rows[place].output for place in (0, 2, 3)] == [right[place] for place in (0, 2, 3)]
    ends = [event.sequence for event in run.engine.take_events() if event.finish is not None]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("after", [0, 9])
def test_a_step_with_drafts_that_fails_is_undone_and_computed_again(
    adapter: Adapter, marked_plain: list[list[int]], after: int
) -> None:
    run, rows = marked(adapter, marked_plain, Rule("decode", MARK, after=after, times=1))
    run.finish()

    assert [row.output for row in rows] == marked_plain
    told = events_of(run)
    assert [[event.token for event in told[row.id]] for row in rows] == marked_plain


def test_a_layer_that_fails_after_all_states_of_a_verified_draft_are_written_is_undone(
    adapter: Adapter, marked_plain: list[list[int]]
) -> None:
    fragile = copy.copy(adapter)
    fragile.fused = None  # so that steps are asked for here; tests/engine/test_fused_steps.py has the same for the others
    run, rows = marked(fragile, marked_plain)
    decode, strikes = fragile.decode, iter([False, True])

    def broken(tokens: mx.array, batch: Any) -> mx.array:
        logits = decode(tokens, batch)
        if batch.tokens > 1 and next(strikes, False):
            mx.eval(logits)
            raise InjectedFault("a layer")
        return logits

    fragile.decode = broken  # type: ignore[method-assign]
    run.finish()

    assert [row.output for row in rows] == marked_plain
    assert next(strikes, None) is None


@pytest.mark.parametrize("kind", ["raise", "evaluate"])
def test_a_draft_token_that_a_layer_can_not_compute_costs_nobody_an_answer(
    adapter: Adapter, plain: list[list[int]], kind: str
) -> None:
    run = speculating(adapter, plain, [scripted.right_then_wrong, lambda right, *_: (right[0], MARK), scripted.always_right])
    run.expected = (ValueError, RuntimeError)
    with failing(adapter.model, MARK, FAILURES[kind]):
        rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS[:3]]
        run.finish()

    assert [row.output for row in rows] == plain[:3]


def test_rows_that_make_room_amid_their_drafts_go_on_as_if_they_had_not(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engine.budget.EXPECTED_TOKENS", 8)
    prompts = random_prompts(128, [20, 20, 20, 20], seed=6)
    right = answers(adapter, prompts, 60)
    budget = MemoryBudget(adapter.row_bytes, adapter.weights_bytes)
    memory_bytes = int((adapter.weights_bytes + 2.5 * budget.bytes_of(90)) / 0.9) + 2
    run = speculating(adapter, right, [scripted.right_then_wrong, scripted.at_random(2)] * 2, memory_bytes=memory_bytes)
    rows = [run.submit(prompt, 60) for prompt in prompts]
    run.finish()

    assert any(row.is_preempted for row in rows)
    assert [row.output for row in rows] == right
    told = events_of(run)
    assert [[event.token for event in told[row.id]] for row in rows] == right


@pytest.mark.parametrize("name", ["qwen3_5", "gear"])  # emitted tokens are prefilled, or decoded again
def test_an_answer_cut_at_any_token_of_a_draft_is_resumed_as_if_it_had_not_been(build: Build, name: str) -> None:
    adapter = build(name)
    chosen = Sampling(max_tokens=TOKENS, ignore_eos=True, frequency_penalty=1.0, **HOT)
    whole = answer(adapter, PROMPTS[0], TOKENS, frequency_penalty=1.0, **HOT).output
    for count in (1, 2, 5, 8, 9, TOKENS - 1):
        run = speculating(adapter, [whole], [scripted.always_right])
        (row,) = run.engine.submit_all(Submit((0,), PROMPTS[0], (chosen,), emitted=(tuple(whole[:count]),)))
        (neighbour,) = run.engine.submit_all(Submit((1,), PROMPTS[1], (Sampling(max_tokens=9, ignore_eos=True),)))
        run.finish()

        assert row.output == whole
        assert [event.token for event in events_of(run)[0]] == whole[count:]
        assert len(neighbour.output) == 9


# --- counts and clocks -----------------------------------------------------------------------------------------------


def test_counts_of_rows_add_up_to_those_of_the_engine(adapter: Adapter, plain: list[list[int]]) -> None:
    run = speculating(adapter, plain, [scripted.always_right, scripted.always_wrong, scripted.at_random(4)])
    plans = scripted.note_plans(run)
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    counts, found = run.engine.speculation.counts, [row.timings.drafts for row in rows]
    assert [one.num_drafted for one in found[:3] if one] == [
        sum(len(plan.drafts.get(row, ())) for plan in plans) for row in rows[:3]
    ]
    assert found[3] is None
    assert counts.drafted == {"lookup": sum(one.drafted["lookup"] for one in found if one)}
    assert counts.accepted == {"lookup": sum(one.accepted["lookup"] for one in found if one)}
    assert run.engine.speculation.num_drafts == sum(len(plan.drafts) for plan in plans)
    assert sum(run.engine.speculation.accepted_at) == counts.accepted["lookup"]
    assert found[1] is not None
    assert found[1].accepted == {"lookup": 0}
    steps = sum(rows[0] in plan.steps for plan in plans)
    assert found[0] is not None
    assert steps + found[0].accepted["lookup"] == TOKENS


def test_without_exactness_what_is_verified_does_not_depend_on_the_clock(adapter: Adapter) -> None:
    prompts = [PROMPTS[1] * 4, PROMPTS[3] * 3, PROMPTS[0]]

    def steps(clock: Clock) -> list[tuple[int, list[tuple[int, ...]]]]:
        config = dataclasses.replace(SMALL, exact=False, speculate=DRAFT_SOURCES, unsliced_tokens=4096)
        run = Run(adapter, config, clock=clock)
        assert not run.engine.speculation.policy.by_clock
        run.engine.speculation.policy = DraftPolicy(by_clock=False)  # with costs at which drafts of three rows pay
        plans = scripted.note_plans(run)
        for prompt in prompts:
            run.submit(prompt, 60)
        run.finish()
        return [(plan.step_tokens, [plan.drafts.get(row, ()) for row in plan.steps]) for plan in plans]

    usual = steps(Clock(tick=0.01))

    assert max(tokens for tokens, _ in usual) > 1
    assert steps(Clock(tick=3.0)) == usual
    assert steps(Clock()) == usual


# --- other tenants -----------------------------------------------------------------------------------------------------


def widest_step(run: Run, tenants: list[str], right: list[list[int]]) -> int:
    """The most tokens per row of a step that had rows of all these tenants; every answer must be the right one."""
    plans, chosen = scripted.note_plans(run), (Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),)
    rows = []
    for number, tenant in enumerate(tenants):
        rows += run.engine.submit_all(Submit((number,), PROMPTS[number], chosen, tenant=tenant))
    run.finish()

    assert [row.output for row in rows] == right
    return max(plan.step_tokens for plan in plans if {one.tenant for one in plan.steps} == set(tenants))


def test_drafts_of_a_step_of_several_tenants_take_no_more_than_the_others_can_bear(
    adapter: Adapter, plain: list[list[int]]
) -> None:
    scripts = [lambda *_: (), *[scripted.always_right] * 3]  # the first has none, and stays until the others are done
    alone = widest_step(speculating(adapter, plain, scripts, row_cost=0.2), ["flood"] * 4, plain)
    beside = widest_step(speculating(adapter, plain, scripts, row_cost=0.2), ["chat", *["flood"] * 3], plain)

    assert alone == MAX_STEP_TOKENS
    assert 1 < beside < alone
