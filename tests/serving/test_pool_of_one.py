"""A pool of one over engines that die, hang and fall silent: processes of their own, at the end of the real channel."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fronts import FAKE_ENGINE, fake_pool
from pools import run_story
from waiting import HANG_SECONDS
from weft.errors import EngineDied
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit, TokenEvent
from weft.serving.in_flight import Subscription
from weft.serving.lifeline import EngineCondition
from weft.serving.pool import EnginePool
from weft.serving.starters.here import Here

POISON = 666


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.lifeline.FIRST_PAUSE_SECONDS", 0.01)


def pooled(story: Callable[[EnginePool], Awaitable[None]], *words: str, hang_seconds: float = 60.0) -> None:
    """Tell a story about an engine with these words on its command line."""
    run_story(lambda: fake_pool("m", *words, hang_seconds=hang_seconds), story)


async def until(pool: EnginePool, is_so: Callable[[EngineCondition], bool]) -> None:
    while not is_so(pool.condition):
        await pool.changed.wait()


async def ready(pool: EnginePool) -> None:
    await until(pool, lambda condition: condition.ready is not None and not condition.is_sick)


def ask(pool: EnginePool, prompt: list[int], num_tokens: int) -> Subscription:
    requests, sampling = pool.dispatcher, Sampling(temperature=0.0, max_tokens=num_tokens)
    return requests.submit([Submit(requests.new_numbers(1), prompt, (sampling,))])


def set_command(pool: EnginePool, *command: str) -> None:
    """Have the next engine started by another command."""
    starter = pool.replicas[0].starter
    assert isinstance(starter, Here)
    starter.command = command


async def answer(subscription: Subscription) -> list[int]:
    """All tokens of its one sequence, to the end."""
    events: list[TokenEvent] = []
    while not events or events[-1].finish is None:
        events += [event for _, event in await subscription.take(HANG_SECONDS) if isinstance(event, TokenEvent)]
    return [event.token for event in events if event.token is not None]


def test_answers_survive_engines_that_die_again_and_again(tmp_path: Path) -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        subscriptions = [ask(pool, [place + 1, 50, 60], 200) for place in range(4)]
        answers = await asyncio.gather(*map(answer, subscriptions))

        assert answers == [([place + 1, 50, 60] * 67)[:200] for place in range(4)]
        assert pool.restarts == 6
        assert len(pool.dispatcher) == 0

    pooled(story, "--die-after", "100", "--deaths", "6", "--diary", str(tmp_path / "diary"))


def test_a_poisonous_request_fails_alone_and_takes_nobody_with_it(tmp_path: Path) -> None:
    diary = tmp_path / "diary"

    async def story(pool: EnginePool) -> None:
        await ready(pool)
        good = [ask(pool, [1, 2, 3], 40) for _ in range(3)]
        bad = ask(pool, [1, POISON], 40)
        good += [ask(pool, [1, 2, 3], 40) for _ in range(3)]
        with pytest.raises(EngineDied, match="times with this request"):
            await answer(bad)
        answers = await asyncio.gather(*map(answer, good))

        assert answers == [([1, 2, 3] * 14)[:40]] * 6
        assert len(diary.read_text().splitlines()) == 6  # it was alone in the last two of five

    pooled(story, "--poison", str(POISON), "--diary", str(diary), "--token-seconds", "0.002")


def test_more_poison_than_failures_are_allowed_does_not_end_the_pool() -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        bad = [ask(pool, [POISON], 40) for _ in range(5)]
        good = ask(pool, [1], 3)
        results = await asyncio.gather(*map(answer, bad), return_exceptions=True)

        assert all(isinstance(result, EngineDied) for result in results)
        assert await answer(good) == [1, 1, 1]
        assert pool.condition.failed is None

    pooled(story, "--poison", str(POISON))


def test_an_engine_that_hangs_is_killed_and_its_requests_go_on(tmp_path: Path) -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        before = pool.pid
        hung = ask(pool, [POISON, 7], 5)

        assert await answer(hung) == [POISON, 7, POISON, 7, POISON]
        assert pool.pid != before
        assert pool.restarts == 1

    words = ["--hang", str(POISON), "--deaths", "1", "--diary", str(tmp_path / "diary")]
    pooled(story, *words, hang_seconds=1.0)


def test_a_stopped_engine_is_sick_and_well_again_when_it_goes_on() -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        assert pool.pid is not None
        subscription = ask(pool, [1, 2], 2000)
        await subscription.take(HANG_SECONDS)
        os.kill(pool.pid, signal.SIGSTOP)
        await until(pool, lambda condition: condition.is_sick)
        assert pool.condition.ready is not None
        os.kill(pool.pid, signal.SIGCONT)
        await ready(pool)

        assert len(await answer(subscription)) > 1000
        assert pool.restarts == 0

    pooled(story)


def test_a_stopped_engine_that_stays_silent_is_replaced() -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        assert pool.pid is not None
        subscription = ask(pool, [1, 2, 3], 300)
        first = [event.token for _, event in await subscription.take(HANG_SECONDS) if isinstance(event, TokenEvent)]
        os.kill(pool.pid, signal.SIGSTOP)
        rest = await answer(subscription)

        assert [token for token in first if token] + rest == [1, 2, 3] * 100
        assert pool.restarts == 1

    pooled(story, "--token-seconds", "0.01", hang_seconds=2.0)


def test_an_engine_that_dies_whenever_it_is_ready_is_given_up_and_those_who_wait_are_told() -> None:
    async def story(pool: EnginePool) -> None:
        for life in range(5):
            await ready(pool)
            assert pool.pid is not None
            if life == 4:
                subscription = ask(pool, [1], 100)
            os.kill(pool.pid, signal.SIGKILL)
            await until(pool, lambda condition: condition.ready is None)
        with pytest.raises(EngineDied, match="no other goes on"):
            await answer(subscription)

        assert pool.condition.failed is not None
        assert "5 times" in pool.condition.failed

    pooled(story, "--prompt-until", "/never")


def test_an_engine_that_can_not_come_back_ends_what_waits_for_it() -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        assert pool.pid is not None
        subscription = ask(pool, [1], 10_000)
        set_command(pool, sys.executable, str(FAKE_ENGINE), "--fail", "the weights are gone", "m")
        os.kill(pool.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="the weights are gone"):
            await answer(subscription)

    pooled(story, "--token-seconds", "0.01")


def test_a_request_does_not_go_on_with_another_model() -> None:
    async def story(pool: EnginePool) -> None:
        await ready(pool)
        assert pool.pid is not None
        subscription = ask(pool, [1], 10_000)
        set_command(pool, sys.executable, str(FAKE_ENGINE), "--folder", "/elsewhere", "another")
        os.kill(pool.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="another is served now"):
            await answer(subscription)

    pooled(story, "--token-seconds", "0.01")


def test_those_who_wait_are_told_when_the_pool_is_stopped() -> None:
    subscriptions: list[Subscription] = []

    async def story(pool: EnginePool) -> None:
        await ready(pool)
        subscriptions.append(ask(pool, [1], 10_000))

    pooled(story, "--token-seconds", "0.01")
    with pytest.raises(EngineDied, match="the server is being stopped"):
        asyncio.run(answer(subscriptions[0]))
