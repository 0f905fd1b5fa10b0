"""The messages between front and engine process; the unions `ToEngine` and `ToFront` list all that the channel carries."""

import hashlib
import re
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
# The first rule of a grammar in Lark, with what may stand around its name; GBNF has `::=` there.
START_RULE = re.compile(r"^\s*[!?]*start\s*(?:\[[^\]\n]*\]\s*)?:(?!:=)", re.MULTILINE)


class GrammarSpec(msgspec.Struct, frozen=True):
    """The grammar that an answer must match (JSON schema, regex, choice, Lark, structural tag), as text, not yet compiled."""

    kind: Literal["json_schema", "regex", "choice", "lark", "structural_tag"]
    text: str  # JSON text for json_schema, choice (a list of texts) and structural_tag
    lenient: bool = False  # json_schema: leave out the keywords that can not be enforced, instead of refusing them
    is_ours: bool = False  # lark: written by weft for tools, which may be many; a client's own may be less ambiguous


class ReasoningSpec(msgspec.Struct, frozen=True):
    """How a sequence reasons before its answer: markers, token budget, forbidden text. A grammar applies only after it."""

    open: str  # the markers around it
    close: str
    opened: bool  # the prompt ends inside the reasoning
    may_open: bool  # the answer may begin with the open marker
    budget: int | None = None  # tokens of reasoning, then the close marker is forced; None: no limit
    gap: str = ""  # what the model was trained to write between the close marker and the answer
    forbidden: str = ""  # a text that must not come within the reasoning
    begin: str = ""  # what the model was trained to write in front of an answer without reasoning
    reopens: bool = False  # behind the answer's beginning the open marker's own token begins a further section


class ConstraintSpec(msgspec.Struct, frozen=True):
    """All constraints on the tokens of one request's answers: optional grammar, rules for reasoning, and limits of the whole."""

    grammar: GrammarSpec | None = None
    reasoning: ReasoningSpec | None = None
    begun: str = ""  # the beginning of the grammar's answer, which the prompt ends with
    allowed_tokens: tuple[int, ...] | None = None  # there are no others, but for markers that are forced
    bad_words: tuple[str, ...] = ()  # texts that do not occur


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token, and those of the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PrefixReuse(msgspec.Struct, frozen=True, array_like=True):
    """How many prompt tokens could be reused from the prefix cache when prefill began, and why not more (`cause`).

    whole: all but the last tokens were cached. differs: at `position` every cached prompt has another token. cut: more tokens
    are cached, in chunks that end elsewhere. checkpoint: more are cached, but not the states of every layer. evicted: more
    were cached, and were evicted. salt: nothing was requested under this salt before. logprobs: the prompt's
    log-probabilities were requested, so the whole prompt had to be computed. off: there is no prefix cache.
    """

    cause: MissCause
    matched: int = 0  # tokens that were cached
    position: int | None = None  # of the first token that is not cached
    token: int | None = None  # the prompt's token at that position
    instead: int | None = None  # the token that the nearest cached prompt has there


class DraftCounts(msgspec.Struct, frozen=True):
    """How many draft tokens were verified and how many of them accepted, by source: forced, lookup, prediction, mtp."""

    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(_sum(self.drafted, other.drafted), _sum(self.accepted, other.accepted))

    def __sub__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(_sum(self.drafted, other.drafted, -1), _sum(self.accepted, other.accepted, -1))

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted.values())

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted.values())


def _sum(one: dict[str, int], other: dict[str, int], sign: int = 1) -> dict[str, int]:
    return {name: one.get(name, 0) + sign * other.get(name, 0) for name in {**one, **other}}


class Timings(msgspec.Struct, kw_only=True):
    """When one sequence was submitted, admitted, emitted its first token and finished, in seconds of the engine's clock."""

    submitted: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # of the prompt, not computed for this sequence
    reuse: PrefixReuse | None = None
    drafts: DraftCounts | None = None  # None: no draft token was verified


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token of a sequence, or its end, or both; a sequence's first and last event carry its timings."""

    sequence: int
    token: int | None
    logprob: TokenLogprob | None = None  # of `token`, or of `stop`
    finish: FinishReason | None = None
    error: str | None = None
    stop: int | None = None  # the end token that was sampled and not emitted
    timings: Timings | None = None
    is_refused: bool = False  # the error is the request's own: its grammar can not go on


