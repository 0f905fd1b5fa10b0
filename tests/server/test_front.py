"""The front over engines that are told how to behave: slow, dying, failing, or saying what they were told."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fronts import Front, front
from waiting import HANG_SECONDS, until
from weft.serving.queue import FinishRate
from weft.text.codec import Codec

TEXTS = {
    "emoji": "family 👨‍👩‍👧‍👦 flags 🇩🇪🇯🇵 thumbs 👍🏽 done",
    "scripts": "漢字かな交じり文, 한국어, ไทย, हिन्दी, עברית, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "joined": "é ñ q\u0301 \u200d \ufe0f ❤️‍🔥 🏳️‍🌈",
    "plain": "Once upon a time, there was a little girl.",
}


def stream(server: Front, body: dict[str, Any]) -> Any:
    """A completion's stream, open to be read line by line."""
    return server.stream("/v1/completions", {**body, "stream": True})


def pieces(text: str) -> list[str]:
    """The texts of a stream's events, in order."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [choice["text"] for line in lines for choice in json.loads(line)["choices"] if choice["text"]]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_no_character_is_ever_halved(text: str) -> None:
    with front({"m": ["--token-seconds", "0.01"]}) as server:
        streamed = server.post("/v1/completions", {"prompt": text, "stream": True})
        whole = server.post("/v1/completions", {"prompt": text}).json()["choices"][0]["text"]

    assert whole == text
    assert "".join(pieces(streamed.text)) == text
    assert len(pieces(streamed.text)) > 1
    assert "\ufffd" not in streamed.text
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_health_tells_how_far_a_model_is_and_a_stream_waits_for_it(tmp_path: Path) -> None:
    gate, progress = tmp_path / "gate", {"what": "pretending", "done": 1, "total": 2}
    with front({"slow": ["--load-until", str(gate)]}, wait=False, heartbeat_seconds=0.05) as server:
        until(lambda: server.get("/health").json()["models"]["slow"] == {"status": "loading", "progress": progress})
        health = server.get("/health")
        refused = server.post("/v1/completions", {"prompt": "hi"})
        listed = server.get("/v1/models").json()["data"]
        with stream(server, {"prompt": TEXTS["plain"]}) as reply:
            lines = reply.iter_lines()
            signs = [next(line for line in lines if line.startswith(":")) for _ in range(2)]
            gate.touch()
            streamed = "\n".join(lines)

    assert health.status_code == 503
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert [model["id"] for model in listed] == ["slow"]
    assert listed[0]["status"] == {"value": "loading"}
    assert signs == [": prefill 0/0"] * 2
    assert "".join(pieces(streamed)) == TEXTS["plain"]
    assert streamed.endswith("data: [DONE]\n")


def test_a_model_that_can_not_come_up_says_why() -> None:
    with front({"broken": ["--fail", "weights are missing"]}, wait=False) as server:
        until(lambda: server.get("/health").json()["status"] == "failed")
        health = server.get("/health")
        refused = server.post("/v1/completions", {"prompt": "hi"})

    assert health.status_code == 503
    assert "weights are missing" in health.text
    assert refused.status_code == 500
    assert "weights are missing" in refused.text
    assert refused.headers["x-should-retry"] == "false"
    assert ("failed", "broken", "weights are missing") in server.screen.told


def test_an_engine_that_dies_is_replaced_and_its_streams_go_on(tmp_path: Path) -> None:
    dying = ["--die-after", "200", "--deaths", "2", "--diary", str(tmp_path / "diary"), "--token-seconds", "0.002"]
    with front({"m": dying}, heartbeat_seconds=0.2) as server:
        before = server.get("/v1/status").json()
        streamed = server.post("/v1/completions", {"prompt": TEXTS["plain"], "max_tokens": 1000, "stream": True})
        after = server.get("/v1/status").json()
        whole = server.post("/v1/completions", {"prompt": TEXTS["plain"], "max_tokens": 1000}).json()

    assert "".join(pieces(streamed.text)) == whole["choices"][0]["text"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert ": prefill" in streamed.text  # a sign of life while there was no engine
    assert after["engine_restarts"] == before["engine_restarts"] + 2
    assert after["engine_pid"] != before["engine_pid"]
    assert whole["usage"]["completion_tokens"] == 1000


def test_two_models_are_served_side_by_side() -> None:
    with front({"one": [], "two": []}) as server:
        replies = [server.post("/v1/completions", {"prompt": "hi there", "model": name}) for name in ("one", "two")]
        unnamed = server.post("/v1/completions", {"prompt": "hi there"})
        status = server.get("/v1/status").json()

    assert [reply.json()["model"] for reply in replies] == ["one", "two"]
    assert unnamed.status_code == 404
    assert "one, two" in unnamed.json()["error"]["message"]
    assert len({model["engine_pid"] for model in status["models"]}) == 2


def test_silence_is_filled_with_signs_of_life(tmp_path: Path) -> None:
    gate, slow = tmp_path / "gate", ["--prompt-until", str(tmp_path / "gate")]
    with front({"m": slow}, heartbeat_seconds=0.05) as server, stream(server, {"prompt": TEXTS["plain"]}) as reply:
        lines = reply.iter_lines()
        signs = [next(line for line in lines if line.startswith(":")) for _ in range(3)]
        gate.touch()
        rest = "\n".join(lines)

    assert [sign[:12] for sign in signs] == [": prefill 0/"] * 3
    assert "".join(pieces(rest)) == TEXTS["plain"]


def test_a_full_queue_is_told_and_when_to_come_again() -> None:
    with front({"m": ["--token-seconds", "0.05"]}, max_queue=0) as server:  # 64 rows and nobody may wait
        with stream(server, {"prompt": "hi", "max_tokens": 10_000, "n": 64}) as running:
            lines = running.iter_lines()
            next(lines)
            refused = server.post("/v1/completions", {"prompt": "hi"})
        until(lambda: not server.get("/v1/status").json()["requests"])
        taken = server.post("/v1/completions", {"prompt": "hi"})

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert taken.status_code == 200


def test_what_never_fits_into_memory_is_refused_with_the_numbers() -> None:
    with front({"m": ["--memory-tokens", "50"]}) as server:
        too_long = server.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 31, "stream": True})
        fitting = server.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 30})

    error = too_long.json()["error"]
    assert (too_long.status_code, error["code"], error["param"]) == (400, "insufficient_memory", "max_tokens")
    assert all(number in error["message"] for number in ("51 tokens", "20 of the prompt", "5000 bytes", "50 tokens", "--memory"))
    assert fitting.json()["usage"]["completion_tokens"] == 30


def test_who_has_no_place_costs_no_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crowd with long prompts would keep the front busy for requests that are sent away."""
    written: list[int] = []
    encode, others_are_gone = Codec.encode, threading.Event()

    def counted(self: Codec, *prompt: Any) -> Any:
        written.append(len(prompt))
        others_are_gone.wait(HANG_SECONDS)
        return encode(self, *prompt)

    monkeypatch.setattr(Codec, "encode", counted)
    with front({"m": []}, max_queue=0) as server, ThreadPoolExecutor(24) as pool:  # 64 rows
        body = {"prompt": "many words and more " * 400, "max_tokens": 20, "n": 8}
        replies = [pool.submit(server.post, "/v1/completions", body) for _ in range(24)]
        until(lambda: sum(reply.done() for reply in replies) == 16)
        others_are_gone.set()
        codes = [reply.result().status_code for reply in replies]

    assert sorted(codes) == [200] * 8 + [429] * 16
    assert len(written) == 8


