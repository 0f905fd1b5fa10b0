"""Responses: bodies into generations, deltas into responses and golden event streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from dialect_kit import HEADER as PLAIN_HEADER
from dialect_kit import PARAMETERS, conversation_of, cut_at, events_of, messages_of, refused, token
from dialect_kit import streamed as stream_of
from dialect_kit import whole as body_of
from weft.api.dialect import ParsedRequest, seal
from weft.api.openai import chat
from weft.api.openai.responses import RULES, Past, ResponseRequest, translate
from weft.errors import (
    ContextTooLong,
    EngineDied,
    EngineStarting,
    InternalError,
    QueueFull,
    RequestCancelled,
    TemplateFailed,
    UnsupportedParameter,
    WeftError,
)
from weft.ipc.limits import Sampling
from weft.ipc.messages import DraftCounts
from weft.text.tools import wrap_custom_input
from weft.text.types import (
    CallArguments,
    CallClosed,
    CallOpened,
    Conversation,
    Delta,
    Finish,
    GenerationRequest,
    Message,
    Reasoning,
    ReuseExplanation,
    Text,
    ToolCall,
    Usage,
)

HEADER = replace(PLAIN_HEADER, read_sampling=lambda: Sampling(temperature=0.6, top_p=0.9))
USAGE = Usage(9, 4, cached_tokens=5, reasoning_tokens=2, reuse=ReuseExplanation("differs", 5, "because", 5))
STOPPED = Finish("stop", usage=USAGE)
ADD = {"type": "function", "name": "add", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now"}
PATCH = {"type": "custom", "name": "patch", "description": "Patch a file."}
FILES = {"type": "namespace", "name": "files", "description": "About files.", "tools": [{**ADD, "name": "read"}, PATCH]}
USER = Message("user", "Hi")
EVENTS = TypeAdapter(ResponseStreamEvent)


def asked(past: Past | None = None, **fields: Any) -> ParsedRequest:
    return translate({"input": "Hi", **fields}, past)


def conversation(past: Past | None = None, **fields: Any) -> Conversation:
    return conversation_of(asked(past, **fields))


def messages(*items: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return messages_of(asked(input=list(items), **fields))


def chatted(**fields: Any) -> GenerationRequest:
    """What Chat Completions makes of these fields."""
    return chat.translate({"messages": [{"role": "user", "content": "Hi"}], **fields}).generation


def streamed(request: ParsedRequest, *runs: Sequence[Delta]) -> list[dict[str, Any]]:
    return events(stream_of(request, [(0, run) for run in runs], HEADER))


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each one as OpenAI's own types have it, and numbered without a gap."""
    found = [json.loads(data) for data in events_of(stream)]
    for event in found:
        EVENTS.validate_python(event)
    first = found[0]["sequence_number"]
    assert [event["sequence_number"] for event in found] == list(range(first, first + len(found)))
    return found


def whole(request: ParsedRequest, *runs: Sequence[Delta]) -> dict[str, Any]:
    body = body_of(request, [(0, run) for run in runs], HEADER)
    Response.model_validate(body)
    return body


def told(found: list[dict[str, Any]]) -> list[str]:
    """Events in short: what, of which item, and the piece of text."""
    lines = []
    for event in found:
        what = [event["type"].removeprefix("response."), event.get("output_index"), event.get("delta")]
        lines.append(" ".join(str(one) for one in what if one is not None))
    return lines


# --- streams


