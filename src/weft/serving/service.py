"""The served models and the active requests; `Service.generate` takes a request from its arrival to its end."""

import asyncio
import difflib
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

import msgspec

from weft.errors import (
    ImageProblem,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    ServerStopping,
    UnknownModel,
    UnsupportedParameter,
    WeftError,
)
from weft.ipc.limits import Limits, Sampling
from weft.ipc.messages import Ready, Submit
from weft.metrics import Metrics
from weft.serving.active_request import ActiveRequest, Parts, Reports, RequestReport
from weft.serving.image_decoder import ImageDecoder
from weft.serving.lanes import EncodingLanes, num_characters
from weft.serving.model import LOAD_HINT, ServedModel, ServerScreen
from weft.serving.silence import Silence
from weft.serving.text_processes import TextProcesses
from weft.text.codec import Codec, EncodedPrompt
from weft.text.image_parts import ImageFile, image_places, read_images, with_images
from weft.text.image_sizing import Sizing
from weft.text.images import DecodedImage
from weft.text.sampling import check_windows
from weft.text.types import Conversation, Finish, GenerationRequest, Prompt

LONG_TEXT = 4096  # characters from which a prompt is encoded in a thread, so that streams do not wait for it
TenantTest = Callable[[str], bool]  # whether what is asked for may be a tenant's with this id

SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of one request's choices


