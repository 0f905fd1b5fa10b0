"""Drafts of the real sources on the shipped model, whose MTP head is trained: forced tokens, earlier text, predictions, guesses.

Answers are those without drafts, under grammars too; and drafts are as good after a cached prefix as after a cold one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any, Self

import jsonschema_rs
import mlx.core as mx
import numpy as np
import pytest

import scripted
from driver import SMALL, Run, adapter_for
from weft.config import DRAFT_SOURCES, EngineConfig
from weft.engine.draft_policy import RowDrafts
from weft.engine.faults import Rule
from weft.engine.sequence import Sequence
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Masks
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, DraftCounts, GrammarSpec, ReasoningSpec, Submit
from weft.kernels import mtp_block
from weft.kernels.packed import weights_of
from weft.memory.disk import DiskTier
from weft.model.adapter import Adapter
from weft.model.resolve import TINY_HYBRID
from weft.text.tokenizer import Tokenizer

COMPILER = Compiler(TINY_HYBRID / "tokenizer.json", 4096, (4080, 4082))
TOKENIZER = Tokenizer(TINY_HYBRID)
ON = dataclasses.replace(SMALL, speculate=DRAFT_SOURCES)
CACHED = dataclasses.replace(ON, cache_bytes=1 << 30)
QUESTIONS = [
    "Tell me a story about a dog.",
    "Count from 1 to 20.",
    "What is a sheep?",
    "Tell me a story about a little girl and her big red ball.",
    "Reply with JSON. The marker is 7.",
    "Who is Lily?",
    "Tell me about the park.",
    "Where did the cat go?",
]
REPETITION = "The cat sat on the mat. The dog ran to the park. " * 6
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
STRICT = ConstraintSpec(GrammarSpec("json_schema", json.dumps(SCHEMA)))
YES = ConstraintSpec(GrammarSpec("choice", '["yes"]'))
TOKENS = 28
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_for(TINY_HYBRID)


def chat(question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return TOKENIZER.encode(text, add_special_tokens=False)


def hot(seed: int) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)


def finish(run: Run, *requests: Submit, constraint: Constraint | None = None) -> list[Sequence]:
    """The finished sequences of requests that are submitted together."""
    sequences = [one for request in requests for one in run.engine.submit_all(request, constraint)]
    run.finish()
    return sequences


def outputs(rows: list[Sequence]) -> list[list[int]]:
    return [row.output for row in rows]


def counts_of(row: Sequence) -> DraftCounts:
    return row.timings.drafts or DraftCounts()


class Guessing(scripted.EveryDraft):
    """A policy by which the head guesses three tokens for every row in every step."""

    def depth(self, row: RowDrafts, source: str, num_rows: int) -> int:  # noqa: ARG002
        return 3

    def depths(self, rows: Rows[RowDrafts | None], source: str, num_rows: int) -> list[int]:  # noqa: ARG002
        return [3] * len(rows)


def guessing(adapter: Adapter, config: EngineConfig = ON, disk: DiskTier | None = None) -> Run:
    """An engine whose drafts are the MTP head's, and depend on nothing but the row."""
    run = Run(adapter, dataclasses.replace(config, speculate=("mtp",)), disk=disk)
    run.engine.speculation.policy = Guessing()
    scripted.ask_four_rows(run)
    return run


# --- the MTP head, earlier text and predictions ----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_answers_with_all_sources_are_those_without(adapter: Adapter, num_rows: int) -> None:
    prompts = [*map(chat, QUESTIONS[: num_rows - 1]), TOKENIZER.encode(REPETITION, add_special_tokens=False)]
    requests = [
        Submit((number,), prompt, (hot(number) if number % 2 else GREEDY,), prediction=tuple(chat(REPETITION)))
        for number, prompt in enumerate(prompts)
    ]
    run = Run(adapter, ON)
    rows = finish(run, *requests)

    assert outputs(rows) == outputs(finish(Run(adapter), *requests))
    assert run.engine.speculation.counts.num_accepted > num_rows
    assert run.engine.speculation.counts == sum(map(counts_of, rows), DraftCounts())


