"""No field of any dialect takes more than its bound: every list, text and object of every request body has one.

The fields are read from /openapi.json, so a new one without a bound is noticed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.api import ollama
from weft.api.admin import ClearRequest, DetokenizeRequest, LoadRequest, RenewRequest, TokenizeRequest, UnloadRequest
from weft.api.anthropic import request as anthropic
from weft.api.openai import chat, completions, responses
from weft.api.openapi import document
from weft.errors import InvalidRequest
from weft.ipc import limits
from weft.text import schema
from weft.text.bodies import convert

Node = dict[str, Any]
DOCUMENT = document("")
SCHEMAS: dict[str, Node] = DOCUMENT["components"]["schemas"]
DOCS = Path(__file__).parent.parent.parent / "docs" / "api.md"

# Texts that have no bound of their own: what fits into a body, and as a prompt into the context.
TEXTS = {
    "content",
    "refusal",
    "reasoning_content",
    "reasoning",
    "arguments",
    "input",
    "text",
    "instructions",
    "system",
    "thinking",
}
TEXTS |= {"prompt", "description", "images", "signature"}
# Bounded by bytes when they are examined: `weft.text.schema`.
EXAMINED = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "json_schema", "grammar", "json", "choice"}
EXAMINED |= {"structural_tag", "schema", "format", "input_schema", "parameters", "structures"}
# JSON that is read as what it is, and bounded with the body.
FREE = {"arguments", "function", "custom", "messages", "tools", "input", "content", "system", "cache_control"}
FREE |= {"prompt_cache_breakpoint"}

MESSAGE = {"role": "user", "content": "hi"}
TRANSLATORS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "/v1/chat/completions": (chat.translate, {"messages": [MESSAGE]}),
    "/v1/completions": (completions.translate, {"prompt": "hi"}),
    "/v1/responses": (responses.translate, {"input": "hi"}),
    "/v1/responses/input_tokens": (responses.translate, {"input": "hi"}),
    "/v1/messages": (anthropic.translate, {"messages": [MESSAGE], "max_tokens": 5}),
    "/v1/messages/count_tokens": (anthropic.translate_count, {"messages": [MESSAGE]}),
    "/api/chat": (ollama.translate_chat, {"messages": [MESSAGE]}),
    "/api/generate": (ollama.translate_generate, {"prompt": "hi"}),
    "/api/show": (lambda body: convert(body, ollama.ShowRequest), {"model": "m"}),
    "/v1/models/load": (lambda body: convert(body, LoadRequest), {"model": "m"}),
    "/v1/models/unload": (lambda body: convert(body, UnloadRequest), {"model": "m"}),
    "/v1/replicas/renew": (lambda body: convert(body, RenewRequest), {"replica": "1"}),
    "/tokenize": (lambda body: convert(body, TokenizeRequest), {"prompt": "hi"}),
    "/detokenize": (lambda body: convert(body, DetokenizeRequest), {"tokens": [1]}),
    "/v1/cache/clear": (lambda body: convert(body, ClearRequest), {}),
}
FIXED_LENGTHS = (0, 1)  # of the idle values of refused fields, which are refused for what they hold


def bodies() -> dict[str, str]:
    """The name of the schema of each operation's body."""
    found = {}
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                found[path] = reference.rpartition("/")[2]
    return found


def nodes(node: Any, field: str, seen: frozenset[str] = frozenset()) -> Iterator[tuple[str, Node]]:
    """Every schema within one, each with the name of the field it stands for."""
    if isinstance(node, list):
        for one in node:
            yield from nodes(one, field, seen)
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from nodes(SCHEMAS[name], field, seen | {name})
        return
    yield field, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, name, seen)
    for keyword in ("items", "anyOf", "oneOf", "allOf", "additionalProperties"):
        yield from nodes(node.get(keyword), field, seen)


def is_bounded(field: str, node: Node) -> bool:
    kinds = node.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind == "string" and not (
            {"maxLength", "enum", "const", "pattern"} & node.keys() or field in TEXTS | EXAMINED | {"type"}
        ):
            return False
        if kind == "array" and "maxItems" not in node:
            return False
        if kind == "object" and not ({"properties", "maxProperties"} & node.keys() or field in EXAMINED | FREE):
            return False
    return True


def test_every_operation_with_a_body_is_looked_at() -> None:
    assert bodies().keys() == TRANSLATORS.keys()


@pytest.mark.parametrize(("path", "name"), bodies().items())
def test_every_list_text_and_object_of_a_body_has_a_bound(path: str, name: str) -> None:
    unbounded = {
        (field, str(node.get("type")))
        for field, node in nodes({"$ref": f"#/components/schemas/{name}"}, path)
        if not is_bounded(field, node)
    }

    assert unbounded == set()


def too_much() -> Iterator[tuple[str, str, Any]]:
    """For each bounded field of each body a value that is one beyond its bound."""
    for path, name in bodies().items():
        for field, node in SCHEMAS[name]["properties"].items():
            for kind in [node, *node.get("anyOf", [])]:
                items = kind.get("items", {})
                sample: Any = (
                    MESSAGE
                    if "$ref" in items
                    else {}
                    if items.get("type") == "object"
                    else 1
                    if items.get("type") == "integer"
                    else "a"
                )
                if kind.get("maxItems") not in (None, *FIXED_LENGTHS):
                    yield path, field, [sample] * (kind["maxItems"] + 1)
                if "maxLength" in kind:
                    yield path, field, "a" * (kind["maxLength"] + 1)
                if kind.get("maxProperties") not in (None, *FIXED_LENGTHS):
                    yield path, field, {str(number): 1 for number in range(kind["maxProperties"] + 1)}


def test_one_more_than_a_bound_is_refused_by_the_name_of_its_field() -> None:
    tried = 0
    for path, field, value in too_much():
        translate, body = TRANSLATORS[path]
        with pytest.raises(InvalidRequest) as caught:
            translate({**body, field: value})
        assert (caught.value.param or "").startswith(field), (path, field, str(caught.value))
        assert re.search(r"<= \d+|at most|more than", str(caught.value)), (path, field, str(caught.value))
        tried += 1

    assert tried > 60


@pytest.mark.parametrize("field", ["guided_regex", "regex", "guided_grammar", "grammar"])
def test_what_is_examined_is_refused_by_its_bytes(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {schema.MAX_TEXT} are taken") as caught:
        chat.translate({"messages": [MESSAGE], field: "a" * (schema.MAX_TEXT + 1)})

    assert caught.value.param == field


@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
def test_a_schema_is_refused_by_its_bytes(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat.translate({"messages": [MESSAGE], field: {"description": "a" * schema.MAX_BYTES}})

    assert (caught.value.param or "").startswith(field)


def test_stop_token_ids_are_bounded_for_whoever_submits_them() -> None:
    sampling = limits.Sampling(stop_token_ids=tuple(range(limits.MAX_STOP_TOKENS + 1)))

    with pytest.raises(InvalidRequest, match="number of stop_token_ids"):
        sampling.check(1 << 20)


def test_the_page_has_the_numbers_that_hold() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Bounds")[2].partition("\n## ")[0]
    said = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", table)}
    names = [
        name
        for name in vars(limits)
        if name.startswith("MAX_") and name not in ("MAX_LOGPROBS", "MAX_HEAD_BYTES", "MAX_TEMPLATE_CHARACTERS")
    ]
    held = {getattr(limits, name) for name in names}

    assert held <= said, held - said
