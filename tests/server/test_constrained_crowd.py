"""Constraints on a real server, many at once, beside plain and hot requests that come and go: they hold, all of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from servers import Server, running
from thoroughness import ALL
from waiting import until

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
TURNS = 5 if ALL else 3
STORY = "Once upon a time, there was a little dog"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("smollm2") / "log", "smollm2") as server:
        yield server


def strict(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def marked(marker: str) -> dict[str, Any]:
    """An object with its own marker and something free beside it."""
    note = {"type": "string", "maxLength": 30}
    return {
        "type": "object",
        "properties": {"marker": {"const": marker}, "note": note, "ok": {"type": "boolean"}},
        "required": ["marker", "note", "ok"],
        "additionalProperties": False,
    }


class Neighbours:
    """Plain and hot requests that join and leave all the while; what the plain ones say is kept."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.told: set[str] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(heat,)) for heat in (0.0, 0.0, 2.0)]

    def __enter__(self) -> Neighbours:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, temperature: float) -> None:
        while not self._stop.is_set():
            reply = plain(self.server, temperature)
            if temperature == 0.0:
                self.told.add(reply)


def plain(server: Server, temperature: float = 0.0) -> str:
    body = {"prompt": STORY, "max_tokens": 12, "temperature": temperature, "ignore_eos": True}
    text: str = server.post("/v1/completions", body).json()["choices"][0]["text"]
    return text


def ask(server: Server, marker: str, number: int) -> str:
    """One strict request; odd ones stream."""
    shared = "You write short notes as JSON objects. Each note has a marker, a text and a flag. " * 2
    body = {
        "messages": [{"role": "user", "content": f"{shared}Write the note {marker}."}],
        "response_format": strict(marked(marker)),
        "temperature": (0.0, 1.0, 1.5)[number % 3],
        "seed": number,
        "max_tokens": 90,
        "stream": bool(number % 2),
        **QUIET,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


IN_CONFORMANCE = pytest.mark.skipif(not ALL, reason="downloads a model: `make conformance` runs it")


@pytest.mark.parametrize(
    ("model", "count"), [("tiny-hybrid", 8), ("tiny-hybrid", 15), pytest.param("smollm2", 15, marks=IN_CONFORMANCE)]
)
def test_strict_answers_in_a_crowd_are_valid_and_carry_their_own_marker(
    request: pytest.FixtureRequest, model: str, count: int
) -> None:
    server: Server = request.getfixturevalue("server" if model == "tiny-hybrid" else "smollm2")
    alone = plain(server)
    markers = [f"m-{100 + number}" for number in range(count)]
    with Neighbours(server) as neighbours, concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda pair: ask(server, pair[1], pair[0]), enumerate(markers)))

    for marker, answer in zip(markers, answers, strict=True):
        assert jsonschema_rs.is_valid(marked(marker), json.loads(answer)), answer
        assert not any(other in answer for other in markers if other != marker)
    assert neighbours.told == {alone}


def test_the_shipped_model_says_its_marker_when_only_the_shape_is_given(server: Server) -> None:
    """Here the schema leaves the number free: the model's own knowledge must survive the constraint."""
    schema = {
        "type": "object",
        "properties": {"marker": {"type": "integer"}},
        "required": ["marker"],
        "additionalProperties": False,
    }

    def number_of(marker: int) -> int:
        body = {
            "messages": [{"role": "user", "content": f"Reply with JSON. The marker is {marker}."}],
            "response_format": strict(schema),
            "temperature": 0,
        }
        answer = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        return int(json.loads(answer)["marker"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(number_of, range(1, 9))) == list(range(1, 9))


def test_eight_at_once_get_their_json_in_whatever_words_it_was_asked_for(server: Server) -> None:
    """Held to its schema strictly or not, under vLLM's name, held to JSON alone, or not held to anything."""
    schema = {"type": "object", "properties": {"marker": {"type": "integer"}}, "required": ["marker"]}
    loose = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": False}}
    ways: list[dict[str, Any]] = [
        {"response_format": strict({**schema, "additionalProperties": False})},
        {"response_format": loose},
        {"guided_json": schema},
        {"response_format": {"type": "json_object"}},
        {},
    ]

    def ask(number: int) -> Any:
        messages = [{"role": "user", "content": f"Reply with JSON. The marker is {number}."}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 60, **ways[number % len(ways)], **QUIET}
        return json.loads(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(1, 9))) == [{"marker": number} for number in range(1, 9)]


