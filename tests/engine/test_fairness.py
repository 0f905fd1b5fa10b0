"""One tenant floods, another chats: the scheduler's plans, without a model and a clock; cost is what was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.fairness import OUTPUT_WEIGHT, Fairness
from weft.engine.scheduler import Scheduler
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

    def turn(self) -> None:
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
