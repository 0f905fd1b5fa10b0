"""What OpenAI's wires share: sampling fields, the shape of answers, usage and timings; of the two older ones also the frames.

A wire adds what one of its choices looks like. Streamed and whole replies are made by the same few functions, so that they
agree. Knows no tokens beyond those the deltas show; used by `chat`, `completions` and `responses`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import msgspec

from weft.api.dialect import ReplyHeader, reused_fields
from weft.api.openai.schema import CommonRequest, ConversationRequest, NamedSchema, ResponseFormat, StructuredOutputs
from weft.api.problems import openai_body
from weft.errors import InvalidRequest, UnsupportedParameter, WeftError
from weft.ipc.limits import Sampling
from weft.ipc.messages import GrammarSpec
from weft.text.schema import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar, structural_tag_grammar
from weft.text.types import (
    CallArguments,
    CallOpened,
    ContentDelta,
    Delta,
    Finish,
    GenerationRequest,
    Prompt,
    Reasoning,
    Text,
    Token,
    Usage,
)

SAME_NAMED = [name for name in Sampling.__struct_fields__ if name in CommonRequest.__struct_fields__]
DONE = b"data: [DONE]\n\n"


def sampling_of(request: CommonRequest, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    """The fields of `wire.Sampling` that the client gave."""
    fields = {name: getattr(request, name) for name in SAME_NAMED}
    fields |= {"max_tokens": max_tokens, "logprobs": logprobs}
    if request.top_k is not None:
        fields["top_k"] = max(request.top_k, 0)
    if request.logit_bias is not None:
        fields["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if request.stop_token_ids is not None:
        fields["stop_token_ids"] = tuple(request.stop_token_ids)
    return {name: value for name, value in fields.items() if value is not None}


def stops_of(request: CommonRequest) -> tuple[str, ...]:
    """The stop strings, one or several."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def grammar_of(request: CommonRequest, **more: Maker) -> GrammarSpec | None:
    """What the answer must look like, in whichever of its many words. Raises InvalidRequest where it is said twice."""
    return _only_one(request, MAKERS | more, "")


def thinking_budget_of(request: ConversationRequest) -> int | None:
    """How many tokens may be thought."""
    budgets = {request.thinking_token_budget, request.reasoning_budget_tokens} - {None}
    if len(budgets) > 1:
        message = "thinking_token_budget and reasoning_budget_tokens mean the same and differ; send one of them"
        raise InvalidRequest(message, "reasoning_budget_tokens")
    return next(iter(budgets - {-1}), None)


def generation_of(
    request: CommonRequest, prompts: tuple[Prompt, ...], max_tokens: int | None, logprobs: int | None, **more: Any
) -> GenerationRequest:
    """What is asked for: what every wire says in the same words, and `more`."""
    return GenerationRequest(
        model=request.model,
        prompts=prompts,
        sampling=sampling_of(request, max_tokens, logprobs),
        stops=stops_of(request),
        skip_special_tokens=request.skip_special_tokens is not False,
        cache_salt=request.cache_salt or "",
        session=request.session,
        priority=request.precedence,
        **more,
    )


@dataclass(frozen=True)
class ReplyShape:
    """What a reply must know of its request."""

    n: int  # choices of one prompt
    prompts: int
    include_usage: bool
    logprobs: bool

    @classmethod
    def of(cls, request: CommonRequest, prompts: int, logprobs: bool) -> ReplyShape:
        """The shape of the reply to this request."""
        options = request.stream_options
        return cls(request.n or 1, prompts, bool(options and options.include_usage), logprobs)

    @property
    def choices(self) -> range:
        """All choices' indices: prompt × n + i."""
        return range(self.prompts * self.n)


