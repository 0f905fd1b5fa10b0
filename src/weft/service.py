"""One request's whole life in the text world: write → submit → read → deltas; cancelled on exit, counted at its end.

Knows scribes, engines' clients and deltas. HTTP stands above it, the engine's process beyond the link.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from weft.chat.constraints import SchemaCheck
from weft.chat.conversation import Delta, Effort, Finish, Generation, LateSystem, Prompt, Text, Usage
from weft.chat.reader import Reader
from weft.chat.scribe import Scribe, Written
from weft.errors import (
    EngineDied,
    EngineStarting,
    QueueFull,
    RequestCancelled,
    RowFailed,
    ServerStopping,
    UnknownModel,
    WeftError,
)
from weft.link.client import Ticket
from weft.link.supervisor import Supervisor
from weft.metrics import Metrics
from weft.wire import FinishReason, PromptEvent, Ready, Sampling, Timings, TokenEvent, TokenLogprob

log = logging.getLogger("weft.service")

STOPPED = "the server was stopped before this answer was complete; come again"
LONG_TEXT = 4096  # characters from which writing a prompt is left to a thread, so that streams do not wait for it
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of one request's choices

Parts = list[tuple[int, list[Delta]]]


class Screen(Protocol):
    """Who is told how models come up."""

    def loading(self, model: str, what: str, done: int, total: int) -> None:
        """A model is on its way."""

    def ready(self, model: str, context: int, device: str, memory: dict[str, int], notice: str | None = None) -> None:
        """A model answers."""

    def failed(self, model: str, message: str) -> None:
        """A model can not be served."""


class Served:
    """One model as the front serves it: its engine, and once that is up its scribe."""

    def __init__(self, asked: str, supervisor: Supervisor, late_system: LateSystem = "fold") -> None:
        self.name = asked
        self.supervisor = supervisor
        self.scribe: Scribe | None = None
        self.failed: str | None = None
        self._late_system = late_system
        self._folder: str | None = None  # whose files the scribe has read
        self.is_stopping = False
        self._settled = asyncio.Event()  # it is up, or never will be

    async def run(self, screen: Screen) -> None:
        """Start the engine and follow its condition, until it fails for good."""
        self.supervisor.start()
        while self.failed is None:
            changed, condition = self.supervisor.changed, self.supervisor.condition
            if condition.ready is not None:
                await self._read_files(condition.ready)
            else:
                self.failed = condition.failed
            self._tell(screen)
            if self.failed is None:
                await changed.wait()

    async def _read_files(self, ready: Ready) -> None:
        if ready.folder == self._folder:  # the same model, in another process
            return
        try:
            self.scribe = await asyncio.to_thread(Scribe, Path(ready.folder), self._late_system)
            self.name, self._folder = ready.model, ready.folder
        except Exception as error:  # a border: whatever is wrong with a model's files, nobody may wait for it
            log.exception("the files of %s can not be read", self.name)
            self.failed = str(error)

    def _tell(self, screen: Screen) -> None:
        ready, loading = self.supervisor.condition.ready, self.supervisor.condition.loading
        if self.failed is not None:
            screen.failed(self.name, self.failed)
        elif ready is not None:
            screen.ready(self.name, ready.limits.context_length, ready.device, ready.memory, ready.notice)
        elif loading is not None:
            screen.loading(self.name, loading.what, loading.done, loading.total)
        if self.is_ready or self.failed is not None:
            self._settled.set()
        else:
            self._settled.clear()

    async def until_settled(self) -> None:
        """Return when it is up, or never will be."""
        await self._settled.wait()

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self.failed is None and self.scribe is not None and self.supervisor.condition.ready is not None

    @property
    def is_loading(self) -> bool:
        """Whether it will answer if one waits."""
        return not self.is_ready and self.failed is None and not self.is_stopping

    def require(self) -> tuple[Scribe, Ready]:
        """What is needed to answer. Raises EngineStarting, or EngineDied when it never will be up."""
        condition = self.supervisor.condition
        if self.is_stopping:
            raise ServerStopping(STOPPED)
        if self.failed is not None:
            raise EngineDied(f"{self.name} can not be served: {self.failed}")
        if self.scribe is None or condition.ready is None:
            what = condition.loading.what if condition.loading else "starting"
            raise EngineStarting(f"{self.name} is not ready yet ({what}); try again in a moment", retry_after=2)
        return self.scribe, condition.ready


class Service:
    """Everything that is served, and who is being answered."""

    def __init__(self, models: Sequence[Served], metrics: Metrics, max_queue: int) -> None:
        self.models = list(models)
        self.metrics = metrics
        self.max_queue = max_queue
        self.answers: dict[str, list[Answer]] = {}
        self.waiting: list[Waiting] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, screen: Screen, on_failure: Callable[[], None]) -> None:
        """Bring all models up in the background; `on_failure` is called when none is left."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and all(served.failed is not None for served in self.models):
                on_failure()

        for served in self.models:
            task = asyncio.create_task(served.run(screen))
            task.add_done_callback(ended)
            self._tasks.append(task)

    async def stop(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(served.supervisor.stop() for served in self.models))

    def find(self, name: str | None) -> Served:
        """The model that goes by this name; the only one may go unnamed."""
        if not name and len(self.models) == 1:
            return self.models[0]
        for served in self.models:
            if name == served.name:
                return served
        names = ", ".join(served.name for served in self.models)
        raise UnknownModel(f"no model {name!r} is served here; there is {names}", "model")

    async def open(self, generation: Generation, request_id: str) -> Answer:
        """Write the prompts down, check everything, and ask the engine. Raises whatever is wrong with the request."""
        arrived = time.monotonic()
        served = self.find(generation.model)
        scribe, ready = served.require()
        self._check_queue(served, ready, generation)
        written = [await _write(scribe, prompt, generation.effort) for prompt in generation.prompts]
        constraints = [scribe.constraint(generation, prompt) for prompt in written]
        sampling = scribe.sampling(generation.sampling)
        if generation.echo:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=sampling.logprobs)
        for prompt in written:
            ready.limits.check(prompt.ids, sampling)
        scribe, ready = served.require()  # the engine may have gone, and others may have come, while a thread wrote
        self._check_queue(served, ready, generation)
        samplings = tuple(_forked(sampling, index) for index in range(generation.n))
        answer = Answer(self, served.name, scribe, generation, written, arrived, request_id)
        prompts = [prompt.ids for prompt in written]
        boundaries = [prompt.boundaries for prompt in written]
        answer.ticket = served.supervisor.client.submit(prompts, [samplings] * len(written), constraints, boundaries)
        self.answers.setdefault(request_id, []).append(answer)
        try:
            await answer.ticket.until_taken(len(written))
        except BaseException:  # refused, or nobody waits any more: either way nothing may stay behind
            answer.close()
            raise
        return answer

    def open_later(self, generation: Generation, request_id: str) -> Waiting:
        """The same for a model that is still on its way: something to wait with, for a stream that has time."""
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests wait for a model to be loaded; come again", retry_after=5)
        return Waiting(self, generation, request_id)

    def _check_queue(self, served: Served, ready: Ready, generation: Generation) -> None:
        live, count = len(served.supervisor.client.live), len(generation.prompts) * generation.n
        if live + count > ready.max_rows + self.max_queue:
            message = f"{live} answers of {served.name} are running or waiting, {count} more are too many; come again"
            raise QueueFull(message, retry_after=5)

    def cancel(self, request_id: str) -> bool:
        """End the requests with this id; whether there was one."""
        answers: list[Answer | Waiting] = [one for one in self.waiting if one.request_id == request_id]
        answers += self.answers.get(request_id, [])
        for answer in answers:
            answer.abandon(RequestCancelled("the request was cancelled before its answer was complete"))
        return bool(answers)

    def abandon_all(self) -> None:
        """End every request with an error: the server stops."""
        for served in self.models:
            served.is_stopping = True
        everybody: list[Answer | Waiting] = [answer for answers in self.answers.values() for answer in answers]
        for one in [*everybody, *self.waiting]:
            one.abandon(ServerStopping(STOPPED))

    def forget(self, answer: Answer) -> None:
        """An answer has its end."""
        with suppress(KeyError, ValueError):
            self.answers[answer.request_id].remove(answer)
            if not self.answers[answer.request_id]:
                del self.answers[answer.request_id]