WORDY = {
    "type": "object",
    "properties": {"marker": {"const": "here"}, "note": {"type": "string", "minLength": 300, "maxLength": 400}},
    "required": ["marker", "note"],
    "additionalProperties": False,
}
BUDGET = 24


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_first", [True, False], ids=["joined by", "joining"])
def test_a_plain_request_amid_the_answer_switches_no_schema_off(server: Server, stream: bool, is_first: bool) -> None:
    for answer in overlapping(server, is_first, lambda turn: _constrained(server, stream, turn)):
        assert jsonschema_rs.is_valid(WORDY, json.loads(answer.content))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_first", [True, False], ids=["joined by", "joining"])
def test_a_plain_request_amid_the_thinking_switches_no_budget_off(server: Server, stream: bool, is_first: bool) -> None:
    """The close marker is as good as banned: only the budget ends the thinking, and it does so to the token."""
    body = {"content": "</think>", "add_special_tokens": False}
    (marker,) = server.post("/tokenize", body).json()["tokens"]
    for answer in overlapping(server, is_first, lambda turn: _budgeted(server, stream, turn, marker)):
        assert answer.reasoning_tokens == BUDGET
        assert answer.content


@dataclasses.dataclass(frozen=True)
class Answer:
    content: str
    completion_tokens: int
    reasoning_tokens: int


def overlapping(server: Server, is_first: bool, ask: Callable[[int], Answer]) -> Iterator[Answer]:
    """Answers to requests that a plain one joins in mid-answer, or that join a plain one.

    Goes on until enough of them were in the batch together: how fast client and server are decides nothing.
    """
    num_together = 0
    for turn in range(20 * TURNS):
        answer, is_together = (joined_by if is_first else joining)(server, lambda turn=turn: ask(turn))
        num_together += is_together
        yield answer
        if num_together == TURNS:
            return
    pytest.fail(f"in {20 * TURNS} turns the two were together {num_together} times only")


def joined_by(server: Server, ask: Callable[[], Answer]) -> tuple[Answer, bool]:
    """A plain request comes while the other one is being answered, and gets tokens before that one has all of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        until(lambda: asked.done() or "asked" in decoding(server))
        with a_plain_stream(server):
            then = decoding(server)
            answer = asked.result()
            return answer, {"asked", "plain"} <= then.keys() and then["asked"] < min(answer.completion_tokens, BUDGET)


def joining(server: Server, ask: Callable[[], Answer]) -> tuple[Answer, bool]:
    """A request comes while a plain one is being answered, which goes on until it is over: a token for each of its own."""
    with a_plain_stream(server):
        before = decoding(server)
        answer = ask()
        after = decoding(server)
    is_there = "plain" in before and "plain" in after
    return answer, is_there and after["plain"] - before["plain"] >= answer.completion_tokens


@contextlib.contextmanager
def a_plain_stream(server: Server) -> Iterator[None]:
    """A request that has its first tokens, and gets more of them for as long as it may."""
    body = {"prompt": STORY, "max_tokens": 2000, "temperature": 1.0, "seed": 1, "ignore_eos": True, "stream": True}
    with server.stream("/v1/completions", body, headers={"x-request-id": "plain"}) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        for _ in range(3):
            next(lines)
        yield


def decoding(server: Server) -> dict[str, int]:
    """The tokens that each request has which is being answered just now, all counted at one moment."""
    with server.watch("/v1/events") as reply:
        news = json.loads(next(line for line in reply.iter_lines() if line.startswith("data: "))[6:])
    return {row["id"]: row["tokens"] for row in news["requests"] if row["state"] == "decode"}


def _constrained(server: Server, stream: bool, turn: int) -> Answer:
    body = {"response_format": strict(WORDY), "temperature": 1.0, "seed": turn, "max_tokens": 500, **QUIET}
    return _chat(server, {**body, "messages": [{"role": "user", "content": "Write the note here."}]}, stream)


def _budgeted(server: Server, stream: bool, turn: int, marker: int) -> Answer:
    body = {"thinking_budget": BUDGET, "temperature": 0.7, "seed": turn, "max_tokens": 56, "ignore_eos": True}
    body |= {"logit_bias": {str(marker): -100}}
    return _chat(server, {**body, "messages": [{"role": "user", "content": "Reply with JSON. The marker is 7."}]}, stream)


def _chat(server: Server, body: dict[str, Any], stream: bool) -> Answer:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = server.post("/v1/chat/completions", {**body, **options}, headers={"x-request-id": "asked"})
    assert reply.status_code == 200, reply.text
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
        usage = events[-1]["usage"]
    else:
        content, usage = reply.json()["choices"][0]["message"]["content"], reply.json()["usage"]
    return Answer(content, usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"])


def test_a_schema_that_can_not_be_had_is_a_400_also_for_a_stream(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": strict({"type": "array", "uniqueItems": True}),
        "stream": True,
    }
    reply = server.post("/v1/chat/completions", body)

    assert reply.status_code == 400
    assert "uniqueItems" in reply.json()["error"]["message"]
    server.wait_idle()
