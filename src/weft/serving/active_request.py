"""Active requests, each with its prompts and a stream of deltas for each choice; and the reports of recent requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from weft.errors import GrammarRejected, RowFailed, WeftError
from weft.ipc.limits import Sampling
from weft.ipc.messages import DraftCounts, FinishReason, GrammarSpec, PromptEvent, Timings, TokenEvent, TokenLogprob
from weft.metrics import Metrics
from weft.serving.in_flight import Event, Subscription
from weft.text.codec import Codec, EncodedPrompt, explain_reuse
from weft.text.types import (
    CallOpened,
    Delta,
    Ending,
    Finish,
    GenerationRequest,
    Placement,
    ReuseExplanation,
    Text,
    TokenRecord,
    Usage,
)

MAX_REPORTS = 1000

Result = TypeVar("Result")

Parts = list[tuple[int, list[Delta]]]  # for each choice with news its index and deltas


@dataclass(frozen=True)
class RequestReport:
    """Id, model, creation time and usage of a request, kept after its end for later queries."""

    id: str
    model: str
    created: int  # seconds since 1970
    usage: Usage
    tenant: str = ""


class Reports:
    """The reports of each tenant's last `max_reports` requests that have ended, by request id."""

    def __init__(self, max_reports: int = MAX_REPORTS) -> None:
        self.max_reports = max_reports
        self._kept: dict[str, dict[str, RequestReport]] = {}  # by tenant; the oldest first

    def add(self, report: RequestReport) -> None:
        """Keep a report, replacing one with the same id; if its tenant then has too many, drop the oldest."""
        kept = self._kept.setdefault(report.tenant, {})
        kept.pop(report.id, None)
        kept[report.id] = report
        if len(kept) > self.max_reports:
            del kept[next(iter(kept))]

    def find(self, request_id: str, may_see: Callable[[str], bool] = lambda _: True) -> RequestReport | None:
        """Return the report of this id among those of tenants that `may_see` accepts; None if there is none."""
        found = (kept.get(request_id) for tenant, kept in self._kept.items() if may_see(tenant))
        return next(filter(None, found), None)


@dataclass
class PromptState:
    """One prompt of a request, how many of its tokens are computed, and their log-probabilities if requested."""

    encoded: EncodedPrompt
    num_computed: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    placement: Placement | None = None  # where it was sent, if its model has several replicas


