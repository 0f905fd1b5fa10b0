"""Obeys a plan: forwards over the rows' memory, then the choice of tokens. Keeps nothing between steps.

A sequence's memory starts as its own caches (prefill, one row, unpadded) and is copied into the pool when it can join
the batch. A row that can not join steps alone, on its own caches: slower, never wrong.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from weft.config import EngineConfig
from weft.engine.faults import Faults
from weft.engine.plan import Plan, Row
from weft.engine.sampler import Logprobs, SampledTokens, choose, logprobs_of
from weft.engine.sequence import Sequence
from weft.errors import WeftError
from weft.memory.disk import Loaded, Packed
from weft.memory.slabs import Pool, RowState
from weft.memory.views import make_batches
from weft.model.adapter import Adapter, Chunk, LayerCaches, Saved
from weft.model.packing import pack, unpack


@dataclass
class RowMemory:
    """A sequence's states: its own caches until it is seated in the pool, and the prompt chunk under way."""

    own: LayerCaches | None
    state: RowState = field(default_factory=RowState)
    retained: tuple[LayerCaches, int] | None = None  # its own caches once it is seated, and how many tokens are in them
    chunk: Chunk | None = None
    chunk_seconds: float = 0.0  # that were spent on it
    logprobs: Logprobs | None = None  # of the chunk under way, where the prompt's are asked for


@dataclass
class Step:
    """A plan under way: its sequences in order, their lazy logits, then their lazy tokens."""

    sequences: list[Sequence]
    logits: mx.array  # (rows, V)
    is_new: list[bool]  # for each row: its token is a new one; else one was read again that it gave before
    choice: SampledTokens | None = None

    def forget(self, sequence: Sequence) -> None:
        """Its token is not wanted any more."""
        self.is_new = [new and one is not sequence for one, new in zip(self.sequences, self.is_new, strict=True)]

    @property
    def tokens(self) -> mx.array:
        """(rows,) the chosen tokens, lazy."""
        assert self.choice is not None
        return self.choice.tokens


class RowFailure(WeftError):
    """Something failed that only this row has to do with."""

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(str(error))
        self.sequence = sequence


