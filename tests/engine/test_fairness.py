"""One tenant floods, another chats: the scheduler's plans, without a model and a clock; cost is what was planned."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.fairness import FORGIVEN, OUTPUT_WEIGHT, Fairness, Shares
from weft.engine.scheduler import SHARED_CHUNK_TOKENS, ChunkRules, Plan, Scheduler
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit

CONFIG = EngineConfig(max_rows=8, slab_tokens=8192, chunk_tokens=128)
MANY = 128


def sequence(number: int, tenant: str, prompt: int = 50, tokens: int = 20, **more: Any) -> Sequence:
    request = Submit((number,), [1] * prompt, (Sampling(),), tenant=tenant, **more)
    return Sequence(request, 0, tokens, frozenset(), now=0.0)


@dataclass
class Planned:
    """A scheduler whose plans are carried out at once, and the cost of all that was planned so far, by tenant."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(CONFIG, MemoryBudget(lambda tokens: tokens, 0), Bisection()))
    cost: Counter[str] = field(default_factory=Counter)
    chunks: list[Sequence] = field(default_factory=list)

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add(one)

    def turn(self) -> Plan:
        scheduler = self.scheduler
        scheduler.drop_finished()
        while (victim := scheduler.to_preempt()) is not None:
            scheduler.preempt(victim)
            victim.preempt(0)
        scheduler.admit(0.0)
        scheduler.drop_prefilled()
        plan = scheduler.plan()
        for one in plan.steps:
            one.begin_step(one.num_known)
            one.append(1, None)
            scheduler.fairness.charge_token(one)
            self.cost[one.tenant] += OUTPUT_WEIGHT
        if plan.chunk is not None:
            row = plan.chunk
            self.chunks.append(row.sequence)
            row.sequence.num_computed += row.count
            self.cost[row.sequence.tenant] += row.count
            scheduler.finish_chunk(row)
        return plan

    def run(self, until: Callable[[], bool]) -> None:
        for _ in range(5000):
            if until():
                return
            self.turn()
        raise AssertionError("it does not come to that")


def flood(kind: str) -> list[Sequence]:
    numbers = range(1000, 1000 + MANY)
    match kind:
        case "answers":  # as n = 128 has them
            return [sequence(number, "flood", tokens=4000) for number in numbers]
        case "priority":
            return [sequence(number, "flood", tokens=4000, priority=100) for number in numbers]
        case "sessions":
            return [sequence(number, "flood", tokens=4000, client=f"session {number}") for number in numbers]
        case _:
            return [sequence(number, "flood", prompt=4000, tokens=10) for number in numbers]


FLOODS = ["answers", "priority", "sessions", "prompts"]


@pytest.mark.parametrize("kind", FLOODS)
def test_a_chat_is_begun_before_more_of_another_tenant_s_flood(kind: str) -> None:
    """Once a row is free for it, nothing but what is under way is computed first: one step of all rows, and one chunk."""
    planned = Planned()
    planned.add(*flood(kind))
    planned.run(lambda: planned.cost["flood"] > 3000)
    before, chat = planned.cost["flood"], sequence(1, "chat")
    planned.add(chat)
    planned.run(lambda: chat in planned.chunks)

    assert planned.cost["flood"] - before <= 2 * (CONFIG.max_rows * OUTPUT_WEIGHT + CONFIG.chunk_tokens)


@pytest.mark.parametrize("kind", FLOODS)
def test_chats_one_after_the_other_get_an_equal_share_of_what_is_computed(kind: str) -> None:
    """A tenant that always has one request in work is not served less than the flood while its prompts are computed."""
    planned = Planned()
    planned.add(*flood(kind))
    planned.run(lambda: planned.cost["flood"] > 3000)
    turns = []
    for number in range(10):
        chat, start = sequence(number, "chat", client=f"talk {number}"), len(planned.chunks)
        planned.add(chat)
        planned.run(lambda chat=chat: bool(chat.output))  # type: ignore[misc]
        turns.append(len(planned.chunks) - start)
        planned.run(lambda chat=chat: chat.is_finished)  # type: ignore[misc]

    assert max(turns) <= 3


def test_tenants_that_want_more_have_equally_many_rows() -> None:
    planned = Planned()
    planned.add(*(sequence(number, "flood", tokens=4000) for number in range(64)))
    planned.run(lambda: planned.cost["flood"] > 3000)
    planned.add(*(sequence(100 + number, "other", tokens=4000, client=str(number)) for number in range(64)))
    planned.run(lambda: planned.cost["other"] > 3000)
    rows = Counter(one.tenant for one in planned.scheduler.running)
    planned.cost.clear()
    planned.run(lambda: planned.cost["other"] > 3000)

    assert rows == {"flood": 4, "other": 4}
    assert 0.8 < planned.cost["flood"] / planned.cost["other"] < 1.25