def test_when_to_come_again_is_reckoned_from_how_fast_answers_end() -> None:
    pace = FinishRate()
    pace.begin(100.0)
    unknown = pace.seconds_for(50, 101.0)
    for count in range(1, 41):
        pace.finish(100.0 + 0.25 * count)
    busy = pace.seconds_for(50, 110.0)
    stalled = pace.seconds_for(50, 142.0)
    pace.begin(1000.0)

    assert unknown == 5
    assert busy == 13  # 50 ends, four in a second
    assert stalled == 63  # the last one is long ago
    assert pace.seconds_for(50, 1000.0) == 13  # a rest is no stall


def test_a_slow_reader_gets_everything_and_slows_nobody() -> None:
    with front({"m": []}) as server:
        body = json.dumps({"prompt": "word " * 20, "max_tokens": 12_000, "stream": True}).encode()
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        until(lambda: server.service.active)
        quick = server.post("/v1/completions", {"prompt": TEXTS["plain"]})  # nobody reads the other one meanwhile
        data = b""
        while part := slow.recv(1 << 20):
            data += part
        slow.close()

    assert quick.json()["choices"][0]["text"] == TEXTS["plain"]
    assert data.count(b'"finish_reason":"length"') == 1
    assert b"data: [DONE]" in data


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with front({"m": []}, api_keys=("secret",)) as server:
        status = {
            "none": server.post("/v1/completions", {"prompt": "hi"}).status_code,
            "wrong": server.post("/v1/completions", {"prompt": "hi"}, headers={"authorization": "Bearer no"}).status_code,
            "bearer": server.post("/v1/completions", {"prompt": "hi"}, headers={"authorization": "Bearer secret"}).status_code,
            "x-api-key": server.post("/v1/completions", {"prompt": "hi"}, headers={"x-api-key": "secret"}).status_code,
            "health": server.get("/health").status_code,
            "status": server.get("/v1/status").status_code,
        }

    assert status == {"none": 401, "wrong": 401, "bearer": 200, "x-api-key": 200, "health": 200, "status": 401}


def test_a_page_that_made_its_name_resolve_to_us_is_turned_away() -> None:
    with front({"m": []}) as server:
        rebound = server.post("/v1/completions", {"prompt": "hi"}, headers={"host": "evil.example"})
        foreign = server.post("/v1/completions", {"prompt": "hi"}, headers={"origin": "https://evil.example"})
        local = server.post("/v1/completions", {"prompt": "hi"}, headers={"origin": "http://localhost:3000"})

    assert (rebound.status_code, foreign.status_code, local.status_code) == (403, 403, 200)
    assert local.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "access-control-allow-origin" not in foreign.headers


