"""Drafts that are looked up: the longest earlier match, its continuation, the prediction, and what costs no second search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine import lookup
from weft.engine.lookup import MAX_CANDIDATES, SURE_MATCH, LookUp

FILE = list(range(100, 200))


def test_what_followed_the_last_tokens_in_the_prompt_is_drafted() -> None:
    assert LookUp(FILE).draft([7, *FILE[20:26]], 4) == (FILE[26:30], False)


def test_what_followed_the_last_tokens_in_the_answer_is_drafted() -> None:
    assert LookUp([1, 2]).draft([*FILE[:30], 7, *FILE[:5]], 4) == (FILE[5:9], False)


def test_the_end_of_the_prompt_counts_before_anything_is_emitted() -> None:
    assert LookUp([*FILE, *FILE[40:46]]).draft([], 3) == (FILE[46:49], False)


@pytest.mark.parametrize(("matched", "drafted"), [(0, 0), (2, 0), (3, 2), (4, 3), (5, 7), (9, 7)])
def test_a_longer_match_drafts_more(matched: int, drafted: int) -> None:
    assert len(LookUp(FILE).draft([7, *FILE[20 : 20 + matched]], 7)[0]) == drafted


def test_the_longest_match_wins_over_a_later_one() -> None:
    prompt = [1, 2, 3, 4, 5, 50, 9, 2, 3, 4, 5, 60, 8, 3, 4, 5, 70, 6]

    assert LookUp(prompt).draft([1, 2, 3, 4, 5], 1)[0] == [50]
    assert LookUp(prompt).draft([0, 2, 3, 4, 5], 1)[0] == [60]


def test_of_equally_long_matches_the_latest_wins() -> None:
    assert LookUp([1, 2, 3, 50, 9, 1, 2, 3, 60, 8]).draft([7, 1, 2, 3], 1)[0] == [60]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_repetition_that_reaches_its_own_end_goes_on(period: int) -> None:
    text = FILE[:period] * 12
    drafted, _ = LookUp([1]).draft(text, 7)

    assert drafted == (FILE[:period] * 20)[len(text) % period :][:7]


@given(st.lists(st.integers(0, 2), min_size=3, max_size=60), st.integers(0, 60))
def test_a_draft_is_what_followed_a_longest_match(text: list[int], cut: int) -> None:
    drafted, _ = LookUp(text[:cut]).draft(text[cut:], 1)
    matches: dict[int, set[int]] = {}
    for place in range(3, len(text)):
        matched = next((n for n in range(place) if text[place - 1 - n] != text[-1 - n]), place)
        matches.setdefault(min(matched, lookup.MAX_MATCH), set()).add(place)
    best = max((n for n in matches if n >= 3), default=0)
    is_complete = sum(text[place - 3 : place] == text[-3:] for place in range(3, len(text))) < MAX_CANDIDATES

    assert bool(drafted) == bool(best)
    if best and is_complete:
        assert drafted[0] == text[max(matches[best])]


@given(st.data())
def test_drafts_do_not_depend_on_how_the_output_arrived_while_nothing_matches_twice(data: st.DataObject) -> None:
    output = data.draw(st.permutations(FILE[:40]))  # each token once: copies are from the prompt only
    cuts = sorted(data.draw(st.sets(st.integers(0, 40))))
    growing = LookUp(FILE)
    for cut in cuts:
        growing.draft(output[:cut], 7)

    assert growing.draft(output, 7) == LookUp(FILE).draft(output, 7)


def test_a_copy_goes_on_at_its_place_without_another_search() -> None:
    prompt = [1, *FILE, 50, 2, *FILE, 60, 3]  # a search that compares 32 tokens finds the second
    found = LookUp(prompt)
    assert found.draft([1, *FILE[:3]], 7) == (FILE[3:6], False)

    assert found.draft([1, *FILE[:10]], 7) == (FILE[10:17], False)
    assert found.draft([1, *FILE[:10]], 2) == (FILE[10:12], False)  # asked again
    assert found.draft([1, *FILE], 1) == ([50], False)
    assert LookUp(prompt).draft([1, *FILE], 1) == ([60], False)


def test_a_copy_that_the_answer_leaves_is_given_up() -> None:
    found = LookUp(FILE)
    assert found.draft(FILE[20:26], 7)[0] == FILE[26:33]

    assert found.draft([*FILE[20:28], 7], 7) == ([], False)
    assert found.draft([*FILE[20:28], 7, *FILE[60:66]], 2) == (FILE[66:68], False)


def test_after_a_restart_the_shorter_output_is_read_anew() -> None:
    found = LookUp(FILE)
    found.draft([*FILE[20:26], 7, 8, 9, 55, 7, 8, 9], 7)

    assert found.draft([1, 7, 8, 9], 7) == ([], False)  # what followed them was taken back
    assert found.draft([1, 7, 8, 9, *FILE[50:56]], 2) == (FILE[56:58], False)


def test_the_answer_s_beginning_is_drafted_from_the_prediction() -> None:
    found = LookUp([1, 2, 3], prediction=FILE)

    assert found.draft([], 7) == (FILE[:7], True)
    assert found.draft(FILE[:1], 7) == (FILE[1:8], True)
    assert LookUp([1, 2, 3], prediction=FILE).draft(FILE[:2], 7) == (FILE[2:9], True)


def test_after_a_change_the_prediction_is_matched_like_any_text() -> None:
    found = LookUp([1, 2, 3], prediction=FILE)
    found.draft(FILE[:10], 7)

    assert found.draft([*FILE[:10], 7], 7) == ([], False)
    assert found.draft([*FILE[:10], 7, *FILE[11:14]], 7) == (FILE[14:16], True)


def test_of_equally_long_matches_the_prediction_s_wins() -> None:
    prompt, prediction, answer = [1, 2, 3, 4, 50, 9], [0, 2, 3, 4, 60, 9], [7, 8, 2, 3, 4]

    assert LookUp(prompt, prediction).draft(answer, 1) == ([60], True)
    assert LookUp(prompt, prediction).draft([*answer[:1], 1, 2, 3, 4], 1) == ([50], False)


def test_behind_the_end_of_the_prediction_other_text_is_copied() -> None:
    found = LookUp(FILE, prediction=FILE[:50])

    assert found.draft(FILE[:45], 7) == (FILE[45:50], True)
    assert found.draft(FILE[:50], 7) == (FILE[50:57], False)


def test_a_prediction_is_restarted_with_the_answer() -> None:
    found = LookUp([1, 2, 3], prediction=FILE)
    found.draft([*FILE[:10], 7, 8], 7)

    assert found.draft(FILE[:4], 7) == (FILE[4:11], True)


def test_a_very_long_prompt_is_indexed_over_several_calls() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(1 << 30) for _ in range(2 * lookup.INDEXED_PER_CALL + 100)]
    answer = [7, *prompt[-50:-40]]
    found = LookUp(prompt)

    assert [bool(found.draft(answer, 7)[0]) for _ in range(3)] == [False, False, True]


def test_nothing_is_found_in_nothing() -> None:
    assert LookUp([]).draft([], 7) == ([], False)
    assert LookUp([1]).draft([1], 7) == ([], False)
    assert LookUp(FILE).draft(FILE[: SURE_MATCH + 3], 0) == ([], False)
