"""Who is blamed for dead engines, for any course of deaths: only who was alone in enough of them without proving itself."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from thoroughness import ALL
from weft.ipc.limits import Sampling
from weft.ipc.messages import EngineEvents, Submit, TokenEvent
from weft.serving.in_flight import DEATHS_ALONE, KILLED_SHARE, PROOF_TOKENS, SUSPECT_DEATHS, EngineClient, Subscription

NUM_REQUESTS = 3
LIVES = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, NUM_REQUESTS - 1))), min_size=1, max_size=12)


def has_failed(subscription: Subscription) -> bool:
    """Whether a request was blamed; none of these ends otherwise."""
    return not subscription.open


@given(LIVES, st.booleans())
@settings(max_examples=2000 if ALL else 200)
def test_who_is_blamed_was_alone_in_enough_engines_and_had_not_proved_itself(
    lives: list[tuple[bool, set[int]]], is_lone: bool
) -> None:
    """Each life of an engine has who proves itself in it, and whether it ends by a crash or is killed from outside."""
    client = EngineClient()
    client.is_lone = is_lone
    numbers = client.new_numbers(NUM_REQUESTS)
    asked = {number: client.submit([Submit((number,), [1, 2], (Sampling(seed=1),))]) for number in numbers}
    deaths, alone, blamed = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0.0), set()
    for is_crash, proving in lives:
        client.attach(lambda _: None, 4)
        proved = set()
        while due := [number for number in client.live.inside if number in proving and number not in proved]:
            proved |= {*due}
            client.receive(EngineEvents(tokens=[TokenEvent(number, 7) for number in due for _ in range(PROOF_TOKENS)]))
        inside = set(client.live.inside)
        client.detach(is_crash=is_crash)
        for number in inside:
            share = 1.0 if is_crash or is_lone else KILLED_SHARE
            deaths[number] = 1 if number in proved else deaths[number] + 1
            alone[number] = 0.0 if number in proved else alone[number] + share * (len(inside) == 1)
        gone = {number for number in numbers if number not in blamed and has_failed(asked[number])}

        assert len(gone) <= 1
        assert all(deaths[one] > SUSPECT_DEATHS and alone[one] >= DEATHS_ALONE and one not in proved for one in gone)
        blamed |= gone


@given(st.lists(st.booleans(), min_size=1, max_size=3))
def test_one_of_several_replicas_blames_nobody_for_three_engines_that_were_killed(others: list[bool]) -> None:
    client = EngineClient()
    client.is_lone = False
    (number,) = client.new_numbers(1)
    subscription = client.submit([Submit((number,), [1, 2], (Sampling(seed=1),))])
    for _ in others:
        client.attach(lambda _: None, 4)
        client.detach(is_crash=False)

    assert not has_failed(subscription)
