"""Answers without some tokens and texts: alike alone, in a crowd, with drafts, and continued in another engine."""

from __future__ import annotations

import dataclasses

import pytest
from test_draft_sources import COMPILER, ON, QUESTIONS, SMALL, TOKENIZER, chat, outputs

import scripted
from driver import Run, adapter_for
from weft.config import EngineConfig
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec, Submit
from weft.model.adapter import Adapter
from weft.model.resolve import TINY_HYBRID

WORDS = ("the", "e a", " was", "🙂", "an")
SOME = tuple(token for token in range(4096) if token % 5)
SPECS = [
    ConstraintSpec(bad_words=WORDS),
    ConstraintSpec(allowed_tokens=SOME),
    ConstraintSpec(allowed_tokens=SOME, bad_words=WORDS),
    ConstraintSpec(GrammarSpec("regex", "[a-z ]{20,60}"), allowed_tokens=SOME, bad_words=WORDS),
    ConstraintSpec(None, ReasoningSpec("<think>", "</think>", True, False, 7), bad_words=WORDS),
]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_for(TINY_HYBRID)


def answered(
    adapter: Adapter, config: EngineConfig, rights: list[list[int]] | None = None, emitted: list[list[int]] | None = None
) -> list[Sequence]:
    """Answers under each of SPECS, greedy and hot; their drafts are of real sources or the right ones."""
    run = Run(adapter, dataclasses.replace(config, max_rows=16))
    if rights is not None:
        scripted.add_drafts(run, rights, [scripted.always_right, scripted.right_then_wrong] * len(SPECS))
    rows = []
    for number, spec in enumerate([*SPECS, *SPECS]):
        sampling = Sampling(temperature=1.0 * (number % 2), seed=number, max_tokens=40, ignore_eos=True)
        before = () if emitted is None else (tuple(emitted[number]),)
        request = Submit((number,), chat(QUESTIONS[number % 8]), (sampling,), emitted=before)
        rows += run.engine.submit_all(request, COMPILER.constraint(spec))
    run.finish()
    return rows


def test_no_forbidden_token_or_text_is_ever_in_an_answer(adapter: Adapter) -> None:
    for row, spec in zip(answered(adapter, SMALL), [*SPECS, *SPECS], strict=True):
        text = TOKENIZER.decode(row.output)
        assert row.error is None
        assert len(row.output) > 10
        assert not [word for word in spec.bad_words if word in text]
        assert set(row.output) <= set(SOME if spec.allowed_tokens is not None else range(4096))


def test_limited_answers_with_drafts_are_those_without(adapter: Adapter) -> None:
    plain = answered(adapter, SMALL)

    assert outputs(answered(adapter, ON)) == outputs(plain)
    assert outputs(answered(adapter, SMALL, [[*row.output, *row.output] for row in plain])) == outputs(plain)


def test_a_limited_answer_that_is_resumed_is_the_uninterrupted_one(adapter: Adapter) -> None:
    plain = answered(adapter, SMALL)
    for count in (1, 7, 10):
        assert outputs(answered(adapter, SMALL, emitted=[row.output[:count] for row in plain])) == outputs(plain)


def test_a_grammar_that_has_only_forbidden_texts_fails_its_own_row(adapter: Adapter) -> None:
    run = Run(adapter, SMALL)
    never = COMPILER.constraint(ConstraintSpec(GrammarSpec("choice", '["yes"]'), bad_words=("es",)))
    fine = run.engine.submit_all(Submit((0,), chat(QUESTIONS[0]), (Sampling(max_tokens=5),)))
    failed = run.engine.submit_all(Submit((1,), chat(QUESTIONS[1]), (Sampling(max_tokens=5),)), never)
    run.finish()

    assert fine[0].error is None
    assert "allowed_token_ids or bad_words" in (failed[0].error or "")
