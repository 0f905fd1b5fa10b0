"""The OpenAPI document: request schemas come from the msgspec structs, everything else from openapi_replies.json."""

import re
from importlib.resources import files
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.api import admin, ollama
from weft.api.anthropic import request as anthropic
from weft.api.fields import BUDGET, BUDGET_NAMES, FieldRules
from weft.api.http import json_response
from weft.api.openai import chat, completions, responses
from weft.api.openai import request as openai
from weft.ipc.limits import MAX_TOKEN_IDS
from weft.ipc.messages import MissCause
from weft.serving.fit import FitVerdict

Schema = dict[str, Any]


async def serve_document(_: Request) -> Response:
    """Serve the OpenAPI document at /openapi.json."""
    return json_response(document(__version__))


def document(version: str) -> Schema:
    """Build the whole OpenAPI document as a dict, with this version of weft in its info."""
    written: Schema = msgspec.json.decode((files("weft.api") / "openapi_replies.json").read_bytes())
    replies = written["schemas"]
    replies["Timings"]["properties"]["cache"]["properties"]["cause"] = {"enum": [*get_args(MissCause)]}
    replies["AvailableModels"]["properties"]["data"]["items"]["properties"]["verdict"] = {"enum": [*get_args(FitVerdict)]}
    whole: Schema = written["document"]  # its security begins with {}: on a loopback address no key is needed
    whole["info"]["version"] = version
    whole["paths"] = _paths(written["operations"], written["errors"])
    whole["components"]["schemas"] = _request_schemas(written["requests"]) | replies
    return whole


def _paths(operations: list[Schema], errors: dict[str, str]) -> Schema:
    paths: Schema = {}
    for one in operations:
        path = one["path"]
        error = "MessagesError" if path.startswith("/v1/messages") else "OllamaError" if path.startswith("/api/") else "Error"
        content = _json(one["reply"]) if "reply" in one else {"text/plain": {"schema": {"type": "string"}}}
        if "streams" in one:
            content["application/x-ndjson" if error == "OllamaError" else "text/event-stream"] = {"schema": {}}
        answers = {"200": {"description": "Done.", "content": content}}
        answers |= {status: {"description": words, "content": _json(error)} for status, words in errors.items()}
        if error == "MessagesError":
            answers["529"] = answers["429"]
        operation: Schema = {"operationId": _operation_id(one), "summary": one["summary"], "responses": answers}
        if "request" in one:  # the body of /v1/cache/clear may be left out
            operation["requestBody"] = {"required": path != "/v1/cache/clear", "content": _json(one["request"])}
        if "{id}" in path:
            path_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            operation["parameters"] = [path_id, *one.get("query", ())]
        paths.setdefault(path, {})[one["method"]] = operation
    for path in ("/health", "/healthz", "/ping"):
        paths[path]["get"]["responses"]["503"]["content"] = _json("Health")
    paths["/v1/models/load"]["post"]["responses"]["202"] = {"description": "Begun.", "content": _json("Model")}
    return paths


def _operation_id(operation: Schema) -> str:
    """Return an operation's name for generators of clients, such as post_v1_chat_completions."""
    words = re.findall("[a-z0-9]+", f"{operation['method']} {operation['path']}")
    return "_".join(words)


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _request_schemas(additions: Schema) -> Schema:
    kinds = [chat.ChatRequest, completions.CompletionRequest, responses.ResponseRequest]
    kinds += [anthropic.MessagesRequest, anthropic.CountRequest]
    kinds += [ollama.OllamaChatRequest, ollama.OllamaGenerateRequest, ollama.ShowRequest]
    kinds += [admin.TokenizeRequest, admin.DetokenizeRequest, admin.ClearRequest, admin.LoadRequest, admin.UnloadRequest]
    kinds += [admin.RenewRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    rules = {"ChatRequest": openai.RULES, "CompletionRequest": completions.RULES, "ResponseRequest": responses.RULES}
    rules |= dict.fromkeys(("MessagesRequest", "CountRequest"), anthropic.RULES)
    rules |= dict.fromkeys(("OllamaChatRequest", "OllamaGenerateRequest"), ollama.RULES)
    for name, inert in rules.items():  # a field that acts in one dialect may be refused in another
        fields = schemas[name]["properties"]
        aliases = dict.fromkeys(BUDGET_NAMES, fields[BUDGET]) if BUDGET in fields else {}
        schemas[name]["properties"] = _inert_fields(inert) | aliases | fields
    options = {path.removeprefix("options."): fate for path, fate in ollama.RULES.fates.items() if path.startswith("options.")}
    schemas["Options"]["properties"] |= _inert_fields(FieldRules(options))
    for name, addition in additions.items():  # what a struct can not say
        schemas[name] |= addition
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_TOKEN_IDS}
    lists = [
        {"type": "array", "items": items, "minItems": 1, "maxItems": openai.MAX_CHOICES} for items in ({"type": "string"}, ids)
    ]
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [{"type": "string"}, ids, *lists]}
    return schemas


def _inert_fields(rules: FieldRules) -> Schema:
    """Return schemas of fields without effect: refused fields with the values still accepted, and harmless fields."""
    harmless = {name: {"description": "Accepted; does not change the answer."} for name in sorted(rules.harmless)}
    return {name: _idle(values) for name, values in rules.refused.items()} | harmless


def _idle(values: tuple[Any, ...]) -> Schema:
    """Return the schema of a refused field, which allows its idle values, in words that generators of clients can read."""
    return {"anyOf": [*map(_only, values), {"type": "null"}], "description": "Not done here."}


def _only(value: Any) -> Schema:
    """Return a schema that allows one value. Generators take no lists or objects as constants."""
    match value:
        case []:
            return {"type": "array", "items": {}, "maxItems": 0}
        case [only]:
            return {"type": "array", "items": _only(only), "minItems": 1, "maxItems": 1}
        case {}:
            return {"type": "object", "maxProperties": 0}
    return {"const": value}
