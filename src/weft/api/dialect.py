"""Shared code of the API dialects (OpenAI, Anthropic, Ollama); each has a `translate` function and a subclass of `Reply`."""

import base64
import difflib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.limits import MAX_ENTRIES, MAX_LABEL_CHARACTERS, MAX_STOP_CHARACTERS, MAX_STOPS, Sampling
from weft.ipc.messages import GrammarSpec
from weft.text.types import CallArguments, Delta, Effort, Finish, GenerationRequest, Reasoning, Role, Text, Usage

EVENTS = "text/event-stream; charset=utf-8"
SEAL = "weft"  # prefix of the strings that `seal` makes
BUDGET = "thinking_token_budget"
BUDGET_NAMES = (BUDGET, "thinking_budget", "reasoning_budget", "reasoning_budget_tokens", "max_thinking_tokens")
BUDGET_PLACES = (*BUDGET_NAMES, *(f"{outer}.{name}" for outer in ("chat_template_kwargs", "options") for name in BUDGET_NAMES))
BUDGET_PLACES += ("thinking.budget_tokens", "reasoning.max_tokens")
CONSTRAINING = frozenset("budget schema grammar guided regex choice format stop max min".split())  # noqa: SIM905 - words
ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')

SomeText = Annotated[str, Meta(min_length=1)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARACTERS)]
SomeLabel = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARACTERS)]
Entries = Annotated[dict[str, Any], Meta(max_length=MAX_ENTRIES)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
FormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class ReplyHeader:
    """Values common to all chunks of one reply: request id, creation time, model name, fingerprint and sampling."""

    id: str  # the request's id, without a dialect's prefix
    created: int  # seconds since 1970
    model: str  # the served model's name
    fingerprint: str  # versions of weft and mlx
    sampling: Sampling | None = None  # with the model's defaults; None while these are not known


class Reply:
    """Base class that encodes deltas in one API dialect, as frames (bytes) of a stream or as one JSON body."""

    def __init__(self) -> None:
        self.collected: defaultdict[int, list[Delta]] = defaultdict(list)  # by choice, for the body

    def frame_opening(self) -> bytes:
        """Return the frames sent right after the HTTP headers, before the usage for `frame_start` is known; b"" by default."""
        return b""

    def frame_start(self, _usage: Usage, /) -> bytes:
        """Return the frames sent once before the first deltas, when prompt token counts are known; b"" by default."""
        return b""

    def frame_deltas(self, choice: int, deltas: Sequence[Delta]) -> bytes:
        """Encode new deltas of one choice as frames, one run of equal kind at a time; b"" if there is nothing to show."""
        return b"".join([self.frame_run(choice, run) for run in self.runs(deltas)])

    def frame_run(self, choice: int, run: list[Delta], /) -> bytes:
        """Encode a run (consecutive deltas of one kind) of one choice as frames."""
        raise NotImplementedError

    def frame_heartbeat(self, num_computed: int, num_tokens: int, /) -> bytes:
        """Return frames that keep a silent stream alive; `num_computed` of `num_tokens` prompt tokens are prefilled."""
        raise NotImplementedError

    def frame_closing(self) -> bytes:
        """Return the frames that end a stream after every choice has finished; b"" by default."""
        return b""

    def frame_error(self, error: Exception) -> bytes:
        """Encode an error as a stream's last frames; no regular end follows, or clients would take the reply for complete."""
        raise NotImplementedError

    def collect_deltas(self, choice: int, deltas: Sequence[Delta]) -> None:
        self.collected[choice] += deltas

    def make_body(self) -> dict[str, Any]:
        """Return the JSON body of a non-streamed reply, made of the deltas given to `collect_deltas`."""
        raise NotImplementedError

    def runs(self, deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
        return (list(run) for _, run in groupby(deltas, self.kind_of))

    def kind_of(self, delta: Delta) -> Any:
        """Return the key by which consecutive deltas are grouped into runs: their type, and tool call index if they have one."""
        return type(delta), getattr(delta, "index", None)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request body: the generation to run, whether to stream, ignored fields, and how to make the `Reply`."""

    generation: GenerationRequest  # without prompts: the client wants the model loaded and nothing else
    stream: bool
    ignored: tuple[str, ...]  # unknown fields, listed in a header of the reply
    reply: Callable[[ReplyHeader], Reply]
    media_type: str = EVENTS  # of a stream
    streams_overflow: bool = False  # a prompt that is too long is reported within the stream: Codex looks for it there


@dataclass(frozen=True)
class FieldRules:
    """Rules for body fields that the request's struct lacks: refused, harmless, or (in neither list) reported as unknown.

    An unknown field whose name speaks of a constraint is refused too: an answer that ignores it would be wrong without a word.
    """

    refused: dict[str, tuple[Any, ...]]  # known but not supported; null and the listed values are accepted
    harmless: frozenset[str]  # known, and without effect on the answer
    wrappers: tuple[str, ...] = ()  # objects whose fields count as fields of the body
    reasons: Mapping[str, str] = field(default_factory=dict)  # why some of the refused are not supported

    def read(self, body: dict[str, Any], kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        """Validate a body; return its struct and the unknown fields' names. Raises InvalidRequest or UnsupportedParameter."""
        for wrapper in self.wrappers:
            body = _unwrapped(body, wrapper)
        known = kind.__struct_fields__
        if BUDGET in known:
            body = _with_one_budget(body)
        rest = {name: value for name, value in body.items() if value is not None and name not in known}
        for name, idle in self.refused.items():
            given = rest.get(name)
            # JSON's true is not 1, though Python's is.
            if name in rest and not any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in idle):
                values = "".join(f" or set it to {msgspec.json.encode(value).decode()}" for value in idle)
                why = f": {self.reasons[name]}" if name in self.reasons else ""
                raise UnsupportedParameter(f"{name} is not supported here{why}; leave it out{values}", name)
        unknown = sorted(rest.keys() - self.refused.keys() - self.harmless)
        for name in unknown:
            words = re.split("[^a-z]+", re.sub("([A-Z])", r"_\1", name).lower())
            if CONSTRAINING & {word.removesuffix("s") for word in words}:
                near = difflib.get_close_matches(name, known, 1, 0)[0]
                message = f"{name} is not known here, and without it the answer could be wrong; the nearest known name is {near}"
                raise UnsupportedParameter(message, name)
        return convert(body, kind), tuple(unknown)


def _unwrapped(body: dict[str, Any], wrapper: str) -> dict[str, Any]:
    """Return a body with the fields of its object `wrapper` beside its own. Raises InvalidRequest if two differ."""
    inner = body.get(wrapper)
    if not isinstance(inner, dict):
        return body
    for name in inner.keys() & body.keys():
        if inner[name] != body[name]:
            raise InvalidRequest(f"{wrapper}.{name} and {name} differ; send one of them", f"{wrapper}.{name}")
    return {**inner, **{name: value for name, value in body.items() if name != wrapper}}


def _with_one_budget(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose reasoning budget, by whatever names it is given, is in `thinking_token_budget`; -1 is no limit."""
    given: dict[str, int] = {}
    for place in BUDGET_PLACES:
        outer, _, name = place.rpartition(".")
        holder = body if not outer or place in body else body.get(outer)
        value = holder.get(place if holder is body else name) if isinstance(holder, dict) else None
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < -1:
            raise InvalidRequest(f"{place} must be a number of tokens, or -1 for no limit", place)
        given[place] = value
    first, budget = next(iter(given.items()), (BUDGET, -1))
    if other := next((place for place in given if given[place] != budget), None):
        raise InvalidRequest(f"{first} and {other} mean the same and differ; send one of them", other)
    rest = {name: value for name, value in body.items() if name not in BUDGET_PLACES}
    return rest if budget < 0 else {**rest, BUDGET: budget}


def convert(body: dict[str, Any], kind: type[Body], place: str = "") -> Body:
    """Convert a JSON body to a struct. Raises InvalidRequest with the path of the first mismatch, as `messages[0].content`."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:  # it says: Expected `int`, got `str` - at `$.prompt[0]`
        found = re.fullmatch(r"(.*) - at (?:`key` in )?`\$\.?(.*)`", str(error), re.DOTALL)
        words, param = found.groups() if found else (str(error), "")
        param = f"{place}.{param.replace('[...]', '')}".strip(".")
        if missing := re.fullmatch("Object missing required field `(.*)`", words):
            param = f"{param}.{missing[1]}".removeprefix(".")
            raise InvalidRequest(f"{param} is required", param) from None
        efforts = dict.fromkeys(("effort", "reasoning_effort"), get_args(Effort))
        choices = {"role": get_args(Role), "response_format.type": get_args(FormatType), **efforts}
        known = choices.get(param, choices.get(param.rpartition(".")[2], ()))
        hint = f"; known are {', '.join(known)}" if known and words.startswith("Invalid enum") else ""
        raise InvalidRequest(f"{param}: {words[0].lower()}{words[1:]}{hint}", param) from None


def decode_arguments(text: str) -> Any:
    """Decode a tool call's arguments; a number beyond the range of a float becomes the largest float. Raises ValueError."""

    def number(digits: str) -> float:
        return min(max(float(digits), -sys.float_info.max), sys.float_info.max)

    def integer(digits: str) -> float:
        is_small = len(digits) <= 20 and -(2**63) <= int(digits) < 2**64  # what can be encoded again
        return int(digits) if is_small else number(digits)

    return json.loads(text, parse_float=number, parse_int=integer)


def encode_json(value: Any) -> bytes:
    """Encode a value as one line of JSON; U+2028, U+2029 and U+0085 are escaped, as some clients split lines there."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")


def encode_event(event: dict[str, Any]) -> bytes:
    """Encode a dict as a server-sent event, whose event name is the dict's `type`."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


def join_texts(deltas: Iterable[Delta], *kinds: type[Text | Reasoning | CallArguments]) -> str:
    """Concatenate the texts of the deltas of these kinds; without kinds, of all Text, Reasoning and CallArguments."""
    return "".join([delta.text for delta in deltas if isinstance(delta, kinds or (Text, Reasoning, CallArguments))])


def schema_verdict(finish: Finish) -> dict[str, Any]:
    """Return a `schema_validation` field for an answer checked against a non-strict schema; {} if it was not checked."""
    if finish.schema_errors is None:
        return {}
    return {"schema_validation": {"valid": not finish.schema_errors, "errors": finish.schema_errors}}


def pick_fields(value: Any, *names: str) -> dict[str, Any]:
    """Return the attributes of an object that have these names, as a dict."""
    return {name: getattr(value, name) for name in names}


def reused_fields(usage: Usage) -> dict[str, Any]:
    """Return how many prompt tokens the prefix cache matched and why no more, as a dict; {} if the engine did not report it."""
    names = ("matched", "cause", "position", "token", "instead", "why")
    return {} if usage.reuse is None else pick_fields(usage.reuse, *names)


def placement_fields(usage: Usage) -> dict[str, Any]:
    """Return the replica of a prompt, how much of it was cached there, and the most that any had; {} if there is only one."""
    placement = usage.placement
    if placement is None:
        return {}
    return {"replica": {"name": placement.replica, "matched": placement.matched, "best_matched": placement.best}}


def kept_tokens(usage: Usage) -> int:
    """Return the cache-write tokens: prompt tokens newly computed and cached, without the last; 0 if caching was off."""
    is_retained = usage.reuse is not None and usage.reuse.cause != "off"
    return max(usage.prompt_tokens - usage.cached_tokens - 1, 0) if is_retained else 0


def request_ids(given: str) -> Iterator[str]:
    """Yield the request ids that a client's id may mean: the id itself, and without its prefix and the letters made unique."""
    yield given
    for prefix in ("chatcmpl-", "cmpl-", "msg_", "resp_"):
        if given.startswith(prefix):
            plain = given.removeprefix(prefix)
            yield from dict.fromkeys((plain, re.sub(r"\.[0-9a-f]{8}\Z", "", plain)))


def seal(reasoning: str) -> str:
    """Encode reasoning (base64, not encrypted) as an opaque string that the client sends back in its next request."""
    return f"{SEAL}:{base64.b64encode(reasoning.encode()).decode()}"


def unseal(sealed: str) -> str:
    """Decode the reasoning from a string made by `seal`; return "" for any other string."""
    name, _, data = sealed.partition(":")
    try:
        return base64.b64decode(data, validate=True).decode() if name == SEAL else ""
    except ValueError:  # not base64, or not UTF-8
        return ""
