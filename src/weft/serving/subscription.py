"""What one request waits for. It always gets its end: the last event of each sequence, or an error.

Knows numbers and events, neither channels nor text. The client fills it, the service reads it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from weft.errors import WeftError
from weft.ipc.messages import PromptEvent, TokenEvent

Event = PromptEvent | TokenEvent


class Subscription:
    """The events of a request's sequences, each with the sequence's place in the request."""

    def __init__(self, size: int, cancel: Callable[[tuple[int, ...]], None]) -> None:
        self.size = size
        self.open: dict[int, int] = {}  # number → place, of the sequences that have no end yet
        self.num_judged = 0  # of its prompts so many are taken for certain
        self.num_resumed = 0  # engines that died under it
        self._cancel = cancel
        self._pending: deque[tuple[int, Event]] = deque()
        self._error: WeftError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """Everything new, waiting for the first; nothing after `seconds` of silence. Raises what ended the request."""
        if not self._pending and self._error is None:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            alarm = loop.call_later(seconds, self._wake) if seconds is not None else None
            try:
                await waiter
            finally:
                self._waiter = None
                if alarm is not None:
                    alarm.cancel()
        if self._pending:
            events = list(self._pending)
            self._pending.clear()
            return events
        if self._error is not None:
            raise self._error
        return []

    async def until_taken(self, count: int) -> None:
        """Return when all `count` prompts are taken by the engine. Raises the refusal."""
        while self.num_judged < count:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def accept(self) -> None:
        """One more prompt is taken."""
        self.num_judged += 1
        self._wake()

    def cancel(self, place: int | None = None) -> None:
        """Nobody waits any more: for one place, or for all of it. Does nothing for what has ended."""
        self._cancel(tuple(number for number, at in self.open.items() if place in (None, at)))

    def put(self, number: int, event: Event) -> None:
        """An event has come."""
        self._pending.append((self.open[number], event))
        if isinstance(event, TokenEvent) and event.finish is not None:
            del self.open[number]
        self._wake()

    def fail(self, error: WeftError) -> None:
        """There will be no more events."""
        self.open.clear()
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
