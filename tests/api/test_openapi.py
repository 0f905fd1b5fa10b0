"""The OpenAPI document: well made, and at one with what the translators accept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from weft.api import ollama
from weft.api.anthropic import request as messages
from weft.api.dialect import ReplyHeader
from weft.api.openai import chat, completions, responses
from weft.api.openapi import document
from weft.errors import InvalidRequest
from weft.text.types import Finish, ReuseExplanation, Text, Usage

DOCUMENT = document("1.2.3")
USER = {"role": "user", "content": "Hi"}


def _validator(name: str) -> Any:
    """Checks values against one schema of the document."""
    return jsonschema_rs.Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{name}"})


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (item for key, item in value.items() if key == "$ref")
        yield from (found for item in value.values() for found in _references(item))
    elif isinstance(value, list):
        yield from (found for item in value for found in _references(item))


def test_every_path_is_described() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1")
    assert DOCUMENT["info"]["version"] == "1.2.3"
    assert {path: next(iter(methods)) for path, methods in DOCUMENT["paths"].items()} == {
        "/v1/chat/completions": "post",
        "/v1/completions": "post",
        "/v1/responses": "post",
        "/v1/responses/input_tokens": "post",
        "/v1/responses/{id}": "get",
        "/v1/responses/{id}/input_items": "get",
        "/v1/responses/{id}/cancel": "post",
        "/v1/messages": "post",
        "/v1/messages/count_tokens": "post",
        "/api/chat": "post",
        "/api/generate": "post",
        "/api/version": "get",
        "/api/tags": "get",
        "/api/ps": "get",
        "/api/show": "post",
        "/v1/models": "get",
        "/v1/models/available": "get",
        "/v1/models/load": "post",
        "/v1/models/unload": "post",
        "/v1/models/{id}": "get",
        "/health": "get",
        "/healthz": "get",
        "/ping": "get",
        "/version": "get",
        "/tokenizer_info": "get",
        "/v1/events": "get",
        "/metrics": "get",
        "/v1/status": "get",
        "/tokenize": "post",
        "/detokenize": "post",
        "/v1/requests/{id}/cancel": "post",
        "/v1/replicas/renew": "post",
        "/v1/cache": "get",
        "/v1/cache/clear": "post",
        "/v1/cache/requests/{id}": "get",
    }


def test_generators_of_clients_can_name_every_operation_and_read_every_enum() -> None:
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]

    assert len({*names}) == len(names)
    assert all(name.isidentifier() for name in names)
    for enum in _enums(DOCUMENT):
        assert len({type(value) for value in enum} - {type(None)}) == 1, enum
        assert all(isinstance(value, str | int | None) for value in enum)


def _enums(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, dict):
        yield from (item for key, item in value.items() if key == "enum" and isinstance(item, list))
        yield from (found for item in value.values() for found in _enums(item))
    elif isinstance(value, list):
        yield from (found for item in value for found in _enums(item))


@pytest.mark.parametrize("path", DOCUMENT["paths"])
def test_every_operation_has_its_parameters_its_answer_and_its_errors(path: str) -> None:
    for operation in DOCUMENT["paths"][path].values():
        assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= operation["responses"].keys()
        assert ("parameters" in operation) == ("{id}" in path)
        assert all(response["content"] for response in operation["responses"].values())


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    schemas = DOCUMENT["components"]["schemas"]

    assert {reference.rpartition("/")[2] for reference in _references(DOCUMENT)} == schemas.keys()
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"n": 128, "stop": ["a"], "logit_bias": {"5": 1}, "temperature": None, "best_of": 1, "user": 5, "new": 1}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": 1}]}]}, False),
        ({"messages": [{**USER, "prompt_cache_breakpoint": True}], "cache_salt": "a", "session_id": 5}, True),
        ({"priority": -100, "service_tier": "flex"}, True),
        ({"priority": 101}, False),
        ({"speculate": False, "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}}, True),
        ({"speculate": "no"}, False),
        ({"prediction": {"type": "text", "content": "a"}}, False),
        ({"draft_model": "tiny"}, False),
        ({"cache_salt": ""}, False),
        ({"cache_salt": "a" * 257}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "function"}]}, False),
        ({"messages": [{"role": "user", "content": [{}]}]}, False),
        ({"n": 129}, False),
        ({"n": True}, False),
        ({"stop": ""}, False),
        ({"stop": ["a"] * 33}, False),
        ({"logit_bias": {"a": 1}}, False),
        ({"logit_bias": {"1": 101}}, False),
        ({"presence_penalty": -3}, False),
        ({"top_logprobs": 21}, False),
        ({"max_tokens": 0}, False),
        ({"best_of": 2}, False),
        ({"best_of": True}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}, "strict": True}}}, True),
        ({"response_format": {"type": "json_object"}, "guided_json": None, "thinking_token_budget": 0}, True),
        ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}, "reasoning_budget_tokens": -1}, True),
        ({"guided_json": "{}"}, True),
        ({"thinking_token_budget": -1, "thinking_budget": None}, True),
        ({"thinking_budget": -2}, False),
        ({"max_thinking_tokens": "9"}, False),
        ({"thinking": {"type": "often"}}, False),
        ({"reasoning": {"exclude": True}}, False),
        ({"response_format": {"type": "xml"}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, False),
        ({"json_schema": False}, False),
        ({"structured_outputs": {"xml": 1}}, False),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, False),
        ({"guided_choice": []}, False),
        ({"thinking_token_budget": -2}, False),
        ({"tools": 5, "tool_choice": "none"}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "parallel_tool_calls": False}, True),
        ({"tools": [{"type": "function", "function": {}}]}, False),
        ({"tools": [{"type": "custom"}]}, False),
        ({"tool_choice": "any"}, False),
        ({"functions": [{"name": "f"}]}, False),
    ],
)
def test_the_chat_schema_and_the_translator_agree(fields: dict[str, Any], accepted: bool) -> None:
    _agree(chat.translate, "ChatRequest", {"messages": [USER], **fields}, accepted)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        *(({"prompt": prompt}, True) for prompt in ("", "a", ["a", "b"], [1, 2], [[1], [2, 3]])),
        *(({"prompt": prompt}, False) for prompt in (None, 5, [], [[]], [1, "a"], ["a", [1]], [-1], [True], [[1, "a"]])),
        ({"logprobs": 5, "echo": True, "max_tokens": 0}, True),
        ({"logprobs": 6}, False),
        ({"suffix": "x"}, False),
        ({"guided_regex": "a+", "reasoning_budget_tokens": -1}, True),
        ({"thinking_token_budget": 5}, False),
    ],
)
def test_the_completions_schema_and_the_translator_agree(fields: dict[str, Any], accepted: bool) -> None:
    _agree(completions.translate, "CompletionRequest", {"prompt": "a", **fields}, accepted)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"messages": [{**USER, "images": ["aGk="]}, {"role": "tool", "tool_name": "f"}], "keep_alive": 5, "new": 1}, True),
        ({"options": {"num_ctx": 5, "mirostat": 0, "stop": "a", "num_predict": -2, "new": 1}, "format": "json"}, True),
        ({"format": {"type": "object"}, "think": "high", "tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"format": "xml"}, False),
        ({"think": "very"}, False),
        ({"options": {"mirostat": 1}}, False),
        ({"options": {"stop": ""}}, False),
        ({"template": "x"}, False),
        ({"messages": [{"role": "developer", "content": "a"}]}, False),
        ({"tools": [{"type": "custom"}]}, False),
    ],
)
def test_the_schema_of_ollama_s_chat_and_the_translator_agree(fields: dict[str, Any], accepted: bool) -> None:
    _agree(ollama.translate_chat, "OllamaChatRequest", {"messages": [USER], **fields}, accepted)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"input": [{"role": "user", "content": "a"}], "max_output_tokens": 1, "background": False, "new": 1}, True),
        ({"reasoning": {"effort": "low", "summary": "auto", "context": "auto"}, "text": {"format": {"type": "text"}}}, True),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}], "truncation": "auto", "n": 1}, True),
        ({"input": None}, False),
        ({"input": [5]}, False),
        ({"max_output_tokens": 0}, False),
        ({"background": True}, False),
        ({"conversation": "c"}, False),
        ({"max_tokens": 5}, False),
        ({"n": 2}, False),
        ({"reasoning": {"effort": "huge"}}, False),
        ({"text": {"format": {"type": "xml"}}}, False),
        ({"tools": [{"name": "f"}]}, False),
        ({"tool_choice": "any"}, False),
        ({"truncation": "some"}, False),
    ],
)
def test_the_schema_of_responses_and_the_translator_agree(fields: dict[str, Any], accepted: bool) -> None:
    _agree(responses.translate, "ResponseRequest", {"input": "a", **fields}, accepted)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"max_tokens": 0, "system": [{"type": "text", "text": "a"}], "new": 1, "service_tier": "auto"}, True),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}]}, True),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}], "tool_choice": {"type": "auto"}},
            True,
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "max"}, "mcp_servers": []}, True),
        ({"max_tokens": None}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "tool", "content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": [{}]}]}, False),
        ({"messages": [{"role": "user", "content": None}]}, False),
        ({"thinking": {"type": "often"}}, False),
        ({"output_config": {"effort": "huge"}}, False),
        ({"tool_choice": {"type": "required"}}, False),
        ({"stop_sequences": [""]}, False),
        ({"mcp_servers": [{}]}, False),
    ],
)
def test_the_schema_of_messages_and_the_translator_agree(fields: dict[str, Any], accepted: bool) -> None:
    _agree(messages.translate, "MessagesRequest", {"messages": [USER], "max_tokens": 1, **fields}, accepted)


def _agree(translate: Any, name: str, body: dict[str, Any], accepted: bool) -> None:
    assert _validator(name).is_valid(body) == accepted
    if accepted:
        translate(body)
    else:
        with pytest.raises(InvalidRequest):
            translate(body)


@pytest.mark.parametrize(
    ("translate", "body", "name"),
    [
        (chat.translate, {"messages": [USER], "logprobs": True}, "ChatCompletion"),
        (completions.translate, {"prompt": "a"}, "Completion"),
        (responses.translate, {"input": "a"}, "Response"),
        (ollama.translate_chat, {"messages": [USER]}, "OllamaChat"),
        (ollama.translate_generate, {"prompt": "a"}, "OllamaText"),
        (messages.translate, {"messages": [USER], "max_tokens": 1}, "Message"),
    ],
)
def test_replies_are_as_described(translate: Any, body: dict[str, Any], name: str) -> None:
    for errors, reuse in (
        (None, None),
        ((), ReuseExplanation("whole", 5, "")),
        (("$: wrong",), ReuseExplanation("differs", 0, "", 0, "", "a", "b")),
    ):
        reply = translate(body).reply(ReplyHeader("1", 1, "m", "f"))
        reply.collect_deltas(0, [Text("a"), Finish("stop", usage=Usage(1, 1, reuse=reuse), schema_errors=errors)])

        _validator(name).validate(json.loads(json.dumps(reply.make_body())))


def test_tokenize_needs_one_of_its_three_texts() -> None:
    assert _validator("TokenizeRequest").is_valid({"content": "a"})
    assert not _validator("TokenizeRequest").is_valid({"model": "a"})
