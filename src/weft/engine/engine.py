"""The engine: state and one iteration (`turn`) of the loop over token ids; a host calls `turn` and takes the events.

Each turn makes room, plans, runs a decode step in the order that suits the device (`order.py`), and works on one prompt
chunk. A failure ends only the row it belongs to.
"""

import itertools
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.faults import Faults
from weft.engine.lockstep import AgreedMasks, AgreedRows, Lockstep, is_lost_rank
from weft.engine.mask_prices import MaskPrices
from weft.engine.order import make_order
from weft.engine.prefix import PrefixSharing
from weft.engine.runner import RowFailure, Runner, Step
from weft.engine.sampler import NOT_FINITE, Logprobs
from weft.engine.scheduler import ChunkRules, Plan, Row, Scheduler
from weft.engine.sequence import Sequence
from weft.engine.speculation import Speculation
from weft.errors import InternalError, InvalidRequest, RowFailed
from weft.grammar.constraint import Constraint, Masks, TokenDemand
from weft.ipc.limits import Limits, Sampling
from weft.ipc.messages import FinishReason, Image, PromptEvent, Submit, TokenEvent, TokenLogprob
from weft.memory.disk import DiskTier
from weft.memory.prefix_tree import PrefixTree
from weft.memory.spec import MAX_STEP_TOKENS
from weft.model.adapter import Adapter

log = logging.getLogger("weft.engine")

Emitted = tuple[int | None, TokenLogprob | None]  # a token and its log-probability

REPLAYED_TOKENS = 4  # of a row in a step beside rows that have one: what each costs those

MAX_FAILED_TURNS = 10  # in a row; then the process ends, and another one resumes its requests


