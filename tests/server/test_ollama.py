"""Ollama's wire on a real server: what its programs ask first, answers streamed and whole, tools, and what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from fronts import front
from servers import Server

TASK = [{"role": "user", "content": "Reply with JSON. The marker is 7."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
GREEDY = {"temperature": 0, "num_predict": 200}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "thinking": ("/api/chat", {"messages": TASK}),
    "quiet": ("/api/chat", {"messages": TASK, "think": False}),
    "json": ("/api/chat", {"messages": TASK, "format": "json"}),
    "tool": ("/api/chat", {"messages": [QUESTION], "tools": [WEATHER]}),
    "generate": ("/api/generate", {"prompt": TASK[0]["content"], "system": "Be brief."}),
    "raw": ("/api/generate", {"prompt": "Once upon a time", "raw": True, "options": {**GREEDY, "num_predict": 9}}),
}


def ask(server: Server, path: str, **fields: Any) -> Any:
    return server.post(path, {"model": "tiny-hybrid", "options": GREEDY, **fields})


def lines(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = ask(server, path, **fields)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def summed(told: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream's lines say together."""
    said = [line.get("message", line) for line in told]
    return {
        "text": "".join(one.get("content", one.get("response", "")) for one in said),
        "thinking": "".join(one.get("thinking", "") for one in said),
        "calls": [call["function"] for one in said for call in one.get("tool_calls", ())],
        **{name: told[-1][name] for name in ("done", "done_reason", "prompt_eval_count", "eval_count")},
    }


@pytest.mark.parametrize("name", CASES)
def test_the_whole_reply_says_what_the_stream_said(server: Server, name: str) -> None:
    path, fields = CASES[name]
    told = lines(server, path, **fields)
    whole = ask(server, path, stream=False, **fields).json()

    assert summed(told) == summed([whole])
    assert whole["eval_count"] > 0
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]


def test_thinking_can_be_had_and_left_out(server: Server) -> None:
    assert summed(lines(server, "/api/chat", messages=TASK, think=True))["thinking"]
    assert summed(lines(server, "/api/chat", messages=TASK, think=False))["thinking"] == ""


def test_a_schema_holds_after_the_thinking(server: Server) -> None:
    schema = {"type": "object", "properties": {"marker": {"enum": [7, 8]}}, "required": ["marker"], "additionalProperties": False}
    reply = ask(server, "/api/chat", messages=TASK, format=schema, stream=False).json()

    assert json.loads(reply["message"]["content"])["marker"] in (7, 8)
    assert reply["schema_validation"]["valid"] is True


def test_a_tool_is_called_and_its_result_told_in_words(server: Server) -> None:
    called = ask(server, "/api/chat", messages=[QUESTION], tools=[WEATHER], stream=False).json()
    (call,) = called["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", {"city": "Paris"})
    assert called["done_reason"] == "stop"

    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    answer = ask(server, "/api/chat", messages=[QUESTION, called["message"], result], tools=[WEATHER], stream=False).json()
    assert "sunny" in answer["message"]["content"]


def test_a_stop_string_and_a_length_end_an_answer(server: Server) -> None:
    stopped, cut = (
        ask(server, "/api/chat", messages=TASK, think=False, stream=False, options={"temperature": 0, **options}).json()
        for options in ({"stop": [": 7"]}, {"num_predict": 3})
    )

    assert stopped["done_reason"] == "stop"
    assert ": 7" not in stopped["message"]["content"]
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 3)


def test_programs_learn_what_is_served_and_what_it_can(server: Server) -> None:
    assert tuple(map(int, server.get("/api/version").json()["version"].split("."))) >= (0, 13, 4)
    (listed,) = server.get("/api/tags").json()["models"]
    (loaded,) = server.get("/api/ps").json()["models"]
    shown = server.post("/api/show", {"name": "tiny-hybrid:latest"}).json()

    assert listed["name"] == listed["model"] == loaded["name"] == "tiny-hybrid"
    assert listed["size"] > 10_000_000
    assert len(listed["digest"]) == 64
    assert datetime.fromisoformat(listed["modified_at"]) < datetime.fromisoformat(loaded["expires_at"])
    assert loaded["context_length"] == 2048
    assert shown["capabilities"] == ["completion", "tools", "thinking", "vision"]
    assert shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"] == 2048
    assert "im_start" in shown["template"]


def test_a_model_is_found_with_its_tag_and_asked_for_without_a_prompt(server: Server) -> None:
    reply = server.post("/api/generate", {"model": "tiny-hybrid:latest", "keep_alive": -1})

    assert (reply.json()["done"], reply.json()["done_reason"]) == (True, "load")


def test_what_is_ignored_is_told_in_a_header(server: Server) -> None:
    reply = ask(server, "/api/chat", messages=TASK, options={"num_predict": 1, "zebra": 512}, keep_alive="5m", colour="red")

    assert reply.headers["x-ignored-params"] == "colour, options.zebra"


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/api/chat", {"messages": TASK, "model": "nobody"}, 404, "no model 'nobody'"),
        (
            "/api/chat",
            {"messages": [{**QUESTION, "images": ["aGk="]}]},
            400,
            "messages[0].content[0]: the image is of no known format",
        ),
        ("/api/chat", {"messages": [QUESTION], "options": {"num_predict": 9999}}, 400, "maximum context length is 2048"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported here"),
        ("/api/show", {"model": "nobody"}, 404, "no model 'nobody'"),
        ("/api/embed", {"input": "x"}, 400, "has no embeddings"),
        ("/api/embeddings", {"prompt": "x"}, 400, "has no embeddings"),
        ("/api/create", {}, 404, "/api/create"),
    ],
)
def test_what_can_not_be_done_is_one_sentence(server: Server, path: str, fields: dict[str, Any], status: int, words: str) -> None:
    reply = ask(server, path, **fields)

    assert reply.status_code == status
    assert isinstance(reply.json()["error"], str)
    assert words in reply.json()["error"]


def test_silence_is_filled_with_lines_that_add_nothing_and_a_failure_is_the_last_line() -> None:
    body = {"model": "m", "prompt": "Once upon a time", "raw": True, "options": {"num_predict": 4}}
    with front({"m": ["--token-seconds", "0.15"]}, heartbeat_seconds=0.05) as server:
        told = [json.loads(line) for line in server.post("/api/generate", body).text.splitlines()]
        ended = server.post("/api/generate", body, headers={"x-request-timeout": "0.3"}).text.splitlines()

    assert told[-1]["done"] is True
    assert sum(line["response"] == "" for line in told[:-1]) > 2
    assert json.loads(ended[-1]).keys() == {"error"}
    assert not any(json.loads(line).get("done") for line in ended)
