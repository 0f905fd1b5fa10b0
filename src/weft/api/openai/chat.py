"""POST /v1/chat/completions, as two pure translators: a body into a `GenerationRequest`, deltas into a completion or its chunks.

Knows no HTTP, no template and no model. `app` calls `translate` and feeds the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from weft.api.dialect import ParsedRequest, ReplyHeader
from weft.api.openai.common import (
    OpenAIReply,
    ReplyShape,
    generation_of,
    grammar_of,
    joined,
    logprobs_of,
    thinking_budget_of,
)
from weft.api.openai.schema import ChatMessage, ChatRequest, ChatToolCall, understood
from weft.errors import InvalidRequest
from weft.text.tools import CustomInputReader, custom_input, read_tool_selection, read_tools, template_tools, wrap_custom_input
from weft.text.types import (
    CallArguments,
    CallOpened,
    ContentDelta,
    Conversation,
    Message,
    Reasoning,
    Text,
    ToolCall,
)


def translate(body: dict[str, Any]) -> ParsedRequest:
    """Understand a body, or raise InvalidRequest naming the field."""
    request, ignored = understood(body, ChatRequest)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tools = read_tools(request.tools)
    choice = read_tool_selection(request.tool_choice, tools, request.parallel_tool_calls)
    generation = generation_of(
        request,
        (_conversation(request),),
        request.max_completion_tokens or request.max_tokens,
        logprobs,
        n=request.n or 1,
        grammar=grammar_of(request),
        tool_choice=choice if tools else None,
        thinking_budget=thinking_budget_of(request),
        effort=request.reasoning_effort,
    )
    shape = ReplyShape.of(request, prompts=1, logprobs=logprobs is not None)
    custom = frozenset(tool.name for tool in tools if tool.is_custom)
    return ParsedRequest(generation, bool(request.stream), ignored, partial(ChatReply, shape=shape, custom=custom))


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The messages of a request. Raises InvalidRequest with the place of the first misfit."""
    return tuple(message_of(message, f"messages[{index}]") for index, message in enumerate(messages))


def message_of(message: ChatMessage, path: str) -> Message:
    """One message, that stands at this place of a request."""
    content: str | list[dict[str, Any]] | None = message.refusal if message.content is None else message.content
    if content is None and message.role not in ("assistant", "tool"):
        raise InvalidRequest(f"{path}.content is missing; a {message.role} message needs one", f"{path}.content")
    marks: set[int] = set()
    if isinstance(content, list):
        marks = {index for index, part in enumerate(content) if _is_marked(part, f"{path}.content[{index}]")}
        content = [_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
    if content and message.prompt_cache_breakpoint not in (None, False):
        marks.add(len(content) - 1 if isinstance(content, list) else 0)
    return Message(
        role=message.role,
        content=content,
        reasoning=message.reasoning if message.reasoning_content is None else message.reasoning_content,
        tool_calls=tuple(_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())),
        tool_call_id=message.tool_call_id,
        name=message.name,
        breakpoints=tuple(sorted(marks)),
    )


class ChatReply(OpenAIReply):
    """A chat completion, or its chunks."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    silence: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(self, heading: ReplyHeader, shape: ReplyShape, custom: frozenset[str] = frozenset()) -> None:
        super().__init__(heading, shape)
        self._custom = custom  # names of tools that take a text
        self._inputs: dict[tuple[int, int], CustomInputReader] = {}  # of their calls, by choice and index

    def opening(self) -> bytes:
        """The role of every choice: clients take the stream's kind and id from its first chunk."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(choice, role) for choice in self.shape.choices)

    def said(self, choice: int, run: Sequence[Text | Reasoning]) -> dict[str, Any]:  # noqa: ARG002 - all choices alike
        """A delta of content or of reasoning."""
        if isinstance(run[0], Reasoning):
            return {"delta": {"reasoning_content": joined(run)}}
        return {"delta": {"content": joined(run)}, **({"logprobs": _logprobs(run)} if self.shape.logprobs else {})}

    def called(self, choice: int, run: Sequence[CallOpened | CallArguments]) -> dict[str, Any]:
        """A delta of a call."""
        first = run[0]
        if isinstance(first, CallOpened):
            if first.name in self._custom:
                self._inputs[choice, first.index] = CustomInputReader()
            return {"delta": {"tool_calls": [{"index": first.index, **self._call(first, "")}]}}
        said = _arguments(run, first.index)
        if (raw := self._inputs.get((choice, first.index))) is None:
            return {"delta": {"tool_calls": [{"index": first.index, "function": {"arguments": said}}]}}
        text = raw.feed(said)
        return {"delta": {"tool_calls": [{"index": first.index, "custom": {"input": text}}]}} if text else {}

    def complete(self, choice: int, deltas: Sequence[ContentDelta]) -> dict[str, Any]:  # noqa: ARG002 - all choices alike
        """A message. Its content is null only beside calls: LangChain takes that for a tool call that is missing."""
        texts = [delta for delta in deltas if isinstance(delta, Text)]
        reasoning = joined([delta for delta in deltas if isinstance(delta, Reasoning)])
        calls = [self._call(delta, _arguments(deltas, delta.index)) for delta in deltas if isinstance(delta, CallOpened)]
        message: dict[str, Any] = {"role": "assistant", "content": joined(texts), "refusal": None}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {"message": message, "logprobs": _logprobs(texts) if self.shape.logprobs else None}

    def _call(self, opened: CallOpened, arguments: str) -> dict[str, Any]:
        if opened.name in self._custom:
            return {"id": opened.id, "type": "custom", "custom": {"name": opened.name, "input": custom_input(arguments)}}
        return {"id": opened.id, "type": "function", "function": {"name": opened.name, "arguments": arguments}}


def _conversation(request: ChatRequest) -> Conversation:
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt can not both be true", "continue_final_message")
    return Conversation(
        messages=messages_of(request.messages),
        tools=template_tools(request.tools or ()),  # whatever is chosen of them: the prompt stays the same
        template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
    )


def _is_marked(part: dict[str, Any], path: str) -> bool:
    mark = part.get("prompt_cache_breakpoint")
    if not isinstance(mark, bool | dict | None):
        raise InvalidRequest(f"{path}.prompt_cache_breakpoint must be true or an object", f"{path}.prompt_cache_breakpoint")
    return mark not in (None, False)


def _part(part: dict[str, Any], path: str) -> dict[str, Any]:
    """A part as given; what is text under another name gets the name that templates know."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str()}:
            return {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"} | {"type": "text"}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "text" | "input_text" | "output_text" | "refusal" as kind}:
            field = f"{path}.{'refusal' if kind == 'refusal' else 'text'}"
            raise InvalidRequest(f"{field} must be a string", field)
        case {"type": str()}:
            return part
    raise InvalidRequest(f"{path}.type must be a string", f"{path}.type")


def _tool_call(call: ChatToolCall, path: str) -> ToolCall:
    if call.function is not None:
        return ToolCall(call.function.name, _json_text(call.function.arguments), call.id)
    if call.custom is not None:
        return ToolCall(call.custom.name, wrap_custom_input(call.custom.input), call.id)
    raise InvalidRequest(f"{path}.function is required, or custom", f"{path}.function")


def _json_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _arguments(deltas: Sequence[ContentDelta], index: int) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, CallArguments) and delta.index == index)


def _logprobs(run: Sequence[Text | Reasoning]) -> dict[str, Any]:
    return {"content": logprobs_of(run), "refusal": None}