class PromptEvent(msgspec.Struct, frozen=True, array_like=True):
    """Prefill progress of a sequence: prompt tokens computed so far; the last event carries the prompt logprobs requested."""

    sequence: int
    computed: int
    logprobs: tuple[TokenLogprob, ...] | None = None


class SubmitOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Engine's answer to a Submit: acceptance of a constrained request, or why a request is refused; precedes other events."""

    sequence: int  # the first of the request's
    refusal: str | None = None
    param: str | None = None


class EngineStatus(msgspec.Struct, frozen=True):
    """Numbers of rows running, waiting and decoded alone, memory use, prefix cache counters, and sequences in prefill."""

    running: int = 0
    waiting: int = 0
    memory: dict[str, int] = {}  # bytes by kind
    prefixes: dict[str, int] = {}  # what happened to cached prefixes so far, by kind: evicted, loaded, damaged, …
    prefilling: tuple[int, ...] = ()  # sequences whose prompt is being computed
    following: tuple[int, ...] = ()  # sequences that wait for a chunk which another computes
    alone: dict[str, int] = {}  # rows so far that decoded alone, not in a batch, by cause: model, short, geometry
    drafts: DraftCounts = DraftCounts()  # of all sequences so far
    num_drafts: int = 0  # drafts verified so far, of one or more tokens each
    accepted_at: tuple[int, ...] = ()  # by place in a draft: tokens accepted so far
    images: dict[str, float] = {}  # so far: images encoded, hits (those whose features were kept), seconds of encoding
    seconds_per_token: float = 0.0  # of prefill, as measured lately; 0: nothing was computed yet
    queued_tokens: int = 0  # prompt tokens of all requests that are not computed yet


class ReportedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A prompt chunk in an engine's prefix cache: the key of its path, of the path before it, and its number of tokens."""

    key: bytes
    parent: bytes
    size: int
    has_checkpoint: bool  # a prompt can go on from its end


IMAGE_KEYS = 1 << 31  # ids from here on stand for a place of an image in what prompts are compared by


class Image(msgspec.Struct, frozen=True, array_like=True):
    """One image of a prompt: where its tokens are, how many rows and columns of them, and its pixels, resized for the model."""

    start: int  # of its tokens in the prompt
    rows: int
    columns: int
    key: bytes  # digest of pixels and size: equal keys are equal images
    pixels: bytes  # RGB, row by row; a token stands for a square of as many pixels as the model has it
    row_ends: int = 0  # tokens behind each row that are no part of the picture, as text is not

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.columns + self.row_ends)

    @property
    def num_features(self) -> int:
        return self.rows * self.columns

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Places in the prompt of its tokens without those of row ends, in runs [start, end)."""
        if not self.row_ends:
            return [(self.start, self.end)]
        starts = range(self.start, self.end, self.columns + self.row_ends)
        return [(start, start + self.columns) for start in starts]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: generate an answer to this prompt for each sampling."""

    numbers: tuple[int, ...]  # of the sequences, one for each sampling
    prompt: list[int]
    samplings: tuple[Sampling, ...]
    constraint: ConstraintSpec | None = None
    boundaries: tuple[int, ...] = ()  # where later prompts may diverge from this one: chunks end there too
    salt: str = ""  # prefixes and compiled grammars are shared only under the same salt
    scope: str = ""  # and only within the same scope, which is a tenant's
    tenant: str = ""  # whose it is: tenants take turns
    client: str = ""  # which session of the tenant's, or which client: these take turns within its turns
    priority: int = 0  # higher ones of the same tenant go first
    rank: int = 0  # higher ones of all tenants go first
    is_retained: bool = False  # the client will come back: its prefixes are worth more
    emitted: tuple[tuple[int, ...], ...] = ()  # by sampling: tokens that earlier engines emitted; the answer goes on after them
    prediction: tuple[int, ...] = ()  # tokens that the client expects in the answer: drafts are looked up there too
    speculate: bool = True  # whether draft tokens may be verified for it
    images: tuple[Image, ...] = ()  # in the prompt's order; their places hold the model's image token
    served: tuple[float, float] = (0.0, 0.0)  # what its tenant and its client have had from all replicas, as fairness weighs it

    @property
    def owner(self) -> tuple[str, str]:
        """For whom what is computed may be kept: a scope and a salt in it."""
        return self.scope, self.salt

    @property
    def keyed_prompt(self) -> list[int]:
        """The prompt with a key at each place of an image, of its content and the place in it.

        So prompts have a prefix in common only as far as their images are equal, and each place has 31 bits of its own to
        differ in.
        """
        if not self.images:
            return self.prompt
        found = list(self.prompt)
        for image in self.images:
            for place in range(image.num_tokens):
                digest = hashlib.blake2b(image.key + place.to_bytes(4, "little"), digest_size=4).digest()
                found[image.start + place] = IMAGE_KEYS | int.from_bytes(digest, "little") >> 1
        return found


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: cancel these sequences, because nobody waits for them any more."""

    numbers: tuple[int, ...]


class AskPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: list the cached prefixes, first evicting unused ones if `clear`; the reply is Prefixes with this number."""

    number: int
    clear: bool = False  # evict first what no running sequence uses, on disk too
    scope: str | None = None  # list those of this scope alone, numbered by themselves, with sizes of their own; None: all


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: end the process now, without finishing the running sequences."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: loading progress, with what is being fetched, converted or read and how many of its bytes are done."""

    what: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the model is loaded; carries its name, folder, limits, device and memory use."""

    model: str  # the served name; the fallback's where the model could not be had
    folder: str
    limits: Limits
    max_rows: int
    device: str
    versions: str
    memory: dict[str, int] = {}
    notice: str | None = None  # what the operator should know
    speculation: tuple[str, ...] = ()  # the sources of draft tokens in use
    no_speculation: dict[str, str] = {}  # by source that was asked for and is not in use: why
    weights: str = ""  # digest of weights and config; empty: not known, and the folder stands for them
    has_vision: bool = False  # images may be sent
    no_vision: str | None = None  # why not, where the model should have it


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the model can not be loaded, and trying again would not help."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: heartbeat, with the number of turns its loop has begun and the seconds since the last one began."""

    turns: int
    turn_seconds: float


