"""Asking a pool of engines without HTTP, and waiting for its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from waiting import HANG_SECONDS
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit, TokenEvent
from weft.serving.in_flight import Subscription
from weft.serving.pool import EnginePool


def run_story(make_pool: Callable[[], EnginePool], story: Callable[[EnginePool], Awaitable[None]]) -> None:
    """Start a pool, let the story happen within the time that anything may take, and stop the pool."""

    async def run() -> None:
        pool = make_pool()
        pool.start()
        try:
            await asyncio.wait_for(story(pool), HANG_SECONDS)
        finally:
            await pool.stop()

    asyncio.run(run())


async def become(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


async def all_open(pool: EnginePool) -> None:
    await become(lambda: all(replica.is_open for replica in pool.replicas))


def ask(pool: EnginePool, prompt: list[int], num_tokens: int, n: int = 1) -> Subscription:
    requests, sampling = pool.dispatcher, Sampling(temperature=0.0, max_tokens=num_tokens)
    return requests.submit([Submit(requests.new_numbers(n), prompt, (sampling,) * n)])


async def answers(subscription: Subscription) -> list[list[int]]:
    """All tokens of each of its sequences, to their ends."""
    found: dict[int, list[int]] = {}
    left = len(subscription.submits[0].samplings)
    while left:
        for index, event in await subscription.take(HANG_SECONDS):
            if isinstance(event, TokenEvent):
                found.setdefault(index, []).extend([] if event.token is None else [event.token])
                left -= event.finish is not None
    return [found[index] for index in sorted(found)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return [prompt[at % len(prompt)] for at in range(num_tokens)]


async def proved(pool: EnginePool) -> None:
    """All sequences have proved themselves where they are."""
    await become(lambda: all(one.has_proved for replica in pool.replicas for one in replica.client.live.inside.values()))
