"""Who may enter: hosts, origins, keys, and what every response carries."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.http import Guard
from weft.api.problems import handle
from weft.config import ServerConfig
from weft.errors import QueueFull, WeftError
from weft.serving.tenants import Keyring

KEY = "sk-secret-ü"
PAGE = "https://page.example"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        return json.loads(self.body)["error"]["code"] if self.status >= 400 else None


def guarded(app: ASGIApp, on_response: Callable[[int], None] = lambda _: None, **settings: Any) -> Guard:
    config = ServerConfig(**settings)
    return Guard(app, config, Keyring(config), (), on_response)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that says which id the request has, or fails as its path asks."""
    if scope["path"] == "/busy":
        raise QueueFull("full", 2)
    if scope["path"] == "/broken":
        raise RuntimeError("secret of the inside")
    await PlainTextResponse(scope["state"]["request_id"])(scope, receive, send)
    if scope["path"] == "/broken-late":
        raise RuntimeError("too late")


def ask(guard: ASGIApp, *headers: tuple[str, str], path: str = "/", method: str = "GET", version: str = "1.1") -> Answer:
    """Send a request through the guard; with a good Host unless the headers have one."""
    sent: list[Message] = []
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    if version == "1.1" and not any(name == b"host" for name, _ in raw):
        raw.append((b"host", b"localhost:8000"))
    scope = {"type": "http", "method": method, "path": path, "http_version": version, "headers": raw}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    (start,) = [message for message in sent if message["type"] == "http.response.start"]
    names = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    assert len(names) == len(start["headers"]), "a header was sent twice"
    return Answer(start["status"], names, b"".join(message.get("body", b"") for message in sent))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "localhost:",
        "localhost:65535",
        "weft.localhost:1",
        "127.0.0.1:8000",
        "127.8.9.10",
        "[::1]:8000",
        "[::1]",
        "192.168.1.5:8000",
        "0.0.0.0:8000",
        "[fe80::1]:80",
        "box.example",
        "BOX.example.:8000",
    ],
)
def test_loopback_names_addresses_and_known_names_may_enter(host: str) -> None:
    guard = guarded(app, allowed_hosts=["Box.Example:8000", "::"])

    assert ask(guard, ("host", host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "notlocalhost",
        "127.0.0.1.evil.example",
        "127.1",
        "0x7f000001",
        "2130706433",
        "box.example.evil.example",
        "sub.box.example",
    ],
)
def test_a_name_that_may_resolve_to_us_by_another_hand_is_refused(host: str) -> None:
    answer = ask(guarded(app, allowed_hosts=["box.example"]), ("host", host))

    assert (answer.status, answer.code) == (403, "forbidden_host")
    assert f"--allowed-hosts {host.split(':')[0]}" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        ":8000",
        "localhost:65536",
        "localhost:999999999999",
        "localhost:80a",
        "localhost:-1",
        "localhost:8000:8000",
        "localhost@evil.example",
        "user:pw@localhost",
        "localhost/evil",
        "localhost evil",
        "localhost,evil.example",
        "localhost\n",
        "localhos\xff",
        "::1",
        "[::1",
        "[::1%25lo]",
        "[localhost]",
        "[]",
    ],
)
def test_a_host_of_another_form_is_a_400(host: str) -> None:
    answer = ask(guarded(app), ("host", host))

    assert (answer.status, answer.code) == (400, "invalid_host")


def test_a_bracketed_word_of_hexadecimal_letters_is_no_address() -> None:
    assert ask(guarded(app), ("host", "[bad.cafe]")).status == 403


def test_two_hosts_are_a_400_even_when_they_agree() -> None:
    assert ask(guarded(app), ("host", "localhost"), ("host", "localhost")).status == 400


def test_only_http_1_0_may_come_without_a_host() -> None:
    guard = guarded(app)

    assert ask(guard, version="1.0").status == 200
    assert ask(guard, version="2").status == 400


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "tauri://localhost", "HTTP://LOCALHOST", PAGE],
)
def test_pages_from_this_machine_and_known_pages_may_enter_and_read(origin: str) -> None:
    answer = ask(guarded(app, allowed_origins=[PAGE + "/"]), ("origin", origin))

    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["vary"] == "origin"


