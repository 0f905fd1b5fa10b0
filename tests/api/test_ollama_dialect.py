"""Ollama's dialect: bodies into generations, deltas into lines of JSON and whole bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialect_kit import ADD, HEADER, ODD_ARGUMENTS, USAGE, USER, conversation_of, cut_at, messages_of, refused, streamed
from dialect_kit import whole as whole_body
from weft.api.dialect import ParsedRequest, decode_arguments
from weft.api.fields import BUDGET_NAMES
from weft.api.ollama import NDJSON, translate_chat, translate_generate
from weft.errors import EngineDied, InternalError, UnsupportedParameter
from weft.ipc.messages import GrammarSpec
from weft.text.tool_results import pair_results
from weft.text.types import CallArguments, CallClosed, CallOpened, Delta, Finish, Message, Reasoning, Text, ToolCall

HEAD = '{"model":"m","created_at":"1970-01-01T00:00:01Z",'
END = (
    '"total_duration":750400000,"load_duration":400000,"prompt_eval_count":9,"prompt_eval_duration":500000000,'
    '"eval_count":4,"eval_duration":250000000'
)
STOPPED = 'HEAD"message":{"role":"assistant","content":""},"done":true,"done_reason":"stop",' + END + "}"
CALL: list[Delta] = [CallOpened(0, "call_1", "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallClosed(0)]
TOLD_CALL = {"id": "call_1", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}}


def chat(**fields: Any) -> ParsedRequest:
    return translate_chat({"model": "m", "messages": [USER], **fields})


def generate(**fields: Any) -> ParsedRequest:
    return translate_generate({"model": "m", "prompt": "Hi", **fields})


def lines(asked: ParsedRequest, parts: Sequence[Sequence[Delta]]) -> list[str]:
    stream = streamed(asked, [(0, part) for part in parts])
    return [line.replace(HEAD, "HEAD") for line in stream.decode().splitlines()]


def whole(asked: ParsedRequest, parts: Sequence[Sequence[Delta]]) -> dict[str, Any]:
    return whole_body(asked, [(0, part) for part in parts])


# --- golden lines


def test_a_message_is_streamed_line_by_line() -> None:
    assert lines(chat(), [[Text("Hé")], [Text("l"), Text("lo")], [Text("")], [Finish("stop", usage=USAGE)]]) == [
        'HEAD"message":{"role":"assistant","content":"Hé"},"done":false}',
        'HEAD"message":{"role":"assistant","content":"llo"},"done":false}',
        STOPPED,
    ]


def test_thinking_has_a_field_of_its_own() -> None:
    assert lines(chat(), [[Reasoning("h"), Reasoning("m"), Text("4"), Finish("length", usage=USAGE)]]) == [
        'HEAD"message":{"role":"assistant","content":"","thinking":"hm"},"done":false}',
        'HEAD"message":{"role":"assistant","content":"4"},"done":false}',
        STOPPED.replace('"stop"', '"length"'),
    ]


def test_a_call_is_told_when_it_is_complete_with_its_arguments_as_an_object() -> None:
    told = lines(chat(tools=[ADD]), [[delta] for delta in CALL] + [[Finish("tool_calls", usage=USAGE)]])

    call = json.dumps(TOLD_CALL, separators=(",", ":"))
    assert told == ['HEAD"message":{"role":"assistant","content":"","tool_calls":[' + call + ']},"done":false}', STOPPED]


@pytest.mark.parametrize(("written", "told"), ODD_ARGUMENTS)
def test_arguments_that_json_can_not_hold_are_told_as_what_it_can(written: str, told: Any) -> None:
    call: list[Delta] = [CallOpened(0, "call_1", "add"), CallArguments(0, written), CallClosed(0)]
    line = json.loads("{" + lines(chat(tools=[ADD]), [call])[0].removeprefix("HEAD"))

    assert line["message"]["tool_calls"][0]["function"]["arguments"] == told


def test_a_call_that_was_cut_is_not_told() -> None:
    cut: list[list[Delta]] = [CALL[:2], [Finish("length", usage=USAGE)]]

    assert lines(chat(tools=[ADD]), cut) == [STOPPED.replace('"stop"', '"length"')]
    assert "tool_calls" not in whole(chat(tools=[ADD]), cut)["message"]


def test_generate_says_response_where_chat_has_a_message() -> None:
    assert lines(generate(), [[Reasoning("hm")], [Text("4")], [Finish("stop", usage=USAGE)]]) == [
        'HEAD"response":"","thinking":"hm","done":false}',
        'HEAD"response":"4","done":false}',
        STOPPED.replace('"message":{"role":"assistant","content":""}', '"response":""'),
    ]


def test_a_heartbeat_is_a_line_that_adds_nothing() -> None:
    assert json.loads(chat().reply(HEADER).frame_heartbeat(1, 9))["message"] == {"role": "assistant", "content": ""}
    assert json.loads(generate().reply(HEADER).frame_heartbeat(1, 9))["response"] == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [(EngineDied("the engine\nwent"), "the engine\nwent"), (InternalError("secret"), "An internal error ended this request")],
)
def test_a_failure_is_one_line_with_its_words(error: Any, words: str) -> None:
    line = chat().reply(HEADER).frame_error(error)

    assert line.count(b"\n") == 1
    assert json.loads(line).keys() == {"error"}
    assert words in json.loads(line)["error"]


def test_the_answer_s_fit_to_its_schema_is_told_with_its_end() -> None:
    finish = Finish("stop", usage=USAGE, schema_errors=("$.a: wrong",))

    assert whole(chat(), [[finish]])["schema_validation"] == {"valid": False, "errors": ["$.a: wrong"]}
    assert json.loads(lines(chat(), [[finish]])[0].replace("HEAD", "{"))["schema_validation"]["valid"] is False


@given(st.lists(st.sampled_from([Reasoning("a"), Reasoning("\u2028"), Text("b"), Text("{\n"), *CALL]), max_size=12), st.data())
def test_streamed_lines_add_up_to_the_whole_however_they_are_cut(given: list[Delta], data: st.DataObject) -> None:
    deltas = _sensible(given)
    parts = cut_at(data.draw(st.lists(st.integers(0, len(deltas)), max_size=3)), deltas)
    parts.append([Finish("stop", usage=USAGE)])

    told = [json.loads(line.replace("HEAD", HEAD, 1)) for line in lines(chat(tools=[ADD]), parts)]
    message = whole(chat(tools=[ADD]), parts)["message"]
    assert "".join(line["message"]["content"] for line in told) == message["content"]
    assert "".join(line["message"].get("thinking", "") for line in told) == message.get("thinking", "")
    assert [call for line in told for call in line["message"].get("tool_calls", [])] == message.get("tool_calls", [])
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]


def _sensible(deltas: list[Delta]) -> list[Delta]:
    """The deltas with each part of a call replaced by a whole call of its own."""
    made: list[Delta] = []
    for index, delta in enumerate(deltas):
        is_call = isinstance(delta, CallOpened | CallArguments | CallClosed)
        made += [CallOpened(index, f"c{index}", "add"), CallArguments(index, "{}"), CallClosed(index)] if is_call else [delta]
    return made


# --- what is asked


def test_streams_are_lines_of_json_and_the_default() -> None:
    assert (chat().stream, chat().media_type) == (True, NDJSON)
    assert chat(stream=False).stream is False


@pytest.mark.parametrize("name", ["m", "m:latest"])
def test_a_model_is_found_with_and_without_its_tag(name: str) -> None:
    assert chat(model=name).generation.model == "m"
    assert generate(model=name).generation.model == "m"


def test_options_become_sampling() -> None:
    options = {
        "temperature": 0, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1, "presence_penalty": 1,
        "frequency_penalty": 0.5, "seed": 7, "num_predict": 12, "stop": ["a", "b"],
    }  # fmt: skip
    generation = chat(options=options).generation

    assert generation.sampling == {
        "temperature": 0, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 1,
        "frequency_penalty": 0.5, "seed": 7, "max_tokens": 12,
    }  # fmt: skip
    assert generation.stops == ("a", "b")
    assert generate(options={"stop": "a", "num_predict": -1, "top_k": -1}).generation.stops == ("a",)
    assert generate(options={"num_predict": -2, "top_k": -1}).generation.sampling == {"top_k": 0}


def test_drafts_can_be_switched_off_among_the_options() -> None:
    assert [chat(options={"speculate": value}).generation.speculate for value in (None, True, False)] == [True, True, False]
    assert generate(options={"speculate": False}).ignored == ()


@pytest.mark.parametrize("name", BUDGET_NAMES)
def test_a_thinking_budget_goes_by_many_names_also_among_the_options(name: str) -> None:
    for fields in ({name: 6}, {"options": {name: 6}}):
        asked = chat(**fields)
        assert (asked.generation.thinking_budget, asked.ignored) == (6, ())


def test_what_does_nothing_is_told_unless_it_is_known_to_do_nothing() -> None:
    options = {"num_ctx": 4096, "num_gpu": 1, "zebra": 2, "mirostat": 0, "typical_p": 1.0, "temperature": 1}
    asked = chat(options=options, keep_alive="5m", truncate=True, new=1, template="", context=None)

    assert asked.ignored == ("new", "options.zebra")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": "end"}, "suffix"),
        ({"context": [1, 2]}, "context"),
        ({"logprobs": True}, "logprobs"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"mirostat": True}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
    ],
)
def test_what_would_act_and_is_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(generate, **fields)

    assert isinstance(error, UnsupportedParameter)
    assert str(error).startswith(f"{param} is not supported here")
    assert error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"speculate": "no"}}, "options.speculate"),
        ({"options": 5}, "options"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"format": "yaml"}, "format"),
        ({"format": {"type": 5}}, "format.type"),
        ({"think": "very"}, "think"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ],
)
def test_a_misfit_is_named_with_its_place(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("think", "effort"), [(None, None), (True, None), (False, "none"), ("low", "low"), ("high", "high"), ("max", "max")]
)
def test_think_says_how_much(think: Any, effort: str | None) -> None:
    generation = chat(think=think).generation

    assert (generation.effort, generation.reasons) == (effort, think is True)


def test_a_format_is_json_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    assert chat(format="").generation.grammar is None
    assert chat(format="json").generation.grammar == GrammarSpec("json_schema", '{"type":"object"}')
    grammar = generate(format=schema).generation.grammar
    assert grammar is not None
    closed = {**schema, "additionalProperties": False}
    assert (grammar.kind, json.loads(grammar.text), grammar.lenient) == ("json_schema", closed, True)


def test_tools_may_be_called() -> None:
    asked = chat(tools=[ADD])

    assert asked.generation.tool_choice is not None
    assert asked.generation.tool_choice.mode == "auto"
    assert conversation_of(asked).tools == (ADD,)
    assert chat(tools=[]).generation.tool_choice is None


def test_calls_and_results_without_ids_are_paired_by_name_and_order() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "now", "add")]
    results = [
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_name": "now", "content": "1"},
        {"role": "tool", "content": "3"},
    ]
    called = {"role": "assistant", "thinking": "hm", "tool_calls": calls}
    messages = pair_results(messages_of(chat(messages=[USER, called, *results])))

    assert messages[1].reasoning == "hm"
    assert messages[1].tool_calls == (
        ToolCall("add", '{"a":1}', "call_1_0"),
        ToolCall("now", '{"a":1}', "call_1_1"),
        ToolCall("add", '{"a":1}', "call_1_2"),
    )
    assert [message.content for message in messages[2:]] == ["2", "1", "3"]
    assert [message.tool_call_id for message in messages[2:]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert [message.name for message in messages[2:]] == ["add", "now", "add"]


def test_ids_that_are_given_are_kept() -> None:
    call = {"id": "mine", "function": {"name": "add", "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "mine", "content": "1"}
    messages = messages_of(chat(messages=[USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]))

    assert (messages[1].tool_calls[0].id, messages[2].tool_call_id) == ("mine", "mine")


def test_generate_asks_through_the_template_with_its_system_text_unless_it_is_raw() -> None:
    assert messages_of(generate(system="Be brief.")) == (Message("system", "Be brief."), Message("user", "Hi"))
    raw = generate(raw=True).generation
    assert (raw.prompts, raw.split_thinking) == (("Hi",), False)


def test_images_are_handed_on_as_parts() -> None:
    parts = [{"type": "image", "image": "aGk="}, {"type": "text", "text": "Hi"}]

    assert messages_of(chat(messages=[{**USER, "images": ["aGk="]}]))[0].content == parts
    assert messages_of(generate(images=["aGk="]))[0].content == parts


@pytest.mark.parametrize("asked", [chat(messages=[]), chat(messages=None), generate(prompt=None), generate(prompt="")])
def test_nothing_to_answer_asks_for_the_model_alone(asked: ParsedRequest) -> None:
    assert asked.generation.prompts == ()
    body = whole(asked, [])
    assert (body["done"], body["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6.626e-34", 6.626e-34),
        ("1e999", 1.7976931348623157e308),
        ("-1e999", -1.7976931348623157e308),
        (str(2**64 - 1), 2**64 - 1),
        ("9" * 400, 1.7976931348623157e308),
        ("-" + "9" * 30, -1e30),
    ],
)
def test_a_number_that_no_float_holds_becomes_the_largest_one(text: str, value: float) -> None:
    assert decode_arguments(f'{{"x": {text}}}') == {"x": value}
