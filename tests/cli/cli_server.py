"""A small stand-in for a running server: the endpoints the command line asks, with answers that are known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STATUS = {
    "version": "9.9",
    "uptime_seconds": 61.2,
    "engine_pid": 4711,
    "engine_restarts": 0,
    "rows_running": 2,
    "rows_waiting": 1,
    "models": [
        {"id": "tiny-hybrid", "context_length": 2048, "status": {"value": "loaded"}, "memory": {"weights": 13_000_000}},
        {"id": "other"},
    ],
    "memory": {"weights": 13_000_000},
}
CHAT = [{"reasoning_content": "Let me see. "}, {"content": "It is "}, {}, {"content": "blue."}]
NODE = {"bytes": 1000, "hits": 0, "pins": 0, "idle_seconds": 61.2, "is_on_disk": False, "is_salted": False}
CACHE = {
    "models": [
        {
            "model": "tiny-hybrid",
            "held_bytes": 3500,
            "budget_bytes": 1_000_000,
            "disk_bytes": 2000,
            "num_nodes": 4,
            "nodes": [
                {**NODE, "number": 1, "parent": None, "length": 100, "text": "Be brief. Once upon a time there was"},
                {**NODE, "number": 2, "parent": 1, "length": 120, "text": " a dog.\n\x1b[2J", "hits": 3, "pins": 1},
                {**NODE, "number": 3, "parent": 1, "length": 130, "text": " a cat.", "idle_seconds": 5.0, "is_on_disk": True},
                {**NODE, "number": 4, "parent": None, "length": 7, "text": None, "bytes": 500, "idle_seconds": 100.0},
            ],
        },
        {"model": "other", "held_bytes": 0, "budget_bytes": 0, "disk_bytes": 0, "num_nodes": 0, "nodes": []},
    ]
}
REPORT: dict[str, Any] = {
    "id": "mine", "model": "tiny-hybrid", "created": 0, "prompt_tokens": 1200, "cached_tokens": 896, "completion_tokens": 40,
    "queue_seconds": 0.002, "prefill_seconds": 0.301, "decode_seconds": 1.2,
    "matched": 896, "cause": "differs", "position": 896, "token": " dog", "instead": " cat\n", "why": "Because.",
    "before": "there was a",
}  # fmt: skip
USAGE = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}


class FakeServer(ThreadingHTTPServer):
    """Serves `tiny-hybrid` and `other`. What was asked is in `asked`; `left` is set when a reader goes in mid-stream."""

    daemon_threads = True
    health = 200
    key: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{**model, "object": "model"} for model in STATUS["models"]]}  # type: ignore[attr-defined]
        match self.path:
            case "/health":
                self._json({"status": "ok"}, self.server.health)
            case "/v1/models":
                self._json(models)
            case "/v1/status":
                self._json(STATUS)
            case "/v1/cache":
                self._json(CACHE)
            case "/v1/cache/requests/a%2Fb":
                self._json(REPORT)
            case "/v1/cache/requests/silent":
                self._json({name: REPORT[name] for name in list(REPORT)[:9]})
            case _:
                self._json({"error": {"message": "not found"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body))
        if self.path == "/v1/cache/clear":
            self._json({"cleared": {"tiny-hybrid": 4}})
            return
        if body.get("max_tokens") == 999_999:
            self._json({"error": {"message": "max_tokens 999999 is too much"}}, 400)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            while "for ever" in json.dumps(body):
                time.sleep(0.02)
                self._event({"choices": [{"delta": {"content": "."}, "finish_reason": None}]})
            for choice in _chat() if "messages" in body else _text():
                self._event({"choices": [choice]})
            if "and break" in json.dumps(body):
                self._event({"error": {"message": "the row failed"}})
                return
            self._event({"choices": [], "usage": USAGE})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.left.set()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    def _json(self, value: Any, status: int = 200) -> None:
        if self.server.key is not None and self.headers["authorization"] != f"Bearer {self.server.key}":
            value, status = {"error": {"message": "the API key is missing or wrong"}}, 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        pass


def _chat() -> Iterator[dict[str, Any]]:
    yield {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    for delta in CHAT:
        yield {"index": 0, "delta": delta, "finish_reason": None}
    yield {"index": 0, "delta": {}, "finish_reason": "stop"}


def _text() -> Iterator[dict[str, Any]]:
    yield {"index": 0, "text": ", there was", "finish_reason": None}
    yield {"index": 0, "text": " a loom.", "finish_reason": "length"}


@contextmanager
def running() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
