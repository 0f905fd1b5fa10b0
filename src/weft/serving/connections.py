"""Connections of the HTTP server: how many there may be, what the head of a request may cost, and who is dropped.

uvicorn limits only how long an idle connection is kept; the rest is done here, in a protocol that adds to uvicorn's. It acts
before a request reaches the application, so before Host, Origin and key are looked at.
"""

import asyncio
import logging
import socket
import ssl
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.config import ServerConfig
from weft.errors import WeftError
from weft.ipc.limits import MAX_HEAD_BYTES, MAX_HEADERS

log = logging.getLogger("weft.serving")

GOODBYE_SECONDS = 1  # for the last bytes of answers, and the errors that end what did not finish in time
KEEP_ALIVE_SECONDS = 75
LINGER_SECONDS, LINGER_BYTES = (
    2.0,
    1 << 20,
)  # a refused client may still send; a reset would lose it the refusal
MAX_PIPELINED = 16  # requests that wait behind one on the same connection
FIRST_PROBE_SECONDS, LONGEST_PROBE_SECONDS = 0.05, 5.0  # between two looks whether a half-closed client is still there
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpServer(uvicorn.Server):
    """uvicorn.Server without signal handlers: they would re-raise signals at exit, and an orderly shutdown has status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, in all and from one address, and how long a client may keep one waiting."""

    max_connections: int
    max_per_address: int
    header_seconds: float
    stall_seconds: float


def make_http_server(app: ASGIApp, config: ServerConfig, max_connections: int | None = None) -> HttpServer:
    """Make the HTTP server of an application, with uvicorn's limits and ours; `max_connections` may lower the configured one."""
    most = config.max_connections if max_connections is None else min(config.max_connections, max_connections)
    limits = ConnectionLimits(most, config.max_connections_per_address, config.header_seconds, config.stall_seconds)
    protocol: Any = partial(Connection, ConnectionBook(limits))  # Any: uvicorn calls it, and wants it to be a class
    try:
        settings = uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=GOODBYE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise WeftError(f"tls_cert {config.tls_cert} and tls_key {config.tls_key} can not be used: {error}") from error
    return HttpServer(settings)


class ConnectionBook:
    """The open connections, counted by address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.by_address: Counter[str] = Counter()

    def enter(self, address: str) -> str | None:
        """Count a new connection; return why it must be refused, or None."""
        self.by_address[address] += 1
        limits = self.limits
        if self.by_address.total() > limits.max_connections:
            return f"The server has {limits.max_connections} connections, as many as it takes (--max-connections); come again."
        if self.by_address[address] > limits.max_per_address:
            most = f"{limits.max_per_address} connections, as many as one address may have (--max-connections-per-address)"
            return f"{address} has {most}; close some."
        return None

    def leave(self, address: str) -> None:
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits on the head of a request, on silence, and on clients that do not read."""

    def __init__(self, book: ConnectionBook, **given: Any) -> None:  # Any: what uvicorn hands its protocols
        super().__init__(**given)
        self._book = book
        self._address = ""
        self._is_refused = False
        self._is_half_closed = False  # the client sends no more, and waits for its answer
        self._is_in_head = False
        self._num_head_bytes = 0
        self._num_unread_bytes = 0  # that came after a refusal
        self._refusal: tuple[int, str, str] | None = None  # what to answer where the parser was stopped by us
        self._timer: asyncio.TimerHandle | None = None  # ends a connection that is silent, or lingers
        self._stall: asyncio.TimerHandle | None = None  # ends one whose client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if (why := self._book.enter(self._address)) is not None:
            self._refuse(503, "too_many_connections", why)
        else:
            self._set_timer(self._book.limits.header_seconds, self._end_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        self._book.leave(self._address)
        self._set_timer(None)
        self._set_stall(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_unread_bytes += len(data)
            if self._num_unread_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        if self._is_idle and self._timer is None:  # from the first byte on, also if that is only a blank line
            self._set_timer(self._book.limits.header_seconds, self._end_silence)
        super().data_received(data)
        self._num_head_bytes += len(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse(*_TOO_LARGE)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop_parser(*_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._set_timer(None)
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._stop_parser(*_TOO_LARGE)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(429, "too_many_requests", f"More than {MAX_PIPELINED} requests wait on one connection.")
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _end_by_closing(self.cycle)

    def _stop_parser(self, *refusal: Any) -> None:
        self._refusal = (refusal[0], refusal[1], refusal[2])
        raise ValueError(refusal[2])  # the parser reports it, and `send_400_response` answers

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or is refused before the application sees it, with JSON; uvicorn's own is plain text."""
        self._refuse(*(self._refusal or (400, "invalid_http", f"{msg} The request is not valid HTTP/1.1.")))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed:
            self.transport.close()
        is_over, is_body_due = self.cycle.response_complete, self.cycle.more_body
        if is_over and is_body_due and not self.transport.is_closing():  # answered before its body was here: 413, 401 …
            self._linger()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a client that has closed its side after a whole request: it may wait for the answer, or be gone."""
        cycle = self.cycle
        is_asking = cycle is not None and not (cycle.response_started or cycle.more_body or self._is_refused)
        if not is_asking or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        self.loop.call_later(FIRST_PROBE_SECONDS, self._probe, FIRST_PROBE_SECONDS)  # most answers are there before
        return True

    def _probe(self, seconds: float) -> None:
        """Write an interim response now and then: a client that is gone answers it with a reset."""
        if self.cycle.response_started or self.transport.is_closing():
            return
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self.transport.write(CONTINUE)
        self.loop.call_later(seconds, self._probe, min(2 * seconds, LONGEST_PROBE_SECONDS))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_stall(self._book.limits.stall_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_stall(None)

    def _end_stall(self) -> None:
        log.warning("client %s has not read for %g s: it is dropped", self._address, self._book.limits.stall_seconds)
        self.transport.abort()

    def _end_silence(self) -> None:
        """Close a connection on which no request came, and answer half a request with 408."""
        seconds = self._book.limits.header_seconds
        if not self._is_idle:  # the half request stands behind one that is being answered
            self._set_timer(seconds, self._end_silence)
        elif self._is_in_head:
            self._refuse(408, "request_timeout", f"The head of the request did not arrive within {seconds:g} seconds.")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer with an error that clients of every dialect can read, and end the connection."""
        if not self._is_idle:  # an answer is on its way, and another must not stand within it
            self.transport.abort()
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"type": kind, "message": message, "param": None, "code": code}
        body = msgspec.json.encode({"type": "error", "error": error})
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        head = f"{line}content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        head += "retry-after: 1\r\n" * (status == HTTPStatus.SERVICE_UNAVAILABLE) + f"x-request-id: {uuid.uuid4().hex}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Take what the client still sends, unread and not for long, and close."""
        self._is_refused = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_SECONDS, self.transport.abort)

    def _set_timer(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None or then is None else self.loop.call_later(seconds, then)

    def _set_stall(self, seconds: float | None) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._stall = None if seconds is None else self.loop.call_later(seconds, self._end_stall)


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end a response: HTTP/1.0 has no transfer-encoding (RFC 9112, 6.1)."""
    send = cycle.send
    cycle.chunked_encoding = False  # nor does uvicorn count the body then

    async def send_uncounted(message: Any) -> None:  # Any: uvicorn and Starlette name the same messages differently
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_uncounted  # type: ignore[method-assign]


_TOO_LARGE = (
    431,
    "headers_too_large",
    f"The head of the request has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers; send fewer and shorter ones.",
)
