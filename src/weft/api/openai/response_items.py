"""The input items of a Responses request → messages, as every other wire has them.

An answer comes as several items (its thinking, its text, its calls) and becomes one message. An item of a kind that can not
be shown to a model is refused by its place. Knows no tools beyond their names, and no HTTP; `responses` uses it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec

from weft.api.openai.chat import message_of
from weft.api.openai.response_tools import flat_name
from weft.api.openai.schema import ChatMessage, Part, converted
from weft.errors import InvalidRequest
from weft.text.tools import wrap_custom_input
from weft.text.types import Message, ToolCall

Item = dict[str, Any]

SEAL = "weft:"  # thinking that we sealed ourselves begins so


class MessageItem(msgspec.Struct, kw_only=True):
    """What somebody said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """What was thought: in clear, sealed by us, or else its summary."""

    content: list[Part] | None = None
    encrypted_content: str | None = None
    summary: list[Part] | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A function that was called."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(msgspec.Struct, kw_only=True):
    """A tool that was called with a text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class ResultItem(msgspec.Struct, kw_only=True):
    """What came of a call."""

    call_id: str
    output: str | list[Part]


def messages_of(items: Sequence[tuple[str, Item]]) -> tuple[Message, ...]:
    """The messages that these items, each with its place, are. Raises InvalidRequest with the place of the first misfit."""
    messages: list[Message] = []
    for place, item in items:
        for message in _read(item, place):
            if messages and _is_one_answer(messages[-1], message):
                messages[-1] = _joined(messages[-1], message)
            else:
                messages.append(message)
    return tuple(message for message in messages if message.content is not None or message.tool_calls)


def items_of(given: str | Sequence[Item], referred: Mapping[str, Item]) -> list[Item]:
    """The items of an input; a text is one message. Those that are only referred to are taken from `referred`."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [_found(item, f"input[{index}]", referred) for index, item in enumerate(given)]


def unheard(items: Sequence[Item]) -> set[str]:
    """The kinds of items that nobody here knows: they are left out, for clients send more kinds every month."""
    return {f"input.{item['type']}" for item in items if "type" in item and item["type"] not in READERS}


def references(given: Any) -> set[str]:
    """The ids of items that an input only refers to."""
    items = given if isinstance(given, list) else []
    return {item["id"] for item in items if isinstance(item, dict) and _is_reference(item) and isinstance(item.get("id"), str)}


def filed(item: Item, item_id: str) -> Item:
    """An item as it is kept and listed: with a type, a status, an id, and its text as a part."""
    given = {name: value for name, value in item.items() if value is not None}
    if isinstance(text := given.get("content"), str):
        kind = "output_text" if given.get("role") == "assistant" else "input_text"
        given["content"] = [{"type": kind, "text": text}]
    return {"type": "message", "status": "completed", "id": item_id} | given


def sealed(thinking: str) -> str:
    """Thinking as a client carries it that gives no clear text back. Nothing is hidden: it has the clear text too."""
    return SEAL + base64.b64encode(thinking.encode()).decode()


def _read(item: Item, place: str) -> list[Message]:
    kind = item.get("type", "message")
    if kind == "compaction":
        message = f"{place}.type compaction: only the server that wrote it can read it; send the conversation itself"
        raise InvalidRequest(message, f"{place}.type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")
    reader = READERS.get(kind)
    return [] if reader is None else [replace(message, place=place) for message in reader(item, place)]


def _said(item: Item, place: str) -> list[Message]:
    said = converted(item, MessageItem, place)
    return [message_of(ChatMessage(role=said.role, content=_parts(said.content)), place)]


def _thought(item: Item, place: str) -> list[Message]:
    thought = converted(item, ReasoningItem, place)
    text = _text(thought.content) or _unsealed(thought.encrypted_content) or _text(thought.summary)
    return [Message("assistant", None, reasoning=text)] if text else []


def _called(item: Item, place: str) -> list[Message]:
    call = converted(item, CallItem, place)
    return _call(flat_name(call.name, call.namespace), call.arguments, call.call_id)


def _custom_called(item: Item, place: str) -> list[Message]:
    call = converted(item, CustomCallItem, place)
    return _call(flat_name(call.name, call.namespace), wrap_custom_input(call.input), call.call_id)


