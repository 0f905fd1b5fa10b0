"""Who may enter: the one middleware around the app. It checks Host, Origin and key, names the request, catches what escapes.

Web pages are the danger on loopback: any page may send requests to localhost (hence Origin), and a page's own name may be
made to resolve to us (DNS rebinding, hence Host). Knows no endpoint but /health, which does not queue.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import uuid
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.problems import BorderError, problem, status_of

logger = logging.getLogger(__name__)

_HOST = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{0,5}))?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PREFLIGHT_SECONDS = "600"


class Guard:
    """The app's one middleware, inside Starlette's own, which would tell an error as plain text before it comes here.

    `allowed_hosts` are DNS names we are known by, `allowed_origins` those of pages that may use us, `open_paths` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Iterable[str] = (),
        open_paths: Iterable[str] = ("/health",),
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        on_response: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]
        self.open_paths = frozenset(open_paths)
        self.allowed_hosts = {_host_of(host) or host for host in allowed_hosts}
        self.allowed_origins = {origin.lower().rstrip("/") for origin in allowed_origins}
        self.on_response = on_response  # hears the status of every response
        self._entrance = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it here. Every response leaves with the request's id."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"] != "/health":
            await self._enter()
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
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
            state["api_key"] = self._check_key(headers, scope["path"])
            await self.app(scope, receive, send_marked)
        except Exception as error:  # the last border: whatever it is, the client gets an answer and the others go on
            if status_of(error) == 500:
                logger.exception("request %s failed", request_id)
            if not started:
                await problem(error, request_id, scope["path"])(scope, receive, send_marked)

    async def _enter(self) -> None:
        """One at a time, with a turn of the event loop for each: hundreds at once would hold up health and all streams."""
        async with self._entrance:
            await asyncio.sleep(0)

    def _check_host(self, headers: Headers, http_version: str) -> None:
        values = headers.getlist("host")
        if not values and http_version == "1.0":
            return
        host = _host_of(values[0]) if len(values) == 1 else None
        if host is None:
            raise BorderError(400, "invalid_host", "The request must have exactly one Host header of the form name:port.")
        # An address is safe: only a name can be made to resolve to us by somebody else.
        if _address(host) is None and not _is_loopback(host) and host not in self.allowed_hosts:
            message = f"Host {host!r} is not a name of this server; start it with --allowed-host {host} if it should be."
            raise BorderError(403, "forbidden_host", message)

    def _check_origin(self, headers: Headers) -> dict[str, str]:
        """The headers by which the browser lets the page read our answer; an error when the page may not have one."""
        origin = ",".join(headers.getlist("origin"))  # two are none
        authority = origin.lower().partition("://")[2]
        host = _host_of(authority)
        is_ours = authority == headers.get("host", "").lower()  # a page of this server, under a Host that was found good
        is_trusted = host is not None and (is_ours or _is_loopback(host))
        if not is_trusted and origin.lower() not in self.allowed_origins:
            message = (
                f"Web pages of origin {origin!r} may not use this server; start it with --allowed-origin ORIGIN to let them."
            )
            raise BorderError(403, "forbidden_origin", message)
        return {"access-control-allow-origin": origin, "access-control-expose-headers": "*", "vary": "origin"}

    def _check_key(self, headers: Headers, path: str) -> bytes:
        """The key the client came with, also where none is asked for; b"" without one."""
        given = headers.getlist("x-api-key")
        for value in headers.getlist("authorization"):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                given.append(token.strip())
        tokens = [token.encode("latin-1") for token in given if token]  # an empty key never fits
        if not self.api_keys or path in self.open_paths:
            return tokens[0] if tokens else b""
        fitting = [token for token in tokens for key in self.api_keys if hmac.compare_digest(token, key)]
        if not fitting:
            message = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise BorderError(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        return fitting[0]


def _request_id(headers: Headers) -> str:
    """The client's own id where it gave a harmless one, so that its log and ours can be laid side by side."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _preflight(headers: Headers) -> Response:
    """The answer to a browser that asks before it sends; the origin was found good, so it may send what it likes."""
    allowed = {
        "access-control-allow-methods": "GET, HEAD, POST, DELETE, OPTIONS",
        "access-control-max-age": _PREFLIGHT_SECONDS,
    }
    if "access-control-request-headers" in headers:
        allowed["access-control-allow-headers"] = headers["access-control-request-headers"]
    return Response(status_code=204, headers=allowed)


def _host_of(authority: str) -> str | None:
    """The host of `host:port` in lower case, without brackets and final dot; None when it is not of that form."""
    match = _HOST.fullmatch(authority)
    if match is None or int(match["port"] or 0) > 65535:
        return None
    return match["host"].lower().strip("[]").removesuffix(".") or None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or host.endswith(".localhost") if address is None else address.is_loopback
