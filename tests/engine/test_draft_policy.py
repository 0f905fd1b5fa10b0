"""The policy of drafts, in a world of scripted acceptance and invented durations: it gains, parks, returns and never loses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.draft_policy import MAX_PAUSE, MIN_PAUSE, DraftPolicy, RowDrafts
from weft.engine.step_costs import MAX_CHANGE, NUM_PLAIN, PLAIN_EVERY, WEIGHT, CostTable, StepCosts

Script = Callable[[int, int], int]  # from the row's emitted tokens and the draft tokens verified: how many are right
Clock = Callable[[int, int, bool], float]  # from rows, tokens per row and whether the head drafted: seconds of a step
WORST = 0.97  # of the plain throughput
SIZES = [1, 4, 8, 16]


def by_table(scale: float = 1.0) -> Clock:
    """Durations that are the policy's own table, or `scale` times as much for what drafts add."""
    costs = StepCosts(7)

    def seconds(num_rows: int, tokens: int, with_head: bool) -> float:
        is_unused = with_head and tokens == 1
        cost = costs.of_unused_head(num_rows) if is_unused else costs.of(num_rows, with_head)[tokens - 1]
        return 0.02 * (1 + scale * (cost - 1))

    return seconds


@dataclass
class World:
    """Rows that decode together: drafts are made, verified, noted and measured as an engine does."""

    policy: DraftPolicy
    clock: Clock
    source: str = "lookup"
    offered: Callable[[int], int] = lambda _: 7  # from the row's emitted tokens: how long a draft there is
    seconds: float = 0.0
    lengths: list[list[int]] = field(default_factory=list)  # of each step

    def draft(self, rows: list[RowDrafts]) -> list[int]:
        if self.source == "mtp":
            depths = self.policy.depths(rows, self.source, len(rows))
        else:
            depths = [self.policy.depth(row, self.source, len(rows)) for row in rows]
        return [min(depth, self.offered(row.num_emitted)) for row, depth in zip(rows, depths, strict=True)]

    def step(self, rows: list[RowDrafts], script: Script) -> int:
        drafted = self.draft(rows)
        drafts = [(row, self.source, count) if count else None for row, count in zip(rows, drafted, strict=True)]
        lengths = self.policy.choose(drafts, len(rows))
        emitted = 0
        for row, length in zip(rows, lengths, strict=True):
            accepted = min(length, script(row.num_emitted, length)) if length else 0
            self.policy.note(row, self.source, length, accepted)
            self.policy.advance(row, accepted + 1)
            emitted += accepted + 1
        tokens, with_head = 1 + max(lengths), self.source == "mtp" and any(drafted)
        seconds = self.clock(len(rows), tokens, with_head)
        self.policy.measure(len(rows), tokens - 1, seconds, with_head)
        self.seconds += seconds
        self.lengths.append(lengths)
        return emitted

    def gain(self, num_rows: int, script: Script, tokens: int = 4000) -> float:
        """Return the throughput over that of plain steps, for rows of so many tokens."""
        rows = [RowDrafts() for _ in range(num_rows)]
        before, emitted = self.seconds, 0
        while emitted < tokens * num_rows:
            emitted += self.step(rows, script)
        return emitted / num_rows * self.clock(num_rows, 1, False) / (self.seconds - before)


def at_random(rate: float, seed: int = 0) -> Script:
    """Each token is right with this probability."""
    rng = random.Random(seed)
    return lambda _, length: next((place for place in range(length) if rng.random() >= rate), length)


def whole(rate: float, seed: int = 0) -> Script:
    """All of a draft is right, or nothing."""
    rng = random.Random(seed)
    return lambda _, length: length if rng.random() < rate else 0


def in_turns(period: int) -> Script:
    """Right for a stretch of tokens, then wrong for one."""
    return lambda emitted, length: 0 if emitted // period % 2 else length


def treacherous(_: int, length: int) -> int:
    """One token is right, more are wrong: trials succeed and what follows fails."""
    return length if length == 1 else 0


def faithless(limit: int) -> Script:
    """Right at first, then never again."""
    return lambda emitted, length: length if emitted < limit else 0


def right(_: int, length: int) -> int:
    return length


def wrong(_: int, __: int) -> int:
    return 0