def test_a_text_is_a_message_of_one_part() -> None:
    found = streamed(asked(), [Text("Hé")], [Text("l"), Text("lo")], [Text("")], [STOPPED])

    part = {"type": "output_text", "text": "Héllo", "annotations": [], "logprobs": []}
    message = {"id": "msg_7_0", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    place = {"item_id": "msg_7_0", "output_index": 0, "content_index": 0}
    assert told(found) == [
        "created",
        "in_progress",
        "output_item.added 0",
        "content_part.added 0",
        "output_text.delta 0 Hé",
        "output_text.delta 0 llo",
        "output_text.done 0",
        "content_part.done 0",
        "output_item.done 0",
        "completed",
    ]
    assert found[2]["item"] == {**message, "status": "in_progress", "content": []}
    assert found[3] == {"type": "response.content_part.added", "sequence_number": 3, **place, "part": {**part, "text": ""}}
    assert found[4]["logprobs"] == []
    assert found[6] == {"type": "response.output_text.done", "sequence_number": 6, **place, "text": "Héllo", "logprobs": []}
    assert found[7]["part"] == part
    assert found[8]["item"] == message
    assert found[9]["response"]["output"] == [message]


def test_thinking_comes_first_as_an_item_of_its_own() -> None:
    found = streamed(asked(), [Reasoning("h"), Reasoning("m"), Text("4"), STOPPED])

    assert told(found)[2:] == [
        "output_item.added 0",
        "content_part.added 0",
        "reasoning_text.delta 0 hm",
        "reasoning_text.done 0",
        "content_part.done 0",
        "output_item.done 0",
        "output_item.added 1",
        "content_part.added 1",
        "output_text.delta 1 4",
        "output_text.done 1",
        "content_part.done 1",
        "output_item.done 1",
        "completed",
    ]
    thought = {"id": "rs_7_0", "type": "reasoning", "status": "completed", "summary": []}
    assert found[7]["item"] == {**thought, "content": [{"type": "reasoning_text", "text": "hm"}]}


def test_thinking_is_told_as_a_summary_and_sealed_for_who_asks() -> None:
    found = streamed(
        asked(reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"]), [Reasoning("hm")], [Text("4"), STOPPED]
    )

    assert told(found)[2:12] == [
        "output_item.added 0",
        "reasoning_summary_part.added 0",
        "content_part.added 0",
        "reasoning_summary_text.delta 0 hm",
        "reasoning_text.delta 0 hm",
        "reasoning_summary_text.done 0",
        "reasoning_summary_part.done 0",
        "reasoning_text.done 0",
        "content_part.done 0",
        "output_item.done 0",
    ]
    item = found[11]["item"]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert messages(item | {"content": None, "summary": []}, {"role": "assistant", "content": "4"})[0].reasoning == "hm"


def test_calls_are_told_as_they_are_written_and_done_when_they_are_complete() -> None:
    deltas: list[Delta] = [CallOpened(0, "call_a", "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallClosed(0)]
    deltas += [CallOpened(1, "call_b", "now"), CallArguments(1, "{}"), CallClosed(1), Finish("tool_calls", usage=USAGE)]
    found = streamed(asked(tools=[ADD, NOW]), deltas[:2], deltas[2:])

    assert told(found)[2:] == [
        "output_item.added 0",
        'function_call_arguments.delta 0 {"a"',
        "function_call_arguments.delta 0 : 1}",
        "function_call_arguments.done 0",
        "output_item.done 0",
        "output_item.added 1",
        "function_call_arguments.delta 1 {}",
        "function_call_arguments.done 1",
        "output_item.done 1",
        "completed",
    ]
    call = {"id": "fc_7_0", "type": "function_call", "call_id": "call_a", "name": "add"}
    assert found[2]["item"] == {**call, "status": "in_progress", "arguments": ""}
    assert found[5]["arguments"] == '{"a": 1}'
    assert found[6]["item"] == {**call, "status": "completed", "arguments": '{"a": 1}'}
    assert [item["call_id"] for item in found[-1]["response"]["output"]] == ["call_a", "call_b"]


def test_a_custom_tool_is_called_with_its_bare_text_and_by_its_own_name() -> None:
    deltas = [
        CallOpened(0, "call_a", "files__patch"),
        CallArguments(0, '{"input": "a\\nb'),
        CallArguments(0, '\\"c"}'),
        CallClosed(0),
    ]
    found = streamed(asked(tools=[FILES]), *([delta] for delta in deltas), [Finish("tool_calls", usage=USAGE)])

    assert told(found)[2:-1] == [
        "output_item.added 0",
        "custom_tool_call_input.delta 0 a\nb",
        'custom_tool_call_input.delta 0 "c',
        "custom_tool_call_input.done 0",
        "output_item.done 0",
    ]
    call = {"id": "ctc_7_0", "type": "custom_tool_call", "call_id": "call_a", "name": "patch", "namespace": "files"}
    assert found[-2]["item"] == {**call, "status": "completed", "input": 'a\nb"c'}


def test_a_call_that_is_cut_is_never_told_as_done() -> None:
    request, cut = asked(tools=[ADD]), Finish("length", usage=USAGE)
    found = streamed(request, [CallOpened(0, "call_a", "add"), CallArguments(0, '{"a"')], [cut])

    assert told(found)[2:] == ["output_item.added 0", 'function_call_arguments.delta 0 {"a"', "incomplete"]
    response = found[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(item["status"], item["arguments"]) for item in response["output"]] == [("incomplete", '{"a"')]


def test_a_text_that_is_cut_is_told_to_its_end() -> None:
    found = streamed(asked(max_output_tokens=1), [Text("a"), Finish("length", usage=USAGE)])

    assert [event["type"] for event in found[-2:]] == ["response.output_item.done", "response.incomplete"]
    assert found[-2]["item"]["status"] == "incomplete"
    assert found[-1]["response"]["completed_at"] is None


def test_log_probabilities_come_with_the_text() -> None:
    shown_token = token("a", -0.5, ("b", -1.0))
    for fields in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}):
        found = streamed(asked(**fields), [Text("", (shown_token,))], [Text("a", (shown_token,)), STOPPED])
        shown = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [{"token": "b", "bytes": [98], "logprob": -1.0}]}
        assert [event["logprobs"] for event in found[4:6]] == [[shown], [shown]]
        assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == [shown, shown]
    assert asked(top_logprobs=3).generation.sampling["logprobs"] == 3
    assert asked(include=["message.output_text.logprobs"]).generation.sampling["logprobs"] == 0
    assert "logprobs" not in asked(top_logprobs=0).generation.sampling


def test_silence_is_filled_with_a_comment_and_an_event_that_says_nothing_new() -> None:
    reply = asked().reply(HEADER)
    reply.frame_opening()
    beat = reply.frame_heartbeat(512, 1024)

    assert beat.startswith(b": prefill 512/1024\n\nevent: response.in_progress\n")
    (event,) = events(beat)
    assert event["sequence_number"] == 2
    assert events(reply.frame_deltas(0, [Text("a")]))[0]["sequence_number"] == 3
    assert events(reply.frame_heartbeat(1024, 1024))[0]["response"]["output"] == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ContextTooLong("This model's maximum context length is 5 tokens.", "messages"), "context_length_exceeded", "context"),
        (TemplateFailed("no user", "messages"), "invalid_prompt", "no user"),
        (RequestCancelled("the request was cancelled"), "invalid_prompt", "cancelled"),
        (QueueFull("too many", retry_after=3), "rate_limit_exceeded", "too many. Please try again in 3s."),
        (EngineStarting("wait", retry_after=2), "server_is_overloaded", "Please try again in 2s."),
        (EngineDied("it died"), "server_error", "it died"),
        (InternalError("secret"), "server_error", "internal error"),
    ],
)
def test_a_failure_is_the_last_event_and_has_a_code_that_clients_know(error: WeftError, code: str, words: str) -> None:
    reply = asked().reply(HEADER)
    reply.frame_opening()
    reply.frame_deltas(0, [Reasoning("hm"), Text("so fa")])
    frame = reply.frame_error(error)

    assert frame.startswith(b"event: response.failed\n")
    failed = json.loads(frame.decode().splitlines()[1].removeprefix("data: "))["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == code
    assert words in failed["error"]["message"]
    assert "secret" not in failed["error"]["message"]
    assert [item["status"] for item in failed["output"]] == ["completed", "incomplete"]


# --- streamed = whole

PIECES = st.text(max_size=4)
CALLS = st.sampled_from(
    [("add", '{"a": 1}'), ("files__read", "{}"), ("files__patch", wrap_custom_input('x"\né😀')), ("unknown", "[1]")]
)


@st.composite
def answers(draw: st.DrawFn) -> list[Sequence[Delta]]:
    """What a model may say, in pieces that come in any groups."""
    deltas: list[Delta] = [Reasoning(text) for text in draw(st.lists(PIECES, max_size=3))]
    deltas += [Text(text) for text in draw(st.lists(PIECES, max_size=3))]
    calls = draw(st.lists(CALLS, max_size=3))
    for index, (name, arguments) in enumerate(calls):
        deltas.append(CallOpened(index, f"call_{index}", name))
        cuts = draw(st.sets(st.integers(1, len(arguments) - 1), max_size=4))
        deltas += [CallArguments(index, piece) for piece in cut_at([*cuts], arguments)]
        deltas.append(CallClosed(index))
    end = draw(st.integers(0, len(deltas)))
    finish = Finish("length" if end < len(deltas) else "tool_calls" if calls else "stop", usage=USAGE)
    deltas = [*deltas[:end], finish]
    return cut_at([*draw(st.sets(st.integers(1, len(deltas)), max_size=5))], deltas)


@settings(max_examples=150)
@given(answers())
def test_streamed_is_whole_and_the_pieces_are_the_items(runs: list[Sequence[Delta]]) -> None:
    request = asked(tools=[ADD, FILES], reasoning={"summary": "auto"})
    found = streamed(request, *runs)
    response = found[-1]["response"]
    body = whole(request, *runs)

    assert response | {"completed_at": 0} == body | {"completed_at": 0}
    assert [event["item"] for event in found if event["type"].endswith("item.done")] == [
        item for item in response["output"] if item["status"] == "completed" or item["type"] in ("message", "reasoning")
    ]
    for index, item in enumerate(response["output"]):
        kinds = ("output_text", "reasoning_text", "function_call_arguments", "custom_tool_call_input")
        pieces = "".join(
            event["delta"]
            for event in found
            if event.get("output_index") == index and event["type"].split(".")[1] in kinds and event["type"].endswith(".delta")
        )
        assert pieces == item.get("arguments", item.get("input", (item.get("content") or [{}])[0].get("text")))


@settings(max_examples=150)
@given(st.text(), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_any_split_of_a_custom_call_gives_the_same_text(text: str, places: list[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    pieces = cut_at([*{place for place in places if 0 < place < len(arguments)}], arguments)
    found = streamed(
        asked(tools=[PATCH]),
        [CallOpened(0, "call_a", "patch")],
        *([CallArguments(0, piece)] for piece in pieces),
        [CallClosed(0), Finish("tool_calls", usage=USAGE)],
    )

    wanted = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert "".join(event["delta"] for event in found if event["type"].endswith("input.delta")) == wanted
    assert found[-2]["item"]["input"] == wanted


# --- the response


def test_a_response_tells_its_request_back() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "user": "u",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "tool_choice": "none",
        "service_tier": "flex",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    }
    body = whole(asked(**fields, tools=[ADD, {"type": "web_search"}], truncation="auto"), [Text("{}"), STOPPED])

    assert {name: body[name] for name in fields if name not in ("text", "reasoning")} == {
        name: value for name, value in fields.items() if name not in ("text", "reasoning")
    }
    assert body["reasoning"] == {"effort": "low", "summary": None}
    form = {"type": "json_schema", "name": "n", "description": None, "schema": {"type": "object"}, "strict": None}
    assert body["text"] == {"format": form, "verbosity": "low"}
    assert body["tools"] == [{**ADD, "description": None, "strict": None}, {"type": "web_search"}]
    assert body["truncation"] == "disabled"
    assert (body["temperature"], body["top_p"], body["presence_penalty"]) == (0.6, 0.9, 0.0)
    assert body["status"] == "completed"
    assert body["completed_at"] >= body["created_at"] == 1
    assert body["id"] == "resp_7"


def test_usage_is_in_the_words_of_this_dialect() -> None:
    body = whole(asked(), [Text("a"), STOPPED])

    assert body["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 3},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }
    assert body["timings"]["cache_n"] == 5
    off = Usage(9, 4, reuse=ReuseExplanation("off", 0, ""))
    assert whole(asked(), [Finish("stop", usage=off)])["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


def test_drafts_are_told_in_the_timings() -> None:
    drafted = Usage(9, 4, drafts=DraftCounts({"forced": 3, "mtp": 2}, {"forced": 3}))
    timings = whole(asked(), [Finish("stop", usage=drafted)])["timings"]

    assert (timings["draft_n"], timings["draft_n_accepted"]) == (5, 3)
    assert timings["drafts"] == {"forced": {"drafted": 3, "accepted": 3}, "mtp": {"drafted": 2, "accepted": 0}}


def test_a_loose_schema_and_a_stop_string_are_told() -> None:
    body = whole(asked(), [Text("a"), Finish("stop", "x", USAGE, ("$: wrong",))])

    assert body["stop_reason"] == "x"
    assert body["schema_validation"] == {"valid": False, "errors": ["$: wrong"]}


def test_a_finished_response_is_given_to_who_keeps_it_unless_nobody_should() -> None:
    kept: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    past = Past(
        items=({"id": "item_1_in0", "type": "message", "role": "user", "content": "Before"},), keep=lambda *one: kept.append(one)
    )

    body = whole(asked(past), [Text("a"), STOPPED])
    assert not whole(asked(past, store=False), [Text("a"), STOPPED])["store"]
    assert not whole(asked(), [Text("a"), STOPPED])["store"]

    ((response, items),) = kept
    assert response["store"]
    assert response == body
    assert [item["id"] for item in items] == ["item_1_in0", "item_7_in1"]
    assert items[1]["content"] == [{"type": "input_text", "text": "Hi"}]


# --- input items


def test_an_input_is_a_text_or_items_and_instructions_go_before() -> None:
    assert conversation(instructions="Be brief.").messages == (Message("system", "Be brief."), USER)
    assert conversation(input="").messages == (Message("user", ""),)
    assert messages(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "system", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "e", "annotations": []}, {"type": "refusal", "refusal": "f"}],
        },
    ) == (
        Message("developer", [{"type": "text", "text": "a"}]),
        Message("system", "b"),
        Message("user", [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]),
        Message("assistant", [{"type": "text", "text": "e", "annotations": []}, {"type": "text", "text": "f"}]),
    )


def test_thinking_text_and_calls_that_follow_each_other_are_one_answer() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": "Wait."}
    calls = [
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "namespace": "files", "input": 'x"'},
    ]
    results = [
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
    ]
    found = messages(thought, said, *calls, *results, thought, calls[0], said, said)

    assert found == (
        Message("assistant", "Wait.", "hm", (ToolCall("add", "{}", "a"), ToolCall("files__patch", '{"input": "x\\""}', "b"))),
        Message("tool", "1", tool_call_id="a"),
        Message("tool", [{"type": "text", "text": "ok"}], tool_call_id="b"),
        Message("assistant", None, "hm", (ToolCall("add", "{}", "a"),)),
        Message("assistant", "Wait."),
        Message("assistant", "Wait."),
    )
    assert [message.place for message in found[:3]] == ["input[0]", "input[4]", "input[5]"]


@pytest.mark.parametrize(
    ("thought", "reasoning"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": seal("b")}, "a"),
        ({"summary": [{"type": "summary_text", "text": "c"}], "encrypted_content": seal("bé")}, "bé"),
        ({"summary": [{"type": "summary_text", "text": "c"}], "encrypted_content": "gAAAAAB"}, "c"),
        ({"summary": [], "encrypted_content": "weft:!"}, None),
        ({"summary": []}, None),
    ],
)
def test_thinking_is_given_back_as_far_as_it_can_be_read(thought: dict[str, Any], reasoning: str | None) -> None:
    answer = {"role": "assistant", "content": "4"}

    assert messages({"type": "reasoning", **thought}, answer) == (Message("assistant", "4", reasoning),)
    assert messages({"type": "reasoning", **thought}, {"role": "user", "content": "Hi"}) == (USER,)


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        ({"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls"]}}, "local_shell", {"command": ["ls"]}),
        ({"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"]}}, "shell", {"commands": ["ls"]}),
        ({"type": "apply_patch_call", "call_id": "a", "operation": {"path": "x"}}, "apply_patch", {"path": "x"}),
        ({"type": "tool_search_call", "call_id": "a", "arguments": {"q": 1}}, "tool_search", {"q": 1}),
    ],
)
def test_calls_of_openai_s_own_tools_are_shown_as_calls(item: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    (message,) = messages(item)

    assert [(call.name, json.loads(call.arguments), call.id) for call in message.tool_calls] == [(name, arguments, "a")]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "local_shell_call_output", "id": "a", "output": "ok"}, "ok"),
        ({"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "ok"}]}, '[{"stdout":"ok"}]'),
        ({"type": "apply_patch_call_output", "call_id": "a", "status": "failed"}, "failed"),
        ({"type": "tool_search_output", "call_id": "a", "tools": []}, "[]"),
    ],
)
def test_their_results_are_shown_as_results(item: dict[str, Any], text: str) -> None:
    assert messages(item) == (Message("tool", text, tool_call_id="a"),)


