"""How an error is told: its status, its headers, its body in OpenAI's shape.

Every error of the house has one row in the table below; whatever has none is ours, a 500 that says nothing of the inside.
Knows no endpoint. Each wire that words its errors otherwise brings its own body function and uses the rest.
"""

from __future__ import annotations

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
    (RequestCancelled, 499, "request_cancelled"),
    (RequestTimedOut, 504, "request_timeout"),
    (RequestError, 400, None),
    (EngineStarting, 503, "model_loading"),
    (ServerStopping, 503, "server_stopping"),
    (BusyError, 429, "queue_full"),
    (EngineError, 500, "engine_error"),
)


def status_of(error: Exception) -> int:
    """The HTTP status that tells this error."""
    return _row(error)[0]


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


def problem(error: Exception, request_id: str) -> Response:
    """The whole response that tells this error."""
    headers = {"x-request-id": request_id, **headers_of(error)}
    return Response(msgspec.json.encode(openai_body(error)), status_of(error), headers, "application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for the router's own 404 and 405; all other errors are the guard's."""
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        error = BorderError(error.status_code, code, message, dict(error.headers or {}))
    return problem(error, request.state.request_id)


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
