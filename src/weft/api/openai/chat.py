"""POST /v1/chat/completions, as two pure translators: a body into a `Generation`, deltas into a completion or its chunks.

Knows no HTTP, no template and no model. `app` calls `translate` and feeds the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from weft.api.openai.common import OpenAIReply, Shape, grammar_of, joined, logprob_of, sampling_of, stops_of, tokens_of
from weft.api.openai.schema import ChatMessage, ChatRequest, understood
from weft.api.reply import Asked
from weft.chat.conversation import (
    CallArguments,
    CallOpened,
    Conversation,
    Generation,
    Message,
    Reasoning,
    Said,
    Text,
    Token,
    ToolCall,
)
from weft.chat.tools import read_choice, read_tools
from weft.errors import InvalidRequest


def translate(body: dict[str, Any]) -> Asked:
    """Understand a body, or raise InvalidRequest naming the field."""
    request, ignored = understood(body, ChatRequest)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tools = read_tools(request.tools)
    choice = read_choice(request.tool_choice, tools, request.parallel_tool_calls)
    generation = Generation(
        model=request.model,
        prompts=(_conversation(request),),
        sampling=sampling_of(request, request.max_completion_tokens or request.max_tokens, logprobs),
        n=request.n or 1,
        stops=stops_of(request),
        grammar=grammar_of(request),
        tool_choice=choice if tools else None,
        thinking_budget=_thinking_budget(request),
        effort=request.reasoning_effort,
        skip_special_tokens=request.skip_special_tokens is not False,
        cache_salt=request.cache_salt or "",
        session=request.session,
        priority=request.precedence,
    )
    shape = Shape.of(request, prompts=1, logprobs=logprobs is not None)
    return Asked(generation, bool(request.stream), ignored, partial(ChatReply, shape=shape))


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The messages of a request. Raises InvalidRequest with the place of the first misfit."""
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


class ChatReply(OpenAIReply):
    """A chat completion, or its chunks."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    silence: ClassVar[dict[str, Any]] = {"delta": {}}

    def opening(self) -> bytes:
        """The role of every choice: clients take the stream's kind and id from its first chunk."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(choice, role) for choice in self.shape.choices)

    def said(self, choice: int, run: Sequence[Text | Reasoning]) -> dict[str, Any]:  # noqa: ARG002 - all choices alike
        """A delta of content or of reasoning."""
        if isinstance(run[0], Reasoning):
            return {"delta": {"reasoning_content": joined(run)}}
        return {"delta": {"content": joined(run)}, **({"logprobs": _logprobs(run)} if self.shape.logprobs else {})}

    def called(self, run: Sequence[CallOpened | CallArguments]) -> dict[str, Any]:
        """A delta of a call."""
        first = run[0]
        if isinstance(first, CallOpened):
            return {"delta": {"tool_calls": [{"index": first.index, **_call(first, "")}]}}
        return {"delta": {"tool_calls": [{"index": first.index, "function": {"arguments": _arguments(run, first.index)}}]}}

    def complete(self, choice: int, deltas: Sequence[Said]) -> dict[str, Any]:  # noqa: ARG002 - all choices alike
        """A message. Its content is null only beside calls: LangChain takes that for a tool call that is missing."""
        texts = [delta for delta in deltas if isinstance(delta, Text)]
        reasoning = joined([delta for delta in deltas if isinstance(delta, Reasoning)])
        calls = [_call(delta, _arguments(deltas, delta.index)) for delta in deltas if isinstance(delta, CallOpened)]
        message: dict[str, Any] = {"role": "assistant", "content": joined(texts), "refusal": None}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {"message": message, "logprobs": _logprobs(texts) if self.shape.logprobs else None}


def _conversation(request: ChatRequest) -> Conversation:
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt can not both be true", "continue_final_message")
    return Conversation(
        messages=messages_of(request.messages),
        tools=tuple(request.tools or ()),  # whatever is chosen of them: the prompt stays the same
        template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
    )


def _thinking_budget(request: ChatRequest) -> int | None:
    budgets = {request.thinking_token_budget, request.reasoning_budget_tokens} - {None}
    if len(budgets) > 1:
        message = "thinking_token_budget and reasoning_budget_tokens mean the same and differ; send one of them"
        raise InvalidRequest(message, "reasoning_budget_tokens")
    return next(iter(budgets - {-1}), None)


def _message(message: ChatMessage, path: str) -> Message:
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
        tool_calls=tuple(
            ToolCall(call.function.name, _json_text(call.function.arguments), call.id) for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
        breakpoints=tuple(sorted(marks)),
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


def _json_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _call(opened: CallOpened, arguments: str) -> dict[str, Any]:
    return {"id": opened.id, "type": "function", "function": {"name": opened.name, "arguments": arguments}}


def _arguments(deltas: Sequence[Said], index: int) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, CallArguments) and delta.index == index)


def _logprobs(run: Sequence[Text | Reasoning]) -> dict[str, Any]:
    tokens = [token for delta in run for token in tokens_of(delta)]
    return {
        "content": [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def _logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": logprob_of(token)}
