"""POST /v1/messages and its count_tokens: translates a body into a `GenerationRequest`; content blocks become messages."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.api import field_table
from weft.api.anthropic.reply import MessagesReply
from weft.api.dialect import ParsedRequest, StopTexts, unseal
from weft.api.fields import FieldRules
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.limits import MAX_ENTRIES, MAX_LABEL_CHARACTERS, MAX_MESSAGES, MAX_TOOLS
from weft.ipc.messages import GrammarSpec
from weft.text.bodies import Entries, Label, Shape
from weft.text.reasoning import BUDGETS
from weft.text.schema import json_schema_grammar
from weft.text.tools import Tool, ToolSelection, read_tool_selection, read_tools
from weft.text.types import Conversation, Effort, GenerationRequest, Message, ToolCall

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
ROLES = ("user", "assistant", "system")
# Claude Code's first line; it differs from request to request, and everything after it would have to be computed anew.
BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
# Blocks without use here: they are left out and reported as ignored. Images are handed on, for the model to take or to refuse.
SKIPPED_KINDS = tuple(
    """
    redacted_thinking server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result
    bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result
    mcp_tool_use mcp_tool_result container_upload
    """.split()  # noqa: SIM905 - a list literal would fill a page
)
RULES = FieldRules(field_table.MESSAGES)

BlockFields = {"type": {"type": "string"}, "cache_control": {"type": ["object", "null"]}}
# The citations of a text are an earlier answer's; those of a document ask for new ones, which `_read_part` refuses.
READ_BLOCKS = {
    "text": Shape.of("type", "text", "cache_control", "citations"),
    "image": Shape.of("type", "cache_control", source=Shape.of("type", "media_type", "data", "url")),
    "document": Shape.of("type", "title", "context", "cache_control", "source", "citations"),
    "search_result": Shape.of("type", "title", "source", "content", "cache_control", "citations"),
}
READ_RESULT = Shape.of("type", "tool_use_id", "is_error", "cache_control", content=Shape(entries=Shape(kinds=dict(READ_BLOCKS))))
READ_BLOCKS |= {
    "tool_result": READ_RESULT,
    "tool_use": Shape.of("type", "name", "input", "id", "cache_control"),
    "thinking": Shape.of("type", "thinking", "signature", "cache_control"),
}
Block = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={"required": ["type"], "properties": BlockFields},
        extra={"shape": Shape(kinds=READ_BLOCKS)},
    ),
]
Blocks = Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]
RoleName = Annotated[
    str, Meta(max_length=MAX_LABEL_CHARACTERS, extra_json_schema={"enum": [*ROLES]})
]  # `_read_messages` checks it
Placed = tuple[str, dict[str, Any]]  # a block, and its place in the request


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation. System messages may come anywhere; a final assistant message is continued."""

    role: RoleName
    content: str | Blocks


class Thinking(msgspec.Struct, kw_only=True):
    """The `thinking` field: whether the model reasons, for how many tokens, and whether the reasoning is shown."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The `output_config` field: the reasoning effort, and the JSON schema that the answer must match."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """The `metadata` field of a request; its user_id is used as the session of the client."""

    user_id: Label | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """The `tool_choice` field: whether tools may or must be called, which one, and whether several at once."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None


class ToolParam(msgspec.Struct, kw_only=True):
    """A tool definition. One of Anthropic's own types without input_schema is dropped; /v1/messages lists it as ignored."""

    name: Label | None = None
    type: Label | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Entries | None = None  # tools stand before the first message, where a prompt is cached anyway
    input_examples: Annotated[list[Entries], Meta(max_length=MAX_ENTRIES)] | None = None  # shown behind the description

    @property
    def is_complete(self) -> bool:
        return self.type in (None, "custom") or self.input_schema is not None

    def as_function(self, **more: Any) -> dict[str, Any]:
        examples = "\n".join(msgspec.json.encode(one).decode() for one in self.input_examples or ())
        words = "\n\n".join(filter(None, (self.description, examples and f"Examples of its input:\n{examples}")))
        described = {"description": words} if words or self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema, **more}}


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens: the fields that make up the prompt. Null is treated as absent."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Label | None = None
    system: str | Blocks | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None  # as `thinking.budget_tokens`; -1: no limit
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    chat_template_kwargs: Entries | None = None  # Anthropic has none; variables for the model's chat template