@pytest.mark.parametrize(("is_hot", "least"), [(False, 0.6), (True, 0.45)], ids=["greedy", "hot"])
def test_the_head_guesses_what_the_model_answers(adapter: Adapter, is_hot: bool, least: float) -> None:
    requests = [
        Submit((number,), chat(question), (hot(number) if is_hot else GREEDY,)) for number, question in enumerate(QUESTIONS)
    ]
    run = guessing(adapter)
    run.engine.speculation.policy.depths = lambda rows, *_: [1] * len(rows)  # type: ignore[method-assign,assignment]
    finish(run, *requests)

    counts = run.engine.speculation.counts
    assert set(counts.drafted) == {"mtp"}
    assert counts.accepted["mtp"] / counts.drafted["mtp"] > least


def test_text_that_was_there_before_is_drafted_and_saves_steps(adapter: Adapter) -> None:
    question = Submit((0,), chat(QUESTIONS[2]), (GREEDY,))
    (first,) = finish(Run(adapter), question)
    request = Submit((0,), [*question.prompt, *first.output, 4082, *question.prompt], (GREEDY,))
    run = Run(adapter, dataclasses.replace(ON, speculate=("lookup",)))
    run.engine.speculation.policy = scripted.EveryDraft()
    plans = scripted.note_plans(run)
    (row,) = finish(run, request)

    assert outputs(finish(Run(adapter), request)) == [row.output]
    assert set(counts_of(row).drafted) == {"lookup"}
    assert counts_of(row).accepted["lookup"] > 20
    assert len(plans) == TOKENS - counts_of(row).accepted["lookup"]


def test_a_prediction_is_drafted_and_counted_as_one(adapter: Adapter) -> None:
    plain = Submit((0,), chat(QUESTIONS[0]), (GREEDY,))
    (expected,) = finish(Run(adapter), plain)
    predicted = [*expected.output[:15], *chat("No, a cat."), *expected.output[15:]]
    run = Run(adapter, dataclasses.replace(ON, speculate=("lookup",)))
    (row,) = finish(run, Submit((0,), plain.prompt, plain.samplings, prediction=tuple(predicted)))

    assert row.output == expected.output
    assert counts_of(row).accepted["prediction"] > 10


def test_a_request_that_wants_none_has_no_drafts_beside_others_that_have(adapter: Adapter) -> None:
    without, with_drafts = (
        Submit((number,), chat(QUESTIONS[0]), (GREEDY,), speculate=bool(number), prediction=tuple(chat(REPETITION)))
        for number in range(2)
    )
    run = Run(adapter, ON)
    plans = scripted.note_plans(run)
    rows = finish(run, without, with_drafts)

    assert rows[0].output == rows[1].output
    assert rows[0].timings.drafts is None
    assert not any(rows[0] in plan.drafts for plan in plans)
    assert counts_of(rows[1]).num_accepted > 0


@pytest.mark.parametrize("num_rows", [1, 4])
def test_guesses_made_behind_a_step_are_those_made_when_they_are_asked_for(adapter: Adapter, num_rows: int) -> None:
    if not adapter.guesses_ahead:
        pytest.skip("needs weft's own operations")
    requests = mixed_requests(num_rows)
    at_once = dataclasses.replace(ON, gap_factor=1e6)  # all prompts are computed in the first turns, so that rows decode together
    ahead, asked = guessing(adapter, at_once), guessing(adapter, at_once)
    asked.engine.runner.guesses.samplings = lambda *_: []  # type: ignore[method-assign]
    guess, num_asked = ahead.engine.runner.guesses.guess, []

    def counted(*given: Any) -> Any:
        num_asked.append(1)
        return guess(*given)

    ahead.engine.runner.guesses.guess = counted  # type: ignore[method-assign]
    rows = finish(ahead, *requests)

    assert outputs(rows) == outputs(finish(asked, *requests))
    assert ahead.engine.speculation.counts == asked.engine.speculation.counts
    assert ahead.engine.speculation.num_drafts > 5 * num_rows
    assert len(num_asked) <= 1 + num_rows  # when a row has joined or moved


