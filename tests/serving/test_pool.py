"""Pools of fake engines in processes of their own: killed, stopped, joining and leaving under streams."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from fronts import fake_pool, front
from pools import all_open, answers, ask, become, expected, proved, run_story
from thoroughness import ALL
from waiting import HANG_SECONDS, until
from weft.config import EngineSettings
from weft.errors import EngineDied
from weft.serving.lifeline import HELD_BACK
from weft.serving.pool import EnginePool
from weft.serving.replica import Replica
from weft.serving.starters.here import Here

POISON = 666
SLOW = ("--token-seconds", "0.002")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.lifeline.FIRST_PAUSE_SECONDS", 0.01)


def pooled(story: Callable[[EnginePool], Awaitable[None]], num_replicas: int, *words: str) -> None:
    """Tell a story about so many engines with these words on their command lines."""
    run_story(lambda: fake_pool("m", *words, num_replicas=num_replicas), story)


def signal_to(replica: Replica, number: int) -> None:
    assert replica.pid is not None
    os.kill(replica.pid, number)


def test_streams_of_a_killed_replica_go_on_in_the_others_and_nothing_is_lost_or_said_twice() -> None:
    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        prompts = [[place + 1, 50, 60] for place in range(24)]
        subscriptions = [ask(pool, prompt, 300, n=1 + place % 2) for place, prompt in enumerate(prompts)]
        await proved(pool)
        busiest = max(pool.replicas, key=lambda replica: len(replica.client.live))
        num_there, others = len(busiest.client.live), [one for one in pool.replicas if one is not busiest]
        signal_to(busiest, signal.SIGKILL)
        found = await asyncio.gather(*map(answers, subscriptions))

        assert num_there > 0
        assert found == [[expected(prompt, 300)] * (1 + place % 2) for place, prompt in enumerate(prompts)]
        assert pool.dispatcher.num_moved == num_there
        assert [replica.restarts for replica in others] == [0, 0]
        assert len(pool.dispatcher) == 0

    pooled(story, 3, *SLOW)


def test_a_process_that_ends_by_itself_has_crashed_and_one_that_is_killed_has_not() -> None:
    async def exit_of(*last_words: str) -> bool:
        program = f"import os, signal; {'; '.join(last_words)}"
        async with Here(EngineSettings(model="m"), (sys.executable, "-c", program)).start() as engine:
            return (await engine.wait()).is_crash

    async def run() -> list[bool]:
        own = [await exit_of("os._exit(4)"), await exit_of("os.abort()")]
        return own + [await exit_of(f"os.kill(os.getpid(), {number:d})") for number in (signal.SIGKILL, signal.SIGTERM)]

    assert asyncio.run(asyncio.wait_for(run(), HANG_SECONDS)) == [True, True, False, False]


def test_what_a_killed_replica_had_not_begun_is_answered_while_that_one_never_returns(tmp_path: Path) -> None:
    load, read = tmp_path / "load", tmp_path / "read"
    load.touch()

    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        prompts = [[place + 1, 50, 60] for place in range(8)]
        subscriptions = [ask(pool, prompt, 40) for prompt in prompts]
        assert all(len(replica.client.live) for replica in pool.replicas)
        load.unlink()
        signal_to(pool.replicas[0], signal.SIGKILL)
        read.touch()
        found = await asyncio.gather(*map(answers, subscriptions))

        assert found == [[expected(prompt, 40)] for prompt in prompts]
        assert not pool.replicas[0].is_open

    pooled(story, 2, "--load-until", str(load), "--prompt-until", str(read))


def test_a_stopped_replica_s_streams_go_on_elsewhere_and_it_serves_again_when_it_wakes() -> None:
    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        prompts = [[place + 1, 50, 60] for place in range(8)]
        subscriptions = [ask(pool, prompt, 900) for prompt in prompts]
        await proved(pool)
        stopped = max(pool.replicas, key=lambda replica: len(replica.client.live))
        signal_to(stopped, signal.SIGSTOP)
        await become(lambda: pool.dispatcher.num_moved and not len(stopped.client.live))
        signal_to(stopped, signal.SIGCONT)
        found = await asyncio.gather(*map(answers, subscriptions))
        await all_open(pool)

        assert found == [[expected(prompt, 900)] for prompt in prompts]
        assert pool.restarts == 0
        later = [ask(pool, [place + 100, 5], 40) for place in range(20)]
        assert any(len(stopped.client.live) for _ in later)
        assert await asyncio.gather(*map(answers, later)) == [[expected([place + 100, 5], 40)] for place in range(20)]

    pooled(story, 2, "--token-seconds", "0.004")


def test_a_poisonous_request_kills_its_own_replica_three_times_and_no_other(tmp_path: Path) -> None:
    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        good = [ask(pool, [place + 1, 2, 3], 700) for place in range(12)]
        await proved(pool)
        bad = ask(pool, [1, POISON], 40)
        with pytest.raises(EngineDied, match="3 times with this request"):
            await answers(bad)
        found = await asyncio.gather(*map(answers, good))

        assert found == [[expected([place + 1, 2, 3], 700)] for place in range(12)]
        assert sorted(replica.restarts for replica in pool.replicas) == [0, 3]

    pooled(story, 2, "--poison", str(POISON), "--token-seconds", "0.002", "--diary", str(tmp_path / "diary"))


def test_a_replica_that_joins_under_load_gets_its_share_and_running_streams_stay(tmp_path: Path) -> None:
    come = tmp_path / "come"

    async def story(pool: EnginePool) -> None:
        await become(lambda: sum(replica.is_open for replica in pool.replicas) == 1)
        running = [ask(pool, [place + 1, 7], 2000) for place in range(8)]
        signal_to(next(one for one in pool.replicas if not one.is_open), 0)
        come.touch()
        await all_open(pool)
        joined = next(replica for replica in pool.replicas if not len(replica.client.live))
        later = [ask(pool, [place + 100, 7], 300) for place in range(16)]

        assert len(joined.client.live) >= 4
        assert pool.dispatcher.num_moved == 0
        assert await asyncio.gather(*map(answers, later)) == [[expected([place + 100, 7], 300)] for place in range(16)]
        for subscription in running:
            subscription.cancel()

    def one_and_one_that_comes_later() -> EnginePool:
        first, second = fake_pool("m"), fake_pool("m", "--load-until", str(come))
        pool = EnginePool([first.replicas[0].starter, second.replicas[0].starter], 60.0)
        pool.replicas[1].starter.name = "1"  # type: ignore[misc]
        return pool

    run_story(one_and_one_that_comes_later, story)


def test_replicas_are_renewed_one_after_the_other_under_streams_without_an_error() -> None:
    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        before = [replica.pid for replica in pool.replicas]
        prompts = [[place + 1, 50, 60] for place in range(32 if ALL else 8)]
        subscriptions = [ask(pool, prompt, 700) for prompt in prompts]
        reading = asyncio.gather(*map(answers, subscriptions))
        for replica in pool.replicas:
            await pool.renew(replica.name, 0.0)
            await become(lambda one=replica: one.restarts == 1 and one.is_open)  # type: ignore[misc]
        found = await reading

        assert found == [[expected(prompt, 700)] for prompt in prompts]
        assert pool.dispatcher.num_moved > 0
        assert not {*before} & {replica.pid for replica in pool.replicas}

    pooled(story, 3 if ALL else 2, *SLOW)


def test_while_all_replicas_are_gone_health_is_503_and_requests_wait(tmp_path: Path) -> None:
    come = tmp_path / "come"
    come.touch()
    make_pool = partial(fake_pool, num_replicas=2)
    with front({"m": ["--load-until", str(come)]}, make_pool=make_pool) as server:
        pool = server.service.models[0].pool
        until(lambda: all(replica.is_open for replica in pool.replicas))
        come.unlink()
        for replica in pool.replicas:
            signal_to(replica, signal.SIGKILL)
        until(lambda: server.get("/health").status_code == 503)
        come.touch()
        until(lambda: server.get("/health").status_code == 200)
        reply = server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4})

        assert reply.status_code == 200


def test_status_metrics_and_timings_tell_of_replicas() -> None:
    with front({"m": []}, make_pool=partial(fake_pool, num_replicas=2)) as server:
        until(lambda: all(replica.is_open for replica in server.service.models[0].pool.replicas))
        timings = server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4}).json()["timings"]
        (model,) = server.get("/v1/status").json()["models"]
        metrics = server.get("/metrics").text

        assert timings["replica"]["name"] in ("0", "1")
        assert {key: timings["replica"][key] for key in ("matched", "best_matched")} == {"matched": 0, "best_matched": 0}
        assert [(one["name"], one["status"]) for one in model["replicas"]] == [("0", "ready"), ("1", "ready")]
        assert model["moved"] == 0
        assert 'weft_replica_up{model="m",replica="1"} 1.0' in metrics
        assert 'weft_answers_moved_total{model="m"} 0.0' in metrics


def test_a_model_with_one_replica_does_not_speak_of_replicas() -> None:
    with front({"m": []}) as server:
        timings = server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4}).json()["timings"]
        (model,) = server.get("/v1/status").json()["models"]

        assert "replica" not in timings
        assert "replicas" not in model
        assert "weft_replica_up{" not in server.get("/metrics").text


def test_a_replica_of_another_model_is_refused_and_the_others_go_on() -> None:
    async def run() -> None:
        first, second = fake_pool("m"), fake_pool("m", "--folder", "/elsewhere")
        pool = EnginePool([first.replicas[0].starter, second.replicas[0].starter], 60.0)
        pool.replicas[0].start()
        try:
            await become(lambda: pool.replicas[0].is_open)
            pool.replicas[1].start()
            await become(lambda: pool.replicas[1].condition.failed)

            assert "/elsewhere" in (pool.replicas[1].condition.failed or "")
            assert pool.condition.ready is not None
            assert await answers(ask(pool, [1, 2], 3)) == [[1, 2, 1]]
        finally:
            await pool.stop()

    asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


def test_one_replica_s_failure_is_not_the_model_s_and_all_their_failures_are() -> None:
    async def story(pool: EnginePool) -> None:
        await become(lambda: pool.condition.failed)

        assert pool.condition.failed == "no such weights"

    pooled(story, 2, "--fail", "no such weights")


def test_a_killed_engine_s_next_is_not_started_before_its_answers_go_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serving.lifeline.MAX_HOLD_SECONDS", HANG_SECONDS)
    read, diary = tmp_path / "read", tmp_path / "diary"
    read.touch()

    async def story(pool: EnginePool) -> None:
        await all_open(pool)
        subscriptions = [ask(pool, [place + 1, 50, 60], 400) for place in range(8)]
        await proved(pool)
        read.unlink()
        signal_to(pool.replicas[0], signal.SIGKILL)
        await become(lambda: pool.replicas[0].condition.loading == HELD_BACK)
        num_started = len(diary.read_text().splitlines())
        read.touch()
        await asyncio.gather(*map(answers, subscriptions))
        await all_open(pool)

        assert num_started == 2
        assert len(diary.read_text().splitlines()) == 3

    pooled(story, 2, *SLOW, "--prompt-until", str(read), "--diary", str(diary))