def test_metrics_count_what_happened() -> None:
    with front({"m": []}) as server:
        server.post("/v1/completions", {"prompt": TEXTS["plain"], "max_tokens": 7})
        server.post("/v1/completions", {"prompt": "hi", "temperature": -1})
        lines = server.get("/metrics").text.splitlines()

    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['weft_generated_tokens_total{model="m"}'] == "7.0"
    assert values['vllm:generation_tokens_total{model_name="m"}'] == "7.0"
    assert values['weft_requests_total{finish="length",model="m",wire="completions"}'] == "1.0"
    assert values['weft_http_requests_total{status="400"}'] == "1.0"
    assert values['weft_engine_up{model="m"}'] == "1.0"
    assert values['weft_rows_alone_total{cause="short",model="m"}'] == "3.0"
    assert values['vllm:num_requests_running{model_name="m"}'] == "0.0"


def test_hundreds_of_requests_both_ways_lose_nothing() -> None:
    """Sending and receiving at once is what a socket with one event for both gets wrong."""
    counts: list[int] = []

    def ask(server: Front) -> None:
        for number in range(40):
            body: dict[str, Any] = {"prompt": TEXTS["plain"], "max_tokens": 1 + number % 9}
            counts.append(server.post("/v1/completions", body).json()["usage"]["completion_tokens"])

    with front({"m": []}) as server:
        threads = [threading.Thread(target=ask, args=(server,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sorted(counts) == sorted([1 + number % 9 for number in range(40)] * 6)


def test_progress_without_text_is_silence_too() -> None:
    """Events that tell the client nothing must not put the sign of life off."""
    with front({"m": ["--token-seconds", "0.05"]}, heartbeat_seconds=0.1) as server:
        body = {"prompt": "<|im_end|>" * 20, "stream": True}  # special tokens: nothing is told of them
        reply = server.post("/v1/completions", body)

    assert reply.text.count(": prefill") >= 2


def test_a_fault_of_ours_inside_a_stream_is_told_and_counted_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    with front({"m": []}) as server:
        monkeypatch.setattr("weft.text.stream.StreamReader.feed", broken)
        streamed = server.post("/v1/completions", {"prompt": "hi", "stream": True})
        whole = server.post("/v1/completions", {"prompt": "hi"})
        monkeypatch.undo()
        metrics = server.get("/metrics").text
        left = server.get("/v1/status").json()["requests"]

    assert '"code":"internal_error"' in streamed.text
    assert "[DONE]" not in streamed.text
    assert "a bug" not in streamed.text
    assert whole.status_code == 500
    assert 'weft_requests_total{finish="error",model="m",wire="completions"} 2.0' in metrics
    assert left == 0


def test_clients_that_leave_while_the_model_loads_leave_the_line(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with front({"slow": ["--load-until", str(gate)]}, wait=False, max_queue=3, heartbeat_seconds=0.05) as server:
        body = json.dumps({"prompt": TEXTS["plain"], "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        leaving = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        for connection in leaving:
            connection.sendall(head + body)
            connection.recv(100)
        full = server.post("/v1/completions", {"prompt": "hi", "stream": True})
        for connection in leaving:
            connection.close()
        until(lambda: not server.service.waiting)
        with stream(server, {"prompt": TEXTS["plain"]}) as stays:
            gate.touch()
            text = stays.read().decode()

    assert full.status_code == 429
    assert "".join(pieces(text)) == TEXTS["plain"]


def test_one_that_waits_for_a_model_can_be_cancelled() -> None:
    with front({"slow": ["--load-until", "/never"]}, wait=False, heartbeat_seconds=0.05) as server:
        told: list[str] = []
        body = {"prompt": "hi", "stream": True}
        asking = threading.Thread(
            target=lambda: told.append(server.post("/v1/completions", body, headers={"x-request-id": "early"}).text)
        )
        asking.start()
        until(lambda: server.post("/v1/requests/early/cancel", {}).status_code != 404)
        asking.join()

    assert "request_cancelled" in told[0]


def test_a_long_text_does_not_hold_up_the_others() -> None:
    with front({"m": []}) as server:
        long = threading.Thread(target=server.post, args=("/tokenize", {"prompt": "many words and more " * 100_000}))
        long.start()
        num_answered = 0
        while long.is_alive():
            num_answered += server.get("/health").status_code == 200
        long.join()

    assert num_answered > 5


def test_an_engine_that_never_comes_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.lifeline.FIRST_PAUSE_SECONDS", 0.01)
    with front({"m": ["--no-such-option"]}, wait=False) as server:
        until(lambda: server.get("/health").json()["status"] != "loading")
        health = server.get("/health").json()
        refused = server.post("/v1/completions", {"prompt": "hi", "stream": True})

    assert health["status"] == "failed"
    assert "5 times" in health["models"]["m"]["message"]
    assert refused.status_code == 500
