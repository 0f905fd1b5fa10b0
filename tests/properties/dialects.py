"""One constrained request in the words of five dialects, and their replies read as clients read them."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, OLLAMA = "/v1/responses", "/api/chat"
# How a reply says that `max_tokens` cut it.
CUT = frozenset({"length", "max_tokens", "incomplete"})
WHOLE = frozenset({"stop", "end_turn", "stop_sequence", "completed"})
Json = dict[str, Any]


class StreamFailed(Exception):
    """A stream that began with 200 and ended with an error, or without an end."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer as a client has it."""

    text: str
    calls: tuple[tuple[str, str], ...]  # names and arguments
    finish: str
    stop: object = None  # the stop string that ended it
    num_tokens: int | None = None
    num_reasoning_tokens: int | None = None
    is_told_valid: bool | None = None  # what the server says of an answer to a schema that is not strict


def dress(path: str, body: Json) -> Json:
    """Say a Chat Completions request in the dialect of `path`. What that dialect has no word for is left out."""
    return {MESSAGES: _as_messages, RESPONSES: _as_response, OLLAMA: _as_ollama}.get(path, dict)(body)


def _schema_of(body: Json) -> Any:
    return body["response_format"]["json_schema"]["schema"] if "response_format" in body else None


def _as_messages(body: Json) -> Json:
    names = ("max_tokens", "messages", "temperature", "top_p", "top_k", "seed", "stream", "speculate", "thinking_token_budget")
    found = {name: body[name] for name in names if name in body}
    found["temperature"] = min(1.0, found["temperature"])
    if "chat_template_kwargs" in body:
        found["thinking"] = {"type": "disabled"}
    if (schema := _schema_of(body)) is not None:
        found["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if "tools" in body:
        function = body["tools"][0]["function"]
        found["tools"] = [{"name": function["name"], "input_schema": function["parameters"], "strict": True}]
        choice = {"type": "any"} if body["tool_choice"] == "required" else {"type": "tool", "name": function["name"]}
        found["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    return found


def _as_response(body: Json) -> Json:
    names = (
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stream",
        "speculate",
        "ignore_eos",
        "thinking_token_budget",
        "chat_template_kwargs",
    )
    found = {name: body[name] for name in names if name in body}
    found |= {"input": body["messages"][0]["content"], "max_output_tokens": body["max_tokens"], "store": False}
    if (schema := _schema_of(body)) is not None:
        found["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    if "tools" in body:
        function = body["tools"][0]["function"]
        choice = body["tool_choice"] if isinstance(body["tool_choice"], str) else {"type": "function", "name": function["name"]}
        found |= {"tools": [{"type": "function", **function}], "tool_choice": choice, "parallel_tool_calls": False}
    return found


def _as_ollama(body: Json) -> Json:
    names = ("temperature", "top_p", "top_k", "seed", "speculate", "thinking_token_budget")
    options = {name: body[name] for name in names if name in body} | {"num_predict": body["max_tokens"]}
    found = {
        "messages": body["messages"],
        "stream": body["stream"],
        "options": options,
        "format": _schema_of(body),
    }
    return found | ({"think": False} if "chat_template_kwargs" in body else {})


def read(path: str, text: str, *, is_streamed: bool) -> list[Answer]:
    """Return the answers of a reply's body. Raises StreamFailed, and KeyError or ValueError where the body is malformed."""
    if path == OLLAMA:
        return [_read_ollama([json.loads(line) for line in text.split("\n") if line])]
    if not is_streamed:
        return {MESSAGES: _read_message, RESPONSES: _read_response}.get(path, _read_choices)(json.loads(text))
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    for event in events:
        if event.get("error") or event.get("type") == "response.failed":
            raise StreamFailed(json.dumps(event)[:400])
    return {MESSAGES: _read_message_events, RESPONSES: _read_response_events}.get(path, _read_chunks)(events)


def _read_choices(reply: Json) -> list[Answer]:
    return [
        _choice(choice.get("message") or choice, choice, reply["usage"], len(reply["choices"])) for choice in reply["choices"]
    ]


def _choice(message: Json, choice: Json, usage: Json, num_answers: int) -> Answer:
    calls = tuple(map(_call, message.get("tool_calls") or ()))
    text = message.get("content") if "content" in message else message.get("text")
    num_reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    num_tokens = usage["completion_tokens"] if num_answers == 1 else None
    told = (choice.get("schema_validation") or {}).get("valid")
    return Answer(text or "", calls, choice["finish_reason"], choice.get("stop_reason"), num_tokens, num_reasoning, told)


def _call(call: Json) -> tuple[str, str]:
    """A call's name, and its arguments or the text that a custom tool takes."""
    own = call.get("function") or call["custom"]
    return own.get("name") or "", own.get("arguments") or own.get("input") or ""


def _read_chunks(events: list[Json]) -> list[Answer]:
    """Put the pieces of a stream together as a client does."""
    texts: dict[int, list[str]] = collections.defaultdict(list)
    calls: dict[int, dict[int, Json]] = collections.defaultdict(dict)
    ends: dict[int, Json] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice.get("delta") or choice
        texts[choice["index"]].append(delta.get("content") or delta.get("text") or "")
        for call in delta.get("tool_calls") or ():
            known = calls[choice["index"]].setdefault(call["index"], {"name": "", "arguments": ""})
            name, arguments = _call(call)
            known["name"], known["arguments"] = known["name"] + name, known["arguments"] + arguments
        if choice.get("finish_reason"):
            ends[choice["index"]] = choice
    if ends.keys() != texts.keys():
        raise StreamFailed("the stream has no end")
    messages = {
        index: {"content": "".join(texts[index]), "tool_calls": [{"function": call} for call in calls[index].values()]}
        for index in ends
    }
    return [_choice(messages[index], end, events[-1]["usage"], len(ends)) for index, end in sorted(ends.items())]


def _read_message(reply: Json) -> list[Answer]:
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    calls = tuple((block["name"], json.dumps(block["input"])) for block in reply["content"] if block["type"] == "tool_use")
    return [Answer(text, calls, reply["stop_reason"])]


def _read_message_events(events: list[Json]) -> list[Answer]:
    texts, calls, finish = [], [], None
    for event in events:
        delta = event.get("delta") or {}
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        texts.append(delta.get("text") or "")
        if delta.get("type") == "input_json_delta":
            calls[-1][1] += delta["partial_json"]
        finish = delta.get("stop_reason") or finish
    if finish is None or events[-1]["type"] != "message_stop":
        raise StreamFailed("the stream has no end")
    return [Answer("".join(texts), tuple((name, arguments) for name, arguments in calls), finish)]


def _read_response(reply: Json) -> list[Answer]:
    parts = [part for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    calls = tuple((item["name"], item["arguments"]) for item in reply["output"] if item["type"] == "function_call")
    num_reasoning = reply["usage"]["output_tokens_details"]["reasoning_tokens"]
    return [Answer("".join(part["text"] for part in parts), calls, reply["status"], None, None, num_reasoning)]


def _read_response_events(events: list[Json]) -> list[Answer]:
    """The pieces, which must be what the whole response at the end says."""
    (whole,) = _read_response(events[-1]["response"])
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if text != whole.text:
        raise StreamFailed(f"the pieces are {text!r}, the response is {whole.text!r}")
    return [whole]


def _read_ollama(lines: list[Json]) -> Answer:
    if any("error" in line for line in lines):
        raise StreamFailed(json.dumps(lines[-1])[:400])
    text = "".join(line["message"]["content"] for line in lines)
    told = (lines[-1].get("schema_validation") or {}).get("valid")
    return Answer(text, (), lines[-1]["done_reason"], is_told_valid=told)
