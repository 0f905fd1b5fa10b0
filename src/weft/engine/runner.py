"""Executes the scheduler's plans: builds and runs the model's forwards for prefill and decode steps, and samples tokens.

A sequence starts on caches of its own (prefill, one row, unpadded) and is copied into the pool when it can join the batch. A
row that can not join decodes alone on its own caches: slower, never wrong.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from weft.config import EngineConfig
from weft.engine.faults import Faults
from weft.engine.guesses import Guesses
from weft.engine.image_features import ImageFeatures
from weft.engine.prefill_rate import PrefillRate
from weft.engine.row_memory import AloneCause, PromptEnd, RowMemory
from weft.engine.sampler import SampledTokens, logprobs_of, sample
from weft.engine.scheduler import Plan, Row
from weft.engine.sequence import Line, Sequence
from weft.errors import InternalError, WeftError
from weft.kernels import cuda_paged
from weft.kernels.fused_model import FusedStep
from weft.memory.disk_files import Damaged, Entry
from weft.memory.paged_views import make_batches
from weft.memory.slabs import NewRow, Pool, Refusal
from weft.memory.spec import Recurrent, RowContents, mismatch
from weft.memory.transfer import ON_CUDA, to_device
from weft.memory.views import ONE_TOKEN, Batch, StepSpan
from weft.model.adapter import SPEC_TOKENS, Adapter, Chunk
from weft.model.saved_state import (
    LayerCaches,
    SavedState,
    let_go,
    move_end,
    restore,
    save_block,
    save_checkpoint,
    take_back,
    unpack,
)

log = logging.getLogger("weft.engine")

HANDOVER_TOKENS = 512  # a row of so many hands over its arrays to the pool: on a CPU copying 1,100 tokens of smollm2 takes 20 ms
HANDOVER_ROOM = 128  # tokens of an answer that such a row's arrays have room for from the start


@dataclass(frozen=True)
class Forward:
    """One batch of a step with several tokens per row, until it is known how many of each row's count."""

    batch: Batch
    rows: list[Sequence | None]
    known: list[int]  # by row: tokens that count for certain; draft tokens come behind them
    is_finite: mx.array | None  # (B, T) of the logits; None: all of them are sampled from, and looked at there


@dataclass(frozen=True)
class FusedForward:
    """The forward of a step as weft's own operation, until it is known how many of each row's tokens count."""

    step: FusedStep
    known: list[int]  # by row: tokens that count for certain; draft tokens come behind them
    has_several: bool  # tokens of any row; else all of them count, and did when it was built


@dataclass
class Step:
    """A decode step in progress: its sequences in batch order, the lines it samples with lazy logits, later their tokens."""

    sequences: list[Sequence]
    lines: list[Sequence | Line]  # what is sampled: of each sequence in turn one token, and one more behind each draft token
    logits: mx.array  # (lines, V)
    new: set[Sequence]  # those whose token is a new one; the others replay tokens they emitted before, or were preempted
    drafts: Mapping[Sequence, tuple[int, ...]] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)  # of a step with several tokens per row
    fused: FusedForward | None = None  # the forward of all rows, where it is an operation of its own
    sampled: SampledTokens | None = None
    errors: dict[int, str] = field(default_factory=dict)  # by line: why its grammar can not go on, should the line count

    def add(self, sequence: Sequence, num_known: int) -> None:
        """Add a sequence whose next tokens it computes: so many known ones, then those of its draft."""
        draft = self.drafts.get(sequence, ())
        self.sequences.append(sequence)
        self.lines += [sequence, *(Line(sequence, draft[: place + 1]) for place in range(len(draft)))]
        if sequence.begin_step(num_known):
            self.new.add(sequence)

    @property
    def has_several(self) -> bool:
        """Whether rows have several tokens, of which it is not known yet how many count."""
        return bool(self.forwards) or (self.fused is not None and self.fused.has_several)

    def sampled_tokens(self) -> mx.array:
        """Return the tokens of all lines, (lines,), sampled and perhaps not computed yet."""
        assert self.sampled is not None
        return self.sampled.tokens

    def finite_lines(self, forward: Forward) -> NDArray[np.bool_]:
        """Return whether the logits are finite, (B, T), of a step's first forward, all of whose lines are sampled from."""
        assert self.sampled is not None
        count = len(forward.rows) * forward.batch.tokens
        found: NDArray[np.bool_] = self.sampled.are_finite()[:count].reshape(-1, forward.batch.tokens)
        return found

    def places(self) -> Iterator[tuple[Sequence, range]]:
        """Iterate over the sequences and the places of their lines."""
        start = 0
        for sequence in self.sequences:
            count = 1 + len(self.drafts.get(sequence, ()))
            yield sequence, range(start, start + count)
            start += count


