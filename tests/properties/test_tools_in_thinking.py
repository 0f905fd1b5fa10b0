"""While a model thinks it can not begin a call: of its tokens exactly those that would complete the trigger are gone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Masks
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec
from weft.model.resolve import TINY_HYBRID

VOCABULARY, END = 4096, 4082
COMPILER = Compiler(TINY_HYBRID / "tokenizer.json", VOCABULARY, (END,))
TRIGGERS = ["<tool_call>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "aab", "ll", "<"]  # a token, several, and such that repeat
GRAMMAR = GrammarSpec("regex", "[a-z]+")


@cache
def data_of(token: int) -> bytes:
    return COMPILER.tokenizer.decode_bytes([token])


def ids(text: str) -> list[int]:
    return list(COMPILER.tokenizer.tokenize_str(text, parse_special=True))


def thinking(trigger: str, grammar: GrammarSpec | None = None, budget: int | None = None) -> Constraint:
    return COMPILER.constraint(ConstraintSpec(grammar, ReasoningSpec("<think>", "</think>", True, False, budget, "", trigger)))


def allowed(one: Constraint) -> np.ndarray:
    mask, errors = Masks(VOCABULARY).fill([one.demand((END,))])
    assert not errors
    return np.ones(VOCABULARY, bool) if mask is None else mask[0].copy()


def completing(said: bytes, trigger: str) -> set[int]:
    """The plain way: every token is tried."""
    wanted = trigger.encode()
    tail = said[-len(wanted) :]
    return {token for token in range(VOCABULARY) if wanted in tail + data_of(token)}


@given(st.sampled_from(TRIGGERS), st.booleans(), st.integers(0, 10_000), st.data())
@settings(max_examples=60)
def test_exactly_the_tokens_that_would_complete_the_trigger_are_gone(
    trigger: str, is_shaped: bool, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    one = thinking(trigger, GRAMMAR if is_shaped else None)
    said = b""
    for _ in range(data.draw(st.integers(0, 12))):
        mask = allowed(one)
        gone = completing(said, trigger) | ({END} if is_shaped else set())
        assert set(np.flatnonzero(~mask).tolist()) == gone
        # Mostly pieces of the trigger, so that it is nearly there all the time.
        piece = ids(trigger[rng.integers(len(trigger)) :][: rng.integers(1, 4)])[0]
        token = piece if mask[piece] and rng.random() < 0.8 else int(rng.choice(np.flatnonzero(mask)))
        if b"</think>" in said[-8:] + data_of(token):
            return
        one.accept(token)
        said += data_of(token)

    assert trigger.encode() not in said


@pytest.mark.parametrize("trigger", TRIGGERS[:3])
@pytest.mark.parametrize("grammar", [None, GRAMMAR])
def test_taken_back_forked_and_replayed_it_is_the_same(trigger: str, grammar: GrammarSpec | None) -> None:
    letters = [token for letter in trigger[:-1] for token in ids(letter)]
    one = thinking(trigger, grammar)
    masks = [allowed(one)]
    for token in letters:
        one.accept(token)
        masks.append(allowed(one))
    fork, fresh = one.fork(), thinking(trigger, grammar)
    for token in letters:
        fresh.accept(token)

    assert not masks[-1][ids(trigger[-1])].any()  # the last letter would be one too many
    assert masks[0][ids(trigger[-1])].all()
    assert (allowed(fork) == masks[-1]).all()
    assert (allowed(fresh) == masks[-1]).all()
    for count in range(len(letters), 0, -1):
        assert (allowed(one) == masks[count]).all()
        one.rollback(1)
    assert (allowed(one) == masks[0]).all()
    assert (allowed(fork) == masks[-1]).all()


def test_after_the_thinking_a_call_may_begin() -> None:
    one = thinking("<tool_call>")
    (trigger,) = ids("<tool_call>")

    assert not allowed(one)[trigger]
    for token in ids("hm</think>"):
        one.accept(token)
    assert one.demand((END,)) is None
    again = thinking("<tool_call>", budget=2)
    for token in [*ids("</think>"), *ids("So:"), *ids("<think>")]:
        again.accept(token)
    assert allowed(again)[trigger]  # a marker in the answer is text


def test_without_tools_nothing_is_gone() -> None:
    assert thinking("").demand((END,)) is None