class EngineEvents(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: submit outcomes, prefill progress and tokens since the last such message; status when it is due."""

    outcomes: list[SubmitOutcome] = []
    prompts: list[PromptEvent] = []
    tokens: list[TokenEvent] = []
    status: EngineStatus | None = None
    kept: list[ReportedChunk] = []  # what the prefix cache got, where the front wants to know it
    gone: list[bytes] = []  # keys of what it evicted


class PrefixNode(msgspec.Struct, frozen=True, array_like=True):
    """One node of the prefix tree: a chunk of a cached prompt with its tokens, size, and how it is used."""

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
    """Engine → front: the reply to AskPrefixes, with the nodes of the prefix tree and the bytes they take."""

    number: int
    nodes: tuple[PrefixNode, ...]  # the most recently used first, parents before children; not all of very many
    num_nodes: int
    held_bytes: int
    budget_bytes: int
    disk_bytes: int = 0
    num_cleared: int = 0


# Between a front and the gate of an engine on another machine (`serving/gate.py`).

PROTOCOL = 1  # of all messages in this file; fronts and gates with another number do not talk to each other


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Front → gate: the first message of a session."""

    protocol: int
    version: str  # of weft, for people
    front: str  # by which it is known again after a connection was lost


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Front → gate: the front is there; one that is silent for long loses its sequences."""


class FetchFiles(msgspec.Struct, frozen=True, tag=True):
    """Front → gate: send these files of the model's folder."""

    names: tuple[str, ...]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Gate → front: the answer to Hello; with another protocol nothing follows it."""

    protocol: int
    version: str


class GateReady(msgspec.Struct, frozen=True, tag=True):
    """Gate → front: the engine is ready; the front needs these files of its model, by name with their digests."""

    ready: Ready
    files: dict[str, str]


class ModelFile(msgspec.Struct, frozen=True, tag=True):
    """Gate → front: one of the files asked for; empty where it can not be read any more."""

    name: str
    data: bytes


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Gate → front: send nothing new, the engine is being stopped; `is_over`: what has not ended must go on elsewhere now."""

    is_over: bool = False


class SessionEnded(msgspec.Struct, frozen=True, tag=True):
    """Gate → front: this session has no sequences here any more, because the engine has ended, or the front was silent."""

    why: str
    is_crash: bool = False  # the engine crashed or hung, which may have been a sequence's doing


ToEngine = EngineSettings | Submit | Cancel | AskPrefixes | Shutdown
ToFront = EngineEvents | Beat | Prefixes | Loading | Ready | Failed | Leaving
ToGate = Hello | Alive | FetchFiles | Submit | Cancel | AskPrefixes  # no settings, no Shutdown: fronts do not own the engine
FromGate = Welcome | GateReady | ModelFile | SessionEnded | Leaving | EngineEvents | Beat | Prefixes | Loading | Failed
