"""What is kept of computed prompts, as the front tells it: in replies, in reports, in lists, and cleared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fronts import Front, front
from weft.serving.active_request import MAX_REPORTS

CAT, DOG = "Once upon a time there was a cat.", "Once upon a time there was a dog."


def ask(server: Front, prompt: str, **fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, **fields}).json()
    return reply


def kept(server: Front) -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in server.get("/v1/cache").json()["models"]}


def test_a_reply_says_where_its_prompt_parted_from_the_known_one() -> None:
    with front({"m": []}) as server:
        first, second, third = (ask(server, prompt)["timings"]["cache"] for prompt in (CAT, DOG, DOG))

    assert first["matched"] == 0
    assert "nothing like it" in first["why"]
    assert (second["cause"], second["token"], second["instead"]) == ("differs", " dog", " cat")
    assert 'this prompt has " dog", the nearest known one " cat"' in second["why"]
    assert second["matched"] == second["position"] > 3
    assert (third["cause"], third["position"], third["token"]) == ("whole", None, None)


def test_a_stream_says_the_same_as_the_whole_reply() -> None:
    with front({"m": []}) as server:
        ask(server, CAT)
        whole = ask(server, DOG)["timings"]["cache"]
        ask(server, CAT)
        streamed = server.post("/v1/completions", {"prompt": DOG, "stream": True}).text

    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")]
    assert [event["timings"]["cache"] for event in events if "timings" in event] == [whole]


def test_a_report_can_be_had_by_either_id_and_tells_the_text_before() -> None:
    with front({"m": []}) as server:
        ask(server, CAT)
        reply = server.post("/v1/completions", {"prompt": DOG, "max_tokens": 2}, headers={"x-request-id": "mine"}).json()
        by_request = server.get("/v1/cache/requests/mine").json()
        by_reply = server.get(f"/v1/cache/requests/{reply['id']}").json()

    assert by_request == by_reply
    assert by_request.items() >= {**reply["timings"]["cache"], "before": "Once upon a time there was a"}.items()
    assert (by_request["model"], by_request["id"]) == ("m", "mine")
    assert by_request["cached_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert by_request["completion_tokens"] == 2


def test_a_running_request_has_its_report_too() -> None:
    with front({"m": ["--token-seconds", "0.02"]}) as server:
        body = {"prompt": CAT, "max_tokens": 10_000, "stream": True}
        with server.stream("/v1/completions", body, headers={"x-request-id": "long"}) as reply:
            texts = reply.iter_text()
            next(texts)
            report = server.get("/v1/cache/requests/long")

    assert report.status_code == 200
    assert report.json()["prompt_tokens"] > 3


def test_an_unknown_request_has_no_report() -> None:
    with front({"m": []}) as server:
        refused = server.get("/v1/cache/requests/chatcmpl-nobody")

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
    assert "'chatcmpl-nobody'" in refused.json()["error"]["message"]
    assert str(MAX_REPORTS) in refused.json()["error"]["message"]


def test_under_a_salt_only_the_same_salt_is_known_and_no_text_is_told() -> None:
    with front({"m": []}) as server:
        ask(server, CAT)
        salted = [ask(server, prompt, cache_salt="s")["timings"]["cache"] for prompt in (CAT, DOG)]
        nodes = kept(server)["m"]["nodes"]

    assert [one["cause"] for one in salted] == ["salt", "differs"]
    assert (salted[1]["token"], salted[1]["instead"]) == (None, None)
    assert "dog" not in salted[1]["why"]
    assert [(node["is_salted"], node["text"]) for node in nodes] == [(False, CAT), (True, None)]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"prompt_cache_key": "agent"}, {}),
        ({"session_id": 7}, {}),
        ({}, {"x-session-affinity": "a"}),
        ({}, {"X-Session-Id": "a"}),
        ({}, {"session_id": "a"}),
        ({}, {"session-id": "a"}),
    ],
    ids=str,
)
def test_a_session_s_prompts_are_worth_more(body: dict[str, Any], headers: dict[str, str]) -> None:
    with front({"m": []}) as server:
        server.post("/v1/completions", {"prompt": CAT, "prompt_cache_key": "", "prompt_cache_retention": "24h"})
        server.post("/v1/completions", {"prompt": CAT, **body}, headers=headers)
        server.post("/v1/completions", {"prompt": CAT})
        metrics = server.get("/metrics").text

    assert 'weft_prefix_cache_events{kind="kept",model="m"} 1.0' in metrics
    assert 'weft_prefix_cache_requests_total{cause="whole",model="m"} 2.0' in metrics
    assert 'weft_prefix_cache_requests_total{cause="differs",model="m"} 1.0' in metrics


def test_what_is_kept_is_listed_and_cleared() -> None:
    with front({"one": [], "two": []}) as server:
        ask(server, CAT, model="one")
        ask(server, DOG, model="two")
        before = kept(server)
        one = server.post("/v1/cache/clear", {"model": "one"}).json()
        between = kept(server)
        everything = server.post("/v1/cache/clear").json()
        after = kept(server)
        unknown = server.post("/v1/cache/clear", {"model": "three"})

    node = before["one"]["nodes"][0]
    assert node.pop("tokens") == node.pop("length") > 3
    assert node.pop("bytes") == before["one"]["held_bytes"] > 0
    assert node == {
        "number": 0, "parent": None, "has_checkpoint": True, "pins": 0, "hits": 0, "idle_seconds": 1.5, "is_salted": False,
        "is_on_disk": False, "text": CAT,
    }  # fmt: skip
    assert {name: value for name, value in before["two"].items() if name in ("budget_bytes", "disk_bytes", "num_nodes")} == {
        "budget_bytes": 2**20, "disk_bytes": 0, "num_nodes": 1,
    }  # fmt: skip
    assert one == {"cleared": {"one": 1}}
    assert [len(between[name]["nodes"]) for name in ("one", "two")] == [0, 1]
    assert everything == {"cleared": {"one": 0, "two": 1}}
    assert after["two"]["nodes"] == []
    assert unknown.status_code == 404


def test_of_a_long_chunk_beginning_and_end_are_shown() -> None:
    text = "A" + " word" * 300 + " end."
    with front({"m": []}) as server:
        ask(server, text)
        shown = kept(server)["m"]["nodes"][0]["text"]

    assert len(shown) == 200
    assert shown.startswith("A word word")
    assert shown.endswith("word word end.")
    assert "…" in shown


def test_the_cache_is_behind_the_key() -> None:
    with front({"m": []}, api_keys=("secret",)) as server:
        refused = [
            server.get("/v1/cache").status_code,
            server.post("/v1/cache/clear", {}).status_code,
            server.get("/v1/cache/requests/x").status_code,
        ]
        let_in = server.get("/v1/cache", headers={"authorization": "Bearer secret"}).status_code

    assert (refused, let_in) == ([401, 401, 401], 200)


def test_a_model_that_is_not_up_keeps_nothing_and_can_not_be_cleared_yet() -> None:
    with front({"slow": ["--load-until", "/never"]}, wait=False) as server:
        listed = server.get("/v1/cache").json()
        refused = server.post("/v1/cache/clear", {})

    assert listed == {"models": []}
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")


def test_only_the_last_reports_are_kept() -> None:
    with front({"m": []}) as server:
        server.service.reports.max_reports = 2
        for name in ("a", "b", "c"):
            server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers={"x-request-id": name})
        found = [server.get(f"/v1/cache/requests/{name}").status_code for name in ("a", "b", "c")]

    assert found == [404, 200, 200]