class ChoiceStream:
    """Converts the token events of one choice into deltas, and keeps its token count, timings and finish."""

    def __init__(self, codec: Codec, prompt: PromptState, generation: GenerationRequest) -> None:
        self.prompt = prompt
        self.codec = codec
        self.generation = generation
        self.reader = codec.reader(generation, prompt.encoded)
        self.has_calls = False
        self.num_tokens = 0
        self._keeps_tokens = generation.returns_ids or generation.prompt_logprobs is not None
        self._ids: list[int] = []  # of the answer, where they are asked for
        self.timings: Timings | None = None
        self.first_at = self.last_at = 0.0
        self.finish: Finish | None = None
        self._is_echo_due = generation.echo
        grammar = generation.grammar
        is_lenient = grammar is not None and grammar.kind == "json_schema" and grammar.lenient
        self.checked_by = grammar if is_lenient else None  # the form that the answer is checked against at its end
        self._answer = [prompt.encoded.begun]  # the answer's texts so far, where it will be checked
        self._reuse: ReuseExplanation | None = None

    def take(self, event: TokenEvent, now: float) -> list[Delta]:
        """Return the deltas that a token event gives, with a Finish if the choice ends; empty while text is held back."""
        new: list[Delta] = []
        if event.timings is not None:
            self._note_timings(event.timings)
        if self._keeps_tokens:
            self._ids += [token for token in (event.token, event.stop) if token is not None]
        if event.token is not None:
            self.num_tokens += 1
            self.first_at = self.first_at or now
            self.last_at = now
            new += self.reader.feed(event.token, event.logprob)
        if event.finish is not None:
            new += self.reader.finish(is_cut=event.finish == "length")
            if self.generation.echo and event.stop is not None and event.logprob is not None:  # scorers count prompt + 1 tokens
                new.append(Text("", self.codec.tokens([event.stop], [event.logprob])))
        self.has_calls = self.has_calls or any(isinstance(delta, CallOpened) for delta in new)
        if self.checked_by is not None:
            self._answer += [delta.text for delta in new if isinstance(delta, Text)]
        if event.finish is not None or self.reader.is_over:
            self.finish = self._finish(event)
            new.append(self.finish)
        if self._is_echo_due:
            self._is_echo_due = False
            new.insert(0, self._echo())
        return new

    def _echo(self) -> Delta:
        ids, text = self.prompt.encoded.ids, self.prompt.encoded.text
        if text is None:  # token ids were sent
            text = self.codec.tokenizer.decode(ids, skip_special_tokens=False)
        if self.generation.sampling.get("logprobs") is None:
            return Text(text)
        return Text(text, self.codec.tokens(ids, [None, *self.prompt.logprobs]))

    def _note_timings(self, timings: Timings) -> None:
        self.timings = timings
        if timings.reuse is not None and self._reuse is None:
            is_hidden = bool(self.generation.cache_salt) or self.generation.hides_texts
            self._reuse = explain_reuse(timings.reuse, self.prompt.encoded.ids, self.codec.tokenizer, is_hidden=is_hidden)

    @property
    def unchecked(self) -> tuple[GrammarSpec, str] | None:
        """The form and the whole answer, if the answer is finished and has still to be checked; None otherwise."""
        if self.checked_by is None or self.finish is None or self.has_calls or self.finish.schema_errors is not None:
            return None
        return self.checked_by, "".join(self._answer)

    def _finish(self, event: TokenEvent) -> Finish:
        stopped: Ending
        stopped, tokens = "tool_calls" if self.has_calls else "stop", self._tokens if self._keeps_tokens else None
        if self.reader.is_over or event.finish is None:
            return Finish(stopped, self.reader.stopped, self.usage, tokens=tokens)
        # The model's own end token is not reported as a stop.
        stop = event.stop if event.stop in self.generation.sampling.get("stop_token_ids", ()) else None
        return Finish(stopped if event.finish == "stop" else event.finish, stop, self.usage, tokens=tokens)

    @property
    def _tokens(self) -> TokenRecord:
        ids = self.prompt.encoded.ids
        logprobs = (None, *self.prompt.logprobs) if self.prompt.logprobs else (None,) * len(ids)
        return TokenRecord(self.codec.tokens(ids, list(logprobs)), tuple(self._ids))

    @property
    def usage(self) -> Usage:
        timings = self.timings or Timings()
        queued, first = timings.admitted or timings.submitted, timings.first_token
        return Usage(
            prompt_tokens=len(self.prompt.encoded.ids),
            completion_tokens=self.num_tokens,
            cached_tokens=timings.cached_tokens,
            image_tokens=self.prompt.encoded.num_image_tokens,
            reasoning_tokens=self.reader.num_reasoning_tokens,
            queue_seconds=queued - timings.submitted,
            prefill_seconds=(first or timings.finished or queued) - queued,
            decode_seconds=self.last_at - self.first_at,
            reuse=self._reuse,
            drafts=timings.drafts or DraftCounts(),
            placement=self.prompt.placement,
        )


