"""An engine that dies while a prompt is encoded: the request waits for the next one, and is told the sampling that was used."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fronts import Front, front
from waiting import until
from weft.text.codec import Codec

TEXT = "word " * 5000  # so long that a thread encodes it
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT, "store": True},
}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return PATHS[path] | {"model": "m", "temperature": 0.25, "top_p": 0.5, limit: 30, **fields}


def events(front: Front, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = front.post(path, body_of(path, stream=True, **fields))
    assert reply.status_code == 200, reply.text
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def kill_while_encoding(monkeypatch: pytest.MonkeyPatch, served: Front) -> list[int]:
    """Kill the engine while the next prompt is encoded; return the list that then has its process id."""
    encode, killed = Codec.encode, list[int]()

    def kill_and_encode(self: Codec, *prompt: Any) -> Any:
        if not killed:
            killed.append(served.get("/v1/status").json()["engine_pid"])
            os.kill(killed[0], signal.SIGKILL)
            until(lambda: served.get("/health").status_code != 200)
        return encode(self, *prompt)

    monkeypatch.setattr(Codec, "encode", kill_and_encode)
    return killed


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_waits_for_the_next_engine_and_tells_the_sampling_that_was_used(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with front({"m": []}, heartbeat_seconds=0.05) as served:
        plain = events(served, path)
        killed = kill_while_encoding(monkeypatch, served)
        found = events(served, path)

    assert killed
    assert told(found) == told(plain)
    assert told(found)[:2] == (0.25, 0.5)


@pytest.mark.parametrize("path", PATHS)
def test_a_whole_answer_waits_for_the_next_engine_too(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with front({"m": []}) as served:
        plain = served.post(path, body_of(path))
        killed = kill_while_encoding(monkeypatch, served)
        found = served.post(path, body_of(path))

    assert killed
    assert found.status_code == 200, found.text
    assert texts(found.json()) == texts(plain.json())


def test_no_event_of_a_waiting_response_states_a_sampling_that_is_not_used(tmp_path: Path) -> None:
    """A stream that waits for its model to be loaded can not know the model's defaults yet."""
    gate, names = tmp_path / "gate", ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    for given in ({}, {"temperature": 0.25}, {"top_p": 0.5, "presence_penalty": 1.5}):
        gate.unlink(missing_ok=True)
        with front({"m": ["--load-until", str(gate)]}, wait=False, heartbeat_seconds=0.05) as served:
            body = {"model": "m", "input": "Once", "max_output_tokens": 3, "stream": True, **given}
            with served.stream("/v1/responses", body) as reply:
                lines = reply.iter_lines()
                opening = next(line for line in lines if line.startswith("data: "))
                gate.touch()
                *_, last = [line for line in lines if line.startswith("data: ")]
        stated, used = (json.loads(line.removeprefix("data: "))["response"] for line in (opening, last))
        assert {name: stated[name] for name in names} == {**dict.fromkeys(names), **given}
        assert {name: used[name] for name in given} == given
        assert None not in [used[name] for name in names]


def texts(body: dict[str, Any]) -> list[Any]:
    if "output" in body:
        return [part["text"] for item in body["output"] for part in item["content"]]
    return [choice["message"]["content"] for choice in body["choices"]]


def told(found: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The sampling and the last words of a stream."""
    last = found[-1]
    if "response" in last:
        return last["response"]["temperature"], last["response"]["top_p"], last["response"]["status"]
    sampling = next(one["timings"]["sampling"] for one in reversed(found) if "timings" in one)
    return sampling["temperature"], sampling["top_p"], "completed"
