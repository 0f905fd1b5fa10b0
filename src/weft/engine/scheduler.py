"""Who runs next and how many tokens. Imports no mlx; reads the clock through a parameter.

There are no phases: every sequence chases `num_computed < num_tokens`. Rows whose newest token is all that is missing
step together; one prompt chunk at a time runs beside them, prompts taking turns chunk by chunk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from weft.config import EngineConfig
from weft.engine.budget import MemoryBudget
from weft.engine.fairness import Fairness
from weft.engine.plan import Plan, Row
from weft.engine.sequence import Sequence

COMING_CHUNKS = 8
MOST_HELD_BACK = 3  # plans in a row: so long, at the most, do rows that speak wait for those that do not yet
FIRST_GUESS_SECONDS = 0.05  # how long a decode step takes, until one was measured


class Scheduler:
    """Owns the two queues: waiting for a place, and running."""

    def __init__(self, config: EngineConfig, budget: MemoryBudget) -> None:
        self.config = config
        self.budget = budget
        self.fairness = Fairness()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompts: deque[Sequence] = deque()  # running, prompt not yet in memory; the first has the turn
        self.step_seconds = FIRST_GUESS_SECONDS
        self._num_held_back = 0  # plans in a row whose steps were left out

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self.running

    @property
    def has_work(self) -> bool:
        """Whether anybody still wants something; finished sequences leave with the next turn."""
        return any(not sequence.is_abandoned for queue in (self.waiting, self.running) for sequence in queue)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.fairness.arrived(sequence, (*self.waiting, *self.running))
        self.waiting.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence waits again, before all others that wait."""
        sequence.is_preempted = True
        self.running = [one for one in self.running if one is not sequence]
        self.prompts = deque(one for one in self.prompts if one is not sequence)
        self.waiting.appendleft(sequence)

    def drop_finished(self) -> list[Sequence]:
        """Let go of sequences that have their end; give back those that were running."""
        gone = [sequence for sequence in self.running if sequence.is_finished]
        successors = {
            id(s): s.hand_over_prompt()
            for queue in (self.running, self.waiting)
            for s in queue
            if s.is_finished and not s.is_abandoned
        }
        if gone:
            self.running = _living(self.running, successors)
        if any(sequence.is_finished for sequence in self.prompts):
            self.prompts = deque(_living(self.prompts, successors))
        if any(sequence.is_finished for sequence in self.waiting):
            self.waiting = deque(_living(self.waiting, successors))
        return gone

    def plan(self, may_step: Callable[[Sequence], bool], *, may_hold_back: bool = True) -> Plan:
        """Say who runs. A few short chunks may come before the steps, as long as others wait for a first token, too."""
        ready = (one for one in self.running if one.is_prefilled and one.wants_token and may_step(one))
        steps = tuple(Row(sequence, sequence.num_computed, 1) for sequence in ready)
        chunk = self._next_chunk()
        is_short = chunk is not None and chunk.count <= self.config.unsliced_tokens
        if steps and is_short and may_hold_back and len(self.prompts) > 1 and self._num_held_back < MOST_HELD_BACK:
            self._num_held_back += 1
            return Plan((), chunk, None, self._coming())
        self._num_held_back = 0
        slice_seconds = self.config.gap_factor * self.step_seconds if steps and not is_short else None
        return Plan(steps, chunk, slice_seconds, self._coming())

    def measured(self, seconds: float) -> None:
        """Note how long a step without prompt work took."""
        self.step_seconds += 0.2 * (seconds - self.step_seconds)

    def chunk_done(self) -> None:
        """The planned chunk is in memory: the next prompt has the turn."""
        self.prompts.rotate(-1)
        if self.prompts[-1].is_prefilled:
            self.prompts.pop()

    def release_forks(self, leader: Sequence) -> list[Sequence]:
        """A prompt is in memory: its forks are next in line."""
        forks, leader.forks = [fork for fork in leader.forks if not fork.is_finished], []
        for fork in forks:
            fork.timings.admitted = leader.timings.admitted
        self.waiting.extendleft(reversed(forks))
        return forks

    def _coming(self) -> tuple[int, ...]:
        """Lengths of the prompts that will be in memory within a few chunks: their rows are worth making room for now."""
        lengths, work = [], 0
        for sequence in self.prompts:
            work += len(sequence.prefill_ids) - sequence.num_computed
            if work > COMING_CHUNKS * self.config.chunk_tokens:
                break
            lengths.append(len(sequence.prefill_ids))
        return tuple(lengths)

    def admit(self, now: float) -> None:
        """Let those who wait in, as far as there are places and bytes; then say whose prompt has the turn."""
        while self.waiting and len(self.running) < self.config.max_rows:
            sequence = self.fairness.first(self.waiting)
            if not self.budget.fits(sequence, self.running):
                break  # nobody smaller goes before it, or it would wait for ever
            self.waiting.remove(sequence)
            sequence.timings.admitted = sequence.timings.admitted or now  # a fork has its leader's
            self.running.append(sequence)
            if not sequence.is_prefilled:
                self.prompts.append(sequence)
        if len(self.prompts) > 1:
            self.put_first(self.fairness.first(self.prompts))

    def to_preempt(self) -> Sequence | None:
        """Who has to make room, if anybody: the youngest row when there are too few bytes or one on trial waits, or the youngest
        of the client that has most places, when another waits that has none."""
        running = [one for one in self.running if not one.is_finished]
        if len(running) > 1 and self.budget.is_over(running):
            return running[-1]
        if not self.waiting or not running:
            return None
        first = self.fairness.first(self.waiting)
        is_full = len(self.running) >= self.config.max_rows or not self.budget.fits(first, running)
        if is_full and first.is_suspect:  # the others do not step before it has
            return next((one for one in reversed(running) if not one.is_suspect), None)
        client, count = Counter(one.client for one in running).most_common(1)[0]
        if not is_full or count < 2 or self.fairness.served[first.client] >= self.fairness.served[client]:
            return None
        if any(one.client == first.client for one in running):
            return None
        return next(one for one in reversed(running) if one.client == client)

    def _next_chunk(self) -> Row | None:
        """Chunks end at multiples of `chunk_tokens` and at the prompt's own boundaries, whoever else runs."""
        if not self.prompts or self.prompts[0].is_loading:
            return None
        sequence = self.prompts[0]
        return Row(sequence, sequence.num_computed, next(self.chunk_ends(sequence)) - sequence.num_computed)

    def chunk_ends(self, sequence: Sequence) -> Iterator[int]:
        """Where the chunks of a prompt end, from what is computed on."""
        size, last, end = self.config.chunk_tokens, len(sequence.prefill_ids) - 1, sequence.num_computed
        boundaries = iter(place for place in sequence.boundaries if place > end)
        boundary = next(boundaries, last)
        while end < last:
            end = min((end // size + 1) * size, boundary, last)
            if end == boundary:
                boundary = next(boundaries, last)
            yield end

    def put_first(self, sequence: Sequence) -> None:
        """Give a prompt the turn."""
        self.prompts.remove(sequence)
        self.prompts.appendleft(sequence)

    def drop_prefilled(self) -> list[Sequence]:
        """Let go of prompts that are in memory without another chunk of theirs."""
        done = [sequence for sequence in self.prompts if sequence.is_prefilled]
        if done:
            self.prompts = deque(sequence for sequence in self.prompts if not sequence.is_prefilled)
        return done


def _living(queue: Iterable[Sequence], successors: dict[int, Sequence]) -> list[Sequence]:
    """A queue without its finished sequences, heirs in their places."""
    return [
        successors.get(id(sequence), sequence) for sequence in queue if id(sequence) in successors or not sequence.is_finished
    ]
