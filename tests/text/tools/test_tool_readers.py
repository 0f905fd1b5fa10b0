"""Calls are read as they come: the same however the text is cut, nothing lost, nothing closed that is not valid."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import ALL, EXAMPLES, FAMILY, PARIS, calls, function, joined, read, reader, texts, write

from weft.text.tools import read_tools
from weft.text.tools.arguments import Tags
from weft.text.types import CallArguments, CallClosed, CallOpened, Reasoning, Text

ANNOUNCED = [name for name, family in FAMILY.items() if not family.is_anchored and not family.is_harmony]


def cut(text: str, places: list[int]) -> list[str]:
    """A text in pieces."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)
WORDS = st.sampled_from("ab <[{'\"\n|｜/>é🙂")  # what markup is made of, but no markup


def test_every_family_has_an_example() -> None:
    assert EXAMPLES.keys() == FAMILY.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_read_as_the_family_writes_them(name: str) -> None:
    text, called = EXAMPLES[name]
    deltas = read(FAMILY[name], [text])

    assert calls(deltas) == called
    assert texts(deltas) == ""
    assert [delta.index for delta in deltas if isinstance(delta, CallOpened)] == list(range(len(called)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_cutting_of_an_example_gives_the_same(name: str) -> None:
    text = EXAMPLES[name][0] + "\n\nBye."
    whole = read(FAMILY[name], [text])

    assert read(FAMILY[name], list(text)) == whole
    for place in range(len(text)):
        assert read(FAMILY[name], [text[:place], text[place:]]) == whole


@pytest.mark.parametrize("name", ANNOUNCED)
def test_text_around_calls_is_kept_and_white_space_at_them_is_not(name: str) -> None:
    text, called = EXAMPLES[name]
    deltas = read(FAMILY[name], list(f"Let me see.\n\n{text}\n\nThat was it.\n"))

    assert calls(deltas) == called
    assert texts(deltas) == "Let me see.That was it.\n"
    assert isinstance(deltas[0], Text)


ELEMENTS = {
    "text": ("<b>]<]minimax", {"type": "string"}, "<b>]<]minimax"),
    "looks like a number": ("5", {"type": "string"}, "5"),
    "number": ("1.50", {"type": "number"}, 1.5),
    "nothing or text": ("null", {"type": ["string", "null"]}, None),
    "text or number": ("[5]", {"type": ["string", "integer"]}, "[5]"),
    "number or text": ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
    "a listed text": ("5", {"enum": ["5", 6]}, "5"),
    "no items": ("", {"type": "array"}, []),
    "no fields": ("", {"type": "object"}, {}),
    "items": ("⟦item⟧a b⟦/item⟧⟦item⟧7⟦/item⟧", {"type": "array", "items": {"type": "string"}}, ["a b", "7"]),
    "fields": (
        "⟦x⟧⟦x⟧1⟦/x⟧⟦/x⟧⟦item⟧7⟦/item⟧",
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}, "item": {"type": "string"}}},
        {"x": {"x": 1}, "item": "7"},
    ),
    "whatever it is": ("⟦item⟧⟦a⟧true⟦/a⟧⟦/item⟧⟦item⟧it is⟦/item⟧", {}, [{"a": True}, "it is"]),
    "one of two": (
        "⟦item⟧3⟦/item⟧",
        {"anyOf": [{"type": "object", "properties": {"item": {"type": "integer"}}}, {"type": "string"}]},
        {"item": 3},
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_what_nested_elements_are_says_the_schema(name: str) -> None:
    mark = "]<]minimax[>["
    content, schema, value = ELEMENTS[name]
    known = {"X": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    tools = read_tools([function("f", {"type": "object", "properties": {"v": schema}, "$defs": known})])
    inner = content.replace("⟦", f"{mark}<").replace("⟧", ">")
    text = f'{mark}<tool_call>\n{mark}<invoke name="f">{mark}<v>{inner}{mark}</v>{mark}</invoke>\n{mark}</tool_call>'

    assert calls(read(FAMILY["minimax-m3"], [text], tools)) == [("f", {"v": value})]
    assert read(FAMILY["minimax-m3"], list(text), tools) == read(FAMILY["minimax-m3"], [text], tools)


VALUES = {
    "city": st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    "days": st.integers(),
    "wet": st.booleans(),
    "tags": st.lists(st.text("ab\"'\\\n{}[]é🙂", max_size=6), max_size=3),
    "at": st.fixed_dictionaries({"x": st.floats(allow_nan=False, allow_infinity=False) | st.integers()}),
    "note": st.none() | st.text("nul\n", max_size=6).filter(lambda text: text != "null"),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)


def is_writable(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the notation can say it: what stands in tags or in quotes of several letters escapes nothing."""
    notation = FAMILY[name].notation
    marks = [notation.close.strip()] if isinstance(notation, Tags) else getattr(notation, "quotes", ())
    written = "\0".join(value for value in arguments.values() if isinstance(value, str))
    nested = json.dumps(arguments.get("tags", []), ensure_ascii=False)
    typed_null = isinstance(notation, Tags) and notation.types[0] == "" and arguments.get("note", 0) is None
    clean = all(mark not in written + nested for mark in marks if len(mark) > 1)
    return clean and (
        typed_null or arguments.get("note", "") is not None or not isinstance(notation, Tags) or bool(notation.types[0])
    )


@pytest.mark.parametrize("name", FAMILY)
@given(data=st.data())
@settings(max_examples=25)
def test_any_arguments_come_back_from_any_cutting(name: str, data: st.DataObject) -> None:
    arguments = data.draw(ARGUMENTS.filter(lambda one: is_writable(name, one)))
    called = [("get_weather", arguments), *([ALL] if FAMILY[name].between is not None else [])]
    text = write(FAMILY[name], called)
    deltas = read(FAMILY[name], cut(text, data.draw(CUTS)))

    assert calls(deltas) == called
    assert texts(deltas) == ""


@pytest.mark.parametrize("name", FAMILY)
@given(data=st.data())
@settings(max_examples=40)
def test_whatever_a_model_writes_is_read_the_same_in_any_cutting(name: str, data: st.DataObject) -> None:
    family = FAMILY[name]
    example = EXAMPLES[name][0]
    scraps = [*cut(example, [7, 15, 23, 31, 40, 55, 80, 111]), family.trigger, family.tail, family.end, "get_weather", "nobody"]
    scraps += [
        ' , "id": 3',
        '{"city": "P"}',
        '"',
        "\\",
        "\n",
        "}",
        "<",
        "</",
        "'",
        "null",
        "[1, 2]",
        "<|end|>",
        "text",
        " ",
        example,
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=10)))
    deltas = read(family, cut(text, data.draw(CUTS)))

    assert deltas == read(family, [text])
    opened = [delta.index for delta in deltas if isinstance(delta, CallOpened)]
    assert opened == list(range(len(opened)))
    assert all(isinstance(arguments, dict) for _, arguments in calls(deltas))
    letters = iter(text)
    assert all(letter in letters for letter in texts(deltas))  # nothing is invented, and all keeps its order
    if not opened and not family.is_harmony:
        assert texts(deltas) == text


def talk(name: str, words: list[str], called: list[tuple[str, Any]]) -> tuple[str, str]:
    """An answer of words and calls in turn as the family writes it, and what of it is text."""
    family = FAMILY[name]
    if family.is_harmony:
        channels = [f"<|channel|>commentary<|message|>{word}<|end|><|start|>assistant" for word in words[:1]]
        return "".join(channels) + write(family, called[:1]) + "<|call|>", words[0]
    if family.is_anchored:
        return write(family, called[:1]) + words[0], words[0].lstrip()
    written = [write(family, [one]) for one in called] + [""]
    text = "".join(word + call for word, call in zip(words, written, strict=True))
    # White space beside calls goes with the markup.
    first, *middle, last = words
    return text, "".join([first.rstrip(), *(word.strip() for word in middle), last.lstrip()])


@pytest.mark.parametrize("name", FAMILY)
@given(data=st.data())
@settings(max_examples=25)
def test_of_words_and_calls_in_turn_nothing_is_lost_and_no_markup_is_told(name: str, data: st.DataObject) -> None:
    called = data.draw(st.lists(ARGUMENTS.filter(lambda one: is_writable(name, one)), min_size=1, max_size=3))
    words = data.draw(st.lists(st.text(WORDS, max_size=12), min_size=len(called) + 1, max_size=len(called) + 1))
    text, said = talk(name, words, [("get_weather", arguments) for arguments in called])
    deltas = read(FAMILY[name], cut(text, data.draw(CUTS)))

    is_single = FAMILY[name].is_anchored or FAMILY[name].is_harmony
    assert [arguments for _, arguments in calls(deltas)] == (called[:1] if is_single else called)
    assert texts(deltas) == said


def test_arguments_in_json_stream_letter_by_letter() -> None:
    one = reader(FAMILY["hermes"])
    one.feed('<tool_call>\n{"name": "get_weather", "arguments": ')

    assert [one.feed(letter) for letter in '{"c'] == [
        [CallOpened(0, "id0", "get_weather"), CallArguments(0, "{")],
        [CallArguments(0, '"')],
        [CallArguments(0, "c")],
    ]


@pytest.mark.parametrize(
    ("name", "head", "quote"),
    [
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\n", '"'),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>", '"'),
        ("lfm2", "<|tool_call_start|>[get_weather(city='", ""),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>', ""),
    ],
)
def test_a_text_streams_as_it_is_written(name: str, head: str, quote: str) -> None:
    one = reader(FAMILY[name])
    opened = one.feed(head)

    assert opened[0] == CallOpened(0, "id0", "get_weather")
    assert one.feed("Par") == [CallArguments(0, quote + "Par")]
    assert one.feed('i"s') == [CallArguments(0, 'i\\"s')]


def test_a_text_that_may_be_null_streams_once_it_can_not_be() -> None:
    one = reader(FAMILY["glm"])
    one.feed("<tool_call>get_weather\n<arg_key>note</arg_key>\n<arg_value>")

    assert one.feed("nu") == []
    assert one.feed("t") == [CallArguments(0, '"nut')]


def test_plain_text_is_told_at_once() -> None:
    one = reader(FAMILY["hermes"])

    assert one.feed("Hello") == [Text("Hello")]
    assert one.feed(" a <b>") == [Text(" a <b>")]
    assert one.feed(" <tool") == []
    assert one.feed("box>") == [Text(" <toolbox>")]


@pytest.mark.parametrize("name", FAMILY)
def test_a_function_nobody_offered_is_text(name: str) -> None:
    text = EXAMPLES[name][0].replace("get_weather", "get_rich").replace("list-all", "get_all")

    deltas = read(FAMILY[name], list(text))
    assert texts(deltas) == text
    assert len(deltas) == 1


@pytest.mark.parametrize("name", FAMILY)
def test_a_call_that_is_cut_stays_open_with_what_there_is(name: str) -> None:
    text = write(FAMILY[name], [PARIS])
    opened, said, *_ = read(FAMILY[name], [text])
    assert isinstance(said, CallArguments)

    assert read(FAMILY[name], list(text.partition("ris")[0])) == [opened, CallArguments(0, said.text.partition("ris")[0])]


def test_a_call_cut_behind_its_arguments_is_complete() -> None:
    text = '<tool_call>\n{"name": "list-all", "arguments": {}'

    assert read(FAMILY["hermes"], [text])[-1] == CallClosed(0)
    assert read(FAMILY["hermes"], [text + "}\n</tool"]) == read(FAMILY["hermes"], [text])


@pytest.mark.parametrize(
    "broken", ['{"city": Paris}', '{"city" "Paris"}', '{"days": NaN}', '{"days": 3]', '{"a": "\x01"}', "{'a': 1}"]
)
def test_arguments_that_are_no_json_are_never_closed(broken: str) -> None:
    deltas = read(FAMILY["hermes"], list(f'<tool_call>\n{{"name": "get_weather", "arguments": {broken}}}\n</tool_call> So.'))

    assert calls(deltas) == []
    assert any(isinstance(delta, CallOpened) for delta in deltas)
    assert "So." in "".join(delta.text for delta in deltas if isinstance(delta, Text | CallArguments))


def test_tags_in_the_wrong_place_leave_the_call_open_and_become_text() -> None:
    deltas = read(FAMILY["qwen-xml"], list("<tool_call>\n<function=get_weather>\n<oops>x</oops>\n</function>\n</tool_call>"))

    assert deltas == [CallOpened(0, "id0", "get_weather"), Text("<oops>x</oops>\n</function>\n</tool_call>")]


def test_a_closing_tag_within_a_json_string_closes_nothing() -> None:
    text = '<tool_call>\n<function=get_weather>\n<parameter=tags>\n["</parameter>", "b"]\n</parameter>\n</function>\n</tool_call>'

    assert calls(read(FAMILY["qwen-xml"], list(text))) == [("get_weather", {"tags": ["</parameter>", "b"]})]


def test_values_are_what_the_schema_says_they_are() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {}, "c": {"type": "boolean"}, "d": {"type": "array"}},
    }
    tags = {"a": "007", "b": "007", "c": "True", "d": "['x', None]", "e": "hello"}
    text = "<tool_call>f" + "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in tags.items())

    deltas = read(FAMILY["glm"], [text + "</tool_call>"], read_tools([function("f", schema)]))
    assert calls(deltas) == [("f", {"a": "007", "b": "007", "c": True, "d": ["x", None], "e": "hello"})]


def test_ids_that_the_model_gives_are_kept() -> None:
    assert read(FAMILY["kimi-k2"], [EXAMPLES["kimi-k2"][0]])[0] == CallOpened(0, "functions.get_weather:0", "get_weather")
    assert read(FAMILY["mistral-ids"], [EXAMPLES["mistral-ids"][0]])[0] == CallOpened(0, "aB3dE5gH7", "get_weather")


def test_an_id_that_the_model_gives_twice_is_kept_once() -> None:
    deltas = read(FAMILY["mistral-ids"], [EXAMPLES["mistral-ids"][0] * 2])

    assert [delta.id for delta in deltas if isinstance(delta, CallOpened)] == ["aB3dE5gH7", "id0"]


@pytest.mark.parametrize("rest", ["}", " }", ', "id": "x}y"}', '\n , "more": {"a": [1]}\n}'])
def test_what_else_is_in_the_object_of_a_call_says_nothing(rest: str) -> None:
    text = '<tool_call>\n{"name": "list-all", "arguments": {}' + rest + "\n</tool_call> So."

    assert read(FAMILY["hermes"], list(text)) == read(FAMILY["hermes"], [text])
    assert calls(read(FAMILY["hermes"], list(text))) == [ALL]
    assert texts(read(FAMILY["hermes"], list(text))) == "So."


def test_an_answer_that_does_not_begin_with_a_call_has_none_where_calls_are_not_announced() -> None:
    text = 'Like this: {"name": "get_weather", "parameters": {"city": "Paris"}}'

    assert read(FAMILY["llama3"], list(text)) == [Text(text)]
    assert read(FAMILY["llama3"], list('{"name": "Ada"}')) == [Text('{"name": "Ada"}')]


def test_channels_are_thinking_words_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Need <b>data</b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    )

    assert read(FAMILY["harmony"], list(text)) == [
        Reasoning("Need <b>data</b>."),
        Text("I look."),
        CallOpened(0, "id0", "get_weather"),
        CallArguments(0, '{"city": "Paris"}'),
        CallClosed(0),
    ]


def test_channels_are_read_without_tools_and_as_they_come() -> None:
    one = reader(FAMILY["harmony"], ())

    assert one.feed("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert one.is_reasoning  # type: ignore[union-attr]
    assert one.feed("<|end|><|start|>assistant<|channel|>final<|message|>Good") == [Text("Good")]
    assert one.feed(" day <") == [Text(" day ")]
    assert one.finish() == [Text("<")]


def test_what_is_thought_to_a_stranger_is_text() -> None:
    text = "<|channel|>analysis to=functions.nobody<|message|>print(1)"

    assert read(FAMILY["harmony"], list(text)) == [Text(text)]


def test_an_escape_cut_in_two_is_one_escape_in_a_channel_too() -> None:
    text = '<|channel|>commentary to=functions.get_weather<|message|>{"city": "a\\\\\\"b"}'

    assert calls(read(FAMILY["harmony"], list(text))) == [("get_weather", {"city": 'a\\"b'})]


def test_words_without_any_channel_are_the_answer() -> None:
    assert joined(read(FAMILY["harmony"], list("Hello <|there"))) == [Text("Hello <|there")]
    assert read(FAMILY["harmony"], list("<|channel|>fin")) == []
