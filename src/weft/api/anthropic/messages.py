"""POST /v1/messages and its count of tokens: a body into a `GenerationRequest`, and the reply that its deltas are told by.

Knows no HTTP, no template and no model. `app` calls the two functions on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.api.anthropic.blocks import messages_of, skipped_in
from weft.api.anthropic.reply import MessageShape, MessagesReply
from weft.api.anthropic.schema import HARMLESS, NOT_DONE, CountRequest, MessagesRequest, Thinking, ToolChoice, ToolParam
from weft.api.dialect import ParsedRequest
from weft.api.openai.schema import understood
from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.reasoning import BUDGETS
from weft.text.schema import json_schema_grammar
from weft.text.tools import Tool, ToolSelection, read_tool_selection, read_tools
from weft.text.types import Conversation, Effort, GenerationRequest

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def translate(body: dict[str, Any]) -> ParsedRequest:
    """Understand a body, or raise InvalidRequest naming the field."""
    request, ignored = understood(body, MessagesRequest, NOT_DONE, HARMLESS)
    generation = replace(
        _generation(request),
        sampling={name: value for name in SAMPLING if (value := getattr(request, name)) is not None},
        stops=tuple(request.stop_sequences or ()),
        session=(request.metadata and request.metadata.user_id) or "",
    )
    shape = MessageShape(request.max_tokens, hides_thinking=bool(request.thinking and request.thinking.display == "omitted"))
    unused = [f"tools.{tool.type}" for tool in request.tools or () if not _is_ours(tool)]
    return ParsedRequest(
        generation, bool(request.stream), (*ignored, *unused, *skipped_in(request)), partial(MessagesReply, shape=shape)
    )


def translate_count(body: dict[str, Any]) -> GenerationRequest:
    """The same for a request whose tokens are to be counted."""
    return _generation(understood(body, CountRequest, NOT_DONE, HARMLESS)[0])


def _generation(request: CountRequest) -> GenerationRequest:
    tools = _tools(request.tools or [])
    effort, budget, template_kwargs = _thinking(request)
    return GenerationRequest(
        model=request.model,
        prompts=(_conversation(request, template_kwargs),),
        sampling={},
        grammar=_grammar(request),
        tool_choice=_choice(request.tool_choice, tools),
        thinking_budget=budget,
        effort=effort,
        is_flexible=True,  # agents ask for thinking and 32,000 tokens without knowing the model
    )


def _conversation(request: CountRequest, template_kwargs: dict[str, Any]) -> Conversation:
    messages = messages_of(request)
    continues = bool(messages) and messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        place = f"messages[{len(request.messages) - 1}]"
        raise InvalidRequest(f"{place} has a tool_use whose tool_result is missing; send it in a user message", place)
    return Conversation(
        messages=messages,
        tools=tuple(_function(tool) for tool in request.tools or () if _is_ours(tool)),
        template_kwargs=template_kwargs,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _thinking(request: CountRequest) -> tuple[Effort | None, int | None, dict[str, Any]]:
    """How much to think: in words, in tokens, and whether the template is told to. Said nothing, it is the model's own way."""
    effort = request.output_config.effort if request.output_config else None
    match request.thinking:
        case None:
            return effort, None, {}
        case Thinking(type="disabled"):
            return "none", None, {}
        case Thinking(type="enabled", budget_tokens=None):
            raise InvalidRequest("thinking.budget_tokens is required where thinking is enabled", "thinking.budget_tokens")
        case Thinking(type="enabled", budget_tokens=int(budget)):
            worded = next(word for word, tokens in BUDGETS.items() if tokens is None or tokens >= budget)
            return effort or worded, budget, {}
    return effort, None, {"enable_thinking": True}


def _grammar(request: CountRequest) -> GrammarSpec | None:
    form = request.output_config.format if request.output_config else None
    if form is not None and request.output_format is not None:
        raise InvalidRequest("output_format and output_config.format mean the same; send one of them", "output_format")
    if form is not None:
        return json_schema_grammar(form.schema, True, "output_config.format.schema")
    if request.output_format is not None:
        return json_schema_grammar(request.output_format.schema, True, "output_format.schema")
    return None


def _is_ours(tool: ToolParam) -> bool:
    """Whether the client brings all that there is to know of a tool: Anthropic's own ones have only a name and a type."""
    return tool.type in (None, "custom") or tool.input_schema is not None


def _tools(given: Sequence[ToolParam]) -> tuple[Tool, ...]:
    """The tools that may be called. Raises InvalidRequest with the place of the first misfit."""
    ours = [index for index, tool in enumerate(given) if _is_ours(tool)]
    for index in ours:
        if given[index].input_schema is None:
            place = f"tools[{index}].input_schema"
            raise InvalidRequest(f"{place} is required", place)
    functions = [_function(given[index], strict=bool(given[index].strict)) for index in ours]
    return read_tools(functions, [f"tools[{index}]" for index in ours], "input_schema")


def _function(tool: ToolParam, **more: Any) -> dict[str, Any]:
    """A tool as templates are shown it, and as OpenAI writes it."""
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema, **more}}


def _choice(given: ToolChoice | None, tools: tuple[Tool, ...]) -> ToolSelection | None:
    if given is None:
        return read_tool_selection(None, tools) if tools else None
    if given.type == "tool" and given.name is None:
        raise InvalidRequest("tool_choice.name is required to choose a tool", "tool_choice.name")
    words: dict[str, Any] = {"any": "required", "tool": {"type": "function", "name": given.name}}
    choice = read_tool_selection(words.get(given.type, given.type), tools, not given.disable_parallel_tool_use)
    return choice if tools else None
