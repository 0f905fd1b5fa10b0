"""One answer of a request: reads its tokens, counts them, knows why it ended.

Knows a reader and what the engine tells of one sequence, nothing of the request's other choices; `Answer` has one for each.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.ipc.messages import Timings, TokenEvent
from weft.text.codec import Codec, EncodedPrompt
from weft.text.miss_report import explained
from weft.text.schema import SchemaCheck
from weft.text.types import CallOpened, Delta, Ending, Finish, GenerationRequest, ReuseExplanation, Text, Usage


class ChoiceStream:
    """What became of one sequence so far."""

    def __init__(self, codec: Codec, written: EncodedPrompt, generation: GenerationRequest, check: SchemaCheck | None) -> None:
        self.reader = codec.reader(generation, written)
        self.written = written
        self.stop_token_ids = generation.sampling.get("stop_token_ids", ())
        self.check = check
        self._told: list[str] = []  # the answer so far, where it will be checked
        self.opening: Callable[[], Delta] | None = None  # the echo of the prompt, told before anything else
        self.has_calls = False
        self.num_tokens = 0
        self.timings: Timings | None = None
        self.first_at = self.last_at = 0.0
        self.finish: Finish | None = None
        self._reused: ReuseExplanation | None = None
        self._tokenizer = codec.tokenizer
        self._is_salted = bool(generation.cache_salt)

    def take(self, event: TokenEvent, now: float) -> list[Delta]:
        """What a token or an end makes known."""
        is_echoed = self.opening is not None
        deltas: list[Delta] = [self.opening()] if self.opening is not None else []
        self.opening = None
        if event.timings is not None:
            self._note(event.timings)
        if event.token is not None:
            self.num_tokens += 1
            self.first_at = self.first_at or now
            self.last_at = now
            deltas += self.reader.feed(event.token, event.logprob)
        if event.finish is not None:
            deltas += self.reader.finish()
        self.has_calls = self.has_calls or any(isinstance(delta, CallOpened) for delta in deltas)
        if self.check is not None:
            self._told += [delta.text for delta in deltas[is_echoed:] if isinstance(delta, Text)]
        if event.finish is not None or self.reader.stopped is not None:
            self.finish = self._ended(event)
            deltas.append(self.finish)
        return deltas

    def _note(self, timings: Timings) -> None:
        self.timings = timings
        if timings.reuse is not None and self._reused is None:
            self._reused = explained(timings.reuse, self.written.ids, self._tokenizer, is_salted=self._is_salted)

    def _ended(self, event: TokenEvent) -> Finish:
        errors = None if self.check is None or self.has_calls else self.check.errors("".join(self._told))
        stopped: Ending = "tool_calls" if self.has_calls else "stop"
        if self.reader.stopped is not None or event.finish is None:
            return Finish(stopped, self.reader.stopped, self.usage, errors)
        asked = event.stop if event.stop in self.stop_token_ids else None  # the model's own end is no news
        return Finish(stopped if event.finish == "stop" else event.finish, asked, self.usage, errors)

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
            reuse=self._reused,
        )
