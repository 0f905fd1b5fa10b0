"""Clients that close their connection without a word: their rows are free at once, and nothing is left of them."""

from __future__ import annotations

import json
import socket

import pytest

from servers import ENDLESS_WORD, Server
from waiting import until

LONG = "The little dog ran to the big house. " * 180 + ENDLESS_WORD  # some 1,600 tokens: many chunks of prefill
SHORT = "Once upon a time" + ENDLESS_WORD


def ask(server: Server, prompt: str, *, stream: bool) -> socket.socket:
    """Send a request for as many tokens as there are; the reply is not read here."""
    body = json.dumps({"prompt": prompt, "ignore_eos": True, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["during the prompt", "during the answer"])
def test_fifty_clients_that_vanish_leave_no_row_behind(server: Server, prompt: str, stream: bool) -> None:
    engine = server.status()["engine_pid"]
    connections = [ask(server, prompt, stream=stream) for _ in range(50)]
    if stream and prompt is SHORT:
        for connection in connections[:10]:
            connection.recv(1000)  # well inside the answer
    else:
        until(lambda: server.status()["requests"] == 50)
    for number, connection in enumerate(connections):
        if number % 2:  # half of them rudely, with a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    server.wait_idle()
    status = server.status()
    assert status["engine_pid"] == engine
    assert status["memory"]["rows"] == 0
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 3}).status_code == 200


def test_a_client_that_vanishes_while_it_sends_costs_nothing(server: Server) -> None:
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        connection.close()

    server.wait_idle()
    assert server.get("/health").status_code == 200


def test_memory_does_not_grow_with_the_clients_that_vanished(server: Server) -> None:
    def leave() -> None:
        for connection in [ask(server, SHORT, stream=True) for _ in range(20)]:
            connection.recv(100)
            connection.close()
        server.wait_idle()

    leave()
    before = server.status()["memory"]["active"]
    for _ in range(3):
        leave()

    # A step that was under way when the last one left is given back when the device is done.
    until(lambda: server.status()["memory"]["active"] <= before * 1.05, lambda: f"{before} bytes before: {server.status()}")