class ActiveRequest:
    """One request while it is answered: its prompts, choices, subscription to events, error, and usage so far."""

    def __init__(self, request_id: str, generation: GenerationRequest, *, may_wait: bool = False) -> None:
        self.id = request_id
        self.generation = generation
        self.may_wait = may_wait  # for its model to be loaded
        self.is_waiting = False  # for that
        self.model = ""  # the served model's name, once it is known
        self.arrived = time.monotonic()
        self.sampling: Sampling | None = None  # what it gets, once its model is known
        self.has_described_tools = False  # weft describes them, because the model's template has no place for them
        self.prompts: list[PromptState] = []
        self.choices: list[ChoiceStream] = []
        self.subscription: Subscription | None = None
        self.error: WeftError | None = None  # what ended it
        self._created = int(time.time())
        self._abandoned = asyncio.Event()

    def start(self, codec: Codec, encoded: Sequence[EncodedPrompt], subscription: Subscription) -> None:
        """Store the subscription to the engine's events, and create a ChoiceStream for every choice of every prompt."""
        self.has_described_tools = self.generation.tool_choice is not None and codec.describes_tools
        self.prompts = [PromptState(prompt) for prompt in encoded]
        self.choices = [ChoiceStream(codec, prompt, self.generation) for prompt in self.prompts for _ in range(self.generation.n)]
        self.subscription = subscription

    @property
    def is_submitted(self) -> bool:
        return self.subscription is not None

    @property
    def is_done(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def read(self, events: Sequence[tuple[int, Event]], metrics: Metrics) -> Parts:
        """Return the deltas of new events by choice; raise RowFailed or GrammarRejected if there will be no answer."""
        news: dict[int, list[Delta]] = {}
        now = time.monotonic()
        for index, event in events:
            choice = self.choices[index]
            if self.subscription is not None and choice.prompt.placement is None:
                choice.prompt.placement = self.subscription.placements.get(index // self.generation.n)
            if isinstance(event, PromptEvent):
                choice.prompt.num_computed = event.computed
                choice.prompt.logprobs = event.logprobs or choice.prompt.logprobs
                continue
            if choice.finish is not None:
                continue  # it was cut at a stop string; a token was still on its way
            if event.is_refused:
                raise GrammarRejected(event.error or "the grammar can not go on")
            if event.finish in ("error", "cancelled"):
                raise RowFailed(event.error or "the engine ended this request without an answer")
            if choice.last_at:
                metrics.token_gap(self.model, now - choice.last_at)
            news.setdefault(index, []).extend(choice.take(event, now))
            if choice.finish is not None and event.finish is None and self.subscription is not None:
                self.subscription.cancel(index)
        return [(index, deltas) for index, deltas in news.items() if deltas]

    def abandon(self, error: WeftError) -> None:
        """End the request from outside: cancel its sequences, and let the reader of its stream get this error."""
        self.error = error
        self._abandoned.set()
        if self.subscription is not None:
            self.subscription.cancel()
            self.subscription.fail(error)

    async def wait_for(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for an event, at most `seconds`, then return in either case; raise the error if the request is abandoned."""
        tasks = [asyncio.ensure_future(one.wait()) for one in (event, self._abandoned)]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        self.check()

    async def while_wanted(self, work: Awaitable[Result]) -> Result:
        """Await work and return its result; if the request is abandoned meanwhile, cancel the work and raise the error."""
        working, left = asyncio.ensure_future(work), asyncio.ensure_future(self._abandoned.wait())
        try:
            await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await working
        finally:
            left.cancel()
            working.cancel()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.encoded.ids) for prompt in self.prompts)

    @property
    def num_computed(self) -> int:
        return sum(prompt.num_computed for prompt in self.prompts)

    @property
    def finish(self) -> FinishReason:
        """Finish reason of the whole request: "length" if any choice was cut for its length, otherwise "stop"."""
        reasons = {choice.finish.reason for choice in self.choices if choice.finish is not None}
        return "length" if "length" in reasons else "stop"

    @property
    def usage(self) -> Usage:
        """Token counts summed over all choices, each prompt counted once; queue and prefill times are the first choice's."""
        usages = [choice.usage for choice in self.choices]
        return replace(
            usages[0],
            prompt_tokens=self.num_prompt_tokens,
            image_tokens=sum(prompt.encoded.num_image_tokens for prompt in self.prompts),
            cached_tokens=sum(usage.cached_tokens for usage in usages[:: self.generation.n]),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            decode_seconds=max(usage.decode_seconds for usage in usages),
            drafts=sum((usage.drafts for usage in usages), DraftCounts()),
        )

    @property
    def first_token_seconds(self) -> float | None:
        firsts = [choice.first_at for choice in self.choices if choice.first_at]
        return min(firsts) - self.arrived if firsts else None

    @property
    def report(self) -> RequestReport | None:
        """The request's id, model, creation time and usage; None before the engine has sent timings for the first choice."""
        if not self.choices or self.choices[0].timings is None:
            return None
        return RequestReport(self.id, self.model, self._created, self.usage, self.generation.tenant)
