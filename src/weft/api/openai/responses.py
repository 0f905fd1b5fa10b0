"""POST /v1/responses: what its body asks for, understood. Items, tools and the reply have files of their own beside this one.

Knows no HTTP, no template and no model. What was said in earlier responses is given to `translate` as a `Past`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.api.dialect import ParsedRequest
from weft.api.openai.common import generation_of, grammar_of, response_format, thinking_budget_of
from weft.api.openai.response_items import Item, items_of, messages_of, unheard
from weft.api.openai.response_reply import Frame, Keep, ResponseReply
from weft.api.openai.response_tools import Tools, told
from weft.api.openai.schema import NOT_YET, TIERS, ConversationRequest, Count, ResponseFormat, Schema, understood
from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.types import Conversation, Effort, Message

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# What may be included. All but two speak of tools and images that are not to be had here.
INCLUDABLE = {
    LOGPROBS,
    SEALED,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
# Beside those of the other wires.
NOT_HERE: dict[str, tuple[Any, ...]] = NOT_YET | {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
    "prompt": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "reasoning_effort": (),
}
HARMLESS = frozenset({"client_metadata", "access_programs", "image"})

Summary = Literal["auto", "concise", "detailed", "none"]
InputItem = Annotated[dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"type": "string"}}})]
SentTool = Annotated[dict[str, Any], Meta(extra_json_schema={"required": ["type"], "properties": {"type": {"type": "string"}}})]


class ThinkingAsked(msgspec.Struct, kw_only=True):
    """How much is thought, and whether it is told as a summary too."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # its older name


class TextFormat(msgspec.Struct, kw_only=True):
    """What the answer must be. Name and description are not shown to the model."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    strict: bool | None = None
    name: str | None = None
    description: str | None = None


class TextAsked(msgspec.Struct, kw_only=True):
    """What the answer's text is like."""

    format: TextFormat | None = None
    verbosity: str | None = None  # a hint that no model here takes


class ResponseRequest(ConversationRequest, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None  # of tools that a server runs, so none here
    include: list[str] | None = None
    reasoning: ThinkingAsked | None = None
    text: TextAsked | None = None
    tools: list[SentTool] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @property
    def includes(self) -> set[str]:
        """What a response is to have beside the usual."""
        return set(self.include or ())

    @property
    def logprobs(self) -> int | None:
        """How many log-probabilities of each token; None: not even its own."""
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in self.includes else None


@dataclass(frozen=True)
class Past:
    """What is known of earlier responses."""

    items: tuple[Item, ...] = ()  # all that was said up to the previous response
    referred: Mapping[str, Item] = field(default_factory=dict)  # items by their ids
    keep: Keep | None = None  # who keeps the next one


def translate(body: dict[str, Any], past: Past | None = None) -> ParsedRequest:
    """Understand a body, or raise InvalidRequest naming the field."""
    past = past or Past()
    request, ignored = understood(body, ResponseRequest, NOT_HERE)
    if request.input is None and request.previous_response_id is None:
        raise InvalidRequest("input is required", "input")
    tools, thinking = Tools(request.tools or ()), request.reasoning or ThinkingAsked()
    items = items_of([] if request.input is None else request.input, past.referred)
    conversation = Conversation(_messages(request, past.items, items), tools.shown, request.chat_template_kwargs or {})
    generation = generation_of(
        request,
        (conversation,),
        request.max_output_tokens,
        request.logprobs,
        grammar=grammar_of(request, text=_text_format),
        tool_choice=tools.choice(request.tool_choice, request.parallel_tool_calls),
        thinking_budget=thinking_budget_of(request),
        effort=thinking.effort,
    )
    keep = past.keep if request.store is not False else None
    frame = Frame(
        told=_told(request, thinking) | {"store": keep is not None},
        tools=tools,
        items=[*past.items, *items],
        has_summary=(thinking.summary or thinking.generate_summary or "none") != "none",
        is_sealed=SEALED in request.includes,
        keep=keep,
    )
    missing = {f"include.{name}" for name in request.includes - INCLUDABLE} | {f"tools.{kind}" for kind in tools.missing}
    ignored = (*(name for name in ignored if name not in HARMLESS), *sorted(missing | unheard(items)))
    return ParsedRequest(generation, bool(request.stream), ignored, partial(ResponseReply, frame=frame), streams_overflow=True)


def _messages(request: ResponseRequest, past: tuple[Item, ...], items: list[Item]) -> tuple[Message, ...]:
    placed = [("previous_response_id", item) for item in past if not _is_cut(item)]
    placed += [(f"input[{index}]", item) for index, item in enumerate(items)]
    instructions = (Message("system", request.instructions, place="instructions"),) if request.instructions else ()
    messages = instructions + messages_of(placed)
    if not messages:
        raise InvalidRequest("input is empty; send at least one item", "input")
    return messages


def _is_cut(item: Item) -> bool:
    """Whether it is a call that was not told to the end; nobody can have answered it."""
    return item.get("status") == "incomplete" and item.get("type") in ("function_call", "custom_tool_call")


def _text_format(asked: TextAsked, place: str) -> GrammarSpec | None:
    form = asked.format
    if form is None:
        return None
    if form.type == "json_schema" and form.schema is None:
        raise InvalidRequest(f"{place}.format.schema is required", f"{place}.format.schema")
    schema = form.schema if form.type == "json_schema" else None
    return response_format(ResponseFormat(type=form.type, schema=schema, strict=form.strict), f"{place}.format")


def _told(request: ResponseRequest, thinking: ThinkingAsked) -> Item:
    """The fields that a response tells back, with what was taken where nothing was asked for."""
    text = request.text or TextAsked()
    form = msgspec.to_builtins(text.format) if text.format is not None else {"type": "text"}
    known = ("name", "description", "schema", "strict") if form["type"] == "json_schema" else ()
    verbosity = {"verbosity": text.verbosity} if text.verbosity is not None else {}
    tier = request.service_tier
    same = ("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "user", "safety_identifier")
    return {
        **{name: getattr(request, name) for name in same},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key if isinstance(request.prompt_cache_key, str) else None,
        "reasoning": {"effort": thinking.effort, "summary": thinking.summary or thinking.generate_summary},
        "service_tier": tier if isinstance(tier, str) and tier in TIERS else "default",
        "text": {"format": {"type": form["type"], **{name: form.get(name) for name in known}}, **verbosity},
        "tool_choice": request.tool_choice or "auto",
        "tools": told(request.tools or ()),
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",  # also where auto is asked for: nothing is ever left out
    }
