"""What is served, and a request's way in: find its model → write → check → submit. Reading the answer is `answer`'s.

Knows scribes, engines' clients and who is being answered. HTTP stands above it, the engine's process beyond the link.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from weft.errors import EngineDied, EngineStarting, QueueFull, RequestCancelled, ServerStopping, UnknownModel, WeftError
from weft.ipc.messages import ConstraintSpec, Limits, Ready, Sampling
from weft.metrics import Metrics
from weft.serving.answer import ActiveRequest
from weft.serving.engine_process import Supervisor
from weft.text.codec import Codec, EncodedPrompt
from weft.text.miss_report import Reports, RequestReport
from weft.text.types import Effort, GenerationRequest, LateSystem, Prompt

log = logging.getLogger("weft.serving.service")

LOAD_IT = "what `weft ls` lists can be loaded with `weft load NAME` or POST /v1/models/load"
STOPPED = "the server was stopped before this answer was complete; come again"
LONG_TEXT = 4096  # characters from which writing a prompt is left to a thread, so that streams do not wait for it
KNOWN_ENDS = 8  # answers that must have come to their ends before one can say how fast they do
UNKNOWN_SECONDS = 5  # until then it is said to take so long
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of one request's choices


class LoadScreen(Protocol):
    """Who is told how models come up."""

    def loading(self, model: str, what: str, done: int, total: int) -> None:
        """A model is on its way."""

    def ready(self, model: str, context: int, device: str, memory: dict[str, int], notice: str | None = None) -> None:
        """A model answers."""

    def failed(self, model: str, message: str) -> None:
        """A model can not be served."""


class FinishRate:
    """How fast a model's answers come to their ends while it is at work: the last few of them."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=32)  # seconds between two ends
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Its rest is over: somebody asks."""
        self._last = now

    def ended(self, now: float) -> None:
        """An answer has its end."""
        self._gaps.append(now - self._last)
        self._last = now

    def seconds(self, count: int, now: float) -> int:
        """In how many seconds so many will have theirs, if it goes on like this."""
        if len(self._gaps) < KNOWN_ENDS:
            return UNKNOWN_SECONDS
        return math.ceil(count * (sum(self._gaps) + now - self._last) / len(self._gaps))


class ServedModel:
    """One model as the front serves it: its engine, and once that is up its scribe."""

    def __init__(self, asked: str, supervisor: Supervisor, late_system: LateSystem = "fold") -> None:
        self.name = asked
        self.supervisor = supervisor
        self.codec: Codec | None = None
        self.failed: str | None = None
        self._late_system = late_system
        self._folder: str | None = None  # whose files the scribe has read
        self.is_stopping = False
        self.is_guest = False  # loaded on request: its troubles are not the server's
        self.is_leaving = False  # being unloaded
        self.num_opening = 0  # answers asked for whose prompts are being written
        self.pace = FinishRate()
        self._settled = asyncio.Event()  # it is up, or never will be

    async def run(self, screen: LoadScreen) -> None:
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
            self.codec = await asyncio.to_thread(Codec, Path(ready.folder), self._late_system)
            self.name, self._folder = ready.model, ready.folder
        except Exception as error:  # a border: whatever is wrong with a model's files, nobody may wait for it
            log.exception("the files of %s can not be read", self.name)
            self.failed = str(error)

    def _tell(self, screen: LoadScreen) -> None:
        ready, loading = self.supervisor.condition.ready, self.supervisor.condition.loading
        if self.failed is not None:
            screen.failed(self.name, self.failed)
        elif ready is not None and self.is_ready:
            screen.ready(self.name, ready.limits.context_length, ready.device, ready.memory, self.notice)
        elif loading is not None:
            screen.loading(self.name, loading.what, loading.done, loading.total)
        if self.is_ready or self.failed is not None or self.is_leaving:
            self._settled.set()
        else:
            self._settled.clear()

    def leave(self) -> None:
        """Take nothing new from now on; who waits for it to be up waits no longer."""
        self.is_leaving = True
        self._settled.set()

    async def until_settled(self) -> None:
        """Return when it is up, or never will be."""
        await self._settled.wait()

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        condition = self.supervisor.condition
        is_up = self.codec is not None and condition.ready is not None and not condition.is_sick
        return is_up and self.failed is None and not self.is_leaving

    @property
    def notice(self) -> str | None:
        """What the operator should know of it."""
        ready, calls = self.supervisor.condition.ready, self.codec.calls if self.codec is not None else None
        notices = [ready.notice if ready is not None else None, calls.notice if calls is not None else None]
        return "; ".join(filter(None, notices)) or None

    @property
    def memory(self) -> dict[str, int]:
        """The engine's bytes by kind, as last told."""
        ready = self.supervisor.condition.ready
        return self.supervisor.status.memory or (ready.memory if ready is not None else {})

    @property
    def is_loading(self) -> bool:
        """Whether it will answer if one waits."""
        return not self.is_ready and self.failed is None and not self.is_stopping and not self.is_leaving

    def require(self) -> tuple[Codec, Ready]:
        """What is needed to answer. Raises EngineStarting, or EngineDied when it never will be up."""
        condition = self.supervisor.condition
        if self.is_leaving:
            raise UnknownModel(f"{self.name} is not loaded any more; {LOAD_IT}", "model")
        if self.failed is not None:
            raise EngineDied(f"{self.name} can not be served: {self.failed}")
        if self.is_stopping:
            raise ServerStopping("the server is being stopped; come again", retry_after=5)
        if self.codec is None or condition.ready is None or condition.is_sick:
            what = "its engine is silent" if condition.is_sick else condition.loading.what if condition.loading else "starting"
            raise EngineStarting(f"{self.name} is not ready yet ({what}); try again in a moment", retry_after=2)
        return self.codec, condition.ready


