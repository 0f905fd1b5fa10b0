"""`weft top`: the events of a server as a table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cli_server import running
from rich.console import Console

from weft.cli.client import ServerClient
from weft.cli.top import Board, TopEvent, read_event, top_command
from weft.errors import WeftError

MODEL: dict[str, Any] = {
    "name": "tiny-hybrid", "status": "ready", "rows_running": 2, "rows_waiting": 1, "max_rows": 16, "restarts": 3,
    "memory": {"budget": 1000, "weights": 500, "rows": 250, "peak": 900}, "tokens_per_second": 41.2,
    "prompt_tokens_per_second": 800.0, "gaps": {"p50": 0.012, "p95": 0.034, "p99": 0.05},
}  # fmt: skip
ROW: dict[str, Any] = {
    "id": "one", "model": "tiny-hybrid", "wire": "chat", "arrived": 98.0, "state": "prefill", "choices": 2, "prompt_tokens": 90,
    "computed": 30, "cached_tokens": 0, "tokens": 0, "constrained": True, "resumed": 1, "cause": None,
}  # fmt: skip


def news(at: float, *rows: dict[str, Any], **model: Any) -> TopEvent:
    return read_event({"time": at, "seconds": 0.25, "models": [MODEL | model], "requests": list(rows)})


def drawn(board: Board, width: int = 100) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as told:
        console.print(board.render("http://here"))
    return [line.rstrip() for line in told.get().splitlines()]


def test_models_memory_and_requests_are_shown() -> None:
    board = Board()
    board.update(news(100.0, ROW, {"id": "two", "state": "queued"}))
    head, _, model, bar, memory, _, one, two = drawn(board)

    assert head.startswith("weft at http://here")
    assert "2 requests" in head
    assert model.split() == ["tiny-hybrid", "ready", "2/16", "1", "41", "800", "12/34", "ms", "3"]
    assert bar == "█" * 36 + "░" * 12
    assert memory == "weights 500 bytes, rows 250 bytes of 1.0 kB"
    assert one.split() == ["one", "chat", "prefill", "30/90", "0", "0", "2.0", "×2", "constrained", "resumed"]
    assert two.split() == ["two", "-", "queued", "0", "0", "0", "-"]


def test_how_many_draft_tokens_are_accepted_is_shown_while_there_are_any() -> None:
    board, plain = Board(), Board()
    board.update(news(100.0, drafts={"verified": 10, "tokens": 40, "accepted": 19}))
    plain.update(news(100.0, drafts=None))
    _, heads, model, *_ = drawn(board)

    assert heads.split()[-1] == "accepted"
    assert model.split()[-2:] == ["48%", "2.9/step"]
    assert "accepted" not in "".join(drawn(plain))


def test_a_request_that_ended_is_shown_for_a_while() -> None:
    board = Board()
    board.update(news(100.0, ROW))
    board.update(news(101.0, ROW | {"state": "finished", "finish": "length", "tokens": 7, "cause": "differs"}))
    board.update(news(104.0))
    shown = drawn(board)
    board.update(news(107.0))

    assert "0 requests" in shown[0]
    assert shown[-1].split()[2:7] == ["length", "90", "0", "7", "3.0"]
    assert "cache: differs" in shown[-1]
    assert "one" not in "".join(drawn(board))


def test_it_fits_into_eighty_columns() -> None:
    board = Board()
    row = ROW | {"id": "0123456789abcdef", "wire": "completions", "constrained": False, "choices": 1, "resumed": 0}
    board.update(news(100.0, row, gaps=None, drafts={"verified": 10, "tokens": 40, "accepted": 19}))

    assert max(map(len, drawn(board, 80))) <= 80
    assert not any("…" in line.replace("0123456789a…", "") for line in drawn(board, 80))


def test_a_server_of_another_kind_is_told() -> None:
    with pytest.raises(WeftError, match="another version of weft"):
        read_event({"time": 1.0})
    with running() as server, pytest.raises(WeftError, match="not found"):
        top_command(url=server.url)


@pytest.mark.xdist_group("served")
def test_without_a_terminal_one_picture_of_a_real_server_is_printed(
    served: ServerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    top_command(url=served.url)
    told = capsys.readouterr().out

    assert f"weft at {served.url}" in told
    assert "tiny-hybrid" in told
    assert "weights 39.3 MB" in told


@pytest.mark.xdist_group("served")
def test_what_a_real_server_tells_of_requests_is_understood(served: ServerClient) -> None:
    """Every field of an event that is shown is there."""
    watcher = ServerClient(served.url)
    events = watcher.stream("/v1/events", None)
    next(events)
    body = {"model": "tiny-hybrid", "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
    ServerClient(served.url).fetch("/v1/completions", msgspec.Raw, 60.0, body)
    rows: list[dict[str, Any]] = []
    while not rows:
        rows = [row for row in next(events)["requests"] if row["state"] == "finished"]
    events.close()
    request = read_event({"time": 1.0, "models": [], "requests": rows}).requests[0]

    assert (request.wire, request.tokens, request.prompt_tokens, request.finish) == ("completions", 3, 4, "length")
