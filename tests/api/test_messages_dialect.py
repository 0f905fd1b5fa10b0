"""Anthropic's Messages: bodies into generations, deltas into bodies and golden event streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dialect_kit import HEADER, ODD_ARGUMENTS, PARAMETERS, USER, conversation_of, cut_at, messages_of, one_by_one, refused
from dialect_kit import events_of as frames
from dialect_kit import streamed as stream_of
from dialect_kit import whole as body_of
from weft.api.anthropic.request import translate, translate_count
from weft.api.dialect import ParsedRequest, request_ids
from weft.api.fields import BUDGET_NAMES
from weft.errors import ContextTooLong, EngineDied, QueueFull, UnsupportedParameter
from weft.ipc.limits import MAX_STOP_CHARACTERS, MAX_STOPS
from weft.text.types import (
    CallArguments,
    CallClosed,
    CallOpened,
    Conversation,
    Delta,
    Finish,
    Message,
    Reasoning,
    ReuseExplanation,
    Text,
    ToolCall,
    Usage,
)

USAGE = Usage(9, 4, cached_tokens=5, reasoning_tokens=2, reuse=ReuseExplanation("differs", 5, ""))
COUNTS = '"input_tokens":1,"cache_creation_input_tokens":3,"cache_read_input_tokens":5,"output_tokens":4'
USED = '"usage":{' + COUNTS + ',"output_tokens_details":{"thinking_tokens":2}}'
ADD = {"name": "add", "input_schema": PARAMETERS}
NOW = {"name": "now", "description": "The time", "input_schema": {"type": "object"}}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL: list[Delta] = [CallOpened(0, "call_1", "add"), CallArguments(0, '{"a"'), CallArguments(0, ":1}"), CallClosed(0)]


def asked(**fields: Any) -> ParsedRequest:
    return translate({"model": "m", "max_tokens": 4, "messages": [USER], **fields})


def conversation(**fields: Any) -> Conversation:
    return conversation_of(asked(**fields))


def messages(*given: Any, **fields: Any) -> list[Message]:
    return list(messages_of(asked(messages=list(given), **fields)))


def streamed(deltas: Sequence[Delta], **fields: Any) -> bytes:
    return stream_of(asked(**fields), one_by_one(deltas), usage=USAGE)


def whole(deltas: Sequence[Delta], **fields: Any) -> dict[str, Any]:
    return body_of(asked(**fields), [(0, deltas)])


def block(index: int, first: str, *deltas: str) -> list[str]:
    """The events of one block."""
    return [
        f'{{"type":"content_block_start","index":{index},"content_block":{first}}}',
        *(f'{{"type":"content_block_delta","index":{index},"delta":{delta}}}' for delta in deltas),
        f'{{"type":"content_block_stop","index":{index}}}',
    ]


START = (
    '{"type":"message_start","message":{"id":"msg_7","type":"message","role":"assistant","model":"m","content":[],'
    '"stop_reason":null,"stop_sequence":null,' + USED + "}}"
)
STOP = '{"type":"message_stop"}'


def end(reason: str, sequence: str = "null") -> list[str]:
    return [f'{{"type":"message_delta","delta":{{"stop_reason":"{reason}","stop_sequence":{sequence}}},{USED}}}', STOP]


# --- golden streams


def test_a_text_is_streamed_piece_by_piece() -> None:
    stream = streamed([Text("Hé"), Text("llo\u2028"), Text(""), Finish("stop", usage=USAGE)])

    assert frames(stream) == [
        START,
        *block(
            0,
            '{"type":"text","text":""}',
            '{"type":"text_delta","text":"Hé"}',
            '{"type":"text_delta","text":"llo\\u2028"}',
        ),
        *end("end_turn"),
    ]


def test_thinking_text_and_calls_are_blocks_that_follow_each_other() -> None:
    stream = streamed(
        [Reasoning("hm"), Text("So:"), *CALL, CallOpened(1, "f:1", "now"), CallClosed(1), Finish("tool_calls", usage=USAGE)]
    )

    assert frames(stream) == [
        START,
        *block(
            0,
            '{"type":"thinking","thinking":"","signature":""}',
            '{"type":"thinking_delta","thinking":"hm"}',
            '{"type":"signature_delta","signature":"weft"}',
        ),
        *block(1, '{"type":"text","text":""}', '{"type":"text_delta","text":"So:"}'),
        *block(
            2,
            '{"type":"tool_use","id":"toolu_1","name":"add","input":{}}',
            '{"type":"input_json_delta","partial_json":"{\\"a\\""}',
            '{"type":"input_json_delta","partial_json":":1}"}',
        ),
        *block(3, '{"type":"tool_use","id":"f:1","name":"now","input":{}}'),
        *end("tool_use"),
    ]


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (Finish("stop", "END", USAGE), end("stop_sequence", '"END"')),
        (Finish("length", None, USAGE), end("max_tokens")),
        (Finish("stop", 42, USAGE), end("end_turn")),
        (Finish("tool_calls", "END", USAGE), end("tool_use")),
        (Finish("length", "END", USAGE), end("max_tokens")),
    ],
)
def test_the_end_says_why(finish: Finish, told: list[str]) -> None:
    assert frames(streamed([finish])) == [START, *told]


@pytest.mark.parametrize(("written", "told"), ODD_ARGUMENTS)
def test_arguments_that_json_can_not_hold_are_told_as_what_it_can(written: str, told: Any) -> None:
    call: list[Delta] = [CallOpened(0, "call_1", "add"), CallArguments(0, written), CallClosed(0)]

    assert whole([*call, Finish("tool_calls", None, USAGE)])["content"][0]["input"] == told


def test_an_answer_that_ends_before_its_max_tokens_ended_with_the_context() -> None:
    assert frames(streamed([Finish("length", None, USAGE)], max_tokens=5))[1:] == end("model_context_window_exceeded")


def test_silence_is_filled_with_pings_and_a_failure_ends_the_stream() -> None:
    reply = asked().reply(HEADER)

    assert reply.frame_opening() == b""
    assert frames(reply.frame_heartbeat(5, 9)) == ['{"type":"ping"}']
    assert frames(reply.frame_error(EngineDied("gone"))) == [
        '{"type":"error","error":{"type":"api_error","message":"gone"},"request_id":"7"}'
    ]
    assert '"overloaded_error"' in frames(reply.frame_error(QueueFull("full")))[0]


def test_a_prompt_that_is_too_long_is_told_in_the_words_agents_look_for() -> None:
    told = asked().reply(HEADER).frame_error(ContextTooLong("other words", "messages", limit=8, got=9))

    assert '"message":"prompt is too long: 9 tokens > 8 maximum"' in frames(told)[0]


# --- streamed is whole

DELTAS: list[list[Delta]] = [
    [Text("a"), Text("b"), Finish("stop", usage=USAGE)],
    [Reasoning("a"), Reasoning("b"), Text("c"), *CALL, Text("d"), Finish("tool_calls", usage=USAGE)],
    [
        CallOpened(0, "call_1", "add"),
        CallClosed(0),
        CallOpened(1, "call_2", "add"),
        CallClosed(1),
        Finish("tool_calls", usage=USAGE),
    ],
    [Finish("length", usage=USAGE)],
]


def assembled(stream: bytes) -> dict[str, Any]:
    """What Anthropic's own client makes of a stream."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for data in frames(stream):
        event: Any = TypeAdapter(RawMessageStreamEvent).validate_json(data)
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    made: dict[str, Any] = message.to_dict()
    return made