def test_our_own_page_may_enter_under_whichever_address_it_was_loaded() -> None:
    guard = guarded(app)

    assert ask(guard, ("host", "192.168.1.5:8000"), ("origin", "http://192.168.1.5:8000")).status == 200
    assert ask(guard, ("host", "192.168.1.5:8000"), ("origin", "http://192.168.1.5:9000")).status == 403
    assert ask(guard, ("host", "evil.example"), ("origin", "http://evil.example")).status == 403


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "https://evil.example",
        "https://page.example.evil.example",
        "http://page.example",
        "https://localhost.evil.example",
        "https://localhost@evil.example",
        "https://evil.example/localhost",
        "http://192.168.1.6",
        "file://",
        "localhost",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_from_elsewhere_are_refused_and_can_not_read_why(origin: str, method: str) -> None:
    guard = guarded(app, allowed_origins=[PAGE])

    answer = ask(guard, ("origin", origin), ("access-control-request-method", "POST"), method=method)

    assert (answer.status, answer.code) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in answer.headers


def test_two_origins_are_refused_even_when_both_are_good() -> None:
    assert ask(guarded(app), ("origin", "http://localhost"), ("origin", "http://localhost")).status == 403


def test_without_an_origin_nothing_is_said_about_origins() -> None:
    assert ask(guarded(app)).headers.keys() == {"x-request-id", "request-id", "content-type", "content-length"}


def test_a_preflight_is_answered_here_and_needs_no_key() -> None:
    wish = [("access-control-request-method", "POST"), ("access-control-request-headers", "authorization, x-stainless-os")]

    answer = ask(guarded(app, api_keys=[KEY]), ("origin", "http://localhost"), *wish, method="OPTIONS")

    assert (answer.status, answer.body) == (204, b"")
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert answer.headers["access-control-allow-origin"] == "http://localhost"
    assert int(answer.headers["access-control-max-age"]) > 0


def test_options_that_are_no_preflight_need_the_key() -> None:
    guard = guarded(app, api_keys=[KEY])

    assert ask(guard, ("origin", "http://localhost"), method="OPTIONS").status == 401
    assert ask(guard, ("access-control-request-method", "POST"), method="OPTIONS").status == 401


# A header's bytes, as the server reads them one by one.
SENT_KEY = KEY.encode().decode("latin-1")


@pytest.mark.parametrize(
    "header",
    [
        ("authorization", f"Bearer {SENT_KEY}"),
        ("Authorization", f"bearer   {SENT_KEY} "),
        ("x-api-key", SENT_KEY),
        ("X-Api-Key", "other"),
    ],
)
def test_any_of_the_keys_opens_by_either_header(header: tuple[str, str]) -> None:
    assert ask(guarded(app, api_keys=["other", KEY]), header).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", SENT_KEY)],
        [("authorization", f"Basic {SENT_KEY}")],
        [("authorization", "Bearer ")],
        [("authorization", "")],
        [("x-api-key", "")],
        [("x-api-key", SENT_KEY[:-1])],
        [("x-api-key", "\xff\xfe")],
    ],
)
def test_without_the_key_nobody_enters(headers: list[tuple[str, str]]) -> None:
    answer = ask(guarded(app, api_keys=[KEY]), *headers)

    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_an_empty_key_opens_nothing() -> None:
    assert ask(guarded(app, api_keys=[KEY]), ("x-api-key", ""), ("authorization", "Bearer ")).status == 401
    with pytest.raises(WeftError, match="empty"):
        guarded(app, api_keys=[""])


def test_health_is_open_without_the_key_but_not_to_any_host() -> None:
    guard = guarded(app, api_keys=[KEY])

    assert ask(guard, path="/health").status == 200
    assert ask(guard, ("host", "evil.example"), path="/health").status == 403
    assert ask(guard, path="/health/more").status == 401


def test_the_host_is_looked_at_before_the_key() -> None:
    assert ask(guarded(app, api_keys=[KEY]), ("host", "evil.example"), ("x-api-key", SENT_KEY)).status == 403


