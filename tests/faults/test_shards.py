"""The shipped model over two processes: its tokens are those of one, its crowd is exact, a rank's death is its engine's."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fronts import Front, front
from thoroughness import ALL
from waiting import HANG_SECONDS, until
from weft.config import DRAFT_SOURCES, EngineSettings, ServerConfig
from weft.errors import WeftError
from weft.serving.pool import EnginePool
from weft.serving.starters.here import Here

PLAIN = {"max_tokens": 200 if ALL else 40, "ignore_eos": True, "logprobs": 2}
WORDS = {"type": "array", "items": {"type": "string", "minLength": 10, "maxLength": 20}, "minItems": 2, "maxItems": 2}
LONG = "One day the dog and the cat went to the park and saw a bird. " * 12
MORE: list[dict[str, Any]] = [
    {"prompt": "The big house", **PLAIN, "temperature": 0.9, "seed": 5, "frequency_penalty": 0.8},
    {"prompt": "A red ball", **PLAIN, "temperature": 0.9, "seed": 6, "n": 2},
]
ASKED: list[dict[str, Any]] = [
    *(MORE if ALL else []),
    {"prompt": "There were cats", **PLAIN, "max_tokens": 64, "temperature": 0},
    {"prompt": "List:", "max_tokens": 60, "temperature": 0.9, "seed": 7, "structured_outputs": {"json": WORDS}},
    {"prompt": LONG, **PLAIN, "max_tokens": 8, "temperature": 0},
]


def pool_of(num_shards: int) -> Any:
    def make(name: str) -> EnginePool:
        settings = EngineSettings(
            model=name, cache_bytes=64 << 20, max_rows=8, shards=num_shards, speculate=DRAFT_SOURCES if ALL else ()
        )
        return EnginePool([Here(settings)], 60.0)

    return make


@pytest.fixture(scope="module")
def server() -> Iterator[Front]:
    with front({"tiny-hybrid": []}, make_pool=pool_of(2), drain_seconds=0.0) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server: Front) -> list[Any]:
    return [told(server.post("/v1/completions", asked).json()) for asked in ASKED]


def told(reply: dict[str, Any]) -> Any:
    """All of a reply that does not change from one time to the next, log probabilities to the last bit."""
    return reply["choices"]


def texts(answers: list[Any]) -> list[str]:
    return [choice["text"] for choices in answers for choice in choices]


def together(server: Front, trouble: Any = lambda: None) -> list[Any]:
    """The answers of all at once, with trouble amid them."""
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as threads:
        waiting = [threads.submit(server.post, "/v1/completions", asked) for asked in ASKED]
        live = server.service.models[0].pool.replicas[0].client.live
        until(lambda: any(one.has_proved for one in list(live.inside.values())))
        trouble()
        return [told(answer.result(HANG_SECONDS).json()) for answer in waiting]


def signal_follower(server: Front, number: int) -> None:
    engine = server.service.models[0].pool.pid
    (follower,) = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    os.kill(int(follower), number)


def test_two_ranks_say_what_one_says(alone: list[Any]) -> None:
    with front({"tiny-hybrid": []}, make_pool=pool_of(1), drain_seconds=0.0) as one:
        answers = [told(one.post("/v1/completions", asked).json()) for asked in ASKED]

    assert texts(answers) == texts(alone)


def test_the_answers_of_a_crowd_on_two_ranks_are_those_alone_to_the_bit(server: Front, alone: list[Any]) -> None:
    assert together(server) == alone
    assert server.service.models[0].pool.restarts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP] if ALL else [signal.SIGKILL])
def test_a_lost_rank_is_a_lost_engine_and_the_answers_go_on(server: Front, alone: list[Any], number: int) -> None:
    pool = server.service.models[0].pool
    before = pool.restarts
    answers = together(server, lambda: signal_follower(server, number))

    assert texts(answers) == texts(alone)
    assert pool.restarts == before + 1


@pytest.mark.skipif(not ALL, reason="starts three processes; tests/model/test_sharding.py has the sentence itself")
def test_a_model_that_can_not_be_divided_so_is_refused_in_a_sentence() -> None:
    with front({"tiny-hybrid": []}, make_pool=pool_of(3), wait=False) as server:
        until(lambda: server.service.models[0].failed is not None)

        assert "shard 3 does not divide" in str(server.service.models[0].failed)


@pytest.mark.parametrize("more", [{"cache_dir": "/x"}, {"cache_canary": True}, {"engines": ("a:1",)}, {"shard": 0}])
def test_settings_that_contradict_shards_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(WeftError, match="shard"):
        ServerConfig(**{"shard": 2, **more}).check()