class Waiting:
    """A request that came before its model was ready."""

    def __init__(self, service: Service, generation: Generation, request_id: str) -> None:
        self.service = service
        self.request_id = request_id
        self._error: WeftError | None = None
        self._task = asyncio.create_task(self._open(generation))
        service.waiting.append(self)

    async def take(self, seconds: float) -> Answer | None:
        """The answer once it is open; None after so many seconds. Raises what is wrong with the request."""
        await asyncio.wait([self._task], timeout=seconds)
        if self._error is not None:
            raise self._error
        return self._task.result() if self._task.done() else None

    def abandon(self, error: WeftError) -> None:
        """End it from outside: whoever takes gets this error."""
        self._error = error
        if self._task.done() and not self._task.cancelled() and self._task.exception() is None:
            self._task.result().close()
        self._task.cancel()

    async def _open(self, generation: Generation) -> Answer:
        try:
            while True:
                served = self.service.find(generation.model)
                await served.until_settled()
                with suppress(EngineStarting):
                    return await self.service.open(generation, self.request_id)
        finally:
            self.service.waiting.remove(self)


class Choice:
    """One answer of a request: reads its tokens, counts them, knows why it ended."""

    def __init__(self, reader: Reader, written: Written, generation: Generation, check: SchemaCheck | None) -> None:
        self.reader = reader
        self.written = written
        self.stop_token_ids = generation.sampling.get("stop_token_ids", ())
        self.check = check
        self._told: list[str] = []  # the answer so far, where it will be checked
        self.opening: Callable[[], Delta] | None = None  # the echo of the prompt, told before anything else
        self.num_tokens = 0
        self.timings: Timings | None = None
        self.first_at = self.last_at = 0.0
        self.finish: Finish | None = None

    def take(self, event: TokenEvent, now: float) -> list[Delta]:
        """What a token or an end makes known."""
        is_echoed = self.opening is not None
        deltas: list[Delta] = [self.opening()] if self.opening is not None else []
        self.opening = None
        self.timings = event.timings or self.timings
        if event.token is not None:
            self.num_tokens += 1
            self.first_at = self.first_at or now
            self.last_at = now
            deltas += self.reader.feed(event.token, event.logprob)
        if event.finish is not None:
            deltas += self.reader.finish()
        if self.check is not None:
            self._told += [delta.text for delta in deltas[is_echoed:] if isinstance(delta, Text)]
        if event.finish is not None or self.reader.stopped is not None:
            self.finish = self._ended(event)
            deltas.append(self.finish)
        return deltas

    def _ended(self, event: TokenEvent) -> Finish:
        errors = None if self.check is None else self.check.errors("".join(self._told))
        if self.reader.stopped is not None or event.finish is None:
            return Finish("stop", self.reader.stopped, self.usage, errors)
        asked = event.stop if event.stop in self.stop_token_ids else None  # the model's own end is no news
        return Finish(event.finish, asked, self.usage, errors)

    @property
    def usage(self) -> Usage:
        """Counts and times so far."""
        timings = self.timings or Timings()
        queued, first = timings.admitted or timings.submitted, timings.first_token
        return Usage(
            prompt_tokens=len(self.written.ids),
            completion_tokens=self.num_tokens,
            cached_tokens=timings.cached_tokens,
            reasoning_tokens=self.reader.num_reasoning_tokens,
            queue_seconds=queued - timings.submitted,
            prefill_seconds=(first or timings.finished or queued) - queued,
            decode_seconds=self.last_at - self.first_at,
        )


