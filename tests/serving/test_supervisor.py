"""A supervisor over engines that die, hang and fall silent: processes of their own, at the end of the real channel."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fronts import FAKE_ENGINE, fake_supervisor
from waiting import HANG_SECONDS
from weft.errors import EngineDied
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit, TokenEvent
from weft.serving.engine_process import EngineCondition, Supervisor
from weft.serving.in_flight import Subscription

POISON = 666


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.engine_process.FIRST_PAUSE_SECONDS", 0.01)


def supervised(story: Callable[[Supervisor], Awaitable[None]], *words: str, hang_seconds: float = 60.0) -> None:
    """Tell a story about an engine with these words on its command line."""

    async def run() -> None:
        supervisor = fake_supervisor("m", *words, hang_seconds=hang_seconds)
        supervisor.start()
        try:
            await asyncio.wait_for(story(supervisor), HANG_SECONDS)
        finally:
            await supervisor.stop()

    asyncio.run(run())


async def until(supervisor: Supervisor, is_so: Callable[[EngineCondition], bool]) -> None:
    while not is_so(supervisor.condition):
        await supervisor.changed.wait()


async def ready(supervisor: Supervisor) -> None:
    await until(supervisor, lambda condition: condition.ready is not None and not condition.is_sick)


def ask(supervisor: Supervisor, prompt: list[int], num_tokens: int) -> Subscription:
    client, sampling = supervisor.client, Sampling(temperature=0.0, max_tokens=num_tokens)
    return client.submit([Submit(client.new_numbers(1), prompt, (sampling,))])


async def answer(subscription: Subscription) -> list[int]:
    """All tokens of its one sequence, to the end."""
    events: list[TokenEvent] = []
    while not events or events[-1].finish is None:
        events += [event for _, event in await subscription.take(HANG_SECONDS) if isinstance(event, TokenEvent)]
    return [event.token for event in events if event.token is not None]


def test_answers_survive_engines_that_die_again_and_again(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        subscriptions = [ask(supervisor, [place + 1, 50, 60], 200) for place in range(4)]
        answers = await asyncio.gather(*map(answer, subscriptions))

        assert answers == [([place + 1, 50, 60] * 67)[:200] for place in range(4)]
        assert supervisor.restarts == 6
        assert len(supervisor.client.live) == 0

    supervised(story, "--die-after", "100", "--deaths", "6", "--diary", str(tmp_path / "diary"))


def test_a_poisonous_request_fails_alone_and_takes_nobody_with_it(tmp_path: Path) -> None:
    diary = tmp_path / "diary"

    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        good = [ask(supervisor, [1, 2, 3], 40) for _ in range(3)]
        bad = ask(supervisor, [1, POISON], 40)
        good += [ask(supervisor, [1, 2, 3], 40) for _ in range(3)]
        with pytest.raises(EngineDied, match="times with this request"):
            await answer(bad)
        answers = await asyncio.gather(*map(answer, good))

        assert answers == [([1, 2, 3] * 14)[:40]] * 6
        assert len(diary.read_text().splitlines()) == 6  # it was alone in the last two of five

    supervised(story, "--poison", str(POISON), "--diary", str(diary), "--token-seconds", "0.002")


def test_more_poison_than_failures_are_allowed_does_not_end_the_supervisor() -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        bad = [ask(supervisor, [POISON], 40) for _ in range(5)]
        good = ask(supervisor, [1], 3)
        results = await asyncio.gather(*map(answer, bad), return_exceptions=True)

        assert all(isinstance(result, EngineDied) for result in results)
        assert await answer(good) == [1, 1, 1]
        assert supervisor.condition.failed is None

    supervised(story, "--poison", str(POISON))


def test_an_engine_that_hangs_is_killed_and_its_requests_go_on(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        before = supervisor.pid
        hung = ask(supervisor, [POISON, 7], 5)

        assert await answer(hung) == [POISON, 7, POISON, 7, POISON]
        assert supervisor.pid != before
        assert supervisor.restarts == 1

    words = ["--hang", str(POISON), "--deaths", "1", "--diary", str(tmp_path / "diary")]
    supervised(story, *words, hang_seconds=1.0)


def test_a_stopped_engine_is_sick_and_well_again_when_it_goes_on() -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        assert supervisor.pid is not None
        subscription = ask(supervisor, [1, 2], 2000)
        await subscription.take(HANG_SECONDS)
        os.kill(supervisor.pid, signal.SIGSTOP)
        await until(supervisor, lambda condition: condition.is_sick)
        assert supervisor.condition.ready is not None
        os.kill(supervisor.pid, signal.SIGCONT)
        await ready(supervisor)

        assert len(await answer(subscription)) > 1000
        assert supervisor.restarts == 0

    supervised(story)


def test_a_stopped_engine_that_stays_silent_is_replaced() -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        assert supervisor.pid is not None
        subscription = ask(supervisor, [1, 2, 3], 300)
        first = [event.token for _, event in await subscription.take(HANG_SECONDS) if isinstance(event, TokenEvent)]
        os.kill(supervisor.pid, signal.SIGSTOP)
        rest = await answer(subscription)

        assert [token for token in first if token] + rest == [1, 2, 3] * 100
        assert supervisor.restarts == 1

    supervised(story, "--token-seconds", "0.01", hang_seconds=2.0)


def test_an_engine_that_dies_whenever_it_is_ready_is_given_up_and_those_who_wait_are_told() -> None:
    async def story(supervisor: Supervisor) -> None:
        for life in range(5):
            await ready(supervisor)
            assert supervisor.pid is not None
            if life == 4:
                subscription = ask(supervisor, [1], 100)
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(supervisor, lambda condition: condition.ready is None)
        with pytest.raises(EngineDied, match="no other goes on"):
            await answer(subscription)

        assert supervisor.condition.failed is not None
        assert "5 times" in supervisor.condition.failed

    supervised(story, "--prompt-until", "/never")


def test_an_engine_that_can_not_come_back_ends_what_waits_for_it() -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        assert supervisor.pid is not None
        subscription = ask(supervisor, [1], 10_000)
        supervisor.command = [sys.executable, str(FAKE_ENGINE), "--fail", "the weights are gone", "m"]
        os.kill(supervisor.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="the weights are gone"):
            await answer(subscription)

    supervised(story, "--token-seconds", "0.01")


def test_a_request_does_not_go_on_with_another_model() -> None:
    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        assert supervisor.pid is not None
        subscription = ask(supervisor, [1], 10_000)
        supervisor.command = [sys.executable, str(FAKE_ENGINE), "--folder", "/elsewhere", "another"]
        os.kill(supervisor.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="another is served now"):
            await answer(subscription)

    supervised(story, "--token-seconds", "0.01")


def test_those_who_wait_are_told_when_the_supervisor_is_stopped() -> None:
    subscriptions: list[Subscription] = []

    async def story(supervisor: Supervisor) -> None:
        await ready(supervisor)
        subscriptions.append(ask(supervisor, [1], 10_000))

    supervised(story, "--token-seconds", "0.01")
    with pytest.raises(EngineDied, match="the server is being stopped"):
        asyncio.run(answer(subscriptions[0]))
