"""The same machine of any order, over a tree of prefixes with too little room: the books balance after every step."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_rows import _adapter

from driver import SMALL, Run, adapter_for, answers, random_prompts
from thoroughness import ALL
from weft.engine.faults import Point, Rule
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.memory.prefix_tree import Node, PrefixTree
from weft.model.adapter import Adapter
from zoo import VOCABULARY, make_checkpoint

TRUNK, *TAILS = random_prompts(VOCABULARY, (40, 3, 20, 33), seed=4)
PROMPTS = [TRUNK, TRUNK[:17], TRUNK[:1], *(TRUNK + tail for tail in TAILS), TRUNK[:24] + TAILS[0]]
CONFIG = dataclasses.replace(SMALL, cache_bytes=220_000, unsliced_tokens=8)  # prompts are cut where they part
LONGEST = 30
SALTS = ["", "", "mine"]
POINTS: list[Point] = ["prefill", "decode", "sampler", "snapshot", "restore", "logits", "accept"]
WHICH, SALT = st.integers(0, len(PROMPTS) - 1), st.sampled_from(SALTS)


@functools.cache
def _positional() -> Adapter:
    """Nothing but attention over all tokens: chunks are split."""
    return adapter_for(make_checkpoint("llama", Path(tempfile.mkdtemp()) / "llama"))


@functools.cache
def _solo(adapter: Callable[[], Adapter], which: int) -> list[int]:
    return answers(adapter(), [PROMPTS[which]], LONGEST)[0]


class Forest(RuleBasedStateMachine):
    adapter = staticmethod(_adapter)
    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(self.adapter(), self.config)
        self.run.engine.prefix.retained.share = 3  # room for one  # type: ignore[attr-defined]
        self.asked: list[tuple[int, Sequence]] = []
        self.numbers = iter(range(1000, 100_000))
        self.broken: set[int] = set()  # tokens

    @rule(which=WHICH, tokens=st.integers(1, LONGEST), forks=st.integers(1, 3), salt=SALT, is_retained=st.booleans())
    def submit(self, which: int, tokens: int, forks: int, salt: str, is_retained: bool) -> None:
        chosen = (Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True),) * forks
        self.take(which, Submit(self.some_numbers(forks), PROMPTS[which], chosen, salt=salt, is_retained=is_retained))

    @rule(which=WHICH, given=st.lists(st.integers(0, LONGEST - 1), min_size=1, max_size=3))
    def resume(self, which: int, given: list[int]) -> None:
        chosen = (Sampling(temperature=0.0, max_tokens=LONGEST, ignore_eos=True),) * len(given)
        emitted = tuple(tuple(_solo(self.adapter, which)[:count]) for count in given)
        self.take(which, Submit(self.some_numbers(len(given)), PROMPTS[which], chosen, emitted=emitted))

    def some_numbers(self, count: int) -> tuple[int, ...]:
        return tuple(next(self.numbers) for _ in range(count))

    def take(self, which: int, asked: Submit) -> None:
        self.asked += [(which, sequence) for sequence in self.run.engine.submit_all(asked)]

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
        self.tree.clear()

    @precondition(lambda self: len(self.tree))
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        self.tree.invalidate(data.draw(st.sampled_from(list(self.tree.nodes()))))

    @rule(point=st.sampled_from(POINTS), tail=st.integers(0, 2), times=st.integers(1, 4))
    def something_breaks(self, point: Point, tail: int, times: int) -> None:
        token = next(token for token in TAILS[tail] if sum(token in part for part in (TRUNK, *TAILS)) == 1)
        self.broken.add(token)
        self.run.engine.faults.rules = [Rule(point, token, times=times)]

    @invariant()
    def only_the_guilty_fail(self) -> None:
        for _, sequence in self.asked:
            assert sequence.finish != "error" or self.broken & {*sequence.prompt}

    @property
    def tree(self) -> PrefixTree:
        tree = self.run.engine.prefix.tree
        assert tree is not None
        return tree

    @invariant()
    def bytes_are_conserved_and_pins_are_those_of_the_living(self) -> None:
        nodes = list(self.tree.nodes())
        assert self.tree.held_bytes == sum(node.nbytes for node in nodes)
        roots = [self.tree.root(salt) for salt in SALTS[1:]]
        standing = [sequence.prefix.node for _, sequence in self.asked if sequence.prefix.node is not None]
        assert all(prefix_node.is_detached or any(prefix_node is node for node in [*nodes, *roots]) for prefix_node in standing)
        for node in [*nodes, *roots]:
            assert node.pins == sum(prefix_node is node for prefix_node in standing)
            assert node.parent is None or node.parent.children[node.tokens] is node
        assert {node for root in roots for node in root.subtree()} == {*nodes, *roots}

    @invariant()
    def the_oldest_of_a_row_can_always_go(self) -> None:
        """A use counts for the whole path, so whatever is least recently used has no children beside it in its row."""
        for row in (self.tree._new, self.tree._protected):
            seen: set[Node] = set()
            for node in row:
                assert not node.children.keys() & {one.tokens for one in row if one.parent is node and one not in seen}
                seen.add(node)

    @invariant()
    def nobody_stands_where_nothing_can_be_restored(self) -> None:
        for _, sequence in self.asked:
            if sequence.prefix.node is not None and sequence.prefix.node.parent is not None:
                assert sequence.prefix.node.checkpoint is not None
                tokens = [token for node in sequence.prefix.node.path() for token in node.tokens]
                assert sequence.prefill_ids[: sequence.prefix.node.length] == tokens

    @invariant()
    def answers_are_prefixes_of_the_cold_answers(self) -> None:
        for which, sequence in self.asked:
            assert sequence.output == _solo(self.adapter, which)[: len(sequence.output)]

    def teardown(self) -> None:
        self.run.finish()
        assert self.tree.held_bytes <= self.config.cache_bytes
        assert all(node.pins == 0 for node in [*self.tree.nodes(), self.tree.root(), self.tree.root("mine")])
        assert all(sequence.is_finished for _, sequence in self.asked)


Forest.TestCase.settings = settings(
    max_examples=25 if ALL else 15, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
TestAnyOrderKeepsTheTree = Forest.TestCase


class SplitForest(Forest):
    adapter = staticmethod(_positional)
    config = dataclasses.replace(CONFIG, cache_bytes=60_000, chunk_tokens=32)


SplitForest.TestCase.settings = Forest.TestCase.settings
TestAnyOrderKeepsATreeThatIsSplit = SplitForest.TestCase
