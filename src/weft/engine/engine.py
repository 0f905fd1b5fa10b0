"""The loop: hear, plan, forward, settle, choose.

While the device runs a step the host builds the next and settles the last. `plain_step` does the same verbs without overlap
and is the oracle. One thread drives it; whoever asks gets `TokenEvent`s out of `take_events`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.fairness import OUTPUT_WEIGHT
from weft.engine.faults import Faults
from weft.engine.plan import Plan, Row
from weft.engine.prefix import NoPrefixSharing, PrefixSharing
from weft.engine.runner import RowFailure, Runner, Step
from weft.engine.sampler import Logprobs
from weft.engine.scheduler import Scheduler
from weft.engine.sequence import Sequence
from weft.errors import InternalError, RowFailed
from weft.grammar.constraint import Constraint, TokenDemand
from weft.grammar.masks import Masks
from weft.ipc.messages import FinishReason, Limits, PromptEvent, Sampling, Submit, TokenEvent, TokenLogprob
from weft.memory.disk import DiskTier
from weft.memory.prefix_tree import PrefixTree
from weft.model.adapter import Adapter

log = logging.getLogger("weft.engine")

MAX_FAILED_TURNS = 10  # in a row: then the process ends, and another takes over what it was doing


class Engine:
    """Sequences in, tokens out."""

    def __init__(
        self,
        adapter: Adapter,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.faults = faults or Faults()
        self.budget = MemoryBudget(adapter.row_bytes, adapter.weights_bytes, config.memory_bytes)
        self.scheduler = Scheduler(config, self.budget)
        self.runner = Runner(adapter, config, clock, self.faults)
        self.trial = Bisection()
        self.num_failed_turns = 0  # in a row
        self.last_failure: Exception | None = None
        self.pending: Step | None = None
        self.prefix = self._sharing(disk)
        self.masks = Masks(adapter.vocab_size)
        self.limits = self._limits()
        self.events: deque[TokenEvent] = deque()
        self.prompt_events: deque[PromptEvent] = deque()
        self.on_settled: Callable[[], None] = lambda: None  # called when there are tokens to be told and a turn goes on
        self._numbers = itertools.count()

    def _sharing(self, disk: DiskTier | None) -> NoPrefixSharing:
        if not self.config.cache_bytes or not self.adapter.can_be_saved:
            return NoPrefixSharing(self.scheduler, self.runner)
        tree = PrefixTree(self.config.cache_bytes, self.clock, is_exact=self.config.exact)
        return PrefixSharing(tree, self.scheduler, self.runner, disk)

    def _limits(self) -> Limits:
        context, room = self.adapter.context_length, self.budget.room_bytes
        if room is None or (fitting := self.budget.most_tokens(context)) >= context:
            return Limits(self.adapter.vocab_size, context)
        return Limits(self.adapter.vocab_size, context, fitting, room)

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
        sequence = Sequence(asked.numbers[place], asked.prompt, sampling, max_tokens=room, stop_ids=stops)
        sequence.timings.submitted = self.clock()
        sequence.salt, sequence.is_retained = asked.salt, asked.is_retained
        sequence.client, sequence.priority = asked.client, asked.priority
        sequence.boundaries = tuple(sorted({at for at in asked.boundaries if 0 < at < len(asked.prompt) - 1}))
        sequence.restart(given, self.config.max_replayed_tokens)
        if constraint is not None:
            sequence.constraint = constraint.fork()
            sequence.constraint.limit_to(room)
            for token in given:
                sequence.constraint.accept(token)
        return sequence

    def _queue(self, sequences: list[Sequence]) -> None:
        leader, *forks = sequences
        if not leader.is_prefilled and all(sequence.prefill_ids == leader.prefill_ids for sequence in forks):
            leader.forks = forks
            self.scheduler.add(leader)
            return
        for sequence in sequences:  # prompts of one token, or long answers that were begun: there is nothing to fork
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
        """One turn of the loop. What fails in it costs the one row it belongs to."""
        started = self.clock()
        self.faults.at("turn", *self.scheduler.running)
        self._make_room()
        plan = self.scheduler.plan(self.trial.may_step)
        last, is_quiet = self.pending, plan.chunk is None
        try:
            if plan.begins_with_chunk:
                plan = self._chunk_before_steps(plan)
            if self.config.pipelined:
                self.pipelined_step(plan)
            else:
                self.plain_step(plan)
            if plan.chunk is not None and self.config.settle_first:
                self._settle_pending()
        except RowFailure as broken:
            self._fail(broken.sequence, "restoring its states", broken)
        except Exception as error:  # a border: whatever the model or the device raise, nobody may pay for another
            self._undo(plan, last, error)
            return
        for row in plan.steps:
            self.prefix.allocated(row.sequence)
        if plan.chunk is not None and not plan.chunk.sequence.is_abandoned:
            self.prefill(plan.chunk, plan.slice_seconds)
        elif is_quiet and last is not None and self.pending is not None:
            self.scheduler.measured(self.clock() - started)

    def _chunk_before_steps(self, plan: Plan) -> Plan:
        """Compute the chunk, when all tokens are told that are there; the steps are planned anew, its row perhaps among them."""
        self._settle_pending()
        assert plan.chunk is not None
        if not plan.chunk.sequence.is_abandoned:
            self.prefill(plan.chunk, None)
        return replace(self.scheduler.plan(self.trial.may_step, may_hold_back=False), chunk=None)

    def _settle_pending(self) -> None:
        """Tell the tokens that are under way before anything else is begun."""
        last, self.pending = self.pending, None
        if last is not None:
            self.settle(last)
            self.on_settled()

    def pipelined_step(self, plan: Plan) -> None:
        """Build this step while the last one runs, and settle that while this one runs, or before where starting waits."""
        last, self.pending = self.pending, None
        try:
            self.pending = self.runner.forward(plan, last)
            if self.pending is not None and not self.config.settle_first:
                self.runner.start(self.pending)
        finally:
            if last is not None:
                self.settle(last)
        if self.config.settle_first:
            self.on_settled()
        if self.pending is not None:
            if self.config.settle_first:
                self.runner.start(self.pending)
            self.choose(self.pending)

    def plain_step(self, plan: Plan) -> None:
        """The same verbs without overlap."""
        step = self.runner.forward(plan, None)
        if step is not None:
            self.runner.start(step)
            self.choose(step)
            self.settle(step)

    def prefill(self, row: Row, seconds: float | None) -> None:
        """Work on a prompt; a chunk that is done can be stood on by others."""
        try:
            self.faults.at("prefill", row.sequence)
            self.prefix.begin(row.sequence)
            if not self.runner.prefill(row, seconds):
                return
            self.prefix.enter(row)
        except Exception as error:  # a border: one prompt at a time is computed, so it is this one's
            self._fail(row.sequence, "computing its prompt", error)
            return
        self.scheduler.fairness.charge(row.sequence, row.count)
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
                self.prefix.fork(sequence, fork)
            for one in (sequence, *forks):
                self._finish_empty(one)

    def choose(self, step: Step) -> None:
        """Start the choice of a step's tokens. The last ones are settled, so every row knows what it may take."""
        allowed, errors = self.masks.fill([self._demand(*row) for row in zip(step.sequences, step.is_new, strict=True)])
        for row, why in errors.items():
            self._finish(step.sequences[row], "error", f"the grammar can not go on: {why}")
        self.runner.choose(step, allowed)

    def _demand(self, sequence: Sequence, is_new: bool) -> TokenDemand | None:
        if not is_new:
            return None
        try:
            self.faults.at("mask", sequence)
            return sequence.demand
        except Exception as error:  # a border: a constraint is its own row's affair
            self._fail(sequence, "its constraint", error)
            return None

    def _make_room(self) -> None:
        """Let go of who is done, take back whom there is no room for, let others in, and let prompts stand on what is there."""
        self._release_finished()
        self.trial.settle()
        while (sequence := self.scheduler.to_preempt()) is not None:
            self._preempt(sequence)
        self.scheduler.admit(self.clock())
        self.prefix.limit(self.budget.left_for_prefixes(self.scheduler.running, self.config.cache_bytes))
        done = self.prefix.share()
        for sequence, error in self.prefix.take_failures():
            self._fail(sequence, "finding what is known of its prompt", error)
        for sequence in done:
            self._told_prompt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """A running sequence gives all it holds away and waits again; of its answer a token in flight is chosen once more."""
        if self.pending is not None:
            self.pending.forget(sequence)
        self.runner.release(sequence)
        self.prefix.leave(sequence)
        self.scheduler.preempt(sequence)
        sequence.restart(sequence.output, self.config.max_replayed_tokens)

    def _undo(self, plan: Plan, last: Step | None, error: Exception) -> None:
        """A step failed: all rows in memory are computed again, those that were in it in halves."""
        log.error("a step of %d rows failed and is tried again in parts", len(plan.steps), exc_info=error)
        self.last_failure = error
        self.num_failed_turns += 1
        if self.num_failed_turns >= MAX_FAILED_TURNS:
            raise InternalError(f"{self.num_failed_turns} turns failed one after the other; the last: {error}") from error
        suspects = [row.sequence for row in plan.steps] or (last.sequences if last is not None else [])
        self.pending = None
        self._release_finished()
        for sequence in [one for one in reversed(self.scheduler.running) if one.is_prefilled]:
            self._preempt(sequence)
        self.runner.reset()
        guilty = self.trial.failed([one for one in suspects if not one.is_finished])
        if guilty is not None:
            self._fail(guilty, "a step of it", error)

    def _fail(self, sequence: Sequence, what: str, error: Exception) -> None:
        """End one sequence with an error, and let nobody stand on what it computed."""
        if sequence.is_finished:
            return
        log.error("sequence %d ends: %s failed", sequence.id, what, exc_info=error)
        self.last_failure = error
        self.runner.release(sequence, poisoned=True)
        self.prefix.reset_to_prefix(sequence)
        self.prefix.invalidate(sequence)
        self._finish(sequence, "error", f"{what} failed: {error}")

    def settle(self, step: Step) -> None:
        """Read a step's tokens: append, finish, tell."""
        assert step.choice is not None
        tokens, problems = step.choice.read()  # sync: the device is waited for here and nowhere else
        logprobs = step.choice.logprobs
        self.num_failed_turns = 0
        for index, sequence in enumerate(step.sequences):
            if sequence.is_finished:
                continue
            if index in problems:
                self.prefix.invalidate(sequence)
                self._finish(sequence, "error", problems[index])
            elif step.is_new[index]:
                self._settle_row(sequence, tokens[index], logprobs.get(index))

    def _settle_row(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
        before, is_first = len(sequence.output), sequence.timings.first_token is None
        try:
            if logprobs is not None:
                self.faults.at("logprobs", sequence)
            told = None if logprobs is None else logprobs.read([token])[0]
            self.faults.at("accept", sequence)
            sequence.append(token, told)
        except RowFailed as error:
            self._finish(sequence, "error", str(error))
            return
        except Exception as error:  # a border: a token is its own row's affair
            self._fail(sequence, "taking a token", error)
            return
        self.scheduler.fairness.charge(sequence, OUTPUT_WEIGHT)
        timings = sequence.timings
        if is_first:
            timings.first_token, timings.cached_tokens, timings.reuse = self.clock(), sequence.num_cached, sequence.reuse
        said = token if len(sequence.output) > before else None
        if sequence.is_finished:
            self._finish(sequence, sequence.finish or "stop", token=said, told=told)
        else:
            self.events.append(TokenEvent(sequence.id, said, told, timings=timings if is_first else None))

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
        if sequence.is_abandoned:  # else a fork inherits what it stands on
            self.prefix.leave(sequence)
        told = told if token is not None else None
        self.events.append(TokenEvent(sequence.id, token, told, reason, error, sequence.stop, sequence.timings))

    def _finish_empty(self, sequence: Sequence) -> None:
        """A request for no tokens at all ends with its prompt."""
        if sequence.max_tokens == 0 and not sequence.is_finished:
            self._finish(sequence, "length")

    def _release_finished(self) -> None:
        for sequence in self.scheduler.drop_finished():
            self.runner.release(sequence)
            self.prefix.leave(sequence)