SCRIPTS: dict[str, Callable[[], Script]] = {
    "wrong": lambda: wrong,
    "rarely right": lambda: at_random(0.1),
    "half right": lambda: at_random(0.5),
    "half right, whole drafts": lambda: whole(0.5),
    "rarely right, whole drafts": lambda: whole(0.1),
    "in short turns": lambda: in_turns(3),
    "in long turns": lambda: in_turns(300),
    "treacherous": lambda: treacherous,
    "faithless": lambda: faithless(300),
}


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_no_script_costs_more_than_three_hundredths(script: Callable[[], Script], num_rows: int) -> None:
    world = World(DraftPolicy(by_clock=False), by_table(), "mtp" if num_rows in (1, 8) else "lookup")

    assert world.gain(num_rows, script()) >= WORST


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_no_script_costs_more_when_steps_take_three_times_what_was_expected(script: Callable[[], Script], num_rows: int) -> None:
    world = World(DraftPolicy(by_clock=True), by_table(3.0), "lookup" if num_rows in (1, 8) else "mtp")

    assert world.gain(num_rows, script()) >= WORST


@given(st.integers(0, 2**32), st.sampled_from(["lookup", "mtp", "forced"]), st.booleans())
def test_no_mixture_of_rows_and_stretches_costs_more(seed: int, source: str, by_clock: bool) -> None:
    rng = random.Random(seed)
    clock = by_table(rng.choice([0.3, 1.0, 2.0]) if by_clock else 1.0)
    world = World(DraftPolicy(by_clock=by_clock), clock, source, offered=lambda _: rng.choice([0, 0, 1, 3, 7]))
    plain = 0.0
    for _ in range(8):  # batches of other sizes, the rows of which begin anew
        rows = [RowDrafts() for _ in range(rng.randint(1, 9))]
        make = rng.choice([*SCRIPTS.values(), lambda: right, lambda: at_random(rng.random(), seed)])
        script = right if source == "forced" else make()
        emitted = sum(world.step(rows, script) for _ in range(150))
        plain += emitted / len(rows) * clock(len(rows), 1, False)

    assert plain >= WORST * world.seconds - 12 * clock(1, 1, False)  # the balance at the beginning, and one step too many


def test_drafts_made_for_rows_that_can_not_fill_a_step_stay_within_the_allowance() -> None:
    class OneByOne(World):
        def draft(self, rows: list[RowDrafts]) -> list[int]:
            return [self.policy.depth(row, "mtp", len(rows)) if row is rows[0] else 0 for row in rows]

    world = OneByOne(DraftPolicy(by_clock=False), by_table(), "mtp")

    assert world.gain(8, right) >= WORST
    assert all(lengths == [0] * 8 for lengths in world.lengths)


@pytest.mark.parametrize(
    ("source", "num_rows", "rate", "wanted"),
    [
        ("lookup", 1, 0.95, 3.6),
        ("lookup", 8, 0.95, 2.0),
        ("lookup", 16, 0.95, 1.4),
        ("lookup", 1, 0.5, 1.35),
        ("mtp", 1, 0.8, 1.45),
        ("mtp", 4, 0.8, 1.3),
    ],
)
@pytest.mark.parametrize("by_clock", [False, True])
def test_good_drafts_gain_nearly_as_much_as_the_best_depth(
    source: str, num_rows: int, rate: float, wanted: float, by_clock: bool
) -> None:
    assert World(DraftPolicy(by_clock=by_clock), by_table(), source).gain(num_rows, at_random(rate), 1000) >= wanted


def test_guesses_for_a_crowd_need_a_better_promise_where_steps_are_timed() -> None:
    assert World(DraftPolicy(by_clock=False), by_table(), "mtp").gain(16, at_random(0.95), 1000) >= 1.15
    assert World(DraftPolicy(by_clock=True), by_table(), "mtp").gain(16, at_random(0.95), 1000) == pytest.approx(1.0)
    assert World(DraftPolicy(by_clock=True), by_table(), "mtp").gain(8, at_random(0.95), 1000) >= 1.0


def test_forced_tokens_are_verified_even_when_the_balance_is_overdrawn() -> None:
    policy, row = DraftPolicy(by_clock=False), RowDrafts()
    for _ in range(20):  # never noted: all is lost
        policy.choose([(row, "lookup", 7)], 1)

    assert policy.choose([(row, "forced", 7)], 1) == [7]
    assert policy.choose([(row, "lookup", 7)], 1) == [0]


