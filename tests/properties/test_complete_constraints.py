"""No answer is impossible: texts sampled from a pattern that knows no notation are taken by the compiled constraint; others not.

What comes over the wire shows what a model answers, never what it could not.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from odd_vocabularies import LETTERS
from patterns import Literal, Nest, Node, OneOf, Row, Times, grammar_of, matches, random_pattern

from thoroughness import ALL
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Matcher
from weft.ipc.messages import GrammarSpec
from weft.model.resolve import TINY_HYBRID

COMPILER = Compiler(TINY_HYBRID / "tokenizer.json", 4096, (4080, 4082))
BYTES = {COMPILER.tokenizer.decode_bytes([token]): token for token in reversed(range(4096))}
NUM_BATCHES = 60 if ALL else 4
NUM_EACH = 50 if ALL else 12  # patterns of a batch
NUM_TEXTS = 12  # of a pattern
WORDS = ["a", "ab", "abc", "ba", "the", "thesis", "e", " ", "\n", "1", "12", '"', "\\", "é", "END", "E"]
MANY = 40  # times: more than a sampled text has letters to repeat


def takes(matcher: Matcher, tokens: list[int]) -> bool:
    matcher = matcher.fork()
    return matcher.inner.try_consume_tokens(tokens) == len(tokens) and matcher.may_end


def check(spec: GrammarSpec, texts: list[str], judge: Any) -> None:
    """The constraint takes each text, and each of them with a change, exactly if the judge does; in bytes and in long tokens."""
    matcher = COMPILER.compile(spec, is_private=True)
    for text in texts:
        spellings = COMPILER.tokenizer.tokenize_str(text), [BYTES[bytes([byte])] for byte in text.encode()]
        assert {takes(matcher, tokens) for tokens in spellings} == {judge(text)}, (spec.text, text)


def changed(rng: random.Random, text: str) -> list[str]:
    """The text, and texts near it."""
    place, letter = rng.randint(0, len(text)), rng.choice([*WORDS, "x"])
    return [text, text[:place] + letter + text[place:], text[:place] + text[place + 1 :], text[:place]]


def texts_of(rng: random.Random, pattern: Node) -> list[str]:
    sampled = [pattern.sample(rng) for _ in range(NUM_TEXTS)]
    assert all(matches(pattern, text) for text in sampled)
    return [near for text in sampled for near in changed(rng, text)]


def greedy_pattern(rng: random.Random) -> Node:
    """A pattern with endless repetitions of letters that what follows may begin with, and with rules that name themselves."""
    letters = [OneOf((), (("a", "z"),)), OneOf(("a", " ", "E")), OneOf(('"',), (), is_negated=True), OneOf(tuple("12e"))]
    names = iter(["list", "nest", "deep", "more"])

    def part() -> Node:
        body = rng.choice([*letters, Literal(rng.choice(WORDS))])
        least, written = rng.choice(((0, "*"), (1, "+")))
        name = next(names, "")
        if name and rng.random() < 0.3:
            return Nest(body, rng.choice(["(", ",", "ab"]), rng.choice(["", ")"]), name)
        return rng.choice([Times(body, least, MANY, written), Literal(rng.choice(WORDS))])

    return Row([part() for _ in range(rng.randint(2, 4))])


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_a_gbnf_grammar_has_every_sentence_of_its_pattern_and_no_other(batch: int) -> None:
    rng = random.Random(f"gbnf {batch}")
    for number in range(NUM_EACH):
        drawn = random_pattern(rng, lambda: rng.choice(WORDS), is_gbnf=True, letters=LETTERS)
        pattern = greedy_pattern(rng) if number % 2 else drawn
        check(GrammarSpec("lark", grammar_of(pattern)), texts_of(rng, pattern), lambda text, own=pattern: matches(own, text))


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_a_regex_has_every_match_of_its_pattern_and_no_other(batch: int) -> None:
    rng = random.Random(f"regex {batch}")
    for _ in range(NUM_EACH):
        pattern = random_pattern(rng, lambda: rng.choice(WORDS), is_gbnf=False, letters=LETTERS)
        check(GrammarSpec("regex", pattern.regex()), texts_of(rng, pattern), lambda text, own=pattern: matches(own, text))


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_each_text_of_a_choice_can_be_chosen_and_no_other(batch: int) -> None:
    rng = random.Random(f"choice {batch}")
    for _ in range(NUM_EACH):
        choice = ["".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 6))]
        texts = [near for text in choice for near in changed(rng, text)]
        check(GrammarSpec("choice", json.dumps(choice)), texts, choice.__contains__)