def test_within_a_tenant_the_urgent_go_first_and_a_rank_goes_before_all() -> None:
    fairness = Fairness()
    asked = [
        sequence(0, "flood"),
        sequence(1, "flood", priority=100),
        sequence(2, "chat", priority=-10),
        sequence(3, "chat"),
        sequence(4, "admin", rank=1),
    ]
    fairness.arrive(asked[0], [])
    fairness.charge_chunk(asked[0], 0, 10)
    order = []
    while asked:
        order.append(fairness.first(asked).id)
        asked = [one for one in asked if one.id != order[-1]]

    assert order == [4, 3, 2, 1, 0]


def test_sessions_of_one_tenant_share_its_turn() -> None:
    fairness = Fairness()
    hers = [sequence(number, "anna", client=f"session {number}") for number in range(50)]
    his = sequence(100, "ben")
    for number, one in enumerate([*hers, his]):
        fairness.arrive(one, hers[:number])
    order = []
    for _ in range(20):
        first = fairness.first([*hers, his])
        order.append(first.tenant)
        fairness.charge_chunk(first, 0, 10)

    assert order.count("ben") == 10


def test_tokens_far_behind_the_beginning_cost_more() -> None:
    fairness = Fairness()
    near, far = sequence(0, "near"), sequence(1, "far")
    fairness.charge_chunk(near, 0, 128)
    fairness.charge_chunk(far, 8192, 128)

    assert fairness.first([far, near]) is near


PRICED = dataclasses.replace(CONFIG, max_rows=16, row_cost=0.2)


def priced(row_cost: float = 0.2) -> Planned:
    config = dataclasses.replace(PRICED, row_cost=row_cost)
    return Planned(Scheduler(config, MemoryBudget(lambda tokens: tokens, 0), Bisection()))


def gaps_of(planned: Planned, tenant: str, num_turns: int) -> list[float]:
    """The costs between two tokens of a tenant's rows, in steps of one row; a prompt's slice costs what it may take."""
    now, last, gaps = 0.0, dict[Sequence, float](), []
    for _ in range(num_turns):
        plan = planned.turn()
        for one in plan.steps:
            if one.tenant == tenant:
                gaps += [now - last[one]] if one in last else []
                last[one] = now
        part = (plan.slice_seconds or 0.0) / planned.scheduler.step_seconds if plan.chunk is not None else 0.0
        now += planned.scheduler.shares.costs.of(len(plan.steps)) * (1 + part)
    assert gaps
    return gaps


@pytest.mark.parametrize("kind", FLOODS)
def test_where_rows_have_a_price_a_flood_adds_less_to_a_chat_s_steps_than_they_cost(kind: str) -> None:
    planned = priced()
    planned.add(*flood(kind))
    planned.run(lambda: planned.cost["flood"] > 3000)
    chat = sequence(1, "chat", tokens=60)
    planned.add(chat)
    planned.run(lambda: bool(chat.output))

    assert max(gaps_of(planned, "chat", 59)) <= 2


@pytest.mark.parametrize(
    ("many", "few", "row_cost"), [(8, 1, 0.2), (8, 3, 0.2), (15, 1, 0.2), (12, 4, 0.2), (2, 1, 0.2), (8, 1, 0.5), (15, 1, 0.5)]
)
def test_neither_many_rows_nor_few_of_another_tenant_double_anybody_s_gaps(many: int, few: int, row_cost: float) -> None:
    planned = priced(row_cost)
    planned.add(*(sequence(number, "many", prompt=1, tokens=4000) for number in range(many)))
    planned.add(*(sequence(100 + number, "few", prompt=1, tokens=4000) for number in range(few)))
    costs = planned.scheduler.shares.costs

    for tenant, count in (("many", many), ("few", few)):
        assert max(gaps_of(planned, tenant, 50)) <= 2 * costs.of(count) + 1e-9


