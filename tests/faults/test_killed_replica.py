"""A replica of the shipped model is killed, or renewed, amid a crowd of mixed answers: each is, to the letter, the one alone."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fronts import Front, front
from thoroughness import ALL
from waiting import HANG_SECONDS, until
from weft.config import EngineSettings
from weft.serving.pool import EnginePool
from weft.serving.replicas import Devices, starters_here

LENGTH = 300 if ALL else 80
HOT = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.9}
WORDS = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 40}, "minItems": 3, "maxItems": 3}
THINKING = {"messages": [{"role": "user", "content": "Marker 7."}], "thinking_token_budget": 40, "max_tokens": LENGTH}
ASKED: list[tuple[str, dict[str, Any]]] = [
    *[("/v1/completions", {"prompt": f"There were {n} cats", **HOT, "temperature": 0}) for n in range(2)],
    ("/v1/completions", {"prompt": "The big house", **HOT, "seed": 5, "frequency_penalty": 0.8}),
    ("/v1/completions", {"prompt": "A red ball", **HOT, "seed": 6, "n": 2}),
    ("/v1/completions", {"prompt": "List:", **HOT, "ignore_eos": False, "seed": 7, "structured_outputs": {"json": WORDS}}),
    ("/v1/chat/completions", {**THINKING, "temperature": 1.5, "seed": 9, "structured_outputs": {"json": WORDS}}),
    ("/v1/chat/completions", {**THINKING, "temperature": 1.5, "seed": 10, "ignore_eos": True}),
]


def two_replicas(name: str) -> EnginePool:
    settings = EngineSettings(model=name, cache_bytes=64 << 20, max_rows=8)
    return EnginePool(starters_here(settings, 2, Devices(num_cores=2)), 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Front]:
    with front({"tiny-hybrid": []}, make_pool=two_replicas, drain_seconds=0.0) as server:
        pool = server.service.models[0].pool
        until(lambda: all(replica.is_open for replica in pool.replicas))
        yield server


@pytest.fixture(scope="module")
def alone(server: Front) -> list[Any]:
    return [told(server.post(*asked).json()) for asked in ASKED]


def told(reply: dict[str, Any]) -> Any:
    """All of a reply that does not change from one time to the next, to the last bit."""
    return reply["choices"], reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]


def in_trouble(server: Front, trouble: Any) -> list[Any]:
    """The answers of all at once, with trouble when a replica has streams that have proved themselves."""
    pool = server.service.models[0].pool
    until(lambda: all(replica.is_open for replica in pool.replicas))
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as threads:
        answers = [threads.submit(server.post, *asked) for asked in ASKED]
        until(lambda: any(one.has_proved for one in list(pool.replicas[0].client.live.inside.values())))
        trouble(pool)
        return [told(answer.result(HANG_SECONDS).json()) for answer in answers]


def test_a_killed_replica_s_mixed_answers_are_those_alone(server: Front, alone: list[Any]) -> None:
    pool = server.service.models[0].pool

    def kill(_: EnginePool) -> None:
        pid = pool.replicas[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    assert in_trouble(server, kill) == alone
    assert pool.dispatcher.num_moved > 0
    assert pool.replicas[1].restarts == 0


def test_a_renewed_replica_s_mixed_answers_are_those_alone(server: Front, alone: list[Any]) -> None:
    pool = server.service.models[0].pool
    before, restarts = pool.dispatcher.num_moved, pool.replicas[0].restarts

    def renew(_: EnginePool) -> None:
        assert server.post("/v1/replicas/renew", {"replica": "0"}).status_code == 200

    assert in_trouble(server, renew) == alone
    until(lambda: pool.replicas[0].restarts == restarts + 1)
    assert pool.dispatcher.num_moved > before


def test_the_next_turn_of_a_conversation_goes_where_the_last_one_is_cached(server: Front) -> None:
    pool = server.service.models[0].pool
    until(lambda: all(replica.is_open for replica in pool.replicas))
    sentence = "One day the dog and the cat went to the park and saw a bird. "
    told = []
    for turn in range(4):  # what is new is a fiftieth: even on a busy machine no other replica seems fast enough for the rest
        body = {"prompt": sentence * (48 + turn), "max_tokens": 2, "temperature": 0}
        told.append(server.post("/v1/completions", body).json()["timings"])

    assert len({timings["replica"]["name"] for timings in told}) == 1
    assert all(timings["replica"]["matched"] == timings["replica"]["best_matched"] > 100 for timings in told[1:])
    assert all(timings["cache_n"] > 100 for timings in told[1:])


def test_a_replica_that_there_is_not_can_not_be_renewed(server: Front) -> None:
    refused = server.post("/v1/replicas/renew", {"replica": "7"})

    assert refused.status_code == 400
    assert "there are 0, 1" in refused.json()["error"]["message"]
