"""What all dialects share. A dialect (OpenAI's, Anthropic's, Ollama's) is a `translate` function and a subclass of `Reply`."""

import base64
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.limits import Sampling
from weft.ipc.messages import GrammarSpec
from weft.text.types import CallArguments, Delta, Effort, Finish, GenerationRequest, Reasoning, Role, Text, Usage

EVENTS = "text/event-stream; charset=utf-8"
SEAL = "weft"  # what a seal of ours begins with
ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')

SomeText = Annotated[str, Meta(min_length=1)]
Texts = SomeText | Annotated[list[SomeText], Meta(max_length=16)]
FormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class ReplyHeader:
    """What all parts of one reply have in common."""

    id: str  # the request's id, without a dialect's prefix
    created: int  # seconds since 1970
    model: str  # the served model's name
    fingerprint: str  # versions of weft and mlx
    sampling: Sampling | None = None  # as the model does it; None while that is not known


class Reply:
    """A reply in one dialect: frames of a stream, or one body. Both are made of the same deltas, given in the same order."""

    def __init__(self) -> None:
        self.collected: defaultdict[int, list[Delta]] = defaultdict(list)  # by choice, for the body

    def frame_opening(self) -> bytes:
        """Frames sent with the headers, before any work."""
        return b""

    def frame_start(self, _usage: Usage, /) -> bytes:
        """Frames sent before those of the first deltas, when the counts of the prompt are known."""
        return b""

    def frame_deltas(self, choice: int, deltas: Sequence[Delta]) -> bytes:
        """Frames for the new deltas of one choice, run by run; b"" where there is nothing to show."""
        return b"".join([self.frame_run(choice, run) for run in self.runs(deltas)])

    def frame_run(self, choice: int, run: list[Delta], /) -> bytes:
        """Frames for consecutive deltas of one kind."""
        raise NotImplementedError

    def frame_heartbeat(self, num_computed: int, num_tokens: int, /) -> bytes:
        """Frames for a silent stream, of whose prompt `num_computed` of `num_tokens` tokens are computed."""
        raise NotImplementedError

    def frame_closing(self) -> bytes:
        """Frames sent after every choice has finished."""
        return b""

    def frame_error(self, error: Exception) -> bytes:
        """Frames for an error after the headers. No regular end follows, or clients would take the stream for complete."""
        raise NotImplementedError

    def collect_deltas(self, choice: int, deltas: Sequence[Delta]) -> None:
        self.collected[choice] += deltas

    def make_body(self) -> dict[str, Any]:
        """The body of a reply that is not streamed, made of the collected deltas."""
        raise NotImplementedError

    def runs(self, deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
        return (list(run) for _, run in groupby(deltas, self.kind_of))

    def kind_of(self, delta: Delta) -> Any:
        """What the deltas of one run have in common: their type, and the call they belong to."""
        return type(delta), getattr(delta, "index", None)


@dataclass(frozen=True)
class ParsedRequest:
    """A request body as its dialect understands it."""

    generation: GenerationRequest  # without prompts: the client wants the model loaded and nothing else
    stream: bool
    ignored: tuple[str, ...]  # unknown fields, listed in a header of the reply
    reply: Callable[[ReplyHeader], Reply]
    media_type: str = EVENTS  # of a stream
    streams_overflow: bool = False  # a prompt that is too long is reported within the stream: Codex looks for it there


@dataclass(frozen=True)
class FieldRules:
    """What becomes of the fields that a request's struct does not have; those in neither list are unknown."""

    refused: dict[str, tuple[Any, ...]]  # known and not done; null and these values would not act and are accepted
    harmless: frozenset[str]  # known, and without effect on the answer

    def read(self, body: dict[str, Any], kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        """The body as a struct, and the names of its unknown fields. Raises InvalidRequest or UnsupportedParameter."""
        rest = {name: value for name, value in body.items() if value is not None and name not in kind.__struct_fields__}
        for name, idle in self.refused.items():
            given = rest.get(name)
            # JSON's true is not 1, though Python's is.
            if name in rest and not any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in idle):
                values = "".join(f" or set it to {msgspec.json.encode(value).decode()}" for value in idle)
                raise UnsupportedParameter(f"{name} is not supported here; leave it out{values}", name)
        return convert(body, kind), tuple(sorted(rest.keys() - self.refused.keys() - self.harmless))


def convert(body: dict[str, Any], kind: type[Body], place: str = "") -> Body:
    """The body as a struct. Raises InvalidRequest with the place of the first misfit, as in `messages[0].content`."""
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


def encode_json(value: Any) -> bytes:
    """JSON on one line, also for clients that end lines where Unicode does and not where event streams do."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")


def encode_event(event: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


def join_texts(deltas: Iterable[Delta], *kinds: type[Text | Reasoning | CallArguments]) -> str:
    """The texts of the deltas of these kinds, or of all kinds that have a text."""
    return "".join([delta.text for delta in deltas if isinstance(delta, kinds or (Text, Reasoning, CallArguments))])


def schema_verdict(finish: Finish) -> dict[str, Any]:
    """The field that says whether an answer fits the schema it was not held to; no field where there is no such schema."""
    if finish.schema_errors is None:
        return {}
    return {"schema_validation": {"valid": not finish.schema_errors, "errors": finish.schema_errors}}


def pick_fields(value: Any, *names: str) -> dict[str, Any]:
    """A value's attributes of these names, as a dict."""
    return {name: getattr(value, name) for name in names}


def reused_fields(usage: Usage) -> dict[str, Any]:
    """How much of a prompt was cached and why no more, as every dialect reports it; {} where the engine does not say."""
    names = ("matched", "cause", "position", "token", "instead", "why")
    return {} if usage.reuse is None else pick_fields(usage.reuse, *names)


def kept_tokens(usage: Usage) -> int:
    """How many tokens of a prompt were computed and are cached now: all but the last, which every request computes, or none."""
    is_retained = usage.reuse is not None and usage.reuse.cause != "off"
    return max(usage.prompt_tokens - usage.cached_tokens - 1, 0) if is_retained else 0


def request_ids(given: str) -> Iterator[str]:
    """The request ids that a client may mean by an id: the id itself, or what follows the prefix of a reply's id."""
    yield given
    yield from (given.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-", "msg_", "resp_") if given.startswith(prefix))


def seal(reasoning: str) -> str:
    """Reasoning for a client that carries it to the next request without showing it. It is encoded, not encrypted."""
    return f"{SEAL}:{base64.b64encode(reasoning.encode()).decode()}"


def unseal(sealed: str) -> str:
    """The reasoning in a seal of ours; "" for anything else."""
    name, _, data = sealed.partition(":")
    try:
        return base64.b64decode(data, validate=True).decode() if name == SEAL else ""
    except ValueError:  # not base64, or not UTF-8
        return ""