class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages: the fields that make up the prompt, and those for sampling and streaming."""

    max_tokens: Annotated[int, Meta(ge=0)]  # 0: the prompt is computed and cached, and nothing is generated
    stream: bool | None = None
    stop_sequences: StopTexts | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    seed: int | None = None  # Anthropic has none; here an answer can be repeated
    speculate: bool | None = None  # false: no draft tokens are verified
    metadata: Metadata | None = None


def translate(body: dict[str, Any]) -> ParsedRequest:
    """Parse a body of POST /v1/messages into a generation request and its reply type. Raises InvalidRequest."""
    request, ignored = RULES.read(body, MessagesRequest)
    generation = replace(
        _read_generation(request),
        sampling={name: value for name in SAMPLING if (value := getattr(request, name)) is not None},
        stops=tuple(request.stop_sequences or ()),
        session=(request.metadata and request.metadata.user_id) or "",
        speculate=request.speculate is not False,
    )
    hides_thinking = bool(request.thinking and request.thinking.display == "omitted")
    reply = partial(MessagesReply, max_tokens=request.max_tokens, hides_thinking=hides_thinking)
    ignored += tuple(f"tools.{tool.type}" for tool in request.tools or () if not tool.is_complete)
    lists = [message.content for message in request.messages if isinstance(message.content, list)]
    skipped = {kind for blocks in lists for block in blocks if (kind := block.get("type")) in SKIPPED_KINDS}
    ignored += tuple(f"messages.{kind}" for kind in sorted(skipped))
    return ParsedRequest(generation, bool(request.stream), ignored, reply)


def translate_count(body: dict[str, Any]) -> GenerationRequest:
    """Parse a body of /v1/messages/count_tokens into the request whose prompt is to be counted. Raises InvalidRequest."""
    return _read_generation(RULES.read(body, CountRequest)[0])


def _read_generation(request: CountRequest) -> GenerationRequest:
    tools = _read_tools(request.tools or [])
    messages = _read_messages(request)
    continues = bool(messages) and messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        place = f"messages[{len(request.messages) - 1}]"
        raise InvalidRequest(f"{place} has a tool_use whose tool_result is missing; send it in a user message", place)
    shown = tuple(tool.as_function() for tool in request.tools or () if tool.is_complete)
    return GenerationRequest(
        model=request.model,
        prompts=(Conversation(messages, shown, request.chat_template_kwargs or {}, not continues, continues),),
        sampling={},
        grammar=_read_grammar(request),
        tool_choice=_select_tools(request, tools),
        **_read_thinking(request),
        is_flexible=True,  # agents ask for reasoning and 32,000 tokens without knowing the model
    )


def _read_thinking(request: CountRequest) -> dict[str, Any]:
    """Return what is asked of the reasoning; without an effort, it is on or left to the model."""
    effort = request.output_config.effort if request.output_config else None
    budget = request.thinking_token_budget
    place = "thinking" if effort is None else "output_config.effort"
    match request.thinking:
        case Thinking(type="disabled"):
            return {"effort": "none", "effort_place": "thinking"}
        case Thinking(type="enabled") if budget is None:
            raise InvalidRequest("thinking.budget_tokens is required where thinking is enabled", "thinking.budget_tokens")
        case Thinking(type="enabled"):
            assert budget is not None
            effort = effort or next(word for word, tokens in BUDGETS.items() if tokens is None or tokens >= budget)
    return {"effort": effort, "effort_place": place, "thinking_budget": budget, "reasons": request.thinking is not None}


def _read_grammar(request: CountRequest) -> GrammarSpec | None:
    form, place = request.output_config.format if request.output_config else None, "output_config.format.schema"
    if form is not None and request.output_format is not None:
        raise InvalidRequest("output_format and output_config.format mean the same; send one of them", "output_format")
    if form is None:
        form, place = request.output_format, "output_format.schema"
    return None if form is None else json_schema_grammar(form.schema, True, place)


def _read_tools(given: Sequence[ToolParam]) -> tuple[Tool, ...]:
    complete = [index for index, tool in enumerate(given) if tool.is_complete]
    for place in (f"tools[{index}].input_schema" for index in complete if given[index].input_schema is None):
        raise InvalidRequest(f"{place} is required", place)
    functions = [given[index].as_function(strict=bool(given[index].strict)) for index in complete]
    return read_tools(functions, [f"tools[{index}]" for index in complete], "input_schema")


def _select_tools(request: CountRequest, tools: tuple[Tool, ...]) -> ToolSelection | None:
    given = request.tool_choice or ToolChoice(type="auto")
    missing = {tool.name: tool.type or "" for tool in request.tools or () if not tool.is_complete}
    if given.type == "tool" and given.name is None:
        raise InvalidRequest("tool_choice.name is required to choose a tool", "tool_choice.name")
    words: dict[str, Any] = {"any": "required", "tool": {"type": "function", "name": given.name}}
    kinds = [*missing.values()]
    if given.type == "tool" and given.name in missing:
        words, tools, kinds = {"tool": "required"}, (), [missing[given.name]]
    selection = read_tool_selection(words.get(given.type, given.type), tools, not given.disable_parallel_tool_use, kinds)
    return selection if tools else None


def _read_messages(request: CountRequest) -> tuple[Message, ...]:
    turns = [("system", "system", _read_blocks(request.system or "", "system"))]
    for index, message in enumerate(request.messages):
        place = f"messages[{index}]"
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise InvalidRequest(f"{place}.role {message.role!r} is not known; known are {known}", f"{place}.role")
        if message.content == [] and message.role != "assistant":
            raise InvalidRequest(f"{place}.content is empty; send at least one block", f"{place}.content")
        blocks = _read_blocks(message.content, f"{place}.content")
        if turns[-1][1] == message.role == "assistant":  # an answer in several messages is one
            turns[-1][2].extend(blocks)
        else:
            turns.append((place, message.role, blocks))
    readers = {"user": _read_user, "assistant": _read_assistant, "system": _read_system}
    return tuple(message for place, role, blocks in turns for message in readers[role](blocks, place))


def _read_blocks(content: str | list[dict[str, Any]], place: str) -> list[Placed]:
    if isinstance(content, str):
        return [(place, _text(content))]
    placed = [(f"{place}[{index}]", _check(block, dict, f"{place}[{index}]")) for index, block in enumerate(content)]
    return [(where, block) for where, block in placed if block.get("type") not in SKIPPED_KINDS]


def _read_system(blocks: list[Placed], place: str) -> list[Message]:
    """Return a system message without Claude Code's x-anthropic-billing-header line; an empty list if nothing remains."""
    parts, marks = _read_parts(blocks)
    texts = [_text(BILLING.sub("", part["text"])) if part["type"] == "text" else part for part in parts]
    kept = [index for index, part in enumerate(texts) if part != _text("")]
    breakpoints = tuple(kept.index(mark) for mark in marks if mark in kept)
    return [Message("system", _content([texts[i] for i in kept]), breakpoints=breakpoints, place=place)] if kept else []


