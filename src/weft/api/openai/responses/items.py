"""The input items of a Responses request, read as the messages that every other dialect has.

An answer comes as several items (its reasoning, its text, its calls) and becomes one message. An item that can not be shown to
a model is refused by its place. Knows no tools beyond their names, and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec

from weft.api.dialect import convert, unseal
from weft.api.openai.chat import ChatMessage, Part, read_message
from weft.api.openai.responses.output_tools import flat_name
from weft.errors import InvalidRequest
from weft.text.tools import wrap_custom_input
from weft.text.types import Message, ToolCall

Item = dict[str, Any]


class MessageItem(msgspec.Struct, kw_only=True):
    """A message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """The reasoning of an earlier answer: in clear, sealed by us, or else its summary."""

    content: list[Part] | None = None
    encrypted_content: str | None = None
    summary: list[Part] | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A call of a function."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(msgspec.Struct, kw_only=True):
    """A call of a tool that takes a text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class ResultItem(msgspec.Struct, kw_only=True):
    """The result of a call."""

    call_id: str
    output: str | list[Part]


def read_items(items: Sequence[tuple[str, Item]]) -> tuple[Message, ...]:
    """The messages that these items, each with its place, stand for. Raises InvalidRequest with the place of a misfit."""
    messages: list[Message] = []
    for place, item in items:
        for message in _read(item, place):
            if messages and _is_one_answer(messages[-1], message):
                messages[-1] = _join(messages[-1], message)
            else:
                messages.append(message)
    return tuple(message for message in messages if message.content is not None or message.tool_calls)


def resolve_items(given: str | Sequence[Item], referred: Mapping[str, Item]) -> list[Item]:
    """The items of an input: a text is one message, and references are replaced by the items of `referred`."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    for index, item in enumerate(given):
        if _is_reference(item) and str(item.get("id")) not in referred:
            message = f"input[{index}]: no item {item.get('id')!r} is kept here; send the item itself"
            raise InvalidRequest(message, f"input[{index}].id")
    return [referred[str(item.get("id"))] if _is_reference(item) else item for item in given]


def unknown_kinds(items: Sequence[Item]) -> set[str]:
    """The kinds of items that are not known here; these are left out, because clients send more kinds every month."""
    return {f"input.{item['type']}" for item in items if "type" in item and item["type"] not in READERS}


def find_references(given: Any) -> set[str]:
    """The ids of the items that an input only refers to."""
    items = given if isinstance(given, list) else []
    return {item["id"] for item in items if isinstance(item, dict) and _is_reference(item) and isinstance(item.get("id"), str)}


def complete_item(item: Item, item_id: str) -> Item:
    """An item as it is stored and listed: with a type, a status, an id, and its text as a part."""
    given = {name: value for name, value in item.items() if value is not None}
    if isinstance(text := given.get("content"), str):
        kind = "output_text" if given.get("role") == "assistant" else "input_text"
        given["content"] = [{"type": kind, "text": text}]
    return {"type": "message", "status": "completed", "id": item_id} | given


def _read(item: Item, place: str) -> list[Message]:
    kind = item.get("type", "message")
    if kind == "compaction":
        message = f"{place}.type compaction: only the server that wrote it can read it; send the conversation itself"
        raise InvalidRequest(message, f"{place}.type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")
    reader = READERS.get(kind)
    return [] if reader is None else [replace(message, place=place) for message in reader(item, place)]


def _read_message(item: Item, place: str) -> list[Message]:
    given = convert(item, MessageItem, place)
    return [read_message(ChatMessage(role=given.role, content=_content(given.content)), place)]


def _read_reasoning(item: Item, place: str) -> list[Message]:
    given = convert(item, ReasoningItem, place)
    text = _text(given.content) or unseal(given.encrypted_content or "") or _text(given.summary)
    return [Message("assistant", None, reasoning=text)] if text else []


def _read_call(item: Item, place: str) -> list[Message]:
    call = convert(item, CallItem, place)
    return _call(flat_name(call.name, call.namespace), call.arguments, call.call_id)


