"""The engine's process is killed or stopped amid answers: clients see a pause, and the answers they would have had."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Server, running
from thoroughness import ALL
from waiting import HANG_SECONDS, until

LENGTH = 400 if ALL else 200
PLAIN = {"max_tokens": LENGTH, "ignore_eos": True}
HOT = {**PLAIN, "temperature": 0.9, "top_p": 0.95}
WORDS = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 40}, "minItems": 8, "maxItems": 8}
THINKING = {"messages": [{"role": "user", "content": "Marker 7."}], "thinking_token_budget": 40, "max_tokens": LENGTH}

COMPLETIONS: list[dict[str, Any]] = [
    *[{"prompt": f"Once upon a time there were {count} cats", "temperature": 0, **PLAIN} for count in range(4)],
    *[{"prompt": "The little dog", **HOT, "seed": seed} for seed in range(3)],
    {"prompt": "The big house", **HOT, "seed": 5, "frequency_penalty": 0.8, "repetition_penalty": 1.1},
    {"prompt": "A red ball", **HOT, "seed": 6, "n": 2},
    {"prompt": "A blue ball", "temperature": 0, **PLAIN, "logprobs": 2, "echo": True},
    {"prompt": "Sam and Tim " * 60, "temperature": 0, **PLAIN},
    {"prompt": "List:", **HOT, "ignore_eos": False, "seed": 7, "structured_outputs": {"json": WORDS}},
    {"prompt": "Digits:", **HOT, "ignore_eos": False, "seed": 8, "structured_outputs": {"regex": "[0-9]{150}"}},
]
PICTURE = base64.b64encode((Path(__file__).parent.parent / "pictures" / "00_digit.png").read_bytes()).decode()
SEEN = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    {"type": "text", "text": "What is in the picture? Tell me a story about it."},
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": SEEN}], **PLAIN, "temperature": 0},
    {"messages": [{"role": "user", "content": SEEN}], **HOT, "seed": 11},
    {**THINKING, "temperature": 0, "structured_outputs": {"json": WORDS}},
    {**THINKING, "temperature": 1.5, "seed": 9, "structured_outputs": {"json": WORDS}},
    {**THINKING, "temperature": 1.5, "seed": 10, "ignore_eos": True},
]
ASKED = [("/v1/completions", body) for body in COMPLETIONS] + [("/v1/chat/completions", body) for body in CHATS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(
        tmp_path_factory.mktemp("server") / "log", "tiny-hybrid", "--max-rows", "19", "--heartbeat-seconds", "0.5"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    """What each of them answers when nothing happens."""
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as pool:
        return list(pool.map(lambda asked: server.post(*asked).json(), ASKED))


def told(reply: dict[str, Any]) -> Any:
    """All of a reply that does not change from one time to the next, to the last bit."""
    usage = {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": [{**choice, "logprobs": None} for choice in reply["choices"]], **usage}


def logprobs(reply: dict[str, Any]) -> list[float]:
    return [value for choice in reply["choices"] for value in choice["logprobs"]["token_logprobs"][1:]]


def kill(server: Server) -> int:
    """End the engine as the kernel would; gives its number."""
    engine: int = server.status()["engine_pid"]
    os.kill(engine, signal.SIGKILL)
    return engine


def answer(server: Server, asked: tuple[str, dict[str, Any]]) -> Any:
    """The reply to a request, sent again as long as it finds no engine: it may come when that has just died."""
    reply = server.post(*asked)
    while reply.status_code == 503 and reply.json()["error"]["code"] == "model_loading":
        reply = server.post(*asked)
    return reply


class Stream:
    """One streamed answer, put together again as the whole one would be."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.server, self.path, self.body = server, path, {**body, "stream": True, "stream_options": {"include_usage": True}}
        self.lines: list[str] = []
        self.has_begun = threading.Event()

    def read(self) -> None:
        with self.server.stream(self.path, self.body) as reply:
            for line in reply.iter_lines():
                self.lines.append(line)
                if self.num_pieces > 5:
                    self.has_begun.set()

    @property
    def num_pieces(self) -> int:
        return sum(line.startswith("data: {") for line in self.lines)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    def texts(self) -> dict[int, str]:
        """Everything said, by choice, thinking included."""
        texts: dict[int, str] = {}
        for choice in (choice for event in self.events for choice in event["choices"]):
            said = choice.get("text") or "".join(
                (choice.get("delta", {}).get(name) or "") for name in ("reasoning_content", "content")
            )
            texts[choice["index"]] = texts.get(choice["index"], "") + said
        return texts


