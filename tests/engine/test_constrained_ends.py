"""Where a constrained answer ends: at a stop token only if its grammar may end there, and at a token that no model has never."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from driver import SMALL, Run, adapter_for
from weft.config import EngineConfig
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, TokenDemand
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec
from weft.model.adapter import Adapter
from weft.model.resolve import TINY_HYBRID
from weft.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(TINY_HYBRID)
COMPILER = Compiler(TINY_HYBRID / "tokenizer.json", 4096, (4080, 4082))
PROMPT = [11, 42, 77, 5, 9]
PHRASES = ["the dog ran, the dog sat", "strip <|im_end|> tags", "a<think>b</think>c", "line\nline"]
THINKING = ReasoningSpec("<think>", "</think>", opened=True, may_open=False, budget=3, gap="\n\n")
SPECULATING = dataclasses.replace(SMALL, speculate=("forced", "lookup"))


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_for(TINY_HYBRID)


def constraint(kind: Any, text: str, reasoning: ReasoningSpec | None = None) -> Constraint:
    return COMPILER.constraint(ConstraintSpec(GrammarSpec(kind, text), reasoning))


def answer(adapter: Adapter, config: EngineConfig, given: Constraint, **sampling: Any) -> tuple[str, str | None, int | None]:
    """The text of a row's answer behind its reasoning, its finish reason, and the token that stopped it."""
    run = Run(adapter, config)
    row = run.engine.submit(PROMPT, Sampling(**{"temperature": 0.0, "max_tokens": 80, **sampling}), given)
    run.submit([7, 8, 9], 40)  # a free row beside it
    run.finish()
    assert row.ending is not None
    text = COMPILER.tokenizer.decode_bytes(row.output).decode()
    return text.rpartition("</think>\n\n")[2], row.error or row.finish, row.ending.stop_token


