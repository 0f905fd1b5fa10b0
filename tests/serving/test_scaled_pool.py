"""Pools whose number of replicas follows the load: replicas that join and leave under streams, here and with Ray's driver."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from replicas_at_hand import AtHand
from replicas_at_hand import ask as ask_at_hand
from test_on_ray import Cluster, gate, placed, told

from fronts import FAKE_ENGINE, front
from pools import all_open, answers, ask, become, expected, proved, run_story
from weft.config import EngineSettings, ServerConfig
from weft.errors import InvalidRequest, WeftError
from weft.ipc.messages import EngineStatus
from weft.serving.autoscaler import Autoscaler, PoolLoad, measure_load
from weft.serving.dispatcher import Dispatcher
from weft.serving.pool import EnginePool
from weft.serving.server import make_service
from weft.serving.starters.here import Here

SLOW = ("--token-seconds", "0.002")


def scaled_pool(name: str = "m", *words: str, least: int = 1, most: int = 3, drain_seconds: float = 0.0) -> EnginePool:
    command = (sys.executable, str(FAKE_ENGINE), *words, name)
    starters = [Here(EngineSettings(model=name), command, str(number)) for number in range(most)]
    return EnginePool(starters, 60.0, None, Autoscaler(least, most), drain_seconds)


@pytest.fixture(autouse=True)
def no_own_decisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests say how many there should be; the decisions are tested without a clock (tests/properties/test_autoscaler.py)."""
    monkeypatch.setattr("weft.serving.pool.SCALE_SECONDS", 3600.0)
    monkeypatch.setattr("weft.serving.lifeline.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("weft.serving.lifeline.LONGEST_AWAY_PAUSE_SECONDS", 0.02)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def test_a_replica_that_leaves_has_its_streams_go_on_in_the_others() -> None:
    async def story(pool: EnginePool) -> None:
        await pool.resize(3)
        await all_open(pool)
        prompts = [[place + 1, 50, 60] for place in range(12)]
        subscriptions = [ask(pool, prompt, 300, n=1 + place % 2) for place, prompt in enumerate(prompts)]
        await proved(pool)
        num_there = len(pool.replicas[2].client.live)
        await pool.resize(2)
        names = [replica.name for replica in pool.replicas]
        found = await asyncio.gather(*map(answers, subscriptions))

        assert num_there > 0
        assert names == ["0", "1"]
        assert pool.dispatcher.num_moved == num_there
        assert found == [[expected(prompt, 300)] * (1 + place % 2) for place, prompt in enumerate(prompts)]
        assert pool.restarts == 0

    run_story(lambda: scaled_pool("m", *SLOW), story)


def test_what_waits_in_the_front_goes_to_a_replica_that_joins() -> None:
    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        subscriptions = [ask(pool, [place + 1, 50, 60], 90_000) for place in range(100)]
        num_waiting = pool.dispatcher.num_queued
        await pool.resize(2)
        await become(lambda: len(pool.replicas[1].client.live))

        assert num_waiting > 0
        assert len(pool.replicas[1].client.live) == num_waiting
        for subscription in subscriptions:
            subscription.cancel()

    run_story(lambda: scaled_pool("m", *SLOW), story)


def test_while_a_replica_drains_its_answers_end_there_and_nothing_new_comes() -> None:
    async def story(pool: EnginePool) -> None:
        await pool.resize(2)
        await all_open(pool)
        first = [ask(pool, [place + 1, 50, 60], 100) for place in range(8)]
        leaving, num_there = pool.replicas[1], len(pool.replicas[1].client.live)
        resizing = asyncio.create_task(pool.resize(1))
        await become(lambda: leaving.is_retired)
        later = [ask(pool, [place + 100, 50, 60], 20) for place in range(8)]
        num_then = len(leaving.client.live)
        with pytest.raises(InvalidRequest, match="'1' is not renewed: it leaves"):
            await pool.renew("1", 0.0)
        await resizing
        await asyncio.gather(*map(answers, [*first, *later]))

        assert 0 < num_then <= num_there
        assert pool.dispatcher.num_moved == 0

    run_story(lambda: scaled_pool("m", *SLOW, drain_seconds=3600.0), story)


def test_a_long_queue_has_the_pool_start_a_replica_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.pool.SCALE_SECONDS", 0.01)
    monkeypatch.setattr("weft.serving.autoscaler.MORE_SECONDS", 0.0)
    monkeypatch.setattr("weft.serving.autoscaler.MAX_QUEUE_SECONDS", 0.1)

    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        subscriptions = [ask(pool, [place + 1, 50, 60], 200) for place in range(100)]
        await become(lambda: len(pool.replicas) == 3)
        await asyncio.gather(*map(answers, subscriptions))

    run_story(lambda: scaled_pool("m", *SLOW), story)


def test_counts_of_replicas_that_have_left_stay_in_the_model_s() -> None:
    async def story(pool: EnginePool) -> None:
        await pool.resize(2)
        await all_open(pool)
        pool.replicas[1].restarts = 3
        await pool.resize(1)

        assert pool.restarts == 3

    run_story(scaled_pool, story)


def test_the_status_and_metrics_show_the_range_and_no_replica_that_has_left() -> None:
    with front({"m": []}, make_pool=scaled_pool) as served:
        pool = served.service.models[0].pool
        pool.replicas[0].num_prompt_tokens = 7
        (model,) = served.get("/v1/status").json()["models"]
        text = served.get("/metrics").text
        pool.replicas[0].starter.name = "9"  # type: ignore[misc]
        later = served.get("/metrics").text

    assert model["scaling"] == {"least": 1, "most": 3, "wanted": 1, "queued_seconds": 0.0, "replicas_used": 0.0}
    assert [row["name"] for row in model["replicas"]] == ["0"]
    assert 'weft_replicas_wanted{model="m"} 1.0' in text
    assert 'weft_replicas_queued_seconds{model="m"} 0.0' in text
    assert 'weft_replica_prompt_tokens_total{model="m",replica="0"} 7.0' in text
    assert 'replica="0"' not in later


def test_ray_s_driver_is_told_which_engines_are_wanted(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with AsyncExitStack() as stack:
            first, second = [await stack.enter_async_context(gate(*SLOW)) for _ in range(2)]
            cluster.say(placed(first))
            await all_open(cluster.pool)
            await cluster.pool.resize(2)
            await become(lambda: cluster.has_noted('{"type":"PlaceEngines","names":["0","1"]}'))
            cluster.say(placed(first, second))
            await all_open(cluster.pool)
            asked = [ask(cluster.pool, [place + 1, 50, 60], 200) for place in range(8)]
            await proved(cluster.pool)
            num_there = len(cluster.pool.replicas[1].client.live)
            await cluster.pool.resize(1)
            await become(lambda: cluster.has_noted('{"type":"PlaceEngines","names":["0"]}'))

            assert num_there > 0
            assert await asyncio.gather(*map(answers, asked)) == [[expected([place + 1, 50, 60], 200)] for place in range(8)]
            assert cluster.fleet.order.names == ("0",)  # what the next driver is told
            with pytest.raises(OSError, match="not placed"):
                cluster.fleet.address("1")

    told(tmp_path, story, Autoscaler(1, 2))


def queued(*replicas: AtHand, num_prompts: int = 0, length: int = 1000) -> float:
    dispatcher = Dispatcher(replicas, clock=lambda: 0.0, is_elastic=True)
    for place in range(num_prompts):
        ask_at_hand(dispatcher, [place] * length)
    return measure_load(replicas, dispatcher.queue).queued_seconds


def with_speed(seconds_per_token: float, **status: object) -> AtHand:
    replica = AtHand("0")
    replica.status = EngineStatus(seconds_per_token=seconds_per_token, **status)  # type: ignore[arg-type]
    return replica


def test_a_prompt_that_is_being_computed_is_no_queue_and_those_behind_it_are() -> None:
    assert queued(with_speed(0.001), num_prompts=1) == 0
    assert queued(with_speed(0.001), num_prompts=3) == pytest.approx(2.0)


def test_one_prompt_of_another_front_is_no_queue_and_two_are() -> None:
    assert queued(with_speed(0.001, queued_tokens=5000, prefilling=(1,))) == 0
    assert queued(with_speed(0.001, queued_tokens=5000, prefilling=(1, 2))) == pytest.approx(5.0)


def test_answers_that_wait_for_a_row_are_a_queue() -> None:
    replica = with_speed(1e-9)
    replica.answer_seconds = 20.0

    assert queued(replica, num_prompts=4) == pytest.approx(0, abs=1e-3)
    assert queued(replica, num_prompts=10) == pytest.approx(6 * 20 / 4, abs=1e-3)  # two at the engine, four in the front


def test_what_waits_in_the_front_is_expected_to_be_cached_as_often_as_before() -> None:
    replica = with_speed(0.001)
    replica.answer_seconds = 1e-9
    before = queued(replica, num_prompts=8)
    cached = with_speed(0.001)
    cached.answer_seconds = 1e-9
    cached.num_prompt_tokens, cached.num_cached_tokens = 100, 50

    assert before == pytest.approx(7.0)
    assert queued(cached, num_prompts=8) == pytest.approx(6.0)  # two wait in the front


def test_rows_and_prompts_are_use() -> None:
    idle, half, busy = AtHand("0"), AtHand("1"), with_speed(0.001, queued_tokens=10)
    half.status = EngineStatus(running=2)

    assert measure_load([idle, half, busy], []) == PoolLoad(0.0, 1.5)


@pytest.mark.parametrize("replicas", ["8-2", "0-3", "2-", "-2", "a", "", "2-3-4", "1.5", 0, -1, "2 - 3"])
def test_a_range_that_is_none_is_refused(replicas: int | str) -> None:
    with pytest.raises(WeftError, match=r"replicas .* must be a number from 1 on, as 4, or the least and the most"):
        ServerConfig(("m",), replicas=replicas).check()


def test_a_range_is_the_number_s_devices_and_a_number_is_no_range() -> None:
    with pytest.raises(WeftError, match="replicas 3 is more than"):
        make_service(ServerConfig(("m",), replicas="1-3"))
    (elastic,) = make_service(ServerConfig(("m",), replicas="2-3", force=True)).models
    (fixed,) = make_service(ServerConfig(("m",), replicas="2", force=True)).models

    assert (len(elastic.pool.replicas), len(elastic.pool.starters)) == (2, 3)
    assert elastic.pool.settings.report_prefixes
    assert elastic.pool.drain_seconds == ServerConfig.drain_seconds
    assert (len(fixed.pool.replicas), fixed.pool.autoscaler) == (2, None)