def texts_of(reply: dict[str, Any]) -> dict[int, str]:
    def said(choice: dict[str, Any]) -> str:
        if "text" in choice:
            return str(choice["text"])
        return (choice["message"].get("reasoning_content") or "") + (choice["message"]["content"] or "")

    return {choice["index"]: said(choice) for choice in reply["choices"]}


def test_streams_go_on_where_they_were(server: Server, undisturbed: list[Any]) -> None:
    streams = [Stream(server, *asked) for asked in ASKED]
    with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        for stream in streams:
            assert stream.has_begun.wait(HANG_SECONDS)
        killed = kill(server)
        are_running = [not future.done() for future in reading]
        for future in reading:
            future.result(HANG_SECONDS)

    assert all(are_running)
    assert server.status()["engine_pid"] != killed
    assert [stream.texts() for stream in streams] == [texts_of(reply) for reply in undisturbed]
    for stream, reply in zip(streams, undisturbed, strict=True):
        assert stream.lines[-2:] == ["data: [DONE]", ""]
        assert stream.events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]


def test_whole_answers_are_the_same_though_the_engine_died_twice(server: Server, undisturbed: list[Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as pool:
        asking = [pool.submit(answer, server, asked) for asked in ASKED]
        for _ in range(2):
            until(lambda: server.status()["rows_running"] >= 12)  # with drafts some are done before the last one has begun
            kill(server)
            server.wait_dead()
        replies = [future.result(HANG_SECONDS) for future in asking]

    assert [reply.status_code for reply in replies] == [200] * len(replies)
    assert [told(reply.json()) for reply in replies] == [told(reply) for reply in undisturbed]
    # What was decoded is prefilled afterwards, in another order of additions.
    place = next(place for place, (_, body) in enumerate(ASKED) if "logprobs" in body)
    assert logprobs(replies[place].json()) == pytest.approx(logprobs(undisturbed[place]), abs=1e-4)
    for reply in replies:
        assert all(value >= 0 for value in reply.json()["timings"].values() if isinstance(value, float | int))
    server.wait_idle()
    assert server.status()["memory"]["rows"] == 0


def test_a_stopped_engine_is_told_and_replaced(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--hang-seconds", "3") as server:
        path, body = ASKED[0]
        before = server.post(path, body).json()
        engine = server.status()["engine_pid"]
        stream = Stream(server, path, body)
        reading = threading.Thread(target=stream.read)
        reading.start()
        assert stream.has_begun.wait(HANG_SECONDS)
        os.kill(engine, signal.SIGSTOP)
        server.wait_dead()
        health = server.get("/health")
        refused = server.post(path, {"prompt": "hi"})
        reading.join(HANG_SECONDS)
        server.wait_ready()

    assert health.json()["status"] == "sick"
    assert "silent" in health.json()["models"]["tiny-hybrid"]["message"]
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert stream.texts() == texts_of(before)
    assert stream.lines[-2:] == ["data: [DONE]", ""]
    assert "gave no sign of life for 3 s: it is killed" in server.log.read_text()


def test_an_engine_writes_where_it_is_when_the_front_wants_to_know(server: Server) -> None:
    engine = server.status()["engine_pid"]
    os.kill(engine, signal.SIGUSR1)
    until(lambda: "engine/host.py" in server.log.read_text())

    assert server.get("/health").status_code == 200
    assert server.status()["engine_pid"] == engine
