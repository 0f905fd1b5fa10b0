"""A server that is asked to end: what runs finishes, new work is sent away with a date, and the exit is an orderly one."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from servers import Server, running
from waiting import HANG_SECONDS, until

BODY = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True, "temperature": 0}


def ask_for_an_end(server: Server) -> httpx2.Response:
    """Send the signal, and give back what health says as soon as it knows."""
    os.kill(server.process.pid, signal.SIGTERM)
    server.wait_dead()
    return server.get("/health")


def test_what_runs_finishes_and_what_comes_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--drain-seconds", str(HANG_SECONDS)) as server, ThreadPoolExecutor(2) as pool:
        running_ones = [pool.submit(server.post, "/v1/completions", {**BODY, "stream": stream}) for stream in (False, True)]
        until(lambda: server.status()["rows_running"] == 2)
        health = ask_for_an_end(server)
        refused = [server.post("/v1/completions", {"prompt": "hi", "stream": stream}) for stream in (False, True)]
        are_running = [not one.done() for one in running_ones]
        whole, streamed = (one.result() for one in running_ones)
        status = server.process.wait(HANG_SECONDS)

    assert all(are_running)
    assert (health.status_code, health.json()["status"]) == (503, "stopping")
    for reply in refused:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_stopping")
        assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert whole.json()["usage"]["completion_tokens"] == 700
    assert last_event(streamed)["timings"]["predicted_n"] == 700
    assert status == 0
    assert "Traceback" not in server.log.read_text()


def test_what_does_not_finish_in_time_is_told(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--drain-seconds", "0.5") as server:
        body = {**BODY, "max_tokens": 1500, "n": 16, "stream": True}
        with server.stream("/v1/completions", body) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(server.process.pid, signal.SIGTERM)
            rest = "\n".join(lines)
        status = server.process.wait(HANG_SECONDS)

    assert '"code":"server_stopping"' in rest
    assert "[DONE]" not in rest
    assert status == 0


def test_an_engine_that_dies_during_the_drain_costs_a_pause_only(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--drain-seconds", str(HANG_SECONDS)) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/completions", BODY)
        until(lambda: server.status()["rows_running"])
        engine = server.status()["engine_pid"]
        ask_for_an_end(server)
        os.kill(engine, signal.SIGKILL)
        reply = asked.result()
        status = server.process.wait(HANG_SECONDS)

    assert reply.json()["usage"]["completion_tokens"] == 700
    assert status == 0


def last_event(reply: httpx2.Response) -> dict[str, Any]:
    assert reply.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    last: dict[str, Any] = events[-1]
    return last