@pytest.mark.parametrize("row_cost", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("num_chats", [1, 3, 8])
def test_beside_a_flood_others_are_slowed_by_half_at_most_or_by_its_one_row(row_cost: float, num_chats: int) -> None:
    planned = priced(row_cost)
    planned.add(*(sequence(number, "flood", prompt=1, tokens=4000) for number in range(60)))
    for _ in range(8):
        planned.turn()
    planned.add(*(sequence(100 + number, "chat", prompt=1, tokens=4000) for number in range(num_chats)))
    for _ in range(8):
        planned.turn()
    costs = planned.scheduler.shares.costs

    assert any(one.tenant == "flood" for one in planned.turn().steps)
    assert max(gaps_of(planned, "chat", 50)) <= max(1.5 * costs.of(num_chats), costs.of(num_chats + 1)) + 1e-9


def test_prompts_of_another_tenant_are_sliced_however_short_they_are() -> None:
    planned = priced()
    planned.add(*(sequence(number, "streams", prompt=1, tokens=4000) for number in range(8)))
    for _ in range(5):
        planned.turn()
    planned.add(*(sequence(100 + number, "other", prompt=CONFIG.unsliced_tokens, tokens=4) for number in range(4)))
    plan = planned.turn()

    assert plan.chunk is not None
    assert plan.slice_seconds is not None
    assert len(plan.steps) == 8


@pytest.mark.parametrize(("owner", "is_short"), [("other", True), ("streams", False)])
def test_chunks_are_short_beside_another_tenant_s_tokens(owner: str, is_short: bool) -> None:
    planned = priced()
    planned.scheduler.rules = ChunkRules(cuts_freely=True)
    planned.add(*(sequence(number, "streams", prompt=1, tokens=4000) for number in range(8)))
    planned.turn()
    planned.add(sequence(100, owner, prompt=1000))
    chunks = [plan.chunk for plan in (planned.turn() for _ in range(4)) if plan.chunk is not None]

    assert chunks
    assert {chunk.count for chunk in chunks} == {SHARED_CHUNK_TOKENS if is_short else CONFIG.chunk_tokens}


def test_a_chat_s_prompt_is_not_cut_short_for_a_flood() -> None:
    planned = priced()
    planned.scheduler.rules = ChunkRules(cuts_freely=True)
    planned.add(*flood("answers"))
    for _ in range(3):
        planned.turn()
    planned.add(sequence(1000, "chat", prompt=100))
    own = [plan.chunk for plan in (planned.turn() for _ in range(4)) if plan.chunk is not None]

    assert [chunk.count for chunk in own if chunk.sequence.tenant == "chat"] == [99]


def test_a_flood_s_prompts_are_sliced_though_nobody_steps() -> None:
    planned = priced()
    planned.add(*(sequence(number, "flood", prompt=1000) for number in range(3 * PRICED.max_rows)))
    plan = planned.turn()

    assert not plan.steps
    assert plan.slice_seconds is not None


def test_drafts_and_a_prompt_s_slice_beside_a_step_share_what_other_tenants_can_bear() -> None:
    planned = priced()
    planned.add(*(sequence(number, "streams", prompt=1, tokens=4000) for number in range(8)))
    assert planned.turn().room is None  # of one tenant nobody bears anything
    planned.add(sequence(100, "other", prompt=1, tokens=4000), sequence(101, "other", prompt=4000))
    plan = planned.turn()

    assert plan.room is not None
    assert plan.slice_seconds is not None
    slowed = planned.scheduler.shares.costs.of(len(plan.steps))  # of the one row of the other tenant
    assert slowed * (plan.room + plan.slice_seconds / planned.scheduler.step_seconds) <= 2


@pytest.mark.parametrize("row_cost", [0.2, 0.5])
@pytest.mark.parametrize("kind", ["answers", "priority", "sessions"])
def test_prompts_of_chats_are_computed_before_a_flood_s_rows_step_again(kind: str, row_cost: float) -> None:
    planned = priced(row_cost)
    planned.add(*flood(kind))
    planned.run(lambda: planned.cost["flood"] > 3000)
    for number in range(10):
        chat = sequence(number, "chat", prompt=60, tokens=20)
        planned.add(chat)
        plan = planned.turn()

        assert plan.chunk is not None
        assert plan.chunk.sequence is chat
        assert plan.steps == ()
        planned.run(lambda chat=chat: chat.is_finished)  # type: ignore[misc]


def test_what_a_tenant_was_served_more_than_others_is_not_forgotten_while_it_is_away() -> None:
    shares: Shares[str] = Shares()
    shares.arrive("flood", set())
    shares.arrive("books", {"flood"})
    shares.charge("books", 5000)
    shares.arrive("books", {"flood"}, forgiven=FORGIVEN)

    assert shares.level("books") == 5000 - FORGIVEN


@pytest.mark.parametrize("is_flood", [True, False])
def test_before_a_flood_s_rows_a_chat_s_prompt_is_computed_at_once_and_not_before_others(is_flood: bool) -> None:
    planned = priced()
    planned.add(*(sequence(number, "many", prompt=1, tokens=4000) for number in range(40 if is_flood else 8)))
    for _ in range(8):
        planned.turn()
    planned.add(sequence(100, "chat", prompt=200, tokens=4))
    plan = planned.turn()
    while plan.chunk is None:
        plan = planned.turn()

    assert plan.chunk.sequence.tenant == "chat"
    assert (plan.steps == ()) == is_flood


def test_rows_that_sit_out_have_their_turn() -> None:
    planned = priced()
    rows = [sequence(number, "flood", tokens=4000) for number in range(12)]
    planned.add(*rows, chat := sequence(100, "chat", tokens=1000))
    planned.run(lambda: chat.is_finished)

    assert min(len(row.output) for row in rows) > 100
    assert max(len(row.output) for row in rows) <= min(len(row.output) for row in rows) + 40


def test_of_one_tenant_or_where_rows_cost_nothing_all_rows_step() -> None:
    for planned, tenants in ((priced(), ["one"]), (Planned(), ["one", "two"])):
        many = planned.scheduler.config.max_rows
        planned.add(*(sequence(number, tenants[number % len(tenants)], prompt=1, tokens=50) for number in range(many)))

        assert len(planned.turn().steps) == many


def test_tenants_with_equally_many_rows_do_not_wait_for_each_other() -> None:
    planned = priced()
    planned.add(*(sequence(number, f"tenant {number % 2}", prompt=1, tokens=50) for number in range(16)))

    assert len(planned.turn().steps) == 16
