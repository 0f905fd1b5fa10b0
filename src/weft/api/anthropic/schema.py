"""The request bodies of Anthropic's wire as typed fields, and what becomes of every other field.

The rules are those of OpenAI's wires: a field acts, is refused when it would act, changes nothing by design, or is unknown and
told back to the client. Knows nothing of conversations or sampling; `messages` and `openapi` use it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.api.openai.schema import SomeText
from weft.text.types import Effort

BlockFields = {"type": {"type": "string"}, "cache_control": {"type": ["object", "null"]}}
Block = Annotated[dict[str, Any], Meta(extra_json_schema={"required": ["type"], "properties": BlockFields})]
RoleName = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]  # `messages` checks it


class InputMessage(msgspec.Struct, kw_only=True):
    """One message. A system message may stand anywhere; an answer at the end is gone on with."""

    role: RoleName
    content: str | list[Block]


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think, and how much of it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How the answer should be."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """About the request."""

    user_id: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Which tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ToolParam(msgspec.Struct, kw_only=True):
    """A tool. One of another type than custom, and without a schema, is one of Anthropic's own."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None  # tools stand before the first message, where a prompt is kept anyway


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens: all that the prompt is made of. Absent and null are the same."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format


class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=0)]  # 0: the prompt is computed and kept, and nothing said
    stream: bool | None = None
    stop_sequences: list[SomeText] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    seed: int | None = None  # Anthropic has none; here an answer can be had again
    metadata: Metadata | None = None


# Known and not done: refused, unless null or one of these values, with which it would not act.
NOT_DONE: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],)}

# Known, and without effect on the answer. Prompts are kept without being asked to, so a mark on all of one says nothing new.
HARMLESS = frozenset({"cache_control", "service_tier", "speed", "inference_geo", "user_profile_id", "workspace_id"})
