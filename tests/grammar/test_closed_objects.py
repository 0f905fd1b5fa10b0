"""Objects that name their keys take no others, in schemas as people send them; strict ones mean what JSON Schema says."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from test_corpus import COMPILER, compiled, takes

from weft.api import ollama
from weft.api.openai import chat, completions, responses
from weft.errors import GrammarRejected
from weft.ipc.messages import GrammarSpec
from weft.text.schema import json_schema_grammar
from weft.text.tools.families import FAMILIES
from weft.text.tools.grammar import tool_grammar
from weft.text.tools.tool import read_tool_selection, read_tools

ID = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
MESSAGES = [{"role": "user", "content": "Hi"}]

# A schema, texts that fit it as people mean it, and texts that fit it only by JSON Schema's word.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an object": (ID, [{"id": 1}], [{"id": 1, "z": 1}]),
    "within a list": ({"type": "array", "items": ID}, [[{"id": 1}]], [[{"id": 1, "z": 1}]]),
    "without a type": ({"properties": {"a": True}}, [{"a": 1}, {}], [{"b": 1}]),
    "a required key that is not listed": ({**ID, "required": ["id", "k"]}, [{"id": 1, "k": 2}], [{"id": 1, "k": 2, "z": 1}]),
    "patterns": ({**ID, "patternProperties": {"^x": True}}, [{"id": 1, "x1": 2}], [{"id": 1, "z": 1}]),
    "a choice": ({"anyOf": [ID, NAME, {"type": "null"}]}, [{"id": 1}, {"name": "a"}, None], [{"id": 1, "name": "a"}]),
    "two parts": ({"allOf": [ID, NAME]}, [{"id": 1, "name": "a"}], [{"id": 1, "name": "a", "z": 1}]),
    "a part and more": ({"allOf": [ID], **NAME}, [{"id": 1, "name": "a"}], [{"id": 1, "name": "a", "z": 1}]),
    "a definition and more": (
        {"$ref": "#/$defs/id", **NAME, "$defs": {"id": ID}},
        [{"id": 1, "name": "a"}],
        [{"id": 1, "name": "a", "z": 1}],
    ),
    "keys and a choice of which are required": (
        {"type": "object", "properties": {"a": True, "b": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1, "z": 1}],
    ),
    "keys and a choice of further ones": (
        {**ID, "anyOf": [NAME, {"required": ["id"]}]},
        [{"id": 1, "name": "a"}],
        [{"id": 1, "z": 1}],
    ),
    "keys of conditions": (
        {**ID, "if": {"properties": {"kind": True}}, "then": {"properties": {"t": True}}, "else": {"properties": {"e": True}}},
        [{"id": 1, "kind": 1, "t": 1}, {"id": 1, "e": 1}],
        [{"id": 1, "z": 1}],
    ),
    "a definition alone and as a part": (
        {
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/id"}, "both": {"allOf": [{"$ref": "#/$defs/id"}, NAME]}},
            "$defs": {"id": ID},
        },
        [{"one": {"id": 1}, "both": {"id": 1, "name": "a"}}],
        [{"one": {"id": 1, "z": 1}}, {"both": {"id": 1, "name": "a", "z": 1}}],
    ),
    "a definition that has itself": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}},
        },
        [{"n": {"n": None}}],
        [{"n": {"z": 1}}],
    ),
    "a part that has its whole": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"allOf": [ID, {"properties": {"n": {"$ref": "#/$defs/n"}}}]}},
        },
        [{"id": 1, "n": {"id": 2}}],
        [{"id": 1, "n": {"id": 2, "z": 1}}],
    ),
    "what says so itself": (
        {"allOf": [ID, NAME], "unevaluatedProperties": False},
        [{"id": 1, "name": "a"}],
        [{"id": 1, "name": "a", "z": 1}],
    ),
}
OPEN: dict[str, Any] = {
    "says so": {**ID, "additionalProperties": True},
    "says what": {**ID, "additionalProperties": {"type": "integer"}},
    "says so of the whole": {"allOf": [ID], "unevaluatedProperties": True},
    "names no key": {"type": "object", "properties": {}},
    "a part says so": {"allOf": [ID, {"type": "object", "additionalProperties": True}]},
    "has parts that are not followed": {**ID, "dependentSchemas": {"id": {"properties": {"z": True}}}},
}


def text(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize("name", CASES)
def test_an_object_that_names_its_keys_has_no_others(name: str) -> None:
    schema, good, loose = CASES[name]
    matcher = compiled(schema, strict=False)

    assert [value for value in good if not takes(matcher, text(value))] == []
    assert [value for value in loose if takes(matcher, text(value))] == []


@pytest.mark.parametrize("name", OPEN)
def test_an_object_that_says_otherwise_or_can_not_be_merged_stays_open(name: str) -> None:
    assert takes(compiled(OPEN[name], strict=False), text({"id": 1, "z": 1}))


PATTERNS = ["^x-", "_id$", "^x_", "^x", "^x?y", "^a{2}", "^[a-c]", "^[0-9]+$", "^y|z", "^(n|m)", "b", "^d.*"]
DISJOINT = [("^x-", "^x_"), ("^x-", "^[a-c]"), ("^[a-c]", "^[0-9]+$"), ("^[0-9]+$", "^x"), ("^x_", "^d.*")]


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_parts_whose_patterns_may_match_the_same_key_leave_an_object_open(keyword: str) -> None:
    for one, other in combinations(PATTERNS, 2):
        parts = [{"patternProperties": {one: {"type": "string"}}}, {"patternProperties": {other: {"type": "string"}}}]
        schema = {**ID, keyword: parts}
        try:
            opened = COMPILER.compile(json_schema_grammar(schema, False, "s", closes=False))
        except GrammarRejected:  # a key that two patterns of one object match is refused by llguidance itself
            continue
        matcher = compiled(schema, strict=False)
        assert takes(opened, text({"id": 1, "?": 1}))
        assert takes(matcher, text({"id": 1}))
        if (one, other) in DISJOINT or (other, one) in DISJOINT:
            assert not takes(matcher, text({"id": 1, "?": 1})), (one, other)


def test_strict_means_what_json_schema_says() -> None:
    assert takes(compiled(ID), text({"id": 1, "z": 1}))


def test_a_chain_of_parts_that_are_used_alone_too_is_read_in_bounded_time() -> None:
    chain: dict[str, Any] = {"d0": ID}
    for number in range(1, 60):
        below = {"$ref": f"#/$defs/d{number - 1}"}
        chain[f"d{number}"] = {"allOf": [below, {"allOf": [below]}], "properties": {f"p{number}": below}}
    matcher = compiled({"$ref": "#/$defs/d3", "$defs": chain}, strict=False)

    assert takes(matcher, text({"id": 1, "p1": {"id": 1}}))
    assert not takes(matcher, text({"id": 1, "z": 1}))


# --- what programs send


class Pet(BaseModel):
    """A pet."""

    name: str
    tags: list[str] = []


class Cat(Pet):
    kind: Literal["cat"]
    lives: int = Field(gt=0, le=9)


class Dog(Pet):
    kind: Literal["dog"]
    owner: Pet | None = None


class House(BaseModel):
    street: str
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    other: Cat | Dog | None = None
    rooms: dict[str, Pet] = {}


HOUSE = {
    "street": "s",
    "pet": {"name": "a", "tags": ["b"], "kind": "dog", "owner": {"name": "c"}},
    "other": {"name": "a", "kind": "cat", "lives": 9},
    "rooms": {"any": {"name": "d"}},
}


def paths(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The places of all objects within a value."""
    inner = value.items() if isinstance(value, dict) else ()
    return ([path] if isinstance(value, dict) else []) + [one for key, item in inner for one in paths(item, (*path, key))]


