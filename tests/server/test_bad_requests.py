"""Everything a client can get wrong: a 4xx that helps, never a 5xx, never a hang, and the next client is served."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from servers import Server
from thoroughness import ALL
from waiting import HANG_SECONDS

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, "max_tokens": 2, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 2, **fields}).encode()


def said(*messages: Any) -> bytes:
    return chat(messages=list(messages))


BAD: list[tuple[str, bytes]] = [
    (CHAT, b""),
    (CHAT, b"{"),
    (CHAT, b"[]"),
    (CHAT, b"null"),
    (CHAT, b"42"),
    (CHAT, b'"text"'),
    (CHAT, b"\xff\xfe"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\udc00 tail"}]}'),
    (CHAT, b"[" * 100_000),
    (CHAT, b'{"a":' * 50_000),
    (CHAT, b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}"),
    (CHAT, b'{"temperature": NaN, "messages": []}'),
    (CHAT, b'{"temperature": Infinity, "messages": []}'),
    (CHAT, b'{"seed": 1' + b"0" * 400 + b', "messages": [{"role":"user","content":"hi"}]}'),
    (CHAT, b"messages=hi"),
    (CHAT, b"{}"),
    (CHAT, b"{} {}"),
    (CHAT, said()),
    (CHAT, said("hi")),
    (CHAT, said({"role": "user"})),
    (CHAT, said({"role": "user", "content": None})),
    (CHAT, said({"role": "user", "content": 5})),
    (CHAT, said({"role": "user", "content": [5]})),
    (CHAT, said({"role": "user", "content": [{"type": "text"}]})),
    (CHAT, said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]})),
    (CHAT, said({"role": "wizard", "content": "hi"})),
    (CHAT, said({"content": "hi"})),
    (CHAT, said({"role": "system", "content": "only me"})),
    (CHAT, said({"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "tool_calls": "no"})),
    (CHAT, chat(messages="hi")),
    (CHAT, chat(messages={"role": "user"})),
    (CHAT, chat(model=7)),
    (CHAT, chat(model="no-such-model")),
    (CHAT, chat(temperature="hot")),
    (CHAT, chat(temperature=-0.5)),
    (CHAT, chat(temperature=1e9)),
    (CHAT, chat(top_p=0)),
    (CHAT, chat(top_p=2)),
    (CHAT, chat(top_k=1.5)),
    (CHAT, chat(min_p=7)),
    (CHAT, chat(max_tokens=0)),
    (CHAT, chat(max_tokens=-2)),
    (CHAT, chat(max_tokens=10**12)),
    (CHAT, chat(max_tokens=True)),
    (CHAT, chat(n=0)),
    (CHAT, chat(n=10**6)),
    (CHAT, chat(stop=["a"] * 100)),
    (CHAT, chat(stop=[""])),
    (CHAT, chat(stop=7)),
    (CHAT, chat(seed=2**70)),
    (CHAT, chat(logit_bias={"zebra": 1})),
    (CHAT, chat(logit_bias={"999999": 1})),
    (CHAT, chat(logit_bias={"5": 1e6})),
    (CHAT, chat(logit_bias=[1])),
    (CHAT, chat(top_logprobs=5)),
    (CHAT, chat(logprobs=True, top_logprobs=99)),
    (CHAT, chat(logprobs=3)),
    (CHAT, chat(presence_penalty=50)),
    (CHAT, chat(frequency_penalty="x")),
    (CHAT, chat(stream="yes")),
    (CHAT, chat(stream_options=5)),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f g"}}])),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}])),
    (CHAT, chat(tools=[{"type": "function"}])),
    (CHAT, chat(tools=[None])),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": f"f{number}"}} for number in range(600)])),
    (CHAT, chat(tool_choice="required")),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=7)),
    (CHAT, chat(functions=[{"name": "f"}])),
    (CHAT, chat(audio={"voice": "x"})),
    (CHAT, chat(chat_template_kwargs=5)),
    (CHAT, chat(chat_template_kwargs={"messages": []})),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True)),
    (CHAT, chat(continue_final_message=True)),
    (CHAT, chat(stop_token_ids=[10**9])),
    (CHAT, chat(min_tokens=5, max_tokens=2)),
    (CHAT, chat(reasoning_effort="enormous")),
    (CHAT, chat(messages=[{"role": "user", "content": "long " * 50_000}])),
    (COMPLETIONS, b"{}"),
    (COMPLETIONS, completion(prompt="")),
    (COMPLETIONS, completion(prompt=[])),
    (COMPLETIONS, completion(prompt=[[]])),
    (COMPLETIONS, completion(prompt=[1, "a"])),
    (COMPLETIONS, completion(prompt=[-1])),
    (COMPLETIONS, completion(prompt=[10**9])),
    (COMPLETIONS, completion(prompt=["a"] * 5000)),
    (COMPLETIONS, completion(prompt={"a": 1})),
    (COMPLETIONS, completion(prompt=None)),
    (COMPLETIONS, completion(logprobs=99)),
    (COMPLETIONS, completion(suffix="end")),
    (COMPLETIONS, completion(best_of=3)),
    (COMPLETIONS, completion(max_tokens=0)),
    ("/tokenize", b"{}"),
    ("/tokenize", b'{"prompt": 5}'),
    ("/tokenize", b'{"messages": [{"role": "elf", "content": "x"}]}'),
    ("/detokenize", b'{"tokens": [99999999]}'),
    ("/detokenize", b'{"tokens": "x"}'),
    ("/v1/requests/nobody/cancel", b"{}"),
]


def test_there_are_at_least_sixty_bad_bodies() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize(("path", "body"), BAD, ids=[f"{number}" for number in range(len(BAD))])
def test_a_bad_body_is_a_clear_4xx(server: Server, path: str, body: bytes) -> None:
    reply = server.post(path, content=body, headers={"content-type": "application/json"})

    error = reply.json()["error"]
    assert 400 <= reply.status_code < 500, reply.text
    assert len(error["message"]) > 10
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in reply.text
    assert reply.headers["x-request-id"]


def test_after_all_of_it_the_server_answers(server: Server) -> None:
    for path, body in BAD:
        server.post(path, content=body)
    reply = server.post(COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0})

    assert reply.json()["choices"][0]["text"] == ", there was"
    server.wait_idle()


def test_a_body_over_the_cap_is_refused_before_it_is_read(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n{")
        start = connection.recv(1000)

    assert start.startswith(b"HTTP/1.1 413")


def raw(server: Server, data: bytes, seconds: float = 5.0) -> bytes:
    """What the server says to these bytes, until it closes or falls silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        told = b""
        try:
            while part := connection.recv(65536):
                told += part
        except TimeoutError:
            pass
        return told


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n{}{}{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"DELETE /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_broken_http_never_reaches_further_than_its_own_connection(server: Server, data: bytes) -> None:
    told = raw(server, data, seconds=1.0)

    assert not told or told.split(b" ")[1][:1] == b"4", told[:200]
    assert server.get("/health").status_code == 200


def test_requests_may_be_pipelined_on_one_connection(server: Server) -> None:
    body = completion()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall((head + body) * 3)
        told = b""
        while told.count(b"HTTP/1.1 200") < 3 or not told.endswith(b"}"):
            told += connection.recv(65536)

    assert told.count(b'"object":"text_completion"') == 3


def test_a_body_that_trickles_is_given_up_on() -> None:
    from fronts import front

    with front({"m": []}, body_seconds=0.5) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        told = connection.recv(1000)

    assert told.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_from_the_openapi_document_never_break_the_server(server: Server, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.config.generation.update(modes=[schemathesis.GenerationMode(mode)])
    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    count = 0
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(max_examples=30 if ALL else 10, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
        def fuzz(case: schemathesis.Case) -> None:
            nonlocal count
            count += 1
            _shorten(case)
            case.call_and_validate(checks=checks, timeout=HANG_SECONDS)

        fuzz()

    assert count > 100
    assert server.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 1}).status_code == 200
    server.wait_idle()


def _shorten(case: schemathesis.Case) -> None:
    """Answers as long as the context would make this a test of patience; nothing is to be downloaded, and no engine replaced."""
    if isinstance(case.body, dict) and case.path == "/v1/models/load":
        case.body.pop("fetch", None)
    if isinstance(case.body, dict) and case.path == "/v1/replicas/renew" and isinstance(case.body.get("replica"), str):
        case.body["replica"] = f"no {case.body['replica']}"  # a renewed one would be away for a while
    if isinstance(case.body, dict) and "/responses" in case.path:
        case.body.setdefault("max_output_tokens", 3)
    elif isinstance(case.body, dict) and "max_tokens" not in case.body and "max_completion_tokens" not in case.body:
        case.body["max_tokens"] = 3
        if "/api/" in case.path and isinstance(options := case.body.get("options") or {}, dict):
            case.body["options"] = options | {"num_predict": 3}


@pytest.mark.parametrize("window", ["repeat_last_n", "repetition_context_size"])
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})])
def test_a_window_of_penalties_is_accepted_without_a_penalty_and_refused_with_one(
    server: Server, path: str, prompt: dict[str, Any], window: str
) -> None:
    asked = {**prompt, "max_tokens": 2, "temperature": 0, window: 64}

    assert server.post(path, {**asked, "repetition_penalty": 1.0}).status_code == 200
    reply = server.post(path, {**asked, "repetition_penalty": 1.3})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, window)