def _read_custom_call(item: Item, place: str) -> list[Message]:
    call = convert(item, CustomCallItem, place)
    return _call(flat_name(call.name, call.namespace), wrap_custom_input(call.input), call.call_id)


def _read_result(item: Item, place: str) -> list[Message]:
    result = convert(item, ResultItem, place)
    return [read_message(ChatMessage(role="tool", content=_content(result.output), tool_call_id=result.call_id), place)]


def _read_own_call(item: Item, place: str, name: str, field: str) -> list[Message]:
    """A call of one of OpenAI's own tools, whose arguments are in this field."""
    called = item.get("name")
    return _call(called if isinstance(called, str) else name, _arguments(item, field, place), _call_id(item, place))


def _read_own_result(item: Item, place: str, field: str) -> list[Message]:
    """The result of one of OpenAI's own tools: this field, or where that is missing the error or the status."""
    given = next((item[name] for name in (field, "error", "status") if item.get(name) is not None), "completed")
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    return [Message("tool", text, tool_call_id=_call_id(item, place))]


def _read_both(item: Item, place: str, name: str, field: str, result: str) -> list[Message]:
    """A call of one of OpenAI's own tools and its result, in one item."""
    return [*_read_own_call(item, place, name, field), *_read_own_result(item, place, result)]


READERS: dict[str, Callable[[Item, str], list[Message]]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_result,
    "local_shell_call": partial(_read_own_call, name="local_shell", field="action"),
    "local_shell_call_output": partial(_read_own_result, field="output"),
    "shell_call": partial(_read_own_call, name="shell", field="action"),
    "shell_call_output": partial(_read_own_result, field="output"),
    "apply_patch_call": partial(_read_own_call, name="apply_patch", field="operation"),
    "apply_patch_call_output": partial(_read_own_result, field="output"),
    "tool_search_call": partial(_read_own_call, name="tool_search", field="arguments"),
    "tool_search_output": partial(_read_own_result, field="tools"),
    "web_search_call": partial(_read_both, name="web_search", field="action", result="results"),
    "file_search_call": partial(_read_both, name="file_search", field="queries", result="results"),
    "code_interpreter_call": partial(_read_both, name="code_interpreter", field="code", result="outputs"),
    "mcp_call": partial(_read_both, name="mcp", field="arguments", result="output"),
}


def _call(name: str, arguments: str, call_id: str) -> list[Message]:
    return [Message("assistant", None, tool_calls=(ToolCall(name, arguments, call_id),))]


def _arguments(item: Item, field: str, place: str) -> str:
    match item.get(field):
        case None:
            raise InvalidRequest(f"{place}.{field} is required", f"{place}.{field}")
        case str(text) if field == "arguments":
            return text
        case value:
            return msgspec.json.encode(value if isinstance(value, dict) else {field: value}).decode()


def _call_id(item: Item, place: str) -> str:
    given = item.get("call_id") or item.get("id") or f"call_{place}"
    if not isinstance(given, str):
        raise InvalidRequest(f"{place}.call_id must be a string", f"{place}.call_id")
    return given


def _is_one_answer(last: Message, message: Message) -> bool:
    """Whether a message continues the answer before it: reasoning comes first, then a text, then calls."""
    if last.role != "assistant" or message.role != "assistant":
        return False
    return bool(message.tool_calls) or (last.content is None and not last.tool_calls)


def _join(last: Message, message: Message) -> Message:
    return replace(
        last,
        content=last.content if message.content is None else message.content,
        reasoning="\n\n".join(filter(None, (last.reasoning, message.reasoning))) or None,
        tool_calls=last.tool_calls + message.tool_calls,
        breakpoints=message.breakpoints or last.breakpoints,
    )


def _is_reference(item: Item) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _content(content: str | list[Item]) -> str | list[Item]:
    """Content whose images are written as Chat Completions writes them."""
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Item) -> Item:
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
    return part


def _text(parts: list[Item] | None) -> str:
    texts = (part.get("text") for part in parts or ())
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)