@pytest.mark.parametrize(
    ("item", "name", "arguments", "text"),
    [
        ({"type": "web_search_call", "action": {"query": "x"}, "status": "completed"}, "web_search", {"query": "x"}, "completed"),
        ({"type": "file_search_call", "id": "a", "queries": ["x"], "results": [1]}, "file_search", {"queries": ["x"]}, "[1]"),
        (
            {"type": "code_interpreter_call", "id": "a", "code": "1", "outputs": None},
            "code_interpreter",
            {"code": "1"},
            "completed",
        ),
        ({"type": "mcp_call", "id": "a", "name": "get", "arguments": '{"a":1}', "output": "ok"}, "get", {"a": 1}, "ok"),
    ],
)
def test_what_was_called_elsewhere_is_shown_with_its_result(
    item: dict[str, Any], name: str, arguments: dict[str, Any], text: str
) -> None:
    call, result = messages(item)

    assert [(one.name, json.loads(one.arguments)) for one in call.tool_calls] == [(name, arguments)]
    assert (result.role, result.content, result.tool_call_id) == ("tool", text, call.tool_calls[0].id)


def test_an_image_goes_the_way_of_all_images() -> None:
    (message,) = messages({"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}]})

    assert message.content == [{"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]
    assert message.place == "input[0]"


def test_what_was_said_before_goes_before_and_a_call_that_was_cut_is_left_out() -> None:
    cut = {"type": "function_call", "status": "incomplete", "call_id": "a", "name": "add", "arguments": '{"a'}
    past = Past(items=({"type": "message", "role": "user", "content": "Before"}, cut))

    found = conversation(past, previous_response_id="resp_1", instructions="Be brief.").messages
    assert found == (Message("system", "Be brief."), Message("user", "Before"), USER)
    assert conversation(past, previous_response_id="resp_1", input=None).messages == (Message("user", "Before"),)


def test_an_item_that_is_only_referred_to_is_taken_from_what_is_kept() -> None:
    past = Past(referred={"msg_1": {"type": "message", "role": "user", "content": "Hi"}})

    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        assert conversation(past, input=[reference]).messages == (USER,)
        error = refused(asked, input=[reference])
        assert "no item 'msg_1' is kept here" in str(error)
        assert error.param == "input[0].id"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0].type"),
        ([{"type": 5}], "input[0].type"),
        ([{"type": "message", "role": "tool", "content": "a"}], "input[0].role"),
        ([{"type": "message", "role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [5]}], "input[0].content[0]"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "a"}], "input[0].output"),
        ([{"type": "custom_tool_call", "call_id": "a", "name": "f"}], "input[0].input"),
        ([{"type": "shell_call", "call_id": "a"}], "input[0].action"),
        ([{"type": "shell_call_output", "call_id": 5, "output": "a"}], "input[0].call_id"),
        ([], "input"),
        (None, "input"),
        (5, "input"),
        ([5], "input[0]"),
    ],
)
def test_an_item_that_can_not_be_shown_is_refused_by_its_place(items: Any, param: str) -> None:
    error = refused(translate, {"input": items})

    assert error.param == param
    assert param in str(error)


def test_items_of_a_kind_that_nobody_knows_are_left_out_and_told() -> None:
    request = asked(input=[{"role": "user", "content": "a"}, {"type": "computer_call", "call_id": "b"}])

    assert [message.content for message in messages_of(request)] == ["a"]
    assert request.ignored == ("input.computer_call",)


# --- tools


def test_tools_are_the_same_as_in_chat_completions() -> None:
    strict = {**ADD, "strict": True, "parameters": {**ADD["parameters"], "required": ["a"], "additionalProperties": False}}
    tools = [{**strict, "description": "Add."}, {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}]
    nested = [
        {"type": tool["type"], tool["type"]: {key: value for key, value in tool.items() if key != "type"}} for tool in tools
    ]
    theirs = chatted(tools=nested)

    for sent in (tools, nested):
        ours = asked(tools=sent).generation
        assert ours.tool_choice == theirs.tool_choice
        assert ours.prompts == theirs.prompts


def test_a_namespace_is_flattened_and_says_what_it_is_for() -> None:
    shown = conversation(tools=[FILES, NOW]).tools

    assert [tool["function"]["name"] for tool in shown] == ["files__read", "files__patch", "now"]
    assert [tool["function"].get("description") for tool in shown] == ["About files.", "Patch a file.", None]


def test_tools_that_are_not_to_be_had_are_left_out_and_told() -> None:
    kinds = ["web_search", "file_search", "code_interpreter", "image_generation", "local_shell", "computer_use", "shell"]
    request = asked(tools=[*({"type": kind} for kind in kinds), NOW])

    assert set(request.ignored) == {f"tools.{kind}" for kind in kinds}
    assert [tool["function"]["name"] for tool in conversation(tools=[{"type": "shell"}, NOW]).tools] == ["now"]
    assert asked(tools=[{"type": "web_search"}], tool_choice="auto").generation.tool_choice is None


@pytest.mark.parametrize(
    ("given", "mode", "names"),
    [
        (None, "auto", ["files__read", "files__patch", "now"]),
        ("required", "required", ["files__read", "files__patch", "now"]),
        ({"type": "function", "name": "now"}, "required", ["now"]),
        ({"type": "function", "name": "read"}, "required", ["files__read"]),
        ({"type": "custom", "name": "patch", "namespace": "files"}, "required", ["files__patch"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "files"}]},
            "auto",
            ["files__read", "files__patch"],
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, {"type": "function", "name": "now"}]},
            "required",
            ["now"],
        ),
    ],
)
def test_a_choice_among_tools_is_in_the_clients_names(given: Any, mode: str, names: list[str]) -> None:
    choice = asked(tools=[FILES, NOW], tool_choice=given).generation.tool_choice

    assert choice is not None
    assert (choice.mode, [tool.name for tool in choice.tools]) == (mode, names)
    shown = conversation(tools=[FILES, NOW], tool_choice=given).tools
    assert len(shown) == 3


