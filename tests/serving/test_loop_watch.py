"""The watch over the event loop: what it tells of a stall."""

from __future__ import annotations

import asyncio
import logging

import pytest

from weft.metrics import Metrics
from weft.serving.loop_watch import TICK_SECONDS, observe_stall, watch_event_loop


def test_a_long_stall_counts_as_long_as_it_took() -> None:
    seen: list[float] = []
    observe_stall(9.5 * TICK_SECONDS, seen.append)

    assert len(seen) == 10
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 9.5 * TICK_SECONDS


def test_a_loop_in_time_counts_once() -> None:
    seen: list[float] = []
    observe_stall(-0.001, seen.append)

    assert seen == [0.0]


def test_a_stall_that_people_notice_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        observe_stall(2.5, lambda _: None)

    assert "stood still for 2.5 s" in caplog.text


def test_the_watch_exports_what_it_sees() -> None:
    metrics = Metrics()

    async def watch_once() -> None:
        seen = asyncio.Event()

        def observe(seconds: float) -> None:
            metrics.loop_stall(seconds)
            seen.set()

        task = asyncio.create_task(watch_event_loop(observe))
        await seen.wait()
        task.cancel()

    asyncio.run(watch_once())

    assert b"weft_event_loop_stall_seconds_count 0.0" not in metrics.render()
