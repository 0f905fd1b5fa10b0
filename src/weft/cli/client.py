"""HTTP client that commands use to talk to a running server: JSON requests and SSE streams over the standard library."""

import json
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from weft.config import ServerConfig
from weft.errors import RequestError, WeftError
from weft.serving.tenants import split_key

DEFAULT_URL = f"http://{ServerConfig.host}:{ServerConfig.port}"
PROBE_SECONDS = 0.2
SILENCE_SECONDS = 300.0  # a server shows every few seconds that it lives

T = TypeVar("T")


class ListedReplica(msgspec.Struct):
    """One of a model's replicas in GET /v1/status and /v1/events."""

    name: str
    status: str
    rows_running: int = 0
    rows_waiting: int = 0
    engine_pid: int | None = None
    engine_restarts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hits(self) -> str:
        return f"{self.cached_tokens / self.prompt_tokens:.0%} of prompts cached" if self.prompt_tokens else ""


class ListedModel(msgspec.Struct):
    """One model as listed by GET /v1/models and GET /v1/status; only the latter fills the fields from `rows_running` on."""

    id: str
    root: str | None = None
    context_length: int | None = None  # known once the model is loaded
    capabilities: list[str] = []
    tools: dict[str, str] = {}  # who shows them to the model
    status: dict[str, Any] = {}
    rows_running: int = 0
    rows_waiting: int = 0
    engine_pid: int | None = None
    engine_restarts: int = 0
    memory: dict[str, int] = {}
    condition: dict[str, Any] = {}
    replicas: list[ListedReplica] = []  # of a model that has several


def _own_key() -> str:
    """Return the secret of the first key in WEFT_API_KEY, which may be written as for the server, with a name and a role."""
    written = os.environ.get("WEFT_API_KEY", "").split(",")[0].strip()
    return split_key(written)[1] if written else ""


class ServerClient:
    """HTTP client of one server, one request at a time; address and key come from WEFT_URL and WEFT_API_KEY if not given."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self.url = (url or os.environ.get("WEFT_URL") or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        self.key = key or _own_key()
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        self._socket: socket.socket | None = None
        self._hung_up = False

    def fetch(self, path: str, kind: type[T], seconds: float = PROBE_SECONDS, body: dict[str, Any] | None = None) -> T:
        """Send a GET, or a POST if `body` is given, and return the JSON answer as `kind`; raise WeftError on any failure."""
        connection = self._connect(seconds)
        try:
            return msgspec.json.decode(self._send(connection, path, body).read(), type=kind)
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            raise WeftError(f"what answers at {self.url}{path} is no weft server ({_reason(error)})") from error
        finally:
            connection.close()

    def fetch_field(self, path: str, field: str, kind: type[T], seconds: float, body: dict[str, Any] | None = None) -> T:
        """Return one top-level field of the server's JSON answer, decoded as `kind`; other fields are ignored."""
        return cast(T, getattr(self.fetch(path, msgspec.defstruct("Answer", [(field, kind)]), seconds, body), field))

    def models(self, seconds: float = PROBE_SECONDS) -> list[ListedModel]:
        return self.fetch_field("/v1/models", "data", list[ListedModel], seconds)

    def stream(self, path: str, body: dict[str, Any] | None) -> Generator[dict[str, Any]]:
        """Yield the JSON events of an SSE answer until its end or `hang_up`; sends a POST of `body`, or a GET if it is None."""
        self._hung_up = False
        connection = self._connect(SILENCE_SECONDS)
        try:
            with self._send(connection, path, body) as response:
                for line in response:
                    if line.strip() == b"data: [DONE]":
                        return
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise WeftError(event["error"]["message"])
                        yield event
            raise HTTPException("the answer has no end")
        except (OSError, HTTPException, ValueError) as error:
            if not self._hung_up:
                raise WeftError(f"the server at {self.url} broke off ({_reason(error)}); see its log and try again") from error
        finally:
            connection.close()

    def hang_up(self) -> None:
        """Shut down the socket of a running `stream`, which then ends without an error; the server cancels the request."""
        self._hung_up = True
        if self._socket is not None:
            with suppress(OSError):  # the other side was quicker
                self._socket.shutdown(socket.SHUT_RDWR)

    def _connect(self, seconds: float) -> HTTPConnection:
        try:
            parts = urlsplit(self.url)
            is_secure = {"http": False, "https": True}[parts.scheme]
            connection = (HTTPSConnection if is_secure else HTTPConnection)(parts.hostname or "", parts.port, timeout=seconds)
            connection.connect()
        except OSError as error:
            raise WeftError(f"no server answers at {self.url} ({_reason(error)}); start one with `weft serve`") from error
        except (KeyError, ValueError, HTTPException) as error:
            raise WeftError(f"{self.url!r} is no server's address; give one like {DEFAULT_URL}") from error
        self._socket = connection.sock
        return connection

    def _send(self, connection: HTTPConnection, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, urlsplit(self.url).path + path, content, self._headers)
        response = connection.getresponse()
        if response.status in (200, 202):
            return response
        try:
            message = json.loads(response.read())["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = f"the server answered with status {response.status}"
        raise RequestError(message) if response.status < 500 else WeftError(message)


def choose_model(models: Sequence[ListedModel], wanted: str | None) -> ListedModel:
    """Return the model named `wanted`, or the only model if it is None; raise WeftError if none or several match."""
    names = ", ".join(model.id for model in models)
    found = [model for model in models if wanted in (None, model.id)]
    if not found:
        raise WeftError(f"no model {wanted!r} is served; there is {names}")
    if len(found) > 1:
        raise WeftError(f"the server has several models ({names}); choose one with --model")
    return found[0]


def read_delta(choice: dict[str, Any]) -> tuple[str, str]:
    """Return the (reasoning, text) that a streamed choice of a chat or text completion adds; each is empty if it adds none."""
    delta = choice.get("delta") or {"content": choice.get("text")}
    return delta.get("reasoning_content") or "", delta.get("content") or ""


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
