"""Measures how long the front's event loop keeps its tasks waiting: every stream, health check and heartbeat waits as long."""

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger("weft.serving")

TICK_SECONDS = 0.05
LOGGED_SECONDS = 1.0


async def watch_event_loop(observe: Callable[[float], None]) -> None:
    """Sleep again and again, and tell `observe` how much later than due each sleep ended, until cancelled."""
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        observe_stall(time.monotonic() - due, observe)


def observe_stall(seconds: float, observe: Callable[[float], None]) -> None:
    """Tell `observe` a stall, and what the ticks would have seen that fell into it: a long one counts as long as it took."""
    if seconds >= LOGGED_SECONDS:
        log.warning("the event loop stood still for %.1f s", seconds)
    observe(max(0.0, seconds))
    while (seconds := seconds - TICK_SECONDS) > 0:
        observe(seconds)
