"""An engine that dies while a prompt is encoded: a stream waits for the next one, and says of its sampling what was used."""

from __future__ import annotations

import json
import os
import signal
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


def events(front: Front, path: str) -> list[dict[str, Any]]:
    body = PATHS[path] | {"model": "m", "stream": True, "temperature": 0.25, "top_p": 0.5, "max_tokens": 30}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    reply = front.post(path, body)
    assert reply.status_code == 200, reply.text
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_waits_for_the_next_engine_and_tells_the_sampling_that_was_used(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    encode, killed = Codec.encode, list[int]()

    def kill_and_encode(self: Codec, *prompt: Any) -> Any:
        if not killed:
            killed.append(served.get("/v1/status").json()["engine_pid"])
            os.kill(killed[0], signal.SIGKILL)
            until(lambda: served.get("/health").status_code != 200)
        return encode(self, *prompt)

    with front({"m": []}, heartbeat_seconds=0.05) as served:
        plain = events(served, path)
        monkeypatch.setattr(Codec, "encode", kill_and_encode)
        found = events(served, path)

    assert killed
    assert told(found) == told(plain)
    assert told(found)[:2] == (0.25, 0.5)


def told(found: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The sampling and the last words of a stream."""
    last = found[-1]
    if "response" in last:
        return last["response"]["temperature"], last["response"]["top_p"], last["response"]["status"]
    sampling = next(one["timings"]["sampling"] for one in reversed(found) if "timings" in one)
    return sampling["temperature"], sampling["top_p"], "completed"
