"""Guesses of a model's MTP head for the rows in the pool: it reads the tokens that the model computed, then guesses the next.

Where a step is weft's own operation, the next guesses are made behind it, before its tokens are read: the device counts how many
draft tokens are accepted, and the head reads on from there. Else they are made when they are asked for (`guess`).

The head reads when it guesses, not in every step: of each row's last tokens the hidden states are kept until then. When they
become too many it reads all the same, or skips them if the batch is a crowd, where guesses seldom pay. To the head a skipped
token has a key and a value of zeros. That makes later guesses worse, never an answer.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import mlx.core as mx
import numpy as np

from weft.engine.row_memory import RowMemory
from weft.engine.sampler import sample
from weft.engine.sequence import Line, Sequence
from weft.kernels.fused_model import GuessSampling
from weft.memory.paged_views import AnyPool, make_room
from weft.memory.slabs import RowState
from weft.memory.spec import MAX_STEP_TOKENS
from weft.memory.views import Batch, StepSpan
from weft.model.adapter import HIDDEN_STATES, Adapter

MAX_READING_ROWS = 4  # in larger batches tokens are skipped,
MAX_RAGGED_ROWS = 2  # here where steps are ragged: a line costs as much as a row from three rows on (docs/log.md)


class VerifyingStep(Protocol):
    """A step whose tokens are sampled and not read yet: its rows, of whose drafts some tokens will be accepted."""

    sequences: list[Sequence]
    drafts: Mapping[Sequence, tuple[int, ...]]


Ahead = tuple[list[tuple[Sequence, RowState]], list[mx.array]]  # rows, and their guesses: of each token (rows,)
Batches = Callable[[tuple[Sequence, ...], StepSpan], Iterator[tuple[Batch, list[Sequence | None]]]]


class Guesses:
    """Runs a model's MTP head over the rows of one pool; `batches` groups sequences as the decode steps do."""

    def __init__(self, adapter: Adapter, pool: AnyPool, batches: Batches, *, is_ragged: bool) -> None:
        self.adapter = adapter
        self.max_rows = MAX_RAGGED_ROWS if is_ragged else MAX_READING_ROWS
        self.pool = pool
        self._batches = batches
        self._layer = len(adapter.specs) - 2  # the head's keys and values
        self._has_written = False  # keys and values, since the last step began
        self._started: Ahead | None = None  # behind the step under way
        self._ready: Ahead | None = None  # behind the last step

    def guess(self, sequences: tuple[Sequence, ...], count: int) -> dict[Sequence, tuple[int, ...]]:
        """Guess the next `count` tokens of each row in the pool, whose last token is known.

        Guesses are drawn as the row's tokens are, with the same random number: at any temperature both often agree. A row that
        comes from a crowd has none before its next step: the hidden state of its last token was not kept.
        """
        sequences = tuple(one for one in sequences if not any(state.is_blind for state in _in_pool((one,))))
        states = _in_pool(sequences)
        if not states:
            return {}
        unread = max(state.unread for state in states)
        self._make_room(sequences, max(count, unread + 2))  # so that no row moves between the batches
        spans = [StepSpan(unread + 1, is_unread=True), *(StepSpan(1, ahead) for ahead in range(1, count))]
        batches = {span: list(self._batches(sequences, span)) for span in spans}
        guesses = [self._guess([batches[span][part] for span in spans]) for part in range(len(batches[spans[0]]))]
        mx.eval([tokens for _, tokens in guesses])  # sync: the next step is made of them
        found: dict[Sequence, tuple[int, ...]] = {}
        for rows, tokens in guesses:
            found |= {row: tuple(guessed) for row, guessed in zip(rows, np.array(tokens).tolist(), strict=True)}
        return found

    def samplings(self, step: VerifyingStep, count: int) -> list[GuessSampling]:
        """Return how the head's next `count` guesses behind a step are drawn, by row; nothing if it can not guess there.

        It can where it has read all of each row's tokens but those that the step will emit, and rows have room.
        """
        self._ready = None
        states = _in_pool(tuple(step.sequences))
        has_read = len(states) == len(step.sequences) and all(map(_has_read_next, states))
        if not count or not self.adapter.guesses_ahead or not has_read:
            return []
        tokens = [1 + len(step.drafts.get(one, ())) for one in step.sequences]
        if any(self.pool.capacity_of(state) < state.length + own + count for state, own in zip(states, tokens, strict=True)):
            return []
        return [_guess_sampling(one, own + count) for one, own in zip(step.sequences, tokens, strict=True)]

    def begin_ahead(self, sequences: list[Sequence], states: list[RowState], guessed: list[mx.array]) -> None:
        """Note guesses behind a step that is under way, to be settled (`settle_ahead`) when its rows have kept their tokens."""
        self._started = list(zip(sequences, states, strict=True)), guessed

    def settle_ahead(self) -> None:
        """Note that the head has read the tokens of the step that was guessed behind; its rows have kept theirs by now."""
        self._ready, self._started = self._started, None
        for _, state in self._ready[0] if self._ready is not None else ():
            state.unread = -1

    def take_ahead(self, sequences: list[Sequence]) -> dict[Sequence, tuple[int, ...]] | None:
        """Return the guesses that were made behind the last step; None if they are not there for one of these sequences.

        Then the head will read these rows' last tokens again.
        """
        ready, self._ready = self._ready, None
        if ready is None:
            return None
        rows, tokens = ready
        live = {one: place for place, (one, state) in enumerate(rows) if _has_read_next(state) and state in _in_pool((one,))}
        if all(one in live for one in sequences):
            mx.eval(tokens)  # sync: the next step is made of them
            guesses = list(zip(*(np.array(one).tolist() for one in tokens), strict=True))
            return {one: guesses[place] for one, place in live.items()}
        for _, state in rows:
            state.unread = max(state.unread, 0)
        return None

    def keeps_hidden(self, sequences: tuple[Sequence, ...]) -> bool:
        """Whether a step of these sequences must keep hidden states, which the head reads later; not in a crowd, where it skips.

        To be asked before the step.
        """
        if self.adapter.head is None:
            return False
        states = _in_pool(sequences)
        is_crowd = len(states) > self.max_rows
        if not is_crowd:
            self._skip([state for state in states if state.is_blind])
        for state in states:
            state.is_blind = is_crowd
        return not is_crowd

    def catch_up(self, sequences: tuple[Sequence, ...], tokens: int) -> None:
        """Before a step of so many tokens per row: read or skip, if more would be unread then than hidden states are kept."""
        self._started = None
        if tokens > 1 and self.adapter.guesses_ahead:  # behind this step, whose rows can not move any more then
            self._make_room(sequences, tokens + MAX_STEP_TOKENS)
        states = [state for state in _in_pool(sequences) if not state.is_blind]
        if self.adapter.head is None or max((state.unread for state in states), default=0) + tokens < HIDDEN_STATES:
            return
        self._has_written = True
        if len(states) > self.max_rows:
            self._skip(states)
            return
        span = StepSpan(max(state.unread for state in states), is_unread=True)
        for batch, rows in self._batches(sequences, span):
            # What is in flight is not known yet.
            known = [0 if row is None else len(row.prompt) + len(row.output) for row in rows]
            counts = [
                0 if state is None else min(state.unread, count - state.length + state.unread)
                for state, count in zip(batch.rows, known, strict=True)
            ]
            self.adapter.read(*self._unread(batch, rows, counts), batch)
            for state, count in zip(batch.rows, counts, strict=True):
                if state is not None:
                    state.unread -= count

    def _make_room(self, sequences: tuple[Sequence, ...], tokens: int) -> None:
        for state in _in_pool(sequences):
            make_room(self.pool, state, tokens, seam=self.adapter.way == "seam")

    def take_written(self) -> list[mx.array]:
        """Return the head's keys and values if they were written since the last call: they are on no logits' way."""
        if not self._has_written:
            return []
        self._has_written = False
        return self.pool.written_arrays(self._layer)

    def _skip(self, states: list[RowState]) -> None:
        skipped = [state for state in states if state.is_placed and state.unread > 0]
        if self.adapter.guesses_ahead and self.adapter.fused is not None:
            self.adapter.fused.skip(skipped)
        for state in skipped:
            if not self.adapter.guesses_ahead:
                self.pool.scrub_tokens(state, state.length - state.unread, state.length, (self._layer,))
            state.unread = 0

    def _guess(self, chain: list[tuple[Batch, list[Sequence | None]]]) -> tuple[list[Sequence], mx.array]:
        """Read what is unread of one batch's rows, and guess on from there; returns the live rows and their guesses (rows, T)."""
        (batch, rows), live = chain[0], [index for index, row in enumerate(chain[0][1]) if row is not None]
        ends = [0 if state is None else state.unread for state in batch.rows]
        tokens, starts = self._unread(batch, rows, [end + 1 for end in ends])
        state, logits = self.adapter.guess(tokens, starts, batch, mx.array(ends, mx.int32))
        guessed: list[mx.array] = []
        for ahead, (batch_ahead, _) in enumerate(chain):
            if guessed:
                tokens = guessed[-1]
                if len(live) < len(rows):
                    tokens = mx.zeros(len(rows), mx.int32)
                    tokens[mx.array(live)] = guessed[-1]
                state, logits = self.adapter.guess_on(tokens, state, batch_ahead)
            lines = [Line(row, (), 1 + ahead) for row in rows if row is not None]
            guessed.append(sample(logits if len(live) == len(rows) else logits[mx.array(live)], lines).tokens)
        for one in batch.rows:
            if one is not None:
                one.unread = -1
        return [row for row in rows if row is not None], mx.stack(guessed, axis=1)

    def _unread(self, batch: Batch, rows: list[Sequence | None], counts: list[int]) -> tuple[mx.array, list[int]]:
        """Return so many tokens of each row from the first that the MTP head has not read, to be read now, and by row the
        place of the hidden state before.
        """
        tokens, starts = [], []
        for row, state, count in zip(rows, batch.rows, counts, strict=True):
            first = 0 if state is None else state.length - state.unread
            own = [0] if row is None or not count else [row.token_at(first + place) for place in range(count)]
            tokens.append(own + own[-1:] * (batch.tokens - len(own)))
            starts.append(HIDDEN_STATES - 1 - (0 if state is None else max(0, state.unread)))
        self._has_written = True
        return mx.array(tokens, mx.int32), starts


def _in_pool(sequences: tuple[Sequence, ...]) -> list[RowState]:
    return [memory.state for one in sequences if isinstance(memory := one.memory, RowMemory) and memory.own is None]


def _has_read_next(state: RowState) -> bool:
    return state.unread == -1


def _guess_sampling(sequence: Sequence, count: int) -> GuessSampling:
    """Return how guesses for a sequence are drawn: as its tokens are, with the random numbers of the next `count` positions."""
    sampling, first = sequence.sampling, sequence.num_tokens + 1
    numbers = [sequence.uniform(first + place) for place in range(count)] if sampling.temperature else []
    return GuessSampling(sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, numbers)
