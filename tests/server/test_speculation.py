"""Drafts as clients and operators see them, over an engine that says it verified some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fronts import Front, fake_pool, front
from weft.config import EngineSettings
from weft.serving.pool import EnginePool
from weft.serving.starters.here import Here

ASKED = {"messages": [{"role": "user", "content": "Repeat after me: the cat"}], "max_tokens": 6}
LOOKUP = {"drafted": 4, "accepted": 3}
REFUSED_HEAD = "it agrees with 3 % of the text"


@pytest.fixture(scope="module")
def server() -> Iterator[Front]:
    with front({"m": ["--drafts"]}) as server:
        yield server


def values(server: Front) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def last_chunk(text: str) -> dict[str, Any]:
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return next(chunk for chunk in chunks if "timings" in chunk)


def test_timings_tell_drafts_streamed_or_not(server: Front) -> None:
    body = server.post("/v1/chat/completions", ASKED).json()
    streamed = last_chunk(server.post("/v1/chat/completions", ASKED | {"stream": True}).text)
    response = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 3}).json()

    for timings in (body["timings"], streamed["timings"], response["timings"]):
        assert (timings["draft_n"], timings["draft_n_accepted"], timings["drafts"]) == (4, 3, {"lookup": LOOKUP})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASKED),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
    ],
)
def test_a_request_without_drafts_has_none(server: Front, path: str, body: dict[str, Any]) -> None:
    timings = server.post(path, body | {"speculate": False}).json()["timings"]

    assert "draft_n" not in timings
    assert "drafts" not in timings


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": ASKED["messages"], "max_tokens": 3, "speculate": False}),
        ("/api/chat", {"messages": ASKED["messages"], "options": {"num_predict": 3, "speculate": False}, "stream": False}),
    ],
)
def test_the_other_dialects_can_do_without_drafts_too(server: Front, path: str, body: dict[str, Any]) -> None:
    before = server.service.models[0].pool.drafts.num_drafts
    status = server.post(path, body).status_code

    assert status == 200
    assert server.service.models[0].pool.drafts.num_drafts == before


def test_what_is_no_boolean_is_a_400_that_names_the_field(server: Front) -> None:
    reply = server.post("/v1/chat/completions", ASKED | {"speculate": "off"})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "speculate")


@pytest.mark.parametrize(
    ("content", "accepted", "rejected"),
    [
        (" the cat", 2, 0),
        ([{"type": "text", "text": " the"}, {"type": "text", "text": " cat"}], 2, 0),
        (" the cat river", 2, 1),
        ("", 0, 0),
    ],
)
def test_a_prediction_reaches_the_engine_as_tokens_and_the_usage_counts_them(
    server: Front, content: Any, accepted: int, rejected: int
) -> None:
    body = server.post("/v1/chat/completions", ASKED | {"prediction": {"type": "content", "content": content}}).json()
    details, drafts = body["usage"]["completion_tokens_details"], body["timings"]["drafts"]
    drafted = accepted + rejected

    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (accepted, rejected)
    assert drafts == {"lookup": LOOKUP} | ({"prediction": {"drafted": drafted, "accepted": accepted}} if drafted else {})


def test_a_prediction_longer_than_any_answer_is_refused() -> None:
    with front({"m": ["--context", "80"]}) as server:
        prediction = {"type": "content", "content": "cat " * 200}
        reply = server.post("/v1/chat/completions", ASKED | {"prediction": prediction})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prediction")
    assert "longest context here is 80" in reply.text


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})], ids=["completions", "responses"]
)
def test_a_prediction_is_refused_where_openai_has_none(server: Front, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, body | {"prediction": {"type": "content", "content": "a"}})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prediction")


def test_the_model_s_entry_says_where_drafts_come_from_and_why_not_from_elsewhere(server: Front) -> None:
    (listed,) = server.get("/v1/models").json()["data"]

    assert listed["speculation"]["sources"] == ["lookup"]
    assert listed["speculation"]["unused"] == {"forced": "this engine has none", "mtp": REFUSED_HEAD}


def test_the_start_screen_tells_of_a_head_that_was_refused(server: Front) -> None:
    (notice,) = [told[-1] for told in server.screen.told if told[0] == "ready"]

    assert notice == f"its MTP head is not used: {REFUSED_HEAD}"


def test_sources_that_nobody_chose_or_the_model_lacks_are_no_news_at_the_start() -> None:
    def off(name: str, *words: str) -> EnginePool:
        starter = fake_pool(name, *words).replicas[0].starter
        assert isinstance(starter, Here)
        return EnginePool([Here(EngineSettings(model=name, speculate=("lookup", "mtp")), starter.command)], 60.0)

    with front({"m": []}, make_pool=off) as server:
        (listed,) = server.get("/v1/models").json()["data"]

    assert listed["speculation"] == {
        "sources": [],
        "unused": {
            "forced": "--speculate leaves it out",
            "lookup": "this engine has none",
            "mtp": "the model has no MTP head",
        },
    }
    assert [told[-1] for told in server.screen.told if told[0] == "ready"] == [None]


def test_counters_of_drafts_go_on_when_the_engine_is_replaced_and_when_the_model_is_loaded_again(tmp_path: Path) -> None:
    dying = ["--drafts", "--die-after", "5", "--deaths", "1", "--diary", str(tmp_path / "diary")]
    seen = []
    with front({"m": dying}) as server:
        for _ in range(2):  # the first engine dies in the second answer
            server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})
            seen.append(values(server))
        restarts = server.get("/v1/status").json()["engine_restarts"]
        server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})  # in no metrics when it is unloaded
        server.post("/v1/models/unload", {"model": "m"})
        seen.append(values(server))

    assert restarts == 1
    for name, step in (("num_drafts_total", 1), ("num_draft_tokens_total", 4), ("num_accepted_tokens_total", 3)):
        source = "" if name == "num_drafts_total" else ',source="lookup"'
        assert [one[f'weft_spec_decode_{name}{{model="m"{source}}}'] for one in seen] == [step, 2 * step, 3 * step]
        assert [one[f'vllm:spec_decode_{name}{{model_name="m"{source}}}'] for one in seen] == [step, 2 * step, 3 * step]
    place = 'spec_decode_num_accepted_tokens_per_pos_total{model="m",position="2"}'
    assert [one[f"weft_{place}"] for one in seen] == [1, 2, 3]


def test_an_answer_that_another_engine_ended_tells_the_drafts_of_that_engine(tmp_path: Path) -> None:
    dying = ["--drafts", "--die-after", "3", "--deaths", "1", "--diary", str(tmp_path / "diary"), "--token-seconds", "0.05"]
    with front({"m": dying}) as server:
        timings = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 6}).json()["timings"]

    assert timings["drafts"] == {"lookup": LOOKUP}


def test_a_watcher_is_told_of_drafts_once_there_are_any() -> None:
    def told() -> Any:
        with server.watch("/v1/events") as answer:
            return json.loads(next(line for line in answer.iter_lines() if line)[6:])["models"][0]["drafts"]

    with front({"m": ["--drafts"]}) as server:
        before = told()
        server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})
        after = told()

    assert before is None
    assert after == {"verified": 1, "tokens": 4, "accepted": 3}
