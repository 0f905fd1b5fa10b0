"""Requests over engines that come and go: what is sent, and what those who wait get to hear."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weft.errors import EngineDied, GrammarRejected
from weft.ipc.limits import Sampling
from weft.ipc.messages import Cancel, ConstraintSpec, EngineEvents, GrammarSpec, Submit, SubmitOutcome, ToEngine, TokenEvent
from weft.serving.in_flight import PROOF_TOKENS, EngineClient, Subscription

RULE = ConstraintSpec(GrammarSpec("regex", "a+"))


class Wire:
    """An engine that only listens."""

    def __init__(self, client: EngineClient) -> None:
        self.heard: list[ToEngine] = []
        client.attach(self.send, max_rows=16)

    def send(self, message: ToEngine) -> None:
        self.heard.append(message)

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.heard if isinstance(message, Submit)]


def ask(client: EngineClient, *samplings: Sampling, constraint: ConstraintSpec | None = None) -> Subscription:
    samplings = samplings or (Sampling(temperature=0.0),)
    return client.submit([Submit(client.new_numbers(len(samplings)), [1, 2, 3], samplings, constraint)])


def tokens(client: EngineClient, number: int, *ids: int, **end: Any) -> None:
    client.receive(EngineEvents(tokens=[TokenEvent(number, token) for token in ids]))
    if end:
        client.receive(EngineEvents(tokens=[TokenEvent(number, None, **end)]))


async def taken(subscription: Subscription) -> list[int | None]:
    """The tokens of all that has come so far."""
    return [event.token for _, event in await subscription.take(0.0) if isinstance(event, TokenEvent)]


def test_an_answer_goes_on_in_the_next_engine_and_nothing_is_told_twice() -> None:
    async def story() -> list[int | None]:
        client = EngineClient()
        Wire(client)
        subscription = ask(client)
        tokens(client, 0, 5, 6)
        client.detach()
        after = Wire(client)
        tokens(client, 0, 7, finish="length")

        assert after.submits[0].emitted == ((5, 6),)
        assert len(client.live) == 0
        return await taken(subscription)

    assert asyncio.run(story()) == [5, 6, 7, None]


def test_an_answer_keeps_its_sampling_in_the_next_engine() -> None:
    client = EngineClient()
    before = Wire(client)
    ask(client, Sampling(seed=1), Sampling(seed=2))
    tokens(client, 0, 5)
    client.detach()
    after = Wire(client)

    assert after.submits[0].samplings == before.submits[0].samplings


def test_a_request_that_comes_while_no_engine_is_there_waits_for_one() -> None:
    client = EngineClient()
    subscription = ask(client)
    gone = ask(client)
    gone.cancel()
    engine = Wire(client)

    assert [submit.numbers for submit in engine.submits] == [(0,)]
    assert subscription.open == {0: 0}
    assert not any(isinstance(message, Cancel) for message in engine.heard)


def test_a_request_is_taken_once_though_two_engines_took_it() -> None:
    client = EngineClient()
    Wire(client)
    subscription = ask(client, constraint=RULE)
    client.receive(EngineEvents(outcomes=[SubmitOutcome(0)]))
    client.detach()
    Wire(client)
    client.receive(EngineEvents(outcomes=[SubmitOutcome(0)]))

    assert not subscription.unaccepted


def test_a_request_that_was_not_judged_before_is_judged_by_the_next_engine() -> None:
    async def story() -> None:
        client = EngineClient()
        Wire(client)
        subscription = ask(client, constraint=RULE)
        client.detach()
        Wire(client)
        assert subscription.unaccepted
        client.receive(EngineEvents(outcomes=[SubmitOutcome(0, "no such thing", "regex")]))
        await subscription.until_accepted()

    with pytest.raises(GrammarRejected, match="no such thing"):
        asyncio.run(story())


def test_the_culprit_gets_an_error_with_all_its_choices_and_its_neighbour_goes_on() -> None:
    async def story() -> None:
        client = EngineClient()
        culprit, neighbour = ask(client, Sampling(temperature=0.0), Sampling(temperature=0.0)), ask(client)
        for _ in range(2):
            Wire(client)
            client.detach()
        engine = Wire(client)
        tokens(client, 2, *range(PROOF_TOKENS))
        assert [submit.numbers for submit in engine.submits] == [(2,), (1,)]
        client.detach()
        for _ in range(2):
            engine = Wire(client)
            assert [submit.numbers for submit in engine.submits] == [(1,)]
            assert client.detach()  # of use: it tried one alone
        with pytest.raises(EngineDied, match="died 5 times"):
            await culprit.take(0.0)
        assert culprit.open == {}
        engine = Wire(client)
        tokens(client, 2, 99)
        assert [submit.numbers for submit in engine.submits] == [(2,)]
        assert await taken(neighbour) == [*range(PROOF_TOKENS), 99]

    asyncio.run(story())


def test_who_leaves_during_its_trial_lets_the_next_one_in() -> None:
    client = EngineClient()
    _, newest = ask(client), ask(client)
    for _ in range(2):
        Wire(client)
        client.detach()
    engine = Wire(client)
    newest.cancel()

    assert [submit.numbers for submit in engine.submits] == [(1,), (0,)]


def test_when_no_engine_will_come_everybody_is_told() -> None:
    async def story() -> None:
        client = EngineClient()
        Wire(client)
        subscriptions = [ask(client), ask(client, constraint=RULE)]
        client.detach()
        subscriptions.append(ask(client))
        client.fail_all(lambda: EngineDied("no more"))
        assert len(client.live) == 0
        for subscription in subscriptions:
            with pytest.raises(EngineDied, match="no more"):
                await subscription.take(0.0)
        with pytest.raises(EngineDied, match="no more"):
            await subscriptions[1].until_accepted()

    asyncio.run(story())


def test_an_engine_was_of_use_when_something_ended_got_on_or_was_found_out() -> None:
    client = EngineClient()
    Wire(client)
    ask(client, Sampling(temperature=0.0), Sampling(temperature=0.0), Sampling(temperature=0.0))
    tokens(client, 0, 1, finish="stop")
    uses = [client.detach()]
    uses.append(client.detach())  # one that was never ready
    Wire(client)
    tokens(client, 1, *range(PROOF_TOKENS))
    uses.append(client.detach())
    Wire(client)
    uses.append(client.detach())

    # Number 2 was in three engines by now, and in the last one alone.
    assert uses == [True, False, True, True]