class OpenAIReply:
    """A reply in OpenAI's framing. A wire says what a choice looks like, in a chunk and in the whole."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    silence: ClassVar[dict[str, Any]]  # a choice of a chunk that says nothing

    def __init__(self, heading: ReplyHeader, shape: ReplyShape) -> None:
        self.shape = shape
        self._heading = {
            "id": f"{self.id_prefix}-{heading.id}",
            "object": self.chunk_object,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
        }
        self._finishes: dict[int, Finish] = {}
        self._taken: list[list[ContentDelta]] = [[] for _ in shape.choices]
        self._around = [] if shape.logprobs else [self._around_text(choice) for choice in shape.choices]

    def said(self, choice: int, run: Sequence[Text | Reasoning]) -> dict[str, Any]:
        """A choice of a chunk that tells this run of deltas of one kind."""
        raise NotImplementedError

    def called(self, choice: int, run: Sequence[CallOpened | CallArguments]) -> dict[str, Any]:
        """The same for a call that opens, or pieces of its arguments; nothing where they say nothing yet."""
        raise NotImplementedError

    def complete(self, choice: int, deltas: Sequence[ContentDelta]) -> dict[str, Any]:
        """A choice of a whole reply."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Frames sent with the headers, before any work."""
        return b""

    def begun(self, usage: Usage) -> bytes:  # noqa: ARG002 - told at the end
        """Nothing: counts come last."""
        return b""

    def pieces(self, choice: int, deltas: Sequence[Delta]) -> bytes:
        """Frames for what one choice has new: one for each run of deltas of one kind, and of one call."""
        if len(deltas) == 1 and type(delta := deltas[0]) is Text and not self.shape.logprobs:
            before, after = self._around[choice]
            return before + encoded(delta.text) + after if delta.text else b""
        return b"".join(self._piece(choice, list(run)) for _, run in groupby(deltas, kind_of))

    def heartbeat(self, computed: int, total: int) -> bytes:
        """A comment for people and a chunk that says nothing for clients whose timers do not hear comments."""
        choice = next((choice for choice in self.shape.choices if choice not in self._finishes), 0)
        return b": prefill %d/%d\n\n" % (computed, total) + self._chunk(choice, self.silence)

    def closing(self) -> bytes:
        """The usage where it was asked for, and the end."""
        return (self._frame([], usage=self._usage()) if self.shape.include_usage else b"") + DONE

    def failure(self, error: WeftError) -> bytes:
        """The error. No [DONE] follows: a client must not take what it has for the answer."""
        return b"data: " + encoded(openai_body(error)) + b"\n\n"

    def take(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Collect what one choice has new, for `whole`."""
        for delta in deltas:
            if isinstance(delta, Finish):
                self._finishes[choice] = delta
            else:
                self._taken[choice].append(delta)

    def whole(self) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        choices = [
            {"index": choice, **self.complete(choice, deltas), **_end(self._finishes[choice])}
            for choice, deltas in enumerate(self._taken)
        ]
        ends = {"usage": self._usage(), "timings": self._timings()}
        return {**self._heading, "object": self.whole_object, "choices": choices, **ends}

    def _piece(self, choice: int, run: list[Delta]) -> bytes:
        if isinstance(finish := run[0], Finish):
            return self._finished(choice, finish)
        if calls := [delta for delta in run if isinstance(delta, CallOpened | CallArguments)]:
            said = self.called(choice, calls)
            return self._chunk(choice, said) if said else b""
        told = [delta for delta in run if isinstance(delta, Text | Reasoning) and (delta.text or tokens_of(delta))]
        return self._chunk(choice, self.said(choice, told)) if told else b""

    def _around_text(self, choice: int) -> tuple[bytes, bytes]:
        """The bytes before and after a lone text. Nearly every frame is one, so they are made only once."""
        before, _, after = self._chunk(choice, self.said(choice, [Text("\0")])).rpartition(encoded("\0"))
        return before, after

    def _finished(self, choice: int, finish: Finish) -> bytes:
        self._finishes[choice] = finish
        is_last = len(self._finishes) == len(self.shape.choices)
        timings = {"timings": self._timings()} if is_last else {}
        return self._frame([{"index": choice, **self.silence, **_end(finish)}], **timings)

    def _chunk(self, choice: int, said: dict[str, Any]) -> bytes:
        return self._frame([{"index": choice, **said, "finish_reason": None}])

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self.shape.include_usage else {}
        return b"data: " + encoded({**self._heading, "choices": choices, **usage, **more}) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        counts = Counts.of(self._usages(), self.shape.n)
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.answer,
            "total_tokens": counts.prompt + counts.answer,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        }

    def _timings(self) -> dict[str, Any]:
        return timings_of(self._usages(), self.shape.n)

    def _usages(self) -> list[Usage]:
        return [self._finishes[choice].usage or Usage(0, 0) for choice in self.shape.choices]


def kind_of(delta: Delta) -> tuple[type[Delta], int]:
    """Deltas of one kind, and of one call, are told together."""
    return type(delta), delta.index if isinstance(delta, CallOpened | CallArguments) else 0


def _end(finish: Finish) -> dict[str, Any]:
    return {"finish_reason": finish.reason, **ended(finish)}


def ended(finish: Finish) -> dict[str, Any]:
    """What weft says of an end beside its reason."""
    end: dict[str, Any] = {"stop_reason": finish.stop}
    if finish.schema_errors is not None:
        end["schema_validation"] = {"valid": not finish.schema_errors, "errors": finish.schema_errors}
    return end


@dataclass(frozen=True)
class Counts:
    """Tokens of a whole reply."""

    prompt: int
    cached: int  # of the prompt
    answer: int
    reasoning: int  # of the answer

    @classmethod
    def of(cls, usages: Sequence[Usage], n: int = 1) -> Counts:
        """Those of all choices. A prompt counts once, however many choices it has: the first of them computed it."""
        prompts = usages[::n]
        return cls(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.cached_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.reasoning_tokens for usage in usages),
        )


def timings_of(usages: Sequence[Usage], n: int = 1) -> dict[str, Any]:
    """Times of a whole reply. Choices run side by side, so the longest stands for all; first tokens belong to the prompt."""
    counts = Counts.of(usages, n)
    prompt_seconds = max(usage.prefill_seconds for usage in usages)
    predicted_seconds = max(usage.decode_seconds for usage in usages)
    after_first = sum(max(usage.completion_tokens - 1, 0) for usage in usages)
    prompt = counts.prompt - counts.cached
    timings = {
        "cache_n": counts.cached,
        "prompt_n": prompt,
        "prompt_ms": round(prompt_seconds * 1000, 3),
        "prompt_per_second": round(prompt / prompt_seconds, 3) if prompt_seconds else 0.0,
        "predicted_n": counts.answer,
        "predicted_ms": round(predicted_seconds * 1000, 3),
        "predicted_per_second": round(after_first / predicted_seconds, 3) if predicted_seconds else 0.0,
        "queue_ms": round(max(usage.queue_seconds for usage in usages) * 1000, 3),
    }
    # Of several prompts the first one is spoken of.
    return timings if usages[0].reuse is None else timings | {"cache": reused_fields(usages[0].reuse)}


def joined(run: Sequence[Text | Reasoning]) -> str:
    """The text of several deltas."""
    return "".join(delta.text for delta in run)


def tokens_of(delta: Text | Reasoning) -> tuple[Token, ...]:
    """The tokens a delta shows; those of the thinking are not shown."""
    return delta.tokens if isinstance(delta, Text) else ()


def logprob_of(token: Token) -> float | None:
    """A token's log-probability as JSON can say it: OpenAI writes -9999 for what can not happen."""
    return None if token.logprob is None else max(token.logprob.logprob, -9999.0)


def logprobs_of(run: Sequence[Text | Reasoning]) -> list[dict[str, Any]]:
    """The tokens of several deltas as Chat and Responses tell them."""
    tokens = [token for delta in run for token in tokens_of(delta)]
    return [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in tokens]


def _logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": logprob_of(token)}


def encoded(value: Any) -> bytes:
    """JSON on one line, also for clients that end lines where Unicode does and not where event streams do."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")


def _only_one(asked: CommonRequest | StructuredOutputs, makers: Mapping[str, Maker], place: str) -> GrammarSpec | None:
    given = {name: getattr(asked, name) for name in makers}
    specs = {place + name: makers[name](value, place + name) for name, value in given.items() if value is not None}
    names = [name for name, spec in specs.items() if spec is not None]
    if len(names) > 1:
        raise InvalidRequest(f"{names[0]} and {names[1]} can not both be honoured; send one of them", names[1])
    return specs[names[0]] if names else None


def response_format(form: ResponseFormat, place: str) -> GrammarSpec | None:
    """What an answer of this format must look like."""
    match form:
        case ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="structural_tag", structures=list(), triggers=list()):
            return structural_tag_grammar({"structures": form.structures, "triggers": form.triggers}, place)
        case ResponseFormat(type="structural_tag"):
            raise InvalidRequest(f"{place} needs structures and triggers", place)
        case ResponseFormat(json_schema=NamedSchema(schema=schema, strict=strict)):
            return json_schema_grammar(schema, bool(strict), f"{place}.json_schema.schema")
        case ResponseFormat(schema=None, type="json_object"):
            return _json_object(True, place)
        case ResponseFormat(schema=None):
            raise InvalidRequest(f"{place}.json_schema is required", f"{place}.json_schema")
    return json_schema_grammar(form.schema, bool(form.strict), f"{place}.schema")


def _structured_output(asked: StructuredOutputs, place: str) -> GrammarSpec:
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(asked, name):
            raise UnsupportedParameter(f"{place}.{name} is not supported here; leave it out", f"{place}.{name}")
    spec = _only_one(asked, OUTPUT_MAKERS, f"{place}.")
    if spec is None:
        raise InvalidRequest(f"{place} is empty; it needs one of {', '.join(OUTPUT_MAKERS)}", place)
    return spec


def _json_object(wanted: bool, place: str) -> GrammarSpec | None:  # noqa: ARG001 - all makers alike
    return GrammarSpec("json_schema", '{"type":"object"}') if wanted else None


def _schema(schema: Any, place: str) -> GrammarSpec:
    return json_schema_grammar(schema, False, place)


Maker = Callable[[Any, str], GrammarSpec | None]
MAKERS: dict[str, Maker] = {
    "response_format": response_format,
    "structured_outputs": _structured_output,
    "guided_json": _schema,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": lark_grammar,
    "json_schema": _schema,
    "grammar": lark_grammar,
}
OUTPUT_MAKERS: dict[str, Maker] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
    "structural_tag": structural_tag_grammar,
}
