"""What the engine is told of who asks, so that it can give clients their turns: a digest, and a priority."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

from fronts import Front, front
from weft.ipc.messages import Submit

SLOW = ["--token-seconds", "0.02"]


def submitted(server: Front, *asked: tuple[dict[str, str], dict[str, Any]]) -> list[Submit]:
    """What the engine is sent for requests with these headers and fields, all running at once."""
    with ExitStack() as stack:
        for headers, fields in asked:
            body = {"prompt": "hi", "max_tokens": 50_000, "stream": True, **fields}
            stack.enter_context(server.stream("/v1/completions", body, headers=headers))
        inside = server.service.models[0].pool.replicas[0].client.live.inside
        return [live.subscription.submits[live.prompt_index] for live in list(inside.values())]


def clients(server: Front, *asked: tuple[dict[str, str], dict[str, Any]]) -> list[str]:
    return [submit.client for submit in submitted(server, *asked)]


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_a_client_is_a_key_and_a_session_of_it() -> None:
    with front({"m": SLOW}, api_keys=("one", "two")) as server:
        by_key = clients(server, (key("one"), {}), ({"x-api-key": "one"}, {}), (key("two"), {}))
        by_session = clients(
            server,
            (key("one"), {"prompt_cache_key": "a"}),
            (key("one") | {"x-session-id": "a"}, {}),
            (key("one") | {"x-session-id": "b"}, {"session_id": "a"}),
            (key("one"), {"session_id": "b"}),
            (key("two"), {"session_id": "a"}),
        )

    first, same, other = by_key
    assert first == same != other
    in_a, also_in_a, in_a_by_its_body, in_b, of_two = by_session
    assert in_a == also_in_a == in_a_by_its_body
    assert len({first, other, in_a, in_b, of_two}) == 5


def test_without_keys_a_client_is_what_it_says_of_itself() -> None:
    with front({"m": SLOW}) as server:
        nobody, somebody, other, session = clients(
            server, ({}, {}), (key("none"), {}), (key("mine"), {}), ({}, {"session_id": "s"})
        )

    assert nobody == ""
    assert len({nobody, somebody, other, session}) == 4


def test_only_the_key_that_fits_counts() -> None:
    """Else a client could be somebody else with every request."""
    with front({"m": SLOW}, api_keys=("right",)) as server:
        plain, disguised = clients(server, (key("right"), {}), ({"x-api-key": "wrong", **key("right")}, {}))

    assert plain == disguised


def test_the_key_itself_goes_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    secret = "sk-very-secret"
    with caplog.at_level(0), front({"m": SLOW}, api_keys=(secret,)) as server:
        (sent,) = submitted(server, (key(secret), {"session_id": "private"}))
        server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers=key(secret))

    assert len(sent.client) == 16
    assert secret not in repr(sent)
    assert "private" not in repr(sent)
    assert secret not in caplog.text
    assert sent.is_retained


def test_a_priority_goes_with_the_request() -> None:
    with front({"m": SLOW}) as server:
        asked = submitted(server, ({}, {"priority": 7}), ({}, {"service_tier": "flex"}), ({}, {}))
        refused = server.post("/v1/completions", {"prompt": "hi", "priority": 1000})

    assert [submit.priority for submit in asked] == [7, -10, 0]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert json.loads(refused.text)["error"]["type"] == "invalid_request_error"
