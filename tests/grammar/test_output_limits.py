"""Tokens and texts that an answer may not have: the mask is the one that trying every token gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corpus import COMPILER, END, VOCABULARY

from weft.grammar.constraint import Constraint, Mask, Masks
from weft.grammar.output_limits import ForbiddenTexts
from weft.grammar.token_index import TokenIndex
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec

TOKENS = [COMPILER.tokenizer.decode_bytes([token]) for token in range(VOCABULARY)]
RESERVED = COMPILER.tokenizer.reserved
# Of one token, of parts of tokens, over tokens, of several bytes a letter, and one that begins within another.
WORDS = ["the", "e", "once upon", "aab", "aba", " dog", "é", "字", "🙂", "\n\n", "ing.", "upon a time, the"]
NEAR = [token for token, data in enumerate(TOKENS) if data and set(data) <= set(b"ab once uptim,th")]
ALLOWED = tuple(range(0, VOCABULARY, 3))
ANY_TEXT = GrammarSpec("regex", "(?s).*")
LETTERS = GrammarSpec("regex", "[a-e ]{1,40}")
words = st.lists(st.sampled_from(WORDS) | st.text("ab", min_size=1, max_size=5), max_size=4)


def limited(bad: list[str], allowed: tuple[int, ...] | None = None, **spec: object) -> Constraint:
    return COMPILER.constraint(ConstraintSpec(**spec, allowed_tokens=allowed, bad_words=tuple(bad)))  # type: ignore[arg-type]


def mask_of(constraint: Constraint) -> Mask:
    allowed, errors = Masks(VOCABULARY).fill([constraint.demand((END,))])
    assert not errors
    return np.ones(VOCABULARY, bool) if allowed is None else allowed[0].copy()


def tried(said: list[int], bad: list[str], allowed: tuple[int, ...] | None) -> Mask:
    """The mask by its definition: a token is left if it is listed, and if with it no bad word is in the text."""
    text = b"".join(TOKENS[token] for token in said if token not in RESERVED)
    mask = np.zeros(VOCABULARY, bool)
    mask[list(range(VOCABULARY) if allowed is None else allowed)] = True
    for token in range(VOCABULARY):
        if token not in RESERVED and any(word.encode() in text + TOKENS[token] for word in bad):
            mask[token] = False
    return mask


def likely(mask: Mask, chance: np.random.Generator) -> int:
    """A token that may come, and that has to do with the words if one can."""
    return int(chance.choice([token for token in NEAR if mask[token]] or np.flatnonzero(mask)))


@settings(max_examples=25, deadline=None)
@given(words, st.sampled_from([None, ALLOWED]), st.integers(0, 2**32))
def test_the_mask_is_that_of_trying_every_token(bad: list[str], allowed: tuple[int, ...] | None, seed: int) -> None:
    chance, constraint, said = np.random.default_rng(seed), limited(bad, allowed), list[int]()
    for _ in range(12):
        mask = mask_of(constraint)
        assert (mask == tried(said, bad, allowed)).all()
        said.append(likely(mask, chance))
        constraint.accept(said[-1])


@settings(max_examples=20, deadline=None)
@given(words, st.integers(0, 2**32), st.data())
def test_tokens_taken_back_and_replayed_ones_leave_the_same_mask(bad: list[str], seed: int, data: st.DataObject) -> None:
    chance, constraint = np.random.default_rng(seed), limited([*bad, "ab"], ALLOWED, grammar=ANY_TEXT)
    said: list[int] = []
    for _ in range(10):
        mask = mask_of(constraint)
        mask[END] = False
        said.append(likely(mask, chance))
        constraint.accept(said[-1])
    count = data.draw(st.integers(0, 10))
    forked, replayed = constraint.fork(), limited([*bad, "ab"], ALLOWED, grammar=ANY_TEXT)
    constraint.rollback(count)
    replayed.replay(said[: 10 - count])
    ahead = list(replayed.ahead(said[10 - count :]))

    assert (mask_of(constraint) == mask_of(replayed)).all()
    assert (mask_of(forked) == mask_of(ahead[-1] if ahead else replayed)).all()


@pytest.mark.parametrize("bad", [["b"], ["a a", "cc"], ["a", "b", "c", "d"]])
def test_a_grammar_and_the_limits_hold_together(bad: list[str]) -> None:
    alone, both = COMPILER.constraint(ConstraintSpec(LETTERS)), limited(bad, ALLOWED, grammar=LETTERS)
    said: list[int] = []
    for _ in range(6):
        expected = mask_of(alone) & tried(said, bad, ALLOWED)
        assert (mask_of(both) == expected).all()
        if not expected.any():
            break
        said.append(int(np.flatnonzero(expected)[0]))
        alone.accept(said[-1])
        both.accept(said[-1])


def test_a_token_that_the_grammar_forces_and_a_list_forbids_is_not_emitted() -> None:
    yes = GrammarSpec("choice", '["yes"]')
    (only,) = COMPILER.tokenizer.tokenize_str("yes")[:1]

    assert COMPILER.constraint(ConstraintSpec(yes)).forced_token() is not None
    assert limited([], tuple(token for token in range(VOCABULARY) if token != only), grammar=yes).forced_token() is None
    assert limited(["es"], grammar=yes).forced_token() is None


def test_markers_that_a_budget_forces_come_whatever_is_allowed() -> None:
    thinking = ReasoningSpec("<think>", "</think>", opened=True, may_open=False, budget=2)
    constraint = limited(["a"], (5, 8), reasoning=thinking)
    for _ in range(2):
        assert np.flatnonzero(mask_of(constraint)).tolist() == [token for token in (5, 8) if b"a" not in TOKENS[token]]
        constraint.accept(int(np.flatnonzero(mask_of(constraint))[0]))

    assert [TOKENS[token] for token in np.flatnonzero(mask_of(constraint))] == [b"</think>"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("abc", max_size=4).map(str.encode), min_size=1, max_size=30), st.text("abc", min_size=1, max_size=4))
def test_the_index_finds_what_looking_at_every_token_finds(tokens: list[bytes], text: str) -> None:
    index, data = TokenIndex(tokens), text.encode()

    assert sorted(index.beginning_with(data)) == [token for token, one in enumerate(tokens) if one.startswith(data)]
    assert sorted(index.containing(data)) == [token for token, one in enumerate(tokens) if data in one]


def test_no_text_forbids_nothing() -> None:
    nothing = ForbiddenTexts(("",), COMPILER.tokenizer)

    assert (nothing.longest, nothing.after(b"<tool_call>")) == (0, ())
