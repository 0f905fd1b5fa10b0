"""The words between text world and token world: what is asked, what came out, why it ended, how the engine fares.

Values only, no behaviour beyond checking themselves. Knows neither mlx nor HTTP; everybody may use it. `ToEngine` and
`ToFront` are what travels over the channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.errors import ContextTooLong, InsufficientMemory, InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 128
MAX_BIASES = 4096


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence chooses its tokens and when it ends. The defaults are plain greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: a fresh one for every request
    max_tokens: int | None = None  # None: the rest of the context; 0: the prompt is only read
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens, all but the first

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first parameter that can not be honoured."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p 0.0 keeps no token; use temperature 0 for greedy, or a top_p above 0", "top_p")
        _within("top_k", self.top_k, 0, None)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 0, None)
            _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _within(name, count, 0, min(MAX_LOGPROBS, vocab_size), "logprobs")
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_tokens(vocab_size)

    def _check_tokens(self, vocab_size: int) -> None:
        _within("number of logit_bias entries", len(self.logit_bias), 0, MAX_BIASES, "logit_bias")
        for token, bias in self.logit_bias.items():
            _within("logit_bias token", token, 0, vocab_size - 1, "logit_bias")
            if not -math.inf <= bias <= 1000.0:  # -inf bans a token; NaN fails both comparisons
                raise InvalidRequest(f"logit_bias {bias} for token {token} must be at most 1000 and not NaN", "logit_bias")
        for token in self.stop_token_ids:
            _within("stop_token_ids entry", token, 0, vocab_size - 1, "stop_token_ids")

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


# How JSON is written that must fit a schema, in llguidance's words.
JSON_OPTIONS = {
    # A line break with its indent, or a blank: what pretty-printed JSON needs. Without a bound a model may go on for ever.
    "whitespace_pattern": r"[ ]|\n[ ]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',  # others could write a key a second time in other letters
    "json_allow_general_unicode_escapes": False,
}


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like, in the words it was asked for. The engine compiles it."""

    kind: Literal["json_schema", "regex", "choice", "lark", "structural_tag"]
    text: str  # JSON text for json_schema, choice (a list of texts) and structural_tag
    lenient: bool = False  # json_schema: leave out the keywords that can not be enforced, instead of refusing them


class ReasoningSpec(msgspec.Struct, frozen=True):
    """How a sequence thinks before it answers. A grammar holds after the thinking."""

    open: str  # the markers around it
    close: str
    opened: bool  # the prompt ends inside the thinking
    may_open: bool  # the answer may begin with the open marker
    budget: int | None = None  # tokens that may be thought; then the close marker is forced. None: no limit
    gap: str = ""  # what the model was taught to write between the close marker and the answer
    forbidden: str = ""  # a text that must not come within it


class ConstraintSpec(msgspec.Struct, frozen=True):
    """Everything that says which tokens may come next. Belongs to one sequence and nobody else."""

    grammar: GrammarSpec | None = None
    thinking: ReasoningSpec | None = None


class Limits(msgspec.Struct, frozen=True):
    """What a model can take."""

    vocab_size: int
    context_length: int
    memory_tokens: int | None = None  # the longest row, prompt and answer, that fits into the memory there is; None: any
    memory_bytes: int = 0  # which is so much

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """The number of tokens the answer may have. Raises RequestError naming what can not be honoured."""
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            place, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < self.vocab_size)
            message = f"prompt token {token} at position {place} is outside the vocabulary of {self.vocab_size}"
            raise InvalidRequest(message, "prompt")
        sampling.check(self.vocab_size)
        room = self._room(len(prompt), sampling.max_tokens)
        return room if self.memory_tokens is None else self._memory_room(len(prompt), room, sampling.max_tokens)

    def _memory_room(self, tokens: int, room: int, wanted: int | None) -> int:
        """The same within the memory there is: an answer of no stated length may be cut there, one that was asked for not."""
        assert self.memory_tokens is not None
        asked = tokens + (room if wanted is not None else 1)
        if asked > self.memory_tokens:
            message = f"{asked} tokens ({tokens} of the prompt) do not fit into memory: {self.memory_bytes} bytes are free for"
            message += f" requests, enough for {self.memory_tokens} tokens. Shorten it, or start the server with more --memory."
            raise InsufficientMemory(message, "messages" if wanted is None else "max_tokens")
        return min(room, self.memory_tokens - tokens)

    def _room(self, tokens: int, wanted: int | None) -> int:
        # Clients recognise these sentences and shorten their history: the first half must stay word for word.
        limit, room = self.context_length, self.context_length - tokens
        if room < 1 and not (room == 0 and wanted == 0):
            message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens}"
            hint = " tokens. Please reduce the length of the messages."
            raise ContextTooLong(message + hint, "messages", limit=limit, got=tokens)
        if wanted is not None and wanted > room:
            message = f"This model's maximum context length is {limit} tokens. However, you requested {tokens + wanted} tokens"
            message += f" ({tokens} in the messages, max_tokens {wanted} for the completion)."
            hint = f" Please reduce the length of the messages, or ask for at most {room}."
            raise ContextTooLong(message + hint, "max_tokens", limit=limit, got=tokens + wanted)
        return room if wanted is None else wanted


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a chosen token, and of the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


