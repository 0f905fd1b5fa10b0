"""A model in your own process, without a server: `LLM("smollm2").generate(["Hello"], Sampling(max_tokens=20))`.

Importing this module loads weft's BLAS, which must happen before mlx is imported.
"""

import base64
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from weft.kernels import blas

BLAS = blas.bind()

from weft.config import EngineConfig, EngineSettings, read_draft_sources  # noqa: E402 - after the binding
from weft.engine.process import bring_up, device_in_use  # noqa: E402
from weft.engine.sequence import Sequence as EngineSequence  # noqa: E402
from weft.errors import ImageProblem, InvalidRequest, RequestError, UnsupportedParameter, WeftError  # noqa: E402
from weft.ipc.limits import Sampling  # noqa: E402
from weft.ipc.messages import FinishReason, Image, Timings, TokenEvent, TokenLogprob  # noqa: E402
from weft.model.download import shown  # noqa: E402
from weft.serving.image_decoder import ImageDecoder  # noqa: E402
from weft.text.bodies import convert  # noqa: E402
from weft.text.chat_messages import ChatMessage, read_messages  # noqa: E402
from weft.text.codec import Codec, EncodedPrompt  # noqa: E402
from weft.text.image_parts import ImageFile, read_images, with_images  # noqa: E402
from weft.text.image_sizing import Sizing  # noqa: E402
from weft.text.images import DecodedImage  # noqa: E402
from weft.text.sampling import merge_sampling, recommended_sampling  # noqa: E402
from weft.text.template import ChatTemplate  # noqa: E402
from weft.text.tokenizer import Detokenizer, Tokenizer  # noqa: E402
from weft.text.tools import read_tools, template_tools  # noqa: E402
from weft.text.types import Conversation  # noqa: E402

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True)
class Result:
    """One complete answer with its finish reason, logprobs and timings; if it failed, `error` says why."""

    token_ids: list[int]
    text: str
    finish: FinishReason
    logprobs: list[TokenLogprob] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    error: str | None = None


@dataclass(frozen=True)
class TextPiece:
    """A part of a streamed answer: new text, the token ids it came from, and at the end the finish reason."""

    text: str
    token_ids: list[int]
    finish: FinishReason | None = None