def test_one_call_at_a_time_is_one_call_at_a_time() -> None:
    for parallel in (True, False):
        choice = asked(tools=[NOW], parallel_tool_calls=parallel).generation.tool_choice
        assert choice is not None
        assert choice.is_parallel == parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [NOW, {"type": "function"}]}, "tools[1].name"),
        (
            {"tools": [{"type": "web_search"}, {**FILES, "tools": [NOW, {"type": "function", "name": "a b"}]}]},
            "tools[1].tools[1].name",
        ),
        ({"tools": [FILES, {"type": "function", "name": "files__read"}]}, "tools[1].name"),
        ({"tools": [{**ADD, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format"),
        ({"tools": [{**FILES, "tools": [FILES]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "namespace"}]}, "tools[0]"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [NOW, {"type": "mcp"}]}, "tools[1]"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "now", "namespace": 5}}, "tool_choice.namespace"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [{"type": "shell"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
    ],
)
def test_bad_tools_are_refused_by_their_place(fields: dict[str, Any], param: str) -> None:
    assert refused(asked, **fields).param == param


# --- the other fields


def test_fields_act_as_in_chat_completions() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
        "cache_salt": "s",
        "speculate": False,
    }
    same |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "service_tier": "priority", "prompt_cache_key": "k"}
    same |= {"chat_template_kwargs": {"a": 1}, "thinking_token_budget": 9, "guided_regex": "a+", "logit_bias": {"5": 1}}
    ours = asked(**same, max_output_tokens=9, reasoning={"effort": "low"}, model="m", top_logprobs=2).generation
    fields = {"max_tokens": 9, "reasoning_effort": "low", "model": "m", "logprobs": True, "top_logprobs": 2}

    assert ours == chatted(**same, **fields)


