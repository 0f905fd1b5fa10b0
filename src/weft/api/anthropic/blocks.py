"""Anthropic's messages → ours: blocks become texts, calls, results and thinking; errors name the block's place.

What weft has no use for (results of tools that Anthropic runs, thinking it has sealed) is left out and told back; what would
change the answer, like an image, is handed on as it is, and refused where the model can not take it. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from weft.api.anthropic.schema import CountRequest, InputMessage
from weft.api.anthropic.signature import hidden
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.text.types import Message, ToolCall

Block = dict[str, Any]
Placed = tuple[str, Block]  # a block, and where it stands in the request

# Claude Code's first words; they differ from request to request, and everything after them would have to be computed anew.
BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
SKIPPED = frozenset(
    """
    redacted_thinking server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result
    bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result
    mcp_tool_use mcp_tool_result container_upload
    """.split()  # noqa: SIM905 - a list literal would fill a page
)
ROLES = ("user", "assistant", "system")


def messages_of(request: CountRequest) -> tuple[Message, ...]:
    """The instructions and all messages. Raises InvalidRequest with the place of the first misfit."""
    found = _instructions(_blocks(request.system or "", "system"), "system")
    for place, role, blocks in _turns(request.messages):
        match role:
            case "user":
                found += _said(blocks, place)
            case "assistant":
                found.append(_answer(blocks, place))
            case _:
                found += _instructions(blocks, place)
    return tuple(found)


def skipped_in(request: CountRequest) -> list[str]:
    """The kinds of blocks that are left out, as the client is told of them."""
    lists = [message.content for message in request.messages if isinstance(message.content, list)]
    kinds = {block["type"] for blocks in lists for block in blocks if _is_skipped(block)}
    return [f"messages.{kind}" for kind in sorted(kinds)]


def call_id(given: str) -> str:
    """An id as our other wires write it."""
    return f"call_{given.removeprefix('toolu_')}" if given.startswith("toolu_") else given


def tool_use_id(given: str) -> str:
    """The same as Anthropic's clients know it."""
    return f"toolu_{given.removeprefix('call_')}" if given.startswith("call_") else given


