"""Chat Completions: bodies into generations, deltas into bodies and golden event streams."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dialect_kit import (
    ADD,
    HEADER,
    NOW,
    USAGE,
    USER,
    Parts,
    chunks_of,
    conversation_of,
    frames_of,
    messages_of,
    refused,
    streamed,
    token,
    whole,
)
from weft.api.dialect import ParsedRequest
from weft.api.fields import BUDGET_NAMES
from weft.api.openai import completions
from weft.api.openai.chat import translate
from weft.errors import EngineDied, InvalidRequest, UnsupportedParameter
from weft.ipc.messages import DraftCounts, GrammarSpec
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

HEAD = '{"id":"chatcmpl-7","object":"chat.completion.chunk","created":1,"model":"m","system_fingerprint":"f","choices":'
ROLE = 'data: HEAD[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
TIMINGS = (
    '"timings":{"cache_n":8,"prompt_n":1,"prompt_ms":500.0,"prompt_per_second":2.0,'
    '"predicted_n":4,"predicted_ms":250.0,"predicted_per_second":12.0,"queue_ms":0.4}'
)
STOPPED = 'data: HEAD[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":null}],' + TIMINGS + "}"
DONE = "data: [DONE]"
CALLED = STOPPED.replace('"stop"', '"tool_calls"')


def asked(**fields: Any) -> ParsedRequest:
    return translate({"messages": [USER], **fields})


def completed(**fields: Any) -> ParsedRequest:
    """The same fields in a request for a completion."""
    return completions.translate({"prompt": "a", **fields})


def frames(stream: bytes) -> list[str]:
    return frames_of(stream, HEAD)


# --- golden streams


def test_a_text_is_streamed_piece_by_piece() -> None:
    stream = streamed(
        asked(), [(0, [Text("Hé")]), (0, [Text("l"), Text("lo")]), (0, [Text("")]), (0, [Finish("stop", usage=USAGE)])]
    )

    assert frames(stream) == [
        ROLE,
        'data: HEAD[{"index":0,"delta":{"content":"Hé"},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"content":"llo"},"finish_reason":null}]}',
        STOPPED,
        DONE,
    ]


def test_thinking_has_a_field_of_its_own() -> None:
    stream = streamed(asked(), [(0, [Reasoning("h"), Reasoning("m"), Text("4"), Finish("stop", usage=USAGE)])])

    assert frames(stream) == [
        ROLE,
        'data: HEAD[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"content":"4"},"finish_reason":null}]}',
        STOPPED,
        DONE,
    ]


@pytest.mark.parametrize(
    ("finish", "words"),
    [
        (Finish("stop", "END", USAGE), '"finish_reason":"stop","stop_reason":"END"'),
        (Finish("stop", 42, USAGE), '"finish_reason":"stop","stop_reason":42'),
        (Finish("length", None, USAGE), '"finish_reason":"length","stop_reason":null'),
    ],
)
def test_the_last_chunk_says_why_it_ended(finish: Finish, words: str) -> None:
    stream = streamed(asked(), [(0, [Text("a")]), (0, [finish])])

    assert frames(stream)[2:] == ['data: HEAD[{"index":0,"delta":{},' + words + "}]," + TIMINGS + "}", DONE]


def test_usage_comes_last_and_only_when_asked_for() -> None:
    stream = streamed(asked(stream_options={"include_usage": True}), [(0, [Text("a")]), (0, [Finish("stop", usage=USAGE)])])

    assert frames(stream) == [
        ROLE[:-1] + ',"usage":null}',
        'data: HEAD[{"index":0,"delta":{"content":"a"},"finish_reason":null}],"usage":null}',
        STOPPED.replace('"timings"', '"usage":null,"timings"'),
        'data: HEAD[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,'
        '"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":2}}}',
        DONE,
    ]


def test_two_choices_share_a_prompt_that_is_counted_once() -> None:
    second = Usage(9, 6, cached_tokens=9, decode_seconds=0.5)
    calls: Parts = [
        (1, [Text("b")]),
        (0, [Text("a"), Finish("stop", usage=USAGE)]),
        (1, [Finish("length", usage=second)]),
    ]
    stream = streamed(asked(n=2, stream_options={"include_usage": True}), calls)

    told = chunks_of(stream)
    assert [choice["index"] for chunk in told for choice in chunk["choices"]] == [0, 1, 1, 0, 0, 1]
    assert [choice["delta"] for chunk in told[:2] for choice in chunk["choices"]] == [{"role": "assistant", "content": ""}] * 2
    assert ["timings" in chunk for chunk in told] == [False] * 5 + [True, False]
    assert told[-1]["usage"]["prompt_tokens"] == 9
    assert told[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert told[-1]["usage"]["completion_tokens"] == 10
    assert told[-2]["timings"]["predicted_ms"] == 500.0
    assert told[-2]["timings"]["predicted_per_second"] == 16.0


def test_log_probabilities_come_with_their_piece() -> None:
    likely = token("a", -0.5, ("a", -0.5), ("b", -math.inf))
    pieces = [Text("", (token("", -1.0),)), Text("a", (likely,)), Finish("stop", usage=USAGE)]
    stream = streamed(asked(logprobs=True, top_logprobs=2), [(0, [piece]) for piece in pieces])

    assert frames(stream)[1:3] == [
        'data: HEAD[{"index":0,"delta":{"content":""},"logprobs":{"content":[{"token":"","bytes":[],"logprob":-1.0,'
        '"top_logprobs":[]}],"refusal":null},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","bytes":[97],"logprob":-0.5,'
        '"top_logprobs":[{"token":"a","bytes":[97],"logprob":-0.5},{"token":"b","bytes":[98],"logprob":-9999.0}]}],"refusal":null},'
        '"finish_reason":null}]}',
    ]


def test_a_heartbeat_is_a_comment_and_a_chunk_of_a_choice_still_open() -> None:
    reply = asked(n=2).reply(HEADER)

    assert frames(reply.frame_heartbeat(4096, 9000)) == [
        ": prefill 4096/9000",
        'data: HEAD[{"index":0,"delta":{},"finish_reason":null}]}',
    ]
    reply.frame_deltas(0, [Finish("stop", usage=USAGE)])
    assert frames(reply.frame_heartbeat(1, 1))[1] == 'data: HEAD[{"index":1,"delta":{},"finish_reason":null}]}'


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ((), '"stop_reason":null,"schema_validation":{"valid":true,"errors":[]}}'),
        (("$.a: wrong", "$: bad"), '"stop_reason":null,"schema_validation":{"valid":false,"errors":["$.a: wrong","$: bad"]}}'),
    ],
)
def test_the_last_chunk_says_whether_the_answer_fits_its_schema(errors: tuple[str, ...], words: str) -> None:
    finish = Finish("stop", usage=USAGE, schema_errors=errors)
    calls: Parts = [(0, [Text("{}"), finish])]

    assert words in frames(streamed(asked(), calls))[2]
    assert whole(asked(), calls)["choices"][0]["schema_validation"] == {"valid": not errors, "errors": list(errors)}


def test_a_failure_in_the_stream_is_told_and_not_called_done() -> None:
    assert asked().reply(HEADER).frame_error(EngineDied("The engine died.")) == (
        b'data: {"error":{"message":"The engine died.","type":"server_error","param":null,"code":"engine_error"}}\n\n'
    )


def test_calls_are_opened_and_then_filled_piece_by_piece() -> None:
    stream = streamed(
        asked(tools=[ADD, NOW]),
        [
            (0, [Text("Well"), CallOpened(0, "call_1", "add")]),
            (0, [CallArguments(0, '{"a"'), CallArguments(0, ":")]),
            (0, [CallArguments(0, "1}"), CallClosed(0), CallOpened(1, "call_2", "now"), CallArguments(1, "{}"), CallClosed(1)]),
            (0, [Finish("tool_calls", usage=USAGE)]),
        ],
    )

    assert frames(stream) == [
        ROLE,
        'data: HEAD[{"index":0,"delta":{"content":"Well"},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function",'
        '"function":{"name":"add","arguments":""}}]},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":"}}]},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"call_2","type":"function",'
        '"function":{"name":"now","arguments":""}}]},"finish_reason":null}]}',
        'data: HEAD[{"index":0,"delta":{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]},"finish_reason":null}]}',
        CALLED,
        DONE,
    ]


# --- whole replies


@pytest.mark.parametrize(("texts", "content"), [([], None), ([Text("Well")], "Well")])
def test_a_whole_reply_has_its_calls_and_no_content_where_nothing_was_said(texts: list[Delta], content: str | None) -> None:
    one = [CallOpened(0, "call_1", "add"), CallArguments(0, '{"a":'), CallArguments(0, "1}"), CallClosed(0)]
    two = [CallOpened(1, "call_2", "now"), CallArguments(1, "{}"), CallClosed(1), Finish("tool_calls", usage=USAGE)]

    choice = whole(asked(tools=[ADD, NOW]), [(0, [*texts, *one]), (0, two)])["choices"][0]

    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }


def test_a_whole_reply_has_every_part() -> None:
    body = whole(asked(), [(0, [Reasoning("hm"), Text("4")]), (0, [Text("2"), Finish("stop", "x", USAGE)])])

    assert body == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": "f",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "42", "refusal": None, "reasoning_content": "hm"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
        "timings": json.loads("{" + TIMINGS + "}")["timings"],
    }


def test_an_empty_answer_is_an_empty_text() -> None:
    body = whole(asked(), [(0, [Finish("length", usage=Usage(1, 0))])])

    assert body["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert body["timings"]["predicted_per_second"] == 0.0


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_plain = st.one_of(st.builds(Text, _texts), st.builds(Reasoning, _texts))
_tokens = st.builds(token, _texts, st.floats(max_value=0, allow_nan=False))
_with_tokens = st.one_of(st.builds(Text, _texts, st.tuples(_tokens)), st.builds(Reasoning, _texts))
_finishes = st.builds(
    Finish,
    st.sampled_from(["stop", "length"]),
    st.sampled_from([None, "x", 3]),
    st.just(USAGE),
    st.sampled_from([None, (), ("$.a: wrong",)]),
)


@st.composite
def _calls(draw: st.DrawFn, n: int, deltas: st.SearchStrategy[Delta]) -> list[tuple[int, list[Delta]]]:
    return draw(st.lists(st.tuples(st.integers(0, n - 1), st.lists(deltas, max_size=4)), max_size=8))


@st.composite
def _called(draw: st.DrawFn, n: int) -> list[tuple[int, list[Delta]]]:
    """Calls of each choice, cut anywhere."""
    told: list[tuple[int, list[Delta]]] = []
    for choice in range(n):
        deltas: list[Delta] = []
        for index, pieces in enumerate(draw(st.lists(st.lists(st.text("{}1"), max_size=3), max_size=3))):
            deltas += [CallOpened(index, f"call_{index}", "add"), *(CallArguments(index, piece) for piece in pieces)]
            deltas += [CallClosed(index)] if draw(st.booleans()) else []
        cut = draw(st.integers(0, len(deltas)))
        told += [(choice, deltas[:cut]), (choice, deltas[cut:])]
    return told


def _assembled(stream: bytes, n: int) -> list[dict[str, Any]]:
    """The choices of a stream as a client puts them together."""
    found: list[dict[str, Any]] = [{"content": "", "reasoning_content": "", "logprobs": [], "calls": []} for _ in range(n)]
    for chunk in chunks_of(stream):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in chunk["choices"]:
            mine = found[choice["index"]]
            assert "finish_reason" not in mine
            for field in ("content", "reasoning_content"):
                mine[field] += choice["delta"].get(field, "")
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(mine["calls"])
                    mine["calls"].append({name: call[name] for name in ("id", "type", "function")})
                else:
                    mine["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            mine["logprobs"] += choice["logprobs"]["content"] if "logprobs" in choice else []
            if choice["finish_reason"]:
                mine |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
                mine["schema_validation"] = choice.get("schema_validation")
    return found


@settings(max_examples=80)
@given(st.data(), st.integers(1, 3), st.booleans(), st.booleans())
def test_streamed_is_whole(data: st.DataObject, n: int, logprobs: bool, include_usage: bool) -> None:
    calls = data.draw(_calls(n, _with_tokens if logprobs else _plain)) + data.draw(_called(n))
    calls += [(choice, [data.draw(_finishes)]) for choice in data.draw(st.permutations(range(n)))]
    request = asked(n=n, logprobs=logprobs, stream_options={"include_usage": include_usage})
    body, stream = whole(request, calls), streamed(request, calls)

    ChatCompletion.model_validate(body, strict=True)
    assert [
        {
            "content": choice["message"]["content"] or "",
            "calls": choice["message"].get("tool_calls", []),
            "reasoning_content": choice["message"].get("reasoning_content", ""),
            "logprobs": choice["logprobs"]["content"] if logprobs else [],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "schema_validation": choice.get("schema_validation"),
        }
        for choice in body["choices"]
    ] == _assembled(stream, n)
    last = chunks_of(stream)[-1]
    assert (last["usage"] == body["usage"]) if include_usage else (last["timings"] == body["timings"])


# --- parameters


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, {}),
        ({"temperature": 1, "top_p": 0.5, "seed": 3}, {"temperature": 1.0, "top_p": 0.5, "seed": 3}),
        ({"temperature": None, "seed": None, "stop": None, "n": None, "tools": None}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"logit_bias": {"12": -100}}, {"logit_bias": {12: -100.0}}),
        ({"logit_bias": {}}, {"logit_bias": {}}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 40, "min_p": 0.1}, {"top_k": 40, "min_p": 0.1}),
        ({"repetition_penalty": 1.1, "min_tokens": 2}, {"repetition_penalty": 1.1, "min_tokens": 2}),
        ({"ignore_eos": True, "stop_token_ids": [1, 2]}, {"ignore_eos": True, "stop_token_ids": (1, 2)}),
    ],
)
def test_sampling_fields_act(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert asked(**fields).generation.sampling == sampling


def test_the_other_fields_act() -> None:
    request = asked(model="x", stream=True, n=3, stop=["a", "b"], skip_special_tokens=False)

    assert request.stream
    assert (request.generation.model, request.generation.n) == ("x", 3)
    assert request.generation.stops == ("a", "b")
    assert not request.generation.skip_special_tokens
    assert asked(stop="a").generation.stops == ("a",)
    assert asked().generation.split_thinking


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_token_budget": 9, "reasoning_budget_tokens": None}, 9),
        ({"reasoning_budget_tokens": 7}, 7),
        ({"reasoning_budget_tokens": -1}, None),
        ({"thinking_token_budget": 7, "reasoning_budget_tokens": 7}, 7),
        *(({name: 6}, 6) for name in BUDGET_NAMES),
        *(({"chat_template_kwargs": {name: 6}}, 6) for name in BUDGET_NAMES),
        ({"thinking": {"type": "enabled", "budget_tokens": 6}}, 6),
        ({"reasoning": {"max_tokens": 6}, "thinking_budget": 6}, 6),
        ({"nvext": {"max_thinking_tokens": 6}}, 6),
        ({"extra_body": {"thinking_budget": 6, "chat_template_kwargs": {"thinking_budget": 6}}}, 6),
    ],
)
def test_a_thinking_budget_goes_by_many_names(fields: dict[str, Any], budget: int | None) -> None:
    assert asked(**fields).generation.thinking_budget == budget


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning": {"enabled": False}}, "none"),
        ({"reasoning": {"enabled": True, "exclude": False}}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled"}}, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, "none"),
    ],
)
def test_whether_to_think_is_said_in_many_ways(fields: dict[str, Any], effort: str | None) -> None:
    parsed = asked(**fields)

    assert (parsed.generation.effort, parsed.ignored) == (effort, ())


SWITCHED_ON = ({"think": True}, {"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"reasoning": {"enabled": True}})
SWITCHED_OFF = (
    {"think": False},
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
)


@pytest.mark.parametrize("on", SWITCHED_ON)
def test_a_switch_that_is_on_asks_for_reasoning_and_one_that_is_off_contradicts_it(on: dict[str, Any]) -> None:
    (name,) = on
    assert asked(**on).generation.reasons

    for off in ({"reasoning_effort": "none"}, *SWITCHED_OFF):
        if name in off:
            continue
        with pytest.raises(InvalidRequest, match="differ") as caught:
            asked(**on, **off)
        assert all(one in str(caught.value) for one in (name, *off))


def test_template_fields_reach_the_conversation() -> None:
    request = asked(reasoning_effort="xhigh", chat_template_kwargs={"enable_thinking": False})
    assert request.generation.effort == "xhigh"  # what that means is the model's affair
    assert request.generation.prompts == (conversation_of(asked(chat_template_kwargs={"enable_thinking": False})),)
    assert conversation_of(request).template_kwargs == {"enable_thinking": False}
    assert conversation_of(asked()).add_generation_prompt
    assert not conversation_of(asked(add_generation_prompt=False)).add_generation_prompt
    going_on = conversation_of(asked(continue_final_message=True))
    assert going_on.continue_final_message
    assert not going_on.add_generation_prompt


def test_tools_and_their_choice_are_read_and_all_are_shown_whatever_is_chosen() -> None:
    def chosen(**fields: Any) -> tuple[str, list[str], bool]:
        request = asked(tools=[ADD, NOW], **fields).generation
        (prompt,) = request.prompts
        assert isinstance(prompt, Conversation)
        assert prompt.tools == (ADD, NOW)
        assert request.tool_choice is not None
        return request.tool_choice.mode, [tool.name for tool in request.tool_choice.tools], request.tool_choice.is_parallel

    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}
    assert chosen() == chosen(tool_choice="auto") == chosen(tool_choice=None) == ("auto", ["add", "now"], True)
    assert chosen(parallel_tool_calls=False) == ("auto", ["add", "now"], False)
    assert chosen(tool_choice="required") == ("required", ["add", "now"], True)
    assert chosen(tool_choice="none")[0] == "none"
    assert chosen(tool_choice={"type": "function", "function": {"name": "now"}}) == ("required", ["now"], False)
    assert chosen(tool_choice=allowed) == ("required", ["now"], True)


def test_without_tools_there_is_no_choice_among_them() -> None:
    for fields in ({}, {"tools": []}, {"tools": None}, {"tool_choice": "auto"}, {"tool_choice": "none", "tools": []}):
        assert asked(**fields).generation.tool_choice is None


@pytest.mark.parametrize(("name", "value"), [("best_of", True), ("include_reasoning", 1), ("xtc_probability", 0.5)])
def test_a_value_that_only_looks_idle_is_refused(name: str, value: Any) -> None:
    error = refused(asked, **{name: value})

    assert isinstance(error, UnsupportedParameter)
    assert error.param == name


@pytest.mark.parametrize(("name", "value"), [("tools", []), ("tools", None), ("xtc_probability", 0.0)])
def test_what_would_not_act_is_accepted(name: str, value: Any) -> None:
    assert asked(**{name: value}).ignored == ()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("thinkingBudget", "thinking_token_budget"),
        ("max_new_tokens", "max_tokens"),
        ("stops", "stop"),
        ("responseFormat", "response_format"),
        ("jsonSchema", "json_schema"),
        ("guided_jsn", "guided_json"),
        ("min_new_tokens", "min_tokens"),
    ],
)
def test_an_unknown_constraint_is_refused_with_the_nearest_known_name(name: str, nearest: str) -> None:
    error = refused(asked, **{name: 1})

    assert isinstance(error, UnsupportedParameter)
    assert error.param == name
    assert str(error).endswith(f"the nearest known name is {nearest}")


def test_a_word_within_another_is_no_constraint() -> None:
    assert asked(administrator=1, information=2, nonstop=3).ignored == ("administrator", "information", "nonstop")


def test_the_same_constraint_by_two_names_is_one() -> None:
    assert asked(regex="a+", guided_regex="a+").generation.grammar == asked(nvext={"guided_regex": "a+"}).generation.grammar
    assert asked(regex="a+").generation.grammar is not None
    assert "both" in str(refused(asked, regex="a+", guided_regex="b+"))


def test_unknown_fields_are_told_and_unknown_nulls_are_not() -> None:
    assert asked(zebra=1, apple=2, pear=None).ignored == ("apple", "zebra")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "expected `array`, got `null`"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [1]}, "messages[0]", "expected `object`"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is required"),
        (
            {"messages": [{"role": "function", "content": "a", "name": "f"}]},
            "messages[0].role",
            "'function'; known are system, dev",
        ),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "a user message needs one"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content", "a system message needs one"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got `int`"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "expected `object`"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type", "must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal"}]}]},
            "messages[0].content[0].refusal",
            "must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
            "is required",
        ),
        ({"max_tokens": "5"}, "max_tokens", "expected `int | null`, got `str`"),
        ({"max_tokens": 0}, "max_tokens", "-1 for no limit"),
        ({"max_tokens": -2}, "max_tokens", ">= -1"),
        ({"max_tokens": True}, "max_tokens", "got `bool`"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"temperature": True}, "temperature", "got `bool`"),
        ({"stream": "yes"}, "stream", "got `str`"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "got `int`"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop": ["a"] * 33}, "stop", "length <= 32"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"presence_penalty": 2.5}, "presence_penalty", "<= 2.0"),
        ({"logit_bias": {"7": 1, "a": 1}}, "logit_bias", "the key 'a' is no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100.0"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "known are none, minimal"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
        ({"tools": {}}, "tools", "expected `array | null`"),
        ({"tools": ["f"]}, "tools[0]", "expected `object`"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "earlier tool"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "not in tools (now)"),
        ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls", "expected `bool | null`"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "-1 for no limit"),
        ({"thinking_budget": "many"}, "thinking_budget", "number of tokens"),
        ({"reasoning": {"max_tokens": True}}, "reasoning.max_tokens", "number of tokens"),
        (
            {"thinking_budget": 5, "chat_template_kwargs": {"thinking_budget": 6}},
            "chat_template_kwargs.thinking_budget",
            "differ",
        ),
        ({"nvext": {"top_k": 5}, "top_k": 6}, "nvext.top_k", "differ"),
        ({"reasoning": {"effort": "low"}, "thinking": {"type": "disabled"}}, "thinking.type", "differ"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude", "not supported"),
        ({"nvext": {"guided_regex": "a"}, "guided_regex": "b"}, "nvext.guided_regex", "differ"),
        ({"thinking_token_budget": 5, "reasoning_budget_tokens": -1}, "reasoning_budget_tokens", "differ"),
    ],
)
def test_a_bad_value_is_named_with_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(asked, **fields)

    assert error.param == param
    assert param in str(error)
    assert words in str(error)


# --- what the answer must look like


ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')
SCHEMA = {"type": "integer"}


def schema_spec(strict: bool) -> GrammarSpec:
    return GrammarSpec("json_schema", '{"type":"integer"}', lenient=not strict)


GRAMMARS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, GrammarSpec("regex", "a")),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, schema_spec(False)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        schema_spec(True),
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}}, schema_spec(False)),
    ({"response_format": {"type": "json_schema", "json_schema": {"description": "d", "schema": SCHEMA}}}, schema_spec(False)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        GrammarSpec("json_schema", "{}", lenient=True),
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, schema_spec(False)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True, "name": "n"}}, schema_spec(True)),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {}, "end": "."}],
                "triggers": ["<"],
            }
        },
        GrammarSpec("structural_tag", '{"structures":[{"begin":"<a>","schema":{},"end":"."}],"triggers":["<"]}'),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, schema_spec(False)),
    ({"structured_outputs": {"json": '{"type": "integer"}', "disable_any_whitespace": False}}, schema_spec(False)),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": None}}, ANY_OBJECT),
    ({"structured_outputs": {"json_object": False, "regex": "a+", "disable_fallback": True}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a","b"]')),
    ({"structured_outputs": {"grammar": "root ::= [0-9]"}}, GrammarSpec("lark", "root ::= [0-9]")),
    ({"structured_outputs": {"structural_tag": '{"triggers": []}'}}, GrammarSpec("structural_tag", '{"triggers":[]}')),
    ({"guided_json": SCHEMA}, schema_spec(False)),
    ({"guided_json": '{"type":"integer"}', "guided_decoding_backend": "any"}, schema_spec(False)),
    ({"guided_json": {}}, GrammarSpec("json_schema", "{}", lenient=True)),
    ({"guided_regex": "[0-9]+"}, GrammarSpec("regex", "[0-9]+")),
    ({"guided_choice": ["yes", "no"]}, GrammarSpec("choice", '["yes","no"]')),
    ({"guided_grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"')),
    ({"json_schema": SCHEMA}, schema_spec(False)),
    ({"grammar": 'root ::= "a"'}, GrammarSpec("lark", 'root ::= "a"')),
]


@pytest.mark.parametrize(("fields", "spec"), GRAMMARS)
def test_the_shape_of_an_answer_can_be_asked_for_in_many_words(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert asked(**fields).generation.grammar == spec
    assert completed(**fields).generation.grammar == spec
    assert asked(**fields).ignored == ()


BAD_GRAMMARS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "known are text, json_object, json_schema"),
    ({"response_format": {}}, "response_format.type", "is required"),
    ({"response_format": "json"}, "response_format", "expected `object | null`"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
        "got `array`",
    ),
    ({"response_format": {"type": "json_schema", "schema": False}}, "response_format.schema", "no answer fits"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "needs structures and triggers"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}, "strict": True}}},
        "response_format.json_schema.schema.items",
        "not can not be enforced; leave it out or set strict to false",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of json, json_object, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "structured_outputs.regex and"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "length >= 1"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "unknown field `xml`"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "expected `null`",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "not supp",
    ),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": 5}, "guided_json", "got `int`"),
    ({"guided_json": {"type": "objekt"}}, "guided_json.type", "not a valid JSON Schema"),
    ({"guided_choice": []}, "guided_choice", "length >= 1"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]", "got `int`"),
    ({"guided_choice": ["a", "a"]}, "guided_choice", "twice"),
    ({"guided_grammar": ""}, "guided_grammar", "length >= 1"),
    ({"json_schema": {"$ref": "http://x.org"}}, "json_schema", "leads out of the schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex and guided_choice can not both"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format and",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_GRAMMARS)
def test_a_shape_that_can_not_be_had_is_named_with_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    for ask in (asked, completed):
        error = refused(ask, **fields)
        assert error.param == param
        assert words in str(error)


# --- what becomes of the computed prompt


def test_a_salt_reaches_the_generation() -> None:
    assert asked(cache_salt="mine").generation.cache_salt == "mine"
    assert completed(cache_salt="s" * 256).generation.cache_salt == "s" * 256
    assert asked(cache_salt=None).generation.cache_salt == ""


@pytest.mark.parametrize("salt", ["", "s" * 257, 7])
def test_a_salt_has_one_to_256_characters(salt: Any) -> None:
    assert [refused(ask, cache_salt=salt).param for ask in (asked, completed)] == ["cache_salt"] * 2


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"prompt_cache_key": "agent"}, "agent"),
        ({"session_id": "s"}, "s"),
        ({"session_id": 5, "prompt_cache_key": None}, "5"),
        ({"session_id": {"of": "mine"}}, '{"of":"mine"}'),
        ({"prompt_cache_key": "", "session_id": None}, ""),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}, "user": "eve"}, ""),
    ],
)
def test_who_says_that_he_comes_again_is_known_by_what_he_says(fields: dict[str, Any], session: str) -> None:
    for request in (asked(**fields), completed(**fields)):
        assert request.generation.session == session
        assert request.ignored == ()


# --- drafts


def test_drafts_can_be_switched_off_for_a_request() -> None:
    for ask in (asked, completed):
        assert [ask(speculate=value).generation.speculate for value in (None, True, False)] == [True, True, False]
        assert ask(speculate=False).ignored == ()


@pytest.mark.parametrize("value", ["false", 0, "off", {}])
def test_only_a_boolean_switches_drafts(value: Any) -> None:
    assert [refused(ask, speculate=value).param for ask in (asked, completed)] == ["speculate"] * 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def f():", "def f():"),
        ("", ""),
        ([{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}], "def f():"),
        ([], ""),
    ],
)
def test_a_prediction_is_text_or_parts_of_text(content: Any, text: str) -> None:
    request = asked(prediction={"type": "content", "content": content})

    assert request.generation.prediction == text
    assert request.ignored == ()
    assert asked(prediction=None).generation.prediction is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
    ],
)
def test_a_prediction_of_another_form_is_refused_by_its_place(prediction: Any, param: str) -> None:
    assert refused(asked, prediction=prediction).param == param


def test_a_prediction_is_refused_where_openai_has_none() -> None:
    error = refused(completed, prediction={"type": "content", "content": "a"})

    assert isinstance(error, UnsupportedParameter)
    assert error.param == "prediction"
    assert "Chat Completions only" in str(error)


def test_a_draft_model_is_refused_with_what_is_done_instead() -> None:
    assert str(refused(asked, draft_model="tiny")).startswith(
        "draft_model is not supported here: weft drafts without a second model"
    )


DRAFTED = replace(USAGE, drafts=DraftCounts({"lookup": 8, "prediction": 6}, {"lookup": 5, "prediction": 2}))


def test_drafts_are_told_in_the_timings_of_streams_and_bodies_alike() -> None:
    parts: Parts = [(0, [Text("a"), Finish("stop", None, DRAFTED)])]
    timings = whole(asked(), parts)["timings"]

    assert (timings["draft_n"], timings["draft_n_accepted"]) == (14, 7)
    assert timings["drafts"] == {"lookup": {"drafted": 8, "accepted": 5}, "prediction": {"drafted": 6, "accepted": 2}}
    assert chunks_of(streamed(asked(), parts))[-1]["timings"] == timings


def test_drafts_of_all_choices_are_added_up() -> None:
    parts: Parts = [(choice, [Text("a"), Finish("stop", None, DRAFTED)]) for choice in range(2)]
    timings = whole(asked(n=2), parts)["timings"]

    assert (timings["draft_n"], timings["draft_n_accepted"]) == (28, 14)
    assert timings["drafts"]["prediction"] == {"drafted": 12, "accepted": 4}


def test_without_drafts_the_timings_say_nothing_of_them() -> None:
    timings = whole(asked(), [(0, [Text("a"), Finish("stop", None, USAGE)])])["timings"]

    assert not {"draft_n", "draft_n_accepted", "drafts"} & timings.keys()


@pytest.mark.parametrize(("usage", "accepted", "rejected"), [(DRAFTED, 2, 4), (USAGE, 0, 0)])
def test_the_usage_says_what_became_of_a_prediction(usage: Usage, accepted: int, rejected: int) -> None:
    request = asked(prediction={"type": "content", "content": "a"}, stream_options={"include_usage": True})
    parts: Parts = [(0, [Text("a"), Finish("stop", None, usage)])]
    body = whole(request, parts)
    details = {"reasoning_tokens": 2, "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}

    assert body["usage"]["completion_tokens_details"] == details
    assert chunks_of(streamed(request, parts))[-1]["usage"] == body["usage"]
    assert ChatCompletion.model_validate(body).usage is not None


def test_without_a_prediction_the_usage_says_nothing_of_one() -> None:
    body = whole(asked(), [(0, [Text("a"), Finish("stop", None, DRAFTED)])])

    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


# --- who goes first


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": 100}, 100),
        ({"priority": -100}, -100),
        ({"service_tier": "priority"}, 10),
        ({"service_tier": "flex"}, -10),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": ["priority"]}, 0),
        ({"service_tier": "priority", "priority": 0}, 0),
        ({"service_tier": "flex", "priority": None}, -10),
    ],
)
def test_a_priority_or_a_tier_reaches_the_generation(fields: dict[str, Any], priority: int) -> None:
    for request in (asked(**fields), completed(**fields)):
        assert request.generation.priority == priority
        assert request.ignored == ()


@pytest.mark.parametrize("priority", [101, -101, 0.5, "high", True])
def test_a_priority_is_an_integer_within_a_hundred(priority: Any) -> None:
    assert [refused(ask, priority=priority).param for ask in (asked, completed)] == ["priority"] * 2


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("message", "breakpoints"),
    [
        ({"content": [PARTS[0] | {"prompt_cache_breakpoint": True}, PARTS[1]]}, (0,)),
        ({"content": [PARTS[0], PARTS[1] | {"prompt_cache_breakpoint": {"mode": "explicit"}}]}, (1,)),
        ({"content": [PARTS[0] | {"prompt_cache_breakpoint": {}}, PARTS[1]], "prompt_cache_breakpoint": {}}, (0, 1)),
        ({"content": "ab", "prompt_cache_breakpoint": True}, (0,)),
        ({"content": PARTS, "prompt_cache_breakpoint": True}, (1,)),
        ({"content": [PARTS[0] | {"prompt_cache_breakpoint": False}, PARTS[1] | {"prompt_cache_breakpoint": None}]}, ()),
        ({"content": PARTS, "prompt_cache_breakpoint": False}, ()),
        ({"content": [], "prompt_cache_breakpoint": True}, ()),
    ],
)
def test_a_marked_part_or_message_is_a_breakpoint_and_parts_are_clean_of_it(
    message: dict[str, Any], breakpoints: tuple[int, ...]
) -> None:
    (understood,) = messages_of(asked(messages=[{"role": "user", **message}]))

    assert understood.breakpoints == breakpoints
    assert "breakpoint" not in str(understood.content)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"content": [PARTS[0], PARTS[1] | {"prompt_cache_breakpoint": "yes"}]},
            "messages[0].content[1].prompt_cache_breakpoint",
        ),
        ({"content": "a", "prompt_cache_breakpoint": 1}, "messages[0].prompt_cache_breakpoint"),
    ],
)
def test_a_mark_of_another_kind_is_refused(message: dict[str, Any], param: str) -> None:
    assert refused(asked, messages=[{"role": "user", **message}]).param == param


def test_what_was_known_of_the_first_prompt_is_told_in_the_timings() -> None:
    usages = [
        replace(USAGE, reuse=ReuseExplanation("differs", 5, why, 7, "there was a", " dog", " cat")) for why in ("first", "second")
    ]
    calls = [(choice, [Finish("stop", usage=usage)]) for choice, usage in enumerate(usages)]
    request = completed(prompt=["a", "b"])
    body, stream = whole(request, calls), streamed(request, calls)

    assert body["timings"]["cache"] == {
        "matched": 5,
        "cause": "differs",
        "position": 7,
        "token": " dog",
        "instead": " cat",
        "why": "first",
    }
    assert chunks_of(stream)[-1]["timings"] == body["timings"]


# --- messages


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ({"role": "developer", "content": "a"}, Message("developer", "a")),
        ({"role": "user", "content": "a", "name": "Eve", "new_field": 1}, Message("user", "a", name="Eve")),
        ({"role": "assistant", "content": "<think>a</think>b"}, Message("assistant", "<think>a</think>b")),
        ({"role": "assistant", "content": "a", "reasoning_content": "hm"}, Message("assistant", "a", reasoning="hm")),
        ({"role": "assistant", "content": "a", "reasoning": "hm"}, Message("assistant", "a", reasoning="hm")),
        ({"role": "assistant", "content": None, "refusal": "no", "audio": None}, Message("assistant", "no")),
        ({"role": "assistant"}, Message("assistant", None)),
        ({"role": "tool", "content": "4", "tool_call_id": "c"}, Message("tool", "4", tool_call_id="c")),
        ({"role": "tool", "content": "4"}, Message("tool", "4")),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{ }"}}]},
            Message("assistant", None, tool_calls=(ToolCall("f", "{ }", "c"),)),
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]},
            Message("assistant", None, tool_calls=(ToolCall("f", '{"a":[1]}'),)),
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
            Message("user", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]),
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}]},
            Message("user", [{"type": "text", "text": "a"}], breakpoints=(0,)),
        ),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
            Message("assistant", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        ),
    ],
)
def test_messages_keep_what_they_say(given: dict[str, Any], understood: Message) -> None:
    assert messages_of(asked(messages=[given])) == (understood,)
