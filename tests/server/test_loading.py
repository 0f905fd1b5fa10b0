"""Models loaded and unloaded while the server runs: over engines that are told how to behave, and once in earnest."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fronts import Front, front
from servers import Server, running
from waiting import until
from weft.kernels import blas
from weft.model.resolve import TINY_HYBRID
from weft.serving import fit

LOAD, UNLOAD, COMPLETIONS = "/v1/models/load", "/v1/models/unload", "/v1/completions"
TEXT = "Once upon a time"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that looks like a model; a fake engine does not look closer."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "other" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_bytes(bytes(1000))
    return str(tmp_path / "other")


def state(server: Front | Server, name: str) -> str | None:
    models = server.get("/v1/models").json()["data"]
    return next((model["status"]["value"] for model in models if model["id"] == name), None)


def loaded(server: Front | Server, name: str, **more: Any) -> httpx2.Response:
    reply = server.post(LOAD, {"model": name, **more})
    until(lambda: state(server, name) != "loading")
    return reply


def test_a_model_is_loaded_shown_on_its_way_and_answers(folder: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with front({"m": []}, spare={folder: ["--load-until", str(gate)]}) as server, ThreadPoolExecutor(1) as pool:
        reply = server.post(LOAD, {"model": folder})
        health = server.get("/health")
        with server.watch("/v1/events") as events:
            event = json.loads(next(line for line in events.iter_lines() if line).removeprefix("data: "))
        early = server.post(COMPLETIONS, {"prompt": TEXT, "model": folder})
        waiting = pool.submit(server.post, COMPLETIONS, {"prompt": TEXT, "model": folder, "stream": True})
        until(lambda: server.service.waiting)
        gate.touch()
        waited = waiting.result()
        again = server.post(LOAD, {"model": folder})
        answers = [server.post(COMPLETIONS, {"prompt": TEXT, "model": name}).json() for name in ("m", folder)]
        listed = server.get("/v1/models/available").json()

    assert (reply.status_code, reply.json()["id"], reply.json()["status"]) == (202, folder, {"value": "loading"})
    assert (health.status_code, health.json()["models"][folder]["status"]) == (200, "loading")
    assert [(model["name"], model["status"]) for model in event["models"]] == [("m", "ready"), (folder, "loading")]
    assert (early.status_code, early.json()["error"]["code"]) == (503, "model_loading")
    assert waited.text.endswith("data: [DONE]\n\n")
    assert (again.status_code, again.json()["status"]) == (200, {"value": "loaded"})
    assert [answer["choices"][0]["text"] for answer in answers] == [TEXT, TEXT]
    assert next(one for one in listed["data"] if one["id"] == folder)["is_loaded"]
    assert {"tiny-hybrid", "smollm2"} <= {one["id"] for one in listed["data"]}


def test_what_can_not_be_loaded_is_an_error_and_leaves_no_trace(folder: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    names = ["no-such-model", ".", "/", str(tmp_path), str(tmp_path / "notes.txt"), "~nobody/x", "x" * 300, "\0", "a/.."]
    with front({"m": []}) as server:
        replies = [server.post(LOAD, {"model": name, "force": True}) for name in names]
        hub = server.post(LOAD, {"model": "nobody/nothing"})
        empty = [server.post(path, body) for path in (LOAD, UNLOAD) for body in ({}, {"model": ""}, {"model": None})]
        other = server.post(UNLOAD, {"model": folder})
        left = server.get("/v1/models").json()["data"]

    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [(404, "model_not_found")] * len(names)
    assert (hub.status_code, hub.json()["error"]["param"]) == (404, "fetch")
    assert all(word in hub.text for word in ("weft pull nobody/nothing", "fetch"))
    assert [reply.status_code for reply in empty] == [400] * 6
    assert (other.status_code, "weft load" in other.text) == (404, True)
    assert [model["id"] for model in left] == ["m"]


def test_a_model_that_was_asked_for_and_failed_is_listed_and_the_server_is_well(folder: str) -> None:
    with front({"m": []}, spare={folder: ["--fail", "weights are missing"]}) as server:
        loaded(server, folder)
        failed = next(model for model in server.get("/v1/models").json()["data"] if model["id"] == folder)
        health, has_failed = server.get("/health"), server.service.has_failed
        refused = server.post(COMPLETIONS, {"prompt": "hi", "model": folder})
        again = loaded(server, folder)
        num_listed = len(server.get("/v1/models").json()["data"])
        gone = server.post(UNLOAD, {"model": folder})
        left = server.get("/v1/models").json()["data"]

    assert failed["status"] == {"value": "failed", "message": "weights are missing"}
    assert (health.status_code, health.json()["status"], has_failed) == (200, "ready", False)
    assert health.json()["models"][folder] == {"status": "failed", "message": "weights are missing"}
    assert (refused.status_code, "weights are missing" in refused.text) == (500, True)
    assert (again.status_code, num_listed) == (202, 2)
    assert gone.json()["status"] == {"value": "unloaded"}
    assert [model["id"] for model in left] == ["m"]


def test_what_does_not_fit_is_refused_with_both_numbers_unless_forced(folder: str) -> None:
    with front({"m": []}, memory=100) as server:
        refused = server.post(LOAD, {"model": folder})
        listed = server.get("/v1/models/available").json()
        forced = server.post(LOAD, {"model": folder, "force": True})

    row = next(one for one in listed["data"] if one["id"] == "tiny-hybrid")
    assert (row["verdict"], listed["free_bytes"]) == ("does not fit", 100 << 20)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_conflict")
    assert all(number in refused.text for number in ("149131920", str(100 << 20), "force"))
    assert forced.status_code == 202


def test_one_that_is_on_its_way_is_reckoned_with(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "is_mlx_on_cpu", lambda: True)
    monkeypatch.setattr(fit, "available_memory_bytes", lambda: 250_000_000)  # room for one
    second = str(shutil.copytree(folder, tmp_path / "second"))
    with front({"m": []}, spare={folder: ["--load-until", "/never"]}) as server:
        first = server.post(LOAD, {"model": folder})
        refused = server.post(LOAD, {"model": second})
        free = server.get("/v1/models/available").json()["free_bytes"]

    assert (first.status_code, refused.status_code) == (202, 409)
    assert free == 250_000_000 - 149_131_920


def test_an_unloaded_model_ends_its_answers_and_takes_no_others(folder: str) -> None:
    with front({"m": [], folder: ["--token-seconds", "0.01"]}) as server:
        long = {"prompt": TEXT, "max_tokens": 100, "model": folder}
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(server.post, COMPLETIONS, long)
            until(lambda: server.service.active)
            unloading = pool.submit(server.post, UNLOAD, {"model": folder})
            until(lambda: state(server, folder) == "unloading")
            refused = server.post(COMPLETIONS, {**long, "stream": True})
            conflict = server.post(LOAD, {"model": folder})
            other = server.post(COMPLETIONS, {"prompt": TEXT})  # the only one left may go unnamed
            health = server.get("/health").status_code
            was_running = not answer.done()
            pid = server.service.models[1].pool.pid
            metrics = [server.get("/metrics").text]
            reply = unloading.result()
        is_alive = Path(f"/proc/{pid}").exists()
        metrics.append(server.get("/metrics").text)
        again = loaded(server, folder)
        after = server.post(COMPLETIONS, {**long, "max_tokens": 1}).status_code

    assert was_running
    assert answer.result().json()["usage"]["completion_tokens"] == 100
    assert (refused.status_code, refused.json()["error"]["code"], "weft load" in refused.text) == (404, "model_not_found", True)
    assert conflict.status_code == 409
    assert (other.json()["model"], health) == ("m", 200)
    assert reply.json() == {"id": folder, "object": "model", "status": {"value": "unloaded"}}
    assert not is_alive
    assert [f'weft_engine_up{{model="{folder}"}}' in text for text in metrics] == [True, False]
    assert ['weft_engine_up{model="m"} 1.0' in text for text in metrics] == [True, True]
    assert (again.status_code, after) == (202, 200)


def test_an_answer_that_does_not_end_in_time_is_told_why() -> None:
    with front({"m": ["--token-seconds", "0.02"]}, drain_seconds=0.2) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, COMPLETIONS, {"prompt": TEXT, "max_tokens": 5000, "stream": True})
        until(lambda: server.service.active)
        server.post(UNLOAD, {"model": "m"})

        assert "m was unloaded before this answer was complete" in answer.result().text
        assert '"code":"request_cancelled"' in answer.result().text


def test_who_waits_for_a_model_that_is_unloaded_meanwhile_is_told(folder: str) -> None:
    with front({"m": []}, spare={folder: ["--load-until", "/never"]}) as server, ThreadPoolExecutor(1) as pool:
        server.post(LOAD, {"model": folder})
        stream = pool.submit(server.post, COMPLETIONS, {"prompt": TEXT, "model": folder, "stream": True})
        until(lambda: server.service.waiting)
        server.post(UNLOAD, {"model": folder})

        assert '"code":"model_not_found"' in stream.result().text
        assert state(server, folder) is None


def test_the_last_model_may_go_and_another_come(folder: str) -> None:
    with front({"m": []}) as server:
        server.post(UNLOAD, {"model": "m"})
        has_failed = server.service.has_failed
        told = {path: server.get(path) for path in ("/v1/models", "/health", "/v1/status", "/metrics", "/api/tags", "/v1/cache")}
        refused = [server.post(COMPLETIONS, {"prompt": TEXT, **more}) for more in ({}, {"model": "m"}, {"stream": True})]
        with server.watch("/v1/events") as events:
            event = json.loads(next(line for line in events.iter_lines() if line).removeprefix("data: "))
        loaded(server, folder)
        answer = server.post(COMPLETIONS, {"prompt": TEXT})

    assert {path: reply.status_code for path, reply in told.items()} == {**dict.fromkeys(told, 200), "/health": 503}
    assert told["/v1/models"].json()["data"] == event["models"] == []
    assert told["/health"].json() == {"status": "empty", "models": {}}
    assert [reply.status_code for reply in refused] == [404] * 3
    assert "loaded: none" in refused[0].text
    assert not has_failed  # the server goes on, and ends with status 0
    assert answer.json()["choices"][0]["text"] == TEXT


def test_the_key_is_needed_and_two_that_load_at_once_get_one_engine(folder: str) -> None:
    key = {"x-api-key": "secret"}
    with front({"m": []}, api_keys=("secret",)) as server, ThreadPoolExecutor(4) as pool:
        codes = [server.post(path, {"model": "m"}).status_code for path in (LOAD, UNLOAD)]
        codes.append(server.get("/v1/models/available").status_code)
        replies = list(pool.map(lambda _: server.post(LOAD, {"model": folder}, headers=key).status_code, range(4)))
        num_models = len(server.service.models)

    assert codes == [401, 401, 401]
    assert sorted(replies) == [200, 200, 200, 202]
    assert num_models == 2


def test_a_path_in_another_spelling_is_the_same_model(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    spellings = [
        f"{folder}/",
        f"{folder}/.",
        f"{tmp_path}/./other",
        f"{tmp_path}/other/../other",
        "other",
        str(tmp_path / "link"),
    ]
    with front({"m": []}, spare={folder: []}) as server, ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda name: server.post("/v1/models/load", {"model": name}), [folder, "./other", "other//"]))
        later = [server.post("/v1/models/load", {"model": name}) for name in spellings]
        names = [model.name for model in server.service.models]

    assert sorted(answer.status_code for answer in first) == [200, 200, 202]
    assert [answer.status_code for answer in later] == [200] * len(spellings)
    assert len(names) == 2
    assert {answer.json()["id"] for answer in (*first, *later)} == {names[1]}


def test_beside_a_stream_another_model_comes_answers_alike_and_goes(tmp_path: Path) -> None:
    """The real thing: two engines of one machine, and the first one loses or changes nothing."""
    copy = str(shutil.copytree(TINY_HYBRID, tmp_path / "copy"))
    body = {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 5, "model": "tiny-hybrid"}
    stop, streamed = threading.Event(), []

    def stream(server: Server) -> None:
        while not stop.is_set():
            reply = server.post(COMPLETIONS, {**body, "stream": True})
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            streamed.append("".join(choice["text"] for event in events for choice in event["choices"]))

    with running(tmp_path / "log", "tiny-hybrid") as server, ThreadPoolExecutor(1) as pool:
        before = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
        streaming = pool.submit(stream, server)
        loaded(server, copy)
        replies = [server.post(COMPLETIONS, {**body, "max_tokens": 40, "model": name}).json() for name in ("tiny-hybrid", copy)]
        pid = server.status()["models"][1]["engine_pid"]
        gone = server.post(UNLOAD, {"model": copy})
        is_alive = Path(f"/proc/{pid}").exists()
        stop.set()
        streaming.result()
        models = server.get("/v1/models").json()["data"]

    answers = [reply["choices"][0]["text"] for reply in replies]
    assert answers[0] == answers[1] == before[: len(answers[0])]
    assert streamed
    assert set(streamed) == {before}
    assert gone.status_code == 200
    assert not is_alive
    assert [model["id"] for model in models] == ["tiny-hybrid"]
