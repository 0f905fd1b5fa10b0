"""What answers must look like: which schemas are taken, how they are said to the engine, and how answers are checked."""

from __future__ import annotations

import json
import socket
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

import weft
from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text import schema
from weft.text.schema import MAX_BRANCHES, MAX_BYTES, MAX_DEPTH, examine_schema, find_schema_errors, json_schema_grammar

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def refused(schema: Any, strict: bool = True) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        json_schema_grammar(schema, strict, "s")
    return caught.value


@cache
def _tokenizer() -> LLTokenizer:
    folder = Path(weft.__file__).parent / "model" / "tiny-hybrid"
    return LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))


def lets_through(schema: str, text: str, lenient: bool = False) -> bool:
    """Whether llguidance, left to itself, takes this answer for this schema."""
    options = {"whitespace_flexible": False, "lenient": lenient}
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_json_schema(schema, overrides=options), log_level=0)  # type: ignore[arg-type]
    assert not matcher.is_error(), matcher.get_error()
    tokens = _tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# --- strict


UNENFORCEABLE: list[tuple[Any, str, str]] = [
    ({"not": STRING}, "", "not"),
    (record(x={"type": "array", "uniqueItems": True}), ".properties.x", "uniqueItems"),
    ({"type": "array", "items": {"contains": {}}}, ".items", "contains"),
    ({"anyOf": [INTEGER, {"if": {}}]}, ".anyOf[1]", "if"),
    ({"type": "array", "prefixItems": [{"propertyNames": {"maxLength": 3}}]}, ".prefixItems[0]", "propertyNames"),
    ({"patternProperties": {"^x": {"unevaluatedProperties": False}}}, ".patternProperties.^x", "unevaluatedProperties"),
    ({"additionalProperties": {"dependentRequired": {"a": ["b"]}}}, ".additionalProperties", "dependentRequired"),
    ({"allOf": [{"dependentSchemas": {}}]}, ".allOf[0]", "dependentSchemas"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"minContains": 1}}}, ".$defs.a", "minContains"),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "not": {}}}}, "#here", "not"),
    ({"$schema": DRAFT_7, "items": [INTEGER, {"dependencies": {}}]}, ".items[1]", "dependencies"),
    ({"$schema": DRAFT_7, "items": [INTEGER], "additionalItems": {"else": {}}}, ".additionalItems", "else"),
    ({"$schema": DRAFT_7, "contentEncoding": "base64"}, "", "contentEncoding"),
    ({"format": "regex"}, "", "format regex"),
    ({"type": ["null", "string"], "format": "password"}, "", "format password"),
    ({"pattern": "^(?!a)"}, "", "pattern"),
    ({"pattern": r"\bword"}, "", "pattern"),
    ({"pattern": r"(a)\1"}, "", "pattern"),
    ({"pattern": "[a-z&&[^aeiou]]"}, "", "pattern"),
    ({"pattern": "[[:alpha:]]"}, "", "pattern"),
    ({"pattern": "[^]a]"}, "", "pattern"),
    ({"pattern": "[+--]"}, "", "pattern"),
    ({"patternProperties": {"(?<=a)b": True}}, "", "patternProperties"),
    ({"minProperties": 2}, "", "minProperties"),
    ({"minProperties": 3, "required": ["a"]}, "", "minProperties"),
    ({"minProperties": 1, "properties": {"a": True}}, "", "minProperties"),
    ({"maxProperties": 2, "properties": {"a": True}}, "", "maxProperties"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "", "oneOf"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://x.org/a", "type": "integer"}}}, ".$defs.a", "$id"),
    ({"const": {"a": ["\x01"]}}, "", "a control character in const"),
    ({"properties": {"\x7f": True}}, "", "a control character in properties"),
]


def unenforceable(schema: Any) -> tuple[str, str] | None:
    """The place and keyword for which a strict schema is refused; None for one that is enforced."""
    _, problem = examine_schema(json.dumps(schema), True)
    return problem and (problem[0], problem[1].removesuffix(" can not be enforced; leave it out or set strict to false"))