class RowFailure(WeftError):
    """Restoring one row's states or copying them into the pool failed before the decode step ran; carries its sequence."""

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(str(error))
        self.sequence = sequence


class Runner:
    """Runs the model for the engine: prefill chunks, decode steps and sampling; owns the pool of the batched rows' states."""

    def __init__(self, adapter: Adapter, config: EngineConfig, clock: Callable[[], float], faults: Faults) -> None:
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.faults = faults
        self.prefill_rate = PrefillRate()
        self.images = None if adapter.vision is None else ImageFeatures(adapter.vision)
        self.num_alone: dict[str, int] = dict.fromkeys(get_args(AloneCause), 0)  # rows that decoded alone, by cause
        self._refused_layers: set[int] = set()  # those in the log
        self.reset()

    def drain(self) -> None:
        """After a failure wait until the device is idle, and drop an error that it has yet to report: it would meet another row.

        Raises InternalError if the device can not even add: then no row is to blame, and this process is of no use any more.
        """
        with contextlib.suppress(RuntimeError):
            mx.synchronize()  # sync: after a failure
        try:
            mx.eval(mx.zeros(1) + 1)  # sync: after a failure
        except RuntimeError as error:
            raise InternalError(f"the device computes nothing any more: {error}") from error

    def reset(self) -> None:
        """Replace the pool by an empty one, because the contents of the old one are undefined after a failed forward."""
        self.pool = self.adapter.make_pool(
            slab_tokens=self.config.slab_tokens,
            max_rows=self.config.max_rows,
            coarse_tokens=self.config.coarse_tokens,
            constant_shapes=self.config.width is not None,
            # Other steps compute slab by slab: the fewer of them, the better.
            handover_tokens=HANDOVER_TOKENS if self.has_fused_steps else None,
        )
        self.guesses = Guesses(self.adapter, self.pool, self._batches, is_ragged=self.has_fused_steps)

    def allocate(self, sequences: tuple[Sequence, ...], upcoming: tuple[int, ...]) -> None:
        """Copy the states of rows that are new in a step into the pool, lazily; raises RowFailure.

        `upcoming`: prompt lengths of rows that will join next.
        """
        self.pool.trim()
        new: list[Sequence] = []
        entering: list[NewRow] = []
        for sequence in sequences:
            try:
                contents = self._fitting_contents(sequence)
            except Exception as error:  # a border: whatever fails here belongs to this row
                raise RowFailure(sequence, error) from error
            if contents is not None:
                new.append(sequence)
                entering.append(NewRow(_memory(sequence).state, contents, sequence.num_computed))
        if not new:
            return
        try:
            self.pool.allocate_all(entering, upcoming)
        except Exception:  # a border: it belongs to one of them
            log.exception("%d rows could not enter the pool together, each enters by itself", len(new))
            for one in entering:
                self.pool.free(one.row, poisoned=True)
            self._allocate_one_by_one(new, entering)
        for sequence in new:
            self._retain(sequence)

    def _allocate_one_by_one(self, sequences: list[Sequence], entering: list[NewRow]) -> None:
        """Copy each row's states into the pool by itself; raises RowFailure for the first that fails."""
        for sequence, one in zip(sequences, entering, strict=True):
            try:
                self.pool.allocate_all([one])
            except Exception as error:  # a border: whatever fails here belongs to this row
                raise RowFailure(sequence, error) from error
            self._retain(sequence)

    def forward(self, plan: Plan, last: Step | None) -> Step | None:
        """Build a plan's decode step, whose rows are allocated; None if no row decodes. `last`: the step before."""
        if not plan.steps:
            return None
        self.faults.at("decode", *plan.steps)
        self.guesses.catch_up(plan.steps, plan.step_tokens)
        if self._is_fused(plan.steps):
            step = self._forward_fused(plan, last)
        else:
            step = self._forward_tokens(plan) if plan.step_tokens > 1 else self._forward_token(plan, last)
        if lines := self.faults.struck("logits", [_sequence(line) for line in step.lines]):
            step.logits[mx.array(lines)] = mx.nan
        return step

    def _forward_token(self, plan: Plan, last: Step | None) -> Step:
        """Build a step of one token per row."""
        parts = [*self._decode_together(plan.steps, last), *self._decode_alone(plan.steps, last)]
        order = [sequence for sequences, _ in parts for sequence in sequences]
        new = {sequence for sequence in order if sequence.begin_step(1)}
        return Step(order, list(order), mx.concatenate([logits for _, logits in parts]), new)

    def _forward_tokens(self, plan: Plan) -> Step:
        """Build a step of several tokens per row: those known, draft tokens to verify, and any token to fill the rest."""
        step = Step([], [], mx.zeros(0), set(), plan.drafts)
        logits = []
        for batch, rows in self._batches(plan.steps, StepSpan(plan.step_tokens)):
            known = [0 if row is None else min(row.num_known, plan.step_tokens) for row in rows]
            drafts = [() if row is None else plan.drafts.get(row, ()) for row in rows]
            tokens = [_step_tokens(*row, plan.step_tokens) for row in zip(rows, known, drafts, strict=True)]
            found = self.adapter.decode(mx.array(tokens, mx.int32), batch)
            places: list[int] = []
            for index, (row, count, draft) in enumerate(zip(rows, known, drafts, strict=True)):
                if row is not None:
                    first = index * plan.step_tokens + count - 1
                    places += range(first, first + len(draft) + 1)
                    step.add(row, count)
            lines = found.flatten(0, 1)
            is_all = len(places) == lines.shape[0] and not step.forwards
            step.forwards.append(Forward(batch, rows, known, None if is_all else mx.isfinite(mx.max(found, axis=-1))))
            logits.append(lines if is_all else lines[mx.array(places)])
        for sequences, own_logits in self._decode_alone(plan.steps, None):
            step.add(sequences[0], 1)
            logits.append(own_logits)
        step.logits = mx.concatenate(logits)
        return step

    def _is_fused(self, sequences: tuple[Sequence, ...]) -> bool:
        """Whether a step of these sequences is computed by weft's own operation: all of them have places in the pool."""
        fused = self.adapter.fused if self.has_fused_steps else None
        return fused is not None and fused.is_current and all(_memory(one).own is None for one in sequences)

    @property
    def has_fused_steps(self) -> bool:
        """Whether steps are weft's own operations, where all of a step's rows are in the pool; they can not overlap."""
        is_overlapped = self.config.pipelined and not self.config.settle_first
        return self.adapter.fused is not None and self.adapter.way == "seam" and self.config.width is None and not is_overlapped

    def _forward_fused(self, plan: Plan, last: Step | None) -> Step:
        """Build a step as one operation, in which each row has its known tokens and its draft, and nothing to fill."""
        assert self.adapter.fused is not None
        assert isinstance(self.pool, Pool)
        owner = {_memory(one).state: one for one in plan.steps}
        known = {state: min(one.num_known, plan.step_tokens) for state, one in owner.items()}
        counts = {state: known[state] + len(plan.drafts.get(one, ())) for state, one in owner.items()}
        rows = self.adapter.fused.arrange(self.pool, counts)
        order = [owner[state] for state in rows.states]
        drafts = [plan.drafts.get(one, ()) for one in order]
        has_several = plan.step_tokens > 1
        if has_several:
            pairs = zip(order, rows.states, drafts, strict=True)
            lines = [(*one.known_tokens(known[state]), *draft) for one, state, draft in pairs]
            tokens = mx.array([token for line in lines for token in line], mx.int32)
        else:
            tokens = self._inputs(list(order), last)
        keeps_hidden = self.guesses.keeps_hidden(plan.steps)
        counts_known = [known[state] for state in rows.states]
        fused = self.adapter.fused.decode(rows, tokens, counts_known, drafts, keeps_hidden=keeps_hidden)
        step = Step([], [], fused.logits, set(), plan.drafts)
        for one, state in zip(order, rows.states, strict=True):
            step.add(one, known[state])
            if not has_several:
                state.advance(1)
        step.fused = FusedForward(fused, counts_known, has_several)
        return step

    def keep(self, step: Step, accepted: Mapping[Sequence, int]) -> None:
        """After a step with several tokens per row, keep the known tokens and as many draft tokens as were accepted."""
        if step.fused is not None:
            self._keep_fused(step, step.fused, accepted)
            return
        for forward in step.forwards:
            rows = zip(forward.rows, forward.known, strict=True)
            counts = [1 if row is None else known + accepted.get(row, 0) for row, known in rows]
            finite = step.finite_lines(forward) if forward.is_finite is None else np.array(forward.is_finite)
            for index, (state, count) in enumerate(zip(forward.batch.rows, counts, strict=True)):
                # A masked NaN still poisons: 0 · NaN.
                if state is not None and not finite[index, count:].all():
                    self.pool.scrub_tokens(state, state.length + count, state.length + forward.batch.tokens)
            forward.batch.keep(counts)
        self.guesses.settle_ahead()

    def _keep_fused(self, step: Step, forward: FusedForward, accepted: Mapping[Sequence, int]) -> None:
        """Count the tokens that each row keeps; states and hidden states of these are there by `follow`."""
        assert step.sampled is not None
        finite = step.sampled.are_finite()
        rows = zip(step.places(), forward.step.rows.states, forward.known, strict=True)
        for (sequence, places), state, known in rows:
            count = accepted.get(sequence, 0)
            # Keys and values of tokens that do not count are overwritten before they are read, but a masked NaN still poisons.
            if state.slab is not None and not finite[places.start + count + 1 : places.stop].all():
                state.slab.scrub_tokens(state.slot, state.length + known + count, state.length + known + len(places) - 1)
            state.advance(known + count)
        self.guesses.settle_ahead()

    def follow(self, step: Step, num_guesses: int) -> bool:
        """Start what comes behind a sampled step of several tokens per row: what rows keep, and guesses of the MTP head.

        Returns whether the head guesses. Its rows' tokens need not be read before.
        """
        if step.fused is None:
            return False
        samplings = self.guesses.samplings(step, num_guesses)
        _, guessed = step.fused.step.keep(step.sampled_tokens(), num_guesses if samplings else 0, samplings)
        if guessed:
            self.guesses.begin_ahead(step.sequences, step.fused.step.rows.states, guessed)
        return bool(guessed)

    def start(self, step: Step) -> None:
        """Start computing a built step; returns at once on a GPU, while on a CPU this may take nearly as long as the step."""
        # Slabs are on the logits' way; states may not be, and would drag the graphs of all steps behind them.
        flags = [forward.is_finite for forward in step.forwards if forward.is_finite is not None]
        states = [] if step.fused is not None else [step.logits, *flags, *self.pool.states()]  # else it is computed
        if started := [*states, *self.guesses.take_written()]:
            mx.async_eval(*started)  # type: ignore[no-untyped-call]

    def sample(self, step: Step, allowed: NDArray[np.bool_] | None) -> None:
        """Start sampling a step's tokens into `step.sampled`, restricted to `allowed` (lines, V) if given; does not read them."""
        self.faults.at("sampler", *step.sequences)
        step.sampled = sample(step.logits, step.lines, None if allowed is None else mx.array(allowed))
        mx.async_eval(*step.sampled.arrays())  # type: ignore[no-untyped-call]

    def wait(self, step: Step) -> None:
        """Wait until a step's tokens are sampled."""
        assert step.sampled is not None
        mx.eval(*step.sampled.arrays())  # sync: the time of a prompt's slice begins behind the step

    def prefill(self, row: Row, seconds: float | None, beside: tuple[Row, ...] = ()) -> list[Row]:
        """Evaluate a prompt chunk layer by layer for about `seconds` (None: to its end); returns the chunks that are complete.

        The chunk is one lazy graph. Evaluating its layers' states in order divides the time finely without dividing the
        tokens: the numbers do not depend on how often the work was interrupted. If it begins now, the chunks `beside` it are
        computed in the same forward; whoever of them is still there is complete when it is. With a prompt's last chunk its last
        token is computed too, where that has the bits of a step: see `first_step`.
        """
        memory, started = _memory(row.sequence), self.clock()
        if memory.chunk is None:
            self._begin((row, *beside))
        chunk = memory.chunk
        assert chunk is not None
        if memory.encoding:
            self.faults.at("encode", row.sequence)
        if seconds is None:
            chunk.finish()
        elif not chunk.is_done:  # else it was computed for others, and this is a successor of one of them
            self._slice(chunk, seconds - (self.clock() - started))  # building the forward is part of the slice
        chunk.seconds += self.clock() - started
        if not chunk.is_done:
            return []
        done = [row, *(one for one in memory.together if one.sequence is not row.sequence and self.is_amid(one.sequence, chunk))]
        self._measure(chunk, memory, done)
        for one in done:
            self._end_chunk(one)
        return done

    def together(self, row: Row) -> list[Sequence]:
        """Return the sequences whose chunks are computed in one forward with a row's, itself included."""
        memory = _memory(row.sequence)
        others = [
            one.sequence for one in memory.together if memory.chunk is not None and self.is_amid(one.sequence, memory.chunk)
        ]
        return list(dict.fromkeys([row.sequence, *others]))

    @staticmethod
    def is_amid(sequence: Sequence, chunk: Chunk) -> bool:
        """Whether a chunk is the one that a sequence is being computed in."""
        return sequence.memory is not None and _memory(sequence).chunk is chunk

    def take_ends(self, sequences: Iterable[Sequence]) -> dict[Sequence, PromptEnd]:
        """Return the ends of those prompts whose last token was computed with their last chunk, and forget all ends."""
        ends: dict[Sequence, PromptEnd] = {}
        for one in sequences:
            if one.memory is not None:
                memory = _memory(one)
                end, memory.end = memory.end, None
                if end is not None and not one.is_finished and _is_at(one, end):
                    ends[one] = end
        return ends

    def first_step(self, ends: Mapping[Sequence, PromptEnd]) -> Step:
        """Return the step that samples the first tokens of answers from the logits at their prompts' ends, without a forward."""
        self.faults.at("decode", *ends)
        step = Step([], [], mx.concatenate([end.logits for end in ends.values()]), set())
        for one in ends:
            memory = _memory(one)
            assert memory.own is not None
            move_end(memory.own, 1)
            memory.has_end = True
            step.add(one, 1)
        if lines := self.faults.struck("logits", step.sequences):
            step.logits[mx.array(lines)] = mx.nan
        return step

    def _takes_end(self, row: Row) -> bool:
        """Whether a prompt's last token can be computed with this chunk, so that its answer begins without a step."""
        one = row.sequence
        is_last = row.start + row.count == len(one.prefill_ids) - 1 and one.num_tokens == len(one.prefill_ids)
        is_plain = not (one.forks or one.request.images or one.must_read_prompt) and one.wants_token
        return is_last and is_plain and self.has_fused_steps and self.adapter.trunk is not None

    def _begin(self, rows: tuple[Row, ...]) -> None:
        """Build the forward of the rows' chunks, on caches of their own."""
        memories = [_memory(row.sequence) for row in rows]
        shares_arrays = self.adapter.joins_states([row.count for row in rows], [row.start for row in rows])
        for row, memory in zip(rows, memories, strict=True):
            memory.own = memory.own or self._restored_caches(row.sequence)
            memory.shares_arrays = shares_arrays
        whole = [at for at, row in enumerate(rows) if self._takes_end(row)]
        if len(rows) == 1 and not whole:
            memories[0].chunk, memories[0].together = self._start_chunk(rows[0], memories[0]), ()
            return
        tokens = [row.sequence.prefill_ids[row.start : row.start + row.count + (at in whole)] for at, row in enumerate(rows)]
        caches, starts = [memory.own or [] for memory in memories], [row.start for row in rows]
        chunk = self.adapter.prefill_together(tokens, caches, starts, whole)
        for memory in memories:
            memory.chunk, memory.together = chunk, rows if len(rows) > 1 else ()
        for line, at in enumerate(whole):
            assert chunk.ends is not None
            move_end(caches[at], -1)  # nobody sees the token, unless a first step takes it
            memories[at].end = PromptEnd(tokens[at][-1], rows[at].start + rows[at].count, chunk.ends[line : line + 1])

    def _measure(self, chunk: Chunk, memory: RowMemory, rows: list[Row]) -> None:
        """Learn from a computed chunk how long prompt tokens, or images, take."""
        num_tokens = sum(row.count + (_memory(row.sequence).end is not None) for row in rows)
        if memory.encoding and self.images is not None:
            self.images.keep(memory.encoding)
            self.images.encode_seconds += max(0.0, chunk.seconds - num_tokens * self.prefill_rate.seconds_per_token)
        elif chunk.seconds > 0:
            self.prefill_rate.measure(num_tokens, chunk.seconds)

    def _end_chunk(self, row: Row) -> None:
        memory = _memory(row.sequence)
        memory.encoding = {}
        if memory.logprobs is not None:
            row.sequence.prompt_logprobs += memory.logprobs.read(_next_tokens(row))
        memory.chunk = memory.logprobs = None
        memory.together = ()
        row.sequence.num_computed += row.count

    def saved_bytes(self, row: Row) -> int:
        """Return the bytes that `save` will take for a chunk."""
        return self.adapter.saved_bytes(row.start, row.count)

    def save(self, row: Row) -> tuple[SavedState, SavedState]:
        """Copy a just computed chunk: its keys and values (block), and all other layers' states at its end (checkpoint)."""
        self.faults.at("snapshot", row.sequence)
        own = _memory(row.sequence).own
        assert own is not None
        return save_block(own, row.start, row.start + row.count), save_checkpoint(own)

    def hand_over(self, sequence: Sequence, successor: Sequence) -> None:
        """Move a sequence's layer states and half-computed chunk to another sequence whose prompt needs the same chunk."""
        successor.memory, sequence.memory = sequence.memory, None

    def take_retained(self, sequence: Sequence) -> tuple[LayerCaches, int] | None:
        """Take the caches a row was prefilled in before it got a pool slot, and their token count; None if there are none.

        Those whose arrays were handed over come when the row has moved to other ones, or has ended well.
        """
        memory = sequence.memory
        if not isinstance(memory, RowMemory) or memory.retained is None:
            return None
        slab = memory.handed_over
        if slab is not None:
            if memory.state.slab is slab and sequence.finish in (None, "error"):
                return None
            take_back(memory.retained[0], slab.layers)
        retained, memory.retained, memory.handed_over = memory.retained, None, None
        return retained

    def adopt(self, sequence: Sequence, caches: LayerCaches) -> None:
        """Let a sequence continue in another row's retained caches, which must end at the sequence's position."""
        self.faults.at("restore", sequence)
        _memory(sequence).own = self.adapter.reset_growth(caches)

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Give `fork` a copy of the leader's computed prompt states; arrays are shared until one of the two writes."""
        fork.memory = RowMemory(copy.deepcopy(_memory(leader).own))
        fork.num_computed = leader.num_computed

    def unpacked(self, loaded: Entry) -> tuple[SavedState, SavedState | None]:
        """Convert a chunk loaded from disk into saved states: its block, and its checkpoint or None. Raises Damaged."""
        like = self.adapter.new_caches(1)
        block, checkpoint = unpack(loaded.block, like), None if loaded.checkpoint is None else unpack(loaded.checkpoint, like)
        for layer, (spec, state) in enumerate(zip(self.adapter.specs, checkpoint.layers if checkpoint else (), strict=False)):
            if isinstance(spec, Recurrent) and state is not None and (reason := mismatch(spec, tuple(state.cache), 0)):
                raise Damaged(f"layer {layer} of its checkpoint: {reason}")
        return block, checkpoint

    def release(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Free a sequence's memory and pool slot; the slot is zeroed if `poisoned` or if the sequence ended in an error."""
        if sequence.memory is not None:
            self.pool.free(_memory(sequence).state, poisoned=poisoned or sequence.finish == "error")
            sequence.memory = None

    def _fitting_contents(self, sequence: Sequence) -> RowContents | None:
        """Return what a row's own caches hold, if the pool can take it; None: the row is in the pool, or decodes alone."""
        memory = _memory(sequence)
        if memory.own is None and not memory.state.is_placed:
            if sequence.num_computed == 0 and self.adapter.starts_empty:  # a prompt of one token
                return self.adapter.empty_contents
            memory.own = self._restored_caches(sequence)  # one that others computed
        if memory.own is None:
            return None
        if self.adapter.way == "alone":
            self._count_alone(memory, "model")
            return None
        contents = self.adapter.contents(memory.own)
        if refusal := self.pool.refusal(contents, sequence.num_computed):
            is_short = sequence.num_computed < SPEC_TOKENS
            self._count_alone(memory, "short" if is_short else "geometry")
            if not is_short:
                self._log_once(refusal)
            return None
        memory.state.shift = self._shift(sequence)
        return contents

    @staticmethod
    def _retain(sequence: Sequence) -> None:
        """Keep the caches of a row that is in the pool now aside, for the conversation's next turn."""
        memory = _memory(sequence)
        slab = memory.state.slab
        if memory.own is not None and slab is not None and slab.is_handed_over:
            let_go(memory.own)
            memory.handed_over = slab
        if memory.own is not None and not memory.shares_arrays:  # else it would keep other rows' states too
            move_end(memory.own, -memory.has_end)  # the next turn goes on from where a node of the prefix tree ends
            memory.retained = memory.own, sequence.num_computed - memory.has_end
        memory.own, memory.has_end = None, False

    def _shift(self, sequence: Sequence) -> int:
        """Return what is added to a token's number for its position behind the sequence's images."""
        return 0 if self.adapter.vision is None else self.adapter.vision.shift_of(sequence.request.images)

    def _count_alone(self, memory: RowMemory, cause: AloneCause) -> None:
        """Count a row that decodes alone, at its first step for this cause."""
        self.num_alone[cause] += memory.alone != cause
        memory.alone = cause

    def _log_once(self, refusal: Refusal) -> None:
        """Log why a row can not join the batch; once for each layer, because every row of a model has the same reason."""
        if refusal.layer not in self._refused_layers:
            self._refused_layers.add(refusal.layer)
            log.warning("a row does not fit into the batch, so it decodes alone, which is slower: %s", refusal.reason)

    def _restored_caches(self, sequence: Sequence) -> LayerCaches:
        is_long = self.has_fused_steps and len(sequence.prefill_ids) >= HANDOVER_TOKENS
        answer = min(sequence.max_tokens, HANDOVER_ROOM) if is_long else 0
        node, caches = sequence.prefix.node, self.adapter.new_caches(len(sequence.prefill_ids) + answer)
        if node is None:
            return caches
        self.faults.at("restore", sequence)
        return restore(caches, [one.block for one in node.path()], node.checkpoint)

    def _batches(self, sequences: tuple[Sequence, ...], span: StepSpan) -> Iterator[tuple[Batch, list[Sequence | None]]]:
        """Group the pool's rows into batches: one with slab attention, else one per slab. Idle rows are None."""
        owner = {id(_memory(sequence).state): sequence for sequence in sequences if _memory(sequence).own is None}
        if not owner:
            return
        states = [_memory(sequence).state for sequence in owner.values()]
        for batch in make_batches(self.pool, states, seam=self.adapter.way == "seam", width=self.config.width, span=span):
            yield batch, [None if state is None else owner[id(state)] for state in batch.rows]

    def _decode_together(self, sequences: tuple[Sequence, ...], last: Step | None) -> Iterator[tuple[list[Sequence], mx.array]]:
        """Decode one token of each of the pool's rows; yield (sequences, logits) of each batch."""
        for batch, rows in self._batches(sequences, ONE_TOKEN):
            logits = self.adapter.decode(self._inputs(rows, last)[:, None], batch)[:, -1]
            live = [index for index, row in enumerate(rows) if row is not None]
            batch.keep([1] * len(rows))
            yield [row for row in rows if row is not None], logits if len(live) == len(rows) else logits[mx.array(live)]

    def _decode_alone(self, sequences: tuple[Sequence, ...], last: Step | None) -> Iterator[tuple[list[Sequence], mx.array]]:
        for sequence in sequences:
            if (own := _memory(sequence).own) is not None:
                shift = self._shift(sequence)
                position = sequence.num_computed + shift if shift else None
                yield [sequence], self.adapter.decode_alone(self._inputs([sequence], last)[:, None], own, position)

    def _inputs(self, sequences: list[Sequence | None], last: Step | None) -> mx.array:
        """Return each row's next input token (rows,): from the host if it was read already, else from the unread step `last`."""
        places = {} if last is None else {id(sequence): index for index, sequence in enumerate(last.sequences)}
        in_flight = [places[id(s)] if s is not None and s.num_in_flight else -1 for s in sequences]
        on_host = [0 if s is None or s.num_in_flight else s.token_at(s.num_computed) for s in sequences]
        if last is None or max(in_flight) < 0:
            return mx.array(on_host, mx.int32)
        assert last.sampled is not None
        if in_flight == list(range(len(last.sequences))):
            return last.sampled.tokens
        if ON_CUDA:
            return cuda_paged.take_tokens(last.sampled.tokens, *to_device(in_flight, on_host))
        taken = last.sampled.tokens[mx.array([max(place, 0) for place in in_flight])]
        return mx.where(mx.array([place >= 0 for place in in_flight]), taken, mx.array(on_host, mx.int32))

    def _start_chunk(self, row: Row, memory: RowMemory) -> Chunk:
        assert memory.own is not None
        sequence = row.sequence
        if self.adapter.is_always_ragged and not sequence.request.images and sequence.sampling.prompt_logprobs is None:
            tokens = sequence.prefill_ids[row.start : row.start + row.count]
            return self.adapter.prefill_together([tokens], [memory.own], [row.start])
        chunk, logits = self._prefill(row, memory, memory.own)
        if (count := row.sequence.sampling.prompt_logprobs) is not None:
            memory.logprobs = logprobs_of(logits[0], mx.array(_next_tokens(row), mx.int32), count)
            chunk.also(memory.logprobs.arrays())
        return chunk

    def _prefill(self, row: Row, memory: RowMemory, caches: LayerCaches) -> tuple[Chunk, mx.array]:
        sequence, end = row.sequence, row.start + row.count
        if not sequence.request.images or self.images is None:
            return self.adapter.prefill(sequence.prefill_ids[row.start : end], caches)
        found = self.images.of_chunk(sequence, row.start, row.count)
        memory.encoding = found.encoded
        tokens = [sequence.token_at(position) for position in range(row.start, end)]
        chunk, logits = self.adapter.prefill(tokens, caches, None if found.seen.offset == row.start else found.seen)
        chunk.before(found.states)
        return chunk, logits

    def _slice(self, chunk: Chunk, seconds: float) -> None:
        """Evaluate at least one layer of a chunk, and more as long as the next one will probably end within `seconds`.

        Where slices come behind a step, the layer after each is started before that one is waited for, the last of a slice too:
        the device computes it while the host builds the next step.
        """
        start = last = self.clock()
        longest = 0.0  # one that was started in the slice before may have ended already
        while chunk.advance(is_ahead=self.config.slices_behind_step):
            now = self.clock()
            longest = max(longest, now - last)
            if now - start + longest > seconds:
                return
            last = now


def _is_at(sequence: Sequence, end: PromptEnd) -> bool:
    """Whether this is the end of a sequence's prompt, and all it has not computed by steps: it may have been another's."""
    is_next = end.place == sequence.num_computed == len(sequence.prefill_ids) - 1 and sequence.num_known == 1
    return is_next and sequence.prefill_ids[-1] == end.token and sequence.wants_token


def _memory(sequence: Sequence) -> RowMemory:
    if sequence.memory is None:
        sequence.memory = RowMemory()
    assert isinstance(sequence.memory, RowMemory)
    return sequence.memory


def _sequence(line: Sequence | Line) -> Sequence:
    return line.sequence if isinstance(line, Line) else line


def _step_tokens(sequence: Sequence | None, num_known: int, draft: tuple[int, ...], count: int) -> list[int]:
    """Return the `count` tokens of a row in a step: known ones, its draft, and its last token over again to fill the rest."""
    if sequence is None:
        return [0] * count
    tokens = [*sequence.known_tokens(num_known), *draft]
    return tokens + tokens[-1:] * (count - len(tokens))


def _next_tokens(row: Row) -> list[int]:
    return row.sequence.prefill_ids[row.start + 1 : row.start + row.count + 1]