class LLM:
    """A model loaded into this process with its own engine; may only be used in the thread that created it."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        exact: bool = False,
        speculate: str = "auto",
        config: EngineConfig | None = None,
        progress: bool = False,
    ) -> None:
        """Load a model; `speculate` is auto, off or draft sources, as for `weft serve`. A `config` overrides both settings."""
        settings = EngineSettings(model=model, exact=exact, speculate=read_draft_sources(speculate))
        self.device = device_in_use()
        with shown(progress) as report:
            self.engine, self.loaded = bring_up(settings, BLAS, report, config)
        self.config = self.engine.config
        self.tokenizer = Tokenizer(self.loaded.folder)
        self.template = ChatTemplate.of(self.loaded.folder)
        self.default_sampling = merge_sampling(recommended_sampling(self.loaded.folder), {})
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._left: deque[EngineSequence] = deque()  # of streams that were closed elsewhere; the next turn cancels them

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None) -> list[Result]:
        """Answer prompts (texts, token ids or messages) in one batch and wait for all; one that is refused gets its error.

        A message's content is a text or a list of parts: {"type": "text", "text": …} and {"type": "image", "image": …}, with
        an image file's bytes or `Path`. Without `sampling` each prompt gets the parameters that the model's makers recommend, as
        on the server.
        """
        self._check_thread()
        is_one = isinstance(prompts, str | bytes) or (
            prompts and isinstance(prompts[0], int | Mapping)
        )  # a text, ids, or messages
        listed = cast(Sequence[Prompt], [prompts] if is_one else prompts)
        sampling = sampling or self.default_sampling
        samplings = [sampling] * len(listed) if isinstance(sampling, Sampling) else sampling
        if len(samplings) != len(listed):
            raise ValueError(f"{len(samplings)} samplings were given for {len(listed)} prompts; give one, or one for each")
        sequences: list[EngineSequence | RequestError] = []
        waiting: list[EngineSequence] = []
        try:
            for prompt, one in zip(listed, samplings, strict=True):
                try:
                    waiting.append(self.submit(prompt, one))
                    sequences.append(waiting[-1])
                except RequestError as error:
                    sequences.append(error)
            while not all(sequence.is_finished for sequence in waiting):
                self.turn()
        finally:
            self._leave(waiting)
        return [self.result(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[TextPiece]:
        """Yield the answer to one prompt piece by piece; closing the iterator early cancels the request."""
        sequence = self.submit(prompt, sampling)
        detokenizer, num_read = Detokenizer(self.tokenizer), 0
        try:
            while True:
                new, finish = sequence.output[num_read:], sequence.finish
                num_read += len(new)
                if sequence.error:
                    raise WeftError(sequence.error)
                if new or finish:
                    yield TextPiece("".join(map(detokenizer.feed, new)), new, finish)
                if finish:
                    return
                self.turn()
        finally:
            self._leave([sequence])

    def submit(self, prompt: Prompt, sampling: Sampling | None = None) -> EngineSequence:
        """Queue a request and return its sequence; call `turn()` until it `is_finished`. Raises RequestError if it is refused."""
        self._check_thread()
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise InvalidRequest("the prompt is bytes; decode them to a text, or send token ids as a list of int", "prompt")
        if not isinstance(prompt, Sequence):
            raise InvalidRequest(f"the prompt is of type {type(prompt).__name__}; send a text, token ids or messages", "prompt")
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return self.engine.submit(self.encode(cast(str | Sequence[int], prompt)), sampling or self.default_sampling)
        encoded = self.encode_messages(cast(Messages, prompt))
        return self.submit_ids(encoded.ids, sampling or self.default_sampling, encoded.images)

    def submit_ids(self, ids: list[int], sampling: Sampling, images: tuple[Image, ...] = ()) -> EngineSequence:
        """Queue token ids, in which these images have their places."""
        self._check_thread()
        return self.engine.submit(ids, sampling, images=images)

    def encode_messages(self, messages: Messages, **template: Any) -> EncodedPrompt:
        """Encode a conversation by the model's chat template, with its images decoded and resized for the model.

        `template` has variables of the template, and may have `tools` and `add_generation_prompt`.
        """
        return self.codec.encode(self.see(read_conversation(messages, **template)))

    def see(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its images decoded and resized for the model; raises RequestError naming a bad one."""
        if not (files := read_images(conversation)):
            return conversation
        if self.codec.images is None or self.engine.adapter.vision is None:
            why = self.engine.adapter.no_vision or "it has no vision part"
            raise UnsupportedParameter(f"{files[0].place} is an image, and the model reads text only: {why}", files[0].place)
        sizing = self.codec.images.sizing
        return with_images(conversation, [self._decode(one, sizing) for one in files])

    def _decode(self, file: ImageFile, sizing: Sizing) -> DecodedImage:
        try:
            return self._decoder.decode_now(file.data, sizing, file.max_pixels)
        except ImageProblem as error:
            raise file.problem(error) from error

    @cached_property
    def codec(self) -> Codec:
        return Codec(self.loaded.folder)

    @cached_property
    def _decoder(self) -> ImageDecoder:
        decoder = ImageDecoder()
        weakref.finalize(self, decoder.close)
        return decoder

    def turn(self) -> list[TokenEvent]:
        """Run one turn of the engine, at most one new decode step, and return the token events that it emitted."""
        self._check_thread()
        while self._left:
            self.engine.cancel(self._left.popleft())
        self.engine.turn()
        return self.engine.take_events()

    def result(self, sequence: EngineSequence | RequestError) -> Result:
        if isinstance(sequence, RequestError):
            return Result([], "", "error", error=str(sequence))
        ids, finish = list(sequence.output), sequence.finish or "cancelled"
        return Result(ids, self.tokenizer.decode(ids), finish, sequence.logprobs, sequence.timings, sequence.error)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)

    def render(self, messages: Messages, **template: Any) -> list[int]:
        """Return a conversation's token ids by the model's chat template; without one, of the contents joined by newlines."""
        if self.template is None:
            return self.encode("\n".join(str(message["content"]) for message in messages))
        return self.encode_messages(messages, **template).ids

    def _leave(self, sequences: Sequence[EngineSequence]) -> None:
        """Cancel what is not finished of these; in another thread or process only note it, because the engine is not there."""
        if not self._is_at_home:
            self._left.extend(sequences)
            return
        for sequence in sequences:
            self.engine.cancel(sequence)
        self._drain()

    def _drain(self) -> None:
        """Discard pending events, then run turns until finished rows have left, unless other requests still need tokens."""
        self.engine.take_events()
        while not self.engine.idle and not self.engine.scheduler.has_work:
            self.engine.turn()

    @property
    def _is_at_home(self) -> bool:
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _check_thread(self) -> None:
        if os.getpid() != self._process:
            message = (
                f"this LLM was made in process {self._process} and this one is a fork of it, without the threads that compute"
            )
            raise WeftError(f"{message}; make an LLM here, or start processes by multiprocessing's spawn")
        if not self._is_at_home:
            raise WeftError("this LLM belongs to the thread that made it; make it and use it in one thread")


def read_conversation(
    messages: Messages, tools: Sequence[dict[str, Any]] = (), add_generation_prompt: bool = True, **template: Any
) -> Conversation:
    """Read messages as /v1/chat/completions does; images may be bytes or paths too, because their reader is their sender."""
    places = [f"messages[{index}]" for index in range(len(messages))]
    sent = [convert(_with_images(one, place), ChatMessage, place) for one, place in zip(messages, places, strict=True)]
    read_tools(tools)
    return Conversation(read_messages(sent), template_tools(tools), template, add_generation_prompt)


def _with_images(message: Any, place: str) -> Any:
    """Return a message whose images are texts, as JSON has them. Raises ImageProblem naming one that can not be read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [_part(part, f"{place}.content[{index}]") for index, part in enumerate(message["content"])]
    return {**message, "content": parts}


def _part(part: Any, place: str) -> Any:
    image = part.get("image") if isinstance(part, Mapping) else None
    if not isinstance(image, bytes | Path):
        return part
    try:
        data = image if isinstance(image, bytes) else image.read_bytes()
    except OSError as error:
        raise ImageProblem(f"{place}: {image!s} could not be read: {error.strerror}", place) from error
    return {**part, "image": base64.b64encode(data).decode()}
