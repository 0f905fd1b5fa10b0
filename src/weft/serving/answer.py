"""A request being answered: what its choices have new, as it comes, until it has ended or nobody waits any more.

Knows a ticket and choices; who opened it is told when it is over. The service makes them, `api` reads them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable

from weft.errors import RowFailed, WeftError
from weft.ipc.messages import FinishReason, PromptEvent, TokenEvent, TokenLogprob
from weft.metrics import Metrics
from weft.serving.choice_stream import ChoiceStream
from weft.serving.subscription import Subscription
from weft.text.codec import Codec, EncodedPrompt
from weft.text.miss_report import RequestReport
from weft.text.schema import SchemaCheck
from weft.text.types import Delta, GenerationRequest, Text, Usage

Parts = list[tuple[int, list[Delta]]]


class ActiveRequest:
    """What the choices of one request have new. Leaving `parts` cancels it."""

    def __init__(
        self,
        request_id: str,
        model: str,
        codec: Codec,
        generation: GenerationRequest,
        written: list[EncodedPrompt],
        arrived: float,
        metrics: Metrics,
        on_close: Callable[[ActiveRequest], None],
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.generation = generation
        self.written = written
        self.subscription: Subscription  # given when the engine is asked
        self.arrived = arrived
        self.error: WeftError | None = None
        self._created = int(time.time())
        self._metrics = metrics
        self._on_close = on_close
        prompts = [prompt for prompt in written for _ in range(generation.n)]
        grammar = generation.grammar
        check = SchemaCheck(grammar) if grammar is not None and grammar.kind == "json_schema" and grammar.lenient else None
        self.choices = [ChoiceStream(codec, prompt, generation, check) for prompt in prompts]
        self.computed = [0] * len(written)
        self._prompt_logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(written)
        if generation.echo:
            for place, choice in enumerate(self.choices):
                choice.opening = lambda place=place: self._echo(codec, place)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.written)

    @property
    def finish(self) -> FinishReason:
        """Why it ended, of several choices the first that was cut."""
        reasons = {choice.finish.reason for choice in self.choices if choice.finish is not None}
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
    def report(self) -> RequestReport | None:
        """What can be said of it later; None before the engine has said anything."""
        if self.choices[0].timings is None:
            return None
        return RequestReport(self.request_id, self.model, self._created, self.usage)

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
                news = self._read(await self.subscription.take(max(0.0, told + silence - time.monotonic())))
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
        self.subscription.cancel()
        self._on_close(self)

    def abandon(self, error: WeftError) -> None:
        """End it from outside: whoever reads `parts` gets this error."""
        self.subscription.cancel()
        self.subscription.fail(error)

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
                self._metrics.token_gap(self.model, now - choice.last_at)
            news.setdefault(place, []).extend(choice.take(event, now))
            if choice.finish is not None and event.finish is None:
                self.subscription.cancel(place)
        return [(place, deltas) for place, deltas in news.items() if deltas]

    def _note_prompt(self, place: int, event: PromptEvent) -> None:
        prompt = place // self.generation.n
        self.computed[prompt] = event.computed
        if event.logprobs is not None:
            self._prompt_logprobs[prompt] = event.logprobs

    def _echo(self, codec: Codec, place: int) -> Delta:
        """The prompt as the first piece of the answer."""
        ids = self.choices[place].written.ids
        text = codec.tokenizer.decode(ids, skip_special_tokens=False)  # what was asked, to the letter
        if self.generation.sampling.get("logprobs") is None:
            return Text(text)
        return Text(text, codec.tokens(ids, [None, *self._prompt_logprobs[place // self.generation.n]]))