def test_a_step_verifies_no_more_than_the_balance_is_enough_for() -> None:
    policy, row = DraftPolicy(by_clock=False), RowDrafts()
    for _ in range(60):
        policy.note(row, "lookup", 7, 7)
    lengths = [policy.choose([(row, "lookup", 7)], 1)[0] for _ in range(20)]  # never noted: all is lost

    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 7
    assert set(lengths) & {1, 2, 3, 4, 5, 6}
    assert lengths[-1] == 0


def test_forced_tokens_of_one_row_do_not_pay_in_a_large_batch() -> None:
    policy = DraftPolicy(by_clock=False)

    assert policy.choose([(RowDrafts(), "forced", 7), *[None] * 31], 32) == [0] * 32


def test_a_source_that_fails_pauses_longer_each_time_and_is_tried_with_one_token() -> None:
    world, rows = World(DraftPolicy(by_clock=False), by_table()), [RowDrafts()]
    for _ in range(3000):
        world.step(rows, wrong)
    trials = [at for at, lengths in enumerate(world.lengths) if any(lengths)][-8:]
    gaps = [later - earlier for earlier, later in pairwise(trials)]

    assert all(world.lengths[at] == [1] for at in trials)
    assert gaps == sorted(gaps)
    assert gaps[0] >= MIN_PAUSE
    assert gaps[-1] in (MAX_PAUSE, MAX_PAUSE + 1)


def test_a_parked_source_returns_when_it_becomes_good() -> None:
    world, rows = World(DraftPolicy(by_clock=False), by_table()), [RowDrafts()]
    for _ in range(3000):
        world.step(rows, wrong)
    for _ in range(MAX_PAUSE + 40):
        world.step(rows, right)

    assert world.lengths[-1] == [7]


def test_a_new_row_is_tried_though_all_before_it_failed() -> None:
    world = World(DraftPolicy(by_clock=False), by_table())
    for _ in range(20):
        world.gain(1, wrong, 200)
    before = len(world.lengths)
    world.gain(1, right, 300)

    assert any(world.lengths[before]) or any(world.lengths[before + 1])
    assert sum(map(max, world.lengths[before:])) > 200


def test_a_pause_ends_early_when_fewer_rows_make_drafts_pay() -> None:
    world, rows = World(DraftPolicy(by_clock=False), by_table()), [RowDrafts() for _ in range(16)]
    for _ in range(400):
        world.step(rows, at_random(0.35, 1))

    assert world.lengths[-1] == [0] * 16
    assert world.policy.depth(rows[0], "lookup", 1) > 0


def test_rows_on_trial_wait_until_enough_of_them_make_a_step_worth_it() -> None:
    policy, rows = DraftPolicy(by_clock=False), [RowDrafts() for _ in range(16)]
    for row in rows:
        for _ in range(20):
            policy.note(row, "lookup", 1, 0)
        policy.advance(row, MAX_PAUSE + 1)

    assert policy.choose([(row, "lookup", 7) if at < 4 else None for at, row in enumerate(rows)], 16) == [0] * 16
    assert policy.choose([(row, "lookup", 7) if at < 12 else None for at, row in enumerate(rows)], 16) == [1] * 12 + [0] * 4


def test_a_good_row_s_longer_step_takes_shorter_drafts_along() -> None:
    policy, good, short = DraftPolicy(by_clock=False), RowDrafts(), RowDrafts()
    for _ in range(60):
        policy.note(good, "lookup", 7, 7)

    assert policy.choose([(good, "lookup", 7), (short, "lookup", 1)], 2) == [7, 1]


@pytest.mark.parametrize("max_tokens", [1, 3, 7])
@pytest.mark.parametrize("source", ["forced", "lookup", "mtp"])
def test_never_more_than_the_maximum_is_asked_for(source: str, max_tokens: int) -> None:
    policy, row = DraftPolicy(by_clock=False, max_tokens=max_tokens), RowDrafts()
    for _ in range(100):
        policy.note(row, source, max_tokens, max_tokens)

    assert policy.depth(row, source, 1) == max_tokens
    assert policy.depths([row, None], source, 2) == [max_tokens, 0]
    assert policy.choose([(row, source, 50)], 1) == [max_tokens]


def test_without_the_clock_decisions_do_not_depend_on_durations() -> None:
    def lengths(scale: float, by_clock: bool) -> list[list[int]]:
        world = World(DraftPolicy(by_clock=by_clock), by_table(scale))
        world.gain(4, at_random(0.6), 300)
        return world.lengths

    assert lengths(9.0, by_clock=False) == lengths(0.0, by_clock=False)
    assert lengths(9.0, by_clock=True) != lengths(0.0, by_clock=True)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 9), st.floats(1e-6, 1e3), st.booleans()), max_size=60))
