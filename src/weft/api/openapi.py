"""The OpenAPI document of the server. Requests are described by the structs that read them, so the document can not drift
from what is accepted; replies are described by hand. Knows no route table: `app` serves it at /openapi.json.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from weft.api.anthropic import schema as anthropic
from weft.api.ollama import schema as ollama
from weft.api.openai import responses
from weft.api.openai.schema import (
    HARMLESS,
    NOT_YET,
    ChatRequest,
    ClearRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadRequest,
    TokenizeRequest,
    UnloadRequest,
)
from weft.ipc.messages import MissCause
from weft.serving.registry import FitVerdict

Schema = dict[str, Any]

ERRORS = {
    "400": "A field or the whole request can not be honoured; the error's param names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or Origin header is not one of this server's.",
    "404": "No such model, request or path.",
    "408": "The body did not arrive in time.",
    "409": "The model can not be loaded beside what is there now.",
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
        "info": {"title": "weft", "version": version, "description": "OpenAI's, Anthropic's and Ollama's wires on one batch."},
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
        "/v1/responses": _post("An answer to items.", "Response", "ResponseRequest", streams=True),
        "/v1/responses/input_tokens": _post("How many tokens its prompt has.", "TokenCount", "ResponseRequest"),
        "/v1/responses/{id}": {
            **_get("A response that was kept.", "Response", path_id=True),
            "delete": _get("Forget it.", "Deleted", path_id=True)["get"],
        },
        "/v1/responses/{id}/input_items": _listing(_get("What it answers.", "InputItems", path_id=True)),
        "/v1/responses/{id}/cancel": _post("End a response that is being made.", "Cancelled", None, path_id=True),
        "/v1/messages": _anthropic(_post("Anthropic's wire.", "Message", "MessagesRequest", streams=True)),
        "/v1/messages/count_tokens": _anthropic(_post("How many tokens a prompt has.", "TokenCount", "CountRequest")),
        "/api/chat": _ollama(_post("Ollama's wire: the next message.", "OllamaChat", "OllamaChatRequest", streams=True)),
        "/api/generate": _ollama(_post("Ollama's wire: an answer.", "OllamaText", "OllamaGenerateRequest", streams=True)),
        "/api/version": _ollama(_get("The version of Ollama's wire.", "OllamaVersion")),
        "/api/tags": _ollama(_get("The models served.", "OllamaModels")),
        "/api/ps": _ollama(_get("The models that are loaded.", "OllamaModels")),
        "/api/show": _ollama(_post("One model.", "OllamaModel", "ShowRequest")),
        "/v1/models": _get("The models served.", "ModelList"),
        "/v1/models/available": _get("The models on this machine, and whether they would fit.", "AvailableModels"),
        "/v1/models/load": _begun(_post("Bring a model up.", "Model", "LoadRequest")),
        "/v1/models/unload": _post("Take a model out; done when its memory is free.", "UnloadedModel", "UnloadRequest"),
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


def _begun(item: Schema) -> Schema:
    """The same for what may be answered before it is done."""
    item["post"]["responses"]["202"] = {"description": "Begun.", "content": item["post"]["responses"]["200"]["content"]}
    return item


def _ollama(item: Schema) -> Schema:
    """The same with Ollama's errors and streams."""
    content = item[next(iter(item))]["responses"]["200"]["content"]
    if "text/event-stream" in content:
        content["application/x-ndjson"] = content.pop("text/event-stream")
    return _told("OllamaError", item)


def _anthropic(item: Schema) -> Schema:
    """The same with Anthropic's errors, one of which has a status of its own."""
    _told("MessagesError", item)["post"]["responses"]["529"] = {"description": ERRORS["429"], "content": _json("MessagesError")}
    return item


def _told(error: str, item: Schema) -> Schema:
    """The same with errors of this shape."""
    (operation,) = item.values()
    operation["responses"] |= {status: {"description": words, "content": _json(error)} for status, words in ERRORS.items()}
    return item


def _listing(item: Schema) -> Schema:
    """The same with what a list may be asked for."""
    asked: Schema = {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100}}
    asked["order"] = {"enum": ["asc", "desc"]}
    item["get"]["parameters"] += [{"name": name, "in": "query", "schema": schema} for name, schema in asked.items()]
    return item


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
    kinds = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ClearRequest, LoadRequest, UnloadRequest]
    kinds += [ollama.OllamaChatRequest, ollama.OllamaGenerateRequest, ollama.ShowRequest]
    kinds += [anthropic.MessagesRequest, anthropic.CountRequest, responses.ResponseRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name in ("ChatRequest", "CompletionRequest"):  # Chat does what Completions refuses
        schemas[name]["properties"] = _inert(NOT_YET, HARMLESS) | schemas[name]["properties"]
    inert = _inert(responses.NOT_HERE, HARMLESS | responses.HARMLESS)
    schemas["ResponseRequest"]["properties"] = inert | schemas["ResponseRequest"]["properties"]
    schemas["ResponseRequest"]["anyOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("input", "previous_response_id")
    ]
    for name in ("OllamaChatRequest", "OllamaGenerateRequest"):
        schemas[name]["properties"] |= _inert(ollama.NOT_DONE, ollama.HARMLESS)
    for name in ("MessagesRequest", "CountRequest"):
        schemas[name]["properties"] |= _inert(anthropic.NOT_DONE, anthropic.HARMLESS)
    schemas["Options"]["properties"] |= _inert(ollama.OPTIONS_NOT_DONE, frozenset())
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    lists = [{"type": "array", "items": items, "minItems": 1} for items in ({"type": "string"}, ids)]
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [{"type": "string"}, ids, *lists]}
    schemas["TokenizeRequest"]["anyOf"] = [{"required": [name]} for name in ("prompt", "content", "messages")]
    return schemas


