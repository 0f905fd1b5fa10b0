"""Requests over several replicas: where they go, how they move, and who stays where it is. No processes."""

from __future__ import annotations

import asyncio

import pytest
from replicas_at_hand import GREEDY, AtHand, ask, dispatcher_of, say

from weft.errors import EngineDied
from weft.ipc.messages import EngineEvents, EngineStatus, ReportedChunk, Submit, Timings, TokenEvent
from weft.memory.prefix_tree import key_of, root_key
from weft.serving.dispatcher import SPARE_PLACES, Dispatcher
from weft.serving.in_flight import PROOF_TOKENS, Subscription

PROOF = tuple(range(PROOF_TOKENS))


async def taken(subscription: Subscription) -> list[int | None]:
    """The tokens of all that has come so far."""
    return [event.token for _, event in await subscription.take(0.0) if isinstance(event, TokenEvent)]


def prove_one(dispatcher: Dispatcher, replicas: list[AtHand]) -> None:
    """Have the first sequence that has not proved itself where it is do so."""
    inside = ((replica, one) for replica in replicas for one in replica.client.live.inside.values())
    replica, one = next((replica, one) for replica, one in inside if not one.has_proved)
    say(dispatcher, replica, one.number, *PROOF)


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
    here.crash()
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
    here.crash()
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
    here.crash()
    here.come()
    for place in range(4):
        ask(dispatcher, [place, 9])
    assert len(here.submits) == 1
    assert len(there.submits) == 4

    say(dispatcher, here, here.numbers[0], *PROOF)
    there.is_sick = True
    ask(dispatcher, [7, 7])

    assert len(here.submits) == 2


def test_when_an_engine_is_killed_by_others_its_short_and_unbegun_answers_move_at_once() -> None:
    one, other = AtHand("0"), AtHand("1")
    other.is_sick = True
    dispatcher = dispatcher_of(one, other)
    unbegun, short = ask(dispatcher, [1, 2, 3]), ask(dispatcher, [4, 5, 6])
    say(dispatcher, one, one.numbers[1], 8, 9)
    other.is_sick = False
    one.be_killed()
    dispatcher.settle()

    assert {tuple(submit.prompt): submit.emitted for submit in other.submits} == {(1, 2, 3): (), (4, 5, 6): ((8, 9),)}
    for number in other.numbers:
        say(dispatcher, other, number, 10, is_last=True)
    assert (tokens_of(unbegun), tokens_of(short)) == ([10, None], [8, 9, 10, None])


def test_one_whose_second_engine_is_killed_is_a_suspect_and_waits_for_that_replica_s_next() -> None:
    replicas = [AtHand(str(place)) for place in range(3)]
    dispatcher = dispatcher_of(*replicas)
    ask(dispatcher, [1, 2, 3])
    for _ in range(2):
        (killed,) = (one for one in replicas if one.numbers)
        killed.be_killed()
        dispatcher.settle()
    assert not any(one.numbers for one in replicas)
    ask(dispatcher, [7, 7])
    killed.come()
    dispatcher.settle()

    assert [submit.prompt for submit in killed.submits] == [[1, 2, 3]]


def test_a_request_that_crashes_engines_beside_others_that_have_just_come_is_tried_first_and_alone() -> None:
    replicas = [AtHand(str(place), 16) for place in range(2)]
    dispatcher = dispatcher_of(*replicas)
    replicas[1].is_sick = True
    good = [ask(dispatcher, [place, place]) for place in range(5)]
    bad = ask(dispatcher, [666])
    replicas[1].is_sick = False
    for _ in range(3):
        replicas[0].crash()
        replicas[0].come()
        dispatcher.settle()

    with pytest.raises(EngineDied, match="3 times with this request"):
        tokens_of(bad)
    assert all(subscription.num_resumed == 1 for subscription in good)


def test_a_request_for_which_engines_are_killed_reaches_two_replicas_and_fails() -> None:
    """As one does that makes the kernel run out of memory."""
    replicas = [AtHand(str(place), 16) for place in range(4)]
    dispatcher = dispatcher_of(*replicas)
    good = [ask(dispatcher, [place, place]) for place in range(30)]
    for replica in replicas:
        for number in replica.numbers:
            say(dispatcher, replica, number, *PROOF)
    bad, deaths = ask(dispatcher, [666]), list[str]()
    while bad.open and len(deaths) < 10:
        while not (having := [one for one in replicas if any(666 in submit.prompt for submit in one.submits)]):
            prove_one(dispatcher, replicas)  # it is not its turn yet
        (killed,) = having
        deaths.append(killed.name)
        killed.be_killed()
        dispatcher.settle()
        killed.come()
        dispatcher.settle()

    assert len(deaths) == 6  # one beside others in each of two replicas, then four alone: others may kill engines too
    assert len(set(deaths)) == 2
    assert all(len(subscription.open) == 1 for subscription in good)
    with pytest.raises(EngineDied, match="6 times with this request"):
        tokens_of(bad)


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
        killed.crash()
        dispatcher.settle()
        killed.come()
        dispatcher.settle()

    assert len(deaths) == 3
    assert len(set(deaths)) == 1  # never two replicas at once
    with pytest.raises(EngineDied, match="3 times with this request"):
        tokens_of(bad)
    assert all(len(subscription.open) == 1 for subscription in good)
    assert sum(len(replica.numbers) for replica in replicas) == 30