def _result(item: Item, place: str) -> list[Message]:
    result = converted(item, ResultItem, place)
    content = _parts(result.output)
    return [message_of(ChatMessage(role="tool", content=content, tool_call_id=result.call_id), place)]


def _own_call(item: Item, place: str, name: str, field: str) -> list[Message]:
    """A call of one of OpenAI's own tools."""
    called = item.get("name")
    return _call(called if isinstance(called, str) else name, _arguments(item, field, place), _call_id(item, place))


def _own_result(item: Item, place: str, field: str) -> list[Message]:
    """What came of one. Where it says no more than that, its status is told."""
    said = next((item[name] for name in (field, "error", "status") if item.get(name) is not None), "completed")
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return [Message("tool", text, tool_call_id=_call_id(item, place))]


def _both(item: Item, place: str, name: str, field: str, result: str) -> list[Message]:
    """A call and what came of it in one item."""
    return [*_own_call(item, place, name, field), *_own_result(item, place, result)]


READERS: dict[str, Callable[[Item, str], list[Message]]] = {
    "message": _said,
    "reasoning": _thought,
    "function_call": _called,
    "function_call_output": _result,
    "custom_tool_call": _custom_called,
    "custom_tool_call_output": _result,
    "local_shell_call": partial(_own_call, name="local_shell", field="action"),
    "local_shell_call_output": partial(_own_result, field="output"),
    "shell_call": partial(_own_call, name="shell", field="action"),
    "shell_call_output": partial(_own_result, field="output"),
    "apply_patch_call": partial(_own_call, name="apply_patch", field="operation"),
    "apply_patch_call_output": partial(_own_result, field="output"),
    "tool_search_call": partial(_own_call, name="tool_search", field="arguments"),
    "tool_search_output": partial(_own_result, field="tools"),
    "web_search_call": partial(_both, name="web_search", field="action", result="results"),
    "file_search_call": partial(_both, name="file_search", field="queries", result="results"),
    "code_interpreter_call": partial(_both, name="code_interpreter", field="code", result="outputs"),
    "mcp_call": partial(_both, name="mcp", field="arguments", result="output"),
}


def _call(name: str, arguments: str, call_id: str) -> list[Message]:
    return [Message("assistant", None, tool_calls=(ToolCall(name, arguments, call_id),))]


def _arguments(item: Item, field: str, place: str) -> str:
    match item.get(field):
        case None:
            raise InvalidRequest(f"{place}.{field} is required", f"{place}.{field}")
        case dict() as arguments:
            return msgspec.json.encode(arguments).decode()
        case str(text) if field == "arguments":
            return text
        case value:
            return msgspec.json.encode({field: value}).decode()


def _call_id(item: Item, place: str) -> str:
    given = item.get("call_id") or item.get("id") or f"call_{place}"
    if not isinstance(given, str):
        raise InvalidRequest(f"{place}.call_id must be a string", f"{place}.call_id")
    return given


def _is_one_answer(last: Message, message: Message) -> bool:
    """Whether it goes on with the answer before it: thinking first, then a text, then calls."""
    if last.role != "assistant" or message.role != "assistant":
        return False
    return bool(message.tool_calls) or (last.content is None and not last.tool_calls)


def _joined(last: Message, message: Message) -> Message:
    thoughts = [text for text in (last.reasoning, message.reasoning) if text]
    return replace(
        last,
        content=last.content if message.content is None else message.content,
        reasoning="\n\n".join(thoughts) or None,
        tool_calls=last.tool_calls + message.tool_calls,
        breakpoints=message.breakpoints or last.breakpoints,
    )


def _found(item: Item, place: str, referred: Mapping[str, Item]) -> Item:
    if not _is_reference(item):
        return item
    if (known := referred.get(str(item.get("id")))) is None:
        raise InvalidRequest(f"{place}: no item {item.get('id')!r} is kept here; send the item itself", f"{place}.id")
    return known


def _is_reference(item: Item) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _parts(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content in which an image is told as Chat Completions tells it."""
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
    return part


def _text(parts: list[dict[str, Any]] | None) -> str:
    texts = (part.get("text") for part in parts or ())
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


def _unsealed(text: str | None) -> str:
    """Thinking that we sealed; nothing of what others did."""
    if text is None or not text.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(text.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
