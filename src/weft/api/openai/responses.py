"""POST /v1/responses: translates a body, with the stored history it refers to (`Past`), into a `GenerationRequest`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.api import field_table
from weft.api.dialect import ParsedRequest, pick_fields
from weft.api.fields import FieldRules
from weft.api.openai import request as openai
from weft.api.openai.request import TIERS, ConversationRequest, Count, Limit, ResponseFormat, Schema, read_format, read_grammar
from weft.api.openai.response_items import (
    ACTING_FIELDS,
    Item,
    OutputTools,
    item_shapes,
    read_items,
    resolve_items,
    unknown_kinds,
)
from weft.api.openai.response_reply import SAMPLED, Keep, ResponseReply, ResponseShape
from weft.errors import InvalidRequest
from weft.ipc.limits import MAX_ENTRIES, MAX_MESSAGES, MAX_TOOLS
from weft.ipc.messages import GrammarSpec
from weft.text.bodies import Entries, Label, Shape
from weft.text.types import Conversation, Effort, Message

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# What may be included. All but two speak of tools and images that are not to be had here.
INCLUDABLE = {LOGPROBS, SEALED}.union(
    """
    file_search_call.results web_search_call.results web_search_call.action.sources code_interpreter_call.outputs
    message.input_image.image_url computer_call_output.output.image_url
    """.split()  # noqa: SIM905 - a list literal would fill a page
)
ALIASES = {**openai.ALIASES, "n_predict": "max_output_tokens"}
RULES = FieldRules({**field_table.OPENAI, **field_table.RESPONSES}, openai.WRAPPERS, ALIASES)

Summary = Literal["auto", "concise", "detailed", "none"]
READ_FUNCTION = Shape.of("type", "defer_loading", *ACTING_FIELDS, function=Shape.of(*ACTING_FIELDS))
READ_CUSTOM = Shape.of("type", "defer_loading", *ACTING_FIELDS, custom=Shape.of(*ACTING_FIELDS))
READ_TOOLS = {"function": READ_FUNCTION, "custom": READ_CUSTOM}
READ_TOOLS |= {"namespace": Shape.of("type", "name", "description", tools=Shape(entries=Shape(kinds=dict(READ_TOOLS))))}
InputItem = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"properties": {"type": {"type": "string"}}}, extra={"shape": Shape(kinds=item_shapes())}),
]
SentTool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={"required": ["type"], "properties": {"type": {"type": "string"}}},
        extra={"shape": Shape(kinds=READ_TOOLS)},
    ),
]


class ThinkingAsked(msgspec.Struct, kw_only=True):
    """The `reasoning` field: the effort, and whether reasoning is also returned as a summary."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # its older name


