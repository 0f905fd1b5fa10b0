"""A running server as the command line sees it: JSON asked for, answers streamed, by the standard library's HTTP.

Knows how to ask and how to hang up, not what is asked. `run`, `models` and `cache` use it; nothing here loads mlx.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from weft.config import ServerConfig
from weft.errors import RequestError, WeftError

DEFAULT_URL = f"http://{ServerConfig.host}:{ServerConfig.port}"
PROBE_SECONDS = 0.2
SILENCE_SECONDS = 300.0  # a server shows every few seconds that it lives

T = TypeVar("T")


class ServerClient:
    """One server, asked one thing at a time. Its address is `url`, else WEFT_URL, else this machine's default port.

    Its key is `key`, else the first of WEFT_API_KEY.
    """

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self.url = (url or os.environ.get("WEFT_URL") or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        self.key = key or os.environ.get("WEFT_API_KEY", "").split(",")[0].strip()
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        self._socket: socket.socket | None = None
        self._hung_up = False

    def get(self, path: str, kind: type[T], seconds: float = PROBE_SECONDS) -> T:
        """What the server says at `path`. Raises WeftError when it says nothing, or something else than a `kind`."""
        return self._whole("GET", path, None, kind, seconds)

    def post(self, path: str, body: dict[str, Any], kind: type[T], seconds: float) -> T:
        """What the server says to `body`. Raises as `get` does."""
        return self._whole("POST", path, body, kind, seconds)

    def _whole(self, method: str, path: str, body: dict[str, Any] | None, kind: type[T], seconds: float) -> T:
        connection = self._connect(seconds)
        try:
            return msgspec.json.decode(self._ask(connection, method, path, body).read(), type=kind)
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            raise WeftError(f"what answers at {self.url}{path} is no weft server ({_words(error)})") from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any] | None) -> Generator[dict[str, Any]]:
        """The events of a streamed answer, until its end or until `hang_up`. Without a body it is only asked for."""
        self._hung_up = False
        connection = self._connect(SILENCE_SECONDS)
        try:
            with self._ask(connection, "GET" if body is None else "POST", path, body) as response:
                for line in response:
                    if line.strip() == b"data: [DONE]":
                        return
                    if line.startswith(b"data: "):
                        yield _event(line[6:])
            raise HTTPException("the answer has no end")
        except (OSError, HTTPException, ValueError) as error:
            if not self._hung_up:
                raise WeftError(f"the server at {self.url} broke off ({_words(error)}); see its log and try again") from error
        finally:
            connection.close()

    def hang_up(self) -> None:
        """Close the line under a running `stream`, which then ends; the server takes it as a cancellation."""
        self._hung_up = True
        if self._socket is not None:
            with suppress(OSError):  # the other side was quicker
                self._socket.shutdown(socket.SHUT_RDWR)

    def _connect(self, seconds: float) -> HTTPConnection:
        try:
            parts = urlsplit(self.url)
            secure = {"http": False, "https": True}[parts.scheme]
            connection = (HTTPSConnection if secure else HTTPConnection)(parts.hostname or "", parts.port, timeout=seconds)
        except (KeyError, ValueError, HTTPException) as error:
            raise WeftError(f"{self.url!r} is no server's address; give one like {DEFAULT_URL}") from error
        try:
            connection.connect()
        except OSError as error:
            raise WeftError(f"no server answers at {self.url} ({_words(error)}); start one with `weft serve`") from error
        self._socket = connection.sock
        return connection

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        content = None if body is None else json.dumps(body)
        connection.request(method, urlsplit(self.url).path + path, content, self._headers)
        response = connection.getresponse()
        if response.status not in (200, 202):
            raise _problem(response.status, response.read())
        return response


def _event(data: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise WeftError(event["error"]["message"])
    return event


def _problem(status: int, body: bytes) -> WeftError:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answered with status {status}"
    return RequestError(message) if status < 500 else WeftError(message)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
