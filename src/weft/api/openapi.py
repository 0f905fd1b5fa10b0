"""The OpenAPI document of the server. Requests are described by the structs that read them, so the document can not drift
from what is accepted; replies are described by hand. Knows no route table: `app` serves it at /openapi.json.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from weft.api.openai.schema import (
    HARMLESS,
    NOT_YET,
    ChatRequest,
    ClearRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from weft.wire import MissCause

Schema = dict[str, Any]

ERRORS = {
    "400": "A field or the whole request can not be honoured; the error's param names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or Origin header is not one of this server's.",
    "404": "No such model, request or path.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not plain JSON.",
    "429": "Too many requests wait; come again after Retry-After seconds.",
    "499": "The request was cancelled.",
    "500": "The server failed; the request should not be sent again as it is.",
    "503": "The model is being loaded; come again after Retry-After seconds.",
    "504": "The request was not finished in its time.",
}


def document(version: str) -> Schema:
    """The whole document, for this version of weft."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": version, "description": "OpenAI's wires on one shared batch."},
        "paths": _paths(),
        "components": {
            "schemas": _request_schemas() | _reply_schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],  # {}: on a loopback address no key is needed
    }


def _paths() -> Schema:
    return {
        "/v1/chat/completions": _post("The next message of a conversation.", "ChatCompletion", "ChatRequest", streams=True),
        "/v1/completions": _post("How texts go on.", "Completion", "CompletionRequest", streams=True),
        "/v1/models": _get("The models served.", "ModelList"),
        "/v1/models/{id}": _get("One model.", "Model", path_id=True),
        "/health": _get("Whether requests are answered: 200, or 503 while a model is loaded.", "Health", "Health"),
        "/metrics": _get("Figures for Prometheus.", None),
        "/v1/status": _get("What the server is doing.", "Status"),
        "/tokenize": _post("A text or a conversation as token ids.", "Tokenized", "TokenizeRequest"),
        "/detokenize": _post("Token ids as a text.", "Detokenized", "DetokenizeRequest"),
        "/v1/requests/{id}/cancel": _post("End a request.", "Cancelled", None, path_id=True),
        "/v1/cache": _get("What is kept of computed prompts.", "Kept"),
        "/v1/cache/clear": _post("Forget it.", "Cleared", "ClearRequest", needs_body=False),
        "/v1/cache/requests/{id}": _get("How much of a request's prompt was known, and why no more.", "Report", path_id=True),
    }


def _get(summary: str, reply: str | None, unready: str = "Error", *, path_id: bool = False) -> Schema:
    content = _json(reply) if reply else {"text/plain": {"schema": {"type": "string"}}}
    responses = _responses(content) | {"503": {"description": ERRORS["503"], "content": _json(unready)}}
    return {"get": {"summary": summary, "responses": responses, **_parameters(path_id)}}


def _post(
    summary: str, reply: str, request: str | None, *, needs_body: bool = True, streams: bool = False, path_id: bool = False
) -> Schema:
    events: Schema = {"text/event-stream": {"schema": {}}} if streams else {}
    body = {"requestBody": {"required": needs_body, "content": _json(request)}} if request else {}
    return {"post": {"summary": summary, **body, "responses": _responses(_json(reply) | events), **_parameters(path_id)}}


def _parameters(path_id: bool) -> Schema:
    parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {"parameters": [parameter]} if path_id else {}


def _responses(content: Schema) -> Schema:
    errors = {status: {"description": words, "content": _json("Error")} for status, words in ERRORS.items()}
    return {"200": {"description": "Done.", "content": content}, **errors}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _request_schemas() -> Schema:
    kinds = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ClearRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    not_yet = {name: {"enum": [*harmless, None], "description": "Not done here."} for name, harmless in NOT_YET.items()}
    harmless: Schema = {name: {"description": "Accepted; does not change the answer."} for name in sorted(HARMLESS)}
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["properties"] = not_yet | harmless | schemas[name]["properties"]  # Chat does what Completions refuses
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    lists = [{"type": "array", "items": items, "minItems": 1} for items in ({"type": "string"}, ids)]
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [{"type": "string"}, ids, *lists]}
    schemas["TokenizeRequest"]["anyOf"] = [{"required": [name]} for name in ("prompt", "content", "messages")]
    return schemas


def _reply_schemas() -> Schema:
    text, count, number = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0}
    maybe_text, some_object, maybe_object = {"type": ["string", "null"]}, {"type": "object"}, {"type": ["object", "null"]}
    ids = {"type": "array", "items": count}
    message = _object(role={"const": "assistant"}, content=maybe_text, refusal={"type": "null"})
    call = _object(id=text, type={"const": "function"}, function=_object(name=text, arguments=text))
    message["properties"] |= {"reasoning_content": text, "tool_calls": _list(call)}  # where there are some
    end: Schema = {
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "stop_reason": {"type": ["string", "integer", "null"]},
    }
    heading: Schema = {"id": text, "created": count, "model": text, "system_fingerprint": text}
    footing = {"usage": _ref("Usage"), "timings": _ref("Timings")}
    timing_counts = dict.fromkeys(("cache_n", "prompt_n", "predicted_n"), count)
    timing_numbers = ("prompt_ms", "predicted_ms", "queue_ms", "prompt_per_second", "predicted_per_second")
    maybe_count = {"type": ["integer", "null"], "minimum": 0}
    cache = _object(matched=count, cause={"enum": [*get_args(MissCause)]}, position=maybe_count, why=text)
    cache["properties"] |= dict.fromkeys(("token", "instead"), maybe_text)
    timings = _object(**timing_counts, **dict.fromkeys(timing_numbers, number))
    timings["properties"]["cache"] = cache
    seconds = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds"), number)
    chat_choice = _object(index=count, message=message, logprobs=maybe_object, **end)
    choice = _object(index=count, text=text, logprobs=maybe_object, **end)
    for one in (chat_choice, choice):  # where a schema was asked for without strict
        one["properties"]["schema_validation"] = _object(valid={"type": "boolean"}, errors=_list(text))
    return {
        "Error": _object(error=_object(message=text, type=text, param=maybe_text, code=maybe_text)),
        "ChatCompletion": _object(**heading, object={"const": "chat.completion"}, choices=_list(chat_choice), **footing),
        "Completion": _object(**heading, object={"const": "text_completion"}, choices=_list(choice), **footing),
        "Usage": _object(
            prompt_tokens=count,
            completion_tokens=count,
            total_tokens=count,
            prompt_tokens_details=_object(cached_tokens=count),
            completion_tokens_details=_object(reasoning_tokens=count),
        ),
        "Timings": timings,
        "Model": _object(id=text, object={"const": "model"}, created=count, owned_by=text),
        "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Health": _object(status=text),
        "Status": some_object,
        "Tokenized": _object(count=count, max_model_len=count, tokens=ids),
        "Detokenized": _object(prompt=text, content=text),
        "Cancelled": some_object,
        "Kept": _object(models=_list(some_object)),
        "Cleared": _object(cleared={"type": "object", "additionalProperties": count}),
        "Report": _object(id=text, model=text, created=count, prompt_tokens=count, cached_tokens=count, **seconds),
    }


def _object(**fields: Schema) -> Schema:
    """All of these are always there; more may be."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}