def _read_user(blocks: list[Placed], place: str) -> list[Message]:
    """Convert a user turn to messages: one tool message per tool_result, then a user message if other blocks exist."""
    results = [_read_result(block, where) for where, block in blocks if block.get("type") == "tool_result"]
    parts, marks = _read_parts([(where, block) for where, block in blocks if block.get("type") != "tool_result"])
    return results + ([Message("user", _content(parts), breakpoints=marks, place=place)] if parts else [])


def _read_result(block: dict[str, Any], place: str) -> Message:
    content = "" if block.get("content") is None else _check(block["content"], str | list, f"{place}.content")
    parts, marks = _read_parts(_read_blocks(content, f"{place}.content"))
    parts = parts or [_text("")]
    if block.get("is_error") and parts[0]["type"] == "text" and "error" not in parts[0]["text"][:32].lower():
        parts[0] = _text(f"Error: {parts[0]['text']}")  # templates have no field for it, and the model should know
    if block.get("cache_control") is not None:
        marks = (*marks, len(parts) - 1)
    call_id = _call_id(block.get("tool_use_id"), f"{place}.tool_use_id")
    return Message("tool", _content(parts), tool_call_id=call_id, breakpoints=tuple(sorted({*marks})), place=place)


def _read_assistant(blocks: list[Placed], place: str) -> list[Message]:
    reasoning, calls, rest = [], [], []
    for where, block in blocks:
        match block.get("type"):
            case "thinking":
                shown = _check(block.get("thinking"), str, f"{where}.thinking")
                reasoning.append(shown or unseal(_check(block.get("signature", ""), str, f"{where}.signature")))
            case "tool_use":
                name, given = _check(block.get("name"), str, f"{where}.name"), _check(block.get("input"), dict, f"{where}.input")
                call_id = _call_id(block.get("id"), f"{where}.id")
                calls.append(ToolCall(name, msgspec.json.encode(given).decode(), call_id, where))
            case _:
                rest.append((where, block))
    parts, marks = _read_parts(rest)
    content: str | list[dict[str, Any]] = parts
    if all(part["type"] == "text" for part in parts):
        content, marks = "".join(part["text"] for part in parts), (0,) if marks else ()
    thoughts = "\n\n".join(filter(None, reasoning)) or None
    return [Message("assistant", content or None, thoughts, tuple(calls), breakpoints=marks, place=place)]