class Service:
    """Everything that is served, and who is being answered."""

    def __init__(
        self, models: Sequence[ServedModel], metrics: Metrics, max_queue: int, make: Callable[[str], ServedModel]
    ) -> None:
        self.models = list(models)
        self.make = make  # one more model of this name, not yet started
        self.is_stopping = False
        self.metrics = metrics
        self.max_queue = max_queue
        self.answers: dict[str, list[ActiveRequest]] = {}
        self.watchers: list[Callable[[ActiveRequest], None]] = []  # hear of every answer that is over
        self.waiting: list[WaitingRequest] = []
        self.reports = Reports()
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}
        self._screen: LoadScreen | None = None

    async def start(self, screen: LoadScreen, on_failure: Callable[[], None]) -> None:
        """Bring all models up in the background; `on_failure` is called when none is left."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and self.has_failed:
                on_failure()

        self._screen = screen
        for served in self.models:
            self._run(served).add_done_callback(ended)

    def add(self, served: ServedModel) -> None:
        """Bring one more model up in the background."""
        self.models.append(served)
        self._run(served)

    async def remove(self, served: ServedModel) -> None:
        """End a model's engine; nothing is known of it afterwards."""
        if (task := self._tasks.pop(served, None)) is None:  # somebody else is about it
            return
        task.cancel()
        await served.supervisor.stop()
        self.models.remove(served)
        self.metrics.unloaded(served.name)

    def _run(self, served: ServedModel) -> asyncio.Task[None]:
        assert self._screen is not None
        self._tasks[served] = asyncio.create_task(served.run(self._screen))
        return self._tasks[served]

    async def stop(self) -> None:
        """End all engines."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(served.supervisor.stop() for served in self.models))

    @property
    def has_failed(self) -> bool:
        """Whether what the server was started for can not be served, nor anything else."""
        return any(not served.is_guest for served in self.models) and all(served.failed for served in self.models)

    def find(self, name: str | None) -> ServedModel:
        """The model that goes by this name; the only one may go unnamed."""
        models = [served for served in self.models if not served.is_leaving]
        if not name and len(models) == 1:
            return models[0]
        for served in models:
            if name == served.name:
                return served
        names = ", ".join(served.name for served in models) or "none"
        wanted = f"no model {name!r} is" if name else "the request names no model, and not one alone is"
        raise UnknownModel(f"{wanted} loaded here; loaded: {names}; {LOAD_IT}", "model")

    async def open(self, generation: GenerationRequest, request_id: str) -> ActiveRequest:
        """Write the prompts down, check everything, and ask the engine. Raises whatever is wrong with the request."""
        arrived = time.monotonic()
        served = self.find(generation.model)
        forget = partial(self._forget, served)
        with self._place(served, generation):
            codec, ready = served.require()
            generation = codec.fitted(generation)
            written = [await _write(codec, prompt, generation.effort) for prompt in generation.prompts]
            constraints = [await _constraint(codec, generation, prompt) for prompt in written]
            sampling = codec.sampling(generation.sampling)
            if generation.echo:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=sampling.logprobs)
            if generation.is_flexible:
                sampling = _shortened(sampling, ready.limits, written)
            for prompt in written:
                ready.limits.check(prompt.ids, sampling)
            codec, ready = served.require()  # the engine may have gone while a thread wrote
            samplings = tuple(_forked(sampling, index) for index in range(generation.n))
            answer = ActiveRequest(request_id, served.name, codec, generation, written, arrived, self.metrics, forget)
            answer.subscription = served.supervisor.client.submit(
                [prompt.ids for prompt in written],
                [samplings] * len(written),
                constraints,
                [prompt.boundaries for prompt in written],
                generation.cache_salt,
                generation.client,
                generation.priority,
                is_retained=bool(generation.session),
            )
        self.answers.setdefault(request_id, []).append(answer)
        try:
            await answer.subscription.until_taken(len(written))
        except BaseException:  # refused, or nobody waits any more: either way nothing may stay behind
            answer.close()
            raise
        return answer

    async def count(self, generation: GenerationRequest) -> int:
        """How many tokens the prompts of a request have. Raises what is wrong with them."""
        served = self.find(generation.model)
        codec, _ = served.require()
        generation = codec.fitted(generation)
        return sum([len((await _write(codec, prompt, generation.effort)).ids) for prompt in generation.prompts])

    def open_later(self, generation: GenerationRequest, request_id: str) -> WaitingRequest:
        """The same for a model that is still on its way: something to wait with, for a stream that has time."""
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests wait for a model to be loaded; come again", retry_after=5)
        return WaitingRequest(self, generation, request_id)

    @contextmanager
    def _place(self, served: ServedModel, generation: GenerationRequest) -> Iterator[None]:
        """Hold the places of a request while its prompts are written: who is one too many costs no writing."""
        _, ready = served.require()
        taken, count = len(served.supervisor.client.live) + served.num_opening, len(generation.prompts) * generation.n
        now = time.monotonic()
        if taken + count > ready.max_rows + self.max_queue:
            message = f"{taken} answers of {served.name} are running or waiting, {count} more are too many; come again"
            raise QueueFull(message, retry_after=served.pace.seconds(taken, now))
        if not taken:
            served.pace.begin(now)
        served.num_opening += count
        try:
            yield
        finally:
            served.num_opening -= count

    def cancel(self, request_id: str) -> bool:
        """End the requests with this id; whether there was one."""
        answers: list[ActiveRequest | WaitingRequest] = [one for one in self.waiting if one.request_id == request_id]
        answers += self.answers.get(request_id, [])
        for answer in answers:
            answer.abandon(RequestCancelled("the request was cancelled before its answer was complete"))
        return bool(answers)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is being answered, or waits to be."""
        return not self.answers and not self.waiting

    def answers_of(self, served: ServedModel) -> list[ActiveRequest]:
        """Those that a model is giving."""
        return [answer for answers in self.answers.values() for answer in answers if answer.model == served.name]

    def take_nothing_new(self) -> None:
        """From now on requests are refused; those that run go on."""
        self.is_stopping = True
        for served in self.models:
            served.is_stopping = True

    def abandon_all(self) -> None:
        """End every request with an error: the server stops."""
        self.take_nothing_new()
        everybody: list[ActiveRequest | WaitingRequest] = [answer for answers in self.answers.values() for answer in answers]
        for one in [*everybody, *self.waiting]:
            one.abandon(ServerStopping(STOPPED))

    def _forget(self, served: ServedModel, answer: ActiveRequest) -> None:
        """An answer has its end; what can be said of it is kept for a while."""
        for _ in answer.choices:
            served.pace.ended(time.monotonic())
        if (report := answer.report) is not None:
            self.reports.add(report)
        for watcher in self.watchers:
            watcher(answer)
        with suppress(KeyError, ValueError):
            self.answers[answer.request_id].remove(answer)
            if not self.answers[answer.request_id]:
                del self.answers[answer.request_id]

    def report(self, request_id: str) -> RequestReport | None:
        """What is known of a request that runs or has ended; None for one too long ago, or without a first token yet."""
        running = (answer.report for answer in self.answers.get(request_id, ()))
        return next((report for report in running if report is not None), self.reports.find(request_id))


