"""The same machine of any order, over a tree of prefixes with too little room: the books balance after every step."""

from __future__ import annotations

import dataclasses
import functools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_rows import _adapter

from driver import SMALL, Run, answers, random_prompts
from weft.engine.sequence import Sequence
from weft.wire import Sampling
from zoo import VOCABULARY

TRUNK, *TAILS = random_prompts(VOCABULARY, (40, 3, 20, 33), seed=4)
PROMPTS = [TRUNK, TRUNK[:17], TRUNK[:1], *(TRUNK + tail for tail in TAILS), TRUNK[:24] + TAILS[0]]
CONFIG = dataclasses.replace(SMALL, cache_bytes=150_000)
LONGEST = 30


@functools.cache
def _solo(which: int) -> list[int]:
    return answers(_adapter(), [PROMPTS[which]], LONGEST)[0]


class Forest(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.run = Run(_adapter(), CONFIG)
        self.asked: list[tuple[int, Sequence]] = []
        self.numbers = iter(range(1000, 100_000))

    @rule(which=st.integers(0, len(PROMPTS) - 1), tokens=st.integers(1, LONGEST), forks=st.integers(1, 3))
    def submit(self, which: int, tokens: int, forks: int) -> None:
        chosen = (Sampling(max_tokens=tokens, ignore_eos=True),) * forks
        numbers = tuple(next(self.numbers) for _ in range(forks))
        sequences = self.run.engine.submit_forks(PROMPTS[which], chosen, numbers)
        self.asked += [(which, sequence) for sequence in sequences]

    @precondition(lambda self: any(not sequence.is_finished for _, sequence in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [sequence for _, sequence in self.asked if not sequence.is_finished]
        self.run.engine.cancel(data.draw(st.sampled_from(live)))

    @rule(count=st.integers(1, 20))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.run.turn()

    @rule()
    def clear(self) -> None:
        assert self.run.engine.prefixes is not None
        self.run.engine.prefixes.clear()

    @invariant()
    def bytes_are_conserved_and_pins_are_those_of_the_living(self) -> None:
        tree = self.run.engine.prefixes
        assert tree is not None
        nodes = list(tree.nodes())
        assert tree.held_bytes == sum(node.nbytes for node in nodes)
        standing = [sequence.trunk for _, sequence in self.asked if sequence.trunk is not None]
        assert {id(trunk) for trunk in standing} <= {id(node) for node in [*nodes, tree.root]}
        for node in [*nodes, tree.root]:
            assert node.pins == sum(trunk is node for trunk in standing)
            assert node.parent is None or node.parent.children[node.tokens] is node

    @invariant()
    def nobody_stands_where_nothing_can_be_restored(self) -> None:
        for _, sequence in self.asked:
            if sequence.trunk is not None and sequence.trunk.parent is not None:
                assert sequence.trunk.checkpoint is not None
                tokens = [token for node in sequence.trunk.path() for token in node.tokens]
                assert sequence.prompt[: sequence.trunk.length] == tokens

    @invariant()
    def answers_are_prefixes_of_the_cold_answers(self) -> None:
        for which, sequence in self.asked:
            assert sequence.output == _solo(which)[: len(sequence.output)]

    def teardown(self) -> None:
        self.run.finish()
        tree = self.run.engine.prefixes
        assert tree is not None
        assert tree.held_bytes <= CONFIG.cache_bytes
        assert all(node.pins == 0 for node in [*tree.nodes(), tree.root])
        assert all(sequence.is_finished for _, sequence in self.asked)


Forest.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrderKeepsTheTree = Forest.TestCase