@pytest.mark.parametrize(("schema", "path", "keyword"), UNENFORCEABLE)
def test_what_can_not_be_held_exactly_is_refused_with_its_place(schema: Any, path: str, keyword: str) -> None:
    assert unenforceable(schema) == (path, keyword)

    error = refused(schema)
    assert str(error) == f"s{path}: {keyword} can not be enforced; leave it out or set strict to false"
    assert error.param == f"s{path}"


@pytest.mark.parametrize("schema", [schema for schema, _, _ in UNENFORCEABLE])
def test_without_strict_the_same_is_taken(schema: Any) -> None:
    spec = json_schema_grammar(schema, False, "s")

    assert spec.lenient
    jsonschema_rs.validator_for(json.loads(spec.text), offline=True)


@pytest.mark.parametrize(
    "schema",
    [
        record(**{"not": STRING, "if": INTEGER, "uniqueItems": INTEGER, "oneOf": STRING, "$ref": STRING}),
        {"enum": [{"not": {}}, {"$ref": "http://x.org"}]},
        {"const": {"pattern": "(?!a)", "minProperties": 9}},
        {"type": "integer", "default": {"not": 1}, "examples": [{"if": 1}]},
        {"type": "integer", "title": "t", "x-foo": {"not": {}}, "nullable": True, "deprecated": True},
        {"type": "integer", "$defs": {"unused": {"not": {"$ref": "#/$defs/unused"}}}},
        {"type": "array", "uniqueItems": False},
        {"type": "integer", "format": "int32"},
        {"contentEncoding": "base64"},
        {"pattern": r"^[$^][a^][\]\[-][^\s&~-]*\p{Lu}(?:a|(?<n>b))\u{1f600}?\.$"},
        {"minProperties": 1, **record(a=True)},
        {"minProperties": 1, "properties": {"a": True, "b": True}, "additionalProperties": False},
        {"maxProperties": 1, "properties": {"a": True, "b": True}, "additionalProperties": False},
        {"minProperties": 2, "required": ["a"], "additionalProperties": INTEGER},
        {"$id": "http://x.org/root", "$schema": DRAFT_7, **record(a={"$id": "#/properties/a", "type": "integer"})},
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": INTEGER}},
        True,
    ],
)
def test_what_is_no_keyword_or_says_nothing_is_taken(schema: Any) -> None:
    assert not json_schema_grammar(schema, True, "s").lenient


