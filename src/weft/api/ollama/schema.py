"""The request bodies of Ollama's wire as typed fields, and what becomes of every other field.

The rules are those of OpenAI's wires: a field acts, is refused when it would act, changes nothing by design, or is unknown
and told back to the client. Fields under `options` are treated alike. Used by `chat`, `models` and `openapi`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from weft.api.openai import schema as openai
from weft.api.openai.schema import SomeText
from weft.text.types import Effort

Format = Literal["", "json"] | dict[str, Any]
Texts = SomeText | Annotated[list[SomeText], Meta(max_length=16)]


class Options(msgspec.Struct, kw_only=True):
    """How to sample. The rest of the limits is `wire.Sampling`'s."""

    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all tokens
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None  # 0 and less: the rest of the context
    stop: Texts | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A call of an earlier answer. Older programs give it no id."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    """A function that may be called: its name, description and parameters."""

    function: dict[str, Any]
    type: Literal["function"] = "function"


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What both generating endpoints take. Absent and null are the same."""

    model: str | None = None
    stream: bool | None = None  # absent: true
    format: Format | None = None
    think: bool | Effort | None = None
    options: Options | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/chat. Without messages it asks for the model to be loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/generate. Without a prompt it asks for the model to be loaded."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/show; older programs say `name`."""

    model: str | None = None
    name: str | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/embed and /api/embeddings, as far as it is read."""

    model: str | None = None


# Known and not done: refused, unless null or one of these values, with which it would not act.
NOT_DONE: dict[str, tuple[Any, ...]] = {
    "template": ("",),
    "suffix": ("",),
    "context": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
OPTIONS_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "repeat_last_n": (-1,),  # penalties look at all of prompt and answer
}
# Known, and without effect on the answer. Nothing is ever cut off a prompt, whatever `truncate` and `shift` say.
HARMLESS = frozenset({"keep_alive", "truncate", "shift"})

Request = TypeVar("Request", bound=OllamaRequest)


def understood(body: dict[str, Any], kind: type[Request]) -> tuple[Request, tuple[str, ...]]:
    """The body's fields that act, and the names of those nobody knows. Raises InvalidRequest or UnsupportedParameter."""
    options = body.get("options")
    given = options if isinstance(options, dict) else {}
    inner = {f"options.{name}": value for name, value in given.items() if name not in Options.__struct_fields__}
    refused = {f"options.{name}": values for name, values in OPTIONS_NOT_DONE.items()}
    return openai.understood({**body, **inner}, kind, NOT_DONE | refused, HARMLESS)


def plain_name(model: str | None) -> str | None:
    """A model's name as weft knows it: Ollama's programs add a tag to it."""
    return model and model.removesuffix(":latest")
