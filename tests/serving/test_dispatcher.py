"""Requests over several replicas: where they go, how they move, and who stays where it is. No processes."""

from __future__ import annotations

import asyncio

import pytest
from replicas_at_hand import GREEDY, AtHand, ask, dispatcher_of, say

from weft.errors import EngineDied
from weft.ipc.messages import EngineEvents, EngineStatus, Submit, Timings, TokenEvent
from weft.serving.dispatcher import SPARE_PLACES
from weft.serving.in_flight import PROOF_TOKENS, Subscription

PROOF = tuple(range(PROOF_TOKENS))


async def taken(subscription: Subscription) -> list[int | None]:
    """The tokens of all that has come so far."""
    return [event.token for _, event in await subscription.take(0.0) if isinstance(event, TokenEvent)]


def tokens_of(subscription: Subscription) -> list[int | None]:
    return asyncio.run(taken(subscription))


def test_a_lone_replica_has_the_whole_queue_at_once() -> None:
    lone = AtHand("0", max_rows=2)
    dispatcher = dispatcher_of(lone)
    for place in range(20):
        ask(dispatcher, [place, 1])

    assert len(lone.numbers) == 20
    assert dispatcher.queue == []
    assert not lone.client.live.inside[0].subscription.placements


def test_what_the_replicas_have_no_place_for_waits_and_goes_where_a_place_is_free_first() -> None:
    one, other = AtHand("0", 2), AtHand("1", 2)
    dispatcher = dispatcher_of(one, other)
    for place in range(12):
        ask(dispatcher, [place, 1])
    full = 2 * (2 + SPARE_PLACES)
    assert (len(one.numbers), len(other.numbers), dispatcher.num_queued) == (full // 2, full // 2, 12 - full)
    assert len(dispatcher) == 12

    say(dispatcher, other, other.numbers[0], 5, is_last=True)

    assert len(other.numbers) == 2 + SPARE_PLACES
    assert dispatcher.num_queued == 12 - full - 1


def test_an_answer_that_has_proved_itself_goes_on_at_once_in_another_replica() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    subscription = ask(dispatcher, [1, 2, 3], n=2)
    here, there = (one, other) if one.numbers else (other, one)
    for number in here.numbers:
        say(dispatcher, here, number, *PROOF)
    here.die()
    dispatcher.settle()

    (moved,) = there.submits
    assert moved.emitted == (PROOF, PROOF)
    assert moved.samplings == subscription.submits[0].samplings
    assert subscription.num_resumed == 1
    assert dispatcher.num_moved == 2
    for number in there.numbers:
        say(dispatcher, there, number, 99, is_last=True)
    assert tokens_of(subscription) == [*PROOF, *PROOF, 99, None, 99, None]
    assert len(dispatcher) == 0


def test_one_that_may_have_killed_its_engine_waits_for_that_replica_s_next_and_spares_the_others() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    here.die()
    dispatcher.settle()
    assert there.submits == []

    here.come()
    dispatcher.settle()

    assert len(here.submits) == 1


def test_a_replica_with_a_suspect_takes_nothing_else_before_it_has_proved_itself() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    here.die()
    here.come()
    for place in range(4):
        ask(dispatcher, [place, 9])
    assert len(here.submits) == 1
    assert len(there.submits) == 4

    say(dispatcher, here, here.numbers[0], *PROOF)
    there.is_sick = True
    ask(dispatcher, [7, 7])

    assert len(here.submits) == 2


def test_a_request_that_kills_costs_one_replica_three_engines_and_its_neighbours_nothing() -> None:
    replicas = [AtHand(str(place), 16) for place in range(4)]
    dispatcher = dispatcher_of(*replicas)
    good = [ask(dispatcher, [place, place]) for place in range(30)]
    for replica in replicas:
        for number in replica.numbers:
            say(dispatcher, replica, number, *PROOF)
    bad = ask(dispatcher, [666])
    deaths: list[str] = []
    while bad.open and len(deaths) < 10:
        killed = next(one for one in replicas if any(666 in submit.prompt for submit in one.submits))
        deaths.append(killed.name)
        killed.die()
        dispatcher.settle()
        killed.come()
        dispatcher.settle()

    assert len(deaths) == 3
    assert len(set(deaths)) == 1  # never two replicas at once
    with pytest.raises(EngineDied, match="3 times with this request"):
        tokens_of(bad)
    assert all(len(subscription.open) == 1 for subscription in good)
    assert sum(len(replica.numbers) for replica in replicas) == 30


def test_a_silent_replica_loses_what_has_proved_itself_and_adds_no_token_when_it_wakes() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    subscription = ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    (before,) = here.numbers
    say(dispatcher, here, before, *PROOF)
    here.is_sick = here.is_lost = True
    dispatcher.settle()
    (after,) = there.numbers
    say(dispatcher, there, after, 50)
    here.is_sick = here.is_lost = False
    say(dispatcher, here, before, 50, 51)  # what it had computed when it fell silent
    say(dispatcher, there, after, 51, is_last=True)

    assert here.cancelled == [before]
    assert tokens_of(subscription) == [*PROOF, 50, 51, None]


def test_an_answer_that_comes_back_to_a_replica_is_not_ended_by_its_earlier_cancelling() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    subscription = ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    (before,) = here.numbers
    say(dispatcher, here, before, *PROOF)
    here.is_sick = here.is_lost = True
    dispatcher.settle()
    say(dispatcher, there, there.numbers[0], *PROOF)
    here.is_sick = here.is_lost = False
    there.die()
    dispatcher.settle()
    here.client.receive(EngineEvents(tokens=[TokenEvent(before, None, finish="cancelled")]))  # now it obeys

    (again,) = here.numbers
    assert again != before
    say(dispatcher, here, again, 7, is_last=True)
    assert tokens_of(subscription) == [*PROOF, *PROOF, 7, None]


@pytest.mark.parametrize(("is_there", "goes_to"), [(True, "2"), (False, "1")])
def test_an_answer_goes_on_with_the_same_kind_of_device_if_there_is_one(is_there: bool, goes_to: str) -> None:
    replicas = [AtHand("0"), AtHand("1"), AtHand("2")]
    first, other, same = replicas
    other.kind, other.status = "cuda", EngineStatus(seconds_per_token=1e-6)
    other.is_sick = same.is_sick = True
    dispatcher = dispatcher_of(*replicas)
    ask(dispatcher, [1, 2, 3])
    say(dispatcher, first, first.numbers[0], *PROOF)
    other.is_sick, same.is_sick = False, not is_there
    first.die()
    dispatcher.settle()

    assert [replica.name for replica in replicas if replica.numbers] == [goes_to]


def test_a_replica_that_is_given_up_hands_all_it_has_to_the_others() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    here.die()
    here.is_given_up = True
    dispatcher.settle()

    assert len(there.numbers) == 1


def test_a_replica_that_leaves_has_its_unfinished_answers_moved_and_cancelled() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    subscription = ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    say(dispatcher, here, here.numbers[0], 5)
    here.is_given_up = True
    dispatcher.settle()

    assert here.cancelled == [0]
    assert there.submits[0].emitted == ((5,),)
    assert there.client.live.inside[there.numbers[0]].deaths == 0  # leaving is no death
    say(dispatcher, there, there.numbers[0], 6, is_last=True)
    assert tokens_of(subscription) == [5, 6, None]


def test_while_all_replicas_are_gone_requests_wait() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    one.die()
    other.die()
    subscription = ask(dispatcher, [1, 2, 3])
    assert dispatcher.num_queued == 1

    other.come()
    dispatcher.settle()
    say(dispatcher, other, other.numbers[0], 5, is_last=True)

    assert tokens_of(subscription) == [5, None]


def test_who_leaves_while_he_waits_for_a_replica_is_forgotten() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    one.die()
    other.die()
    subscription = ask(dispatcher, [1, 2, 3], n=2)
    subscription.cancel(0)
    assert (dispatcher.num_queued, list(subscription.open.values())) == (1, [1])

    subscription.cancel()

    assert (len(dispatcher), subscription.open) == (0, {})


def test_a_moved_answer_can_be_cancelled_where_it_is_now() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    subscription = ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    say(dispatcher, here, here.numbers[0], *PROOF)
    here.die()
    dispatcher.settle()
    (number,) = there.numbers
    subscription.cancel()

    assert there.cancelled == [number]
    assert len(dispatcher) == 0


def test_of_what_waits_running_answers_go_first_then_priorities_then_clients_that_had_less() -> None:
    one, other = AtHand("0", 1), AtHand("1", 1)
    dispatcher = dispatcher_of(one, other)
    running = ask(dispatcher, [1], client="much")
    here, there = (one, other) if one.numbers else (other, one)
    say(dispatcher, here, here.numbers[0], *PROOF)
    there.is_sick = True
    for place in range(SPARE_PLACES):
        ask(dispatcher, [2, place], client="much")
    waiting = [
        ask(dispatcher, [3], client="much"),
        ask(dispatcher, [4], client="little"),
        ask(dispatcher, [5], client="much", priority=1),
    ]
    assert dispatcher.num_queued == 3
    here.die()
    there.is_sick = False
    dispatcher.settle()

    assert [submit.prompt for submit in there.submits] == [[1], [5], [4]]
    assert running.num_resumed == 1
    assert all(subscription.open for subscription in waiting)


def test_a_client_s_tokens_from_all_replicas_are_told_to_the_engine() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3], client="a")
    here = one if one.numbers else other
    say(dispatcher, here, here.numbers[0], *PROOF)
    ask(dispatcher, [8, 9, 10, 11], client="a")
    (newest,) = [submit for replica in (one, other) for submit in replica.submits if len(submit.prompt) == 4]

    assert min(newest.served) >= 2 * PROOF_TOKENS + 3