def _variant(kind: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": kind, **more}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        ([INTEGER, STRING, {"type": "null"}], True),
        ([{"enum": ["a", 1]}, {"enum": ["b", 2.5]}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 1}], True),
        ([{"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 1}], False),
        ([_variant({"const": "a"}), _variant({"const": "b"}, more=INTEGER)], True),
        ([_variant({"const": "a"}), {**_variant({"const": "b"}), "required": []}], False),
        ([_variant(INTEGER), _variant({"type": "number"})], False),
        ([record(a=INTEGER), record(b=INTEGER)], True),
        ([{"required": ["a"]}, {"required": ["b"]}], False),
        ([{"$ref": "#/$defs/tree"}, {"type": "null"}], True),
        ([{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/alias"}], False),
        ([INTEGER, True], False),
        ([INTEGER, False], True),
        ([{"const": number} for number in range(MAX_BRANCHES)], True),
        ([{"const": number} for number in range(MAX_BRANCHES + 1)], False),
    ],
)
def test_one_of_is_taken_where_its_branches_are_surely_apart(branches: list[Any], apart: bool) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    definitions = {"tree": tree, "alias": {"$ref": "#/$defs/tree"}}

    assert unenforceable({"oneOf": branches, "$defs": definitions}) == (None if apart else ("", "oneOf"))


def test_the_type_beside_a_one_of_counts_for_its_branches() -> None:
    assert unenforceable({"type": "integer", "oneOf": [{"maximum": 0}, {"minimum": 1}]}) is None
    assert unenforceable({"oneOf": [{"maximum": 0}, {"minimum": 1}]}) == ("", "oneOf")


# --- narrower than llguidance


@pytest.mark.parametrize(
    ("schema", "good", "loose"),
    [
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-29t23:59:59.5+01:00"', '"2023-02-29T00:00:00Z"'),
        ({"type": "string", "format": "date-time"}, '"2023-12-31T23:59:59Z"', '"2023-12-31T11:59:60Z"'),
        ({"type": "string", "format": "time"}, '"23:59:59Z"', '"11:59:60Z"'),
        ({"type": "string", "format": "hostname"}, '"a-b.c-d"', '"ab--cd"'),
        ({"type": "string", "format": "email"}, '"a.b+c@d-e.org"', f'"{"a" * 65}@b.org"'),
        ({"type": "string", "format": "email"}, '"a@b"', '"a@xn--b.c"'),
        ({"type": "string", "pattern": r"^a\sb$"}, '"a b"', '"a\u0085b"'),
        ({"type": "string", "pattern": r"^a[\s_]b$"}, '"a_b"', '"a\u0085b"'),
        ({"type": "string", "pattern": r"^\S$"}, '"a"', '"\ufeff"'),
        ({"type": "object", "patternProperties": {r"^\s$": True}, "additionalProperties": False}, '{" ":1}', '{"\u0085":1}'),
        ({"prefixItems": [INTEGER], "additionalItems": False, "type": "array"}, "[1]", '["a"]'),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 10**4), str(2**53)),
        ({"type": "integer", "exclusiveMaximum": 2**60}, str(2**59), str(2**60)),
        ({"type": "number", "multipleOf": 2.5}, "-7.5", "24507957732818857.5"),
    ],
)
def test_what_llguidance_holds_loosely_is_said_more_tightly(schema: Any, good: str, loose: str) -> None:
    spec = json_schema_grammar(schema, True, "s")

    assert lets_through(spec.text, good)
    assert not lets_through(spec.text, loose)
    assert lets_through(json.dumps(schema), loose)  # else there would be nothing to tighten


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("minimum", -(2**63)), ("maximum", 2**63 - 1), ("maximum", 2**64 - 1), ("exclusiveMaximum", 1.7e308), ("minLength", 2.0)],
)
def test_numbers_that_llguidance_does_not_take_are_said_otherwise(keyword: str, value: float) -> None:
    spec = json_schema_grammar({"type": ["integer", "string"], keyword: value}, True, "s")

    assert lets_through(spec.text, "-9000000000000000000")
    assert lets_through(spec.text, "9000000000000000000")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["number", ["number", "null"]])
def test_numbers_keep_their_exponents(strict: bool, kind: Any) -> None:
    spec = json_schema_grammar({"type": kind}, strict, "s")

    assert all(lets_through(spec.text, number) for number in ("6.626e-34", "1e-06", "6.022E+23", "-1.5", "0"))


def test_a_one_of_of_branches_apart_is_held() -> None:
    pet = {"oneOf": [{"$ref": "#/$defs/cat"}, {"type": "null"}], "$defs": {"cat": record(lives=INTEGER)}}
    spec = json_schema_grammar(pet, True, "s")

    assert lets_through(spec.text, '{"lives":9}')
    assert lets_through(spec.text, "null")
    assert not lets_through(spec.text, "9")


def test_settings_of_llguidance_are_not_the_clients() -> None:
    assert json_schema_grammar({"type": "integer", "x-guidance": {"lenient": True}}, False, "s").text == '{"type":"integer"}'