@pytest.fixture(scope="module")
def precise() -> Adapter:
    """The model with a head that guesses with the weights of its file."""
    with pytest.MonkeyPatch.context() as patch:  # no longer than it is made: another may be made while it is in use
        patch.setattr(mtp_block, "light_weights", lambda layers: [weights_of(layer) for layer in layers])
        return adapter_for(TINY_HYBRID)


def mixed_requests(num_rows: int) -> list[Submit]:
    """Greedy ones and drawn ones."""
    chosen = enumerate(QUESTIONS[-num_rows:], 1)
    return [Submit((number,), chat(question), (hot(number) if number % 2 else GREEDY,)) for number, question in chosen]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_guesses_of_weft_s_operations_are_those_of_the_head_s_own_code(precise: Adapter, num_rows: int) -> None:
    if precise.head is None or not precise.guesses_ahead:
        pytest.skip("needs weft's own operations")
    requests = mixed_requests(num_rows)
    plain = copy.copy(precise)
    plain.head, plain.fused = copy.copy(precise.head), None
    plain.head.fused = None
    own_code, fused = guessing(plain), guessing(precise)

    assert outputs(finish(fused, *requests)) == outputs(finish(own_code, *requests))
    assert fused.engine.speculation.counts == own_code.engine.speculation.counts
    assert fused.engine.speculation.counts.num_accepted > 5 * num_rows


def test_guesses_with_weights_of_few_bits_are_about_as_good(adapter: Adapter, precise: Adapter) -> None:
    if not precise.guesses_ahead:
        pytest.skip("needs weft's own operations")
    requests = mixed_requests(4)
    light, right = guessing(adapter), guessing(precise)

    assert outputs(finish(light, *requests)) == outputs(finish(right, *requests))
    found, wanted = light.engine.speculation.counts, right.engine.speculation.counts
    assert found.drafted != wanted.drafted  # else they are the same weights
    assert found.num_accepted > 0.9 * wanted.num_accepted


def test_a_crowd_without_drafts_is_asked_for_them_ever_more_seldom(adapter: Adapter) -> None:
    told = Sampling(temperature=0.0, max_tokens=120, ignore_eos=True)
    run = Run(adapter, dataclasses.replace(ON, gap_factor=1e6))  # all prompts are computed in the first turns
    speculation, steps, asked = run.engine.speculation, Counter[int](), Counter[int]()
    may_draft = speculation.may_draft

    def counted(sequences: tuple[Sequence, ...], *, is_settled: bool) -> bool:
        steps[len(sequences)] += 1
        return may_draft(sequences, is_settled=is_settled)

    def never(sequences: tuple[Sequence, ...]) -> bool:
        asked[len(sequences)] += 1
        return False

    speculation.may_draft, speculation._would_pay = counted, never  # type: ignore[method-assign]
    finish(run, *(Submit((number,), chat(question), (told,)) for number, question in enumerate(QUESTIONS[:6])))
    few = speculation.few_rows
    crowded = [sum(count for num_rows, count in one.items() if num_rows > few) for one in (steps, asked)]

    assert crowded[1] > 2
    assert crowded[0] > 6 * crowded[1]
    # Of few rows drafts are asked for in every step; whether these would pay only where a step is pending.
    assert sum(steps[num_rows] for num_rows in range(1, few + 1)) > 0
    assert not any(asked[num_rows] for num_rows in range(1, few + 1))