def test_a_page_that_may_enter_can_read_that_its_key_is_wrong() -> None:
    answer = ask(guarded(app, api_keys=[KEY]), ("origin", "http://localhost"))

    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == "http://localhost"


@pytest.mark.parametrize("given", ["a", "chatcmpl-1:2.3_4", "x" * 128])
def test_a_harmless_id_of_the_clients_is_kept(given: str) -> None:
    answer = ask(guarded(app), ("x-request-id", given))

    assert answer.headers["x-request-id"] == given
    assert answer.body.decode() == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "ä", "a/b", "a\n"])
def test_any_other_id_is_replaced(given: str) -> None:
    answer = ask(guarded(app), ("x-request-id", given))

    assert len(answer.headers["x-request-id"]) == 32
    assert answer.body.decode() == answer.headers["x-request-id"]


def test_two_requests_have_two_ids() -> None:
    guard = guarded(app)

    assert ask(guard).headers["x-request-id"] != ask(guard).headers["x-request-id"]


def test_refusals_carry_the_id_too() -> None:
    assert ask(guarded(app), ("host", "evil.example"), ("x-request-id", "abc")).headers["x-request-id"] == "abc"


def test_an_error_of_the_house_that_escapes_is_told_as_such_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(guarded(app), path="/busy")

    assert (answer.status, answer.code) == (429, "queue_full")
    assert answer.headers["retry-after"] == "2"
    assert not caplog.records


def test_anything_else_that_escapes_is_a_500_with_the_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(guarded(app), ("x-request-id", "abc"), path="/broken")

    assert (answer.status, answer.code) == (500, "internal_error")
    assert b"secret" not in answer.body
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "request abc failed")
    assert "secret of the inside" in caplog.text


def test_what_escapes_after_the_start_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(guarded(app), path="/broken-late")

    assert answer.status == 200
    assert "too late" in caplog.text


def test_inside_starlette_every_error_is_told_and_logged_by_the_guard(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: Request) -> Response:
        raise QueueFull("full") if request.url.path == "/busy" else RuntimeError("inside")

    routes = [Route(path, fail) for path in ("/busy", "/broken")]
    starlette = Starlette(routes=routes, middleware=[Middleware(guarded)], exception_handlers={HTTPException: handle})

    answers = [ask(starlette, path=path) for path in ("/busy", "/broken", "/nowhere")]

    assert [(answer.status, answer.code) for answer in answers] == [
        (429, "queue_full"),
        (500, "internal_error"),
        (404, "not_found"),
    ]
    assert all(answer.headers["x-request-id"] for answer in answers)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "authentication_error"}, "request_id": "abc"}),
        ("/v1/messages/count_tokens", {"type": "error", "error": {"type": "authentication_error"}, "request_id": "abc"}),
        ("/v1/models", {"error": {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}}),
    ],
)
def test_a_refusal_has_the_shape_of_the_dialect_that_was_requested(path: str, told: dict[str, Any]) -> None:
    answer = ask(guarded(app, api_keys=[KEY]), ("x-request-id", "abc"), path=path)
    body = json.loads(answer.body)

    assert answer.status == 401
    assert "x-api-key" in body["error"].pop("message")
    assert body == told


def test_a_refusal_in_ollamas_dialect_is_a_sentence() -> None:
    answer = ask(guarded(app, api_keys=[KEY]), path="/api/chat")

    assert "x-api-key" in json.loads(answer.body)["error"]


def test_every_status_is_reported_also_of_refusals() -> None:
    seen: list[int] = []
    guard = guarded(app, on_response=seen.append)

    for path in ("/", "/busy", "/broken"):
        ask(guard, path=path)
    ask(guard, ("host", "evil.example"))

    assert seen == [200, 429, 500, 403]


def test_what_is_not_http_passes() -> None:
    passed: list[Any] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append((scope, receive, send))

    scope = {"type": "lifespan"}
    asyncio.run(guarded(inner)(scope, None, None))  # type: ignore[arg-type]

    assert passed == [({"type": "lifespan"}, None, None)]