@pytest.mark.parametrize(
    ("form", "theirs"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}},
        ),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"not": {}}}}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}},
        ),
    ],
)
def test_a_format_is_held_as_in_chat_completions(form: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert asked(text={"format": form}).generation.grammar == chatted(response_format=theirs).grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"properties": {"a": {"not": {}}}}, "strict": True}}},
            "text.format.schema.properties.a",
        ),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"speculate": "no"}, "speculate"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(asked, **fields).param == param


def test_what_does_not_act_is_taken_and_what_nobody_knows_is_told() -> None:
    quiet = {
        "client_metadata": {"a": 1},
        "safety_identifier": "s",
        "background": False,
        "max_tool_calls": 3,
        "stream_options": {},
    }
    loud = {"personality": "friendly", "include": ["web_search_call.results", "new.thing"]}

    assert asked(**quiet).ignored == ()
    assert asked(**quiet, **loud).ignored == ("personality", "include.new.thing")


@pytest.mark.parametrize("name", [name for name in RULES.refused if name not in ResponseRequest.__struct_fields__])
def test_every_field_that_is_not_done_is_refused_when_it_would_act(name: str) -> None:
    error = refused(asked, **{name: {"would": "act"}})

    assert isinstance(error, UnsupportedParameter)
    assert error.param == name
    for harmless in (*RULES.refused[name], None):
        assert asked(**{name: harmless}).ignored == ()


def test_what_codex_sends_is_understood() -> None:
    lark = 'start: begin hunk+ end\nbegin: "*** Begin Patch" LF\nhunk: /[a-z]+/ LF\nend: "*** End Patch" LF?\n%import common.LF'
    body = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
            {"type": "reasoning", "summary": [], "encrypted_content": seal("hm")},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Run.", "strict": False, "parameters": {"type": "object"}},
            {**PATCH, "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": lark}},
            FILES,
            {"type": "web_search", "external_web_access": False},
            {"type": "tool_search", "execution": "client", "description": "Search.", "parameters": {}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x": "y"},
        "stream_options": {"include_obfuscation": False},
        "service_tier": "priority",
    }
    request = translate(body)

    assert request.ignored == ("tools.tool_search", "tools.web_search")
    assert request.stream
    generation = request.generation
    assert (generation.session, generation.priority, generation.effort) == ("thread", 10, "medium")
    prompt = conversation_of(request)
    assert [message.role for message in prompt.messages] == ["system", "developer", "user", "assistant", "tool"]
    assert prompt.messages[3].reasoning == "hm"
    assert generation.tool_choice is not None
    assert [tool.name for tool in generation.tool_choice.tools] == ["shell", "apply_patch", "files__read", "files__patch"]