def test_on_a_cpu_the_head_is_asked_for_two_rows_and_not_for_three(adapter: Adapter) -> None:
    if adapter.fused is None:
        pytest.skip("needs weft's own operations")
    told = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    for num_rows in (2, 3):
        run = Run(adapter, dataclasses.replace(ON, speculate=("mtp",), gap_factor=1e6))
        run.engine.speculation.policy = Guessing()
        finish(run, *(Submit((number,), chat(QUESTIONS[0]), (told,)) for number in range(num_rows)))  # all end at once

        assert (run.engine.speculation.num_drafts > 20) == (num_rows == 2)


def test_rows_that_a_crowd_leaves_behind_are_guessed_for_after_a_step_of_their_own(
    adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    if adapter.fused is None:
        pytest.skip("needs weft's own operations")
    run = Run(adapter, dataclasses.replace(ON, speculate=("mtp",), gap_factor=1e6))
    run.engine.speculation.policy = Guessing()
    tokens = (80, 80, 30)  # of which the last ends when the head has not seen more than it keeps hidden states of
    requests = [
        Submit((number,), chat(QUESTIONS[number]), (Sampling(temperature=0.0, max_tokens=count, ignore_eos=True),))
        for number, count in enumerate(tokens)
    ]
    rows = finish(run, *requests)

    assert outputs(rows) == outputs(finish(Run(adapter), *requests))
    assert run.engine.speculation.num_drafts > 10
    assert not caplog.records


@pytest.mark.parametrize("after", range(9))
def test_a_head_that_fails_costs_nobody_an_answer(adapter: Adapter, after: int) -> None:
    requests = [Submit((number,), chat(question), (GREEDY,)) for number, question in enumerate(QUESTIONS[:3])]
    run = guessing(adapter)
    run.engine.faults.rules = [Rule("guess", chat(QUESTIONS[1])[-9], after=after)]
    rows = finish(run, *requests)

    assert outputs(rows) == outputs(finish(Run(adapter), *requests))
    assert run.engine.last_failure is None


def test_a_head_that_fails_on_the_device_costs_nobody_an_answer(adapter: Adapter) -> None:
    requests = [Submit((number,), chat(question), (GREEDY,)) for number, question in enumerate(QUESTIONS[:3])]
    run = guessing(adapter)
    follow, strikes = run.engine.runner.follow, iter([False] * 20 + [True])

    def broken(*given: Any) -> Any:
        if next(strikes, False):
            raise RuntimeError("the device")
        return follow(*given)

    run.engine.runner.follow = broken  # type: ignore[method-assign]
    run.expected = RuntimeError
    rows = finish(run, *requests)

    assert outputs(rows) == outputs(finish(Run(adapter), *requests))
    assert any(row.is_preempted for row in rows)


def test_what_the_head_has_read_is_computed_with_each_step(adapter: Adapter, tmp_path: Path) -> None:
    """Its keys and values are on no logits' way: left alone, the graphs of all steps would hang on them."""
    run = Run(adapter)
    row = run.submit(chat(QUESTIONS[0]), 60)
    sizes = []
    while not row.is_finished:
        run.turn()
        for slab in run.engine.runner.pool.slabs:
            held = slab.layers[len(adapter.specs) - 2]
            mx.export_to_dot(str(tmp_path / "graph"), held.keys, held.values)
            sizes.append((tmp_path / "graph").read_text().count("->"))

    reads = [size for size in sizes if size]
    assert len(reads) > 2
    assert max(reads) < 40  # those of one read or two; without an end to them there would be as many more for every read


def test_in_a_crowd_the_head_skips_what_it_does_not_guess_and_guesses_again_when_a_row_is_left(adapter: Adapter) -> None:
    class Later(Guessing):
        def depths(self, rows: Rows[RowDrafts | None], source: str, num_rows: int) -> list[int]:
            return super().depths(rows, source, num_rows) if num_rows == 1 else [0] * len(rows)

    told = Sampling(temperature=0.0, max_tokens=120, ignore_eos=True)
    requests = [
        Submit((number,), chat(question), (told if number == 0 else GREEDY,)) for number, question in enumerate(QUESTIONS)
    ]
    run = guessing(adapter)
    run.engine.speculation.policy = Later()
    watched = run.engine.runner.guesses.adapter = copy.copy(adapter)
    reads = []

    def read(tokens: mx.array, *given: Any) -> mx.array:
        reads.append(tokens.shape)
        return adapter.read(tokens, *given)

    watched.read = read  # type: ignore[method-assign]
    rows = finish(run, *requests)

    assert outputs(rows) == outputs(finish(Run(adapter), *requests))
    assert counts_of(rows[0]).num_accepted > 20  # though it has not read twenty-odd tokens
    assert reads
    assert all(num_rows <= 4 for num_rows, _ in reads)


def test_a_model_whose_head_was_refused_has_no_guesses_and_says_why(build: Any) -> None:
    headless = copy.copy(build("qwen3_5"))
    for reason in (None, "it guesses 3% of its own text"):
        headless.no_head = reason
        speculation = Run(headless, ON).engine.speculation

        assert speculation.unused == ({} if reason is None else {"mtp": reason})
        assert speculation.names == ("forced", "lookup")
        assert not speculation.uses_head


# --- cached prefixes -------------------------------------------------------------------------------------------------

LONG = chat("Tell me a story about a dog. " * 4)
OTHER = chat("Tell me a story about a dog. " * 4 + "And a cat.")


def cold(adapter: Adapter, request: Submit) -> list[tuple[list[int], DraftCounts]]:
    """What each answer of a request is alone, and what its drafts were worth."""
    found = []
    for sampling in request.samplings:
        (row,) = finish(guessing(adapter), Submit((0,), request.prompt, (sampling,)))
        found.append((row.output, counts_of(row)))
    assert all(counts.num_accepted > 5 for _, counts in found)
    return found


def told(rows: list[Sequence]) -> list[tuple[list[int], DraftCounts]]:
    return [(row.output, counts_of(row)) for row in rows]


def test_the_head_guesses_as_well_after_a_cached_prefix(adapter: Adapter) -> None:
    run = guessing(adapter, CACHED)
    rows = [finish(run, Submit((number,), prompt, (GREEDY,)))[0] for number, prompt in enumerate([LONG, LONG, OTHER])]

    assert [row.timings.cached_tokens > 16 for row in rows] == [False, True, True]
    assert told(rows) == [one for prompt in (LONG, LONG, OTHER) for one in cold(adapter, Submit((0,), prompt, (GREEDY,)))]


def test_the_head_guesses_as_well_for_forks_of_one_prompt(adapter: Adapter) -> None:
    request = Submit((0, 1, 2), LONG, (GREEDY, hot(1), hot(2)))

    assert told(finish(guessing(adapter, CACHED), request)) == cold(adapter, request)


def test_the_head_guesses_as_well_after_a_prefix_from_disk(adapter: Adapter, tmp_path: Path) -> None:
    for cached in (False, True):
        disk = DiskTier(tmp_path, "0" * 32, 1 << 30)
        disk.open()
        rows = finish(guessing(adapter, CACHED, disk), Submit((0,), OTHER, (GREEDY,)))
        disk.close(30)

        assert (rows[0].timings.cached_tokens > 16) == cached
        assert told(rows) == cold(adapter, Submit((0,), OTHER, (GREEDY,)))


@pytest.mark.parametrize("count", [1, 6, 17])
def test_the_head_goes_on_guessing_in_an_answer_that_is_resumed(adapter: Adapter, count: int) -> None:
    request = Submit((0,), LONG, (hot(5),))
    ((whole, _),) = cold(adapter, request)
    (row,) = finish(guessing(adapter, CACHED), Submit((0,), LONG, (hot(5),), emitted=(tuple(whole[:count]),)))

    assert row.output == whole
    assert counts_of(row).num_accepted > 1


# --- constraints -----------------------------------------------------------------------------------------------------

GRAMMARS = [
    STRICT,
    YES,
    ConstraintSpec(GrammarSpec("regex", "[a-z ]{20,60}")),
    ConstraintSpec(GrammarSpec("regex", "(red|green|blue)(, (red|green|blue)){3}")),
    ConstraintSpec(GrammarSpec("json_schema", json.dumps({"type": "array", "items": SCHEMA, "minItems": 2, "maxItems": 3}))),
    ConstraintSpec(GrammarSpec("json_schema", '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}')),
    ConstraintSpec(STRICT.grammar, ReasoningSpec("<think>", "</think>", True, False, 5)),
    ConstraintSpec(None, ReasoningSpec("<think>", "</think>", True, False, 7)),
]


def constrained(
    adapter: Adapter, config: EngineConfig, rights: Mapping[int, list[int]] | None = None
) -> tuple[Run, list[Sequence]]:
    """Answers under each of GRAMMARS, greedy and hot, side by side; their drafts are of real sources or the right ones."""
    run = Run(adapter, dataclasses.replace(config, max_rows=16))
    if rights is not None:
        scripts = [scripted.always_right, scripted.right_then_wrong, scripted.at_random(3)] * 6
        scripted.add_drafts(run, list(rights.values()), scripts[: len(rights)])
    rows = []
    for number, spec in enumerate([*GRAMMARS, *GRAMMARS]):
        sampling = Sampling(temperature=1.0 * (number % 2), seed=number, max_tokens=40)
        request = Submit((number,), chat(QUESTIONS[number % 8]), (sampling,))
        rows += run.engine.submit_all(request, COMPILER.constraint(spec))
    run.finish()
    return run, rows


@pytest.fixture(scope="module")
def plain(adapter: Adapter) -> list[Sequence]:
    return constrained(adapter, SMALL)[1]


def test_constrained_answers_with_all_sources_are_those_without(adapter: Adapter, plain: list[Sequence]) -> None:
    run, rows = constrained(adapter, ON)

    assert outputs(rows) == outputs(plain)
    assert [row.ending for row in rows] == [row.ending for row in plain]
    assert run.engine.speculation.counts.accepted["forced"] > 3
    for row in (rows[0], rows[8], rows[9]):
        assert row.finish != "stop" or row.id % 8 or jsonschema_rs.is_valid(SCHEMA, json.loads(TOKENIZER.decode(row.output)))


def test_constrained_answers_with_scripted_drafts_are_those_without(adapter: Adapter, plain: list[Sequence]) -> None:
    """Ends of grammars, of reasoning and of its budget lie inside drafts."""
    rights = {row.id: [*row.output, *row.output] for row in plain}
    run, rows = constrained(adapter, SMALL, rights)

    assert outputs(rows) == outputs(plain)
    assert [row.ending for row in rows] == [row.ending for row in plain]
    assert run.engine.speculation.counts.num_accepted > 100


def test_forced_tokens_save_steps_and_change_nothing(adapter: Adapter) -> None:
    request = Submit((0,), chat(QUESTIONS[4]), (Sampling(temperature=1.0, seed=2, max_tokens=60),))
    phrase = ConstraintSpec(GrammarSpec("regex", "The (cat|dog) was very happy to see you\\. (It|She) ran away with the ball\\."))
    plans, answers, counts = [], [], []
    for sources in ((), ("forced",)):
        run = Run(adapter, dataclasses.replace(ON, speculate=sources))
        plans.append(scripted.note_plans(run))
        (row,) = finish(run, request, constraint=COMPILER.constraint(phrase))
        answers.append((row.output, row.ending))
        counts.append(counts_of(row))

    assert answers[0] == answers[1]
    assert set(counts[1].drafted) == {"forced"}
    assert counts[1].num_accepted > 8
    assert len(plans[1]) == len(row.output) - counts[1].num_accepted < len(plans[0])


def test_masks_of_lines_are_those_of_one_step_after_the_other(plain: list[Sequence]) -> None:
    masks = Masks(4096)
    for row in plain:
        ahead, stepped = (Sequence(row.request, 0, 40, frozenset({4080, 4082}), 0.0) for _ in range(2))
        for sequence in (ahead, stepped):
            sequence.constrain(COMPILER.constraint(GRAMMARS[row.id % 8]))
        draft = tuple(row.output[:-1])
        lines, errors = masks.fill(ahead.demands(draft))
        for place, token in enumerate((*draft, None)):
            expected, _ = masks.fill(stepped.demands())
            found = np.ones(4096, np.bool_) if lines is None else lines[place]
            assert np.array_equal(found, np.ones(4096, np.bool_) if expected is None else expected[0])
            if token is not None:
                assert stepped.constraint is not None
                stepped.constraint.accept(token)
        assert not errors


def test_a_grammar_that_ends_inside_a_draft_ends_the_answer(adapter: Adapter) -> None:
    yes = COMPILER.tokenizer.tokenize_str("yes")
    run = Run(adapter)
    scripted.add_drafts(run, [[*yes, *yes, *yes]], [scripted.always_right])
    (row,) = finish(run, Submit((0,), chat(QUESTIONS[0]), (GREEDY,)), constraint=COMPILER.constraint(YES))

    assert (row.output, row.finish) == (yes, "stop")
    assert len(run.engine.take_events()) == len(yes)


def test_a_draft_that_the_grammar_refuses_is_not_verified(adapter: Adapter) -> None:
    run = Run(adapter)
    scripted.add_drafts(run, [chat(REPETITION)], [scripted.always_right])
    (row,) = finish(run, Submit((0,), chat(QUESTIONS[0]), (GREEDY,)), constraint=COMPILER.constraint(STRICT))

    assert jsonschema_rs.is_valid(SCHEMA, json.loads(TOKENIZER.decode(row.output)))
    assert row.timings.drafts is None


class BreaksAhead(Constraint):
    """A constraint whose grammar is broken behind every second token of a draft."""

    def ahead(self, tokens: Any) -> Iterator[Self]:
        for place, one in enumerate(super().ahead(tokens)):
            if place == 1:
                broken = COMPILER.compile(GrammarSpec("regex", "[a-z]+"))
                broken.inner.consume_token(TOKENIZER.encode("9", add_special_tokens=False)[-1])
                one.matcher = broken
            yield one


@pytest.mark.parametrize("is_right", [True, False])
def test_a_grammar_that_breaks_behind_a_draft_ends_its_own_row_and_only_if_the_draft_is_right(
    adapter: Adapter, is_right: bool
) -> None:
    letters = ConstraintSpec(GrammarSpec("regex", "[a-z ]{30,60}"))
    requests = [Submit((number,), chat(QUESTIONS[number]), (GREEDY,)) for number in range(2)]
    expected = [finish(Run(adapter), request, constraint=COMPILER.constraint(letters))[0].output for request in requests]
    letter = TOKENIZER.encode("z", add_special_tokens=False)[-1]
    run = Run(adapter)
    wrong: scripted.Script = lambda right, *_: (right[0], letter, letter)  # noqa: E731
    scripted.add_drafts(run, expected, [scripted.always_right if is_right else wrong, scripted.always_right])
    fragile = BreaksAhead(COMPILER.compile(letters.grammar), None)  # type: ignore[arg-type]
    rows = run.engine.submit_all(requests[0], fragile) + run.engine.submit_all(requests[1], COMPILER.constraint(letters))
    run.finish()

    assert rows[1].output == expected[1]
    if is_right:
        assert (rows[0].finish, rows[0].output) == ("error", expected[0][:2])
        assert "the grammar can not go on" in str(rows[0].error)
    else:
        assert rows[0].output == expected[0]
