"""Replayed is generated: over the same tokens a constraint comes to the same masks and the same end, however long the answer.

An engine that takes over a dead one's requests has only their emitted tokens; its grammars must come to where they were.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from schemas import BOOLEAN, INTEGER, Entry, Schema, array, opened, record
from schemas import string as string_
from test_corpus import COMPILER, COMPILING, END, PLACE

from weft.grammar.constraint import Constraint, Masks
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec
from weft.text.schema import json_schema_grammar

THINKING = ReasoningSpec("<think>", "</think>", opened=True, may_open=False, budget=5)
Choose = Callable[[int, np.ndarray], int | None]  # a token by its position and mask


def fresh(grammar: GrammarSpec, reasoning: ReasoningSpec | None = None) -> Constraint:
    """A constraint whose grammar no other one has used, as in a new engine."""
    spec = ConstraintSpec(grammar, reasoning)
    COMPILER.forget(spec)
    return COMPILER.constraint(spec)


def mask_of(constraint: Constraint) -> np.ndarray:
    allowed, errors = Masks(COMPILER.vocab_size).fill([constraint.demand((END,))])
    assert not errors
    return np.ones(COMPILER.vocab_size, bool) if allowed is None else allowed[0].copy()


def generate(constraint: Constraint, choose: Choose) -> list[int]:
    """Take tokens as the engine does, each after its mask, until none is chosen or nothing can follow."""
    tokens: list[int] = []
    while not constraint.is_finished:
        mask = mask_of(constraint)
        mask[END] = False
        token = choose(len(tokens), mask) if mask.any() else None
        if token is None:
            break
        assert mask[token], COMPILER.tokenizer.decode_bytes([*tokens[-20:], token])
        constraint.accept(token)
        tokens.append(token)
    return tokens


def by_chance(name: str, count: int) -> Choose:
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    return lambda position, mask: int(chance.choice(np.flatnonzero(mask))) if position < count else None


def by_text(value: Any, count: int) -> Choose:
    tokens = COMPILER.tokenizer.tokenize_str(json.dumps(value))[:count]
    assert len(tokens) == count
    return lambda position, _mask: tokens[position] if position < count else None


def assert_alike(replayed: Constraint, generated: Constraint) -> None:
    assert replayed.is_finished == generated.is_finished
    assert (mask_of(replayed) == mask_of(generated)).all()


def rule_book() -> tuple[Schema, Any]:
    """Two hundred rules with options, all of them optional, as linters are configured; and a configuration with all of them."""
    chance = random.Random(0)

    def names(count: int) -> list[str]:
        return ["".join(chance.choices(string.ascii_letters, k=18)) for _ in range(count)]

    common = opened({"active": BOOLEAN, "excludes": array(string_())})
    rule = {"allOf": [{"$ref": "#/$defs/common"}]}
    groups = {group: {name: names(2) for name in names(20)} for group in names(10)}
    schema = opened(
        {
            group: opened({name: opened({one: INTEGER, other: string_()}, **rule) for name, (one, other) in rules.items()})
            for group, rules in groups.items()
        }
    )
    value = {
        group: {name: {one: 5, other: "text", "active": True, "excludes": ["**/test/**"]} for name, (one, other) in rules.items()}
        for group, rules in groups.items()
    }
    return {**schema, "$defs": {"common": common}}, value


def hard_keys() -> tuple[Schema, Any]:
    """Sixty objects, each with keys of another pattern that is hard to match; and a value of each."""
    letters = (string.ascii_letters + string.digits)[:60]
    objects = {f"o{letter}": opened(patternProperties={f"^.{{1,20}}{letter}.{{1,20}}$": string_()}) for letter in letters}
    return record(objects), {f"o{letter}": {f"some {letter} g": "text"} for letter in letters}


@pytest.mark.parametrize("entry", COMPILING)
def test_a_replayed_answer_goes_on_as_the_generated_one(entry: Entry) -> None:
    grammar = json_schema_grammar(entry.schema, True, PLACE)
    generated = fresh(grammar)
    tokens = generate(generated, by_chance(entry.name, 40))
    replayed = fresh(grammar)
    replayed.replay(tokens)

    assert_alike(replayed, generated)


@pytest.mark.parametrize(("make", "count"), [(rule_book, 9_000), (hard_keys, 760)])
def test_a_long_answer_under_a_large_schema_can_be_replayed(make: Callable[[], tuple[Schema, Any]], count: int) -> None:
    schema, value = make()
    grammar = json_schema_grammar(schema, True, PLACE)
    generated = fresh(grammar)
    tokens = generate(generated, by_text(value, count))
    replayed = fresh(grammar)
    replayed.replay(tokens)

    assert len(tokens) == count
    assert_alike(replayed, generated)


@pytest.mark.parametrize("count", [3, 5, 6, 8, 40])
def test_reasoning_is_replayed_without_the_grammar_that_follows_it(count: int) -> None:
    grammar = GrammarSpec("regex", r"[a-z]{2,6}(-[0-9]{1,3})*")
    generated = fresh(grammar, THINKING)
    tokens = generate(generated, by_chance("reasoning", count))
    replayed = fresh(grammar, THINKING)
    replayed.replay(tokens)

    assert_alike(replayed, generated)
