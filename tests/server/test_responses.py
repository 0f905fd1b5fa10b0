"""Responses on a real server, by OpenAI's own client and as bytes on the wire.

The transcripts stand in `transcripts/`, pieces of text that follow each other written as one event.
`python tests/server/test_responses.py` writes them anew; read the difference.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from servers import ENDLESS_WORD, Server, running
from waiting import until

FOLDER = Path(__file__).parent / "transcripts"
TASK = "Reply with JSON. The marker is 7."
QUESTION = "What is the weather in Paris?"
GREEDY: dict[str, Any] = {"model": "tiny-hybrid", "temperature": 0}
QUIET: dict[str, Any] = {"reasoning": {"effort": "none"}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "Get the weather in a city", "parameters": CITY}
MARKER = {"type": "object", "properties": {"marker": {"type": "integer"}}, "required": ["marker"], "additionalProperties": False}
SHAPE: Any = {"format": {"type": "json_schema", "name": "m", "schema": MARKER, "strict": True}}
LARK = 'start: "*** Begin" LF "+hello" LF "*** End"\n%import common.LF'
PATCH: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
FILES: Any = {"type": "namespace", "name": "files", "description": "About files.", "tools": [PATCH]}
# The model ends after one call if it may.
TWO_CALLS: dict[str, Any] = {"input": QUESTION, "tools": [WEATHER], "tool_choice": "required", "min_tokens": 30}

CASES: dict[str, dict[str, Any]] = {
    "responses-text": {"input": TASK, **QUIET},
    "responses-thinking": {"input": [{"role": "user", "content": TASK}], "include": ["reasoning.encrypted_content"]},
    "responses-tool-call": {"input": QUESTION, "tools": [WEATHER]},
    "responses-two-calls": TWO_CALLS,
    "responses-json": {"input": TASK, "text": SHAPE},
    "responses-length": {"input": TASK, "max_output_tokens": 3, **QUIET},
    "responses-custom-tool": {
        "input": "Patch the file.",
        "tools": [FILES],
        "tool_choice": {"type": "custom", "name": "patch"},
        **QUIET,
    },
    "responses-error": {"input": [{"role": "user", "content": "a"}, {"type": "compaction"}]},
}


def marked(text: str) -> str:
    """The text without what differs from run to run."""
    text = re.sub(r'"(resp|rs|msg|fc|ctc)_[0-9a-f]{32}', r'"\1_ID', text)
    text = re.sub(r'"call_[0-9a-f]{24}"', '"call_ID"', text)
    text = re.sub(r'"(created_at|completed_at)":\d+', r'"\1":0', text)
    text = re.sub(r'"system_fingerprint":"[^"]*"', '"system_fingerprint":"VERSIONS"', text)
    text = re.sub(r'("\w+_(?:ms|per_second)"):[\d.e-]+', r"\1:0", text)
    text = re.sub(r'("(?:cache_n|prompt_n|cached_tokens|cache_write_tokens)"):\d+', r"\1:0", text)
    text = re.sub(r'"draft_n":.*?"drafts":\{.*?\}\},', "", text)  # how many depends on the clock
    return re.sub(r'"cache":\{"matched":.*?"why":"[^"\\]*(?:\\.[^"\\]*)*"\}', '"cache":"WHY"', text)


def events(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in stream.split("\n") if line.startswith("data: ")]


def transcript(server: Server, name: str) -> str:
    reply = server.post("/v1/responses", {**GREEDY, "stream": True, **CASES[name]})
    status = f"{reply.status_code} {reply.headers['content-type']}\n\n"
    if reply.status_code != 200:
        return status + reply.text
    merged: list[dict[str, Any]] = []
    for event in events(reply.text):
        if merged and event["type"].endswith(".delta") and merged[-1]["type"] == event["type"]:
            merged[-1]["delta"] += event["delta"]
        else:
            merged.append({**event, "sequence_number": len(merged)})
    lines = [json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in merged]
    return status + marked(
        "".join(f"event: {event['type']}\ndata: {line}\n\n" for event, line in zip(merged, lines, strict=True))
    )


def anonymous(response: dict[str, Any]) -> Any:
    """A response without what differs from run to run."""
    return json.loads(marked(json.dumps(response, separators=(",", ":"))))


@pytest.mark.parametrize("name", CASES)
def test_the_wire_is_as_written(server: Server, name: str) -> None:
    assert transcript(server, name) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("error")])
def test_the_whole_response_is_the_last_one_of_the_stream(server: Server, name: str) -> None:
    whole = server.post("/v1/responses", {**GREEDY, **CASES[name]}).json()
    last = events(server.post("/v1/responses", {**GREEDY, "stream": True, **CASES[name]}).text)[-1]["response"]

    assert anonymous(whole) == anonymous(last)


def test_openai_s_client_reads_text_and_thinking(client: openai.OpenAI) -> None:
    response = client.responses.create(input=TASK, instructions="Be brief.", reasoning={"summary": "auto"}, **GREEDY)

    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == '{"marker": 7}'
    thought = response.output[0]
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.summary[0].text == thought.content[0].text == "The marker is 7. I will put it in a JSON object."
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_openai_s_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.responses.stream(input=QUESTION, tools=[WEATHER], **GREEDY) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()

    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.delta") > 1
    call = response.output[-1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_two_calls_are_two_items(client: openai.OpenAI) -> None:
    fields = {name: value for name, value in TWO_CALLS.items() if name != "min_tokens"}
    both, one = (
        client.responses.create(**GREEDY, **fields, parallel_tool_calls=parallel, extra_body={"min_tokens": 30})
        for parallel in (True, False)
    )

    calls = [item for item in both.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", {"city": "Paris"})] * 2
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    assert [item.type for item in one.output].count("function_call") == 1


def test_a_tools_result_is_answered_with_the_history_sent_or_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, tools=[WEATHER], **GREEDY)
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked: Any = {"role": "user", "content": QUESTION}
    history: Any = [asked, *(item.model_dump(exclude_none=True) for item in first.output), result]

    sent = client.responses.create(input=history, tools=[WEATHER], **GREEDY)
    kept = client.responses.create(input=[result], previous_response_id=first.id, tools=[WEATHER], **GREEDY)
    references: Any = [asked, *({"type": "item_reference", "id": item.id} for item in first.output), result]
    referred = client.responses.create(input=references, tools=[WEATHER], **GREEDY)

    assert "sunny" in sent.output_text
    assert sent.output_text == kept.output_text == referred.output_text
    assert sent.usage is not None
    assert kept.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert kept.previous_response_id == first.id


def test_json_is_held_to_its_schema_after_the_thinking(client: openai.OpenAI) -> None:
    class Marker(BaseModel):
        marker: int

    parsed = client.responses.parse(input=TASK, text_format=Marker, **GREEDY)
    wild = client.responses.create(
        input="Tell me a story.", text=SHAPE, model="tiny-hybrid", temperature=1.5, extra_body={"seed": 4}
    )

    assert parsed.output_parsed == Marker(marker=7)
    assert [item.type for item in parsed.output] == ["reasoning", "message"]
    Marker.model_validate_json(wild.output_text)


def test_what_is_kept_can_be_read_listed_and_forgotten_by_its_key_alone(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(input=TASK, metadata={"a": "b"}, **GREEDY, **QUIET)
    second = client.responses.create(input="Again.", previous_response_id=first.id, **GREEDY, **QUIET, max_output_tokens=4)
    secret = client.responses.create(input=TASK, store=False, **GREEDY, **QUIET)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)

    assert client.responses.retrieve(first.id) == first
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items.data] == ["message", "message"]
    assert items.has_more
    assert [item.id for item in client.responses.input_items.list(second.id)][::-1] == [
        item.id for item in client.responses.input_items.list(second.id, order="asc", limit=1)
    ]
    for asker, response in ((client, secret), (stranger, first)):
        with pytest.raises(openai.NotFoundError):
            asker.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="not found") as caught:
            asker.responses.create(input="Go on.", previous_response_id=response.id, **GREEDY)
        assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        stranger.responses.delete(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).status == "incomplete"


@pytest.mark.parametrize(
    ("path", "param"), [("?stream=true", "stream"), ("/input_items?limit=0", "limit"), ("/input_items?after=x", "after")]
)
def test_what_a_kept_response_can_not_be_asked_for_is_refused_by_name(client: openai.OpenAI, path: str, param: str) -> None:
    response = client.responses.create(input=TASK, max_output_tokens=1, **GREEDY)

    with pytest.raises(openai.BadRequestError) as caught:
        client.get(f"/responses/{response.id}{path}", cast_to=object)
    assert caught.value.param == param


def test_tokens_are_counted_as_they_will_be_read(client: openai.OpenAI) -> None:
    fields: Any = {"input": QUESTION, "instructions": "Be brief.", "tools": [WEATHER], "model": "tiny-hybrid"}

    counted = client.responses.input_tokens.count(**fields)
    response = client.responses.create(**fields, max_output_tokens=1)

    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_an_empty_input_warms_the_model_up(client: openai.OpenAI) -> None:
    assert client.responses.create(input="", model="tiny-hybrid", max_output_tokens=1).status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}]},
            "unsupported_parameter",
            "input[0]",
        ),
        ({"input": [{"role": "system", "content": "nobody asks"}]}, "invalid_messages", "template"),
        ({"input": "a", "background": True}, "unsupported_parameter", "background"),
        ({"input": "a", "temperature": -1}, None, "temperature"),
    ],
)
def test_what_can_not_be_answered_is_an_error_before_anything_else(
    client: openai.OpenAI, fields: dict[str, Any], code: str | None, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**GREEDY, **fields, "stream": stream})

    assert caught.value.code == code
    assert words in caught.value.message


@pytest.mark.parametrize("fields", [{"input": "long " * 3000}, {"input": "a", "max_output_tokens": 5000}])
def test_too_long_a_prompt_is_an_error_and_in_a_stream_its_last_event(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**GREEDY, **fields})
    first, _, last = client.responses.create(**{**GREEDY, **fields, "stream": True})

    assert caught.value.code == "context_length_exceeded"
    assert (first.type, last.type) == ("response.created", "response.failed")
    assert last.response.error is not None
    assert last.response.error.code == "context_length_exceeded"
    assert "maximum context length is 2048" in last.response.error.message


def test_tools_that_are_not_to_be_had_are_told_in_a_header(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "web_search"}, WEATHER, {"type": "image_generation"}]
    reply = client.responses.with_raw_response.create(input=QUESTION, tools=tools, **GREEDY, extra_body={"new": 1})

    assert reply.headers["x-ignored-params"] == "new, tools.image_generation, tools.web_search"
    assert reply.parse().output[-1].type == "function_call"


def test_a_request_id_that_comes_again_overwrites_no_stored_response(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"extra_headers": {"x-request-id": "twice"}, "max_output_tokens": 2, **GREEDY, **QUIET}
    first = client.responses.create(input="The first", **same)
    second = client.responses.create(input="The second", **same)
    items = [client.responses.input_items.list(one.id).data[0] for one in (first, second)]

    assert first.id != second.id
    assert [one.content[0].text for one in items] == ["The first", "The second"]  # type: ignore[union-attr]


def test_a_response_in_the_making_can_be_cancelled(server: Server, client: openai.OpenAI) -> None:
    endless: dict[str, Any] = {"input": "Tell me a story." + ENDLESS_WORD, "extra_body": {"ignore_eos": True}, **GREEDY, **QUIET}
    stream = client.responses.create(stream=True, **endless)
    first = next(iter(stream))
    assert first.type == "response.created"
    assert client.responses.cancel(first.response.id).status == "cancelled"
    last = list(stream)[-1]

    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "invalid_prompt"
    assert last.response.error.type == "request_cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(first.response.id)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.responses.create, extra_headers={"x-request-id": "mine-2"}, **endless)
        until(lambda: server.post("/v1/responses/resp_mine-2/cancel", {}).status_code != 404)
        with pytest.raises(openai.APIStatusError, match="cancelled"):
            waiting.result()
    server.wait_idle()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "log", "tiny-hybrid", environment={"WEFT_CACHE": folder}) as here,
    ):
        for case in sys.argv[1:] or CASES:
            (FOLDER / f"{case}.txt").write_text(transcript(here, case))