class Answer:
    """A request being answered: what its choices have new, as it comes. Leaving `parts` cancels it."""

    def __init__(
        self,
        service: Service,
        model: str,
        scribe: Scribe,
        generation: Generation,
        written: list[Written],
        arrived: float,
        request_id: str,
    ) -> None:
        self.service = service
        self.model = model
        self.request_id = request_id
        self.generation = generation
        self.written = written
        self.ticket: Ticket  # given when the engine is asked
        self.arrived = arrived
        self.error: WeftError | None = None
        prompts = [prompt for prompt in written for _ in range(generation.n)]
        grammar = generation.grammar
        check = SchemaCheck(grammar) if grammar is not None and grammar.kind == "json_schema" and grammar.lenient else None
        self.choices = [Choice(scribe.reader(generation, prompt), prompt, generation, check) for prompt in prompts]
        self.computed = [0] * len(written)
        self._prompt_logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(written)
        if generation.echo:
            for place, choice in enumerate(self.choices):
                choice.opening = lambda place=place: self._echo(scribe, place)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.written)

    @property
    def finish(self) -> FinishReason:
        """Why it ended, of several choices the first that was cut."""
        reasons: set[FinishReason] = {choice.finish.reason for choice in self.choices if choice.finish is not None}
        return "length" if "length" in reasons else "stop"

    @property
    def usage(self) -> Usage:
        """Counts and times so far, of all choices together."""
        usages = [choice.usage for choice in self.choices]
        first = usages[0]
        return dataclasses.replace(
            first,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=sum(usage.cached_tokens for usage in usages[:: self.generation.n]),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            decode_seconds=max(usage.decode_seconds for usage in usages),
        )

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token."""
        firsts = [choice.first_at for choice in self.choices if choice.first_at]
        return min(firsts) - self.arrived if firsts else None

    async def parts(self, silence: float) -> AsyncGenerator[Parts]:
        """What is new, choice by choice; an empty list after `silence` seconds without news."""
        try:
            told = time.monotonic()
            while any(choice.finish is None for choice in self.choices):
                news = self._read(await self.ticket.take(max(0.0, told + silence - time.monotonic())))
                if news or time.monotonic() - told >= silence:
                    yield news
                    told = time.monotonic()
        except WeftError as error:
            self.error = error
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Nobody waits for it any more."""
        self.ticket.cancel()
        self.service.forget(self)

    def abandon(self, error: WeftError) -> None:
        """End it from outside: whoever reads `parts` gets this error."""
        self.ticket.cancel()
        self.ticket.fail(error)

    def _read(self, events: list[tuple[int, PromptEvent | TokenEvent]]) -> Parts:
        news: dict[int, list[Delta]] = {}
        now = time.monotonic()
        for place, event in events:
            if isinstance(event, PromptEvent):
                self._note_prompt(place, event)
                continue
            choice = self.choices[place]
            if choice.finish is not None:
                continue  # it was cut at a stop string; a token was still on its way
            if event.finish in ("error", "cancelled"):
                raise RowFailed(event.error or "the engine ended this request without an answer")
            if choice.last_at:
                self.service.metrics.token_gap(self.model, now - choice.last_at)
            news.setdefault(place, []).extend(choice.take(event, now))
            if choice.finish is not None and event.finish is None:
                self.ticket.cancel(place)
        return [(place, deltas) for place, deltas in news.items() if deltas]

    def _note_prompt(self, place: int, event: PromptEvent) -> None:
        prompt = place // self.generation.n
        self.computed[prompt] = event.computed
        if event.logprobs is not None:
            self._prompt_logprobs[prompt] = event.logprobs

    def _echo(self, scribe: Scribe, place: int) -> Delta:
        """The prompt as the first piece of the answer."""
        ids = self.choices[place].written.ids
        text = scribe.tokenizer.decode(ids, skip_special_tokens=False)  # what was asked, to the letter
        if self.generation.sampling.get("logprobs") is None:
            return Text(text)
        return Text(text, scribe.tokens(ids, [None, *self._prompt_logprobs[place // self.generation.n]]))


async def _write(scribe: Scribe, prompt: Prompt, effort: Effort | None) -> Written:
    """Long texts in a thread: the loop has streams to carry."""
    if isinstance(prompt, str) and len(prompt) < LONG_TEXT:
        return scribe.write(prompt)
    return await asyncio.to_thread(scribe.write, prompt, effort)


def _forked(sampling: Sampling, index: int) -> Sampling:
    """The sampling of a request's choice: the first has the seed that was asked for, the others seeds made from it."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index * SEED_STEP) % 2**63)
