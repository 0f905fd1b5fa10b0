"""Numbers where floats get thin: bounds next to 0, multiples beyond a float's digits, exponents beyond its range."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from test_corpus import COMPILER, compiled, takes
from test_numbers import HOLDS, fits, matcher_of

from weft.errors import GrammarRejected
from weft.grammar.constraint import Matcher
from weft.text.tools.families import FAMILIES
from weft.text.tools.grammar import tool_grammar
from weft.text.tools.tool import read_tool_selection, read_tools

Node = dict[str, Any]

TINY = [0, 1e-19, 1e-20, 1.1e-20, 9e-21, 1e-25, 9.1e-31, 1e-59, 1e-60, 5e-60, 9e-61, 1e-65, 1e-100, 1e-299]
SIZES = [*range(17, 23), 25, *range(30, 33), *range(58, 67), 99, 100, 101, 298, 299, 300, 301, 305, 323]
DIGITS = ["1", "1.1", "2", "5", "9", "9.99"]
TEXTS = ["0", "0.0", "1", "0e5", "0e-100", *(f"{digits}e-{size}" for size in SIZES for digits in DIGITS)]
TEXTS += [f"0.{'0' * zeros}{digit}" for zeros in (17, 18, 19, 20, 24, 59, 60, 64) for digit in ("1", "11", "9")]
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def is_empty(low: Any, high: Any, words: tuple[str, str]) -> bool:
    """Whether no number fits; `words` are about numbers above 0."""
    return low is not None and (low > high or (low == high and words != ("minimum", "maximum")))


def mirrored(schema: Node) -> Node:
    """The schema of the same numbers below 0."""
    names = dict(zip((*LOWER, *UPPER), (*UPPER, *LOWER), strict=True))
    return {names.get(word, word): -value if word in HOLDS else value for word, value in schema.items()}


@pytest.mark.parametrize("low", [None, *TINY])
def test_bounds_next_to_0_hold_to_their_last_digit(low: float | None) -> None:
    highs = [None, *TINY[1:]] if low is not None else TINY[1:]
    pairs = [(high, words) for high in highs for words in [(one, other) for one in LOWER for other in UPPER]]
    for high, words in pairs:
        if high is not None and is_empty(low, high, words):
            continue
        schema = {"type": "number", words[0]: low, words[1]: high}
        schema = {word: value for word, value in schema.items() if value is not None}
        for one, sign in ((schema, ""), (mirrored(schema), "-")):
            matcher = matcher_of(one)
            assert matcher is not None, one
            assert [sign + text for text in TEXTS if not fits(one, sign + text) and takes(matcher, sign + text)] == [], one


@pytest.mark.parametrize("high", [1e-21, 1e-25, 1.7e-27, 1e-59, 1e-61, 1e-65, 1e-100, 1e-299])
def test_numbers_above_0_have_an_exponent_however_near_they_must_be(high: float) -> None:
    for word in UPPER:
        matcher = compiled({"type": "number", "exclusiveMinimum": 0, word: high})

        assert takes(matcher, f"{high / 2:e}")
        assert takes(matcher, f"{high}") == (word == "maximum")
        for text in (f"{high * 2:e}", "0", "1e-999"):
            assert not takes(matcher, text), text


# --- beside other things

KEYWORDS = ["enum", "const", "$defs", "definitions", "$ref", "properties", "patternProperties", "items", "default", "x"]


def call(schema: Node) -> Matcher:
    """The grammar of a call of a tool with this schema, as the json family writes it."""
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}])
    family = next(family for family in FAMILIES if family.name == "json")
    return COMPILER.compile(tool_grammar(family, read_tool_selection("required", tools, False), frozenset(), None))


def closed(properties: Node, **more: Any) -> Node:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more}


@pytest.mark.parametrize("outer", KEYWORDS)
@pytest.mark.parametrize("inner", KEYWORDS)
def test_keys_with_the_names_of_keywords_may_be_beside_numbers(outer: str, inner: str) -> None:
    reference = {"$ref": "#/$defs/D"}
    deep = closed({outer: closed({inner: reference}), "z": {"type": "array", "items": closed({inner: reference})}})
    schema = closed({"n": {"type": "number", "minimum": 0}, "p": deep}, **{"$defs": {"D": {"type": "string", "maxLength": 3}}})
    matcher = call(schema)

    for text, is_good in (("abc", True), ("abcd", False)):
        arguments = {"n": 1, "p": {outer: {inner: text}, "z": [{inner: text}]}}
        assert takes(matcher, f'{{"name": "f", "arguments": {json.dumps(arguments)}}}') == is_good


def ranged(index: int) -> Node:
    return {"type": "number", "minimum": -90.5 - index, "maximum": 90.123456789 + index}


def test_a_tool_whose_rules_for_numbers_do_not_compile_is_left_to_the_plain_ones() -> None:
    branches = [closed({"k": {"const": index}, "n": ranged(index)}) for index in range(300)]
    names = [f"n{index}" for index in range(900)]
    tools = {
        "many numbers": (closed({name: ranged(900) for name in names}), dict.fromkeys(names, 1.5)),
        "many branches": (closed({"x": {"anyOf": branches}}), {"x": {"k": 299, "n": 1.5}}),
    }
    for name, (schema, arguments) in tools.items():
        assert takes(call(schema), f'{{"name": "f", "arguments": {json.dumps(arguments)}}}'), name


# --- multiples

STEPS = [0.25, 0.5, 0.01, 0.05, 0.1, 0.3, 0.35, 0.75, 1.5, 2.5, 1, 3, 7]
LISTED = [0, 1, 2, 3, 10, 20, 0.25, 0.5, 0.75, 1.5, 2.25, 5.25, 19.9, 19.99, 0.3, 0.35, -1.5, -19.9]
LISTED_WAYS: dict[str, Callable[[list[Any], Node], Node]] = {
    "beside": lambda values, rule: {"enum": values, **rule},
    "with a type": lambda values, rule: {"type": ["number", "string"], "enum": values, **rule},
    "in a part": lambda values, rule: {"enum": values, "allOf": [rule]},
    "in two parts": lambda values, rule: {"allOf": [{"enum": values}, rule]},
    "around parts": lambda values, rule: {**rule, "allOf": [{"enum": values}, {"type": ["number", "string"]}]},
}
FAR_WAYS: list[Callable[[Node], Node]] = [
    lambda rule: rule,
    lambda rule: {"type": "number", **rule},
    lambda rule: {"type": "number", "minimum": 0, "maximum": 1e17, **rule},
    lambda rule: {"type": ["number", "null"], "minimum": -1e17, **rule},
    lambda rule: {"allOf": [{"type": "number"}, rule]},
    lambda rule: {"anyOf": [{"type": "number", "maximum": 1e18, **rule}]},
]


def is_multiple(value: float | str, step: float) -> bool:
    return (Fraction(str(value)) / Fraction(repr(step))).denominator == 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("way", LISTED_WAYS)
def test_of_listed_numbers_those_that_fit_a_multiple_are_taken_and_no_others(way: str, strict: bool) -> None:
    for step in STEPS:
        for rule in ({"multipleOf": step}, {"multipleOf": step, "exclusiveMinimum": 0.25}):
            matcher = compiled(LISTED_WAYS[way]([*LISTED, "a"], rule), strict=strict)
            for value in LISTED:
                fitting = is_multiple(value, step) and ("exclusiveMinimum" not in rule or value > 0.25)
                assert takes(matcher, json.dumps(value)) == fitting, (step, value)
            assert takes(matcher, '"a"')


@pytest.mark.parametrize("step", STEPS)
def test_a_constant_that_is_a_multiple_is_taken_and_no_other_one_compiles(step: float) -> None:
    for value in LISTED:
        matcher = None
        with suppress(GrammarRejected):
            matcher = compiled({"const": value, "multipleOf": step})
        assert (matcher is not None and takes(matcher, json.dumps(value))) == is_multiple(value, step), value


def test_a_list_that_is_part_of_another_value_keeps_what_that_says() -> None:
    for reference, name in (("#/properties/a/allOf/0", {}), ("#part", {"$anchor": "part"})):
        part = {**name, "type": "integer", "multipleOf": 3}
        matcher = compiled(closed({"a": {"enum": [3, 4, 6], "allOf": [part]}, "b": {"$ref": reference}}))

        assert takes(matcher, '{"a":3,"b":9}')
        assert not takes(matcher, '{"a":3,"b":7}')
        assert not takes(matcher, '{"a":4,"b":9}')


@pytest.mark.parametrize("step", [step for step in STEPS if step % 1])
@pytest.mark.parametrize("way", range(len(FAR_WAYS)))
def test_no_number_is_taken_that_a_client_reads_as_no_multiple(way: int, step: float) -> None:
    matcher = compiled(FAR_WAYS[way]({"multipleOf": step}))
    counts = [10**size // part + more for size in range(2, 19) for part in (1, 3, 7) for more in range(3)]
    exact = [Fraction(repr(step)) * count for count in counts]
    texts = [f"{Decimal(value.numerator) / Decimal(value.denominator):f}" for value in exact]

    assert all(is_multiple(text, step) for text in texts)
    taken = [text for text in texts if takes(matcher, text) or takes(matcher, f"{text}0")]
    assert [text for text in taken if not is_multiple(repr(float(text)), step)] == []
    assert {text for text in texts if 1 < float(text) < 1e9} <= set(taken)


# --- exponents


@pytest.mark.parametrize(
    "bounds", [{"minimum": 0}, {"exclusiveMinimum": 0}, {"minimum": 0.001}, {"minimum": -3.5}, {"maximum": 0}]
)
def test_numbers_with_a_bound_are_finite_for_every_client(bounds: Node) -> None:
    matcher = compiled({"type": "number", **bounds})
    sign = "-" if "maximum" in bounds else ""
    wholes = [digit * count for digit in "19" for count in (1, 2, 7, 8, 9, 10, 50, 299, 300, 301, 308, 309, 310, 400)]
    exponents = ["", *(f"e{size}" for size in (1, 99, 200, 290, *range(296, 312), 450, 999))]
    texts = [f"{sign}{whole}{fraction}{exponent}" for whole in wholes for fraction in ("", ".5") for exponent in exponents]
    taken = [text for text in texts if takes(matcher, text)]

    assert [text for text in taken if float(text) in (float("inf"), float("-inf"))] == []
    assert {f"{sign}9e300", f"{sign}1.5e200", f"{sign}{'9' * 300}"} <= set(taken)
