"""The stream of events: what a watcher is told, and that nobody pays while there is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fronts import Front, front
from waiting import until
from weft.api.live import MAX_ENDED, LiveView, percentiles
from weft.metrics import Metrics
from weft.serving.active_request import ActiveRequest
from weft.serving.service import Service
from weft.serving.tenants import Keyring
from weft.text.types import GenerationRequest

Event = dict[str, Any]


def watched(server: Front) -> Iterator[Event]:
    with server.watch("/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def asking(server: Front, *ids: str, **fields: Any) -> list[threading.Thread]:
    body = {"prompt": "Once upon a time", "max_tokens": 40, **fields}
    threads = [
        threading.Thread(target=server.post, args=("/v1/completions", body), kwargs={"headers": {"x-request-id": one}})
        for one in ids
    ]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture(scope="module")
def server() -> Iterator[Front]:
    with front({"m": ["--token-seconds", "0.02"]}) as server:
        yield server


def test_a_watcher_sees_every_request_from_its_arrival_to_its_end(server: Front) -> None:
    rows: dict[str, list[Event]] = {"a": [], "b": []}
    threads: list[threading.Thread] = []
    tokens, gaps = 0.0, []
    for event in watched(server):
        threads = threads or asking(server, *rows)
        for row in event["requests"]:
            rows[row["id"]].append(row)
        tokens += event["models"][0]["tokens_per_second"] * event["seconds"]
        gaps += [event["models"][0]["gaps"]] if event["models"][0]["gaps"] else []
        if all(told and told[-1]["state"] == "finished" for told in rows.values()):
            break
    for thread in threads:
        thread.join()

    for told in rows.values():
        assert told[-1].items() >= {"wire": "completions", "model": "m", "tokens": 40, "finish": "length"}.items()
        assert {row["state"] for row in told[:-1]} <= {"queued", "prefill", "decode"}
        counts = [row["tokens"] for row in told]
        assert counts == sorted(counts)
        assert told[-1]["prompt_tokens"] == 4
        assert not told[-1]["constrained"]
    assert tokens == pytest.approx(80, rel=0.1)
    assert all(0 < gap["p50"] <= gap["p95"] <= gap["p99"] for gap in gaps)


def test_what_has_not_changed_is_not_told_again(server: Front) -> None:
    asking(server, "slow", max_tokens=20)[0].join()
    events = watched(server)
    first, second = next(events), next(events)
    events.close()  # type: ignore[attr-defined]

    assert first["requests"] == second["requests"] == []
    assert second["seconds"] > 0.6  # quiet: not at every tick


def test_who_was_asking_before_is_told_at_once(server: Front) -> None:
    (thread,) = asking(server, "before", max_tokens=60)
    until(lambda: "before" in [request.id for request in server.service.active])
    events = watched(server)
    first = next(events)
    events.close()  # type: ignore[attr-defined]
    thread.join()

    assert [row["id"] for row in first["requests"]] == ["before"]
    assert first["models"][0]["tokens_per_second"] == 0  # what was done before is not counted as done now


def test_a_watcher_that_leaves_leaves_nothing_behind(server: Front) -> None:
    events = watched(server)
    next(events)
    assert len(server.service.watchers) == 1
    events.close()  # type: ignore[attr-defined]

    until(lambda: not server.service.watchers)


def test_a_request_that_nobody_waits_for_any_more_is_told_as_cancelled(server: Front) -> None:
    threads: list[threading.Thread] = []
    for event in watched(server):
        threads = threads or asking(server, "unwanted", max_tokens=500)
        rows = [row for row in event["requests"] if row["id"] == "unwanted"]
        if rows and rows[0]["state"] == "decode":
            server.post("/v1/requests/unwanted/cancel", {})
        if rows and rows[0]["state"] == "finished":
            break
    threads[0].join()

    assert rows[0]["finish"] == "cancelled"


def test_an_answer_that_went_on_in_another_engine_says_so(tmp_path: Any) -> None:
    words = ["--token-seconds", "0.02", "--die-after", "10", "--diary", str(tmp_path / "diary"), "--deaths", "1"]
    with front({"m": words}) as server:
        threads: list[threading.Thread] = []
        for event in watched(server):
            threads = threads or asking(server, "resumed")
            rows = event["requests"]
            if rows and rows[0]["state"] == "finished":
                break
        threads[0].join()

    assert (rows[0]["resumed"], rows[0]["tokens"]) == (1, 40)
    assert event["models"][0]["restarts"] == 1


def test_percentiles_are_read_between_the_bounds() -> None:
    infinity = float("inf")
    before = [(0.01, 10.0), (0.02, 10.0), (infinity, 10.0)]
    after = [(0.01, 60.0), (0.02, 108.0), (infinity, 110.0)]

    assert percentiles(before, before) is None
    assert percentiles([], []) is None
    found = percentiles(before, after)
    assert found is not None
    assert found["p50"] == pytest.approx(0.01)
    assert 0.019 < found["p95"] < 0.02
    assert found["p99"] == 0.02  # beyond the last bound nothing is known


def test_of_a_watcher_who_does_not_read_only_the_last_answers_are_kept() -> None:
    service = Service([], Metrics(), 0, lambda _: pytest.fail("no model is made here"))
    view = LiveView(service, Keyring.anybody([]))
    for number in range(MAX_ENDED + 10):
        view.end_request(ActiveRequest(str(number), GenerationRequest(model=None, prompts=(), sampling={})))

    assert [one.id for one in view._ended] == [str(number) for number in range(10, MAX_ENDED + 10)]
    assert view._num_missed == 10