def _call_id(given: Any, place: str) -> str:
    call_id: str = _check(given, str, place)
    return f"call_{call_id.removeprefix('toolu_')}" if call_id.startswith("toolu_") else call_id


def _read_parts(blocks: Sequence[Placed]) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Convert content blocks to parts; also return the indices of the blocks with cache_control (cache breakpoints)."""
    marks = tuple(index for index, (_, block) in enumerate(blocks) if block.get("cache_control") is not None)
    return [_read_part(block, place) for place, block in blocks], marks


def _read_part(block: dict[str, Any], place: str) -> dict[str, Any]:
    """Convert a text, document or similar block to a text part; blocks of other types, such as images, are unchanged."""
    match block:
        case {"type": "document" | "search_result", "citations": {"enabled": True}}:
            place = f"{place}.citations"
            raise UnsupportedParameter(f"{place} is not supported here: answers do not cite; leave it out", place)
        case {"type": "text", "text": text}:
            return _text(_check(text, str, f"{place}.text"))
        case {
            "type": "document",
            "source": {"type": "text", "data": str() as given} | {"type": "content", "content": str() | list() as given},
        }:
            heads = [head for name in ("title", "context") if isinstance(head := block.get(name), str) and head]
            text = given if isinstance(given, str) else _join_blocks(given, f"{place}.source.content")
            return _text("\n".join([*heads, text]))
        case {"type": "document", "source": _}:
            place = f"{place}.source"
            raise UnsupportedParameter(f"{place}: only documents of plain text are taken here; send the text of this one", place)
        case {"type": "search_result", "title": str(title), "source": str(source), "content": list(content)}:
            return _text("\n".join([title, source, _join_blocks(content, f"{place}.content")]))
        case {"type": "compaction", "content": str(text)} | {"type": "tool_reference", "tool_name": str(text)}:
            return _text(text)
        case {"type": "text" | "document" | "search_result" | "compaction" | "tool_reference" as kind}:
            raise InvalidRequest(f"{place} is not a complete block of type {kind}", place)
        case {"type": str()}:
            return block
    raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")


def _join_blocks(content: list[Any], place: str) -> str:
    parts, _ = _read_parts(_read_blocks(content, place))
    if any(part["type"] != "text" for part in parts):
        raise UnsupportedParameter(f"{place} has other blocks than text; only text is taken here", place)
    return "\n".join(part["text"] for part in parts)


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the text if the only part is a text part, else the parts; so both forms of a text give the same prompt."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _check(value: Any, kind: Any, place: str) -> Any:
    if not isinstance(value, kind):
        words = {str: "a string", dict: "an object"}.get(kind, "a string or a list of blocks")
        raise InvalidRequest(f"{place} must be {words}", place)
    return value
