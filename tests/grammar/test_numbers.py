"""Numbers under bounds: no text beyond them, as a decimal or as a float; every usual text within them, exponents included."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any

import pytest
from test_corpus import COMPILER, compiled, takes

from thoroughness import ALL
from weft.errors import InvalidRequest
from weft.grammar.constraint import Matcher
from weft.text.schema import find_schema_errors, json_schema_grammar
from weft.text.tools.families import FAMILIES
from weft.text.tools.grammar import tool_grammar
from weft.text.tools.tool import read_tool_selection, read_tools

Node = dict[str, Any]

BOUNDS: list[Any] = [None, -1000, -3.5, -1, -0.5, -1e-05, 0, 5e-70, 1e-09, 0.1, 0.25, 0.3, 1, 1.5, 7, 7.25, 99.99, 100, 1e15]
WORDS = [*itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))]
STEPS: list[Any] = [None, 1, 0.5, 0.01, 3]
COUNT = 60 if ALL else 12  # random values of each kind for a pair of bounds: a thousand for each lower bound
HOLDS = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}
FORMS = ["{:f}", "{:e}", "{:E}", "{:g}"]


def highs(rng: random.Random) -> list[Any]:
    """The upper bounds that are tried with a lower one."""
    return BOUNDS if ALL else rng.sample(BOUNDS, 4)


def node(low: Any, high: Any, words: tuple[str, str], kind: Any = "number", step: Any = None) -> Node:
    given = {"type": kind, words[0]: low, words[1]: high, "multipleOf": step}
    return {keyword: value for keyword, value in given.items() if value is not None}


def fits(schema: Node, text: str) -> bool:
    """Whether a number fits, as the decimal it is and as the float that clients read."""
    if schema["type"] == "integer" and Fraction(text).denominator != 1:
        return False
    if float(text) in (float("inf"), float("-inf")):
        return False
    exact, read = Fraction(text), Fraction(float(text))
    step = schema.get("multipleOf")
    if step is not None and (exact / Fraction(repr(step))).denominator != 1:
        return False
    return all(_holds(word, Fraction(repr(bound)), exact, read) for word, bound in schema.items() if word in HOLDS)


def _holds(word: str, bound: Fraction, exact: Fraction, read: Fraction) -> bool:
    # An inclusive bound is met where the decimal meets it; a float next to it may round to it, as the bound itself does.
    return HOLDS[word](exact, bound) and (not word.startswith("exclusive") or HOLDS[word](read, Fraction(float(bound))))


def matcher_of(schema: Node) -> Matcher | None:
    """None if it is refused."""
    try:
        return compiled(schema)
    except InvalidRequest:
        return None


def texts(low: Any, high: Any, rng: random.Random) -> list[str]:
    """Numbers about the bounds: neighbours, halves, ends, and random ones, in all notations."""
    ends = [Decimal(repr(bound)) for bound in (low, high) if bound is not None] or [Decimal(0)]
    found = {Decimal(0), Decimal("1e-30"), Decimal("1E+5"), Decimal("-2.5e-7")}
    for end in ends:
        found |= {end, end + 1, end - 1, end * 2, end / 2, -end, end + Decimal("1e-12"), end - Decimal("1e-12")}
        found |= {end + Decimal("1e-25"), end - Decimal("1e-25")}
    for _ in range(COUNT):
        middle = rng.choice(ends)
        found.add(middle + Decimal(repr(rng.choice((1, 10, 1e-3)) * rng.uniform(-1, 1))))
        found.add(Decimal(repr(rng.uniform(-10, 10))).scaleb(rng.randrange(-30, 30)))
    plain = {form.format(value) for value in found for form in FORMS} | {str(value) for value in found}
    return sorted(
        {text for text in plain if len(text) < 60} | {"-0", "0.0", "0e5", "1e-06", "1E5", "6.626e-34", "3.0e8", "1e999"}
    )


# --- never beyond


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("low", BOUNDS)
def test_no_text_beyond_the_bounds_is_taken(low: Any, words: tuple[str, str]) -> None:
    rng = random.Random(f"{low}{words}")
    for high in highs(rng):
        for kind, step in [("number", None), ("integer", None), ("number", rng.choice(STEPS))]:
            schema = node(low, high, words, kind, step)
            if (matcher := matcher_of(schema)) is not None and (low, high) != (None, None):
                wrong = [text for text in texts(low, high, rng) if not fits(schema, text) and takes(matcher, text)]
                assert wrong == [], schema


@pytest.mark.parametrize("words", WORDS)
def test_a_range_without_numbers_is_refused(words: tuple[str, str]) -> None:
    rng = random.Random(str(words))
    for low, high in [(least, most) for least in BOUNDS for most in (least, *highs(rng))]:
        if low is None or high is None or not (low > high or (low == high and words != ("minimum", "maximum"))):
            continue
        assert matcher_of(node(low, high, words)) is None, (low, high)


# --- whatever is usual within


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("low", BOUNDS)
def test_plain_numbers_and_floats_within_the_bounds_are_taken(low: Any, words: tuple[str, str]) -> None:
    rng = random.Random(f"{low}{words}")
    for high in highs(rng):
        schema = node(low, high, words)
        matcher = matcher_of(schema)
        if matcher is None:
            continue
        for value in within(low, high, rng):
            spelt = {repr(value), f"{value:.6e}", f"{value:.3E}", *([f"{value:.9f}"] if 1e-6 < abs(value) < 1e15 else [])}
            for text in spelt:
                if fits(schema, text) and not too_near(text, low, high):
                    assert takes(matcher, text), (schema, text)


def within(low: Any, high: Any, rng: random.Random) -> list[float]:
    """Floats between the bounds, of all sizes."""
    least = max(low, -1e200) if low is not None else -1e200
    most = min(high, 1e200) if high is not None else 1e200
    found = [least + (most - least) * rng.random() for _ in range(COUNT)] + [float(least), float(most)]
    for _ in range(COUNT):
        size = 10.0 ** rng.uniform(-55, 90)
        found += [value for value in (size, -size, least + size, most - size) if least <= value <= most]
    return found


def too_near(text: str, low: Any, high: Any) -> bool:
    """Whether a number is within the last digits of a bound or of 0, where the rules are narrower."""
    value = float(text)
    is_near = any(abs(value - bound) <= abs(bound) * 1e-13 for bound in (low, high) if bound is not None)
    return 0 < abs(value) < 1e-55 or (is_near and value not in (low, high))


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"minimum": 0}, ["0", "-0", "6.626e-34", "1E5", "3.0e8", "12.5e-3", "0.5E+3", "1e-06", "0e0"], ["-1", "-1e-5", "-0.1"]),
        ({"exclusiveMinimum": 0}, ["6.626e-34", "1E5", "3.0e8", "12.5e-3", "0.5E+3"], ["0", "-0", "0.0", "0e5", "1e-999", "-1"]),
        ({"maximum": 0}, ["0", "-6.626e-34", "-1E5", "-3.0e8"], ["1", "1e-5"]),
        ({"exclusiveMaximum": 0}, ["-6.626e-34", "-1E5", "-12.5e-3"], ["0", "-0", "-0.0", "-0e5", "-1e-999", "1"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "5e-1", "1e-9", "0.1"], ["0", "0.0", "0.51", "5.1e-1", "1e0", "6e-1"]),
        (
            {"minimum": 0, "maximum": 1},
            ["0", "1", "1.0", "1e0", "1.0e+0", "9.99e-1", "1e-300"],
            ["1.01", "1.1e0", "1e1", "-1e-5"],
        ),
        ({"minimum": -90, "maximum": 90}, ["-90", "9e1", "-9.0e1", "8.9999e1", "1e-7"], ["90.1", "-9.1e1", "1e2"]),
        ({"minimum": -3.5, "exclusiveMaximum": -3}, ["-3.5", "-3.1", "-3.2e0"], ["-3", "-3.0", "-3.6", "-3e0", "-2.9e0"]),
        ({"exclusiveMinimum": 0.5}, ["0.6", "1e0", "5.1e-1"], ["0.5", "0.50000000000000000001", "5e-1"]),
        ({"minimum": 0.001, "maximum": 1e15}, ["0.001", "1e-3", "1e15", "1e+15", "9.9e14"], ["9e-4", "1.1e15"]),
    ],
)
def test_the_usual_bounds(bounds: Node, good: list[str], bad: list[str]) -> None:
    for kind in ("number", ["number", "null"]):
        matcher = compiled({"type": kind, **bounds})
        assert [text for text in good if not takes(matcher, text)] == []
        assert [text for text in bad if takes(matcher, text)] == []


# --- wherever a schema has them

PRICE = {"type": "number", "exclusiveMinimum": 0}
PLACES: dict[str, tuple[Any, str]] = {
    "a property": ({"type": "object", "properties": {"x": PRICE}, "required": ["x"], "additionalProperties": False}, '{"x": %s}'),
    "an optional one between others": (
        {"type": "object", "properties": {"a": {"type": "string"}, "x": PRICE, "b": True}, "required": ["a"]},
        '{"a": "é\\"", "x": %s, "b": [1, {}], "c": null}',
    ),
    "a key that is odd": (
        {"type": "object", "properties": {'a"/\\é': PRICE}, "additionalProperties": False},
        '{"a\\"/\\\\é": %s}',
    ),
    "any other key": (
        {"type": "object", "properties": {"a": True}, "additionalProperties": PRICE},
        '{"a": "b", "c": %s, "d": 1}',
    ),
    "a list": ({"type": "array", "items": PRICE, "minItems": 1, "maxItems": 3}, "[1, %s]"),
    "a choice": ({"anyOf": [{"type": "string"}, {"type": "null"}, PRICE]}, "%s"),
    "a definition": (
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/p"}, "y": {"$ref": "#/$defs/s"}},
            "$defs": {"p": PRICE, "s": {}},
        },
        '{"x": %s, "y": {}}',
    ),
    "a definition that has itself": (
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {"type": "object", "properties": {"x": PRICE, "n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
            },
        },
        '{"x": 1, "n": {"n": {"x": %s}}}',
    ),
    "a nullable object": ({"type": ["object", "null"], "properties": {"x": PRICE}}, '{"x": %s}'),
    "no type": ({"properties": {"x": PRICE}}, '{"x": %s}'),
}


@pytest.mark.parametrize("place", PLACES)
def test_numbers_under_bounds_have_exponents_wherever_they_are(place: str) -> None:
    schema, text = PLACES[place]
    matcher = compiled(schema)

    for number in ("1", "0.25", "6.626e-34", "1E5", "3.0e8"):
        assert takes(matcher, text % number), number
    for number in ("0", "-1", "0.0", "-1e-5", "0e5"):
        assert not takes(matcher, text % number), number


@pytest.mark.parametrize("place", PLACES)
def test_what_is_beside_such_a_number_is_held_as_without_it(place: str) -> None:
    schema, text = PLACES[place]
    own, plain = compiled(schema), compiled(json.loads(json.dumps(schema).replace('"exclusiveMinimum": 0', '"multipleOf": 1')))
    compact, pretty = (json.loads(text % 3), json.dumps(json.loads(text % 3), indent=2))
    answers = [
        text % 3,
        json.dumps(compact, separators=(",", ":"), ensure_ascii=False),
        pretty,
        f" {text % 3}",
        f"{text % 3} ",
        "null",
        "{}",
        "[]",
        '"a"',
    ]
    answers += [
        (text % 3).replace(": ", ":  "),
        (text % 3).replace(", ", " , "),
        (text % 3).replace("{", "{\n  "),
        (text % 3) + "}",
        (text % 3)[:-1],
    ]

    for answer in answers:
        assert takes(own, answer) == takes(plain, answer), answer


TOOL_CALLS = {
    "json": '{"name": "f", "arguments": {"x": %s}}',
    "seed": "<seed:tool_call>\n<function=f>\n<parameter=x>%s</parameter>\n</function>\n</seed:tool_call>",
    "lfm2": "<|tool_call_start|>[f(x=%s)]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:f{x:%s}<tool_call|>",
}


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_arguments_of_strict_tools_have_them_in_every_notation(name: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {**PRICE, "maximum": 0.5}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}])
    family = next(family for family in FAMILIES if family.name == name)
    matcher = COMPILER.compile(tool_grammar(family, read_tool_selection("required", tools, False), frozenset(), None))

    for number in ("0.5", "6.626e-34", "0.25"):
        assert takes(matcher, TOOL_CALLS[name] % number), number
    for number in ("0", "0.51", "1e5", "-0.1"):
        assert not takes(matcher, TOOL_CALLS[name] % number), number


def test_where_an_exponent_must_come_digits_end() -> None:
    matcher = compiled({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5})

    assert takes(matcher, f"2.{'6' * 17}e-5")
    assert not takes(matcher, f"2.{'6' * 18}e-5")


@pytest.mark.parametrize(
    "bounds", [{"exclusiveMinimum": 0}, {"exclusiveMinimum": 0, "maximum": 0.5}, {"exclusiveMaximum": 0}, {"minimum": 0}]
)
def test_what_the_grammar_takes_the_check_takes_too(bounds: Node) -> None:
    spec = json_schema_grammar({"type": "number", **bounds}, False, "s")
    matcher = COMPILER.compile(spec)
    numbers = [f"{sign}{digit}e-{size:02}" for sign in ("", "-") for digit in ("1", "9.99") for size in range(310)]
    taken = [text for text in numbers if takes(matcher, text)]

    assert len(taken) > 100
    assert [text for text in taken if find_schema_errors(spec, text)] == []
