"""Calls without marks, calls that were cut and what comes after required ones: what is a call, and what is text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import accepts, form, ids, vocabulary
from written import EXAMPLES, FAMILY, TOOLS, calls, read, reader, texts, write

from weft.text.tools import ToolSelection
from weft.text.types import CallArguments, CallClosed, CallOpened, Text

BARE = [name for name, family in FAMILY.items() if family.has_bare_calls]
MARKED = [name for name, family in FAMILY.items() if not family.has_bare_calls and not family.is_anchored]
PARIS: tuple[str, Any] = ("get_weather", {"city": 'Pa}ri"s`', "days": 3})
OBJECT = {"name": PARIS[0], "arguments": PARIS[1]}
COMPACT, SPACED = json.dumps(OBJECT, separators=(",", ":")), json.dumps(OBJECT, indent=2)
WRITTEN = [
    COMPACT,
    SPACED,
    f"\n\n{SPACED}\n",
    f"```json\n{SPACED}\n```",
    f"```\n{COMPACT}\n```\n",
    f" ```json\n{COMPACT}\n{SPACED}```",
    f"{COMPACT}\n{SPACED}",
    f"```json\n{COMPACT}\n```\n\n```json\n{COMPACT}\n```",
]


def test_the_families_with_bare_calls_are_those_that_put_name_and_arguments_into_one_object_between_marks() -> None:
    assert {"hermes", "mistral-list", "phi", "gigachat3.1", "nemotron"} <= {*BARE}
    assert not {"qwen-xml", "glm", "mistral", "llama3", "json", "harmony", "kimi-k2", "pythonic"} & {*BARE}


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("name", BARE)
def test_a_bare_call_is_read_in_any_cutting_and_its_fence_is_no_text(name: str, text: str) -> None:
    whole = read(FAMILY[name], [text], reads_bare=True)

    assert calls(whole) == [PARIS] * text.count("get_weather")
    assert texts(whole) == ""
    for place in range(len(text)):
        assert read(FAMILY[name], [text[:place], text[place:]], reads_bare=True) == whole
    assert read(FAMILY[name], list(text), reads_bare=True) == whole


@pytest.mark.parametrize("text", WRITTEN)
def test_text_after_a_bare_call_is_kept_and_marked_calls_too(text: str) -> None:
    marked = write(FAMILY["hermes"], [("list-all", {})])
    deltas = read(FAMILY["hermes"], list(f"{text}\nThat is it. {marked} Bye."), reads_bare=True)

    assert calls(deltas) == [*([PARIS] * text.count("get_weather")), ("list-all", {})]
    assert texts(deltas) == "That is it.Bye."


NO_CALLS = [
    f"Here: {COMPACT}",  # not at the start
    f"`{COMPACT}`",
    f"```python\n{COMPACT}\n```",
    f"[{COMPACT}]",
    COMPACT.replace("get_weather", "nobody"),
    COMPACT.replace("arguments", "parameters"),
    COMPACT[:-1] + ', "more": 1}',
    COMPACT[:-1] + "]",
    COMPACT.replace("3", "three"),
    COMPACT.replace("3", "NaN"),
    '{"name": "get_weather", "arguments": "{}"}',
    '{"name": "get_weather", "arguments": []}',
    '{"arguments": {}, "name": "get_weather"}',
    '{"name": "get_weather"}',
    COMPACT[:-1],  # the model ended it there
    COMPACT[:-9],
    "```json\n{}\n```",
    "``",
    "{",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_not_the_whole_object_of_an_offered_tool_at_the_start_is_text_to_the_letter(text: str) -> None:
    for name in BARE:
        for pieces in ([text], list(text)):
            assert read(FAMILY[name], pieces, reads_bare=True) == [Text(text)]


@pytest.mark.parametrize("name", MARKED)
def test_families_whose_calls_are_no_json_objects_read_none(name: str) -> None:
    if not FAMILY[name].is_harmony:
        assert read(FAMILY[name], [COMPACT], reads_bare=True) == [Text(COMPACT)]


def test_a_bare_call_is_text_where_an_answer_of_its_form_was_asked_for() -> None:
    assert read(FAMILY["hermes"], [COMPACT], reads_bare=False) == [Text(COMPACT)]


def test_text_is_held_back_only_while_it_may_be_a_bare_call() -> None:
    for begin, letter in [
        ("", "H"),
        ("{", "x"),
        ('{"name"', ";"),
        ("```", "p"),
        ("```json\n{", "}"),
        ('{"name": "get_weather", ', "x"),
    ]:
        one = reader(FAMILY["hermes"], reads_bare=True)
        assert one.feed(begin) == []
        assert one.feed(letter) == [Text(begin + letter)]
        assert one.feed("{") == [Text("{")]


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", BARE)
def test_a_bare_call_is_held_to_its_schema_and_no_other_text_is(name: str, kind: str) -> None:
    compiler = vocabulary(kind)
    auto = form(name, compiler).grammar(ToolSelection("auto", TOOLS))
    single = form(name, compiler).grammar(ToolSelection("auto", TOOLS, is_parallel=False))
    plain = COMPACT.replace("`", "")
    assert auto is not None
    assert single is not None

    several = (f"{plain}\n{plain}", f"{plain} Bye. {plain}")
    for text in (plain, f"```json\n{json.dumps(OBJECT, indent=2)}\n```"):
        assert accepts(compiler, auto, text)
    for text in several:
        assert accepts(compiler, auto, text) == (FAMILY[name].between is not None)
    for text in (plain, f"```json\n{plain}\n```"):
        assert accepts(compiler, single, text)
    assert not accepts(compiler, single, f"{plain}\n{plain}")
    for wrong in (plain.replace("3", "99"), plain.replace("days", "day"), plain.replace("3", '"x"')):
        assert not accepts(compiler, auto, wrong)
        assert accepts(compiler, auto, f"See: {wrong}")
        assert accepts(compiler, auto, wrong.replace("get_weather", "nobody"))
    for text in (text for text in NO_CALLS if "get_weather" not in text or not text.lstrip("`json\n ").startswith('{"name"')):
        assert accepts(compiler, auto, text), text


ENDED = [name for name, family in FAMILY.items() if not family.is_harmony]


@pytest.mark.parametrize("name", FAMILY)
def test_a_call_that_was_cut_anywhere_is_no_text(name: str) -> None:
    text, called = EXAMPLES[name]
    for end in range(1, len(text) + 1):
        for is_required in (False, True):
            deltas = (
                read(FAMILY[name], [text[:end]], is_cut=True, is_required=is_required)
                if not FAMILY[name].is_harmony
                else read(FAMILY[name], [text[:end]], is_cut=True)
            )
            assert texts(deltas) == "", text[:end]
            assert calls(deltas) == called[: len(calls(deltas))]
            assert deltas == read(FAMILY[name], list(text[:end]), is_cut=True)


@pytest.mark.parametrize("text", WRITTEN)
def test_a_bare_call_that_was_cut_anywhere_is_no_text_and_its_arguments_so_far_are_given(text: str) -> None:
    closed = False
    for end in range(1, len(text) + 1):
        deltas = read(FAMILY["hermes"], [text[:end]], is_cut=True, reads_bare=True)
        assert texts(deltas).strip() == "", text[:end]
        assert deltas == read(FAMILY["hermes"], list(text[:end]), is_cut=True, reads_bare=True)
        if '"city"' in text[:end]:
            assert isinstance(deltas[0], CallOpened)
            assert isinstance(deltas[1], CallArguments)
        closed |= any(isinstance(delta, CallClosed) for delta in deltas)
    assert closed


@pytest.mark.parametrize("name", ENDED)
def test_what_a_cut_answer_says_before_is_kept(name: str) -> None:
    for text in ("Let me see.", "See {it} [now].", "a\n\n"):
        assert texts(read(FAMILY[name], [text], is_cut=True)) == text


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", [name for name in ENDED if FAMILY[name].between is not None])
def test_after_a_required_call_the_model_may_end_break_the_line_speak_or_call_again(name: str, kind: str) -> None:
    compiler, family = vocabulary(kind), FAMILY[name]
    spec = form(name, compiler).grammar(ToolSelection("required", TOOLS))
    one, two = (write(family, [("list-all", {})] * count) for count in (1, 2))
    assert spec is not None

    assert accepts(compiler, spec, one)
    assert accepts(compiler, spec, two)
    if not family.end:
        for more in ("\n", "\n\n", "\nThe weather is", " and so on", "\n```", "Done."):
            assert accepts(compiler, spec, one + more), more
        assert accepts(compiler, spec, f"{one}\n\n{one}\n")
        matcher = compiler.compile(spec)
        for token in ids(compiler, f"{one}\n"):
            matcher.accept(token)
        assert matcher.mask().sum() > 1000


@pytest.mark.parametrize("name", [name for name in ENDED if FAMILY[name].between is not None and not FAMILY[name].end])
@given(places=st.lists(st.integers(0, 300), max_size=6))
@settings(max_examples=20)
def test_a_required_answer_is_over_at_the_first_word_that_begins_no_call(name: str, places: list[int]) -> None:
    text, called = EXAMPLES[name]
    whole = f"\n{text}\n\nThe weather {text}"
    bounds = [0, *sorted(place % len(whole) for place in places), len(whole)]
    one = reader(FAMILY[name], is_required=True)
    deltas: list[Any] = []
    for start, end in pairwise(bounds):
        deltas += one.feed(whole[start:end])
        assert one.is_over == (end > whole.index("The weather")), whole[:end]

    assert calls(deltas) == called
    assert texts(deltas) == ""
    assert texts(one.finish()) == ""


def test_an_answer_in_which_no_call_is_required_is_never_over() -> None:
    for name in ENDED:
        one = reader(FAMILY[name])
        one.feed(EXAMPLES[name][0] + "\nThe weather is fine.")
        assert not one.is_over
