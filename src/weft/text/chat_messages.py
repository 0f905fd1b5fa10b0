"""Messages of a conversation as Chat Completions has them, read for the server and for `weft.LLM` alike."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.errors import InvalidRequest
from weft.ipc.limits import MAX_MESSAGES, MAX_TOOL_CALLS
from weft.text.bodies import Entries, Label, Shape
from weft.text.tools.custom_tools import wrap_custom_input
from weft.text.types import Message, Role, ToolCall

PartFields = {"type": {"type": "string"}, "prompt_cache_breakpoint": {"type": ["boolean", "object", "null"]}}
READ_PART = Shape.of("type", "text", "prompt_cache_breakpoint")
READ_IMAGE = Shape.of("type", "detail", "prompt_cache_breakpoint", image_url=Shape.of("url", "detail"))
READ_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), READ_PART),
    **dict.fromkeys(("image_url", "input_image"), READ_IMAGE),
    "refusal": Shape.of("type", "refusal"),
}
Part = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"required": ["type"], "properties": PartFields}, extra={"shape": Shape(kinds=READ_PARTS)}),
]


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function's name and arguments in a tool call."""

    name: Label
    arguments: str | dict[str, Any] = "{}"


class CalledCustom(msgspec.Struct, kw_only=True):
    """The custom tool's name and input text in a tool call."""

    name: Label
    input: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an earlier assistant message; it must have `function` or `custom`."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: Label | None = None
    type: Literal["function", "custom"] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation. Only assistant and tool messages may be without content."""

    role: Role
    content: str | Annotated[list[Part], Meta(max_length=MAX_MESSAGES)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ChatToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Label | None = None
    name: Label | None = None
    prompt_cache_breakpoint: bool | Entries | None = None


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Convert a request's chat messages to `Message`s. Raises InvalidRequest with the path of the first invalid field."""
    return tuple(read_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def read_message(message: ChatMessage, place: str) -> Message:
    """Convert a chat message to a `Message`. Raises InvalidRequest; `place` is the message's path in the request."""
    content: str | list[dict[str, Any]] | None = message.refusal if message.content is None else message.content
    if content is None and message.role not in ("assistant", "tool"):
        raise InvalidRequest(f"{place}.content is missing; a {message.role} message needs one", f"{place}.content")
    marks: set[int] = set()
    if isinstance(content, list):
        for index, part in enumerate(content):
            mark, field = part.get("prompt_cache_breakpoint"), f"{place}.content[{index}].prompt_cache_breakpoint"
            if not isinstance(mark, bool | dict | None):
                raise InvalidRequest(f"{field} must be true or an object", field)
            if mark not in (None, False):
                marks.add(index)
        content = [_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    if content and message.prompt_cache_breakpoint not in (None, False):
        marks.add(len(content) - 1 if isinstance(content, list) else 0)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    calls = [_tool_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())]
    return Message(message.role, content, reasoning, tuple(calls), message.tool_call_id, message.name, tuple(sorted(marks)))


def _part(part: dict[str, Any], place: str) -> dict[str, Any]:
    """Check a content part; make input_text, output_text and refusal parts text parts. Raises InvalidRequest."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str()}:
            return {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"} | {"type": "text"}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "text" | "input_text" | "output_text" | "refusal" as kind}:
            field = f"{place}.{'refusal' if kind == 'refusal' else 'text'}"
            raise InvalidRequest(f"{field} must be a string", field)
        case {"type": str()}:
            return part
    raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")


def _tool_call(call: ChatToolCall, place: str) -> ToolCall:
    if call.function is not None:
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        return ToolCall(call.function.name, text, call.id)
    if call.custom is not None:
        return ToolCall(call.custom.name, wrap_custom_input(call.custom.input), call.id)
    raise InvalidRequest(f"{place}.function is required, or custom", f"{place}.function")
