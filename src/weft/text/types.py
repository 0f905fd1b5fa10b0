"""Data types of the text layer: conversations, generation requests, and the deltas that make up an answer."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weft.ipc.messages import DraftCounts, FinishReason, GrammarSpec, MissCause, TokenLogprob

if TYPE_CHECKING:  # tools are made of the types here
    from weft.text.tools.tool import ToolSelection

Role = Literal["system", "developer", "user", "assistant", "tool"]
LateSystem = Literal["fold", "hoist"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Ending = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model made in an earlier turn; `arguments` is unparsed JSON text."""

    name: str
    arguments: str
    id: str | None = None
    place: str | None = field(default=None, compare=False)  # path in the request, for errors; None: its message's tool_calls[…]


@dataclass(frozen=True)
class Message:
    """One message of a conversation; `content` is a string, a list of parts, or None.

    Parts are texts ({"type": "text", "text": …}) and images, in the form in which the dialect has them.
    """

    role: Role
    content: str | list[dict[str, Any]] | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    breakpoints: tuple[int, ...] = ()  # parts after which a later prompt may diverge from this one; a text is part 0
    place: str | None = field(default=None, compare=False)  # path in the request, for errors; None: messages[its index]

    @property
    def texts(self) -> list[str]:
        """The texts of the content's parts, empty for images; string content is one part, absent content one empty string."""
        content = self.content or ""
        return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


@dataclass(frozen=True)
class Conversation:
    """Messages, tools and template options that the model's chat template renders into one prompt."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's shape: {"type": "function", "function": {…}}
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is the beginning of the answer


Prompt = Conversation | str | tuple[int, ...]


@dataclass(frozen=True)
class ReasoningAsked:
    """A wish for reasoning: an effort, none of it, or, without an effort, as much as the model likes."""

    effort: Effort | None
    place: str  # the client's field, for errors
    is_limit: bool = False  # it is only implied by a budget
    is_flexible: bool = False  # left out where the model can not do it

    @property
    def words(self) -> str:
        is_switch = self.effort is None or (self.effort == "none" and not self.place.endswith("effort"))
        return self.place if is_switch else f"{self.place} {self.effort}"


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A generation request, independent of the API dialect it came in; it produces `n` choices for each prompt."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: dict[str, Any]  # the fields of `Sampling` that the client gave; the model's recommendation fills the rest
    n: int = 1
    stops: tuple[str, ...] = ()
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens
    returns_ids: bool = False  # the reply has the ids of prompt and answer
    echo: bool = False  # the prompt's text comes first, with its log-probabilities where those are requested
    split_thinking: bool = True  # the reasoning is separated from the answer
    grammar: GrammarSpec | None = None  # what the answer must look like
    allowed_token_ids: tuple[int, ...] | None = None  # all tokens that may be sampled; None: any
    bad_words: tuple[str, ...] = ()  # texts that do not occur in the output
    tool_choice: "ToolSelection | None" = None  # which tools may be called; None: there are none
    thinking_budget: int | None = None  # reasoning tokens before the answer
    effort: Effort | None = None  # how much to reason, in OpenAI's words; the model's codec knows how to get that
    reasons: bool = False  # reasoning is to be on, without a word of how much
    effort_place: str = field(default="reasoning_effort", compare=False)  # the client's fields that say so, for errors
    budget_place: str = field(default="thinking_token_budget", compare=False)
    skip_special_tokens: bool = True
    cache_salt: str = ""  # cached prefixes are shared only among requests with the same salt
    session: str = ""  # the client's name for a conversation that will come again with more turns
    tenant: str = ""  # whose it is; the scheduler is fair between tenants
    client: str = ""  # who sent it; the scheduler is fair between a tenant's clients
    scope: str = ""  # within which cached prefixes are shared
    hides_texts: bool = False  # others share them, so reports do not quote them
    dialect: str = ""
    priority: int = 0  # requests with a higher number go before others of the same tenant
    rank: int = 0  # and those with a higher rank before others of all tenants
    prediction: str | None = None  # a text that the answer is expected to contain much of
    speculate: bool = True  # whether draft tokens may be verified for it
    penalty_windows: tuple[str, ...] = ()  # fields that bound how far back penalties look: refused if one of these acts
    is_flexible: bool = False  # reasoning that the model can not do, or more tokens than fit, are left out instead of refused

    @property
    def reasoning_asked(self) -> ReasoningAsked | None:
        """What is asked for; None: it is left to the model. A budget alone is a wish for reasoning, too."""
        if self.effort is not None or self.reasons:
            return ReasoningAsked(self.effort, self.effort_place, is_flexible=self.is_flexible)
        return (
            ReasoningAsked(None, self.budget_place, is_limit=True, is_flexible=self.is_flexible) if self.thinking_budget else None
        )


@dataclass(frozen=True, slots=True)
class Token:
    """A token as API replies show it: its text, its exact bytes, and its log-probability if that was requested."""

    id: int
    text: str
    bytes: bytes
    logprob: TokenLogprob | None = None
    top: tuple["Token", ...] = ()  # the likeliest tokens at this position, likeliest first, each with its own log-probability


@dataclass(frozen=True, slots=True)
class Text:
    """A delta of answer text; `tokens` is empty unless log-probabilities were requested."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A delta of reasoning text, which is kept apart from the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """The delta that starts a tool call; later deltas of this call have the same index, counted from 0 within a choice."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A delta of a tool call's arguments: the next piece of their JSON text, to be concatenated with the others."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The delta that ends a tool call whose arguments are a JSON object; a truncated or malformed call never gets one."""

    index: int


@dataclass(frozen=True, slots=True)
class ReuseExplanation:
    """How much of a prompt was cached and why not more: the engine's `PrefixReuse` with texts instead of token ids."""

    cause: MissCause
    matched: int  # tokens that were cached
    why: str  # a sentence for people
    position: int | None = None  # of the first token that was not cached
    before: str = ""  # the text in front of it
    token: str | None = None  # its text
    instead: str | None = None  # the text of the nearest cached prompt's token there


@dataclass(frozen=True, slots=True)
class Placement:
    """The replica that a prompt was sent to, how many of its tokens were cached there, and the most that any replica had."""

    replica: str
    matched: int
    best: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token and draft counts, timings and prefix-cache explanation of one choice, or of a request with all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    image_tokens: int = 0  # of the prompt's
    reasoning_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    reuse: ReuseExplanation | None = None  # None: the engine did not report it
    drafts: DraftCounts = field(default_factory=DraftCounts)
    placement: Placement | None = None  # None: the model has one replica


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The tokens of a prompt, with log-probabilities if those are requested, and those of an answer with its end token."""

    prompt: tuple[Token, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The last delta of a choice: why it ended, its usage, and in `stop` the stop string or token id that ended it, or None."""

    reason: Ending
    stop: str | int | None = None
    usage: Usage | None = None
    schema_errors: tuple[str, ...] | None = None  # where the answer violates a schema that was not strict; (): nowhere
    tokens: TokenRecord | None = None  # where the request asks for them


ContentDelta = Text | Reasoning | CallOpened | CallArguments | CallClosed
Delta = ContentDelta | Finish