@pytest.mark.parametrize("deltas", DELTAS)
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_the_official_client_makes_the_whole_out_of_the_stream(deltas: list[Delta], display: str) -> None:
    fields = {"thinking": {"type": "adaptive", "display": display}}
    body = whole(deltas, **fields)

    SdkMessage.model_validate(body, strict=True)
    assert assembled(streamed(deltas, **fields)) == body | {"stop_details": None}  # which the client adds


@given(st.data())
@settings(max_examples=50)
def test_however_deltas_are_handed_over_the_message_is_the_same(data: st.DataObject) -> None:
    deltas = data.draw(st.sampled_from(DELTAS))
    parts = cut_at(data.draw(st.lists(st.integers(0, len(deltas)), max_size=3)), deltas)

    assert body_of(asked(), [(0, part) for part in parts]) == whole(deltas)


def test_the_input_of_a_call_that_was_cut_is_empty() -> None:
    body = whole([*CALL[:2], Finish("length", usage=USAGE)])

    assert body["content"] == [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}]
    assert body["stop_reason"] == "max_tokens"


def test_hidden_thinking_travels_in_the_signature_and_comes_back_as_thinking() -> None:
    body = whole(DELTAS[1], thinking={"type": "adaptive", "display": "omitted"})
    (thought, *_) = body["content"]

    assert thought["thinking"] == ""
    assert messages(USER, {"role": "assistant", "content": [thought]}, USER)[1].reasoning == "ab"


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (Usage(9, 1, cached_tokens=8, reuse=ReuseExplanation("whole", 8, "")), (1, 0, 8)),
        (Usage(9, 1, reuse=ReuseExplanation("off", 0, "")), (9, 0, 0)),
        (Usage(9, 1), (9, 0, 0)),
        (Usage(9, 1, reuse=ReuseExplanation("differs", 0, "")), (1, 8, 0)),
    ],
)
def test_counts_of_the_prompt_add_up_to_it(usage: Usage, counts: tuple[int, int, int]) -> None:
    told = whole([Finish("stop", usage=usage)])["usage"]

    assert (told["input_tokens"], told["cache_creation_input_tokens"], told["cache_read_input_tokens"]) == counts
    assert sum(counts) == 9


