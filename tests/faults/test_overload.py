"""Far more requests at once than there is room for: some are sent away with a date, the others get their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lean_client import ask_all
from pulse import pulse
from servers import Server, running

NUM_REQUESTS, MAX_ROWS, MAX_QUEUE = 500, 8, 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log, limits = tmp_path_factory.mktemp("server") / "log", ("--max-rows", str(MAX_ROWS), "--max-queue", str(MAX_QUEUE))
    with running(log, "tiny-hybrid", *limits) as server:
        yield server


def body(index: int) -> dict[str, Any]:
    """One of 25 requests, each with a prompt and an answer of its own length, streamed or not, greedy."""
    index %= 25
    text = " ".join(f"Number {index} and {step} went home." for step in range(1 + 5 * (index % 7)))
    return {"prompt": text, "max_tokens": 4 + index, "temperature": 0, "ignore_eos": True, "stream": index % 2 == 0}


def text_of(reply: str) -> str:
    """The answer, from a stream or a whole."""
    events = [json.loads(line.removeprefix("data: ")) for line in reply.splitlines() if "{" in line]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_five_hundred_at_once_are_answered_or_sent_away(server: Server) -> None:
    engine = server.status()["engine_pid"]
    alone = [text_of(server.post("/v1/completions", body(index)).text) for index in range(25)]
    bodies = [body(index) for index in range(NUM_REQUESTS)]
    with pulse(server.port, server.process.pid) as healths:
        replies = ask_all(server.port, "/v1/completions", bodies)
    server.wait_idle()
    status = server.status()
    taken = [(index % 25, text) for index, (reply, text) in enumerate(replies) if reply.status == 200]
    refused = [(reply.headers, json.loads(text)) for reply, text in replies if reply.status == 429]

    assert len(taken) + len(refused) == NUM_REQUESTS
    assert len(taken) >= MAX_ROWS + MAX_QUEUE
    assert [text_of(text) for _, text in taken] == [alone[index] for index, _ in taken]
    assert all(text.endswith("data: [DONE]\n\n") for index, text in taken if index % 2 == 0)
    assert all(1 <= int(headers["retry-after"]) <= 30 for headers, _ in refused)
    assert {told["error"]["code"] for _, told in refused} == {"queue_full"}
    assert {health.status for health in healths} == {200}
    assert (status["engine_pid"], status["engine_restarts"]) == (engine, 0)
    assert status["memory"]["rows"] == 0
    assert "Traceback" not in server.log.read_text()
