"""Who enters the next engine when, and who is blamed: no processes, only deaths."""

from __future__ import annotations

from msgspec import structs

from weft.ipc.limits import Sampling
from weft.ipc.messages import DraftCounts, PromptEvent, Submit, Timings, TokenEvent, TokenLogprob
from weft.serving.in_flight import PROOF_TOKENS, InFlight, Subscription

ROWS = 16


def add(in_flight: InFlight, submit: Submit) -> None:
    in_flight.add(Subscription([submit], lambda _: None))


def in_flight_of(*sizes: int, sampling: Sampling | None = None) -> InFlight:
    """Requests with so many answers each; numbers are counted through from 0, prompts are [100], [101], …"""
    in_flight, number = InFlight(), 0
    for place, size in enumerate(sizes):
        numbers = tuple(range(number, number + size))
        number += size
        add(in_flight, Submit(numbers, [100 + place], (sampling or Sampling(temperature=0.0, seed=1),) * size))
    return in_flight


def enter(in_flight: InFlight) -> list[int]:
    """The numbers an engine gets now."""
    return [number for submit in in_flight.take_due(ROWS) for number in submit.numbers]


def say(in_flight: InFlight, number: int, count: int) -> None:
    for token in range(count):
        in_flight.inside[number].take_token(TokenEvent(number, token))


def test_a_sequence_goes_on_with_what_it_was_given() -> None:
    in_flight = in_flight_of(1, 3)
    first = in_flight.take_due(ROWS)
    say(in_flight, 2, 5)
    in_flight.drop(1)  # it has ended
    in_flight.take_dead()

    again = in_flight.take_due(ROWS)

    assert [submit.emitted for submit in first] == [(), ()]
    assert [(submit.numbers, submit.prompt, submit.emitted) for submit in again] == [
        ((0,), [100], ()),
        ((2, 3), [101], ((0, 1, 2, 3, 4), ())),
    ]
    assert again[1].samplings == (Sampling(temperature=0.0, seed=1),) * 2


def test_all_but_answers_and_samplings_is_asked_for_as_before() -> None:
    in_flight = InFlight()
    asked = Submit((7,), [1, 2, 3], (Sampling(temperature=0.0, seed=1),), boundaries=(2,), salt="salt", is_retained=True)
    asked = structs.replace(asked, prediction=(5, 6), speculate=False)
    add(in_flight, asked)
    in_flight.take_due(ROWS)
    in_flight.take_dead()

    assert in_flight.take_due(ROWS) == [asked]


def test_log_probabilities_of_the_prompt_are_asked_for_until_they_have_come() -> None:
    in_flight = in_flight_of(2, sampling=Sampling(temperature=0.0, seed=1, prompt_logprobs=0))
    in_flight.take_due(ROWS)
    in_flight.take_dead()
    before = in_flight.take_due(ROWS)[0].samplings
    is_news = in_flight.inside[0].take_prompt(PromptEvent(0, 5, (TokenLogprob(1, -1.0),)))
    in_flight.take_dead()
    after = [sampling for submit in (*in_flight.take_due(ROWS), *in_flight.take_due(ROWS)) for sampling in submit.samplings]

    assert is_news
    assert [sampling.prompt_logprobs for sampling in before] == [0, 0]
    assert [sampling.prompt_logprobs for sampling in after] == [None]  # one of the two: both are suspects by now


def test_what_a_later_engine_says_of_prompt_and_times_is_no_news() -> None:
    in_flight = in_flight_of(1)
    in_flight.take_due(ROWS)
    first = in_flight.inside[0].take_token(TokenEvent(0, 5, timings=Timings(submitted=9.0, first_token=9.5)))
    in_flight.take_dead()
    in_flight.take_due(ROWS)
    later = in_flight.inside[0].take_token(TokenEvent(0, 6, finish="length", timings=Timings(submitted=1.0, first_token=1.5)))

    assert first.timings is not None
    assert (later.token, later.finish, later.timings) == (6, "length", None)
    assert not in_flight.inside[0].take_prompt(PromptEvent(0, 3))


def test_of_a_later_engine_s_times_only_the_drafts_are_news() -> None:
    in_flight, drafts = in_flight_of(1), DraftCounts({"lookup": 4}, {"lookup": 3})
    in_flight.take_due(ROWS)
    in_flight.inside[0].take_token(TokenEvent(0, 5, timings=Timings(submitted=9.0, first_token=9.5, cached_tokens=2)))
    in_flight.take_dead()
    in_flight.take_due(ROWS)
    last = in_flight.inside[0].take_token(TokenEvent(0, 6, finish="length", timings=Timings(submitted=1.0, drafts=drafts)))

    assert last.timings == Timings(submitted=9.0, first_token=9.5, cached_tokens=2, drafts=drafts)


def test_after_one_death_all_enter_together_and_after_two_one_at_a_time() -> None:
    in_flight = in_flight_of(1, 1, 2)
    entered = [enter(in_flight)]
    for _ in range(2):
        in_flight.take_dead()
        entered.append(enter(in_flight))

    assert entered == [[0, 1, 2, 3], [0, 1, 2, 3], [3]]  # the newest first
    assert enter(in_flight) == []


