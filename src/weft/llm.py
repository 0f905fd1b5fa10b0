"""A model in your own process, without a server: `LLM("smollm2").generate(["Hello"], Sampling(max_tokens=20))`.

Importing this module loads weft's BLAS, which must happen before mlx is imported.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from weft.kernels import blas

BLAS = blas.bind()

from weft.config import EngineConfig, EngineSettings, read_draft_sources  # noqa: E402 - after the binding
from weft.engine.process import bring_up, device_in_use  # noqa: E402
from weft.engine.sequence import Sequence as EngineSequence  # noqa: E402
from weft.errors import RequestError, WeftError  # noqa: E402
from weft.ipc.limits import Sampling  # noqa: E402
from weft.ipc.messages import FinishReason, Timings, TokenEvent, TokenLogprob  # noqa: E402
from weft.model.download import shown  # noqa: E402
from weft.text.sampling import merge_sampling, recommended_sampling  # noqa: E402
from weft.text.template import ChatTemplate  # noqa: E402
from weft.text.tokenizer import Detokenizer, Tokenizer  # noqa: E402

Prompt = str | Sequence[int]


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
        self._thread = threading.get_ident()

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None) -> list[Result]:
        """Answer prompts (texts or token ids) in one batch and wait for all; a refused prompt gets a Result with its error.

        Without `sampling` each prompt gets the parameters that the model's makers recommend, as on the server.
        """
        is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))  # a text, or its ids
        listed = cast(Sequence[Prompt], [prompts] if is_one else prompts)
        sampling = sampling or self.default_sampling
        samplings = [sampling] * len(listed) if isinstance(sampling, Sampling) else sampling
        if len(samplings) != len(listed):
            raise ValueError(f"{len(samplings)} samplings were given for {len(listed)} prompts; give one, or one for each")
        sequences: list[EngineSequence | RequestError] = []
        for prompt, one in zip(listed, samplings, strict=True):
            try:
                sequences.append(self.submit(prompt, one))
            except RequestError as error:
                sequences.append(error)
        waiting = [sequence for sequence in sequences if isinstance(sequence, EngineSequence)]
        try:
            while not all(sequence.is_finished for sequence in waiting):
                self.turn()
        finally:
            for sequence in waiting:
                self.engine.cancel(sequence)
            self._drain()
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
            self.engine.cancel(sequence)
            self._drain()

    def submit(self, prompt: Prompt, sampling: Sampling | None = None) -> EngineSequence:
        """Queue a request and return its sequence; call `turn()` until it `is_finished`. Raises RequestError if it is refused."""
        self._check_thread()
        return self.engine.submit(self.encode(prompt), sampling or self.default_sampling)

    def turn(self) -> list[TokenEvent]:
        """Run one turn of the engine, at most one new decode step, and return the token events that it emitted."""
        self._check_thread()
        self.engine.turn()
        return self.engine.take_events()

    def result(self, sequence: EngineSequence | RequestError) -> Result:
        if isinstance(sequence, RequestError):
            return Result([], "", "error", error=str(sequence))
        ids, finish = list(sequence.output), sequence.finish or "cancelled"
        return Result(ids, self.tokenizer.decode(ids), finish, sequence.logprobs, sequence.timings, sequence.error)

    def encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Return a conversation's token ids by the model's chat template; without one, of the contents joined by newlines."""
        if self.template is None:
            return self.encode("\n".join(str(message["content"]) for message in messages))
        return self.tokenizer.encode(self.template.render(messages, **template), add_special_tokens=False)

    def _drain(self) -> None:
        """Discard pending events, then run turns until finished rows have left, unless other requests still need tokens."""
        self.engine.take_events()
        while not self.engine.idle and not self.engine.scheduler.has_work:
            self.engine.turn()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise WeftError("this LLM belongs to the thread that made it; make it and use it in one thread")
