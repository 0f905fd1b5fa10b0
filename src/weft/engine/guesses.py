"""Guesses of a model's MTP head for the rows in the pool: it reads the tokens that the model computed, then guesses the next.

The head reads when it guesses, not in every step: of each row's last tokens the hidden states are kept until then. When they
become too many it reads all the same, or skips them if the batch is a crowd, where guesses seldom pay. To the head a skipped
token has a key and a value of zeros. That makes later guesses worse, never an answer.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from weft.engine.row_memory import RowMemory
from weft.engine.sampler import sample
from weft.engine.sequence import Line, Sequence
from weft.memory.slabs import Pool, RowState
from weft.memory.views import Batch, StepSpan, make_room
from weft.model.adapter import HIDDEN_STATES, Adapter

MAX_READING_ROWS = 4  # in larger batches tokens are skipped

Batches = Callable[[tuple[Sequence, ...], StepSpan], Iterator[tuple[Batch, list[Sequence | None]]]]


class Guesses:
    """Runs a model's MTP head over the rows of one pool; `batches` groups sequences as the decode steps do."""

    def __init__(self, adapter: Adapter, pool: Pool, batches: Batches) -> None:
        self.adapter = adapter
        self.pool = pool
        self._batches = batches
        self._layer = len(adapter.specs) - 2  # the head's keys and values
        self._has_written = False  # keys and values, since the last step began

    def guess(self, sequences: tuple[Sequence, ...], count: int) -> dict[Sequence, tuple[int, ...]]:
        """Guess the next `count` tokens of each row in the pool, whose last token is known.

        Guesses are drawn as the row's tokens are, with the same random number: at any temperature both often agree.
        """
        states = _in_pool(sequences)
        unread = max((state.unread for state in states), default=0)
        for state in states:  # so that no row moves between the batches
            make_room(self.pool, state, max(count, unread + 2), seam=self.adapter.way == "seam")
        spans = [StepSpan(unread + 1, is_unread=True), *(StepSpan(1, ahead) for ahead in range(1, count))]
        batches = {span: list(self._batches(sequences, span)) for span in spans}
        guesses = [self._guess([batches[span][part] for span in spans]) for part in range(len(batches[spans[0]]))]
        mx.eval([tokens for _, tokens in guesses])  # sync: the next step is made of them
        found: dict[Sequence, tuple[int, ...]] = {}
        for rows, tokens in guesses:
            found |= {row: tuple(guessed) for row, guessed in zip(rows, np.array(tokens).tolist(), strict=True)}
        return found

    def catch_up(self, sequences: tuple[Sequence, ...], tokens: int) -> None:
        """Before a step of so many tokens per row: read or skip, if more would be unread then than hidden states are kept."""
        states = _in_pool(sequences)
        if self.adapter.head is None or max((state.unread for state in states), default=0) + tokens < HIDDEN_STATES:
            return
        self._has_written = True
        if len(states) > MAX_READING_ROWS:
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
            self._read(batch, rows, counts)
            for state, count in zip(batch.rows, counts, strict=True):
                if state is not None:
                    state.unread -= count

    def take_written(self) -> list[mx.array]:
        """Return the head's keys and values if they were written since the last call: they are on no logits' way."""
        if not self._has_written:
            return []
        self._has_written = False
        held = [slab.layers[self._layer] for slab in self.pool.slabs]
        return [array for one in held for array in (one.keys, one.values)]

    def _skip(self, states: list[RowState]) -> None:
        for state in states:
            if state.slab is not None and state.unread > 0:
                state.slab.scrub_tokens(state.slot, state.length - state.unread, state.length, (self._layer,))
                state.unread = 0

    def _guess(self, chain: list[tuple[Batch, list[Sequence | None]]]) -> tuple[list[Sequence], mx.array]:
        """Read what is unread of one batch's rows, and guess on from there; returns the live rows and their guesses (rows, T)."""
        (batch, rows), live = chain[0], [index for index, row in enumerate(chain[0][1]) if row is not None]
        ends = [0 if state is None else state.unread for state in batch.rows]
        states = self._read(batch, rows, [end + 1 for end in ends])
        state = mx.take_along_axis(states, mx.array(ends)[:, None, None], axis=1)[:, 0]
        guessed: list[mx.array] = []
        for ahead, (batch_ahead, _) in enumerate(chain):
            if guessed:
                tokens = guessed[-1]
                if len(live) < len(rows):
                    tokens = mx.zeros(len(rows), mx.int32)
                    tokens[mx.array(live)] = guessed[-1]
                state = self.adapter.guess(tokens, state, batch_ahead)
            lines = [Line(row, (), 1 + ahead) for row in rows if row is not None]
            logits = self.adapter.guessed_logits(state)
            guessed.append(sample(logits if len(live) == len(rows) else logits[mx.array(live)], lines).tokens)
        for one in batch.rows:
            if one is not None:
                one.unread = -1
        return [row for row in rows if row is not None], mx.stack(guessed, axis=1)

    def _read(self, batch: Batch, rows: list[Sequence | None], counts: list[int]) -> mx.array:
        """Let the MTP head read so many tokens of each row from the first that it has not read; returns its states (B, T, H)."""
        tokens, starts = [], []
        for row, state, count in zip(rows, batch.rows, counts, strict=True):
            first = 0 if state is None else state.length - state.unread
            own = [0] if row is None or not count else [row.token_at(first + place) for place in range(count)]
            tokens.append(own + own[-1:] * (batch.tokens - len(own)))
            starts.append(HIDDEN_STATES - 1 - (0 if state is None else max(0, state.unread)))
        self._has_written = True
        return self.adapter.read(mx.array(tokens, mx.int32), starts, batch)


def _in_pool(sequences: tuple[Sequence, ...]) -> list[RowState]:
    return [memory.state for one in sequences if isinstance(memory := one.memory, RowMemory) and memory.own is None]
