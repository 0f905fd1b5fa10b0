"""HTTP basics: the middleware that checks requests, limited reading of JSON bodies, deadlines, and the web page's files."""

import asyncio
import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Literal, Self, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.problems import BorderError, problem, status_of
from weft.config import ServerConfig
from weft.errors import InvalidRequest, RequestTimedOut
from weft.ipc.limits import MAX_BODY_BRACKETS, MAX_BODY_COMMAS, MAX_BODY_DEPTH
from weft.serving.tenants import Keyring, Tenant

log = logging.getLogger("weft.api")

TOO_DEEP = f"The body's JSON is nested more than {MAX_BODY_DEPTH} levels deep."
LARGE_BYTES = 2**16  # a body of more is decoded and checked in a thread: half a megabyte of numbers takes 50 ms
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # proxies would keep events back
TIMEOUT_HEADER = "x-request-timeout"
PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_HOST = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{0,5}))?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Outcome = TypeVar("Outcome")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a response whose body is this value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def make_unique(request_id: str, headers: Headers) -> str:
    """Return a request's id, with random letters behind a dot if the client chose it: `request_ids` leaves them out again."""
    return f"{request_id}.{uuid.uuid4().hex[:8]}" if headers.get("x-request-id") == request_id else request_id


class Disconnected(BorderError):
    """Error for a client that left while its body was read or a whole reply was computed; logged as status 499."""

    def __init__(self) -> None:
        super().__init__(499, "client_disconnected", "The client closed the connection before its request was complete.")