def test_an_id_of_a_reply_is_one_of_its_request() -> None:
    assert "7" in list(request_ids("msg_7"))


# --- messages


def test_instructions_come_first_without_the_line_that_is_there_for_bills() -> None:
    billed = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
        {"type": "text", "text": "Be kind.", **MARK},
    ]

    assert messages(USER, system="Be kind.") == [Message("system", "Be kind."), Message("user", "Hi")]
    assert messages(USER, system=billed) == [Message("system", "Be kind.", breakpoints=(0,)), Message("user", "Hi")]
    assert messages(USER, system="x-anthropic-billing-header: a\n\nBe kind.")[0] == Message("system", "Be kind.")
    assert messages(USER, system=billed[:1]) == [Message("user", "Hi")]


def test_texts_are_parts_and_marks_are_breakpoints() -> None:
    parts = [{"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b"}]

    assert messages({"role": "user", "content": parts}) == [
        Message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], breakpoints=(0,))
    ]
    assert messages({"role": "user", "content": parts[:1]}) == [Message("user", "a", breakpoints=(0,))]


def test_system_messages_stay_where_they_are() -> None:
    reminder = {"role": "system", "content": [{"type": "text", "text": "Stay calm."}]}

    assert [message.role for message in messages(USER, reminder, USER)] == ["user", "system", "user"]


def test_calls_their_results_and_thinking_find_their_places() -> None:
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "whatever"},
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "x", "name": "now", "input": {}},
    ]
    results = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2", **MARK},
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "no"}], "is_error": True},
    ]

    assert messages(USER, {"role": "assistant", "content": answer}, {"role": "user", "content": results})[1:] == [
        Message("assistant", "Let me see.", "hm", (ToolCall("add", '{"a":1}', "call_1"), ToolCall("now", "{}", "x"))),
        Message("tool", "2", tool_call_id="call_1", breakpoints=(0,)),
        Message("tool", "Error: no", tool_call_id="x"),
        Message("user", "Go on."),
    ]


