"""Who enters the next engine when, and who is blamed: no processes, only deaths."""

from __future__ import annotations

from weft.ipc.messages import PromptEvent, Sampling, Submit, Timings, TokenEvent, TokenLogprob
from weft.serving.in_flight import PROOF_TOKENS, InFlight
from weft.serving.subscription import Subscription

ROWS = 16


def roster_of(*sizes: int, sampling: Sampling | None = None) -> InFlight:
    """Requests with so many answers each; numbers are counted through from 0, prompts are [100], [101], …"""
    roster, number = InFlight(), 0
    for place, size in enumerate(sizes):
        numbers = tuple(range(number, number + size))
        number += size
        roster.add(Submit(numbers, [100 + place], (sampling or Sampling(seed=1),) * size), Subscription(size, lambda _: None))
    return roster


def enter(roster: InFlight) -> list[int]:
    """The numbers an engine gets now."""
    return [number for submit in roster.take_due(ROWS) for number in submit.numbers]


def say(roster: InFlight, number: int, count: int) -> None:
    for token in range(count):
        roster.inside[number].take(TokenEvent(number, token))


def test_a_sequence_goes_on_with_what_it_was_given() -> None:
    roster = roster_of(1, 3)
    first = roster.take_due(ROWS)
    say(roster, 2, 5)
    roster.drop(1)  # it has ended
    roster.died()

    again = roster.take_due(ROWS)

    assert [submit.given for submit in first] == [(), ()]
    assert [(submit.numbers, submit.prompt, submit.given) for submit in again] == [
        ((0,), [100], ()),
        ((2, 3), [101], ((0, 1, 2, 3, 4), ())),
    ]
    assert again[1].samplings == (Sampling(seed=1),) * 2


def test_all_but_answers_and_samplings_is_asked_for_as_before() -> None:
    roster = InFlight()
    asked = Submit((7,), [1, 2, 3], (Sampling(seed=1),), boundaries=(2,), salt="salt", is_retained=True)
    roster.add(asked, Subscription(1, lambda _: None))
    roster.take_due(ROWS)
    roster.died()

    assert roster.take_due(ROWS) == [asked]


def test_log_probabilities_of_the_prompt_are_asked_for_until_they_have_come() -> None:
    roster = roster_of(2, sampling=Sampling(seed=1, prompt_logprobs=0))
    roster.take_due(ROWS)
    roster.died()
    before = roster.take_due(ROWS)[0].samplings
    is_news = roster.inside[0].take_prompt(PromptEvent(0, 5, (TokenLogprob(1, -1.0),)))
    roster.died()
    after = [sampling for submit in (*roster.take_due(ROWS), *roster.take_due(ROWS)) for sampling in submit.samplings]

    assert is_news
    assert [sampling.prompt_logprobs for sampling in before] == [0, 0]
    assert [sampling.prompt_logprobs for sampling in after] == [None]  # one of the two: both are suspects by now


def test_what_a_later_engine_says_of_prompt_and_times_is_no_news() -> None:
    roster = roster_of(1)
    roster.take_due(ROWS)
    first = roster.inside[0].take(TokenEvent(0, 5, timings=Timings(submitted=9.0, first_token=9.5)))
    roster.died()
    roster.take_due(ROWS)
    later = roster.inside[0].take(TokenEvent(0, 6, finish="length", timings=Timings(submitted=1.0, first_token=1.5)))

    assert first.timings is not None
    assert (later.token, later.finish, later.timings) == (6, "length", None)
    assert not roster.inside[0].take_prompt(PromptEvent(0, 3))


def test_after_one_death_all_enter_together_and_after_two_one_at_a_time() -> None:
    roster = roster_of(1, 1, 2)
    entered = [enter(roster)]
    for _ in range(2):
        roster.died()
        entered.append(enter(roster))

    assert entered == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]
    assert enter(roster) == []


def test_the_next_suspect_enters_when_the_one_before_has_proved_itself_ended_or_left() -> None:
    roster = roster_of(1, 1, 1, 1)
    for _ in range(2):
        enter(roster)
        roster.died()
    order = enter(roster)
    say(roster, 0, PROOF_TOKENS - 1)
    order += enter(roster)
    assert order == [0]

    say(roster, 0, 1)
    order += enter(roster)
    roster.drop(1)
    order += enter(roster)
    roster.drop(2)
    order += enter(roster)

    assert order == [0, 1, 2, 3]


def test_the_culprit_alone_is_handed_out_at_its_third_death() -> None:
    roster = roster_of(*[1] * 8)
    culprit, deaths, blamed = 5, 0, None
    while blamed is None and deaths < 10:
        while entered := enter(roster):
            for number in entered:
                if number != culprit:
                    say(roster, number, 1 if deaths < 2 else PROOF_TOKENS)
            if culprit in roster.inside:
                break
        deaths += 1
        blamed = roster.died()

    assert blamed is not None
    assert (blamed.number, blamed.deaths, deaths) == (culprit, 3, 3)
    assert sorted(roster.waiting) == [0, 1, 2, 3, 4, 6, 7]
    assert not roster.inside


def test_innocents_that_proved_themselves_beside_the_culprit_are_no_suspects() -> None:
    roster = roster_of(1, 1)
    for _ in range(5):  # whatever kills these engines, it lets number 0 get on
        enter(roster)
        if 0 in roster.inside:
            say(roster, 0, PROOF_TOKENS)
        enter(roster)
        roster.died()

    assert roster.waiting[0].deaths == 1
    assert 1 not in roster.waiting


def test_new_requests_wait_until_every_suspect_was_tried() -> None:
    roster = roster_of(1, 1)
    for _ in range(2):
        enter(roster)
        roster.died()
    assert enter(roster) == [0]

    roster.add(Submit((2,), [9], (Sampling(seed=1),)), Subscription(1, lambda _: None))
    order = enter(roster)
    for suspect in (0, 1):
        say(roster, suspect, PROOF_TOKENS)
        order += enter(roster)

    assert order == [1, 2]


def test_a_new_request_that_kills_is_not_blamed_on_the_one_on_trial() -> None:
    roster = roster_of(1)
    for _ in range(2):
        enter(roster)
        roster.died()
    enter(roster)
    roster.add(Submit((1,), [9], (Sampling(seed=1),)), Subscription(1, lambda _: None))
    say(roster, 0, PROOF_TOKENS)
    enter(roster)

    assert roster.died() is None
    assert (roster.waiting[0].deaths, roster.waiting[1].deaths) == (1, 1)


def test_nobody_is_on_trial_while_the_rows_are_full() -> None:
    roster = roster_of(1, 1, 1)
    for _ in range(2):
        enter(roster)
        roster.died()
    roster.take_due(2)
    say(roster, 0, PROOF_TOKENS)
    roster.take_due(2)
    say(roster, 1, PROOF_TOKENS)

    assert roster.take_due(2) == []
    assert roster.died() is None
    assert sorted(roster.waiting) == [0, 1, 2]


def test_those_whom_no_engine_had_are_not_struck() -> None:
    roster = roster_of(1)
    for _ in range(5):
        roster.died()

    assert roster.waiting[0].deaths == 0


def test_who_leaves_while_no_engine_is_there_is_forgotten() -> None:
    roster = roster_of(1, 1)
    enter(roster)
    roster.died()
    roster.drop(0)

    assert enter(roster) == [1]
    assert len(roster) == 1