# --- never taken


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ([INTEGER], "", "must be a JSON Schema"),
        (7, "", "must be a JSON Schema"),
        (False, "", "no answer fits"),
        ("{", "", "is not valid JSON"),
        ("[" * 10**5, "", "is not valid JSON"),
        ({"type": "objekt"}, ".type", "not a valid JSON Schema"),
        (record(a={"minimum": "3"}), ".properties.a.minimum", "not of type"),
        ({"properties": {"a": {"pattern": "("}}}, ".properties.a.pattern", "regex"),
        ({"required": "a", "properties": [1], "items": 3, "$ref": 5}, ".$ref", "not of type"),
        ({"$schema": "http://x.org/dialect"}, "", "http://x.org/dialect"),
        (record(a={"$ref": []}), ".properties.a.$ref", "not of type"),
        ({"$ref": "#/$defs/none"}, "", "does not exist"),
        ({"$ref": "https://x.org/a.json"}, "", "$ref https://x.org/a.json leads out"),
        (record(a={"anyOf": [{"$ref": "b.json#/c"}]}), ".properties.a.anyOf[0]", "$ref b.json#/c leads out"),
        ({"$ref": "#"}, "", "$ref # leads back to itself"),
        (
            record(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}},
            ".properties.a",
            "itself",
        ),
        ({"const": -(2**63)}, "", "const has a number beyond 2^53"),  # ends the process when llguidance gets it
        (record(a={"enum": [1, [{"b": 2**53 + 1}]]}), ".properties.a", "enum has a number beyond 2^53"),
        ({"type": "integer", "minimum": 1e30, "maximum": 1e31}, "", "minimum 1e+30 is too far out"),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e20}, "", "maximum -1e+20 is too far out"),  # this one too
        ({"multipleOf": 3_599_993}, "", "multipleOf 3599993 has too many digits"),  # compiles for a minute
        ({"multipleOf": 0.07}, "", "multipleOf 0.07 has too many digits"),  # as a float it is 0.070000000000000001
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, ".allOf[1]", "together have too many digits"),
    ],
)
def test_some_schemas_are_refused_even_without_strict(schema: Any, path: str, words: str, strict: bool) -> None:
    error = refused(schema, strict)

    assert error.param == f"s{path}"
    assert str(error).startswith(f"s{path}")
    assert words in str(error)


@pytest.mark.parametrize("step", [1, 2, 7, 60, 0.5, 0.01, 0.0001, 1000, 86_400, 10**8, 9973])
def test_a_usual_multiple_is_taken(step: float) -> None:
    assert json_schema_grammar({"type": "number", "multipleOf": step}, True, "s").kind == "json_schema"


def test_multiples_that_can_not_meet_are_taken() -> None:
    assert json_schema_grammar(record(a={"multipleOf": 9973}, b={"multipleOf": 9967}), True, "s").kind == "json_schema"


def test_size_and_depth_have_limits_that_are_told() -> None:
    deep: dict[str, Any] = INTEGER
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}

    assert f"nested more than {MAX_DEPTH} levels" in str(refused(deep))
    large = {"description": "x" * MAX_BYTES}
    assert f"s has {MAX_BYTES + 18} bytes; at most {MAX_BYTES} are taken" in str(refused(large))
    assert "bytes" in str(refused(json.dumps(large)))


@pytest.mark.parametrize("keyword", ["$ref", "$schema", "$id"])
def test_nothing_is_ever_fetched(keyword: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        inner = {"$dynamicRef": "#x"} if keyword == "$id" else {}
        refused({"type": "object", "properties": {"a": {"not": {"$ref": address}}}, keyword: address, **inner}, strict=False)

        with pytest.raises(TimeoutError):
            server.accept()


# --- the other kinds


def test_each_kind_keeps_its_words() -> None:
    assert json_schema_grammar('{"type": "integer"}', False, "s") == GrammarSpec(
        "json_schema", '{"type":"integer"}', lenient=True
    )
    assert schema.regex_grammar("a+", "r") == GrammarSpec("regex", "a+")
    assert schema.regex_grammar(r"\d{4}-[\w.]\\d", "r").text == r"[0-9]{4}-[0-9A-Za-z_.]\\d"
    assert schema.lark_grammar('start: /\\d+/ "\\d" // \\d', "g").text == 'start: /[0-9]+/ "\\d" // \\d'
    assert schema.choice_grammar(["é", "b"], "c") == GrammarSpec("choice", '["é","b"]')
    assert schema.lark_grammar('start: "a"', "g") == GrammarSpec("lark", 'start: "a"')


def test_the_schemas_of_a_structural_tag_are_strict() -> None:
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"format": "date"}, "end": "</f>"}]}
    spec = schema.structural_tag_grammar(tag, "t")

    assert spec.kind == "structural_tag"
    made = json.loads(spec.text)
    assert made["triggers"] == ["<f"]
    assert "allOf" in made["structures"][0]["schema"]
    assert schema.structural_tag_grammar(json.dumps(tag), "t") == spec
    with pytest.raises(InvalidRequest, match=r"t.structures\[0\].schema: not can not be enforced"):
        schema.structural_tag_grammar({"structures": [{"schema": {"not": {}}}]}, "t")


