"""Requests that take too long end with an error, wherever they are: written, waiting, computed, or before their model is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fronts import Front, front
from waiting import until

SLOW = ["--token-seconds", "0.02"]
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 50_000}
SHORT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}


def wait_idle(server: Front) -> None:
    """Return when nothing is left behind, in the front or with the engine; answers would take many minutes to end."""
    client = server.service.models[0].pool.replicas[0].client
    until(lambda: not len(client.live) and not server.get("/v1/status").json()["rows_running"] and not server.service.active)


def test_an_answer_that_takes_too_long_is_a_504() -> None:
    with front({"m": SLOW}, request_timeout=0.3) as server:
        late = server.post("/v1/completions", LONG)
        in_time = server.post("/v1/completions", SHORT)
        wait_idle(server)
        metrics = server.get("/metrics").text

    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    assert "0.3 seconds" in late.json()["error"]["message"]
    assert late.headers["x-should-retry"] == "false"
    assert in_time.json()["usage"]["completion_tokens"] == 2
    assert 'weft_requests_total{finish="error",model="m",wire="completions"} 1.0' in metrics


def test_a_stream_that_takes_too_long_ends_with_an_error_and_never_cleanly() -> None:
    with front({"m": SLOW}, request_timeout=0.3) as server:
        late = server.post("/v1/completions", {**LONG, "stream": True})
        in_time = server.post("/v1/completions", {**SHORT, "stream": True})
        wait_idle(server)

    assert late.status_code == 200
    assert late.text.count('"text":"') > 3
    assert '"code":"request_timeout"' in late.text.splitlines()[-2]
    assert "[DONE]" not in late.text
    assert '"finish_reason":"' not in late.text
    assert in_time.text.endswith("data: [DONE]\n\n")


def test_a_client_may_ask_for_less_time_and_not_for_more() -> None:
    with front({"m": SLOW}, request_timeout=0.5) as server:
        less = server.post("/v1/completions", LONG, headers={"x-request-timeout": "0.1"})
        more = server.post("/v1/completions", LONG, headers={"x-request-timeout": "1000"})
    with front({"m": SLOW}) as server:
        own = server.post("/v1/completions", LONG, headers={"x-request-timeout": "0.2"})

    assert [reply.status_code for reply in (less, more, own)] == [504, 504, 504]
    assert ["0.1 seconds" in less.text, "0.5 seconds" in more.text, "0.2 seconds" in own.text] == [True] * 3


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "inf", "1s"])
def test_a_time_that_is_none_is_refused_by_name(given: str) -> None:
    with front({"m": []}) as server:
        refused = server.post("/v1/completions", SHORT, headers={"x-request-timeout": given})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-timeout")


def test_time_spent_waiting_counts(tmp_path: Path) -> None:
    """The engine does not read the prompt and says nothing."""
    with front({"m": ["--prompt-until", str(tmp_path / "gate")]}, request_timeout=0.3) as server:
        whole = server.post("/v1/completions", SHORT)
        (tmp_path / "gate").touch()
        wait_idle(server)

    assert whole.status_code == 504


def test_a_stream_waits_for_its_model_only_as_long_as_it_has_time() -> None:
    with front({"slow": ["--load-until", "/never"]}, wait=False, heartbeat_seconds=0.1, request_timeout=0.4) as server:
        late = server.post("/v1/completions", {**SHORT, "stream": True})
        waiting = list(server.service.waiting)

    assert '"code":"request_timeout"' in late.text
    assert "[DONE]" not in late.text
    assert waiting == []


def test_a_request_may_time_out_before_the_engine_has_taken_it() -> None:
    """A constraint is compiled before anything is answered; the fake engine never says that it did."""
    with front({"m": ["--compile-for-ever"]}, request_timeout=0.3) as server:
        constrained = server.post("/v1/completions", {**SHORT, "guided_regex": "a+", "stream": True})
        wait_idle(server)

    assert (constrained.status_code, constrained.json()["error"]["code"]) == (504, "request_timeout")