def test_a_result_may_be_empty_and_an_error_that_says_so_is_left_alone() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "tool_result", "tool_use_id": "b", "content": "<tool_use_error>No</tool_use_error>", "is_error": True},
    ]

    assert [message.content for message in messages({"role": "user", "content": results})] == [
        "",
        "<tool_use_error>No</tool_use_error>",
    ]


def test_an_answer_in_several_messages_is_one() -> None:
    pieces = [[{"type": "thinking", "thinking": "a"}], "b", [{"type": "tool_use", "id": "c", "name": "d", "input": {}}]]

    assert messages(USER, *({"role": "assistant", "content": piece} for piece in pieces), USER)[1:2] == [
        Message("assistant", "b", "a", (ToolCall("d", "{}", "c"),))
    ]


def test_documents_of_text_are_text_and_others_are_refused_by_their_place() -> None:
    def document(source: Any, **more: Any) -> Any:
        return {"role": "user", "content": [{"type": "document", "source": source, **more}]}

    assert (
        messages(document({"type": "text", "media_type": "text/plain", "data": "a"}, title="T", context="C"))[0].content
        == "T\nC\na"
    )
    assert messages(document({"type": "content", "content": [{"type": "text", "text": "a"}]}))[0].content == "a"
    error = refused(messages, document({"type": "base64", "media_type": "application/pdf", "data": "aaaa"}))
    assert isinstance(error, UnsupportedParameter)
    assert error.param == "messages[0].content[0].source"


def test_what_has_no_use_here_is_left_out_and_told() -> None:
    used = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "a", "content": []}
    reply = asked(
        messages=[USER, {"role": "assistant", "content": [used, found, {"type": "text", "text": "b"}]}, USER],
        tools=[WEB, ADD],
        context_management={"edits": []},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
    )

    assert reply.ignored == (
        "context_management",
        "tools.web_search_20250305",
        "messages.server_tool_use",
        "messages.web_search_tool_result",
    )
    prompt = conversation_of(reply)
    assert prompt.messages[1] == Message("assistant", "b")
    assert [tool["function"]["name"] for tool in prompt.tools] == ["add"]


def test_an_image_is_handed_on_for_the_model_to_take_or_to_refuse() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}

    (message,) = messages({"role": "user", "content": [image]}, system="x-anthropic-billing-header: a")

    assert message.content == [image]
    assert message.place == "messages[0]"


def test_an_answer_at_the_end_is_gone_on_with() -> None:
    begun = conversation(messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "{"}]}])

    assert begun.continue_final_message
    assert not begun.add_generation_prompt
    assert conversation().add_generation_prompt


# --- the other fields


def test_fields_act() -> None:
    generation = asked(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"], metadata={"user_id": "me"}, model="x", stream=True
    ).generation

    assert generation.model == "x"
    assert generation.sampling == {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3}
    assert generation.stops == ("END",)
    assert generation.session == "me"
    assert generation.is_flexible


@pytest.mark.parametrize(
    ("fields", "effort", "budget", "reasons"),
    [
        ({}, None, None, False),
        ({"thinking": {"type": "disabled"}}, "none", None, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", None, False),
        ({"thinking": {"type": "adaptive"}}, None, None, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max", None, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "medium", 2000, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 99999}}, "xhigh", 99999, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "high"}}, "high", 9, True),
        ({"output_config": {"effort": "low"}}, "low", None, False),
        *(({name: 9}, None, 9, False) for name in BUDGET_NAMES),
        ({"thinking": {"type": "enabled"}, "thinking_budget": 9}, "minimal", 9, True),
    ],
)
def test_how_much_to_think(fields: Any, effort: str | None, budget: int | None, reasons: bool) -> None:
    generation = asked(**fields).generation

    assert (generation.effort, generation.thinking_budget, generation.reasons) == (effort, budget, reasons)


def test_a_shape_is_held_exactly_under_both_its_names() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}

    new, old = asked(output_config={"format": shape}).generation, asked(output_format=shape).generation

    assert new.grammar is not None
    assert not new.grammar.lenient
    assert new.grammar == old.grammar


def test_tools_are_shown_as_templates_know_them_and_strict_ones_are_held() -> None:
    fields = {"tools": [{**ADD, "strict": True, **MARK}, {**NOW, "type": "custom", "defer_loading": True}]}

    assert conversation(**fields).tools == (
        {"type": "function", "function": {"name": "add", "parameters": ADD["input_schema"]}},
        {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}},
    )
    choice = asked(**fields).generation.tool_choice
    assert choice is not None
    assert [(tool.name, tool.strict, tool.place) for tool in choice.tools] == [
        ("add", True, "tools[0].input_schema"),
        ("now", False, "tools[1].input_schema"),
    ]


