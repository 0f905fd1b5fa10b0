"""A machine that does anything in any order to a running engine: submit, join, finish, cancel, turn.

After every step the books must balance: no row without an owner, no owner without a row, no slot held twice, no byte kept
by nobody, and every answer a prefix of the one the same prompt gets alone.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from driver import SMALL, Run, adapter_for, answers, random_prompts
from thoroughness import ALL
from weft.engine.row_memory import RowMemory
from weft.engine.sequence import Sequence
from weft.model.adapter import Adapter
from zoo import VOCABULARY, make_checkpoint

PROMPTS = random_prompts(VOCABULARY, (1, 2, 7, 20, 41, 70), seed=9)
LONGEST = 80
CONFIG = dataclasses.replace(SMALL, unsliced_tokens=8)  # some chunks come before the steps, some in slices after them


@functools.cache
def _adapter() -> Adapter:
    """Attention, window and recurrent layers in one model."""
    return adapter_for(make_checkpoint("gear", Path(tempfile.mkdtemp()) / "gear"))


@functools.cache
def _solo(which: int) -> list[int]:
    return answers(_adapter(), [PROMPTS[which]], LONGEST)[0]


class Crowd(RuleBasedStateMachine):
    """The rules are what users do; the invariants are what we promise."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(_adapter(), self.config)
        self.asked: list[tuple[int, Sequence]] = []

    @rule(which=st.integers(0, len(PROMPTS) - 1), tokens=st.integers(1, LONGEST), front=st.booleans())
    def submit(self, which: int, tokens: int, front: bool) -> None:
        self.asked.append((which, self.run.submit(PROMPTS[which], tokens)))
        if front:
            self.run.turn()

    @precondition(lambda self: any(not sequence.is_finished for _, sequence in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [sequence for _, sequence in self.asked if not sequence.is_finished]
        self.run.engine.cancel(data.draw(st.sampled_from(live)))

    @rule(count=st.integers(1, 30))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.run.turn()

    @invariant()
    def seats_and_owners_agree(self) -> None:
        pool, scheduler = self.run.engine.runner.pool, self.run.engine.scheduler
        holding = [sequence for _, sequence in self.asked if isinstance(sequence.memory, RowMemory)]
        allocated = [s.memory.state for s in holding if s.memory.state.slab is not None]
        assert {id(row) for row in pool.rows} == {id(state) for state in allocated}
        assert len(pool.rows) == len({(id(row.slab), row.slot) for row in pool.rows})
        for row in pool.rows:
            assert row.slab is not None
            assert row.slab.rows[row.slot] is row
            assert row.length <= row.slab.capacity
        for sequence in holding:
            assert sequence in scheduler.running or sequence.is_finished
            assert sequence.memory.state.slab is None or sequence.memory.state.length == sequence.num_computed

    @invariant()
    def queues_are_disjoint_and_hold_everyone_unfinished(self) -> None:
        scheduler = self.run.engine.scheduler
        waiting, running = set(map(id, scheduler.waiting)), set(map(id, scheduler.running))
        assert not waiting & running
        assert len(running) <= SMALL.max_rows
        for _, sequence in self.asked:
            assert sequence.is_finished or id(sequence) in waiting | running
            assert 0 <= sequence.num_in_flight <= 1
            assert sequence.is_finished or sequence.num_computed < sequence.num_tokens or sequence.num_in_flight

    @invariant()
    def answers_are_prefixes_of_the_solo_answers(self) -> None:
        for which, sequence in self.asked:
            assert sequence.output == _solo(which)[: len(sequence.output)]

    def teardown(self) -> None:
        self.run.finish()
        for _, sequence in self.asked:
            assert sequence.is_finished
            assert sequence.finish == "cancelled" or len(sequence.output) == sequence.max_tokens
        self.answers_are_prefixes_of_the_solo_answers()
        assert self.run.engine.runner.pool.bytes_held == 0


class CrowdOnAGpu(Crowd):
    """The same in the order of a GPU, with prompts that are computed together."""

    config = dataclasses.replace(CONFIG, settle_first=False, group_tokens=64, chunk_tokens=32)


for machine in (Crowd, CrowdOnAGpu):
    machine.TestCase.settings = settings(
        max_examples=25 if ALL else 10, stateful_step_count=25, suppress_health_check=list(HealthCheck)
    )
TestAnyOrderKeepsTheBooks = Crowd.TestCase
TestAnyOrderKeepsTheBooksOfPromptsTogether = CrowdOnAGpu.TestCase