def _turns(messages: Sequence[InputMessage]) -> list[tuple[str, str, list[Placed]]]:
    """Place, role and blocks of every message. An answer that comes in several of them is one."""
    turns: list[tuple[str, str, list[Placed]]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise InvalidRequest(f"{place}.role {message.role!r} is not known; known are {known}", f"{place}.role")
        if message.content == [] and message.role != "assistant":
            raise InvalidRequest(f"{place}.content is empty; send at least one block", f"{place}.content")
        blocks = _blocks(message.content, f"{place}.content")
        if turns and turns[-1][1] == message.role == "assistant":
            turns[-1][2].extend(blocks)
        else:
            turns.append((place, message.role, blocks))
    return turns


def _blocks(content: str | list[Block], place: str) -> list[Placed]:
    if isinstance(content, str):
        return [(place, _text(content))]
    placed = [(f"{place}[{index}]", _checked(block, dict, f"{place}[{index}]")) for index, block in enumerate(content)]
    return [(where, block) for where, block in placed if not _is_skipped(block)]


def _instructions(blocks: list[Placed], place: str) -> list[Message]:
    """A system message without the line that is there for bills; none where nothing else was said."""
    parts, marks = _parts(blocks)
    texts = [_text(BILLING.sub("", part["text"])) if _is_text(part) else part for part in parts]
    kept = [index for index, part in enumerate(texts) if part != _text("")]
    if not kept:
        return []
    breakpoints = tuple(kept.index(mark) for mark in marks if mark in kept)
    return [Message("system", _content([texts[index] for index in kept]), breakpoints=breakpoints, place=place)]


def _said(blocks: list[Placed], place: str) -> list[Message]:
    """What a user's message says: the results of calls first, because they belong to the answer before them."""
    results = [_result(block, where) for where, block in blocks if block.get("type") == "tool_result"]
    parts, marks = _parts([(where, block) for where, block in blocks if block.get("type") != "tool_result"])
    said = [Message("user", _content(parts), breakpoints=marks, place=place)] if parts else []
    return results + said


def _result(block: Block, place: str) -> Message:
    content = "" if block.get("content") is None else _checked(block["content"], str | list, f"{place}.content")
    parts, marks = _parts(_blocks(content, f"{place}.content"))
    parts = parts or [_text("")]
    if block.get("is_error") and _is_text(parts[0]) and "error" not in parts[0]["text"][:32].lower():
        parts[0] = _text(f"Error: {parts[0]['text']}")  # templates have no word for it, and the model should know
    if block.get("cache_control") is not None:
        marks = (*marks, len(parts) - 1)
    answered = call_id(_checked(block.get("tool_use_id"), str, f"{place}.tool_use_id"))
    return Message("tool", _content(parts), tool_call_id=answered, breakpoints=tuple(sorted({*marks})), place=place)


def _answer(blocks: list[Placed], place: str) -> Message:
    thoughts = [thought for where, block in blocks if (thought := _thought(block, where))]
    calls = [_call(block, where) for where, block in blocks if block.get("type") == "tool_use"]
    parts, marks = _parts([(where, block) for where, block in blocks if block.get("type") not in ("thinking", "tool_use")])
    content: str | list[Block] = parts
    if all(map(_is_text, parts)):
        content, marks = "".join(part["text"] for part in parts), (0,) if marks else ()
    reasoning = "\n\n".join(thoughts) or None
    return Message("assistant", content or None, reasoning, tuple(calls), breakpoints=marks, place=place)


def _thought(block: Block, place: str) -> str:
    if block.get("type") != "thinking":
        return ""
    shown = _checked(block.get("thinking"), str, f"{place}.thinking")
    return shown or hidden(_checked(block.get("signature", ""), str, f"{place}.signature"))


def _call(block: Block, place: str) -> ToolCall:
    name, given = _checked(block.get("name"), str, f"{place}.name"), _checked(block.get("input"), dict, f"{place}.input")
    return ToolCall(name, msgspec.json.encode(given).decode(), call_id(_checked(block.get("id"), str, f"{place}.id")))


def _parts(blocks: Sequence[Placed]) -> tuple[list[Block], tuple[int, ...]]:
    """Blocks as parts of a content, and which of them end where a later prompt may part from this one."""
    marks = tuple(index for index, (_, block) in enumerate(blocks) if block.get("cache_control") is not None)
    return [_part(block, place) for place, block in blocks], marks


def _part(block: Block, place: str) -> Block:
    """A block as a part that is text, or as it is where there is no text in it."""
    match block:
        case {"type": "text", "text": text}:
            return _text(_checked(text, str, f"{place}.text"))
        case {"type": "document", "source": source}:
            heads = [head for name in ("title", "context") if isinstance(head := block.get(name), str) and head]
            return _text("\n".join([*heads, _document(source, f"{place}.source")]))
        case {"type": "search_result", "title": str(title), "source": str(source), "content": list(content)}:
            return _text("\n".join([title, source, _plain(content, f"{place}.content")]))
        case {"type": "compaction", "content": str(text)} | {"type": "tool_reference", "tool_name": str(text)}:
            return _text(text)
        case {"type": "text" | "document" | "search_result" | "compaction" | "tool_reference" as kind}:
            raise InvalidRequest(f"{place} is not a complete block of type {kind}", place)
        case {"type": str()}:
            return block
    raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")


def _document(source: Any, place: str) -> str:
    match source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": list(content)}:
            return _plain(content, f"{place}.content")
    raise UnsupportedParameter(f"{place}: only documents of plain text are taken here; send the text of this one", place)


def _plain(content: list[Any], place: str) -> str:
    """The texts of a list of text blocks."""
    parts, _ = _parts(_blocks(content, place))
    if not all(map(_is_text, parts)):
        raise UnsupportedParameter(f"{place} has other blocks than text; only text is taken here", place)
    return "\n".join(part["text"] for part in parts)


def _content(parts: list[Block]) -> str | list[Block]:
    """One text is a text, so that a prompt is the same whichever way it was sent."""
    return parts[0]["text"] if len(parts) == 1 and _is_text(parts[0]) else parts


def _is_skipped(block: Block) -> bool:
    kind = block.get("type")
    return isinstance(kind, str) and kind in SKIPPED


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _is_text(part: Block) -> bool:
    return bool(part["type"] == "text")


def _checked(value: Any, kind: Any, place: str) -> Any:
    if not isinstance(value, kind):
        words = {str: "a string", dict: "an object"}.get(kind, "a string or a list of blocks")
        raise InvalidRequest(f"{place} must be {words}", place)
    return value