class WaitingRequest:
    """A request that came before its model was ready."""

    def __init__(self, service: Service, generation: GenerationRequest, request_id: str) -> None:
        self.service = service
        self.request_id = request_id
        self._error: WeftError | None = None
        self._task = asyncio.create_task(self._open(generation))
        service.waiting.append(self)

    async def take(self, seconds: float) -> ActiveRequest | None:
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

    async def _open(self, generation: GenerationRequest) -> ActiveRequest:
        try:
            while True:
                served = self.service.find(generation.model)
                await served.until_settled()
                with suppress(EngineStarting):
                    return await self.service.open(generation, self.request_id)
        finally:
            self.service.waiting.remove(self)


async def _write(codec: Codec, prompt: Prompt, effort: Effort | None) -> EncodedPrompt:
    """Long texts in a thread: the loop has streams to carry."""
    if isinstance(prompt, str) and len(prompt) < LONG_TEXT:
        return codec.write(prompt)
    return await asyncio.to_thread(codec.write, prompt, effort)


async def _constraint(codec: Codec, generation: GenerationRequest, written: EncodedPrompt) -> ConstraintSpec | None:
    """With tools in a thread too: there may be many."""
    if generation.tool_choice is None:
        return codec.constraint(generation, written)
    return await asyncio.to_thread(codec.constraint, generation, written)


def _shortened(sampling: Sampling, limits: Limits, written: Sequence[EncodedPrompt]) -> Sampling:
    """The same with at most as many tokens as there is room for. Raises where there is room for none."""
    unbounded = msgspec.structs.replace(sampling, max_tokens=None)
    room = min(limits.check(prompt.ids, unbounded) for prompt in written)
    return msgspec.structs.replace(sampling, max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens))


def _forked(sampling: Sampling, index: int) -> Sampling:
    """The sampling of a request's choice: the first has the seed that was asked for, the others seeds made from it."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index * SEED_STEP) % 2**63)
