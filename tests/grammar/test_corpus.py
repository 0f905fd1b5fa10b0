"""Every schema of the corpus goes the way of a strict request: refused with a reason, or nothing gets through that does not fit.

What is let through is found in two ways. Random walks take any token the mask has, so that only the grammar can make them
right. And a pool of values that clients might send is held against grammar and validator: what one takes, the other must take.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from schemas import CORPUS, Entry

import weft.model
from weft.api.dialect import decode_arguments
from weft.errors import InvalidRequest
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Matcher
from weft.text.schema import json_schema_grammar

VOCABULARY, END = 4096, 4082
COMPILER = Compiler(Path(weft.model.__file__).parent / "tiny-hybrid" / "tokenizer.json", VOCABULARY, (END,))
PLACE = "response_format.json_schema.schema"
WALKS, MAX_STEPS, HURRY = 4, 400, 30  # after so many tokens a walk takes whatever ends something
ENDINGS = [COMPILER.tokenizer.tokenize_str(text)[0] for text in ('"', "@", "]", "}", ":")]

POOL: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        4,
        5,
        6,
        7,
        9,
        10,
        12,
        17,
        18,
        19,
        25,
        30,
        31,
        50,
        100,
        101,
        255,
        256,
        1001,
        -3,
        -7,
        -18,
    ),
    *(2**53, 2**53 + 1, 10**19, -(2**63) - 1, 0.5, 0.25, 0.1, 0.3, 0.31, 1.5, 2.25, 2.5, -0.001, -0.5, 1.0, 1e-5, 1e300),
    *(
        "",
        "a",
        "b",
        "ab",
        "abc",
        "aaa",
        "xabcx",
        "é",
        "日",
        "🦀",
        "12",
        "123",
        "line\nbreak",
        " ",
        "\u0085x",
        "\ufeffx",
        "[",
        "&",
    ),
    *("2023-02-29", "2024-02-29", "1900-02-29", "12:00:60Z", "23:59:60Z", "2023-02-29T00:00:00Z", "2024-06-30T12:00:60Z"),
    *("a@b", "a" * 65 + "@b.c", "a@" + "b" * 64, "xn--a", "a.b", "::1", "1.2.3.4", "256.1.1.1", "P1D", "P1Y1D", "urn:x"),
    *([], [1], [1, 2], [1, 1], [1, 2, 3], ["a"], [1, "a"], [1, "a", True], [None], [[]], [[1]], [True, True]),
    *({}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": "x"}, {"b": "x"}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"a": 1, "z": 1}),
    *({"x": 1, "y": 2}, {"x1": 3}, {"x1": 7}, {"x-a": "b"}, {"x-a": 1}, {"kind": "a"}, {"kind": "b"}, {"k1": 1}, {"never": 1}),
]
COMPILING = [pytest.param(entry, id=entry.name) for entry in CORPUS if entry.expect == "compiles"]
REFUSED = [pytest.param(entry, id=entry.name) for entry in CORPUS if entry.expect == "refused"]


def compiled(schema: Any, *, strict: bool = True) -> Matcher:
    """The way of a request: the front's examination, then the engine's compiler."""
    return COMPILER.compile(json_schema_grammar(schema, strict, PLACE))


def walk(matcher: Matcher, rng: np.random.Generator) -> list[int] | None:
    """Tokens that only the grammar chose among, in growing hurry to end; None when they did not come to an end."""
    tokens: list[int] = []
    for step in range(MAX_STEPS):
        mask = matcher.mask()
        assert not matcher.inner.is_error(), matcher.inner.get_error()
        assert mask.any()
        in_hurry = rng.random() < step / HURRY
        if mask[END] and (in_hurry or rng.random() < 0.3 or mask.sum() == 1):
            return tokens
        mask[END] = False
        ending = next((token for token in ENDINGS if mask[token]), None)
        token = ending if in_hurry and ending is not None and rng.random() < 0.9 else int(rng.choice(np.flatnonzero(mask)))
        matcher.accept(token)
        tokens.append(token)
        if matcher.is_finished:
            return tokens
    return None


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the grammar has this text, whole."""
    matcher = matcher.fork()
    for token in COMPILER.tokenizer.tokenize_str(text):
        if not matcher.allows(token):
            return False
        matcher.accept(token)
    return matcher.is_finished or matcher.allows(END)