def test_models_of_pydantic_get_the_keys_they_name_and_no_others() -> None:
    matcher = compiled(House.model_json_schema(), strict=False)

    House.model_validate(HOUSE)
    assert takes(matcher, text(HOUSE))
    for place in paths(HOUSE):
        changed = json.loads(text(HOUSE))
        at = changed
        for key in place:
            at = at[key]
        at["invented"] = 1
        assert not takes(matcher, text(changed)), place


# --- on every dialect


def in_chat(**fields: Any) -> GrammarSpec | None:
    return chat.translate({"messages": MESSAGES, **fields}).generation.grammar


def in_completions(**fields: Any) -> GrammarSpec | None:
    return completions.translate({"prompt": "Hi", **fields}).generation.grammar


def in_responses(**fields: Any) -> GrammarSpec | None:
    return responses.translate({"input": "Hi", **fields}).generation.grammar


def in_ollama(**fields: Any) -> GrammarSpec | None:
    return ollama.translate_chat({"model": "m", "messages": MESSAGES, **fields}).generation.grammar


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": ID}}
OPENED = {"structured_outputs": {"disable_additional_properties": False}}
WAYS: list[tuple[Callable[..., GrammarSpec | None], dict[str, Any], dict[str, Any]]] = [
    *((ask, {"response_format": FORM}, OPENED) for ask in (in_chat, in_completions)),
    *((ask, {"guided_json": ID}, OPENED) for ask in (in_chat, in_completions, in_responses)),
    (in_chat, {"json_schema": ID}, OPENED),
    (in_chat, {"response_format": {"type": "json_object", "schema": ID}}, OPENED),
    (in_chat, {"structured_outputs": {"json": ID}}, {"structured_outputs": {"json": ID, "disable_additional_properties": False}}),
    (in_responses, {"text": {"format": {"type": "json_schema", "name": "n", "schema": ID}}}, OPENED),
    (in_ollama, {"format": ID}, {"options": {"disable_additional_properties": False}}),
]


