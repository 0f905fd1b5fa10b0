"""The messages between front and engine: `ToEngine` and `ToFront` are what travels over the channel; nothing else crosses."""

from typing import Literal

import msgspec

from weft.config import EngineSettings
from weft.ipc.limits import Limits, Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]
MissCause = Literal["whole", "differs", "cut", "checkpoint", "evicted", "salt", "logprobs", "off"]

# How JSON under a schema is written, in llguidance's words; front and engine must agree on it.
JSON_OPTIONS = {
    # A line break with its indent, or a blank: what pretty-printed JSON needs. Unbounded, a model may go on for ever.
    "whitespace_pattern": r"[ ]|\n[ ]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',  # others could write a key a second time in other letters
    "json_allow_general_unicode_escapes": False,
}


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like, as the request states it. The engine compiles it."""

    kind: Literal["json_schema", "regex", "choice", "lark", "structural_tag"]
    text: str  # JSON text for json_schema, choice (a list of texts) and structural_tag
    lenient: bool = False  # json_schema: leave out the keywords that can not be enforced, instead of refusing them


class ReasoningSpec(msgspec.Struct, frozen=True):
    """How a sequence reasons before it answers. A grammar holds after the reasoning."""

    open: str  # the markers around it
    close: str
    opened: bool  # the prompt ends inside the reasoning
    may_open: bool  # the answer may begin with the open marker
    budget: int | None = None  # tokens of reasoning, then the close marker is forced; None: no limit
    gap: str = ""  # what the model was trained to write between the close marker and the answer
    forbidden: str = ""  # a text that must not come within the reasoning


class ConstraintSpec(msgspec.Struct, frozen=True):
    """Everything that restricts which tokens may come next in one request."""

    grammar: GrammarSpec | None = None
    reasoning: ReasoningSpec | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a chosen token, and of the likeliest ones at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PrefixReuse(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens of a prompt were cached when its own work began, and why no more.

    whole: all but the last tokens were. differs: at `position` every cached prompt has another token. cut: the tokens are
    cached further, in chunks that end elsewhere. checkpoint: cached further, but not the states of every layer. evicted: they
    were, and had to make room. salt: nothing was requested under this salt before. logprobs: the prompt's log-probabilities
    were requested, so all of it had to be read. off: there is no prefix cache.
    """

    cause: MissCause
    matched: int = 0  # tokens that were cached
    position: int | None = None  # of the first token that is not cached
    token: int | None = None  # the prompt's token at that position
    instead: int | None = None  # the token that the nearest cached prompt has there


class Timings(msgspec.Struct, kw_only=True):
    """When things happened to one sequence, in seconds of the engine's clock."""

    submitted: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # of the prompt, not computed for this sequence
    reuse: PrefixReuse | None = None


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token of a sequence, or its end, or both. The first and the last event carry the timings."""

    sequence: int
    token: int | None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    error: str | None = None
    stop: int | None = None  # the end token that was sampled and not emitted
    timings: Timings | None = None


class PromptEvent(msgspec.Struct, frozen=True, array_like=True):
    """How many of a prompt's tokens are in memory. The last such event carries the log-probabilities requested."""

    sequence: int
    computed: int
    logprobs: tuple[TokenLogprob, ...] | None = None


class SubmitOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Whether a constrained request was accepted, or why it was refused. Comes before any event of its sequences."""

    sequence: int  # the first of the request's
    refusal: str | None = None
    param: str | None = None


class EngineStatus(msgspec.Struct, frozen=True):
    """Counters and gauges of a running engine."""

    running: int = 0
    waiting: int = 0
    memory: dict[str, int] = {}  # bytes by kind
    prefixes: dict[str, int] = {}  # what happened to cached prefixes so far, by kind: evicted, loaded, damaged, …
    prefilling: tuple[int, ...] = ()  # sequences whose prompt is being computed
    following: tuple[int, ...] = ()  # sequences that wait for a chunk which another computes


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: answer this prompt, once for each sampling."""

    numbers: tuple[int, ...]  # of the sequences, one for each sampling
    prompt: list[int]
    samplings: tuple[Sampling, ...]
    constraint: ConstraintSpec | None = None
    boundaries: tuple[int, ...] = ()  # where later prompts may diverge from this one: chunks end there too
    salt: str = ""  # prefixes are shared only under the same salt
    client: str = ""  # who sent it, for fairness
    priority: int = 0  # higher ones go first
    is_retained: bool = False  # the client will come back: its prefixes are worth more
    emitted: tuple[tuple[int, ...], ...] = ()  # by sampling: tokens that earlier engines emitted; the answer goes on after them


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: nobody waits for these sequences any more."""

    numbers: tuple[int, ...]


class AskPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: list the cached prefixes. Answered by Prefixes with the same number."""

    number: int
    clear: bool = False  # evict first what no running sequence uses, on disk too


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: end now."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: what is being fetched, converted or read, and how many bytes of it are done."""

    what: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the model is loaded, and these are its facts."""

    model: str  # the served name; the fallback's where the model could not be had
    folder: str
    limits: Limits
    max_rows: int
    device: str
    versions: str
    memory: dict[str, int] = {}
    notice: str | None = None  # what the operator should know


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the model can not be loaded, and trying again would not help."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the process is alive; how many turns its loop has begun, and how long ago the last one began."""

    turns: int
    turn_seconds: float


class EngineEvents(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: what happened in a turn. A sequence's prompt events come before its tokens."""

    outcomes: list[SubmitOutcome] = []
    prompts: list[PromptEvent] = []
    tokens: list[TokenEvent] = []
    status: EngineStatus | None = None


class PrefixNode(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a cached prompt."""

    number: int
    parent: int | None  # another node's number; None: the prompt begins here
    length: int  # tokens up to its end
    tokens: tuple[int, ...]
    nbytes: int
    has_checkpoint: bool  # a prompt can go on from its end
    pins: int  # sequences that use it now
    hits: int  # sequences that went on from it or from behind it
    idle_seconds: float
    is_salted: bool
    is_on_disk: bool


class Prefixes(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the cached prefixes."""

    number: int
    nodes: tuple[PrefixNode, ...]  # the most recently used first, parents before children; not all of very many
    num_nodes: int
    held_bytes: int
    budget_bytes: int
    disk_bytes: int = 0
    num_cleared: int = 0


ToEngine = EngineSettings | Submit | Cancel | AskPrefixes | Shutdown
ToFront = EngineEvents | Beat | Prefixes | Loading | Ready | Failed