@pytest.mark.parametrize(
    ("make", "value", "words"),
    [
        (schema.choice_grammar, ["a", "b", "a"], "p has a text twice"),
        (schema.choice_grammar, [f"{number} {'a' * 1000}" for number in range(MAX_BYTES // 1000)], "bytes"),
        (schema.regex_grammar, "a" * (MAX_BYTES + 1), "bytes"),
        (schema.lark_grammar, 'start: %json {"const": -9223372036854775808}', "%json is not taken"),
        (schema.structural_tag_grammar, "[]", "p must be an object"),
    ],
)
def test_what_can_not_be_a_grammar_is_refused(make: Any, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        make(value, "p")
    assert caught.value.param == "p"


# --- afterwards


CHECKED = record(tags={"type": "array", "items": STRING, "uniqueItems": True}, day={"type": "string", "format": "date"})


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ('{"tags": ["a", "b"], "day": "2024-02-29"}', ()),
        (' {"tags": [], "day": "2024-02-28"}\n', ()),
        ('{"tags": ["a", "a"], "day": "2024-02-28"}', ('$.tags: ["a","a"] has non-unique elements',)),
        ('{"tags": ["a", 1]}', ('$.tags[1]: 1 is not of type "string"', '$: "day" is a required property')),
        ('{"tags": ["a"', ("the answer was cut before it was complete",)),
        ("", ("the answer was cut before it was complete",)),
        ("Sure!", ("the answer is not valid JSON: JSON is malformed: invalid character (byte 0)",)),
        ('{"tags": 1e999}', ("the answer is not valid JSON: Number out of range - at `$[...]`",)),
    ],
)
def test_an_answer_is_checked_against_all_of_its_schema(text: str, errors: tuple[str, ...]) -> None:
    spec = json_schema_grammar(CHECKED, False, "s")

    assert sorted(find_schema_errors(spec, text)) == sorted(errors)


def test_without_strict_a_pattern_that_can_not_be_held_is_left_to_the_check() -> None:
    closed = {"patternProperties": {"^(?!a)": INTEGER}, "additionalProperties": False}
    spec = json_schema_grammar(
        {"type": "object", "properties": {"ab": {"type": "string", "pattern": r"^a\b"}}, **closed}, False, "s"
    )

    assert lets_through(spec.text, '{"ab":"ab","b":"c"}', lenient=True)
    assert not lets_through(spec.text, '{"ab":1}', lenient=True)
    assert find_schema_errors(spec, '{"ab":"a b","b":1}') == ()
    assert [error.partition(":")[0] for error in find_schema_errors(spec, '{"ab":"ab","b":1}')] == ["$.ab"]
    assert [error.partition(":")[0] for error in find_schema_errors(spec, '{"ab":"a","b":"c"}')] == ["$"]
    assert [error.partition(":")[0] for error in find_schema_errors(spec, '{"ac":"a"}')] == ["$"]


def test_formats_and_dates_are_checked_too() -> None:
    spec = json_schema_grammar({"format": "date"}, False, "s")

    assert find_schema_errors(spec, '"2024-02-29"') == ()
    assert len(find_schema_errors(spec, '"2023-02-29"')) == 1
    assert find_schema_errors(spec, "5") == ()


def test_at_most_five_errors_are_told_and_none_at_length() -> None:
    spec = json_schema_grammar({"type": "array", "items": {"enum": ["x" * 300]}}, False, "s")
    errors = find_schema_errors(spec, json.dumps(list(range(9))))

    assert len(errors) == 5
    assert max(map(len, errors)) < 220
