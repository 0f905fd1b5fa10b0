"""The loop: hear, plan, forward, settle, choose.

While the device runs this step the host settles the last one. `plain_turn` does the same verbs without overlap and is
the oracle. One thread drives it; whoever asks gets `TokenEvent`s out of `take_events`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from weft.cache.prefix import Node, PrefixTree, chunks_of
from weft.config import EngineConfig
from weft.engine.plan import Row
from weft.engine.runner import Runner, Step
from weft.engine.scheduler import Scheduler
from weft.engine.sequence import Sequence
from weft.errors import RowFailed
from weft.grammar.constraint import Constraint
from weft.grammar.masks import Masks
from weft.model.adapter import Adapter
from weft.wire import FinishReason, Limits, PromptEvent, Sampling, TokenEvent, TokenLogprob


class Engine:
    """Sequences in, tokens out."""

    def __init__(self, adapter: Adapter, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.scheduler = Scheduler(config)
        self.runner = Runner(adapter, config, clock)
        self.pending: Step | None = None
        self.prefixes = PrefixTree(config.cache_bytes) if config.cache_bytes and adapter.can_be_saved else None
        self.masks = Masks(adapter.vocab_size)
        self.limits = Limits(adapter.vocab_size, adapter.context_length)
        self.events: deque[TokenEvent] = deque()
        self.prompt_events: deque[PromptEvent] = deque()
        self._numbers = itertools.count()

    def submit(self, prompt: list[int], sampling: Sampling, constraint: Constraint | None = None) -> Sequence:
        """Check a request and queue it. Raises RequestError, naming the parameter; nobody else notices."""
        return self.submit_forks(prompt, (sampling,), (next(self._numbers),), constraint)[0]

    def submit_forks(
        self,
        prompt: list[int],
        samplings: tuple[Sampling, ...],
        numbers: tuple[int, ...],
        constraint: Constraint | None = None,
        boundaries: tuple[int, ...] = (),
    ) -> list[Sequence]:
        """The same, for several answers to one prompt, which is computed once."""
        now = self.clock()
        rooms = [self.limits.check(prompt, sampling) for sampling in samplings]
        sequences = []
        for number, sampling, room in zip(numbers, samplings, rooms, strict=True):
            stops = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                stops |= self.adapter.eos_token_ids
            sequence = Sequence(number, prompt, sampling, max_tokens=room, stop_ids=stops)
            sequence.timings.submitted = now
            sequence.boundaries = tuple(sorted(place for place in boundaries if 0 < place < len(prompt) - 1))
            if constraint is not None:
                sequence.constraint = constraint.fork()
                sequence.constraint.limit_to(room)
            sequences.append(sequence)
        self._queue(sequences)
        return sequences

    def _queue(self, sequences: list[Sequence]) -> None:
        leader, *forks = sequences
        if not leader.is_prefilled:
            leader.forks = forks
            self.scheduler.add(leader)
            return
        for sequence in sequences:  # a prompt of one token: there is nothing to share
            self.scheduler.add(sequence)
            self._finish_empty(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now; its memory is free before the next step."""
        if not sequence.is_finished:
            self._finish(sequence, "cancelled")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and self.pending is None

    @property
    def counts(self) -> tuple[int, int]:
        """Sequences that run, and that wait."""
        queues = (self.scheduler.running, self.scheduler.waiting)
        forks = sum(len(sequence.forks) for queue in queues for sequence in queue)
        return len(self.scheduler.running), len(self.scheduler.waiting) + forks

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
        self._share()
        plan = self.scheduler.plan(started)
        step = self.runner.forward(plan, self.pending)
        last, self.pending = self.pending, step
        if last is not None:
            self.settle(last)
        if step is not None:
            self.choose(step)
        if plan.chunk is not None and not plan.chunk.sequence.has_gone:
            self.prefill(plan.chunk, plan.slice_seconds)
        elif last is not None and step is not None:
            self.scheduler.measured(self.clock() - started)

    def plain_turn(self) -> None:
        """The same verbs without overlap."""
        self._release_finished()
        self._share()
        plan = self.scheduler.plan(self.clock())
        step = self.runner.forward(plan, None)
        if step is not None:
            self.choose(step)
            self.settle(step)
        if plan.chunk is not None:
            self.prefill(plan.chunk, plan.slice_seconds)

    def prefill(self, row: Row, seconds: float | None) -> None:
        """Work on a prompt; a chunk that is done can be stood on by others."""
        if not self.runner.prefill(row, seconds):
            return
        self._enter(row)
        self.scheduler.chunk_done()
        self._told_prompt(row.sequence)

    def _told_prompt(self, sequence: Sequence) -> None:
        """Say how far a prompt is; when it is in memory its forks go on from there."""
        asked = sequence.is_prefilled and sequence.sampling.prompt_logprobs is not None
        logprobs = tuple(sequence.prompt_logprobs) if asked else None
        self.prompt_events.append(PromptEvent(sequence.id, sequence.num_computed, logprobs))
        if sequence.is_prefilled:
            forks = self.scheduler.release_forks(sequence)
            for fork in forks:
                self._fork(sequence, fork)
            for one in (sequence, *forks):
                self._finish_empty(one)

    def _fork(self, leader: Sequence, fork: Sequence) -> None:
        if leader.trunk is None:
            self.runner.fork(leader, fork)
        else:
            self._stand_on(fork, leader.trunk)
            fork.num_cached = fork.num_computed

    def choose(self, step: Step) -> None:
        """Start the choice of a step's tokens. The last ones are settled, so every row knows what it may take."""
        allowed, errors = self.masks.fill([sequence.demand for sequence in step.sequences])
        for row, why in errors.items():
            self._finish(step.sequences[row], "error", f"the grammar can not go on: {why}")
        self.runner.choose(step, allowed)

    def _share(self) -> None:
        """Let prompts stand on what others have computed meanwhile; of those that need the same chunk one computes it."""
        if self.prefixes is None:
            return
        self.scheduler.admit(self.clock())
        for sequence in self.scheduler.prompts:
            self._match(sequence)
        for sequence in self.scheduler.drop_prefilled():
            self._told_prompt(sequence)
        if self.scheduler.prompts and not self.runner.has_caches(first := self.scheduler.prompts[0]):
            for other in self.scheduler.prompts:
                if self.runner.has_caches(other) and self._next_chunk(other) == self._next_chunk(first):
                    self.scheduler.put_first(other)
                    break

    def _match(self, sequence: Sequence) -> None:
        assert self.prefixes is not None
        if sequence.trunk is None:
            sequence.trunk = self.prefixes.root
            self.prefixes.pin(sequence.trunk)
        if sequence.sampling.prompt_logprobs is not None or (sequence.memory is not None and sequence.memory.chunk is not None):
            return  # it must read every token itself, or is in the middle of a chunk
        chunks = chunks_of(sequence.prompt, sequence.num_computed, self.scheduler.chunk_ends(sequence))
        found = self.prefixes.match(chunks, sequence.trunk)
        if found is not sequence.trunk:
            sequence.num_cached += found.length - sequence.trunk.length
            self._stand_on(sequence, found)
            self.runner.forget(sequence)

    def _next_chunk(self, sequence: Sequence) -> tuple[int, tuple[int, ...]]:
        """What it needs next: where it stands, and the tokens."""
        end = next(self.scheduler.chunk_ends(sequence))
        return id(sequence.trunk), tuple(sequence.prompt[sequence.num_computed : end])

    def _enter(self, row: Row) -> None:
        """A chunk was computed: others may stand on it from now on."""
        if self.prefixes is None:
            return
        sequence = row.sequence
        tokens = tuple(sequence.prompt[row.start : row.start + row.count])
        node = self.prefixes.enter(sequence.trunk, tokens, *self.runner.save(row))
        node.keep = node.keep or node.length in sequence.boundaries
        if sequence.is_prefilled:  # what comes next goes on from here, or parts from it within the last chunk
            node.keep = node.parent.keep = True  # type: ignore[union-attr]
        self._stand_on(sequence, node)

    def _stand_on(self, sequence: Sequence, node: Node) -> None:
        assert self.prefixes is not None
        self.prefixes.pin(node)
        self._step_off(sequence)
        sequence.trunk, sequence.num_computed = node, node.length

    def _step_off(self, sequence: Sequence) -> None:
        if self.prefixes is not None and sequence.trunk is not None:
            trunk, sequence.trunk = sequence.trunk, None
            self.prefixes.unpin(trunk)

    def settle(self, step: Step) -> None:
        """Read a step's tokens: append, finish, tell."""
        assert step.choice is not None
        tokens, problems = step.choice.read()  # sync: the device is waited for here and nowhere else
        logprobs = step.choice.logprobs
        for index, sequence in enumerate(step.sequences):
            if sequence.is_finished:
                continue
            if index in problems:
                self._finish(sequence, "error", problems[index])
                continue
            is_first = sequence.timings.first_token is None
            if is_first:
                sequence.timings.first_token, sequence.timings.cached_tokens = self.clock(), sequence.num_cached
            told = logprobs[index].read(tokens[index : index + 1])[0] if index in logprobs else None
            before = len(sequence.output)
            try:
                sequence.append(tokens[index], told)
            except RowFailed as error:
                self._finish(sequence, "error", str(error))
                continue
            token = tokens[index] if len(sequence.output) > before else None
            if sequence.is_finished:
                self._finish(sequence, sequence.finish or "stop", token=token, told=told)
            else:
                timings = sequence.timings if is_first else None
                self.events.append(TokenEvent(sequence.id, token, told, timings=timings))

    def take_events(self) -> list[TokenEvent]:
        """Everything that happened since the last call."""
        events = list(self.events)
        self.events.clear()
        return events

    def take_prompt_events(self) -> list[PromptEvent]:
        """How far prompts came since the last call."""
        events = list(self.prompt_events)
        self.prompt_events.clear()
        return events

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        token: int | None = None,
        told: TokenLogprob | None = None,
    ) -> None:
        sequence.finish, sequence.error = reason, error
        sequence.timings.finished = self.clock()
        sequence.timings.cached_tokens = sequence.num_cached
        if sequence.has_gone:  # else a fork inherits what it stands on
            self._step_off(sequence)
        told = told if token is not None else None
        self.events.append(TokenEvent(sequence.id, token, told, reason, error, sequence.stop, sequence.timings))

    def _finish_empty(self, sequence: Sequence) -> None:
        """A request for no tokens at all ends with its prompt."""
        if sequence.max_tokens == 0 and not sequence.is_finished:
            self._finish(sequence, "length")

    def _release_finished(self) -> None:
        for sequence in self.scheduler.drop_finished():
            self.runner.release(sequence)
            self._step_off(sequence)