@pytest.mark.parametrize("reasoning", [None, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("config", [SMALL, SPECULATING], ids=["plain", "speculating"])
@pytest.mark.parametrize("phrase", PHRASES)
def test_a_stop_token_amid_a_constant_does_not_end_it(
    adapter: Adapter, phrase: str, config: EngineConfig, reasoning: ReasoningSpec | None
) -> None:
    tokens = COMPILER.tokenizer.tokenize_str(phrase)
    for stop in sorted({*tokens, TOKENIZER.id_of("<|im_end|>") or 0}):
        given = constraint("choice", json.dumps([phrase]), reasoning)

        assert answer(adapter, config, given, stop_token_ids=(stop,))[:2] == (phrase, "stop")


@pytest.mark.parametrize("config", [SMALL, SPECULATING], ids=["plain", "speculating"])
def test_a_stop_token_ends_an_answer_where_its_grammar_may_end(adapter: Adapter, config: EngineConfig) -> None:
    (dog,) = COMPILER.tokenizer.tokenize_str(" dog")
    free = dict.fromkeys((dog,), 100.0)
    wanted = {"(the dog)?( dog)*": ("", dog), "the( dog){3,9}": ("the dog dog dog", dog), "the dog": ("the dog", None)}

    for pattern, (text, stop) in wanted.items():
        found = answer(adapter, config, constraint("regex", pattern), stop_token_ids=(dog,), logit_bias=free)
        assert found == (text, "stop", stop)


def test_the_models_own_end_ends_an_answer_where_its_grammar_may_end(adapter: Adapter) -> None:
    for end in (4080, 4082):
        found = answer(adapter, SMALL, constraint("regex", "(the dog)+"), logit_bias={end: 100.0})
        assert found == ("the dog", "stop", end)


def test_a_row_that_is_forced_to_a_token_that_the_model_does_not_have_ends_alone(adapter: Adapter) -> None:
    class Beyond(Constraint):
        def demand(self, *_: Any, **__: Any) -> TokenDemand | None:
            return TokenDemand(only=(5000,))

        def fork(self) -> Constraint:
            return Beyond(None, None)

    run = Run(adapter)
    lost = run.engine.submit(PROMPT, Sampling(max_tokens=9), Beyond(None, None))
    held = run.engine.submit(PROMPT, Sampling(temperature=0.0, max_tokens=30), constraint("choice", '["red green blue"]'))
    free = run.submit(PROMPT, 20)
    run.finish()

    assert (lost.finish, "a token that the model does not have" in str(lost.error)) == ("error", True)
    assert (held.finish, COMPILER.tokenizer.decode_bytes(held.output)) == ("stop", b"red green blue")
    assert (free.finish, len(free.output)) == ("length", 20)


NEEDED = {"[0-9]{5}": r"[0-9]+", "(yes|no), (yes|no)": "y|ye|yes|n|no", "(the dog ?){4}": " dog|the", "x{1,6}": "x+"}


@pytest.mark.parametrize("reasoning", [None, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("config", [SMALL, SPECULATING], ids=["plain", "speculating"])
@pytest.mark.parametrize("pattern", NEEDED)
def test_stop_tokens_that_a_grammar_needs_are_text_as_long_as_no_answer_may_end(
    adapter: Adapter, pattern: str, config: EngineConfig, reasoning: ReasoningSpec | None
) -> None:
    texts = [COMPILER.tokenizer.decode_bytes([token]).decode(errors="replace") for token in range(4096)]
    stops = tuple(token for token, text in enumerate(texts) if re.fullmatch(NEEDED[pattern], text))
    assert stops
    for fewest in range(9):
        given = constraint("regex", pattern, reasoning)
        text, ended, _ = answer(adapter, config, given, stop_token_ids=stops, min_tokens=fewest)

        assert ended == "stop"
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("config", [SMALL, SPECULATING], ids=["plain", "speculating"])
def test_an_answer_that_may_end_goes_on_without_its_stop_tokens_until_it_has_the_fewest_tokens(
    adapter: Adapter, config: EngineConfig
) -> None:
    (dog,), ends = COMPILER.tokenizer.tokenize_str(" dog"), dict.fromkeys((4080, 4082), 50.0)
    for fewest in range(1, 9):
        given = constraint("regex", "( dog| cat)*")
        run, bias = Run(adapter, config), {dog: 90.0, **ends}
        told = Sampling(temperature=0.0, max_tokens=80, stop_token_ids=(dog,), min_tokens=fewest, logit_bias=bias)
        row = run.engine.submit(PROMPT, told, given)
        run.finish()

        assert row.ending is not None
        assert row.ending.stop_token == dog
        assert len(row.output) >= fewest
        assert dog not in row.output
        assert re.fullmatch("( dog| cat)+", COMPILER.tokenizer.decode_bytes(row.output).decode())


def test_a_mark_that_a_budget_forces_comes_also_where_it_is_a_stop_token_and_the_answer_is_too_short_to_end(
    adapter: Adapter,
) -> None:
    close = COMPILER.tokenizer.tokenize_str("</think>", parse_special=True)
    given = COMPILER.constraint(ConstraintSpec(None, THINKING))
    run = Run(adapter, SMALL)
    row = run.engine.submit(PROMPT, Sampling(temperature=0.0, max_tokens=40, min_tokens=30, stop_token_ids=tuple(close)), given)
    run.finish()

    assert row.error is None
    assert len(row.output) >= 30


@pytest.mark.parametrize("config", [SMALL, SPECULATING], ids=["plain", "speculating"])
def test_a_stop_token_is_text_amid_an_answer_that_is_too_short_where_others_may_come_too(
    adapter: Adapter, config: EngineConfig
) -> None:
    (dog,), (cat,) = COMPILER.tokenizer.tokenize_str(" dog"), COMPILER.tokenizer.tokenize_str(" cat")
    bias = {dog: 90.0, cat: 45.0}
    for fewest in range(6):
        given = constraint("regex", "the( dog| cat)x")
        assert answer(adapter, config, given, stop_token_ids=(dog,), min_tokens=fewest, logit_bias=bias)[0] == "the dogx"