@pytest.mark.parametrize(("ask", "fields", "opened"), WAYS)
def test_objects_are_closed_on_every_dialect_and_a_parameter_opens_them(ask: Any, fields: Any, opened: Any) -> None:
    closed, back = ask(**fields), ask(**{**fields, **opened})

    assert json.loads(closed.text)["additionalProperties"] is False
    assert "additionalProperties" not in json.loads(back.text)


def test_true_closes_objects_of_a_strict_schema_too() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": ID, "strict": True}}
    spec = in_chat(response_format=form, structured_outputs={"disable_additional_properties": True})

    assert spec is not None
    assert not spec.lenient
    assert json.loads(spec.text)["additionalProperties"] is False


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_of_a_tool_have_the_keys_it_names_unless_it_is_strict(strict: bool) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"o": ID}}, "strict": strict}
    tools = read_tools([{"type": "function", "function": tool}])
    family = next(family for family in FAMILIES if family.name == "json")
    matcher = COMPILER.compile(tool_grammar(family, read_tool_selection("required", tools, False), frozenset(), None))

    def call(arguments: Any) -> str:
        return f'{{"name": "f", "arguments": {text(arguments)}}}'

    assert takes(matcher, call({"o": {"id": 1}}))
    assert takes(matcher, call({"o": {"id": 1, "z": 1}})) == strict
    assert takes(matcher, call({"o": {"id": 1}, "z": 1})) == strict


BARE: list[tuple[Any, bool]] = [  # parameters of a tool, and whether it takes arguments
    (None, False),
    ({"type": "object", "properties": {}}, False),
    ({"type": "object", "properties": {}, "required": []}, False),
    ({"properties": {}, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "x-order": 1}, False),
    ({"type": "object", "properties": {}, "additionalProperties": False}, False),
    ({}, True),
    ({"type": "object"}, True),
    ({"type": "object", "properties": {}, "additionalProperties": True}, True),
    ({"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}, True),
    ({"type": "object", "properties": {}, "patternProperties": {"^z": True}}, True),
    ({"type": "object", "properties": {}, "allOf": [{"properties": {"z": True}}]}, True),
]
NOTATIONS = {
    "json": ('{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"z": 1}}'),
    "lfm2": ("<|tool_call_start|>[f()]<|tool_call_end|>", "<|tool_call_start|>[f(z=1)]<|tool_call_end|>"),
    "gemma4": ("<|tool_call>call:f{}<tool_call|>", "<|tool_call>call:f{z:1}<tool_call|>"),
}


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize("mode", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_that_lists_no_argument_takes_none(notation: str, mode: Any) -> None:
    family = next(family for family in FAMILIES if family.name == notation)
    empty, invented = NOTATIONS[notation]
    for parameters, is_open in BARE:
        function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
        tools = read_tools([{"type": "function", "function": function}])
        matcher = COMPILER.compile(tool_grammar(family, read_tool_selection(mode, tools, False), frozenset(), None))

        assert takes(matcher, empty), parameters
        if notation == "json" or not {"patternProperties", "allOf"} & (parameters or {}).keys():
            assert takes(matcher, invented) == is_open, parameters