class TextFormat(msgspec.Struct, kw_only=True):
    """The `text.format` field: text, JSON object or JSON schema. Name and description are not shown to the model."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextAsked(msgspec.Struct, kw_only=True):
    """The `text` field: the format of the answer, and a verbosity that has no effect."""

    format: TextFormat | None = None
    verbosity: Label | None = None  # a hint that no model here takes


class ResponseRequest(ConversationRequest, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    max_output_tokens: Limit | None = None
    max_tool_calls: Count | None = None  # of tools that a server runs, so none here
    include: Annotated[list[Label], Meta(max_length=MAX_ENTRIES)] | None = None
    reasoning: ThinkingAsked | None = None
    text: TextAsked | None = None
    tools: Annotated[list[SentTool], Meta(max_length=MAX_TOOLS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    metadata: Entries | None = None
    user: Label | None = None
    safety_identifier: Label | None = None


@dataclass(frozen=True)
class Past:
    """Stored history for a request: earlier items, items by id, and the function that stores the next response, if any."""

    items: tuple[Item, ...] = ()  # the conversation up to the previous response's end
    referred: Mapping[str, Item] = field(default_factory=dict)  # items by their ids
    keep: Keep | None = None  # stores the next response


def translate(body: dict[str, Any], past: Past | None = None) -> ParsedRequest:
    """Parse a body of POST /v1/responses into a generation request and its reply type. Raises InvalidRequest."""
    past = past or Past()
    request, ignored = RULES.read(body, ResponseRequest)
    if request.input is None and request.previous_response_id is None:
        raise InvalidRequest("input is required", "input")
    tools, thinking, includes = OutputTools(request.tools or ()), request.reasoning or ThinkingAsked(), {*(request.include or ())}
    items = resolve_items([] if request.input is None else request.input, past.referred)
    conversation = Conversation(_messages(request, past.items, items), tools.template_tools, request.chat_template_kwargs or {})
    generation = request.read_generation(
        (conversation,),
        request.read_limit(request.max_output_tokens, "max_output_tokens"),
        (request.top_logprobs or 0) if request.top_logprobs or LOGPROBS in includes else None,
        grammar=read_grammar(request, openai.GRAMMAR_FIELDS | {"text": _read_text}),
        tool_choice=tools.select(request.tool_choice, request.parallel_tool_calls),
        thinking_budget=request.thinking_token_budget,
        budget_place=RULES.place_of_budget(body),
        effort=thinking.effort,
        effort_place="reasoning.effort",
    )
    keep = past.keep if request.store is not False else None
    repeated = _repeated(request, thinking) | {"store": keep is not None}
    has_summary = (thinking.summary or thinking.generate_summary or "none") != "none"
    shape = ResponseShape(repeated, tools, [*past.items, *items], has_summary, SEALED in includes, keep)
    missing = {f"include.{name}" for name in includes - INCLUDABLE} | {f"tools.{kind}" for kind in tools.missing}
    ignored += tuple(sorted(missing | unknown_kinds(items)))
    return ParsedRequest(generation, bool(request.stream), ignored, partial(ResponseReply, shape=shape), streams_overflow=True)


def _messages(request: ResponseRequest, past: tuple[Item, ...], items: list[Item]) -> tuple[Message, ...]:
    placed = [("previous_response_id", item) for item in past]
    placed += [(f"input[{index}]", item) for index, item in enumerate(items)]
    instructions = (Message("system", request.instructions, place="instructions"),) if request.instructions else ()
    messages = instructions + read_items(placed)
    if not messages:
        raise InvalidRequest("input is empty; send at least one item", "input")
    return messages


def _read_text(wanted: TextAsked, place: str, closes: bool | None) -> GrammarSpec | None:
    form = wanted.format
    if form is None:
        return None
    if form.type == "json_schema" and form.schema is None:
        raise InvalidRequest(f"{place}.format.schema is required", f"{place}.format.schema")
    schema = form.schema if form.type == "json_schema" else None
    return read_format(ResponseFormat(type=form.type, schema=schema, strict=form.strict), f"{place}.format", closes)


def _repeated(request: ResponseRequest, thinking: ThinkingAsked) -> Item:
    text = request.text or TextAsked()
    form = text.format or TextFormat(type="text")
    shown = msgspec.to_builtins(form) if form.type == "json_schema" else {"type": form.type}
    verbosity = {"verbosity": text.verbosity} if text.verbosity is not None else {}
    tier, empty = request.service_tier, dict.fromkeys(("description", "parameters", "strict"))  # what a function may lack
    same = ("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "user", "safety_identifier")
    return {
        **pick_fields(request, *same, *SAMPLED),
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key if isinstance(request.prompt_cache_key, str) else None,
        "reasoning": {"effort": thinking.effort, "summary": thinking.summary or thinking.generate_summary},
        "service_tier": tier if isinstance(tier, str) and tier in TIERS else "default",
        "text": {"format": shown, **verbosity},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{**empty, **tool} if tool["type"] == "function" else tool for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",  # also where auto was given: nothing is ever left out
    }
