"""Tokens about which a constraint leaves no choice: emitted without being sampled, where steps may have rows of any length."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from driver import SMALL, Run, adapter_for
from weft.engine.sequence import Sequence
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.model.adapter import Adapter
from weft.model.resolve import TINY_HYBRID

COMPILER = Compiler(TINY_HYBRID / "tokenizer.json", 4096, (4080, 4082))
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "amount": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "amount"],
    "additionalProperties": False,
}
PROMPTS = [[11, 42, 77, 5, 9], [200, 31, 8], [90, 91, 92, 93, 94, 95, 96]]
FORCED = dataclasses.replace(SMALL, speculate=("forced",))


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    found = adapter_for(TINY_HYBRID)
    if found.fused is None:
        pytest.skip("needs weft's own operations")
    return found


def constraint(kind: str = "json_schema", text: str = json.dumps(SCHEMA)) -> Constraint:
    return COMPILER.constraint(ConstraintSpec(GrammarSpec(kind, text)))  # type: ignore[arg-type]


def finish(adapter: Adapter, config: Any, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> tuple[Run, list[Sequence]]:
    run = Run(adapter, config)
    told = Sampling(**{"temperature": 0.0, "max_tokens": 40, **sampling})
    rows = [run.engine.submit(prompt, told, constraint()) for prompt in prompts]
    run.submit([7, 8, 9], 60)  # a free row beside them
    run.finish()
    return run, rows


def number_forced(run: Run) -> int:
    return run.engine.speculation.counts.accepted.get("forced", 0)


def test_answers_are_those_of_sampling_every_token(adapter: Adapter) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9, "presence_penalty": 1.0}):
        forced, rows = finish(adapter, FORCED, **sampling)
        _, wanted = finish(adapter, SMALL, **sampling)

        assert [row.output for row in rows] == [row.output for row in wanted]
        assert [row.finish for row in rows] == [row.finish for row in wanted]
        assert number_forced(forced) > 3


def test_every_token_is_told_once_and_in_order(adapter: Adapter) -> None:
    run = Run(adapter, FORCED)
    row = run.engine.submit(PROMPTS[0], Sampling(temperature=0.0, max_tokens=40), constraint())
    run.finish()

    told = [event.token for event in run.engine.take_events() if event.sequence == row.id and event.token is not None]
    assert told == row.output
    assert row.timings.drafts is not None
    assert row.timings.drafts.accepted == {"forced": number_forced(run)}


def test_forced_tokens_need_no_step_of_their_own(adapter: Adapter) -> None:
    steps = []
    for config in (SMALL, FORCED):
        run = Run(adapter, config)
        row = run.engine.submit(PROMPTS[0], Sampling(temperature=0.0, max_tokens=40), constraint())
        count = 0
        while not row.is_finished:
            count += row.is_prefilled
            run.turn()
        steps.append(count)

    assert steps[1] <= steps[0] - number_forced(run) // 2


@pytest.mark.parametrize("tokens", range(1, 12))
def test_an_answer_ends_amid_forced_tokens_where_max_tokens_says(adapter: Adapter, tokens: int) -> None:
    _, rows = finish(adapter, FORCED, max_tokens=tokens)
    _, wanted = finish(adapter, SMALL, max_tokens=tokens)

    assert [(row.output, row.finish) for row in rows] == [(row.output, row.finish) for row in wanted]


def test_a_forced_token_whose_log_probability_is_asked_for_is_sampled(adapter: Adapter) -> None:
    run, rows = finish(adapter, FORCED, logprobs=2)
    _, wanted = finish(adapter, SMALL, logprobs=2)

    assert number_forced(run) == 0
    assert [row.logprobs for row in rows] == [row.logprobs for row in wanted]
    assert all(len(row.logprobs) == len(row.output) for row in rows)


def test_a_forced_token_that_is_forbidden_fails_as_without_drafts(adapter: Adapter) -> None:
    _, rows = finish(adapter, SMALL, PROMPTS[:1])
    matcher, forced = constraint().fork(), []
    for token in rows[0].output:
        if matcher.forced_token() is not None:
            forced.append(token)
        matcher.accept(token)
    banned = {forced[-1]: -float("inf")}
    outcomes = [finish(adapter, config, PROMPTS[:1], logit_bias=banned)[1][0] for config in (FORCED, SMALL)]

    assert outcomes[0].error == outcomes[1].error
    assert outcomes[0].error is not None
    assert outcomes[0].output == outcomes[1].output


def test_a_token_beside_which_others_are_allowed_is_not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    one = constraint("choice", '["red", "green"]')
    monkeypatch.setattr(Constraint, "forced", lambda _: (int(one.matcher.mask().argmax()),))  # type: ignore[union-attr]

    assert one.forced_token() is None


def test_a_request_that_wants_no_drafts_is_sampled_token_by_token(adapter: Adapter) -> None:
    run = Run(adapter, FORCED)
    row = run.engine.submit(PROMPTS[0], Sampling(temperature=0.0, max_tokens=40), constraint())
    row.give_up_drafts()
    run.finish()

    assert number_forced(run) == 0
    assert row.finish == "stop"
