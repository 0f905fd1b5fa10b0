"""The loop: hear, plan, forward, settle, choose.

While the device runs this step the host settles the last one. `plain_turn` does the same verbs without overlap and is
the oracle. One thread drives it; whoever asks gets `TokenEvent`s out of `take_events`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from weft.cache.disk import DiskTier
from weft.cache.prefix import PrefixTree
from weft.config import EngineConfig
from weft.engine.plan import Row
from weft.engine.runner import Runner, Step
from weft.engine.scheduler import Scheduler
from weft.engine.sequence import Sequence
from weft.engine.sharing import NoSharing, Sharing
from weft.errors import RowFailed
from weft.grammar.constraint import Constraint
from weft.grammar.masks import Masks
from weft.model.adapter import Adapter
from weft.wire import FinishReason, Limits, PromptEvent, Sampling, Submit, TokenEvent, TokenLogprob


class Engine:
    """Sequences in, tokens out."""

    def __init__(
        self,
        adapter: Adapter,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.scheduler = Scheduler(config)
        self.runner = Runner(adapter, config, clock)
        self.pending: Step | None = None
        self.sharing = self._sharing(disk)
        self.masks = Masks(adapter.vocab_size)
        self.limits = Limits(adapter.vocab_size, adapter.context_length)
        self.events: deque[TokenEvent] = deque()
        self.prompt_events: deque[PromptEvent] = deque()
        self._numbers = itertools.count()

    def _sharing(self, disk: DiskTier | None) -> NoSharing:
        if not self.config.cache_bytes or not self.adapter.can_be_saved:
            return NoSharing(self.scheduler, self.runner)
        tree = PrefixTree(self.config.cache_bytes, self.clock, is_exact=self.config.exact)
        return Sharing(tree, self.scheduler, self.runner, disk)

    def submit(self, prompt: list[int], sampling: Sampling, constraint: Constraint | None = None) -> Sequence:
        """Check a request and queue it. Raises RequestError, naming the parameter; nobody else notices."""
        return self.take(Submit((next(self._numbers),), prompt, (sampling,)), constraint)[0]

    def take(self, asked: Submit, constraint: Constraint | None = None) -> list[Sequence]:
        """The same, for several answers to one prompt, which is computed once."""
        rooms = [self.limits.check(asked.prompt, sampling) for sampling in asked.samplings]
        sequences = [self._sequence(asked, place, room, constraint) for place, room in enumerate(rooms)]
        self._queue(sequences)
        return sequences

    def _sequence(self, asked: Submit, place: int, room: int, constraint: Constraint | None) -> Sequence:
        sampling, given = asked.samplings[place], asked.given[place] if asked.given else ()
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self.adapter.eos_token_ids
        sequence = Sequence(asked.numbers[place], asked.prompt, sampling, max_tokens=room, stop_ids=stops, given=given)
        sequence.timings.submitted = self.clock()
        sequence.salt, sequence.is_kept = asked.salt, asked.is_kept
        last = len(asked.prompt) - 1  # where the answer was gone on from; chunks ended there before
        places = {*asked.boundaries, last} if given else asked.boundaries
        sequence.boundaries = tuple(sorted(at for at in places if 0 < at < len(sequence.known) - 1))
        if constraint is not None:
            sequence.constraint = constraint.fork()
            sequence.constraint.limit_to(room)
            for token in given:
                sequence.constraint.accept(token)
        return sequence

    def _queue(self, sequences: list[Sequence]) -> None:
        leader, *forks = sequences
        if not leader.is_prefilled and all(sequence.known == leader.known for sequence in forks):
            leader.forks = forks
            self.scheduler.add(leader)
            return
        for sequence in sequences:  # prompts of one token, or answers that were begun: there is nothing to fork
            self.scheduler.add(sequence)
            if sequence.is_prefilled:
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
        self.sharing.begin(row.sequence)
        if not self.runner.prefill(row, seconds):
            return
        self.sharing.enter(row)
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
                self.sharing.fork(sequence, fork)
            for one in (sequence, *forks):
                self._finish_empty(one)

    def choose(self, step: Step) -> None:
        """Start the choice of a step's tokens. The last ones are settled, so every row knows what it may take."""
        allowed, errors = self.masks.fill([sequence.demand for sequence in step.sequences])
        for row, why in errors.items():
            self._finish(step.sequences[row], "error", f"the grammar can not go on: {why}")
        self.runner.choose(step, allowed)

    def _share(self) -> None:
        """Let prompts stand on what others have computed meanwhile."""
        self.scheduler.admit(self.clock())
        for sequence in self.sharing.share():
            self._told_prompt(sequence)

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
                self._note_first(sequence)
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

    def _note_first(self, sequence: Sequence) -> None:
        timings = sequence.timings
        timings.first_token, timings.cached_tokens, timings.reuse = self.clock(), sequence.num_cached, sequence.reuse

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
        sequence.timings.cached_tokens, sequence.timings.reuse = sequence.num_cached, sequence.reuse
        if sequence.has_gone:  # else a fork inherits what it stands on
            self.sharing.leave(sequence)
        told = told if token is not None else None
        self.events.append(TokenEvent(sequence.id, token, told, reason, error, sequence.stop, sequence.timings))

    def _finish_empty(self, sequence: Sequence) -> None:
        """A request for no tokens at all ends with its prompt."""
        if sequence.max_tokens == 0 and not sequence.is_finished:
            self._finish(sequence, "length")

    def _release_finished(self) -> None:
        for sequence in self.scheduler.drop_finished():
            self.runner.release(sequence)
            self.sharing.leave(sequence)
