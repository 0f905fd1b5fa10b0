"""Shared code of the API dialects (OpenAI, Anthropic, Ollama); each has a `translate` function and a subclass of `Reply`."""

import base64
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.ipc.limits import MAX_LABEL_CHARACTERS, MAX_STOP_CHARACTERS, MAX_STOPS, Sampling
from weft.ipc.messages import GrammarSpec
from weft.text.types import CallArguments, Delta, Finish, GenerationRequest, Reasoning, Text, Usage

EVENTS = "text/event-stream; charset=utf-8"
SEAL = "weft"  # prefix of the strings that `seal` makes
ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')

SomeText = Annotated[str, Meta(min_length=1)]
SomeLabel = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARACTERS)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]


@dataclass(frozen=True)
class ReplyHeader:
    """Values common to all chunks of one reply: request id, creation time, model name, fingerprint and sampling."""

    id: str  # the request's id, without a dialect's prefix
    created: int  # seconds since 1970
    model: str  # the served model's name
    fingerprint: str  # versions of weft and mlx
    read_sampling: Callable[[], Sampling | None] = lambda: None  # asked when a frame is made: a reply may wait for its engine

    @property
    def sampling(self) -> Sampling | None:
        """The request's sampling with the model's defaults; None while these are not known."""
        return self.read_sampling()


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


def decode_arguments(text: str) -> Any:
    """Decode a tool call's arguments into what JSON can hold again. Raises ValueError.

    A number beyond the range of a float becomes the largest float, half a surrogate pair becomes U+FFFD, and NaN a text.
    """

    def number(digits: str) -> float:
        return min(max(float(digits), -sys.float_info.max), sys.float_info.max)

    def integer(digits: str) -> float:
        is_small = len(digits) <= 20 and -(2**63) <= int(digits) < 2**64  # what can be encoded again
        return int(digits) if is_small else number(digits)

    def constant(word: str) -> float | str:
        return word if word == "NaN" else number(word)

    decoded = json.loads(text, parse_float=number, parse_int=integer, parse_constant=constant)
    return _whole_characters(decoded) if "\\ud" in text.lower() else decoded


def _whole_characters(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_whole_characters(one) for one in value]
        case dict():
            return {_whole_characters(name): _whole_characters(one) for name, one in value.items()}
        case _:
            return value


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