def test_a_silent_replica_loses_what_has_begun_and_what_has_not_and_a_second_one_keeps_the_suspects() -> None:
    replicas = [AtHand(str(place)) for place in range(3)]
    dispatcher = dispatcher_of(*replicas)
    ask(dispatcher, [1, 2, 3])
    reached = []
    for _ in range(2):
        (silent,) = (one for one in replicas if one.numbers)
        reached.append(silent.name)
        silent.is_sick = silent.is_lost = True
        dispatcher.settle()

    assert len(set(reached)) == 2
    assert silent.numbers


def test_a_silent_replica_adds_no_token_to_what_has_moved_when_it_wakes() -> None:
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
    there.crash()
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
    first.crash()
    dispatcher.settle()

    assert [replica.name for replica in replicas if replica.numbers] == [goes_to]


def test_a_replica_that_is_given_up_hands_all_it_has_to_the_others() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3])
    here, there = (one, other) if one.numbers else (other, one)
    here.crash()
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
    one.crash()
    other.crash()
    subscription = ask(dispatcher, [1, 2, 3])
    assert dispatcher.num_queued == 1

    other.come()
    dispatcher.settle()
    say(dispatcher, other, other.numbers[0], 5, is_last=True)

    assert tokens_of(subscription) == [5, None]


def test_who_leaves_while_he_waits_for_a_replica_is_forgotten() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    one.crash()
    other.crash()
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
    here.crash()
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
    here.is_sick = True
    waiting = [
        ask(dispatcher, [3], client="much"),
        ask(dispatcher, [4], client="little"),
        ask(dispatcher, [5], client="much", priority=1),
    ]
    assert dispatcher.num_queued == 3
    here.crash()
    there.is_sick = False
    dispatcher.settle()

    assert [submit.prompt for submit in there.submits] == [[1], [5], [4]]
    assert running.num_resumed == 1
    assert all(subscription.open for subscription in waiting)


def test_a_client_that_has_nothing_in_a_replica_does_not_wait_for_a_place() -> None:
    one, other = AtHand("0", 2), AtHand("1", 2)
    dispatcher = dispatcher_of(one, other)
    for place in range(20):
        ask(dispatcher, [place, 1], client="many")
    num_waiting = dispatcher.num_queued
    ask(dispatcher, [7, 7, 7], client="one")
    ask(dispatcher, [8, 8, 8], client="one")

    prompts = [submit.prompt for replica in (one, other) for submit in replica.submits]
    assert [7, 7, 7] in prompts
    assert [8, 8, 8] not in prompts
    assert dispatcher.num_queued == num_waiting + 1


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


def test_a_prompt_goes_where_nothing_decodes_beside_it() -> None:
    replicas = [AtHand(str(place), 16) for place in range(3)]
    dispatcher = dispatcher_of(*replicas)
    for place in range(2):
        ask(dispatcher, [place, 1])
        busy = next(one for one in replicas if one.numbers and not one.client.live.inside[one.numbers[0]].has_begun)
        say(dispatcher, busy, busy.numbers[0], 5)
    assert sorted(len(replica.numbers) for replica in replicas) == [0, 1, 1]

    ask(dispatcher, [7, 8, 9])

    assert [len(replica.numbers) for replica in replicas] == [1, 1, 1]


def test_a_few_cached_tokens_do_not_bring_all_answers_to_one_replica() -> None:
    replicas = [AtHand(str(place), 16) for place in range(2)]
    for replica in replicas:
        replica.status = EngineStatus(seconds_per_token=0.00001)
    dispatcher = dispatcher_of(*replicas)
    prompt = list(range(100, 120))
    root = root_key("")
    dispatcher.router.index.report("0", [ReportedChunk(key_of(root, prompt[:19]), root, 19, has_checkpoint=True)], [])
    for _ in range(8):
        ask(dispatcher, prompt)

    assert [len(replica.numbers) for replica in replicas] == [4, 4]


@pytest.mark.parametrize("busy", ["0", "1"])
def test_answers_of_other_fronts_are_seen_in_an_engine_s_status(busy: str) -> None:
    replicas = [AtHand("0", 16), AtHand("1", 16)]
    for replica in replicas:
        replica.status = EngineStatus(seconds_per_token=0.001, running=4 * (replica.name == busy))
    dispatcher = dispatcher_of(*replicas)
    ask(dispatcher, list(range(100)))

    assert [replica.name for replica in replicas if replica.numbers] == ["1" if busy == "0" else "0"]


def test_hits_are_counted_where_the_answer_ended() -> None:
    one, other = AtHand("0"), AtHand("1")
    dispatcher = dispatcher_of(one, other)
    ask(dispatcher, [1, 2, 3], n=2)
    here = one if one.numbers else other
    for number in here.numbers:
        timings = Timings(cached_tokens=2)
        here.client.receive(EngineEvents(tokens=[TokenEvent(number, 5, finish="length", timings=timings)]))

    assert here.counted == [(3, 2)]  # once for both answers
