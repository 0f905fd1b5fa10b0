"""What the text world speaks of: a conversation, a generation asked for, and the deltas that answer it.

Values only. Every wire translates its own JSON into a `GenerationRequest` and its own events out of deltas; nothing here knows
HTTP, token ids of a model, or templates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weft.ipc.messages import FinishReason, GrammarSpec, MissCause, TokenLogprob

if TYPE_CHECKING:  # tools are made of the words here
    from weft.text.tools.selection import ToolSelection

Role = Literal["system", "developer", "user", "assistant", "tool"]
LateSystem = Literal["fold", "hoist"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Ending = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True)
class ToolCall:
    """A call the model made in an earlier turn. `arguments` is the JSON text as the client sent it."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn. Content is a text, or a list of parts as the client sent them ({"type": "text", "text": …}), or absent."""

    role: Role
    content: str | list[dict[str, Any]] | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    breakpoints: tuple[int, ...] = ()  # parts after which a later prompt may part from this one; a text is part 0
    place: str | None = field(default=None, compare=False)  # in the request, for errors; None: messages[its index]


@dataclass(frozen=True)
class Conversation:
    """What is to be written down by the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's shape: {"type": "function", "function": {…}}
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is an answer begun, to be gone on with


Prompt = Conversation | str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request in the text world, whichever wire it came by. One choice per prompt and `n`."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: dict[str, Any]  # the fields of wire.Sampling that the client gave; the model's advice fills the rest
    n: int = 1
    stops: tuple[str, ...] = ()
    echo: bool = False  # the prompt's text comes first, with its log-probabilities where those are asked for
    split_thinking: bool = True  # thinking is told apart from the answer
    grammar: GrammarSpec | None = None  # what the answer must look like
    tool_choice: ToolSelection | None = None  # which tools may be called; None: there are none
    thinking_budget: int | None = None  # tokens that may be thought before the answer
    effort: Effort | None = None  # how much to think, in OpenAI's words; the model's scribe knows what that means
    skip_special_tokens: bool = True
    cache_salt: str = ""  # what was computed of its prompts is shared only under the same one
    session: str = ""  # in the client's words: it will come again with more of the same
    client: str = ""  # who asks; clients take turns
    dialect: str = ""  # by which it came
    priority: int = 0  # higher ones go first
    is_flexible: bool = False  # thinking that a model has not, or more tokens than there is room for, is no error but left out


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the wires show it: its text, its exact bytes, and its log-probability where that was asked for."""

    id: int
    text: str
    bytes: bytes
    logprob: TokenLogprob | None = None
    top: tuple[Token, ...] = ()  # the likeliest at its place, likeliest first, each with its own log-probability


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer; `tokens` only where log-probabilities were asked for."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """The model calls a tool. What follows under the same index, counted from 0 within a choice, belongs to it."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments, as generated; all of them together are the arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """A call is complete and its arguments are a JSON object. A call that is never closed was cut short or is broken."""

    index: int


@dataclass(frozen=True, slots=True)
class ReuseExplanation:
    """How far a prompt was known before, and why no further. `wire.PrefixReuse` says the same in ids."""

    cause: MissCause
    matched: int  # tokens that were there
    why: str  # a sentence for people
    position: int | None = None  # of the first token that is not known
    before: str = ""  # the text in front of it
    token: str | None = None  # its text
    instead: str | None = None  # what the nearest known prompt has there


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and times of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    reuse: ReuseExplanation | None = None  # None: the engine does not say


@dataclass(frozen=True, slots=True)
class Finish:
    """Why it ended; `stop` is the stop string or token id that ended it, where one did."""

    reason: Ending
    stop: str | int | None = None
    usage: Usage | None = None
    schema_errors: tuple[str, ...] | None = None  # of a schema that was not strict: where the answer leaves it; (): nowhere


CallDelta = CallOpened | CallArguments | CallClosed
ContentDelta = Text | Reasoning | CallDelta
Delta = ContentDelta | Finish
