"""Two tenants of one server: nothing of one's prompts, answers, ids or existence reaches the other, and admins may do more."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fronts import Front, front
from servers import running
from waiting import until
from weft.serving.tenants import hash_secret

KEYS = ("anna=anna-secret", "ben=ben-secret", "root=root-secret:admin")
ANNA, BEN, ROOT = ({"authorization": f"Bearer {name}-secret"} for name in ("anna", "ben", "root"))
SLOW = ["--token-seconds", "0.02"]
TEXT = "The plan for Tuesday: dig under the wall"
SCHEMA = {"type": "object", "properties": {"day": {"enum": ["Tuesday"]}}, "required": ["day"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "dig", "parameters": SCHEMA}}
# What is compiled for a request: schemas, patterns and tools.
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}
CONSTRAINED: list[dict[str, Any]] = [{"response_format": FORM}, {"guided_regex": "[a-z]+"}, {"tools": [TOOL]}]
ENDLESS = {"prompt": TEXT, "max_tokens": 50_000, "stream": True}
# What is different each time, whoever asks: clocks and how long things took.
VOLATILE = re.compile(r"created|modified|seconds|time|arrived|per_second|_ms$|^date$|content-length|transfer")


def named(name: str, whose: dict[str, str]) -> dict[str, str]:
    return {**whose, "x-request-id": name}


@contextmanager
def streaming(server: Front, whose: dict[str, str], name: str, **fields: Any) -> Iterator[None]:
    with server.stream("/v1/completions", {**ENDLESS, **fields}, headers=named(name, whose)):
        until(lambda: server.get(f"/v1/cache/requests/{name}", headers=whose).status_code == 200)
        yield


def still(value: Any, key: str = "") -> Any:
    """A JSON value without what is different each time."""
    if isinstance(value, dict):
        return {name: still(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [still(one, key) for one in value]
    return "…" if VOLATILE.search(key) and isinstance(value, int | float | str) else value


def seen(response: httpx2.Response) -> tuple[int, dict[str, Any], Any]:
    """A response as its client could compare it with another."""
    is_json = response.headers.get("content-type", "").startswith("application/json")
    return response.status_code, still(dict(response.headers)), still(response.json()) if is_json else response.text


def first_event(server: Front, whose: dict[str, str]) -> Any:
    with server.watch("/v1/events", headers=whose) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    return still(json.loads(line.removeprefix("data: ")))


def everything_ben_sees(server: Front) -> list[Any]:
    """All that a tenant can ask for, also with the ids and prompts of somebody else."""
    gets = ["/v1/models", "/v1/models/m", "/v1/models/available", "/v1/status", "/v1/cache", "/health", "/metrics"]
    gets += [
        "/v1/cache/requests/annas",
        "/v1/responses/resp_stored",
        "/v1/responses/resp_stored/input_items",
        "/api/tags",
        "/api/ps",
    ]
    posts: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 3}),
        ("/v1/completions", {"prompt": TEXT + " and out", "max_tokens": 3}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 3, "cache_salt": "s"}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 3, "n": 128}),
        ("/v1/chat/completions", CHAT),
        *(("/v1/chat/completions", {**CHAT, **constraint}) for constraint in CONSTRAINED),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_stored"}),
        ("/v1/requests/annas/cancel", {}),
        ("/v1/responses/resp_annas/cancel", {}),
        ("/v1/cache/clear", {}),
        ("/v1/models/unload", {"model": "m"}),
        ("/v1/models/load", {"model": "tiny-hybrid"}),
        ("/v1/models/load", {"model": "/no/such/model"}),
        ("/tokenize", {"prompt": TEXT}),
    ]
    found: list[Any] = [(path, seen(server.post(path, body, headers=named("bens", BEN)))) for path, body in posts]
    found += [(path, seen(server.get(path, headers=named("bens", BEN)))) for path in gets]
    found += [seen(server.get("/v1/cache/requests/bens", headers=named("bens", BEN))), first_event(server, BEN)]
    found.append(seen(server.delete("/v1/responses/resp_stored", headers=named("bens", BEN))))
    return found


def test_what_one_tenant_sees_is_the_same_whether_another_exists_or_not() -> None:
    with front({"m": SLOW}, api_keys=KEYS, max_queue=256) as server:
        alone = everything_ben_sees(server)
    with front({"m": SLOW}, api_keys=KEYS, max_queue=256) as server, ExitStack() as stack:
        stored = server.post("/v1/responses", {"input": TEXT, "max_output_tokens": 3}, headers=named("stored", ANNA))
        server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 3}, headers=named("bens", ANNA))  # the other's id
        for constraint in CONSTRAINED:
            server.post("/v1/chat/completions", {**CHAT, **constraint}, headers=ANNA)
        stack.enter_context(streaming(server, ANNA, "annas"))
        stack.enter_context(streaming(server, ANNA, "flood", n=128))
        beside = everything_ben_sees(server)
        annas = server.get("/v1/cache/requests/annas", headers=ANNA)

    assert stored.status_code == 200
    assert annas.status_code == 200  # it was not cancelled
    assert beside == alone


def test_the_reading_of_everything_notices_what_is_not_separated() -> None:
    """The comparison above is one of real answers: with a cache that tenants share, they differ."""
    with front({"m": SLOW}, api_keys=KEYS, share_cache=True) as server:
        alone = everything_ben_sees(server)
    with front({"m": SLOW}, api_keys=KEYS, share_cache=True) as server:
        server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 3}, headers=ANNA)

        assert everything_ben_sees(server) != alone


def test_a_shared_cache_is_asked_for_and_still_quotes_nobody() -> None:
    with front({"m": SLOW}, api_keys=KEYS, share_cache=True) as server:
        server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1}, headers=ANNA)
        guess = server.post("/v1/completions", {"prompt": "The plan is", "max_tokens": 1}, headers=named("bens", BEN)).json()
        report = server.get("/v1/cache/requests/bens", headers=BEN).json()
        listed = server.get("/v1/cache", headers=BEN)
        by_root = server.get("/v1/cache", headers=ROOT).json()

    assert guess["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert guess["timings"]["cache"].get("instead") is None
    assert report.get("instead") is None
    assert (listed.status_code, listed.json()["error"]["code"]) == (403, "admin_required")
    assert by_root["models"][0]["nodes"][0]["text"]


def test_a_tenant_sees_and_cancels_its_own_and_an_admin_everybody_s() -> None:
    with front({"m": SLOW}, api_keys=KEYS) as server, streaming(server, ANNA, "hers"):
        paths = ["/v1/cache", "/v1/cache/requests/hers", "/v1/status"]
        by_anna, by_root = ([server.get(path, headers=whose).json() for path in paths] for whose in (ANNA, ROOT))
        events = [first_event(server, whose)["requests"] for whose in (ANNA, BEN, ROOT)]
        not_his = server.post("/v1/requests/hers/cancel", {}, headers=BEN)
        cancelled = server.post("/v1/requests/hers/cancel", {}, headers=ROOT)

    for cache, report, status in (by_anna, by_root):
        assert cache["models"][0]["nodes"][0]["text"] == TEXT
        assert report["id"] == "hers"
        assert (status["requests"], status["rows_running"]) == (1, 1)
    assert by_anna[2]["memory"] == {}
    assert by_anna[2]["engine_pid"] is None
    assert by_root[2]["engine_pid"] is not None
    assert [[row["id"] for row in rows] for rows in events] == [["hers"], [], ["hers"]]
    assert (not_his.status_code, cancelled.status_code) == (404, 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/models/load", {"model": "n"}), ("/v1/models/unload", {"model": "m"}), ("/v1/cache/clear", {})],
)
def test_loading_unloading_and_clearing_need_an_admin_and_are_written_down(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, str]
) -> None:
    with caplog.at_level(logging.INFO), front({"m": SLOW}, spare={"n": []}, api_keys=KEYS) as server:
        refused = server.post(path, body, headers=ANNA)
        caplog.clear()
        again = server.post(path, body, headers=named("again", ANNA))
        allowed = server.post(path, body, headers=named("allowed", ROOT))

    assert (
        (refused.status_code, refused.json()["error"]["code"]) == (again.status_code, "admin_required") == (403, "admin_required")
    )
    assert allowed.status_code != 403
    noted = [record.fields for record in caplog.records if record.name == "weft.audit"]  # type: ignore[attr-defined]
    assert [(one["tenant"], one["id"], one["outcome"]) for one in noted] == [
        ("anna", "again", "refused"),
        ("root", "allowed", "allowed"),
    ]
    assert "secret" not in caplog.text


def test_refusing_to_load_says_nothing_of_what_is_on_this_machine() -> None:
    paths = (
        "/v1/completions",
        "/v1/models/unload",
        "/v1/replicas/renew",
        "/v1/cache/clear",
        "/tokenize",
        "/api/show",
        "/api/generate",
    )
    with front({"m": SLOW}, api_keys=KEYS) as server:
        answers = [
            server.post("/v1/models/load", {"model": name}, headers=named("x", ANNA)) for name in ("/etc", "/no/such", "~root")
        ]
        asked = [
            [
                server.post(path, {"model": name, "prompt": "Hi"}, headers=named("x", ANNA)).text.replace(name, "NAME")
                for path in paths
            ]
            for name in ("/etc", "/nox")
        ]

    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.text for answer in answers}) == 1
    assert asked[0] == asked[1]


def test_the_queue_of_one_tenant_is_not_the_other_s() -> None:
    with front({"m": SLOW}, api_keys=KEYS, max_queue=256) as server, ExitStack() as stack:
        for number in range(2):
            stack.enter_context(streaming(server, ANNA, f"hers-{number}", n=128))
        hers = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "n": 128}, headers=ANNA)
        his = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "n": 128}, headers=BEN)

    assert (hers.status_code, hers.json()["error"]["code"]) == (429, "queue_full")
    assert his.status_code == 200


def test_a_priority_counts_among_a_tenant_s_own_requests_and_an_admin_s_among_all() -> None:
    with front({"m": SLOW}, api_keys=KEYS) as server, ExitStack() as stack:
        for whose in (ANNA, ROOT):
            stack.enter_context(server.stream("/v1/completions", {**ENDLESS, "priority": 100}, headers=whose))
        inside = server.service.models[0].pool.replicas[0].client.live.inside
        sent = [one.subscription.submits[0] for one in inside.values()]

    assert [(one.priority, one.rank) for one in sent] == [(100, 0), (100, 100)]


def test_the_log_has_the_tenant_s_name_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), front({"m": SLOW}, api_keys=KEYS) as server:
        server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers=ANNA)

    lines = [record.getMessage() for record in caplog.records if record.name == "weft.request"]
    assert "tenant=anna" in lines[-1]
    assert "anna-secret" not in caplog.text


def test_a_tenant_beyond_its_rate_is_told_when_to_come_again_in_every_dialect() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with front({"m": []}, api_keys=KEYS, requests_per_minute=2) as server:
        first, _ = (server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4}, headers=ANNA) for _ in range(2))
        refused = server.post("/v1/chat/completions", chat, headers=ANNA)
        as_message = server.post("/v1/messages", chat, headers=ANNA)
        other = server.post("/v1/chat/completions", chat, headers=BEN)
        unlimited = server.get("/v1/models", headers=ANNA)

    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (as_message.status_code, as_message.json()["error"]["type"]) == (429, "rate_limit_error")
    assert (other.status_code, unlimited.status_code) == (200, 200)


def test_tokens_of_prompt_and_answer_are_charged() -> None:
    with front({"m": []}, api_keys=KEYS, tokens_per_minute=1) as server:
        first, second = (server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4}, headers=ANNA) for _ in range(2))

    assert first.json()["usage"]["total_tokens"] == 5
    assert (second.status_code, second.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
    assert int(second.headers["retry-after"]) > 180  # the four beyond its one, at one a minute


def test_a_hangup_lets_new_keys_in_and_removed_ones_no_more(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nhash = "{hash_secret(b"anna-secret")}"', encoding="utf-8")
    with running(tmp_path / "log", "tiny-hybrid", "--keys-file", str(file)) as server:
        before = [server.get("/v1/models", headers=whose).status_code for whose in (ANNA, BEN)]
        file.write_text("[ben", encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the keys stay as they were" in (tmp_path / "log").read_text())
        kept = server.get("/v1/models", headers=ANNA).status_code
        file.write_text(f'[ben]\nhash = "{hash_secret(b"ben-secret")}"', encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.get("/v1/models", headers=BEN).status_code == 200)
        after = server.get("/v1/models", headers=ANNA).status_code

    assert (before, kept, after) == ([200, 401], 200, 401)


def test_what_is_compiled_for_a_request_is_kept_for_its_tenant_alone() -> None:
    """How long a request takes that another tenant has sent before is how long it took the other: nothing is there yet."""
    with front({"m": SLOW}, api_keys=KEYS) as server, ExitStack() as stack:
        for whose in (ANNA, BEN):
            body = {**CHAT, "max_tokens": 50_000, "stream": True, "response_format": FORM}
            stack.enter_context(server.stream("/v1/chat/completions", body, headers=whose))
        inside = server.service.models[0].pool.replicas[0].client.live.inside
        submits = [live.subscription.submits[live.prompt_index] for live in list(inside.values())]

    assert len({submit.constraint.grammar for submit in submits if submit.constraint is not None}) == 1
    assert len({submit.owner for submit in submits}) == 2
