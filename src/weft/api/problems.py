"""How an error is told: its status, its headers, its body in the shape of the wire it came by.

Every error of the house has one row in the table below; whatever has none is ours, a 500 that says nothing of the inside.
Of the endpoints it knows only how their paths begin, which says what an error looks like there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import (
    BusyError,
    ContextTooLong,
    EngineError,
    EngineStarting,
    InsufficientMemory,
    ModelConflict,
    RequestCancelled,
    RequestError,
    RequestTimedOut,
    ServerStopping,
    TemplateFailed,
    UnknownModel,
    UnsupportedParameter,
    WeftError,
)

MAX_RETRY_AFTER = 30  # seconds; OpenAI's client gives up at once above 120
MESSAGES = "/v1/messages"  # how the paths of Anthropic's wire begin
OVERLOADED = 529  # what that wire has for too many requests; its 429 is for a client that asks too often


class BorderError(WeftError):
    """Refused at the border, before any endpoint looked at the request."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


# The first row that fits is taken, so a subclass stands above its base.
_TABLE: tuple[tuple[type[WeftError], int, str | None], ...] = (
    (UnsupportedParameter, 400, "unsupported_parameter"),
    (TemplateFailed, 400, "invalid_messages"),
    (ContextTooLong, 400, "context_length_exceeded"),
    (InsufficientMemory, 400, "insufficient_memory"),
    (UnknownModel, 404, "model_not_found"),
    (ModelConflict, 409, "model_conflict"),
    (RequestCancelled, 499, "request_cancelled"),
    (RequestTimedOut, 504, "request_timeout"),
    (RequestError, 400, None),
    (EngineStarting, 503, "model_loading"),
    (ServerStopping, 503, "server_stopping"),
    (BusyError, 429, "queue_full"),
    (EngineError, 500, "engine_error"),
)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def status_of(error: Exception, path: str = "") -> int:
    """The HTTP status that tells this error to who asked at this path."""
    status = _row(error)[0]
    return OVERLOADED if status == 429 and path.startswith(MESSAGES) else status


def headers_of(error: Exception) -> dict[str, str]:
    """What the client is told beside the body: when to come again, or that it should not."""
    match error:
        case BorderError():
            return error.headers
        case BusyError():
            return {"retry-after": str(min(max(error.retry_after, 1), MAX_RETRY_AFTER))}
    # Clients send any 5xx three times. What broke a row or an engine would break two more.
    return {"x-should-retry": "false"} if status_of(error) >= 500 else {}


def openai_body(error: Exception) -> dict[str, Any]:
    """The error as OpenAI's wires show it, in a body or in a stream's event."""
    status, code = _row(error)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": _message(error), "type": kind, "param": param, "code": code}}


def anthropic_body(error: Exception, request_id: str) -> dict[str, Any]:
    """The same on Anthropic's wire. Its clients know a prompt that is too long by these words, and shorten it."""
    status, message = status_of(error, MESSAGES), _message(error)
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {error.got} tokens > {error.limit} maximum"
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_body(error: Exception) -> dict[str, Any]:
    """The same on Ollama's wire."""
    return {"error": _message(error)}


# The first row that fits the path is taken.
_BODIES: tuple[tuple[str, Callable[[Exception, str], dict[str, Any]]], ...] = (
    (MESSAGES, anthropic_body),
    ("/api/", lambda error, _: ollama_body(error)),
    ("", lambda error, _: openai_body(error)),
)


def problem(error: Exception, request_id: str, path: str = "") -> Response:
    """The whole response that tells this error to who asked at this path."""
    body = next(body for prefix, body in _BODIES if path.startswith(prefix))
    headers = {"x-request-id": request_id, **headers_of(error)}
    return Response(msgspec.json.encode(body(error, request_id)), status_of(error, path), headers, "application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for the router's own 404 and 405; all other errors are the guard's."""
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        error = BorderError(error.status_code, code, message, dict(error.headers or {}))
    return problem(error, request.state.request_id, request.scope["path"])


def _row(error: Exception) -> tuple[int, str | None]:
    if isinstance(error, BorderError):
        return error.status, error.code
    for kind, status, code in _TABLE:
        if isinstance(error, kind):
            return status, code
    return 500, "internal_error"


def _message(error: Exception) -> str:
    if _row(error) == (500, "internal_error"):
        return "An internal error ended this request; the server's log has the details under the request's id."
    return str(error)
