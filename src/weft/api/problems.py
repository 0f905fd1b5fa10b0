"""Error responses: HTTP status, headers, and a body in the format of the API (OpenAI, Anthropic, Ollama) of the path."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft import errors
from weft.api.paths import hint_for
from weft.errors import BusyError, ContextTooLong, RateLimited, RequestError, WeftError

MAX_RETRY_AFTER = 30  # seconds; OpenAI's client gives up at once above 120
MESSAGES = "/v1/messages"  # how the paths of Anthropic's dialect begin
OVERLOADED = 529  # Anthropic's status for too many requests; its 429 is for a client that sends too often


class BorderError(WeftError):
    """An error with its own HTTP status, code and headers, for refusals outside the table of error types."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


# Error, HTTP status, OpenAI's code, and the code of a failed response, on which depends what a client of Responses does next:
# shorten its history, give up, or try again. The first row that fits is taken, so a subclass stands above its base.
_TABLE: tuple[tuple[type[Exception], int, str | None, str], ...] = (
    (errors.UnsupportedParameter, 400, "unsupported_parameter", "invalid_prompt"),
    (errors.TemplateFailed, 400, "invalid_messages", "invalid_prompt"),
    (errors.TemplateTooCostly, 400, "template_too_costly", "invalid_prompt"),
    (errors.ContextTooLong, 400, "context_length_exceeded", "context_length_exceeded"),
    (errors.InsufficientMemory, 400, "insufficient_memory", "invalid_prompt"),
    (errors.UnknownModel, 404, "model_not_found", "invalid_prompt"),
    (errors.ModelConflict, 409, "model_conflict", "invalid_prompt"),
    (errors.RequestCancelled, 499, "request_cancelled", "invalid_prompt"),
    (errors.RequestTimedOut, 504, "request_timeout", "invalid_prompt"),
    (errors.RequestError, 400, None, "invalid_prompt"),
    (errors.EngineStarting, 503, "model_loading", "server_is_overloaded"),
    (errors.ServerStopping, 503, "server_stopping", "server_is_overloaded"),
    (errors.RateLimited, 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    (errors.QueueFull, 429, "queue_full", "rate_limit_exceeded"),
    (errors.BusyError, 429, "queue_full", "server_is_overloaded"),
    (errors.EngineError, 500, "engine_error", "server_error"),
    (Exception, 500, "internal_error", "server_error"),  # nothing of the inside is revealed
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
    """Return the HTTP status for an error; on Anthropic's paths 429 becomes 529 (overloaded), but for a rate limit."""
    status = _row(error)[0]
    is_overloaded = status == 429 and path.startswith(MESSAGES) and not isinstance(error, RateLimited)
    return OVERLOADED if is_overloaded else status


def headers_of(error: Exception) -> dict[str, str]:
    """Return an error's response headers: its own, `retry-after` if busy, or `x-should-retry: false` for other 5xx."""
    if isinstance(error, BorderError):
        return error.headers
    if isinstance(error, RateLimited):  # the whole wait: whoever comes before is refused again
        return {"retry-after": str(max(error.retry_after, 1)), **error.headers}
    if isinstance(error, BusyError):
        return {"retry-after": str(min(max(error.retry_after, 1), MAX_RETRY_AFTER))}
    # Clients send any 5xx three times. What broke a row or an engine would break two more.
    return {"x-should-retry": "false"} if status_of(error) >= 500 else {}


def openai_body(error: Exception) -> dict[str, Any]:
    """Return OpenAI's error body, {"error": {message, type, param, code}}; it is also what a stream event carries."""
    status, code, _ = _row(error)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": message_of(error), "type": kind, "param": param, "code": code}}


def response_error(error: Exception) -> dict[str, Any]:
    """Return the `error` field of a failed response: `code` is one that Responses clients know, `type` is weft's own."""
    body, code = openai_body(error)["error"], _row(error)[2]
    message, wait = body["message"], headers_of(error).get("retry-after")
    if wait is not None:
        message = f"{message.rstrip('.')}. Please try again in {wait}s."  # Codex reads the seconds here
    return {"code": code, "message": message, "param": body["param"], "type": body["code"] or body["type"]}


def anthropic_body(error: Exception, request_id: str) -> dict[str, Any]:
    """Return an error as Anthropic's error body; a prompt that is too long gets the wording that agents look for."""
    status, message = status_of(error, MESSAGES), message_of(error)
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {error.got} tokens > {error.limit} maximum"
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    # By this code Anthropic's clients know that they must send the whole conversation instead.
    is_thread = isinstance(error, RequestError) and error.param == "thread"
    details = {"details": {"error_code": "thread_unsupported_request"}} if is_thread else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}


def problem(error: Exception, request_id: str, path: str = "") -> Response:
    """Make the HTTP response that reports an error, with its body in the format of the API that the path belongs to."""
    if path.startswith(MESSAGES):
        body = anthropic_body(error, request_id)
    else:
        body = {"error": message_of(error)} if path.startswith("/api/") else openai_body(error)
    headers = {"x-request-id": request_id, **headers_of(error)}
    return Response(msgspec.json.encode(body), status_of(error, path), headers, "application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Report Starlette's own HTTP errors (404, 405) in the format of the requested API; `Guard` handles all other errors."""
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        app = request.scope.get("app")
        known = [route.path for route in app.routes if isinstance(route, Route)] if app is not None else []
        hint = hint_for(request.scope["path"], known) if error.status_code == 404 else ""
        message = f"{request.method} {request.scope['path']}: {hint or error.detail}"
        error = BorderError(error.status_code, code, message, dict(error.headers or {}))
    return problem(error, request.state.request_id, request.scope["path"])


def _row(error: Exception) -> tuple[int, str | None, str]:
    if isinstance(error, BorderError):
        return error.status, error.code, "server_error"
    return next(row[1:] for row in _TABLE if isinstance(error, row[0]))


def message_of(error: Exception) -> str:
    """Return the message shown to the client; for internal errors a generic text, as their details are only logged."""
    if _row(error)[1] == "internal_error":
        return "An internal error ended this request; the server's log has the details under the request's id."
    return str(error)
