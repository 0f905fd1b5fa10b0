"""Stop strings: found wherever the text is cut, held back no longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.ipc.limits import MAX_STOP_CHARACTERS, MAX_STOPS
from weft.text.stop_strings import StopFinder, StopMachine, overlap

LETTERS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def read(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All the text that was told, and the stop string that ended it."""
    finder, told = StopFinder(tuple(stops)), ""
    for piece in pieces:
        text, found = finder.feed(piece)
        told += text
        if found is not None:
            return told + finder.finish(), found
    return told + finder.finish(), None


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The same by looking at every beginning of the whole text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(STOPS, st.lists(LETTERS, max_size=8))
def test_however_the_text_is_cut_the_stop_that_is_complete_first_is_found(stops: list[str], pieces: list[str]) -> None:
    assert read(stops, pieces) == first_complete("".join(pieces), stops)


@settings(max_examples=200)
@given(STOPS, LETTERS)
def test_nothing_is_held_back_but_the_beginning_of_a_stop(stops: list[str], text: str) -> None:
    finder = StopFinder(tuple(stops))

    certain, found = finder.feed(text)

    if found is None:
        held = text.removeprefix(certain)
        assert certain + held == text
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "told", "found"),
    [
        (["STOP"], "onSTOPoff", "on", "STOP"),
        (["\n", "\n\n"], "a\n\nb", "a", "\n"),
        (["b", "ab"], "xab", "x", "ab"),
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["aab"], "aaaab", "aa", "aab"),
        (["STOP"], "STOSTOP", "STO", "STOP"),
        ([""], "all of it", "all of it", None),
    ],
)
def test_the_first_complete_stop_wins_and_of_those_that_end_together_the_longest(
    stops: list[str], text: str, told: str, found: str | None
) -> None:
    assert read(stops, [text]) == (told, found)
    assert read(stops, list(text)) == (told, found)


def test_a_stop_across_many_pieces_is_held_back_until_it_is_sure() -> None:
    finder = StopFinder(("</end>",))

    assert [finder.feed(piece) for piece in ("x<", "/e", "nd", "!")] == [("x", None), ("", None), ("", None), ("</end!", None)]
    assert [finder.feed(piece) for piece in ("y<", "/e", "nd", ">z")] == [("y", None), ("", None), ("", None), ("", "</end>")]


def test_what_was_held_back_is_told_at_the_end() -> None:
    finder = StopFinder(("STOP",))

    assert finder.feed("go STO") == ("go ", None)
    assert finder.finish() == "STO"
    assert finder.finish() == ""


def test_the_overlap_is_the_longest_and_never_the_whole() -> None:
    assert overlap("xaa", "aab") == 2
    assert overlap("aab", "aab") == 0
    assert overlap("", "aab") == 0


def test_a_letter_is_one_step_however_many_stops_there_are_and_however_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], StopMachine.step
    monkeypatch.setattr(StopMachine, "step", lambda *given: steps.append(given) or step(*given))
    finder = StopFinder(tuple("a" * (MAX_STOP_CHARACTERS - 1) + chr(ord("b") + index) for index in range(MAX_STOPS)))
    steps.clear()

    finder.feed("a" * 1000)

    assert len(steps) == 1000


def test_no_search_has_more_states_than_all_allowed_stops_have_letters() -> None:
    machine = StopMachine(tuple(f"{index:03d}" + "x" * (MAX_STOP_CHARACTERS - 3) for index in range(MAX_STOPS)))

    assert len(machine.edges) <= MAX_STOPS * MAX_STOP_CHARACTERS + 1