def test_costs_rise_with_the_tokens_and_are_never_below_one(steps: list[tuple[int, float, float, bool]]) -> None:
    policy = DraftPolicy(by_clock=True)
    for step in steps:
        policy.measure(*step)
    for num_rows in (1, 2, 7, 33):
        for with_head in (False, True):
            costs = [policy.cost(num_rows, tokens, with_head) for tokens in range(1, 9)]

            assert costs[0] == 1.0
            assert costs == sorted(costs)


def measured(*steps: tuple[int, float]) -> DraftPolicy:
    """A policy after plain steps of a second, and then steps of one row with so many tokens and seconds."""
    policy = DraftPolicy(by_clock=True)
    for tokens, seconds in [(1, 1.0)] * NUM_PLAIN + list(steps):
        policy.measure(1, tokens - 1, seconds)
    return policy


def test_costs_follow_what_is_measured_and_those_of_other_lengths_a_little() -> None:
    before, after = measured(), measured(*[(3, 1.1)] * 50)

    assert after.cost(1, 3) == pytest.approx(1.1, rel=0.01)
    assert after.cost(1, 3) < after.cost(1, 8) < before.cost(1, 8)
    assert after.cost(2, 3) == before.cost(2, 3)  # another size class
    assert after.cost(1, 3, with_head=True) == before.cost(1, 3, with_head=True)


def test_one_disturbed_step_changes_little() -> None:
    before, after = measured(), measured((3, 1000.0))

    assert before.cost(1, 3) < after.cost(1, 3) <= before.cost(1, 3) * (1 + WEIGHT * MAX_CHANGE) + 1e-9


def test_a_first_plain_step_that_was_disturbed_does_not_count() -> None:
    policy = DraftPolicy(by_clock=True)
    for seconds in (50.0, 1.0, 1.0, 1.0):
        policy.measure(1, 0, seconds)
    for _ in range(50):
        policy.measure(1, 2, 2.0)

    assert policy.cost(1, 3) == pytest.approx(2.0, rel=0.01)


def test_costs_that_are_not_measured_again_return_to_the_table() -> None:
    costly = measured(*[(8, 9.0)] * 50)
    for _ in range(3000):
        costly.measure(1, 0, 1.0)

    assert costly.cost(1, 8) == pytest.approx(measured().cost(1, 8), rel=0.05)


def test_with_the_clock_plain_steps_are_measured_first_and_now_and_then() -> None:
    world, rows = World(DraftPolicy(by_clock=True), by_table()), [RowDrafts()]
    for _ in range(2 * NUM_PLAIN + PLAIN_EVERY + 1):
        world.step(rows, right)
    plain = [at for at, lengths in enumerate(world.lengths) if lengths == [0]]

    assert plain == [*range(NUM_PLAIN), *range(NUM_PLAIN + PLAIN_EVERY, 2 * NUM_PLAIN + PLAIN_EVERY)]


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_machine_that_changes_its_speed_costs_nothing_for_long(speed: float) -> None:
    world = World(DraftPolicy(by_clock=True), by_table())
    world.gain(4, at_random(0.9), 1000)
    base = by_table()
    world.clock = lambda num_rows, tokens, with_head: speed * base(num_rows, tokens, with_head)
    world.gain(4, at_random(0.9), 2000)

    assert world.gain(4, at_random(0.9), 1000) > 2.0
    assert world.gain(4, at_random(0.05), 4000) >= WORST


def test_a_single_disturbed_step_does_not_end_drafts() -> None:
    costs = StepCosts(4)
    for _ in range(8):
        costs.measure(1, 0, 0.01, with_head=False)
    usual = [costs.measure(1, 2, 0.02, with_head=True) for _ in range(20)][-1]

    assert costs.measure(1, 2, 0.2, with_head=True) <= 2 * usual


def test_deeper_guesses_of_a_head_are_expected_to_be_worse_until_they_were_verified() -> None:
    policy = DraftPolicy(by_clock=False, table=CostTable(start=0.0, base=0.2, row=0.0, head=0.0))

    assert 0 < policy.depth(RowDrafts(), "mtp", 1) < policy.depth(RowDrafts(), "prediction", 1)
