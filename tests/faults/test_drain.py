"""A server that is asked to end: what runs finishes, new work is sent away with a date, and the exit is an orderly one."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from servers import Server, running
from waiting import HANG_SECONDS, until

BODY = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True, "temperature": 0}


def ask_for_an_end(server: Server) -> httpx2.Response:
    """Send the signal, and give back what health says as soon as it knows."""
    os.kill(server.process.pid, signal.SIGTERM)
    server.wait_dead()
    return server.get("/health")


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streaming", "whole"])
def test_what_runs_finishes_and_what_comes_is_refused(tmp_path: Path, is_streamed: bool) -> None:
    told: list[httpx2.Response] = []
    with running(tmp_path / "log", "tiny-hybrid", "--drain-seconds", "60") as server:
        asking = threading.Thread(target=lambda: told.append(server.post("/v1/completions", {**BODY, "stream": is_streamed})))
        asking.start()
        until(lambda: server.status()["rows_running"])
        health = ask_for_an_end(server)
        refused = [server.post("/v1/completions", {"prompt": "hi", "stream": stream}) for stream in (False, True)]
        was_running = asking.is_alive()
        asking.join(HANG_SECONDS)
        status = server.process.wait(HANG_SECONDS)

    assert was_running
    assert (health.status_code, health.json()["status"]) == (503, "stopping")
    for reply in refused:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_stopping")
        assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert num_tokens(told[0], is_streamed) == 700
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
    told: list[httpx2.Response] = []
    with running(tmp_path / "log", "tiny-hybrid", "--drain-seconds", "60") as server:
        asking = threading.Thread(target=lambda: told.append(server.post("/v1/completions", BODY)))
        asking.start()
        until(lambda: server.status()["rows_running"])
        engine = server.status()["engine_pid"]
        ask_for_an_end(server)
        os.kill(engine, signal.SIGKILL)
        asking.join(HANG_SECONDS)
        status = server.process.wait(HANG_SECONDS)

    assert num_tokens(told[0], False) == 700
    assert status == 0


def num_tokens(reply: httpx2.Response, is_streamed: bool) -> int:
    body: dict[str, Any] = reply.json() if not is_streamed else last_event(reply)
    return int(body["usage"]["completion_tokens"])


def last_event(reply: httpx2.Response) -> dict[str, Any]:
    assert reply.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return {"usage": {"completion_tokens": events[-1]["timings"]["predicted_n"]}}