def test_the_next_suspect_enters_when_the_one_before_has_proved_itself_ended_or_left() -> None:
    in_flight = in_flight_of(1, 1, 1, 1)
    for _ in range(2):
        enter(in_flight)
        in_flight.take_dead()
    order = enter(in_flight)
    say(in_flight, 3, PROOF_TOKENS - 1)
    order += enter(in_flight)
    assert order == [3]

    say(in_flight, 3, 1)
    order += enter(in_flight)
    in_flight.drop(2)
    order += enter(in_flight)
    in_flight.drop(1)
    order += enter(in_flight)

    assert order == [3, 2, 1, 0]


def test_the_culprit_is_handed_out_when_two_engines_died_with_it_alone() -> None:
    in_flight = in_flight_of(*[1] * 8)
    culprit, deaths, blamed = 5, 0, None
    while blamed is None and deaths < 10:
        while entered := enter(in_flight):
            for number in entered:
                if number != culprit:
                    say(in_flight, number, 1 if deaths < 2 else PROOF_TOKENS)
            if culprit in in_flight.inside:
                break
        deaths += 1
        blamed = in_flight.take_dead()

    assert blamed is not None
    assert (blamed.number, blamed.deaths_alone, deaths) == (culprit, 2, 4)  # twice among all; it had emitted least
    assert sorted(in_flight.waiting) == [0, 1, 2, 3, 4, 6, 7]
    assert not in_flight.inside


def test_innocents_that_proved_themselves_beside_the_culprit_are_no_suspects() -> None:
    in_flight = in_flight_of(1, 1)
    for _ in range(5):  # whatever kills these engines, it lets number 0 get on
        enter(in_flight)
        if 0 in in_flight.inside:
            say(in_flight, 0, PROOF_TOKENS)
        enter(in_flight)
        in_flight.take_dead()

    assert in_flight.waiting[0].deaths == 1
    assert 1 not in in_flight.waiting


def test_who_is_beside_others_is_not_blamed_however_often_engines_are_killed() -> None:
    in_flight = in_flight_of(1, 1, 1)
    for _ in range(20):  # killed from outside each time, when the first suspect has just proved itself
        order = enter(in_flight)
        if len(order) == 1:
            say(in_flight, order[0], PROOF_TOKENS)
            enter(in_flight)
        assert in_flight.take_dead() is None

    assert sorted(in_flight.waiting) == [0, 1, 2]


def test_one_that_proves_itself_after_a_death_alone_starts_anew() -> None:
    in_flight = in_flight_of(1)
    for _ in range(2):
        enter(in_flight)
        assert in_flight.take_dead() is None
    assert in_flight.waiting[0].deaths_alone == 2
    enter(in_flight)
    say(in_flight, 0, PROOF_TOKENS)

    assert in_flight.take_dead() is None
    assert (in_flight.waiting[0].deaths, in_flight.waiting[0].deaths_alone) == (1, 0)


def test_new_requests_wait_until_every_suspect_was_tried() -> None:
    in_flight = in_flight_of(1, 1)
    for _ in range(2):
        enter(in_flight)
        in_flight.take_dead()
    assert enter(in_flight) == [1]

    add(in_flight, Submit((2,), [9], (Sampling(temperature=0.0, seed=1),)))
    order = enter(in_flight)
    for suspect in (1, 0):
        say(in_flight, suspect, PROOF_TOKENS)
        order += enter(in_flight)

    assert order == [0, 2]


def test_a_new_request_that_kills_is_not_blamed_on_the_one_on_trial() -> None:
    in_flight = in_flight_of(1)
    for _ in range(2):
        enter(in_flight)
        in_flight.take_dead()
    enter(in_flight)
    add(in_flight, Submit((1,), [9], (Sampling(temperature=0.0, seed=1),)))
    say(in_flight, 0, PROOF_TOKENS)
    enter(in_flight)

    assert in_flight.take_dead() is None
    assert (in_flight.waiting[0].deaths, in_flight.waiting[1].deaths) == (1, 1)


def test_nobody_is_on_trial_while_the_rows_are_full() -> None:
    in_flight = in_flight_of(1, 1, 1)
    for _ in range(2):
        enter(in_flight)
        in_flight.take_dead()
    in_flight.take_due(2)
    say(in_flight, 2, PROOF_TOKENS)
    in_flight.take_due(2)
    say(in_flight, 1, PROOF_TOKENS)

    assert in_flight.take_due(2) == []
    assert in_flight.take_dead() is None
    assert sorted(in_flight.waiting) == [0, 1, 2]


def test_those_whom_no_engine_had_are_not_struck() -> None:
    in_flight = in_flight_of(1)
    for _ in range(5):
        in_flight.take_dead()

    assert in_flight.waiting[0].deaths == 0


def test_who_leaves_while_no_engine_is_there_is_forgotten() -> None:
    in_flight = in_flight_of(1, 1)
    enter(in_flight)
    in_flight.take_dead()
    in_flight.drop(0)

    assert enter(in_flight) == [1]
    assert len(in_flight) == 1