class Engine:
    """Runs many sequences of one model with continuous batching: queues, prefills, decodes, samples and emits events."""

    def __init__(
        self,
        adapter: Adapter,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
        faults: Faults | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        if adapter.grouping == "none" or (config.exact and adapter.grouping != "exact"):
            config = replace(config, group_tokens=0)  # prompts would not have the numbers that each has alone
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.lockstep = lockstep  # of a rank of a sharded engine, whose `clock` is the lockstep's
        self.faults = faults or Faults()
        self.bisection = Bisection()
        self.budget = MemoryBudget(adapter.row_bytes, adapter.weights_bytes, config.memory_bytes)
        self.runner = Runner(adapter, config, clock, self.faults)
        is_caching, own_cuts = config.cache_bytes > 0 and adapter.can_be_saved, config.exact and not adapter.cuts_freely
        whole_images = adapter.vision is not None and adapter.vision.keeps_images_whole  # and so are chunks that hold one
        can_split = adapter.is_positional and not whole_images
        tree = PrefixTree(config.cache_bytes, clock, own_cuts=own_cuts, can_split=can_split) if is_caching else None
        has_checkpoints = is_caching and not can_split
        splits = tree is not None and tree.can_split
        rules = ChunkRules(has_checkpoints, whole_images, adapter.ragged is not None, adapter.cuts_freely, splits)
        self.scheduler = Scheduler(config, self.budget, self.bisection, rules)
        self.prefix = PrefixSharing(tree, self.runner, self.scheduler.chunk_ends, disk if is_caching else None)
        # Emitted tokens of a resumed row that are decoded again; more are prefilled, which is faster, and for some models exact.
        self.max_replayed_tokens = config.max_replayed_tokens
        if config.exact:
            self.max_replayed_tokens = 0 if adapter.decodes_like_prefill else sys.maxsize
        self.order = make_order(config, self)
        self.masks = Masks(adapter.vocab_size)
        self.mask_prices = self.scheduler.mask_prices = MaskPrices(clock)
        self.speculation = Speculation(self.runner, config)
        self.limits = self._limits()
        self.num_failed_turns = 0  # in a row
        self.last_failure: Exception | None = None
        self.events: list[TokenEvent] = []
        self.prompt_events: list[PromptEvent] = []
        self.on_events: Callable[[], None] = lambda: None  # called in mid-turn when there are events worth sending
        self._numbers = itertools.count()

    def turn(self) -> None:
        """Run one turn: release, preempt and admit rows, plan, run a decode step, and compute (part of) a prompt chunk."""
        started = self.clock()
        self.faults.at("turn", *self.scheduler.running)
        self._make_room()
        plan = self.scheduler.plan(self.prefix.best_cut)
        last, is_quiet = self.order.pending, plan.chunk is None
        try:
            if plan.steps and plan.chunk is not None and plan.slice_seconds is None:  # so short that its row may join the step
                plan = self._prefill_before_step(plan.chunk, plan.beside)
            plan = self._with_drafts(plan)
            self.runner.allocate(plan.steps, plan.upcoming)
            self._keep_step(plan)
            self.order.run(plan)
            if self.bisection.groups:
                self.order.flush()  # a failure of the next step or prompt must be its own
            if self._awaits_step(plan) and self.order.await_step():
                self.scheduler.measure_busy_step(self.clock() - started, len(plan.steps))
        except RowFailure as failure:
            self._fail(failure.sequence, "restoring its states", failure)
            return
        except Exception as error:  # a border: whatever the model or the device raise, one row may not cost the others
            for sequence in plan.drafts:
                sequence.give_up_drafts()  # a draft may be what failed, and is never worth an answer
            self._undo([*plan.steps, *(() if last is None else last.sequences)], error)
            return
        for sequence in plan.steps:
            self.prefix.release_allocated(sequence)
        if plan.chunk is not None:
            self.prefill(plan.chunk, plan.slice_seconds, plan.beside)
        elif is_quiet and self.order.is_whole_step(plan, last):
            seconds = self.clock() - started
            self.scheduler.measure_step(seconds, len(plan.steps), plan.step_tokens)
            self.speculation.measure(len(plan.steps), plan.num_further, seconds)

    def submit(
        self, prompt: list[int], sampling: Sampling, constraint: Constraint | None = None, images: tuple[Image, ...] = ()
    ) -> Sequence:
        """Check one prompt with its sampling parameters and queue it; raises RequestError naming the bad parameter."""
        return self.submit_all(Submit((next(self._numbers),), prompt, (sampling,), images=images), constraint)[0]

    def submit_all(self, request: Submit, constraint: Constraint | None = None) -> list[Sequence]:
        """Check a request and queue one sequence per answer; raises RequestError naming the bad parameter."""
        sequences = self.prepare(request, constraint)
        self.queue(sequences)
        return sequences

    def prepare(self, request: Submit, constraint: Constraint | None = None) -> list[Sequence]:
        """Check a request and return one sequence per answer; any thread may call it. Raises RequestError or RowFailed.

        Under a constraint the tokens emitted before are replayed, which for long answers takes longer than a step may.
        """
        rooms = [self.limits.check(request.prompt, sampling) for sampling in request.samplings]
        self._check_images(request)
        return [self._sequence(request, index, room, constraint) for index, room in enumerate(rooms)]

    def _check_images(self, request: Submit) -> None:
        vision, end = self.adapter.vision, 0
        for number, image in enumerate(request.images):
            if vision is None:
                raise InvalidRequest(
                    f"the model reads text only: {self.adapter.no_vision or 'it has no vision part'}", "messages"
                )
            if (reason := vision.check(image, request.prompt)) is not None or image.start < end:
                raise InvalidRequest(f"image {number} of the request: {reason or 'it overlaps the one before'}", "messages")
            end = image.end
        if request.images and any(sampling.prompt_logprobs is not None for sampling in request.samplings):
            raise InvalidRequest("log-probabilities of a prompt with images can not be had; leave them out", "prompt_logprobs")

    def queue(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of one request; they share one prefill if all have the same tokens to prefill."""
        leader, *forks = sequences
        # Of one-token prompts or long resumed answers there is nothing to fork.
        is_forked = not leader.is_prefilled and all(sequence.prefill_ids == leader.prefill_ids for sequence in forks)
        if is_forked:
            leader.lead(forks)
        for sequence in [leader] if is_forked else sequences:
            self.scheduler.add(sequence)
            if sequence.is_prefilled:
                self._finish_empty(sequence)

    def _sequence(self, request: Submit, index: int, max_tokens: int, constraint: Constraint | None) -> Sequence:
        sequence = Sequence(request, index, max_tokens, self.adapter.eos_token_ids, self.clock())
        sequence.restart(request.emitted[index] if request.emitted else (), self.max_replayed_tokens)
        if constraint is not None:
            sequence.constrain(constraint)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        if not sequence.is_finished:
            self._finish(sequence, "cancelled")

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self.order.pending is None

    @property
    def is_waiting_for_disk(self) -> bool:
        """Whether sequences are running and every one of them waits for cached prefixes to be loaded from disk."""
        running = self.scheduler.running
        return bool(running) and all(sequence.prefix.is_loading for sequence in running)

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of running and of waiting sequences; answers that wait for a shared prompt count as waiting."""
        queues = (self.scheduler.running, self.scheduler.waiting)
        forks = sum(len(sequence.forks) for queue in queues for sequence in queue)
        return len(self.scheduler.running), len(self.scheduler.waiting) + forks

    def take_events(self) -> list[TokenEvent]:
        events, self.events = self.events, []
        return events

    def take_prompt_events(self) -> list[PromptEvent]:
        events, self.prompt_events = self.prompt_events, []
        return events

    def _limits(self) -> Limits:
        context, room = self.adapter.context_length, self.budget.room_bytes
        if room is None or (fitting := self.budget.max_row_tokens(context)) >= context:
            return Limits(self.adapter.vocab_size, context)
        return Limits(self.adapter.vocab_size, context, fitting, room)

    # What a turn is made of.

    def _make_room(self) -> None:
        """Release finished rows, preempt and admit rows, limit the prefix cache, and skip prompt chunks that are cached now."""
        self._release_finished()
        self.bisection.clear_proven()
        while (sequence := self.scheduler.to_preempt()) is not None:
            self._preempt(sequence)
        self.scheduler.admit(self.clock())
        held = 0 if self.runner.images is None else self.runner.images.held_bytes
        self.prefix.limit(max(0, self.budget.left_for_prefixes(self.scheduler.running, self.config.cache_bytes) - held))
        for sequence in self.scheduler.prompts:
            try:
                self.prefix.update(sequence)
            except Exception as error:  # a border: a damaged prefix is this sequence's affair alone
                self._blame(sequence, "finding its cached prefix", error)
        for sequence in self.scheduler.drop_prefilled():
            self._report_prompt(sequence)

    def _awaits_step(self, plan: Plan) -> bool:
        """Whether a prompt's slice follows whose time begins when the step has ended."""
        return self.config.slices_behind_step and plan.chunk is not None and plan.slice_seconds is not None

    def _keep_step(self, plan: Plan) -> None:
        """Make sure, before a sharded engine computes a turn, that all ranks are about to compute the same rows."""
        if self.lockstep is not None:
            chunks = () if plan.chunk is None else (plan.chunk, *plan.beside)
            rows = [*plan.steps, *(one.sequence for one in chunks)]
            self.lockstep.agree(AgreedRows([(one.id, one.num_computed, one.output[-1] if one.output else -1) for one in rows]))

    def _prefill_before_step(self, chunk: Row, beside: tuple[Row, ...]) -> Plan:
        """Settle the pending step, compute a short prompt chunk, and return a new plan in which the chunk's row may decode."""
        self.order.flush()
        self.prefill(chunk, None, beside)
        return replace(self.scheduler.plan(self.prefix.best_cut, may_hold_back=False), chunk=None, beside=())

    def _with_drafts(self, plan: Plan) -> Plan:
        """Return the plan with draft tokens to verify, or known ones to compute; before that the pending step is settled."""
        if self.speculation.emits_forced and any(one.constraint is not None for one in plan.steps):
            self._emit_forced(plan.steps)
            plan = replace(plan, steps=tuple(one for one in plan.steps if one.wants_token))
        most = self.speculation.affordable_tokens(len(plan.steps), plan.room)
        if most < 2 or not self.speculation.may_draft(plan.steps, is_settled=self.order.pending is None):
            return plan
        self.order.flush()
        steps = tuple(one for one in plan.steps if one.wants_token)
        self.runner.allocate(steps, plan.upcoming)
        drafts = self.speculation.drafts(steps, most - 1)
        tokens = max([1 + len(draft) for draft in drafts.values()], default=1)
        if known := [one.num_known for one in steps if one.is_replaying]:
            most = min(most, REPLAYED_TOKENS if len(known) < len(steps) else MAX_STEP_TOKENS)
            tokens = max(tokens, min(most, max(known) if self.speculation.is_ragged else min(known)))
        tokens = min(tokens, self.adapter.step_tokens)
        if tokens == 1 and len(steps) == len(plan.steps):
            return plan
        if self.speculation.is_ragged:
            further = sum(min(tokens, one.num_known) - 1 + len(drafts.get(one, ())) for one in steps)
        else:
            further = (tokens - 1) * len(steps)
        return replace(plan, steps=steps, step_tokens=tokens, num_further=further, drafts=drafts)

    def _emit_forced(self, sequences: tuple[Sequence, ...]) -> None:
        """Emit tokens about which constraints leave no choice, where a step can compute them beside others' single tokens."""
        for sequence in sequences:
            count = 0
            while sequence.num_known < MAX_STEP_TOKENS and (token := self._forced_token(sequence)) is not None:
                sequence.expect_token()
                self._settle_row(sequence, token, None, has_draft=True)
                count += 1
            if count:
                self.speculation.note_forced(sequence, count)

    def _forced_token(self, sequence: Sequence) -> int | None:
        try:
            return sequence.forced_token()
        except Exception as error:  # a border: a constraint belongs to its own row, and fails there when its mask is made
            log.warning("sequence %d: whether its next token is forced is not known", sequence.id, exc_info=error)
            return None

    def prefill(self, row: Row, seconds: float | None, beside: tuple[Row, ...] = ()) -> None:
        """Compute a prompt chunk for about `seconds` (None: to its end), if it begins now with those beside it in one forward."""
        if row.sequence.is_abandoned or not self._begin_chunk(row):
            return
        others = tuple(one for one in beside if self._begin_chunk(one))
        try:
            done = self.runner.prefill(row, seconds, others)
        except Exception as error:  # a border: the failure is a prompt's own, or a step's
            self._blame_prompts([row.sequence, *(one.sequence for one in others)], self.runner.together(row), error)
            return
        for one in done:
            self._end_chunk(one)
        self._begin_answers([one.sequence for one in done])

    def _begin_answers(self, sequences: list[Sequence]) -> None:
        """Emit the first tokens of prompts whose last token was computed with their last chunk."""
        ends = self.runner.take_ends(sequences)
        if not ends or self.bisection.groups:  # a suspect of a failed step proves itself by a step
            return
        try:
            step = self.runner.first_step(ends)
            self.sample(step)
            self.settle(step)
            self.on_events()
        except Exception as error:  # a border: as of other steps
            self._undo([*ends], error)

    def _begin_chunk(self, row: Row) -> bool:
        """Prepare a sequence for its next chunk; returns False if that failed and the sequence with it."""
        try:
            self.faults.at("prefill", row.sequence)
            self.prefix.begin(row.sequence)
        except Exception as error:  # a border: this is one prompt's own
            self._blame(row.sequence, "computing its prompt", error)
            return False
        return True

    def _end_chunk(self, row: Row) -> None:
        """Add a computed chunk to the prefix tree and report its prompt's progress."""
        try:
            self.prefix.enter(row)
        except Exception as error:  # a border: a chunk is one prompt's own
            self._blame(row.sequence, "computing its prompt", error)
            return
        self.scheduler.finish_chunk(row)
        self._report_prompt(row.sequence)

    def _blame_prompts(self, begun: list[Sequence], together: list[Sequence], error: Exception) -> None:
        """After a failed forward of prompts end the one that it was of; several are each computed alone from now on."""
        suspects = list(dict.fromkeys([*begun, *together]))
        if len(suspects) == 1:
            self._blame(suspects[0], "computing its prompt", error)
            return
        log.error("a forward of %d prompts failed, each is computed by itself", len(suspects), exc_info=error)
        self._note_failure(error)
        self.scheduler.apart |= {*suspects}
        if isinstance(error, RuntimeError):  # as MLX reports what failed on the device
            if (step := self.order.pending) is not None:
                self._undo([*step.sequences, *suspects], error)
                return
            self.runner.drain()
        for sequence in suspects:
            self.runner.release(sequence, poisoned=True)
            self.prefix.reset(sequence)

    def _report_prompt(self, sequence: Sequence) -> None:
        """Emit a prompt's progress; once it is computed, queue its forks (further answers) and end requests for 0 tokens."""
        logprobs = tuple(sequence.prompt_logprobs) if sequence.is_prefilled and sequence.must_read_prompt else None
        self.prompt_events.append(PromptEvent(sequence.id, sequence.num_computed, logprobs))
        if sequence.is_prefilled:
            forks = self.scheduler.release_forks(sequence)
            for fork in forks:
                self.prefix.fork(sequence, fork)
            for one in (sequence, *forks):
                self._finish_empty(one)

    def sample(self, step: Step) -> None:
        """Start sampling a step's tokens under the rows' grammars; a row whose grammar fails is ended with an error."""
        demands: list[TokenDemand | None] = []
        for sequence, places in step.places():
            demands += self._demands(sequence, step.drafts.get(sequence, ())) if sequence in step.new else [None] * len(places)
        allowed, errors = self.masks.fill(demands)
        step.errors = {line: f"the grammar can not go on: {why}" for line, why in errors.items()}
        taken = self.masks.seconds if self.lockstep is None else self.lockstep.agree(AgreedMasks(self.masks.seconds)).seconds
        for sequence, places in step.places():
            if (why := step.errors.get(places[0])) is not None:
                self._finish(sequence, "error", why, is_refused=True)
            if seconds := sum(taken.get(place, 0.0) for place in places):
                self.mask_prices.charge(sequence, seconds)
        self.runner.sample(step, allowed)

    def _demands(self, sequence: Sequence, draft: tuple[int, ...]) -> list[TokenDemand | None]:
        try:
            self.faults.at("mask", sequence)
            return sequence.demands(draft)
        except RowFailed as error:
            self._finish(sequence, "error", str(error), is_refused=True)
            return [None] * (1 + len(draft))
        except Exception as error:  # a border: a constraint belongs to its own row
            self._fail(sequence, "its constraint", error)
            return [None] * (1 + len(draft))

    def settle(self, step: Step) -> None:
        """Wait for a step's sampled tokens, append them to their sequences, emit events, and finish sequences that ended."""
        assert step.sampled is not None
        tokens, problems = step.sampled.read()  # sync: the device is waited for here and nowhere else
        problems = step.errors | problems
        self.num_failed_turns = 0
        accepted: dict[Sequence, int] = {}
        for sequence, places in step.places():
            if not sequence.is_finished:
                accepted[sequence] = self._settle_lines(step, sequence, [(tokens[at], problems.get(at), at) for at in places])
        if step.has_several:
            self.runner.keep(step, accepted)
        self.speculation.note(accepted)

    def _settle_lines(self, step: Step, sequence: Sequence, lines: list[tuple[int, str | None, int]]) -> int:
        """Append a sequence's token, and further ones as long as each draft token is the one sampled; returns how many were."""
        assert step.sampled is not None
        draft = step.drafts.get(sequence, ())
        for accepted, (token, problem, line) in enumerate(lines):
            if problem == NOT_FINITE and step.has_several and not sequence.drafting.is_given_up:
                self._compute_without_drafts(sequence)
                return accepted
            if problem is not None:
                self.prefix.invalidate(sequence)
                self._finish(sequence, "error", problem, is_refused=line in step.errors)
                return accepted
            if sequence not in step.new:
                return 0
            if accepted:
                sequence.accept_draft_token()
            self._settle_row(sequence, token, step.sampled.logprobs.get(line), has_draft=bool(draft))
            if sequence.is_finished or accepted == len(draft) or token != draft[accepted]:
                return accepted
        raise InternalError("a sequence has a line behind each draft token")

    def _settle_row(self, sequence: Sequence, token: int, logprobs: Logprobs | None, *, has_draft: bool) -> None:
        is_first = sequence.timings.first_token is None
        try:
            if logprobs is not None:
                self.faults.at("logprobs", sequence)
            logprob = None if logprobs is None else logprobs.read([token])[0]
            self.faults.at("accept", sequence)
            sequence.append(token, logprob)
        except RowFailed as error:  # its grammar can not go on
            self._finish(sequence, "error", str(error), is_refused=True)
            return
        except Exception as error:  # a border: a token belongs to its own row
            self._fail(sequence, "taking a token", error)
            return
        self.scheduler.fairness.charge_token(sequence)
        if is_first:
            sequence.note_first_token(self.clock())
        if sequence.ending is None:
            timings = sequence.timings if is_first or has_draft else None  # the front may cut the answer here
            self.events.append(TokenEvent(sequence.id, token, logprob, timings=timings))
        else:
            is_emitted = sequence.ending.stop_token is None
            self._finish(sequence, "stop", last=(token if is_emitted else None, logprob))

    # Endings and failures.

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        last: Emitted = (None, None),
        *,
        is_refused: bool = False,
    ) -> None:
        ending = sequence.end(reason, error, self.clock())
        if sequence.is_abandoned:  # else a fork takes its place, and what it holds
            self._release_prefix(sequence)
        token, logprob = last
        end = TokenEvent(
            sequence.id, token, logprob, ending.reason, ending.error, ending.stop_token, sequence.timings, is_refused
        )
        self.events.append(end)

    def _finish_empty(self, sequence: Sequence) -> None:
        """Finish a sequence whose max_tokens is 0 with the reason "length", unless it has finished."""
        if sequence.max_tokens == 0 and not sequence.is_finished:
            self._finish(sequence, "length")

    def _release_finished(self, *, is_intact: bool = True) -> None:
        """Free what finished sequences hold; `is_intact`: the caches that they decoded in are good for the next turn."""
        for sequence in self.scheduler.drop_finished():
            self.mask_prices.forget(sequence)
            if is_intact:
                self.prefix.retain(sequence)
            self.runner.release(sequence)
            self._release_prefix(sequence)

    def _release_prefix(self, sequence: Sequence) -> None:
        """Release a sequence's cached prefix; hand its half-computed chunk, if any, to a prompt that needs the same chunk."""
        if sequence.is_amid_chunk and (twin := self.scheduler.twin(sequence)) is not None:
            self.runner.hand_over(sequence, twin)
        self.prefix.release(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's states and move it back to the waiting queue; a token in flight will be sampled again."""
        self.order.forget(sequence)
        self.runner.release(sequence)
        self.prefix.release(sequence)
        self.scheduler.preempt(sequence)
        sequence.preempt(self.max_replayed_tokens)

    def _compute_without_drafts(self, sequence: Sequence) -> None:
        """Compute a sequence's states anew, one token a step: what is not finite may be a token's that does not count."""
        log.warning("sequence %d goes on without drafts: a step of several tokens gave numbers that are not finite", sequence.id)
        sequence.give_up_drafts()
        self.runner.release(sequence, poisoned=True)
        self._preempt(sequence)

    def _blame(self, sequence: Sequence, what: str, error: Exception) -> None:
        """End a sequence whose own work failed; retry it with the rows of the step in flight if the error may be that step's."""
        if isinstance(error, RuntimeError):  # as MLX reports what failed on the device
            if (step := self.order.pending) is not None:
                self._undo([*step.sequences, sequence], error)
                return
            self.runner.drain()
        self._fail(sequence, what, error)

    def _undo(self, rows: list[Sequence], error: Exception) -> None:
        """After a failed step preempt all decoding rows and retry its rows in halves; end a row that fails a retry alone."""
        suspects = list(dict.fromkeys(rows))
        log.error("a step of %d rows failed and is tried again in parts", len(suspects), exc_info=error)
        self._note_failure(error)
        self.num_failed_turns += 1
        if self.num_failed_turns >= MAX_FAILED_TURNS:
            raise InternalError(f"{self.num_failed_turns} turns failed one after the other; the last: {error}") from error
        self.order.pending = None
        self.runner.drain()
        self._release_finished(is_intact=False)
        for sequence in [one for one in reversed(self.scheduler.running) if one.is_prefilled or one in suspects]:
            self._preempt(sequence)
        self.runner.reset()
        guilty = self.bisection.split([one for one in suspects if not one.is_finished])
        if guilty is not None:
            self._fail(guilty, "a step of it", error)

    def _note_failure(self, error: Exception) -> None:
        """Remember the last failure; raises where no row can be computed any more: the process ends, and another one resumes."""
        self.last_failure = error
        if is_lost_rank(error):
            raise InternalError(f"another rank of the engine is gone: {error}") from error

    def _fail(self, sequence: Sequence, what: str, error: Exception) -> None:
        """End a sequence with an error, free its memory, and uncache the prompt chunks that it computed."""
        if sequence.is_finished:
            return
        log.error("sequence %d ends: %s failed", sequence.id, what, exc_info=error)
        self._note_failure(error)
        self.runner.release(sequence, poisoned=True)
        self.prefix.reset(sequence)
        self.prefix.invalidate(sequence)
        self._finish(sequence, "error", f"{what} failed: {error}")