class Service:
    """Owns the served models and the active requests; answers requests, and starts, adds, removes and stops models."""

    def __init__(self, models: list[ServedModel], metrics: Metrics, max_queue: int, make: Callable[[str], ServedModel]) -> None:
        self.models = models
        self.make = make  # makes one more model of this name, not yet started
        self.is_stopping = False
        self.metrics = metrics
        self.max_queue = max_queue
        self.active: list[ActiveRequest] = []  # several may have the same id
        self.watchers: list[Callable[[ActiveRequest], None]] = []  # called with every request that is over
        self.reports = Reports()
        self.on_hangup: Callable[[], None] = lambda: None  # reads again what may change meanwhile; may raise WeftError
        self.decoder = ImageDecoder()
        self.lanes = EncodingLanes()
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}
        self._screen: ServerScreen | None = None

    async def generate(self, request: ActiveRequest, silence: Silence) -> AsyncGenerator[Parts]:
        """Answer one request: find its model, encode and submit its prompts, and yield the deltas of its choices.

        Yields an empty list when the request waits for its model, and when the engine has accepted it; then deltas as they
        come, and an empty list whenever the `silence` of its client is over, which the caller ends by sending bytes.
        Raises WeftError if the request is refused or fails. Closing the generator cancels the request.
        """
        model, generation = self.find(request.generation.model), request.generation
        self.active.append(request)
        try:
            if request.may_wait and model.is_loading:
                async for _ in self._until_loaded(request, model, silence):
                    yield []
                model = self.find(generation.model)  # a fallback may have taken its place
            request.model = model.name
            with model.place(generation.tenant, len(generation.prompts) * generation.n, self.max_queue):
                codec, ready = model.require()
                generation = request.generation = codec.fitted(generation)
                generation = request.generation = await self._see(codec, ready, generation)
                encoded, samplings = await self._encode(request, codec, ready.limits)
                if model.is_loading:  # the engine went while a thread encoded
                    async for _ in self._until_loaded(request, model, silence):
                        yield []
                model.require()
                request.check()
                dispatcher, request.sampling = model.pool.dispatcher, samplings[0]
                submits = [_submit(dispatcher.new_numbers(len(samplings)), prompt, samplings, generation) for prompt in encoded]
                subscription = dispatcher.submit(submits)
                request.start(codec, encoded, subscription)
            await subscription.until_accepted()
            yield []
            while not request.is_done:
                events = await subscription.take(silence.seconds_left)
                news = await _checked(request, model.processes, request.read(events, self.metrics))
                if news or silence.is_over:
                    yield news
        except WeftError as error:
            request.error = error
            raise
        finally:
            self._close(request, model)

    async def _until_loaded(self, request: ActiveRequest, model: ServedModel, silence: Silence) -> AsyncGenerator[None]:
        """Wait while a model is being loaded, yielding at once and after each `silence`; raise QueueFull if too many wait."""
        if sum(one.generation.tenant == request.generation.tenant for one in self.waiting) >= self.max_queue:
            raise QueueFull(f"{self.max_queue} requests wait for a model to be loaded; come again", retry_after=5)
        request.is_waiting = True
        try:
            while model.is_loading:
                yield
                await request.wait_for(model.settled, silence.seconds_left)
        finally:
            request.is_waiting = False

    def _close(self, request: ActiveRequest, model: ServedModel) -> None:
        """Remove a request that is over: cancel its open sequences, keep its report, and call the watchers."""
        if request.subscription is not None:
            request.subscription.cancel()
            for _ in request.choices:
                model.queue.finish_rate.finish(time.monotonic())
            if (report := request.report) is not None:
                self.reports.add(report)
            for watcher in self.watchers:
                watcher(request)
        self.active.remove(request)

    async def count_tokens(self, generation: GenerationRequest) -> int:
        """Return the number of tokens in all prompts of a request; raise WeftError if they or its model are not usable."""
        codec, ready = self.find(generation.model).require()
        generation = await self._see(codec, ready, codec.fitted(generation))
        check = codec.length_check(ready.limits.context_length)

        def count() -> int:
            return sum(len(codec.encode(prompt, generation.reasoning_asked, check).ids) for prompt in generation.prompts)

        return await self.lanes.run(generation.tenant, num_characters(generation), count)

    async def _encode(
        self, request: ActiveRequest, codec: Codec, limits: Limits
    ) -> tuple[list[EncodedPrompt], tuple[Sampling, ...]]:
        """Encode and check a request's prompts, in a thread unless they are short texts without tools. Raises RequestError."""
        generation = request.generation
        check = codec.length_check(limits.context_length, lambda: request.error is None)

        def encode() -> tuple[list[EncodedPrompt], tuple[Sampling, ...]]:
            encoded = codec.encode_request(generation, check)
            return encoded, _samplings(codec, generation, limits, encoded)

        is_short = all(isinstance(prompt, str) and len(prompt) < LONG_TEXT for prompt in generation.prompts)
        if is_short and generation.tool_choice is None and len(generation.prediction or "") < LONG_TEXT:
            return encode()
        return await request.while_wanted(self.lanes.run(generation.tenant, num_characters(generation), encode))

    async def _see(self, codec: Codec, ready: Ready, generation: GenerationRequest) -> GenerationRequest:
        """Return the request with its images decoded and resized for its model. Raises RequestError naming the image."""
        prompts: list[Prompt] = []
        for prompt in generation.prompts:
            if not isinstance(prompt, Conversation) or (place := next(image_places(prompt), None)) is None:
                prompts.append(prompt)
                continue
            if codec.images is None or not ready.has_vision:
                why = ready.no_vision or "it has no vision part"
                raise UnsupportedParameter(f"{place[0]} is an image, and the model reads text only: {why}", place[0])
            files = await asyncio.to_thread(read_images, prompt)
            sizing = codec.images.sizing
            decoded = [await self._decode(one, sizing) for one in files]
            prompts.append(with_images(prompt, decoded))
        return replace(generation, prompts=tuple(prompts))

    async def _decode(self, file: ImageFile, sizing: Sizing) -> DecodedImage:
        try:
            return await self.decoder.decode(file.data, sizing, file.max_pixels)
        except ImageProblem as error:
            raise file.problem(error) from error

    def find(self, name: str | None) -> ServedModel:
        """Return the served model of this name, or the only one if no name is given; raise UnknownModel if there is none."""
        models = [model for model in self.models if not model.is_leaving]
        if not name and len(models) == 1:
            return models[0]
        for model in models:
            if name == model.name:
                return model
        names = [model.name for model in models]
        wanted = f"no model {name!r} is" if name else "the request names no model, and not one alone is"
        near = difflib.get_close_matches(name or "", names, 1)
        meant = f" (is {near[0]} meant?)" if near else ""
        raise UnknownModel(f"{wanted} loaded here{meant}; loaded: {', '.join(names) or 'none'}; {LOAD_HINT}", "model")

    def cancel(self, request_id: str, may_see: TenantTest = lambda _: True) -> list[ActiveRequest]:
        """Cancel all active requests with this id, of tenants that `may_see` accepts, and return them."""
        found = [one for one in self.active if one.id == request_id and may_see(one.generation.tenant)]
        for request in found:
            request.abandon(RequestCancelled("the request was cancelled before its answer was complete"))
        return found

    def report(self, request_id: str, may_see: TenantTest = lambda _: True) -> RequestReport | None:
        """Return the report of an active or recent request; None if it is unknown, too old, or the engine sent no timings yet."""
        own = [one for one in self.active if may_see(one.generation.tenant)]
        running = (request.report for request in own if request.id == request_id)
        return next(filter(None, running), self.reports.find(request_id, may_see))

    def submitted(self, model: ServedModel | None = None) -> list[ActiveRequest]:
        return [one for one in self.active if one.is_submitted and (model is None or one.model == model.name)]

    @property
    def waiting(self) -> list[ActiveRequest]:
        return [one for one in self.active if one.is_waiting]

    async def start(self, screen: ServerScreen, on_failure: Callable[[], None]) -> None:
        """Start loading all models in the background and return; `on_failure` is called when no model can be served."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and self.has_failed:
                on_failure()

        self._screen = screen
        for model in self.models:
            self._run(model).add_done_callback(ended)

    def add(self, model: ServedModel) -> None:
        self.models.append(model)
        self._run(model)

    async def remove(self, model: ServedModel) -> None:
        if (task := self._tasks.pop(model, None)) is None:  # somebody else is about it
            return
        task.cancel()
        model.processes.close()
        await model.pool.stop()
        self.models.remove(model)
        model.count_drafts(self.metrics)
        self.metrics.unloaded(model.name)

    def _run(self, model: ServedModel) -> asyncio.Task[None]:
        assert self._screen is not None
        self._tasks[model] = asyncio.create_task(model.run(self._screen))
        return self._tasks[model]

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for model in self.models:
            model.processes.close()
        await asyncio.gather(*(model.pool.stop() for model in self.models))
        self.lanes.close()
        await asyncio.to_thread(self.decoder.close)

    @property
    def has_failed(self) -> bool:
        """Whether all models have failed, at least one of which the server was started with."""
        return any(not model.is_guest for model in self.models) and all(model.failed for model in self.models)

    def take_nothing_new(self) -> None:
        """Refuse new requests from now on; running requests continue."""
        self.is_stopping = True
        for model in self.models:
            model.is_stopping = True

    def abandon_all(self) -> None:
        """Refuse new requests and end every active one with the error ServerStopping."""
        self.take_nothing_new()
        for request in self.active:
            request.abandon(ServerStopping("the server was stopped before this answer was complete; come again"))


async def _checked(request: ActiveRequest, processes: TextProcesses, news: Parts) -> Parts:
    """Return the deltas; where an answer ends that has a non-strict schema, with what the schema finds wrong with it."""
    for index, deltas in news:
        choice = request.choices[index]
        if isinstance(deltas[-1], Finish) and (unchecked := choice.unchecked) is not None:
            check = partial(processes.find_schema_errors, *unchecked)
            errors = await asyncio.wrap_future(processes.check_threads.submit(request.generation.tenant, check))
            choice.finish = deltas[-1] = replace(deltas[-1], schema_errors=errors)
    return news


def _samplings(codec: Codec, generation: GenerationRequest, limits: Limits, encoded: list[EncodedPrompt]) -> tuple[Sampling, ...]:
    """Return the sampling of each choice, each with its seed; raise RequestError if a prompt or parameter exceeds the limits."""
    sampling = codec.sampling(generation)
    check_windows(generation.penalty_windows, generation.sampling, sampling)
    of_prompt = sampling.logprobs if generation.echo else generation.prompt_logprobs
    if of_prompt is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=of_prompt)
    if generation.is_flexible:  # at most as many tokens as there is room for
        unbounded = msgspec.structs.replace(sampling, max_tokens=None)
        room = min(limits.check(prompt.ids, unbounded) for prompt in encoded)
        wanted = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        sampling = msgspec.structs.replace(sampling, max_tokens=wanted)
    limits.check_tokens("allowed_token_ids", generation.allowed_token_ids or ())
    for prompt in encoded:
        limits.check(prompt.ids, sampling)
        if (num_tokens := len(prompt.prediction)) > limits.context_length:
            message = f"prediction has {num_tokens} tokens, and the longest context here is {limits.context_length}; shorten it"
            raise InvalidRequest(message, "prediction")
    seeds = [choice_seed(sampling.seed, index) for index in range(generation.n)]
    return tuple(msgspec.structs.replace(sampling, seed=seed) for seed in seeds)


def choice_seed(given: int | None, index: int) -> int:
    """Return the seed of a choice: `given` for the first, derived from it for the others; random if `given` is None.

    Never None, so that an answer that is resumed in another engine draws the same random numbers.
    """
    if given is None:
        return int.from_bytes(os.urandom(8), "little") >> 1
    return given if index == 0 else (given + index * SEED_STEP) % 2**63


def _submit(
    numbers: tuple[int, ...], prompt: EncodedPrompt, samplings: tuple[Sampling, ...], generation: GenerationRequest
) -> Submit:
    return Submit(
        numbers=numbers,
        prompt=prompt.ids,
        samplings=samplings,
        constraint=prompt.constraint,
        boundaries=prompt.boundaries,
        salt=generation.cache_salt,
        scope=generation.scope,
        tenant=generation.tenant,
        client=generation.client,
        priority=generation.priority,
        rank=generation.rank,
        is_retained=bool(generation.session),
        prediction=prompt.prediction,
        speculate=generation.speculate,
        images=prompt.images,
    )
