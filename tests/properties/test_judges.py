"""The judges of test_constrained_wire.py: a pattern's own matcher says what Python's re says, of matches and of what is none."""

from __future__ import annotations

import random
import re

from constrained_cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_vocabularies import KINDS, LETTERS, fragments
from patterns import Node, matches, may_become_match, random_pattern

KIND = KINDS[0]


def pattern_of(number: int) -> Node:
    rng = random.Random(number)
    return random_pattern(rng, lambda: rng.choice(fragments(KIND)), is_gbnf=False, letters=LETTERS)


@settings(max_examples=150)
@given(st.integers(0, 10_000), st.data())
def test_the_matcher_takes_what_re_takes_and_every_beginning_may_become_a_match(number: int, data: st.DataObject) -> None:
    pattern = pattern_of(number)
    judge = re.compile(pattern.regex(), re.ASCII)
    text = data.draw(st.from_regex(judge, fullmatch=True))
    place, letter = data.draw(st.integers(0, len(text))), data.draw(st.sampled_from(["a", "\n", " ", "<", "Ċ", ""]))

    assert matches(pattern, text)
    assert all(may_become_match(pattern, text[:end]) for end in range(len(text) + 1))
    for other in (text[:place] + letter + text[place:], text[:place] + text[place + 1 :], text[:place]):
        assert matches(pattern, other) == (judge.fullmatch(other) is not None)


def test_a_case_is_drawn_from_its_kind_and_number_alone() -> None:
    for kind in KINDS:
        for number in range(50):
            one, again = make_case(kind, number), make_case(kind, number)
            assert (one.path, one.body, one.what) == (again.path, again.body, again.what)


def test_every_kind_is_asked_for_everything_and_every_dialect_is_used() -> None:
    cases = {kind.name: [make_case(kind, number) for number in range(84)] for kind in KINDS}

    for own in cases.values():
        assert {case.what for case in own} == {"choice", "regex", "gbnf", "schema", "tool", "custom tool"}
    assert len({case.path for own in cases.values() for case in own}) == 5