MissCause = Literal["whole", "differs", "cut", "checkpoint", "evicted", "salt", "logprobs", "off"]


class PrefixReuse(msgspec.Struct, frozen=True, array_like=True):
    """How far a prompt was known when its own work began, and what ended that.

    whole: nothing did, all but the last tokens was there. differs: at `position` every known prompt has another token. cut:
    the tokens were known further, in chunks that end elsewhere. checkpoint: further too, but the states there were not
    kept. evicted: they were, and had to make room. salt: nothing was asked under this salt before. logprobs: the prompt's
    log-probabilities were asked for, so all of it had to be read. off: nothing is kept.
    """

    cause: MissCause
    matched: int = 0  # tokens it could stand on
    position: int | None = None  # of the first token that is not known
    token: int | None = None  # the one the prompt has there
    instead: int | None = None  # the one that the nearest known prompt has


class Timings(msgspec.Struct, kw_only=True):
    """When things happened to one sequence, in seconds of the engine's clock."""

    submitted: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # of the prompt, not computed for this sequence
    reuse: PrefixReuse | None = None


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """Engine → asker: one token of a sequence, or its end, or both. `stop` is the end token that was not told.

    The first and the last one have the timings.
    """

    sequence: int
    token: int | None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    error: str | None = None
    stop: int | None = None
    timings: Timings | None = None


class PromptEvent(msgspec.Struct, frozen=True, array_like=True):
    """Engine → asker: so many of a prompt's tokens are in memory. The last one has the log-probabilities asked for."""

    sequence: int
    computed: int
    logprobs: tuple[TokenLogprob, ...] | None = None


class SubmitOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Engine → asker: a constrained request was taken, or refused and why. Comes before anything else of its sequences."""

    sequence: int  # the first of the request's
    refusal: str | None = None
    param: str | None = None


class EngineStatus(msgspec.Struct, frozen=True):
    """How the engine fares."""

    running: int = 0
    waiting: int = 0
    memory: dict[str, int] = {}  # bytes by kind
    prefixes: dict[str, int] = {}  # what happened to computed prompts so far, by kind: evicted, loaded, damaged, …
    prefilling: tuple[int, ...] = ()  # sequences whose prompt is being computed
    following: tuple[int, ...] = ()  # those that wait for another to compute what they need too


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: answer this prompt, once for each sampling; the sequences have these numbers."""

    numbers: tuple[int, ...]
    prompt: list[int]
    samplings: tuple[Sampling, ...]
    constraint: ConstraintSpec | None = None
    boundaries: tuple[int, ...] = ()  # where a later prompt may part from this one: chunks end there too
    salt: str = ""  # prompts share what was computed only under the same one
    client: str = ""  # who asks; clients get their turns by the tokens they have had
    priority: int = 0  # higher ones go first
    is_retained: bool = False  # the client says that it will come again: what is computed is worth more
    given: tuple[tuple[int, ...], ...] = ()  # what an earlier engine has answered, for each sampling: go on from there


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: nobody waits for these sequences any more."""

    numbers: tuple[int, ...]


class AskPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: what is kept of computed prompts? Answered by Prefixes with the same number."""

    number: int
    clear: bool = False  # forget it first, as far as nobody stands on it; on disk too


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: end now."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: what it is bringing up, and how far that is."""

    what: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the model is loaded; these are its facts."""

    model: str  # the name it goes by; not the one asked for where that could not be had
    folder: str
    limits: Limits
    max_rows: int
    device: str
    versions: str
    memory: dict[str, int] = {}
    notice: str | None = None  # what the operator should know


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the model can not be brought up; trying again would not help."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: its process lives; its loop has begun so many turns, and the last one so many seconds ago."""

    turns: int
    turn_seconds: float


class EngineEvents(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: what happened in a turn. A sequence's prompt comes before its tokens."""

    verdicts: list[SubmitOutcome] = []
    prompts: list[PromptEvent] = []
    tokens: list[TokenEvent] = []
    status: EngineStatus | None = None


class PrefixNode(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a computed prompt."""

    number: int
    parent: int | None  # another one's number; None: the prompt begins here
    length: int  # tokens up to its end
    tokens: tuple[int, ...]
    nbytes: int
    has_checkpoint: bool  # a prompt can go on from its end
    pins: int  # sequences that stand on it now
    hits: int  # sequences that went on from it or from behind it
    idle_seconds: float
    is_salted: bool
    is_on_disk: bool


class Prefixes(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: what is kept of computed prompts."""

    number: int
    nodes: tuple[PrefixNode, ...]  # the most recently used first, parents before children; not all of very many
    num_nodes: int
    held_bytes: int
    budget_bytes: int
    disk_bytes: int = 0
    num_cleared: int = 0


ToEngine = Submit | Cancel | AskPrefixes | Shutdown
ToFront = EngineEvents | Beat | Prefixes | Loading | Ready | Failed


def _within(name: str, value: float, low: float, high: float | None, param: str | None = None) -> None:
    if math.isnan(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} {value} must be {limit}", param or name)
