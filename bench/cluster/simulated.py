"""A simulated engine: weft's own scheduler and prefix sharing over a runner that adds fitted costs to a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, cast

from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.prefill_rate import PrefillRate
from weft.engine.prefix import PrefixSharing
from weft.engine.prefix_reports import PrefixReports
from weft.engine.scheduler import ChunkRules, Row, Scheduler
from weft.engine.sequence import Sequence
from weft.ipc.messages import Cancel, EngineEvents, EngineStatus, PromptEvent, Submit, ToEngine, TokenEvent
from weft.memory.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Costs:
    """Seconds of a replica's work: a decode step of some rows, a prompt chunk, and how tokens are grouped.

    step = a + b · rows + c · lengths; chunk = d + e · tokens + f · tokens · start.
    The defaults are like an 8B model on one GPU with 8,000 prompt tokens a second.
    """

    step_seconds: float = 0.010
    row_seconds: float = 0.0002
    chunk_seconds: float = 0.002
    token_seconds: float = 1 / 8000
    length_seconds: float = 0.0  # of a step, for each token that one of its rows has
    start_seconds: float = 0.0  # of a chunk's token, for each token before the chunk
    grain: int = 8  # tokens that one simulated token stands for

    def step(self, num_rows: int, num_known: int = 0) -> float:
        """Return the seconds of a step of rows that have so many tokens together."""
        return self.grain * (self.step_seconds + self.row_seconds * num_rows + self.length_seconds * self.grain * num_known)

    def chunk(self, num_tokens: int, start: int = 0) -> float:
        """Return the seconds of a chunk that begins after so many tokens of its prompt."""
        token = self.token_seconds + self.start_seconds * self.grain * start
        return self.chunk_seconds + self.grain * token * num_tokens


@dataclass(frozen=True)
class Size:
    """A stored state that has a size and nothing in it."""

    nbytes: int

    def split(self, count: int) -> tuple[Self, Self]:
        return type(self)(count), type(self)(self.nbytes - count)


@dataclass
class Work:
    """A prompt's states: the seconds left of the chunk that is being computed."""

    left: float | None = None
    has_caches: bool = True

    @property
    def is_amid_chunk(self) -> bool:
        return self.left is not None


class NoRunner:
    """What prefix sharing asks of a runner; one byte a token, and one a checkpoint where the model has such."""

    def __init__(self, has_checkpoints: bool) -> None:
        self.prefill_rate = PrefillRate()
        self.has_checkpoints = has_checkpoints

    def saved_bytes(self, row: Row) -> int:
        return row.count + int(self.has_checkpoints)

    def save(self, row: Row) -> tuple[Size, Size]:
        return Size(row.count), Size(int(self.has_checkpoints))

    def take_retained(self, _: Sequence) -> None:
        return None


class SimulatedEngine:
    """The engine's turn with costs instead of a device; time passes in `now` alone."""

    def __init__(self, costs: Costs, config: EngineConfig, *, has_checkpoints: bool = False) -> None:
        self.costs = costs
        self.now = 0.0
        rules = ChunkRules(has_checkpoints=has_checkpoints)
        self.scheduler = Scheduler(config, MemoryBudget(lambda _: 0, 0), Bisection(), rules)
        self.tree = PrefixTree(config.cache_bytes, lambda: self.now)
        self.runner = NoRunner(has_checkpoints)
        self.prefix = PrefixSharing(self.tree, cast("Any", self.runner), self.scheduler.chunk_ends)
        self.reports = PrefixReports(self.tree)
        self.live: dict[int, Sequence] = {}
        self.busy_seconds = 0.0
        self.num_computed = 0  # prompt tokens

    def take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                for index, number in enumerate(message.numbers):
                    sampling = message.samplings[index]
                    sequence = Sequence(message, index, sampling.max_tokens or 1, frozenset(), self.now)
                    sequence.restart(message.emitted[index] if message.emitted else (), 0)
                    self.live[number] = sequence
                    self.scheduler.add(sequence)
            case Cancel():
                for number in message.numbers:
                    if (one := self.live.pop(number, None)) is not None and not one.is_finished:
                        one.end("cancelled", None, self.now)
            case _:
                pass

    @property
    def is_idle(self) -> bool:
        return self.scheduler.idle

    def turn(self) -> EngineEvents:
        """Run one turn as `Engine.turn` does; `now` is after it."""
        before, events = self.now, EngineEvents([], [], [])
        for sequence in self.scheduler.drop_finished():
            self.prefix.release(sequence)
        while (sequence_out := self.scheduler.to_preempt()) is not None:
            self.prefix.release(sequence_out)
            self.scheduler.preempt(sequence_out)
            sequence_out.preempt(0)
        self.scheduler.admit(self.now)
        for sequence in self.scheduler.prompts:
            self.prefix.update(sequence)
        for sequence in self.scheduler.drop_prefilled():
            events.prompts.append(PromptEvent(sequence.id, sequence.num_computed))
        plan = self.scheduler.plan(self.prefix.best_cut)
        if plan.steps:
            self._step(plan.steps, events)
        if plan.chunk is not None:
            self._prefill(plan.chunk, plan.slice_seconds, events)
        self.busy_seconds += self.now - before
        kept, gone = self.reports.take()
        return EngineEvents([], events.prompts, events.tokens, self.status, kept, gone)

    @property
    def status(self) -> EngineStatus:
        scheduler = self.scheduler
        return EngineStatus(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            seconds_per_token=self.runner.prefill_rate.seconds_per_token,
            queued_tokens=scheduler.num_queued_tokens,
        )

    def _step(self, steps: tuple[Sequence, ...], events: EngineEvents) -> None:
        seconds = self.costs.step(len(steps), sum(sequence.num_known for sequence in steps))
        self.now += seconds
        self.scheduler.measure_step(seconds, len(steps))
        for sequence in steps:
            self.prefix.release_allocated(sequence)
            sequence.begin_step(sequence.num_known)
            is_first = sequence.timings.first_token is None
            if is_first:  # the first of the tokens that this one stands for
                sequence.note_first_token(self.now - seconds * (1 - 1 / self.costs.grain))
            sequence.append(7, None)
            self.scheduler.fairness.charge_token(sequence)
            if sequence.is_finished:
                del self.live[sequence.id]
            timings = sequence.timings if is_first or sequence.is_finished else None
            events.tokens.append(TokenEvent(sequence.id, 7, finish=sequence.finish, timings=timings))

    def _prefill(self, row: Row, seconds: float | None, events: EngineEvents) -> None:
        sequence, cost = row.sequence, self.costs.chunk(row.count, row.start)
        if sequence.is_abandoned:
            return
        self.prefix.begin(sequence)
        work = sequence.memory if isinstance(sequence.memory, Work) else Work()
        sequence.memory = work
        work.left = cost if work.left is None else work.left
        spent = work.left if seconds is None else min(work.left, seconds)
        self.now += spent
        work.left -= spent
        if work.left > 1e-9:
            return
        work.left = None
        sequence.num_computed = row.start + row.count
        self.num_computed += row.count
        self.runner.prefill_rate.measure(row.count, cost)
        self.prefix.enter(row)
        self.scheduler.finish_chunk(row)
        events.prompts.append(PromptEvent(sequence.id, sequence.num_computed))