def test_eight_arrivals_with_one_long_prefix_are_sent_to_one_replica_that_computes_it_once() -> None:
    replicas = [AtHand(str(place), 16) for place in range(4)]
    dispatcher = dispatcher_of(*replicas)
    prefix = list(range(1000, 9000))
    subscriptions = [ask(dispatcher, [*prefix, place, *range(60)]) for place in range(8)]

    assert sorted(len(replica.numbers) for replica in replicas) == [0, 0, 0, 8]
    assert [subscription.placements[0].matched for subscription in subscriptions] == [0, *[8000] * 7]


def test_a_prompt_of_another_scope_under_way_is_not_followed() -> None:
    replicas = [AtHand(str(place), 16) for place in range(2)]
    dispatcher = dispatcher_of(*replicas)
    prompt = list(range(1000, 5000))
    for scope in ("one", "other"):
        dispatcher.submit([Submit(dispatcher.new_numbers(1), prompt, (GREEDY,), scope=scope)])

    assert sorted(len(replica.numbers) for replica in replicas) == [1, 1]


def test_many_arrivals_with_long_own_parts_are_spread_by_need() -> None:
    replicas = [AtHand(str(place), 32) for place in range(4)]
    dispatcher = dispatcher_of(*replicas)
    prefix = list(range(1000, 9000))
    for place in range(64):
        ask(dispatcher, [*prefix, *range(100_000 + 512 * place, 100_000 + 512 * (place + 1))])

    assert sum(bool(replica.numbers) for replica in replicas) >= 3


def test_a_slow_replica_gets_less() -> None:
    slow, fast = AtHand("0", 64), AtHand("1", 64)
    slow.status, fast.status = EngineStatus(seconds_per_token=0.01), EngineStatus(seconds_per_token=0.001)
    dispatcher = dispatcher_of(slow, fast)
    for place in range(22):
        ask(dispatcher, list(range(1000 * place, 1000 * place + 500)))

    assert 1 <= len(slow.numbers) <= 2
    assert len(fast.numbers) >= 20


def test_hits_are_counted_where_the_answer_ended() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3], n=2)
    here = one if one.numbers else other
    for number in here.numbers:
        timings = Timings(cached_tokens=2)
        here.client.receive(EngineEvents(tokens=[TokenEvent(number, 5, finish="length", timings=timings)]))

    assert here.counted == [(3, 2)]  # once for both answers