@pytest.mark.parametrize(
    ("given", "mode", "names", "is_parallel"),
    [
        (None, "auto", ["add", "now"], True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", ["add", "now"], False),
        ({"type": "any"}, "required", ["add", "now"], True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", ["add", "now"], False),
        ({"type": "tool", "name": "now"}, "required", ["now"], False),
        ({"type": "none"}, "none", ["add", "now"], True),
    ],
)
def test_which_tools_may_be_called(given: Any, mode: str, names: list[str], is_parallel: bool) -> None:
    choice = asked(tools=[ADD, NOW], tool_choice=given).generation.tool_choice

    assert choice is not None
    assert (choice.mode, [tool.name for tool in choice.tools], choice.is_parallel) == (mode, names, is_parallel)


def test_without_tools_there_is_no_choice() -> None:
    assert asked(tool_choice={"type": "auto"}).generation.tool_choice is None
    assert asked(tools=[WEB]).generation.tool_choice is None


def test_tokens_are_counted_of_the_same_prompt() -> None:
    fields = {"messages": [USER], "tools": [ADD], "system": "Be kind.", "thinking": {"type": "disabled"}}

    assert translate_count(fields).prompts == asked(**fields).generation.prompts


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (said(), "messages[0].content"),
        (said({}), "messages[0].content[0].type"),
        (said({"type": ["text"]}), "messages[0].content[0].type"),
        (said({"type": "text"}), "messages[0].content[0]"),
        (said({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (said({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": {}}), "messages[0].content[0].content"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": 5}), "messages[0].content[0].content"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": [5]}), "messages[0].content[0].content[0]"),
        (said({"type": "tool_use", "id": "a", "name": "b", "input": "c"}, role="assistant"), "messages[0].content[0].input"),
        (said({"type": "tool_use", "id": "a", "name": "b", "input": {}}, role="assistant"), "messages[0]"),
        (said({"type": "thinking"}, role="assistant"), "messages[0].content[0].thinking"),
        (said({"type": "search_result", "title": "a"}), "messages[0].content[0]"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [WEB, {**ADD, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [WEB, ADD, ADD]}, "tools[2].name"),
        ({"tools": [WEB, {**ADD, "input_schema": {"type": "string"}}]}, "tools[1].input_schema"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        ({"tools": [WEB], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    error = refused(asked, **fields)

    assert error.param == param
    assert param in str(error)


def test_a_shape_may_not_be_asked_for_twice() -> None:
    shape = {"type": "json_schema", "schema": {}}

    assert "output_format" in str(refused(asked, output_config={"format": shape}, output_format=shape))


def test_drafts_can_be_switched_off() -> None:
    assert [asked(speculate=value).generation.speculate for value in (None, True, False)] == [True, True, False]
    assert asked(speculate=False).ignored == ()
    assert refused(asked, speculate=0).param == "speculate"


@pytest.mark.parametrize(("given", "param"), [(["a"] * (MAX_STOPS + 1), ""), (["a", "b" * (MAX_STOP_CHARACTERS + 1)], "[1]")])
def test_stop_sequences_are_bounded_in_number_and_length(given: list[str], param: str) -> None:
    error = refused(asked, stop_sequences=given)

    assert error.param == f"stop_sequences{param}"
    assert "length <=" in str(error)