class Runner:
    """The only one in the engine that runs the model."""

    def __init__(self, adapter: Adapter, config: EngineConfig, clock: Callable[[], float], faults: Faults) -> None:
        self.adapter = adapter
        self.config = config
        self.clock = clock
        self.faults = faults
        self.seconds_per_token = 0.0  # of prompts, as last seen
        self.pool = self._new_pool()

    def forward(self, plan: Plan, last: Step | None) -> Step | None:
        """Build the steps of a plan; nothing runs yet. `last` holds tokens that are not read yet."""
        if not plan.steps:
            return None
        sequences = [row.sequence for row in plan.steps]
        for sequence in sequences:
            try:
                self._allocate(sequence, plan.upcoming)
            except Exception as error:  # a border: whatever it is, it is this row's
                raise RowFailure(sequence, error) from error
        self.faults.at("decode", *sequences)
        order: list[Sequence] = []
        logits: list[mx.array] = []
        for stepped, out in itertools.chain(self._together(sequences, last), self._alone(sequences, last)):
            order += stepped
            logits.append(out)
        is_new = [sequence.is_at_its_end for sequence in order]
        for sequence, new in zip(order, is_new, strict=True):
            sequence.num_computed += 1
            sequence.num_in_flight += new
        return Step(order, self._poisoned(logits[0] if len(logits) == 1 else mx.concatenate(logits), order), is_new)

    def start(self, step: Step) -> None:
        """Run a step that was built."""
        # Slabs are on the logits' way; states may not be, and would drag the graphs of all steps behind them.
        mx.async_eval(step.logits, *self.pool.states())  # type: ignore[no-untyped-call]

    def _poisoned(self, logits: mx.array, sequences: list[Sequence]) -> mx.array:
        if places := self.faults.struck("logits", sequences):
            logits[mx.array(places)] = mx.nan
        return logits

    def reset(self) -> None:
        """Begin with an empty pool: after a forward that failed nobody knows what is in the old one."""
        self.pool = self._new_pool()

    def _new_pool(self) -> Pool:
        return Pool(
            self.adapter.specs,
            slab_tokens=self.config.slab_tokens,
            max_rows=self.config.max_rows,
            coarse_tokens=self.config.coarse_tokens,
            constant_shapes=self.config.width is not None,
        )

    def _together(self, sequences: list[Sequence], last: Step | None) -> Iterator[tuple[list[Sequence], mx.array]]:
        """The seated rows, in one forward or in one for each slab."""
        owner = {id(_memory(sequence).state): sequence for sequence in sequences if _memory(sequence).own is None}
        if not owner:
            return
        states = [_memory(sequence).state for sequence in owner.values()]
        for batch in make_batches(self.pool, states, seam=self.adapter.way == "seam", width=self.config.width):
            rows = [None if state is None else owner[id(state)] for state in batch.rows]
            logits = self.adapter.decode(self._inputs(rows, last)[:, None], batch)
            live = [index for index, row in enumerate(rows) if row is not None]
            for state in batch.rows:
                if state is not None:
                    state.length += 1
            yield [row for row in rows if row is not None], logits if len(live) == len(rows) else logits[mx.array(live)]

    def _alone(self, sequences: list[Sequence], last: Step | None) -> Iterator[tuple[list[Sequence], mx.array]]:
        """The rows that are on caches of their own, one forward each."""
        for sequence in sequences:
            if (own := _memory(sequence).own) is not None:
                yield [sequence], self.adapter.decode_alone(self._inputs([sequence], last)[:, None], own)

    def choose(self, step: Step, allowed: NDArray[np.bool_] | None) -> None:
        """Start the choice of tokens, of the `allowed` (rows, V) ones where that is given; returns at once."""
        self.faults.at("sampler", *step.sequences)
        step.choice = choose(step.logits, step.sequences, None if allowed is None else mx.array(allowed))
        mx.async_eval(*step.choice.arrays())  # type: ignore[no-untyped-call]

    def prefill(self, row: Row, seconds: float | None) -> bool:
        """Work on a prompt chunk for at most `seconds`, layer by layer; True when it is in memory.

        The chunk is one lazy graph. Evaluating its layers' states in order cuts the time finely without cutting the
        tokens: the numbers do not depend on how often the work was interrupted.
        """
        memory = _memory(row.sequence)
        if memory.own is None:
            memory.own = self._caches(row.sequence)
        started = self.clock()
        chunk = memory.chunk = memory.chunk or self._start_chunk(row, memory)
        if seconds is None:
            chunk.finish()
        else:
            self._slice(chunk, seconds)
        memory.chunk_seconds += self.clock() - started
        if not chunk.is_done:
            return False
        self.seconds_per_token += 0.2 * (memory.chunk_seconds / row.count - self.seconds_per_token)
        memory.chunk_seconds = 0.0
        if memory.logprobs is not None:
            row.sequence.prompt_logprobs += memory.logprobs.read(_followers(row))
        memory.chunk = memory.logprobs = None
        row.sequence.num_computed += row.count
        return True

    def _caches(self, sequence: Sequence) -> LayerCaches:
        """Caches of its own for a sequence, filled with what it stands on."""
        if sequence.prefix_node is None:
            return self.adapter.new_caches(len(sequence.prefill_ids))
        self.faults.at("restore", sequence)
        blocks = [node.block for node in sequence.prefix_node.path()]
        return self.adapter.restore(blocks, sequence.prefix_node.checkpoint, len(sequence.prefill_ids))

    def save(self, row: Row) -> tuple[Saved, Saved]:
        """A chunk that was just computed: its keys and values, and the other layers' states at its end."""
        self.faults.at("snapshot", row.sequence)
        own = _memory(row.sequence).own
        assert own is not None
        return self.adapter.save_block(own, row.start, row.start + row.count), self.adapter.save_checkpoint(own)

    def compute_again(self, caches: LayerCaches, tokens: tuple[int, ...], start: int) -> tuple[Saved, Saved]:
        """A chunk once more, on these caches: what `save` would give."""
        self.adapter.prefill(list(tokens), caches)[0].finish()
        return self.adapter.save_block(caches, start, start + len(tokens)), self.adapter.save_checkpoint(caches)

    def forget(self, sequence: Sequence) -> None:
        """Its own caches are behind what it stands on now; they are made anew when they are needed."""
        _memory(sequence).own = None

    @staticmethod
    def has_caches(sequence: Sequence) -> bool:
        """Whether a sequence can go on where it is without restoring anything."""
        return sequence.memory is not None and _memory(sequence).own is not None

    @staticmethod
    def has_states(sequence: Sequence) -> bool:
        """Whether its states are in the pool, or in caches of its own."""
        return sequence.memory is not None and (_memory(sequence).own is not None or _memory(sequence).state.slab is not None)

    @staticmethod
    def is_amid_chunk(sequence: Sequence) -> bool:
        """Whether a chunk of its prompt is under way."""
        return sequence.memory is not None and _memory(sequence).chunk is not None

    @staticmethod
    def hand_over(sequence: Sequence, successor: Sequence) -> None:
        """Give all states and the chunk under way to a sequence that stands at the same place."""
        successor.memory, sequence.memory = sequence.memory, None

    @staticmethod
    def take_retained(sequence: Sequence) -> tuple[LayerCaches, int] | None:
        """The caches that a row has no need of since it is seated, and how many tokens are in them."""
        memory = _memory(sequence)
        retained, memory.retained = memory.retained, None
        return retained

    def adopt(self, sequence: Sequence, caches: LayerCaches) -> None:
        """Let a sequence go on with another's caches, which end where it stands."""
        self.faults.at("restore", sequence)
        _memory(sequence).own = self.adapter.regrown(caches)

    def packed(self, block: Saved, checkpoint: Saved | None) -> tuple[Packed, Packed | None]:
        """Saved states as they can be written to disk."""
        return pack(block), None if checkpoint is None else pack(checkpoint)

    def unpacked(self, loaded: Loaded) -> tuple[Saved, Saved | None]:
        """The same back."""
        like = self.adapter.new_leaves()
        return unpack(loaded.block, like), None if loaded.checkpoint is None else unpack(loaded.checkpoint, like)

    def _start_chunk(self, row: Row, memory: RowMemory) -> Chunk:
        assert memory.own is not None
        chunk, logits = self.adapter.prefill(row.sequence.prefill_ids[row.start : row.start + row.count], memory.own)
        if (count := row.sequence.sampling.prompt_logprobs) is not None:
            memory.logprobs = logprobs_of(logits[0], mx.array(_followers(row), mx.int32), count)
            chunk.also(memory.logprobs.arrays())
        return chunk

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Give a sequence the states of another whose prompt is in memory. Arrays are shared until one of them writes."""
        fork.memory = RowMemory(own=copy.deepcopy(_memory(leader).own))
        fork.num_computed = leader.num_computed

    def _slice(self, chunk: Chunk, seconds: float) -> None:
        """Run layers of a chunk as long as the next one probably ends in time; one at least."""
        start = last = self.clock()
        while chunk.advance():
            now = self.clock()
            if now - start + (now - last) > seconds:
                return
            last = now

    def release(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Give a sequence's memory back."""
        if sequence.memory is not None:
            self.pool.leave(_memory(sequence).state, poisoned=poisoned or sequence.finish == "error")
            sequence.memory = None

    def _allocate(self, sequence: Sequence, upcoming: tuple[int, ...]) -> None:
        memory = _memory(sequence)
        if memory.own is None and memory.state.slab is None:
            memory.own = self._caches(sequence)  # a prompt of one token, or one that others computed
        if memory.own is None or self.adapter.way == "alone":
            return
        contents = self.adapter.contents(memory.own)
        if self.pool.refusal(contents, sequence.num_computed) is None:
            self.pool.allocate(memory.state, contents, sequence.num_computed, upcoming)
            memory.retained = memory.own, sequence.num_computed
            memory.own = None

    def _inputs(self, sequences: list[Sequence | None], last: Step | None) -> mx.array:
        """(rows,) each row's newest token: known ones from the host, those in flight from the device."""
        places = {} if last is None else {id(sequence): index for index, sequence in enumerate(last.sequences)}
        flying = [places[id(s)] if s is not None and s.num_in_flight else -1 for s in sequences]
        prefill_ids = [0 if s is None or s.num_in_flight else s.token_at(s.num_computed) for s in sequences]
        if last is None or max(flying) < 0:
            return mx.array(prefill_ids, mx.int32)
        if flying == list(range(len(last.sequences))):
            return last.tokens
        taken = last.tokens[mx.array([max(place, 0) for place in flying])]
        return mx.where(mx.array([place >= 0 for place in flying]), taken, mx.array(prefill_ids, mx.int32))


def _memory(sequence: Sequence) -> RowMemory:
    if sequence.memory is None:
        sequence.memory = RowMemory(own=None)
    memory = sequence.memory
    assert isinstance(memory, RowMemory)
    return memory


def _followers(row: Row) -> list[int]:
    """The tokens that stand after each token of a chunk."""
    return row.sequence.prefill_ids[row.start + 1 : row.start + row.count + 1]
