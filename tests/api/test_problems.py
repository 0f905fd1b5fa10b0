"""Every error has a status, a code and words that the official clients understand."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from weft.api.problems import BorderError, anthropic_body, handle, headers_of, openai_body, problem, status_of
from weft.errors import (
    BadModel,
    ContextTooLong,
    EngineDied,
    EngineStarting,
    InsufficientMemory,
    InternalError,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    RowFailed,
    TemplateFailed,
    UnknownModel,
    UnsupportedParameter,
    WeftError,
)
from weft.ipc.limits import Limits, Sampling

TABLE = [
    (InvalidRequest("words", "top_p"), 400, "invalid_request_error", "top_p", None),
    (UnsupportedParameter("words", "audio"), 400, "invalid_request_error", "audio", "unsupported_parameter"),
    (TemplateFailed("words", "messages"), 400, "invalid_request_error", "messages", "invalid_messages"),
    (ContextTooLong("words", "messages"), 400, "invalid_request_error", "messages", "context_length_exceeded"),
    (InsufficientMemory("words", "max_tokens"), 400, "invalid_request_error", "max_tokens", "insufficient_memory"),
    (UnknownModel("words", "model"), 404, "invalid_request_error", "model", "model_not_found"),
    (RequestCancelled("words"), 499, "invalid_request_error", None, "request_cancelled"),
    (RequestTimedOut("words"), 504, "server_error", None, "request_timeout"),
    (QueueFull("words"), 429, "rate_limit_error", None, "queue_full"),
    (EngineStarting("words"), 503, "server_error", None, "model_loading"),
    (RowFailed("words"), 500, "server_error", None, "engine_error"),
    (EngineDied("words"), 500, "server_error", None, "engine_error"),
    (BorderError(413, "request_too_large", "words"), 413, "invalid_request_error", None, "request_too_large"),
]


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), TABLE, ids=lambda value: type(value).__name__)
def test_an_error_is_told_with_its_status_and_its_own_words(
    error: WeftError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    assert status_of(error) == status
    assert openai_body(error) == {"error": {"message": "words", "type": kind, "param": param, "code": code}}


MESSAGES = "/v1/messages"
ANTHROPIC_TABLE = [
    (InvalidRequest("words", "top_p"), 400, "invalid_request_error"),
    (InsufficientMemory("words", "max_tokens"), 400, "invalid_request_error"),
    (BorderError(401, "invalid_api_key", "words"), 401, "authentication_error"),
    (BorderError(403, "forbidden_host", "words"), 403, "permission_error"),
    (UnknownModel("words", "model"), 404, "not_found_error"),
    (BorderError(405, "method_not_allowed", "words"), 405, "invalid_request_error"),
    (BorderError(413, "request_too_large", "words"), 413, "request_too_large"),
    (RequestCancelled("words"), 499, "invalid_request_error"),
    (RowFailed("words"), 500, "api_error"),
    (EngineStarting("words"), 503, "overloaded_error"),
    (RequestTimedOut("words"), 504, "timeout_error"),
    (QueueFull("words"), 529, "overloaded_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ANTHROPIC_TABLE, ids=lambda value: type(value).__name__)
def test_the_same_error_has_a_name_of_its_own_in_anthropics_dialect(error: WeftError, status: int, kind: str) -> None:
    response = problem(error, "abc", MESSAGES)

    assert response.status_code == status_of(error, MESSAGES) == status
    assert json.loads(response.body) == {"type": "error", "error": {"type": kind, "message": "words"}, "request_id": "abc"}


def test_each_dialect_is_known_by_how_its_paths_begin() -> None:
    told = {path: json.loads(problem(QueueFull("full"), "abc", path).body) for path in (MESSAGES, "/api/chat", "/v1/models")}

    assert told[MESSAGES]["error"]["type"] == "overloaded_error"
    assert told["/api/chat"] == {"error": "full"}
    assert told["/v1/models"]["error"]["code"] == "queue_full"
    assert problem(QueueFull("full", 9), "abc", MESSAGES).headers["retry-after"] == "9"


@pytest.mark.parametrize("error", [InternalError("secret"), BadModel("/secret/folder"), KeyError("secret"), WeftError("secret")])
def test_whatever_is_not_in_the_table_is_a_500_that_tells_nothing_of_the_inside(error: Exception) -> None:
    response = problem(error, "abc")

    assert response.status_code == 500
    assert json.loads(response.body)["error"]["code"] == "internal_error"
    assert b"secret" not in bytes(problem(error, "abc", MESSAGES).body)
    assert b"secret" not in bytes(response.body)


def test_a_prompt_that_is_too_long_is_told_in_the_words_agents_look_for() -> None:
    with pytest.raises(ContextTooLong) as caught:
        Limits(vocab_size=10, context_length=8192).check([1] * 9000, Sampling(temperature=0.0))

    assert openai_body(caught.value)["error"]["message"] == (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
        "Please reduce the length of the messages."
    )
    assert openai_body(caught.value)["error"]["code"] == "context_length_exceeded"
    assert anthropic_body(caught.value, "")["error"]["message"] == "prompt is too long: 9000 tokens > 8192 maximum"


@pytest.mark.parametrize(("seconds", "told"), [(0, "1"), (1, "1"), (7, "7"), (3600, "30")])
def test_busy_says_when_to_come_again_within_what_clients_wait(seconds: int, told: str) -> None:
    assert headers_of(QueueFull("full", seconds)) == {"retry-after": told}
    assert headers_of(EngineStarting("loading", seconds)) == {"retry-after": told}


def test_what_broke_an_engine_is_not_sent_again_by_the_client() -> None:
    assert headers_of(EngineDied("died")) == {"x-should-retry": "false"}
    assert headers_of(RowFailed("failed")) == {"x-should-retry": "false"}
    assert headers_of(ValueError()) == {"x-should-retry": "false"}
    assert headers_of(RequestTimedOut("late")) == {"x-should-retry": "false"}


def test_a_status_that_is_not_sent_again_anyway_needs_no_header() -> None:
    assert headers_of(InvalidRequest("bad")) == {}


def test_a_response_has_the_requests_id_and_the_errors_headers() -> None:
    response = problem(BorderError(401, "invalid_api_key", "no", {"www-authenticate": "Bearer"}), "abc")

    assert response.headers["x-request-id"] == "abc"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["content-type"] == "application/json"


def test_the_routers_own_errors_are_told_in_the_same_shape() -> None:
    request = Request({"type": "http", "method": "GET", "path": "/nowhere", "headers": [], "state": {"request_id": "abc"}})

    missing = asyncio.run(handle(request, HTTPException(404)))
    wrong_method = asyncio.run(handle(request, HTTPException(405, headers={"Allow": "POST"})))

    assert json.loads(missing.body)["error"]["code"] == "not_found"
    assert json.loads(missing.body)["error"]["message"] == "GET /nowhere: Not Found"
    assert json.loads(wrong_method.body)["error"]["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"
    assert wrong_method.headers["x-request-id"] == "abc"
