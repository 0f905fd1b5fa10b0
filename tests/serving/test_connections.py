"""Connections: how many there may be, what the head of a request may cost, and who is dropped."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from waiting import HANG_SECONDS, until
from weft.api.http import until_gone
from weft.config import ServerConfig
from weft.errors import WeftError
from weft.ipc.limits import MAX_HEAD_BYTES, MAX_HEADERS
from weft.serving.connections import make_http_server

ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
BODY = b"x" * 1000
TLS = Path(__file__).parent.parent / "tls"


@dataclass
class App:
    """Answers at once, or as its path asks; keeps what became of its requests."""

    seen: list[str] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/wait":
            self.seen.append("asked")
            while not self.go_on.is_set():
                await asyncio.sleep(0.01)
        if path == "/gone":
            self.seen.append("asked")
            while (await receive())["type"] != "http.disconnect":
                pass
            self.seen.append("gone")
        status = 413 if path == "/large" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        if path == "/endless":
            gone = asyncio.create_task(until_gone(receive))
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.seen.append("gone")
            return
        if path == "/parts":
            for _ in range(9):
                await send({"type": "http.response.body", "body": BODY, "more_body": True})
        await send({"type": "http.response.body", "body": BODY})


@dataclass
class Served:
    port: int
    app: App

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), HANG_SECONDS)

    def told(self, data: bytes) -> bytes:
        """Send this and nothing more, and read to the end."""
        with self.connect() as peer:
            peer.sendall(data)
            return read_all(peer)


@contextmanager
def served(max_connections: int | None = None, **settings: Any) -> Iterator[Served]:
    app = App()
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_http_server(app, ServerConfig(**settings), max_connections)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield Served(listener.getsockname()[1], app)
    finally:
        app.go_on.set()
        server.should_exit = True
        thread.join()


def read_all(peer: socket.socket) -> bytes:
    parts = []
    try:
        while part := peer.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_reply(peer: socket.socket) -> bytes:
    """Read one answer of `App` to its end, in as many pieces as it comes."""
    reply = b""
    while not reply.endswith(b"\r\n0\r\n\r\n"):
        part = peer.recv(65536)
        assert part, reply
        reply += part
    return reply


def code_of(reply: bytes) -> tuple[int, str]:
    """The status of a refusal, and its code, which must be readable for clients of OpenAI's and Anthropic's dialects."""
    head, _, body = reply.partition(b"\r\n\r\n")
    told, status = json.loads(body), int(head.split()[1])
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}(\r\n|$)", head)
    assert (b"\r\nretry-after: 1\r\n" in head) == (status == 503)
    assert (told["error"]["type"] == "server_error") == (status >= 500)
    assert told["type"] == "error"
    assert told["error"]["type"]
    return status, told["error"]["code"]


@pytest.mark.parametrize(("path", "body"), [("/", BODY), ("/parts", BODY * 10)])
@pytest.mark.parametrize("wish", [b"", b"connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection_ends_the_body(
    path: str, body: bytes, wish: bytes
) -> None:
    with served() as at:
        head, _, told = at.told(b"GET %b HTTP/1.0\r\n%b\r\n" % (path.encode(), wish)).partition(b"\r\n\r\n")
        _, _, nothing = at.told(b"HEAD %b HTTP/1.0\r\n\r\n" % path.encode()).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert told == body
    assert nothing == b""


def test_headers_are_refused_by_size_while_they_still_come() -> None:
    with served(header_seconds=600) as at, at.connect() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nx: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012 - it is cut off while it sends
            for _ in range(256):  # 16 MiB, more than sockets hold
                peer.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"x" * MAX_HEAD_BYTES + b"\r\n",
        b"x: y\r\n" * (MAX_HEADERS + 1),
        b"".join(b"x%d: " % number + b"x" * 4096 + b"\r\n" for number in range(20)),
    ],
    ids=["one long", "many", "twenty of 4 KiB"],
)
def test_a_head_that_is_too_large_is_431_in_json(head: bytes) -> None:
    with served() as at:
        assert code_of(at.told(b"GET / HTTP/1.1\r\nhost: here\r\n" + head + b"\r\n")) == (431, "headers_too_large")


def test_headers_below_the_limits_are_taken() -> None:
    head = b"".join(b"x%d: y\r\n" % number for number in range(MAX_HEADERS - 3)) + b"long: " + b"x" * (MAX_HEAD_BYTES - 4096)
    with served() as at:
        reply = at.told(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n" + head + b"\r\n\r\n")

        assert reply.startswith(b"HTTP/1.1 200")


def test_what_is_not_http_is_told_so_in_json() -> None:
    with served() as at:
        assert code_of(at.told(b"\x16\x03\x01 hello\r\n\r\n")) == (400, "invalid_http")


def test_a_silent_connection_is_closed() -> None:
    with served(header_seconds=0.1) as at:
        assert at.told(b"") == b""


@pytest.mark.parametrize("half", [b"GET / HTTP/1.1\r\nhost: he", b"G"])
def test_half_a_head_is_answered_with_408_and_closed(half: bytes) -> None:
    with served(header_seconds=0.1) as at:
        assert code_of(at.told(half)) == (408, "request_timeout")


def test_blank_lines_do_not_keep_a_connection() -> None:
    with served(header_seconds=0.2) as at, at.connect() as peer:
        peer.sendall(ASK)
        read_reply(peer)
        peer.sendall(b"\r\n")

        assert read_all(peer) == b""


def test_a_request_that_is_computed_for_long_is_not_silent() -> None:
    with served(header_seconds=0.1) as at, at.connect() as peer:
        peer.sendall(ASK.replace(b"/ ", b"/wait "))
        until(lambda: at.app.seen)
        silent = at.told(b"")  # another one, which came later, is closed meanwhile
        at.app.go_on.set()

        assert silent == b""
        assert peer.recv(65536).startswith(b"HTTP/1.1 200")


def test_one_connection_too_many_is_told_so_and_those_before_it_stay() -> None:
    with served(max_connections=2) as at, at.connect() as one, at.connect() as two:
        for peer in (one, two):
            peer.sendall(ASK)
            assert peer.recv(65536).startswith(b"HTTP/1.1 200")
        assert code_of(at.told(b"")) == (503, "too_many_connections")
        one.close()

        until(lambda: at.told(ASK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200"))


def test_one_address_may_not_take_all_connections() -> None:
    with served(max_connections_per_address=1) as at, at.connect() as one:
        one.sendall(ASK)
        assert one.recv(65536).startswith(b"HTTP/1.1 200")

        assert code_of(at.told(b"")) == (503, "too_many_connections")
        with socket.create_connection(("127.0.0.1", at.port), HANG_SECONDS, ("127.0.0.2", 0)) as other:
            other.sendall(ASK)
            assert other.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_dropped() -> None:
    with served(stall_seconds=0.1) as at, at.connect() as peer:
        peer.sendall(ASK.replace(b"/ ", b"/endless "))

        until(lambda: at.app.seen == ["gone"])


def test_a_half_closed_client_gets_its_answer() -> None:
    with served() as at, at.connect() as peer:
        peer.sendall(ASK.replace(b"/ ", b"/wait "))
        until(lambda: at.app.seen)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)  # the interim response: the server has seen the end
        at.app.go_on.set()

        assert BODY in read_all(peer)  # and the connection is closed: nothing more can come on it


def test_a_client_that_is_gone_before_its_answer_is_noticed() -> None:
    with served() as at:
        with at.connect() as peer:
            peer.sendall(ASK.replace(b"/ ", b"/gone "))
            until(lambda: at.app.seen)

        until(lambda: at.app.seen == ["asked", "gone"])


def test_an_endless_body_is_not_read_on_after_its_refusal() -> None:
    with served(header_seconds=600) as at, at.connect() as peer:
        peer.sendall(b"POST /large HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        assert peer.recv(65536).startswith(b"HTTP/1.1 413")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012 - it is cut off while it sends
            for _ in range(2048):
                peer.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")


def test_requests_do_not_pile_up_behind_one_on_the_same_connection() -> None:
    with served() as at, at.connect() as peer:
        peer.sendall(ASK.replace(b"/ ", b"/wait ") + ASK * 100)

        assert read_all(peer) == b""


def test_tls_is_spoken_with_the_given_certificate() -> None:
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with (
        served(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem")) as at,
        at.connect() as plain,
        trusting.wrap_socket(plain, server_hostname="localhost") as peer,
    ):
        peer.sendall(ASK)

        assert peer.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_certificate_that_can_not_be_read_is_named() -> None:
    with pytest.raises(WeftError, match=r"tls_cert /nowhere\.pem"):
        make_http_server(App(), ServerConfig(tls_cert="/nowhere.pem", tls_key="/nowhere.key"))
