"""The request bodies of OpenAI's two older wires as typed fields, and what becomes of every other field.

A field acts (it stands in a struct), is refused when it would act (`NOT_YET`), changes nothing by design (`HARMLESS`), or is
unknown and told back to the client. Knows nothing of conversations or sampling; `chat`, `completions` and `openapi` use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from weft.errors import InvalidRequest, UnsupportedParameter
from weft.text.types import Effort, Role

MAX_CHOICES = 128  # prompts × n of one request
TIERS = {"priority": 10, "flex": -10}  # what OpenAI's tiers are as a priority; the others are none

FormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
SomeText = Annotated[str, Meta(min_length=1)]
Schema = dict[str, Any] | Annotated[bool, Meta(extra_json_schema={"const": True})]
SchemaOrText = Schema | SomeText
Off = Annotated[bool, Meta(extra_json_schema={"const": False})]
Choices = Annotated[list[str], Meta(min_length=1)]
Mark = {"type": ["boolean", "object", "null"]}  # as JSON's schemas say it
PartFields = {"type": {"type": "string"}, "prompt_cache_breakpoint": Mark}
Part = Annotated[dict[str, Any], Meta(extra_json_schema={"required": ["type"], "properties": PartFields})]

Named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
ToolKinds = [
    {"required": ["type", kind], "properties": {"type": {"const": kind}, kind: Named}} for kind in ("function", "custom")
]
Tool = Annotated[dict[str, Any], Meta(extra_json_schema={"anyOf": ToolKinds})]
ToolMode = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})]  # `read_tool_selection` checks it


class StreamOptions(msgspec.Struct, kw_only=True):
    """How a stream ends."""

    include_usage: bool | None = None


class NamedSchema(msgspec.Struct, kw_only=True):
    """A schema as OpenAI wraps it. Name and description are not shown to the model."""

    schema: Schema
    strict: bool | None = None
    name: str | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the answer must be. A schema stands in `json_schema`, or as some clients send it beside the type."""

    type: FormatType
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    strict: bool | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[SomeText] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to say it: one of the first six."""

    json: SchemaOrText | None = None
    json_object: bool | None = None
    regex: SomeText | None = None
    choice: Choices | None = None
    grammar: SomeText | None = None
    structural_tag: dict[str, Any] | SomeText | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
    disable_any_whitespace: Off | None = None
    disable_additional_properties: Off | None = None
    whitespace_pattern: None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both wires take. Absent and null are the same; the rest of the limits is `wire.Sampling`'s."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: SomeText | Annotated[list[SomeText], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # What the answer must look like: at most one of these. The last two are llama.cpp's.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: SomeText | None = None
    guided_choice: Choices | None = None
    guided_grammar: SomeText | None = None
    json_schema: Schema | None = None
    grammar: SomeText | None = None
    # What becomes of the computed prompt. The answer is the same in any case.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: Any = None  # Any: two hints, and anything is one
    session_id: Any = None
    # Who goes first where not all can be answered at once.
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    service_tier: Any = None  # Any: of OpenAI's tiers two say something here

    @property
    def session(self) -> str:
        """By what the client means to be known when it comes again; "" where it says nothing."""
        hint = self.prompt_cache_key or self.session_id
        return hint if isinstance(hint, str) else msgspec.json.encode(hint).decode() if hint else ""

    @property
    def precedence(self) -> int:
        """The priority asked for, by number or by tier."""
        tier = TIERS.get(self.service_tier, 0) if isinstance(self.service_tier, str) else 0
        return tier if self.priority is None else self.priority


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledCustom(msgspec.Struct, kw_only=True):
    """The custom tool of a tool call."""

    name: str
    input: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer, with one of function and custom."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message. Only an answer or a tool's result may be without content."""

    role: Role
    content: str | list[Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prompt_cache_breakpoint: bool | dict[str, Any] | None = None


class ConversationRequest(CommonRequest, kw_only=True):
    """What Chat and Responses take beside it."""

    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    reasoning_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None  # the same; -1: no limit
    tool_choice: ToolMode | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(ConversationRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None  # wins over max_tokens
    max_tokens: Count | None = None
    logprobs: bool | None = None
    reasoning_effort: Effort | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """The body of POST /v1/completions."""

    # One text, several, one list of ids, or several: msgspec can not say that a list is all of one kind, `completions` checks it.
    prompt: str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0 only with echo
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: one of prompt, content and messages."""

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class ClearRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/cache/clear, which may be left out."""

    model: str | None = None


class LoadRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/models/load."""

    model: SomeText
    fetch: bool | None = None  # download it where it is not on this machine
    force: bool | None = None  # try it even if it does not fit


class UnloadRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/models/unload. The name is never left out: it ends answers."""

    model: SomeText


# Known and not done, or not on this wire: refused, unless null or one of these values, with which it would not act.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "thinking_token_budget": (),
    "reasoning_budget_tokens": (-1,),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "repetition_detection": (),
    "draft_model": (),
    "logprobs_mode": (),
    "return_progress": (False,),
    "timings_per_token": (False,),
}

# Known, and without effect on the answer: labels, hints, and shades of what is refused above.
HARMLESS = frozenset(
    """
    user metadata store safety_identifier verbosity parallel_tool_calls
    prompt_cache_options prompt_cache_retention ttl request_id
    guided_decoding_backend
    xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    """.split()  # noqa: SIM905 - a list literal would fill a page
)

Request = TypeVar("Request", bound=msgspec.Struct)


def understood(
    body: dict[str, Any],
    kind: type[Request],
    not_here: Mapping[str, tuple[Any, ...]] = NOT_YET,
    harmless: frozenset[str] = HARMLESS,
) -> tuple[Request, tuple[str, ...]]:
    """The body's fields that act, and the names of those nobody knows. Raises InvalidRequest or UnsupportedParameter."""
    rest = {name: value for name, value in body.items() if value is not None and name not in kind.__struct_fields__}
    for name, idle in not_here.items():
        if name in rest and not _is_among(rest[name], idle):
            values = "".join(f" or set it to {msgspec.json.encode(value).decode()}" for value in idle)
            raise UnsupportedParameter(f"{name} is not supported here; leave it out{values}", name)
    return converted(body, kind), tuple(sorted(rest.keys() - not_here.keys() - harmless))


def converted(body: dict[str, Any], kind: type[Request], place: str = "") -> Request:
    """The body as a struct. Raises InvalidRequest with the place of the first misfit, as in `messages[0].content`."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), place) from None


def _explained(error: str, place: str) -> InvalidRequest:
    """msgspec's words, and its path as OpenAI writes it: Expected `int`, got `str` - at `$.prompt[0]`."""
    found = re.fullmatch(r"(.*) - at (?:`key` in )?`\$\.?(.*)`", error, re.DOTALL)
    words, param = found.groups() if found else (error, "")
    param = f"{place}.{param.replace('[...]', '')}".strip(".")
    if missing := re.fullmatch("Object missing required field `(.*)`", words):
        param = f"{param}.{missing[1]}".removeprefix(".")
        return InvalidRequest(f"{param} is required", param)
    efforts = dict.fromkeys(("effort", "reasoning_effort"), get_args(Effort))
    choices = {"role": get_args(Role), "response_format.type": get_args(FormatType), **efforts}
    known = choices.get(param, choices.get(param.rpartition(".")[2], ()))
    hint = f"; known are {', '.join(known)}" if known and words.startswith("Invalid enum") else ""
    return InvalidRequest(f"{param}: {words[0].lower()}{words[1:]}{hint}", param)


def _is_among(value: Any, harmless: Sequence[Any]) -> bool:
    # JSON's true is not 1, though Python's is.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless)
