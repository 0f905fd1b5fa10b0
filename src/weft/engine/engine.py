"""The loop: hear, plan, forward, settle, choose.

While the device runs this step the host settles the last one. `plain_turn` does the same verbs without overlap and is
the oracle. One thread drives it; whoever asks gets `TokenEvent`s out of `take_events`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from weft.config import EngineConfig
from weft.engine.runner import Runner, Step
from weft.engine.scheduler import Scheduler
from weft.engine.sequence import Sequence
from weft.errors import ContextTooLong, InvalidRequest
from weft.model.adapter import Adapter
from weft.wire import FinishReason, Sampling, TokenEvent

NOT_FINITE = "the model's logits are not finite for this sequence"


class Engine:
    """Sequences in, tokens out."""

    def __init__(self, adapter: Adapter, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.scheduler = Scheduler(config)
        self.runner = Runner(adapter, config, clock)
        self.pending: Step | None = None
        self.events: deque[TokenEvent] = deque()
        self._numbers = itertools.count()

    def submit(self, prompt: list[int], sampling: Sampling) -> Sequence:
        """Check a request and queue it. Raises RequestError, naming the parameter; nobody else notices."""
        max_tokens = self._check(prompt, sampling)
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self.adapter.eos_token_ids
        sequence = Sequence(next(self._numbers), list(prompt), sampling, max_tokens=max_tokens, stop_ids=stops)
        sequence.timings.submitted = self.clock()
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now; its memory is free before the next step."""
        if not sequence.is_finished:
            self._finish(sequence, "cancelled")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and self.pending is None

    def turn(self) -> None:
        """One turn of the loop."""
        if self.config.pipelined:
            self.pipelined_turn()
        else:
            self.plain_turn()

    def pipelined_turn(self) -> None:
        """Start this step, settle the last one while it runs."""
        started = self.clock()
        self._release_finished()
        plan = self.scheduler.plan(started)
        step = self.runner.forward(plan, self.pending)
        last, self.pending = self.pending, step
        if last is not None:
            self.settle(last)
        if step is not None:
            self.runner.choose(step)
        if plan.chunk is not None and not plan.chunk.sequence.is_finished:
            if self.runner.prefill(plan.chunk, plan.slice_seconds):
                self.scheduler.chunk_done()
        elif last is not None and step is not None:
            self.scheduler.measured(self.clock() - started)

    def plain_turn(self) -> None:
        """The same verbs without overlap."""
        self._release_finished()
        plan = self.scheduler.plan(self.clock())
        step = self.runner.forward(plan, None)
        if step is not None:
            self.runner.choose(step)
            self.settle(step)
        if plan.chunk is not None and self.runner.prefill(plan.chunk, plan.slice_seconds):
            self.scheduler.chunk_done()

    def settle(self, step: Step) -> None:
        """Read a step's tokens: append, finish, tell."""
        assert step.choice is not None
        tokens, finite = step.choice.read()  # sync: the device is waited for here and nowhere else
        logprobs = {row.index: row for row in step.choice.logprobs}
        for index, sequence in enumerate(step.sequences):
            if sequence.is_finished:
                continue
            if not finite[index]:
                self._finish(sequence, "error", NOT_FINITE)
                continue
            if sequence.timings.first_token is None:
                sequence.timings.first_token = self.clock()
            told = logprobs[index].read(tokens[index]) if index in logprobs else None
            before = len(sequence.output)
            sequence.append(tokens[index], told)
            token = tokens[index] if len(sequence.output) > before else None
            if sequence.is_finished:
                sequence.timings.finished = self.clock()
            self.events.append(TokenEvent(sequence.id, token, told if token is not None else None, sequence.finish))

    def take_events(self) -> list[TokenEvent]:
        """Everything that happened since the last call."""
        events = list(self.events)
        self.events.clear()
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.finish, sequence.error = reason, error
        sequence.timings.finished = self.clock()
        self.events.append(TokenEvent(sequence.id, None, None, reason, error))

    def _release_finished(self) -> None:
        for sequence in self.scheduler.drop_finished():
            self.runner.release(sequence)

    def _check(self, prompt: list[int], sampling: Sampling) -> int:
        """The number of tokens the answer may have."""
        vocab_size, context = self.adapter.vocab_size, self.adapter.context_length
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        for position, token in enumerate(prompt):
            if not 0 <= token < vocab_size:
                message = f"prompt token {token} at position {position} is outside the vocabulary of {vocab_size}"
                raise InvalidRequest(message, "prompt")
        sampling.check(vocab_size)
        if len(prompt) >= context:
            message = f"the prompt has {len(prompt)} tokens and the model's context {context}; at least one must be left"
            raise ContextTooLong(message, "prompt")
        room = context - len(prompt)
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            message = f"max_tokens {sampling.max_tokens} exceeds the {room} left of the model's context of {context}"
            raise ContextTooLong(message + f" after a prompt of {len(prompt)}", "max_tokens")
        return room if sampling.max_tokens is None else sampling.max_tokens