async def until_gone(receive: Receive) -> None:
    """Wait until the client has closed its connection; other ASGI messages are discarded."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json(request: Request, config: ServerConfig) -> dict[str, Any]:
    """Read a request's body as a JSON object, limited in bytes, seconds and depth. Raises BorderError or InvalidRequest."""
    headers, body, max_bytes = request.headers, bytearray(), config.max_body_bytes
    if headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data":
        # Other types are let in: curl says "form" when it sends JSON.
        raise BorderError(415, "unsupported_media_type", "The body must be JSON (content-type application/json), not form data.")
    if (coding := headers.get("content-encoding", "identity")).lower() != "identity":
        raise BorderError(415, "unsupported_media_type", f"The body must be sent plain, not with content-encoding {coding!r}.")
    too_large = BorderError(413, "request_too_large", f"The request's body is larger than the {max_bytes} bytes allowed.")
    if (length := headers.get("content-length", "")).isdecimal() and int(length) > max_bytes:
        raise too_large
    try:
        async with asyncio.timeout(config.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        message = f"The request's body did not arrive within {config.body_seconds:g} seconds."
        raise BorderError(408, "request_timeout", message, {"connection": "close"}) from None
    except ClientDisconnect:
        raise Disconnected from None
    request.state.body_bytes = len(body)
    # The check of eight million numbers takes a second; in a thread it gives way to the event loop.
    return await asyncio.to_thread(_parse, bytes(body)) if len(body) > LARGE_BYTES else _parse(bytes(body))


def _parse(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("The request has no body; send a JSON object.")
    if (brackets := body.count(b"[") + body.count(b"{")) > MAX_BODY_BRACKETS:
        raise InvalidRequest(f"The body has {brackets} opening brackets; at most {MAX_BODY_BRACKETS} are allowed.")
    if (commas := body.count(b",")) > MAX_BODY_COMMAS:  # decoding holds the interpreter: 16 million numbers take 0.4 s
        raise InvalidRequest(f"The body has {commas} commas; at most {MAX_BODY_COMMAS} are allowed.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest(TOO_DEEP) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        # The decoder calls half a surrogate pair at the end of a string "truncated" too.
        hint = "; it ends too early, or a string ends in half of a surrogate pair" if "truncated" in str(error) else ""
        raise InvalidRequest(f"The body is not valid JSON: {error}{hint}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object: {…}.")
    _check_values(value)
    return value


def _check_values(value: dict[str, Any]) -> None:
    """Raise InvalidRequest for JSON that is nested more than MAX_BODY_DEPTH levels or has integers of more than 64 bits."""
    level: list[Any] = [value]
    for _ in range(MAX_BODY_DEPTH):
        children = [child for parent in level for child in (parent.values() if type(parent) is dict else parent)]
        if any(type(child) is int and not MIN_INTEGER <= child <= MAX_INTEGER for child in children):
            raise InvalidRequest("The body has an integer of more than 64 bits.")
        level = [child for child in children if type(child) is dict or type(child) is list]
        if not level:
            return
    raise InvalidRequest(TOO_DEEP)


@dataclass(frozen=True)
class Deadline:
    """Time limit of a request, counted from its arrival; no limit if `seconds` is None."""

    seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, headers: Headers, longest: float | None) -> Self:
        """Make a deadline that starts now: `longest`, or the client's timeout header if shorter. Raises InvalidRequest."""
        if (given := headers.get(TIMEOUT_HEADER)) is None:
            return cls(longest)
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise InvalidRequest(f"{TIMEOUT_HEADER} {given!r} must be a number of seconds above 0", TIMEOUT_HEADER)
        return cls(seconds if longest is None else min(seconds, longest))

    async def hold(self, work: Awaitable[Outcome]) -> Outcome:
        """Await `work` and return its result; at the deadline cancel `work` and raise RequestTimedOut."""
        left = None if self.seconds is None else self.begun + self.seconds - time.monotonic()
        try:
            async with asyncio.timeout(left) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the request was not finished within {self.seconds:g} seconds; ask for less, or allow it more time"
            raise RequestTimedOut(message) from None


class Guard:
    """ASGI middleware: checks Host, Origin and API key, gives each request an id, and turns uncaught errors into responses.

    Web pages are the danger on loopback: any page may send requests to localhost (hence the check of Origin), and a page's own
    name may be made to resolve to us (DNS rebinding, hence Host). /health and `open_paths` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keyring: Keyring,
        open_paths: Iterable[str],
        on_response: Callable[[int], None],
    ) -> None:
        self.app = app
        self.keyring = keyring
        self.open_paths = {"/health", "/healthz", "/ping", *open_paths}
        self.allowed_hosts = {_host_of(host) or host for host in (*config.allowed_hosts, config.host)}
        self.allowed_origins = {origin.lower().rstrip("/") for origin in config.allowed_origins}
        self.on_response = on_response
        self._entrance = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"] != "/health":
            async with self._entrance:  # one at a time: hundreds at once would hold up health and all streams
                await asyncio.sleep(0)
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        given = headers.get("x-request-id", "")  # the client's own id, if harmless: its log and ours can be compared
        request_id = state["request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        added = {"x-request-id": request_id, "request-id": request_id}  # OpenAI's name for it, and Anthropic's
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(added)
                self.on_response(message["status"])
            await send(message)

        try:
            self._check_host(headers, scope["http_version"])
            if "origin" in headers:
                added |= self._check_origin(headers)
                if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                    return await _preflight(headers)(scope, receive, send_marked)
            state["tenant"] = self._check_key(headers, scope["path"])
            await self.app(scope, receive, send_marked)
        except Exception as error:  # the last border: whatever it is, the client gets an answer and the others go on
            if status_of(error) == 500:
                log.exception("request %s failed", request_id)
            if not started:
                await problem(error, request_id, scope["path"])(scope, receive, send_marked)

    def _check_host(self, headers: Headers, http_version: str) -> None:
        values = headers.getlist("host")
        if not values and http_version == "1.0":
            return
        host = _host_of(values[0]) if len(values) == 1 else None
        if host is None:
            raise BorderError(400, "invalid_host", "The request must have exactly one Host header of the form name:port.")
        # An address is safe: only a name can be made to resolve to us by somebody else.
        if _kind_of(host) == "name" and host not in self.allowed_hosts:
            message = f"Host {host!r} is not a name of this server; start it with --allowed-hosts {host} if it should be."
            raise BorderError(403, "forbidden_host", message)

    def _check_origin(self, headers: Headers) -> dict[str, str]:
        """Return the CORS headers for the reply to an allowed Origin. Raises BorderError (403) for any other origin."""
        origin = ",".join(headers.getlist("origin"))  # two Origin headers match nothing
        authority = origin.lower().partition("://")[2]
        host = _host_of(authority)
        is_ours = authority == headers.get("host", "").lower()  # a page of this server; its Host was checked before
        is_trusted = host is not None and (is_ours or _kind_of(host) == "loopback")
        if not is_trusted and origin.lower() not in self.allowed_origins:
            hint = "start it with --allowed-origins ORIGIN to let them"
            raise BorderError(403, "forbidden_origin", f"Web pages of origin {origin!r} may not use this server; {hint}.")
        return {"access-control-allow-origin": origin, "access-control-expose-headers": "*", "vary": "origin"}

    def _check_key(self, headers: Headers, path: str) -> Tenant:
        """Return the tenant whose API key the client sent. Raises BorderError (401) if a key is required and none is valid."""
        bearers = [value.partition(" ") for value in headers.getlist("authorization")]
        given = headers.getlist("x-api-key") + [token.strip() for scheme, _, token in bearers if scheme.lower() == "bearer"]
        tokens = [token.encode("latin-1") for token in given if token]  # an empty key never fits
        if self.keyring.is_open:
            return self.keyring.anybody(tokens)
        if (tenant := self.keyring.find(tokens)) is not None:
            return tenant
        if path in self.open_paths:
            return self.keyring.nobody()
        message = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise BorderError(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})


def _preflight(headers: Headers) -> Response:
    """Answer a CORS preflight request: allow our methods and any requested headers. The caller has checked the origin."""
    allowed = {"access-control-allow-methods": "GET, HEAD, POST, DELETE, OPTIONS", "access-control-max-age": "600"}
    if "access-control-request-headers" in headers:
        allowed["access-control-allow-headers"] = headers["access-control-request-headers"]
    return Response(status_code=204, headers=allowed)


def _host_of(authority: str) -> str | None:
    """Return the host of `host:port` (port optional) in lower case, without brackets or final dot; None if malformed."""
    match = _HOST.fullmatch(authority)
    if match is None or int(match["port"] or 0) > 65535:
        return None
    return match["host"].lower().strip("[]").removesuffix(".") or None


def _kind_of(host: str) -> Literal["loopback", "address", "name"]:
    try:
        return "loopback" if ipaddress.ip_address(host).is_loopback else "address"
    except ValueError:
        return "loopback" if host == "localhost" or host.endswith(".localhost") else "name"


class Page:
    """Static files of the web page (`weft/page`), read once at start and served with a strict Content-Security-Policy."""

    def __init__(self) -> None:
        found = [each for each in (files("weft") / "page").iterdir() if PurePath(each.name).suffix in PAGE_TYPES]
        self.files = {f"/page/{each.name}": each.read_bytes() for each in found}
        self.files["/"] = self.files.pop("/page/index.html")

    async def serve_file(self, request: Request) -> Response:
        path = request.url.path
        return Response(self.files[path], headers=PAGE_HEADERS, media_type=PAGE_TYPES[PurePath(path).suffix or ".html"])
