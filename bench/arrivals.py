"""`python -m bench.arrivals`: many prompts at once through the real scheduler, with a clock that assumed costs move; no model.

It shows which turns an engine takes on CUDA: the forwards of prompts, when each stream has its first token, and the gaps of
those that decode meanwhile. The costs are what an H200 took for the Qwen3.5-4B shape, and may be given: milliseconds of a
step, of a row in it, of a forward, of a thousand prompt tokens in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import sys

from weft.config import EngineConfig, EngineSettings
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.scheduler import ChunkRules, Plan, Row, Scheduler
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit

LAYERS = 32
BLOCK = 256  # lines of a forward are a multiple of it
SYNC = 0.5  # milliseconds that the device waits for the host behind every slice
USUAL_STEP = 0.005  # seconds that the engine last saw a step take
ANSWER_TOKENS = 160


@dataclasses.dataclass(frozen=True)
class Costs:
    """What an engine's work is assumed to take, in milliseconds."""

    step: float = 4.5
    row: float = 0.225
    forward: float = 5.0
    thousand: float = 19.5

    def of_step(self, rows: int) -> float:
        return self.step + self.row * rows

    def of_layer(self, tokens: int) -> float:
        return (self.forward + self.thousand * -(-tokens // BLOCK) * BLOCK / 1000) / LAYERS


class Amid:
    """The memory of a sequence whose chunk is being computed."""

    has_caches = is_amid_chunk = True


class Turns:
    """An engine's turns without a model: what the scheduler plans takes its time, and nothing is computed."""

    def __init__(self, config: EngineConfig, costs: Costs, *, has_checkpoints: bool, groups_ragged: bool) -> None:
        budget = MemoryBudget(lambda tokens: tokens, 0)
        rules = ChunkRules(has_checkpoints=has_checkpoints, groups_ragged=groups_ragged)
        self.scheduler = Scheduler(config, budget, Bisection(), rules)
        self.scheduler.step_seconds = USUAL_STEP
        self.costs = costs
        self.now = 0.0  # milliseconds
        self.rows: list[Row] = []  # of the forward that is being computed
        self.layers_left = 0
        self.tokens: dict[Sequence, list[float]] = {}  # when each came
        self.forwards: list[tuple[float, int, int]] = []  # when it ended, rows, tokens

    def turn(self) -> None:
        """Plan, step, and compute a chunk or a slice of it, as `Engine.turn` does."""
        self.scheduler.drop_finished()
        self.scheduler.admit(self.now / 1e3)
        plan, started = self.scheduler.plan(), self.now
        if plan.steps and plan.chunk is not None and plan.slice_seconds is None:
            self._prefill(plan)
            plan = dataclasses.replace(self.scheduler.plan(may_hold_back=False), chunk=None)
        self._step(plan)
        if plan.chunk is None:
            if plan.steps:
                self.scheduler.measure_step((self.now - started) / 1e3, len(plan.steps))
            return
        if plan.slice_seconds is not None:
            self.scheduler.measure_busy_step((self.now - started) / 1e3)
        self._prefill(plan)

    def _step(self, plan: Plan) -> None:
        self.now += self.costs.of_step(len(plan.steps)) if plan.steps else 0.0
        for one in plan.steps:
            one.num_computed += 1
            one.num_in_flight += 1
            one.append(1, None)
            self.tokens.setdefault(one, []).append(self.now)

    def _prefill(self, plan: Plan) -> None:
        if not self.layers_left:
            assert plan.chunk is not None
            self.rows, self.layers_left = [plan.chunk, *plan.beside], LAYERS
            for row in self.rows:
                row.sequence.memory = Amid()
        started, layer = self.now, self.costs.of_layer(sum(row.count for row in self.rows))
        seconds = plan.slice_seconds
        while self.layers_left and (seconds is None or self.now == started or self.now + layer - started <= seconds * 1e3):
            self.now += layer
            self.layers_left -= 1
        self.now += SYNC
        if not self.layers_left:
            self._end_forward()

    def _end_forward(self) -> None:
        self.forwards.append((self.now, len(self.rows), sum(row.count for row in self.rows)))
        for row in self.rows:
            row.sequence.memory = None
            row.sequence.num_computed += row.count
            self.scheduler.finish_chunk(row)


def run(turns: Turns, arrivals: list[tuple[float, int, int]]) -> str:
    """Let prompts arrive (milliseconds, tokens, tokens of the answer) and finish; return what streams had."""
    waiting = sorted(arrivals)
    for number in range(len(arrivals)):
        while waiting and waiting[0][0] > turns.now and not turns.scheduler.idle:
            turns.turn()
        at, length, tokens = waiting.pop(0)
        turns.now = max(turns.now, at)
        request = Submit((number,), [number] * length, (Sampling(temperature=0.0, ignore_eos=True),))
        turns.scheduler.add(Sequence(request, 0, tokens, frozenset(), now=0.0))
    while not turns.scheduler.idle:
        turns.turn()
        turns.scheduler.drop_finished()
    begun = {number: at for number, (at, _, _) in enumerate(sorted(arrivals))}
    firsts = [times[0] - begun[one.id] for one, times in turns.tokens.items()]
    gaps = sorted(after - before for times in turns.tokens.values() for before, after in itertools.pairwise(times))
    rate = sum(map(len, turns.tokens.values())) / turns.now * 1e3
    return (
        f"first tokens {statistics.median(firsts):.0f} ms (slowest {max(firsts):.0f}), gaps p50 {gaps[len(gaps) // 2]:.1f} "
        f"p95 {gaps[int(len(gaps) * 0.95)]:.1f} ms, {rate:.0f} tok/s, {len(turns.forwards)} forwards of prompts"
    )


def main() -> None:
    """Print 128 prompts of about 256 tokens, one by one and together, and eight streams beside long prompts."""
    costs = Costs(*map(float, sys.argv[1:]))
    served = EngineConfig.resolve(EngineSettings(model="", max_rows=128), "cuda", is_row_invariant=True)
    rng = random.Random(3)
    lengths = [216 + rng.randrange(80) for _ in range(128)]
    cases = {"one by one": dataclasses.replace(served, group_tokens=0), "together": served}
    for label, config in cases.items():
        for within in (0, 100, 400):
            for has_checkpoints in (False, True):
                turns = Turns(config, costs, has_checkpoints=has_checkpoints, groups_ragged=True)
                found = run(turns, [(at * within / 128, length, ANSWER_TOKENS) for at, length in enumerate(lengths)])
                print(f"128 prompts within {within} ms, {label}{', with checkpoints' * has_checkpoints}: {found}")
    for ended, rows, tokens in turns.forwards:
        print(f"    {ended:6.0f} ms: a forward of {rows} rows, {tokens} tokens")
    streams = [(0.0, 256, ANSWER_TOKENS)] * 8
    for label, long in (("alone", []), ("beside prompts of 4,000 tokens", [(300.0 + 150 * at, 4000, 1) for at in range(4)])):
        turns = Turns(served, costs, has_checkpoints=True, groups_ragged=True)
        print(f"8 streams {label}: {run(turns, [*streams, *long])}")


if __name__ == "__main__":
    main()
