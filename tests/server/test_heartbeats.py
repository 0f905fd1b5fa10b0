"""A stream of any dialect is never silent for longer than the heartbeat's time, whatever is computed or waited for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fronts import Front, front
from waiting import HANG_SECONDS, until
from weft.text.codec import Codec

HEARTBEAT = 0.1
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SAID = [{"role": "user", "content": "Name a number."}]
LONG = "many words and more " * 400  # a thread encodes it
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
# Of each dialect a path, a request with a constraint, what a heartbeat has in it, and what only an error has.
CONSTRAINED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": SAID, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ": prefill",
        '"error":{',
    ),
    "completions": ("/v1/completions", {"prompt": "A number:", "guided_json": SCHEMA}, ": prefill", '"error":{'),
    "responses": (
        "/v1/responses",
        {"input": "Name a number.", "text": {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA}}},
        ": prefill",
        "event: response.failed",
    ),
    "messages": (
        "/v1/messages",
        {"messages": SAID, "max_tokens": 20, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "event: ping",
        "event: error",
    ),
    "ollama": ("/api/chat", {"messages": SAID, "format": SCHEMA}, '"content":""', '{"error":'),
}
PLAIN: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": LONG}]},
    "completions": {"prompt": LONG},
    "responses": {"input": LONG},
    "messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 20},
    "ollama": {"messages": [{"role": "user", "content": LONG}]},
}


def lines_until_beats(reply: Any, beat: str, count: int = 3) -> Any:
    """Read a reply's lines until there were some heartbeats, and return the iterator over the others."""
    lines = reply.iter_lines()
    for _ in range(count):
        assert next((line for line in lines if beat in line), None) is not None, "the stream ended before its heartbeats"
    return lines


def test_hidden_thinking_is_silence_and_silence_is_filled() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    body = {"messages": SAID, "max_tokens": 2000, "thinking": thinking, "stream": True}
    with (
        front({"m": ["--token-seconds", "0.01"]}, heartbeat_seconds=HEARTBEAT) as server,
        server.stream("/v1/messages", body) as reply,
    ):
        lines = reply.iter_lines()
        opened = next(line for line in lines if '"content_block_start"' in line)
        beats = [next(line for line in lines if line.startswith("event:")) for _ in range(3)]

    assert json.loads(opened.removeprefix("data: "))["content_block"]["type"] == "thinking"
    assert beats == ["event: ping"] * 3


def test_a_tool_call_that_is_shown_when_it_is_complete_is_silence_until_then() -> None:
    call = {"function": {"name": "add", "arguments": {"text": "word " * 60}}}
    said = [*SAID, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    body = {"messages": said, "tools": [ADD], "options": {"num_predict": 400}}
    with front({"m": ["--token-seconds", "0.01"]}, heartbeat_seconds=HEARTBEAT) as server:
        told = [json.loads(line)["message"] for line in server.post("/api/chat", body).text.splitlines()]

    calls = [index for index, message in enumerate(told) if "tool_calls" in message]
    assert calls, "the fake engine says its prompt again, with the call in it"
    before = [message for message in told[: calls[0]] if message == {"role": "assistant", "content": ""}]
    assert len(before) >= 3


@pytest.fixture(scope="module")
def undecided() -> Iterator[Front]:
    """A front whose engine never says that it has taken a grammar."""
    with front({"m": ["--compile-for-ever"]}, heartbeat_seconds=HEARTBEAT) as server:
        yield server


@pytest.mark.parametrize("dialect", CONSTRAINED)
def test_a_stream_begins_before_its_grammar_is_accepted(undecided: Front, dialect: str) -> None:
    path, body, beat, _ = CONSTRAINED[dialect]
    with undecided.stream(path, {**body, "stream": True}) as reply:
        assert reply.status_code == 200
        lines_until_beats(reply, beat)
    until(lambda: not undecided.get("/v1/status").json()["requests"])  # who has left is not waited for


def test_a_stream_that_waits_for_its_grammar_can_be_cancelled(undecided: Front) -> None:
    path, body, beat, _ = CONSTRAINED["chat"]
    with undecided.stream(path, {**body, "stream": True}, headers={"x-request-id": "early"}) as reply:
        lines = lines_until_beats(reply, beat)
        undecided.post("/v1/requests/early/cancel", {})
        cancelled = "\n".join(lines)

    assert "request_cancelled" in cancelled


def test_a_refusal_after_the_heartbeat_is_the_last_frame_and_one_before_it_a_status(tmp_path: Path) -> None:
    gate, late, early = tmp_path / "gate", dict[str, str](), dict[str, tuple[int, bool]]()
    with front({"m": ["--refuse-when", str(gate)]}, heartbeat_seconds=HEARTBEAT) as server:
        for dialect, (path, body, beat, _) in CONSTRAINED.items():
            gate.unlink(missing_ok=True)
            with server.stream(path, {**body, "stream": True}) as reply:
                lines = lines_until_beats(reply, beat)
                gate.touch()
                late[dialect] = "\n".join(lines)
        left = server.get("/v1/status").json()["requests"]
    with front({"m": ["--refuse-when", str(gate)]}) as server:
        for dialect, (path, body, _, _) in CONSTRAINED.items():
            reply = server.post(path, {**body, "stream": True})
            early[dialect] = reply.status_code, "it is ambiguous" in reply.text

    for dialect, (_, _, _, error) in CONSTRAINED.items():
        assert error in late[dialect]
        assert "it is ambiguous" in late[dialect].strip().splitlines()[-1]
    assert left == 0
    assert early == dict.fromkeys(CONSTRAINED, (400, True))


def test_a_stream_begins_while_its_prompt_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, may_end = Codec.encode_request, threading.Event()

    def encode_slowly(self: Codec, *given: Any) -> Any:
        may_end.wait(HANG_SECONDS)
        return encode(self, *given)

    monkeypatch.setattr(Codec, "encode_request", encode_slowly)
    with front({"m": []}, heartbeat_seconds=HEARTBEAT) as server:
        for dialect, (path, _, beat, error) in CONSTRAINED.items():
            may_end.clear()
            with server.stream(path, {**PLAIN[dialect], "stream": True}) as reply:
                lines = lines_until_beats(reply, beat)
                may_end.set()
                rest = "\n".join(lines)
            assert "word" in rest
            assert error not in rest
        left = server.get("/v1/status").json()["requests"]

    assert left == 0
