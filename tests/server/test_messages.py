"""Anthropic's own Python client against a real server, and what goes over that wire, written down.

Transcripts are made as in `test_transcripts`: `python tests/server/test_messages.py` writes them anew; read the difference.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from test_transcripts import FOLDER, merged

from servers import ENDLESS_WORD, Server, running

TASK: Any = [{"role": "user", "content": "Reply with JSON. The marker is 7."}]
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
STORY: Any = [{"role": "user", "content": "Tell me a story about a dog."}]
ENDLESS: Any = [{"role": "user", "content": "Tell me a story about a" + ENDLESS_WORD}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "get_weather", "description": "Get the weather in a city", "input_schema": CITY}
MARKER = {"type": "object", "properties": {"marker": {"type": "integer"}}, "required": ["marker"], "additionalProperties": False}
SHAPE = {"format": {"type": "json_schema", "schema": MARKER}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
QUIET = {"thinking": {"type": "disabled"}}
COLD = {"temperature": 0}  # the new version of the API has no word for it, so the client has none
FORCED = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
CASES: dict[str, dict[str, Any]] = {
    "messages-text": {"messages": TASK, **QUIET},
    "messages-thinking": {"messages": TASK},
    "messages-hidden-thinking": {"messages": TASK, "thinking": {"type": "adaptive", "display": "omitted"}},
    "messages-stop-sequence": {"messages": TASK, "stop_sequences": [": 7"], **QUIET},
    "messages-length": {"messages": TASK, "max_tokens": 3, **QUIET},
    "messages-nothing": {"messages": TASK, "max_tokens": 0},
    "messages-tool-use": {"messages": [QUESTION], "tools": [WEATHER]},
    "messages-cut-tool-use": {"messages": STORY, "max_tokens": 16, **FORCED, **QUIET},
    "messages-json-after-thinking": {
        "messages": STORY,
        "output_config": SHAPE,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    },
    "messages-error": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "messages-overflow": {"messages": [{"role": "user", "content": "long " * 3000}]},
}


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(claude: anthropic.Anthropic, messages: Any, **more: Any) -> anthropic.types.Message:
    fields: Any = {"model": "tiny-hybrid", "max_tokens": 200, "extra_body": COLD, **more}
    message: anthropic.types.Message = claude.messages.create(messages=messages, **fields)
    return message


def total(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


# --- what goes over the wire


def marked(text: str) -> str:
    """The text without what differs from run to run: ids, what was asked before, and how far an answer was when it began."""
    text = re.sub(r'"(msg|toolu)_[0-9a-f]+"', r'"\1_ID"', text)
    text = re.sub(r'"request_id":"[0-9a-f]+"', '"request_id":"ID"', text)
    text = re.sub(r'("(?:cache_creation_|cache_read_)?input_tokens"):\d+', r"\1:0", text)
    return re.sub(r'(message_start.*"output_tokens"):\d+(.*"thinking_tokens"):\d+', r"\1:0\2:0", text)


def joined(first: str, second: str) -> str | None:
    """Two pieces of one text as one event."""
    head = "event: content_block_delta\ndata: "
    if not (first.startswith(head) and second.startswith(head)):
        return None
    one, two = (json.loads(frame.removeprefix(head)) for frame in (first, second))
    if one["delta"]["type"] != two["delta"]["type"]:
        return None
    (name,) = one["delta"].keys() - {"type"}
    one["delta"][name] += two["delta"][name]
    return head + json.dumps(one, separators=(",", ":"), ensure_ascii=False)


def asked(server: Server, case: str, **more: Any) -> httpx2.Response:
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none", "anthropic-beta": "made-up-2030-01-01"}
    fields = {"model": "tiny-hybrid", "max_tokens": 200, "temperature": 0, "stream": True, **CASES[case], **more}
    reply: httpx2.Response = server.post("/v1/messages?beta=true", fields, headers=headers)
    return reply


def transcript(server: Server, case: str) -> str:
    reply = asked(server, case)
    return f"{reply.status_code} {reply.headers['content-type']}\n\n{marked(merged(reply.text, joined))}"


@pytest.mark.parametrize("case", CASES)
def test_the_wire_is_as_written(server: Server, case: str) -> None:
    assert transcript(server, case) == (FOLDER / f"{case}.txt").read_text()


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(("error", "overflow"))])
def test_streamed_is_whole(server: Server, claude: anthropic.Anthropic, case: str) -> None:
    whole = asked(server, case, stream=False).json()
    fields = {"max_tokens": 200, **CASES[case]}
    with claude.messages.stream(model="tiny-hybrid", extra_body=COLD, **fields) as stream:
        streamed = json.loads(stream.get_final_message().model_dump_json(exclude_none=True))

    told = {key: value for key, value in whole.items() if value is not None and key != "id"}
    for block in (*told["content"], *streamed["content"]):
        block.pop("id", None)
        if "cut" in case:
            block.pop("input")  # of half a call a stream can take nothing back
    assert {key: streamed[key] for key in told if key != "usage"} == {key: told[key] for key in told if key != "usage"}
    assert streamed["usage"]["output_tokens"] == told["usage"]["output_tokens"]


# --- Anthropic's own client


def test_it_thinks_and_answers(claude: anthropic.Anthropic) -> None:
    message = ask(claude, TASK)
    thought, text = message.content

    assert thought.type == "thinking"
    assert thought.thinking.startswith("The marker is 7.")
    assert thought.signature
    assert text.type == "text"
    assert text.text == '{"marker": 7}'
    assert message.stop_reason == "end_turn"
    assert message._request_id == message.id.removeprefix("msg_")


def test_a_budget_ends_the_thinking(claude: anthropic.Anthropic) -> None:
    message = ask(claude, STORY, thinking={"type": "enabled", "budget_tokens": 5}, max_tokens=40)

    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens <= 6  # and the mark that closes it
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_a_call_that_must_come_is_the_only_one_of_a_model_that_asks_for_no_other_and_results_of_two_are_taken(
    claude: anthropic.Anthropic,
) -> None:
    calls: list[Any] = []
    for city in ("Rome", "Oslo"):
        town = {**WEATHER, "input_schema": {**CITY, "properties": {"city": {"enum": [city]}}}, "strict": True}
        wild: Any = {"tools": [town], "tool_choice": {"type": "any"}, **QUIET}
        for seed in range(10, 14):
            called = ask(claude, [QUESTION], extra_body={"temperature": 2.0, "seed": seed}, **wild)
            assert called.stop_reason == "tool_use"
            assert [block.input for block in called.content if block.type == "tool_use"] == [{"city": city}]
        calls += called.content
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    told = ask(claude, [QUESTION, {"role": "assistant", "content": calls}, {"role": "user", "content": results}], tools=[WEATHER])

    assert len({call.id for call in calls}) == 2
    assert told.content


def test_the_result_of_a_tool_is_told_in_words_and_the_turn_before_is_known(claude: anthropic.Anthropic) -> None:
    called = ask(claude, [QUESTION], tools=[WEATHER])
    call = called.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Paris"}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}

    told = ask(claude, [QUESTION, called.to_param(), result], tools=[WEATHER])

    assert told.content[-1].type == "text"
    assert "sunny" in told.content[-1].text
    assert told.usage.cache_read_input_tokens is not None
    assert told.usage.cache_read_input_tokens >= 0.95 * total(called.usage)


def test_a_marked_block_is_where_the_next_prompt_goes_on(claude: anthropic.Anthropic) -> None:
    rules = {
        "type": "text",
        "text": "The rules of the house: " + "be kind to the dog. " * 20,
        "cache_control": {"type": "ephemeral"},
    }

    def usage(last: str) -> Any:
        said: Any = {"role": "user", "content": [rules, {"type": "text", "text": last}]}
        return ask(claude, [said], max_tokens=1).usage

    first, second = usage("May I shout?"), usage("Who feeds it?")
    alone: Any = [{"role": "user", "content": [rules, {"type": "text", "text": "Who feeds it?"}]}]

    assert first.cache_read_input_tokens < 50
    assert second.cache_read_input_tokens > 0.8 * total(second)
    assert total(second) == claude.messages.count_tokens(model="tiny-hybrid", messages=alone).input_tokens


def test_tokens_are_counted_with_tools_and_instructions(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "tiny-hybrid", "messages": [QUESTION], "tools": [WEATHER], "system": "Be brief."}

    counted = claude.messages.count_tokens(**fields).input_tokens

    assert counted == total(claude.messages.create(max_tokens=1, **fields).usage)
    assert counted > claude.messages.count_tokens(model="tiny-hybrid", messages=[QUESTION]).input_tokens


def test_the_bill_is_no_part_of_the_prompt_and_reminders_are(claude: anthropic.Anthropic) -> None:
    bill: Any = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=ab12;"}
    rule: Any = {"type": "text", "text": "Be brief."}
    reminder: Any = {"role": "system", "content": "Answer in English."}

    def count(messages: Any, *system: Any) -> int:
        return claude.messages.count_tokens(model="tiny-hybrid", messages=messages, system=list(system)).input_tokens

    assert count(TASK, bill, rule) == count(TASK, rule)
    assert count([*TASK, reminder], rule) > count(TASK, rule)


def test_an_answer_goes_on_from_where_it_was_begun(claude: anthropic.Anthropic) -> None:
    message = ask(claude, [*TASK, {"role": "assistant", "content": '{"marker":'}], **QUIET)

    assert [block.text for block in message.content if block.type == "text"] == [" 7}"]


def test_more_tokens_than_the_context_has_is_no_error_but_a_reason_to_stop(server: Server) -> None:
    long = {"role": "user", "content": "one two three " * 677}
    body = {"model": "tiny-hybrid", "max_tokens": 32000, "messages": [long], "temperature": 0}

    reply = server.post("/v1/messages", body).json()

    used = reply["usage"]
    assert reply["stop_reason"] == "model_context_window_exceeded"
    assert sum(used[f"{name}_tokens"] for name in ("input", "cache_creation_input", "cache_read_input", "output")) == 2048


def test_thinking_is_no_demand_where_it_is_sent_by_habit(claude: anthropic.Anthropic) -> None:
    message = ask(claude, TASK, thinking={"type": "adaptive"}, output_config={"effort": "high"})

    assert [block.type for block in message.content] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("asked", "error", "kind", "words"),
    [
        ({"model": "claude-9"}, anthropic.NotFoundError, "not_found_error", "tiny-hybrid"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, anthropic.BadRequestError, "invalid_request_error", "image"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        ({"tools": [{"name": "a b", "input_schema": CITY}]}, anthropic.BadRequestError, "invalid_request_error", "tools[0].name"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(
    claude: anthropic.Anthropic, asked: dict[str, Any], error: type[anthropic.APIStatusError], kind: str, words: str
) -> None:
    fields: Any = {"model": "tiny-hybrid", "max_tokens": 5, "messages": TASK, **asked}
    with pytest.raises(error) as caught:
        claude.messages.create(**fields)

    body: Any = caught.value.body
    assert body["error"]["type"] == kind
    assert words in body["error"]["message"]
    assert body["request_id"] == caught.value.response.headers["request-id"] == caught.value.request_id


def test_a_cancelled_stream_ends_with_an_error_and_no_clean_end(server: Server, claude: anthropic.Anthropic) -> None:
    events = []
    with pytest.raises(anthropic.APIStatusError, match="cancelled"):  # noqa: SIM117, PT012 - the stream ends so, not its opening
        with claude.messages.stream(model="tiny-hybrid", max_tokens=1500, messages=ENDLESS) as stream:
            for event in stream:
                events.append(event.type)
                if event.type == "message_start":
                    assert server.post(f"/v1/requests/{event.message.id}/cancel", {}).status_code == 200

    assert "message_stop" not in events
    server.wait_idle()


def test_leaving_a_stream_frees_its_row(server: Server, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="tiny-hybrid", max_tokens=1500, messages=ENDLESS) as stream:
        next(iter(stream))

    server.wait_idle()


def test_models_are_listed_for_this_client_too(claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list()

    assert (model.id, model.type, model.max_input_tokens) == ("tiny-hybrid", "model", 2048)
    assert claude.models.retrieve("tiny-hybrid").display_name == "tiny-hybrid"


def test_somebody_is_there(server: Server) -> None:
    assert httpx2.head(server.url, verify=False).status_code == 200
    assert server.get("/").status_code == 200


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", "tiny-hybrid") as here:
        for case in sys.argv[1:] or CASES:
            (FOLDER / f"{case}.txt").write_text(transcript(here, case))