def _inert(refused: dict[str, tuple[Any, ...]], harmless: frozenset[str]) -> Schema:
    """Fields that never act: refused ones with the values they may have, and harmless ones."""
    values: Schema = {name: {"enum": [*values, None], "description": "Not done here."} for name, values in refused.items()}
    return values | {name: {"description": "Accepted; does not change the answer."} for name in sorted(harmless)}


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
    verdict, flag = {"enum": [*get_args(FitVerdict)]}, {"type": "boolean"}
    fit: Schema = {"needed_bytes": maybe_count, "verdict": verdict}
    available = _object(id=text, kind=text, size_bytes=count, is_here=flag, is_loaded=flag, **fit)
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
        "AvailableModels": _object(object={"const": "list"}, data=_list(available), free_bytes=maybe_count),
        "UnloadedModel": _object(id=text, object={"const": "model"}, status=some_object),
        "Health": _object(status=text),
        "Status": some_object,
        "Tokenized": _object(count=count, max_model_len=count, tokens=ids),
        "Detokenized": _object(prompt=text, content=text),
        "Cancelled": some_object,
        "Kept": _object(models=_list(some_object)),
        "Cleared": _object(cleared={"type": "object", "additionalProperties": count}),
        **_ollama_schemas(text, count),
        **_anthropic_schemas(text, count),
        **_response_schemas(text, count),
        "Report": _object(id=text, model=text, created=count, prompt_tokens=count, cached_tokens=count, **seconds),
    }


def _ollama_schemas(text: Schema, count: Schema) -> Schema:
    done: Schema = {"model": text, "created_at": text, "done": {"const": True}, "done_reason": text}
    listed = _object(name=text, model=text, modified_at=text, size=count, digest=text, details={"type": "object"})
    words = {"type": "array", "items": text}
    return {
        "OllamaError": _object(error=text),
        "OllamaChat": _object(message=_object(role={"const": "assistant"}, content=text), **done),
        "OllamaText": _object(response=text, **done),
        "OllamaVersion": _object(version=text),
        "OllamaModels": _object(models=_list(listed)),
        "OllamaModel": _object(template=text, capabilities=words, model_info={"type": "object"}, details={"type": "object"}),
    }


def _anthropic_schemas(text: Schema, count: Schema) -> Schema:
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    details = _object(thinking_tokens=count)
    blocks: list[Schema] = [
        _object(type={"const": "text"}, text=text),
        _object(type={"const": "thinking"}, thinking=text, signature=text),
        _object(type={"const": "tool_use"}, id=text, name=text, input={"type": "object"}),
    ]
    reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    return {
        "Message": _object(
            id=text,
            type={"const": "message"},
            role={"const": "assistant"},
            model=text,
            content=_list({"anyOf": blocks}),
            stop_reason={"enum": reasons},
            stop_sequence={"type": ["string", "null"]},
            usage=_object(**dict.fromkeys(counts, count), output_tokens_details=details),
        ),
        "MessagesError": _object(type={"const": "error"}, error=_object(type=text, message=text), request_id=text),
        "TokenCount": _object(input_tokens=count),
    }


def _response_schemas(text: Schema, count: Schema) -> Schema:
    items, some_object = _list({"type": "object", "required": ["id", "type"]}), {"type": "object"}
    usage = _object(
        input_tokens=count,
        input_tokens_details=_object(cached_tokens=count, cache_write_tokens=count),
        output_tokens=count,
        output_tokens_details=_object(reasoning_tokens=count),
        total_tokens=count,
    )
    maybe: Schema = {"type": ["object", "null"]}
    response = _object(
        id=text,
        object={"const": "response"},
        created_at=count,
        status={"enum": ["completed", "incomplete"]},
        error=maybe,
        incomplete_details=maybe,
        model=text,
        output=items,
        usage=usage,
        timings=_ref("Timings"),
        tools=_list(some_object),
        tool_choice={"type": ["string", "object"]},
        parallel_tool_calls={"type": "boolean"},
        store={"type": "boolean"},
    )
    return {
        "Response": response,
        "InputItems": _object(object={"const": "list"}, data=items, has_more={"type": "boolean"}),
        "Deleted": _object(id=text, deleted={"const": True}),
    }


def _object(**fields: Schema) -> Schema:
    """All of these are always there; more may be."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}
