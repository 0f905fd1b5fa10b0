"""Replies in OpenAI's format: chunks and bodies of Chat and Completions; timings and logprobs also for Responses."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from weft.api.dialect import Reply, ReplyHeader, encode_json, placement_fields, reused_fields, schema_verdict
from weft.api.openai.request import StreamOptions
from weft.api.problems import openai_body
from weft.ipc.messages import DraftCounts
from weft.text.sampling import RECOMMENDABLE
from weft.text.types import Delta, Finish, Text, Token, Usage


class AskedReply(Protocol):
    """What a reply reads of its request."""

    n: int | None
    stream_options: StreamOptions | None
    prompt_logprobs: int | None
    return_token_ids: bool | None


class OpenAIReply(Reply):
    """Base class of Chat and Completions replies: stream chunks or one body. Subclasses encode the content of a choice."""

    id_prefix: ClassVar[str]
    body_object: ClassVar[str]
    chunk_object: ClassVar[str]
    silence: ClassVar[dict[str, Any]]  # choice fields of a chunk without content

    def __init__(self, header: ReplyHeader, request: AskedReply, num_prompts: int, has_logprobs: bool) -> None:
        super().__init__()
        self.request = request
        self.n = request.n or 1
        self.choices = range(num_prompts * self.n)  # prompt × n + i
        self.has_logprobs = has_logprobs
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        head = {"id": f"{self.id_prefix}-{header.id}", "object": self.chunk_object, "created": header.created}
        self._head = {**head, "model": header.model, "system_fingerprint": header.fingerprint}
        self._header = header
        self._finishes: dict[int, Finish] = {}
        # Nearly every frame is a lone text, so the bytes before and after it are made only once.
        blanks = [] if has_logprobs else [self._chunk(choice, self.show_run(choice, [Text("\0")])) for choice in self.choices]
        self._around = [blank.rpartition(encode_json("\0"))[::2] for blank in blanks]

    @property
    def _sampling(self) -> dict[str, Any]:
        """The sampling that was used, with the defaults of the model, or of weft; {} while it is not known."""
        sampling = self._header.sampling
        return {} if sampling is None else {"sampling": {name: getattr(sampling, name) for name in RECOMMENDABLE}}

    def show_run(self, choice: int, run: Sequence[Delta], /) -> dict[str, Any]:
        """Return a chunk's choice fields for consecutive deltas of one kind; {} if there is nothing to show."""
        raise NotImplementedError

    def show_choice(self, choice: int, deltas: Sequence[Delta], /) -> dict[str, Any]:
        raise NotImplementedError

    def frame_deltas(self, choice: int, deltas: Sequence[Delta]) -> bytes:
        if len(deltas) == 1 and type(delta := deltas[0]) is Text and not self.has_logprobs:
            before, after = self._around[choice]
            return before + encode_json(delta.text) + after if delta.text else b""
        return super().frame_deltas(choice, deltas)

    def frame_run(self, choice: int, run: list[Delta]) -> bytes:
        if not isinstance(finish := run[0], Finish):
            shown = self.show_run(choice, run)
            return self._chunk(choice, shown) if shown else b""
        self._finishes[choice] = finish
        timings = {"timings": self._timings()} if len(self._finishes) == len(self.choices) else {}
        return self._frame([{"index": choice, **self.silence, **_ending(finish)}], **timings)

    def frame_heartbeat(self, num_computed: int, num_tokens: int) -> bytes:
        choice = next((choice for choice in self.choices if choice not in self._finishes), 0)
        return b": prefill %d/%d\n\n" % (num_computed, num_tokens) + self._chunk(choice, self.silence)

    def frame_closing(self) -> bytes:
        return (self._frame([], usage=self._usage()) if self._include_usage else b"") + b"data: [DONE]\n\n"

    def frame_error(self, error: Exception) -> bytes:
        return b"data: " + encode_json(openai_body(error)) + b"\n\n"

    def make_body(self) -> dict[str, Any]:
        collected = [self.collected[choice] for choice in self.choices]
        self._finishes = {i: delta for i, deltas in enumerate(collected) for delta in deltas if isinstance(delta, Finish)}
        choices = [self.make_choice(choice) for choice in self.choices]
        end = {"usage": self._usage(), "timings": self._timings()}
        return {**self._head, "object": self.body_object, "choices": choices, **end}

    def make_choice(self, choice: int) -> dict[str, Any]:
        """Return a choice of the body."""
        finish = self._finishes[choice]
        tokens = {"token_ids": finish.tokens.answer} if finish.tokens and self.request.return_token_ids else {}
        return {"index": choice, **self.show_choice(choice, self.collected[choice]), **_ending(finish), **tokens}

    def _timings(self) -> dict[str, Any]:
        return timings_of(self._usages(), self.n) | self._sampling

    def _chunk(self, choice: int, shown: dict[str, Any]) -> bytes:
        return self._frame([{"index": choice, **shown, "finish_reason": None}])

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return b"data: " + encode_json({**self._head, "choices": choices, **usage, **more}) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        total = sum_usages(self._usages(), self.n)
        return {
            "prompt_tokens": total.prompt_tokens,
            "completion_tokens": total.completion_tokens,
            "total_tokens": total.prompt_tokens + total.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": total.cached_tokens,
                **({"image_tokens": total.image_tokens} if total.image_tokens else {}),
            },
            "completion_tokens_details": self.completion_details(total),
        }

    def completion_details(self, total: Usage) -> dict[str, int]:
        return {"reasoning_tokens": total.reasoning_tokens}

    def _usages(self) -> list[Usage]:
        return [self._finishes[choice].usage or Usage(0, 0) for choice in self.choices]


