"""Describes tools in the system message, for models whose chat template has no place for them.

Tools, earlier calls and results become texts of messages that every template takes. The model writes calls in the notation of
one row of the families' table, which is also what is read and what a grammar enforces where a call must come.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from weft.text.tools.families import FAMILIES, Family
from weft.text.types import Conversation, Message, ToolCall

NOTATION: Family = next(family for family in FAMILIES if family.name == "hermes")
NOTICE = "this model was not made for tools: its chat template has no place for them, so they are described in the system message"
EXAMPLE = NOTATION.call.replace("⟨name⟩", "NAME").replace("⟨arguments⟩", "ARGUMENTS")
INSTRUCTION = f"""\
You may call tools. Each line below is a tool: its name, what it does, and the JSON Schema of its arguments.

⟨tools⟩

If a tool is needed to answer, write the call and nothing after it, with the tool's name and its arguments as a JSON object:
{EXAMPLE}
The tool's result is in the next message. If no tool is needed, answer without one."""
INSTRUCTING = ("system", "developer")


def describe_tools(conversation: Conversation) -> Conversation:
    """Return the conversation without tools: described in a system message, calls and results written as texts."""
    messages = [replace(message, place=message.place or f"messages[{i}]") for i, message in enumerate(conversation.messages)]
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id is not None}
    written = [_written(message, names) for message in messages]
    if conversation.tools:
        place = sum(1 for _ in takewhile(lambda message: message.role in INSTRUCTING, written))
        written.insert(place, Message("system", _instruction(conversation.tools), place="tools"))
    return replace(conversation, messages=tuple(written), tools=())


def _instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = (json.dumps(dict(_shown(tool["function"])), ensure_ascii=False) for tool in tools)
    return INSTRUCTION.replace("⟨tools⟩", "\n".join(lines))


def _shown(function: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the model is to know of a function; `strict` is for the grammar."""
    yield "name", function["name"]
    if function.get("description"):
        yield "description", function["description"]
    yield "parameters", function.get("parameters") or {"type": "object", "properties": {}}


def _written(message: Message, names: Mapping[str, str]) -> Message:
    """Return a message whose calls, or whose result, are part of its text, in a turn that every template has."""
    if message.role == "tool":
        name = message.name or names.get(message.tool_call_id or "")
        opening = f'<tool_response name="{name}">' if name else "<tool_response>"
        content = _enclosed(f"{opening}\n", message.content or "", "\n</tool_response>")
        return replace(message, role="user", content=content, name=None, tool_call_id=None)
    if message.tool_calls:
        calls = "\n".join(map(_call, message.tool_calls))
        content = _enclosed("", message.content, f"\n{calls}") if message.content else calls
        return replace(message, content=content, tool_calls=())
    return message


def _call(call: ToolCall) -> str:
    return NOTATION.call.replace("⟨name⟩", call.name).replace("⟨arguments⟩", call.arguments.strip() or "{}")


def _enclosed(before: str, content: str | list[dict[str, Any]], after: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return before + content + after
    texts = ([{"type": "text", "text": text}] if text else [] for text in (before, after))
    opening, closing = texts
    return [*opening, *content, *closing]