def validator(schema: Any) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(schema, validate_formats=True)


def test_the_corpus_has_three_hundred_schemas_and_no_name_twice() -> None:
    assert len(CORPUS) >= 300
    assert len({entry.name for entry in CORPUS}) == len(CORPUS)
    assert all(entry.why for entry in CORPUS if entry.expect == "refused")


@pytest.mark.parametrize("entry", COMPILING)
def test_whatever_the_grammar_lets_through_fits_the_schema(entry: Entry) -> None:
    matcher, judge = compiled(entry.schema), validator(entry.schema)
    rng = np.random.default_rng(zlib.crc32(entry.name.encode()))
    answers = [answer for _ in range(WALKS) if (answer := walk(matcher.fork(), rng)) is not None]

    assert bool(answers) != entry.is_endless
    for answer in answers:
        text = COMPILER.tokenizer.decode_bytes(answer).decode()
        assert judge.is_valid(decode_arguments(text)), text


@pytest.mark.parametrize("entry", COMPILING)
def test_a_value_that_does_not_fit_is_not_let_through(entry: Entry) -> None:
    matcher, judge = compiled(entry.schema), validator(entry.schema)

    wrong = [value for value in POOL if not judge.is_valid(value)]
    assert [value for value in wrong if takes(matcher, json.dumps(value, ensure_ascii=False))] == []


@pytest.mark.parametrize("entry", REFUSED)
def test_a_schema_that_can_not_be_enforced_is_refused_with_a_reason(entry: Entry) -> None:
    with pytest.raises(InvalidRequest, match=r"\w+ \w+") as refusal:
        compiled(entry.schema)

    assert "Traceback" not in str(refusal.value)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    "name", ["not", "if then", "uniqueItems", "contains", "oneOf overlapping ranges", "format color", "lookahead"]
)
def test_without_strict_the_rest_of_a_schema_is_enforced(name: str) -> None:
    schema = next(entry.schema for entry in CORPUS if entry.name == f"refused: {name}")
    matcher = compiled(schema, strict=False)

    assert takes(matcher, '"text"') == (schema.get("type") == "string")
    assert not takes(matcher, "not json")


def test_compact_and_pretty_printed_json_are_both_possible() -> None:
    deep: Any = {"type": "integer"}
    value: Any = 1
    for _ in range(6):
        deep, value = (
            {"type": "array", "items": {"type": "object", "properties": {"a": deep}, "required": ["a"]}},
            [{"a": value}] * 2,
        )
    matcher = compiled(deep)

    assert takes(matcher, json.dumps(value, separators=(",", ":")))
    assert takes(matcher, json.dumps(value))
    assert takes(matcher, json.dumps(value, indent=2))


def test_white_space_can_not_run_away() -> None:
    matcher = compiled({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    blank = np.array([not COMPILER.tokenizer.decode_bytes([token]).strip(b" \t\r\n") for token in range(VOCABULARY)])
    matcher.accept(COMPILER.tokenizer.tokenize_str("{")[0])

    for _ in range(64):
        allowed = np.flatnonzero(matcher.mask() & blank)
        if not len(allowed):
            return
        matcher.accept(int(allowed[0]))
    pytest.fail("64 tokens of white space were let through")


def test_an_escape_can_not_give_a_property_a_second_value() -> None:
    matcher = compiled({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})

    assert takes(matcher, r'{"a": 1, "b": "x"}')
    assert not takes(matcher, r'{"a": 1, "\u0061": "x"}')


def test_a_schema_can_not_bring_settings_for_the_grammar_engine() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": {"item_separator": ";", "whitespace_pattern": "x*"}}
    matcher = compiled(schema)

    assert takes(matcher, "[1, 2]")
    assert not takes(matcher, "[1;2]")
    assert not takes(matcher, "[1,xx2]")