def prompt_fields(request: AskedReply, deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return vLLM's fields of a reply that tell of the prompt of a finished choice, as far as they are asked for."""
    record = next((delta.tokens for delta in deltas if isinstance(delta, Finish)), None)
    if record is None:
        return {}
    ids = {"prompt_token_ids": [token.id for token in record.prompt]} if request.return_token_ids else {}
    has_logprobs = request.prompt_logprobs is not None
    return ids | ({"prompt_logprobs": [_prompt_logprob(token) for token in record.prompt]} if has_logprobs else {})


def _prompt_logprob(token: Token) -> dict[str, Any] | None:
    """Return a prompt token and the likeliest tokens at its place, by their ids; None for the first, which has none before it."""
    if token.logprob is None:
        return None
    ranks = {other.id: rank for rank, other in enumerate(token.top, 1)}
    shown = {one.id: one for one in (token, *token.top)}
    return {
        str(one.id): {"logprob": logprob_of(one), "rank": ranks.get(one.id), "decoded_token": one.text} for one in shown.values()
    }


def _ending(finish: Finish) -> dict[str, Any]:
    return {"finish_reason": finish.reason, "stop_reason": finish.stop, **schema_verdict(finish)}


def sum_usages(usages: Sequence[Usage], n: int) -> Usage:
    """Add up the usage of all choices: a prompt counts once for its n choices; times are the longest, not the sum."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages[::n]),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages[::n]),
        image_tokens=sum(usage.image_tokens for usage in usages[::n]),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        queue_seconds=max(usage.queue_seconds for usage in usages),
        prefill_seconds=max(usage.prefill_seconds for usage in usages),
        decode_seconds=max(usage.decode_seconds for usage in usages),
        reuse=usages[0].reuse,
        drafts=sum((usage.drafts for usage in usages), DraftCounts()),
        placement=usages[0].placement,
    )


def timings_of(usages: Sequence[Usage], n: int = 1) -> dict[str, Any]:
    """Return a reply's `timings` in llama.cpp's format: counts, times and rates. First tokens are not in the decode rate."""
    total = sum_usages(usages, n)
    after_first = sum(max(usage.completion_tokens - 1, 0) for usage in usages)
    prompt = total.prompt_tokens - total.cached_tokens
    timings = {
        "cache_n": total.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": round(total.prefill_seconds * 1000, 3),
        "prompt_per_second": round(prompt / total.prefill_seconds, 3) if total.prefill_seconds else 0.0,
        "predicted_n": total.completion_tokens,
        "predicted_ms": round(total.decode_seconds * 1000, 3),
        "predicted_per_second": round(after_first / total.decode_seconds, 3) if total.decode_seconds else 0.0,
        "queue_ms": round(total.queue_seconds * 1000, 3),
        **_draft_fields(total.drafts),
        **placement_fields(total),
    }
    return timings if total.reuse is None else timings | {"cache": reused_fields(total)}


def _draft_fields(counts: DraftCounts) -> dict[str, Any]:
    """Return how many draft tokens were verified and accepted, in all (llama.cpp's names) and by source; {} if none were."""
    if not counts.num_drafted:
        return {}
    sources = {name: {"drafted": num, "accepted": counts.accepted.get(name, 0)} for name, num in counts.drafted.items()}
    return {"draft_n": counts.num_drafted, "draft_n_accepted": counts.num_accepted, "drafts": sources}


def tokens_of(run: Sequence[Delta]) -> list[Token]:
    """Return the tokens of the Text deltas in a run; tokens of reasoning and of tool calls are left out."""
    return [token for delta in run if isinstance(delta, Text) for token in delta.tokens]


def logprob_of(token: Token) -> float | None:
    """Return a token's log-probability, at least -9999.0 as in OpenAI's API (JSON has no -inf); None if it has none."""
    return None if token.logprob is None else max(token.logprob.logprob, -9999.0)


def logprobs_of(run: Sequence[Delta]) -> list[dict[str, Any]]:
    """Return the text tokens of a run with log-probabilities and top tokens, in the format of Chat and Responses."""
    return [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in tokens_of(run)]


def _logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": logprob_of(token)}
