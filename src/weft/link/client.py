"""Many requests over one channel: numbers go out, events come back to whoever waits for them.

Knows tickets and messages, nothing of text. A ticket always gets its end: the last event of each sequence, or an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from weft.errors import GrammarRejected, WeftError
from weft.wire import Cancel, ConstraintSpec, Events, PromptEvent, Sampling, Submit, ToEngine, TokenEvent, Verdict

Event = PromptEvent | TokenEvent


class Sender(Protocol):
    """Takes messages to an engine."""

    def send(self, message: ToEngine) -> None:
        """Send and return at once."""


class Ticket:
    """What one request waits for: the events of its sequences, each with the sequence's place in the request."""

    def __init__(self, client: Client, size: int) -> None:
        self.client = client
        self.size = size
        self.open: dict[int, int] = {}  # number → place, of the sequences that have no end yet
        self.num_judged = 0  # of its prompts so many are taken for certain
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
        numbers = tuple(number for number, at in self.open.items() if place in (None, at))
        self.client.cancel(numbers)

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


class Client:
    """Owns who is waiting."""

    def __init__(self) -> None:
        self.live: dict[int, Ticket] = {}
        self.sender: Sender | None = None  # none while no engine is ready
        self._numbers = itertools.count()

    def submit(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[tuple[Sampling, ...]],
        constraints: Sequence[ConstraintSpec | None],
        boundaries: Sequence[tuple[int, ...]],
    ) -> Ticket:
        """Ask for the answers of prompts, several to each; their places are counted through."""
        assert self.sender is not None, "the service asks only engines that are ready"
        ticket = Ticket(self, sum(map(len, samplings)))
        for prompt, chosen, constraint, places in zip(prompts, samplings, constraints, boundaries, strict=True):
            numbers = tuple(itertools.islice(self._numbers, len(chosen)))
            for number in numbers:
                ticket.open[number] = len(ticket.open)
                self.live[number] = ticket
            ticket.num_judged += constraint is None
            self.sender.send(Submit(numbers, prompt, chosen, constraint, places))
        return ticket

    def cancel(self, numbers: tuple[int, ...]) -> None:
        """Forget sequences, and tell the engine."""
        for number in numbers:
            if (ticket := self.live.pop(number, None)) is not None:
                ticket.open.pop(number, None)
        if numbers and self.sender is not None:
            self.sender.send(Cancel(numbers))

    def hear(self, events: Events) -> None:
        """Give events to those who wait for them; what nobody waits for is dropped."""
        for verdict in events.verdicts:
            if (ticket := self.live.get(verdict.sequence)) is not None:
                self._judge(ticket, verdict)
        for prompt in events.prompts:
            if (ticket := self.live.get(prompt.sequence)) is not None:
                ticket.put(prompt.sequence, prompt)
        for token in events.tokens:
            if (ticket := self.live.get(token.sequence)) is not None:
                ticket.put(token.sequence, token)
                if token.finish is not None:
                    del self.live[token.sequence]

    def _judge(self, ticket: Ticket, verdict: Verdict) -> None:
        if verdict.refusal is None:
            ticket.accept()
        else:
            self.cancel(tuple(ticket.open))
            ticket.fail(GrammarRejected(verdict.refusal, verdict.param))

    def fail_all(self, error: Callable[[], WeftError]) -> None:
        """The engine is gone: everybody gets an error of their own."""
        tickets = set(self.live.values())
        self.live.clear()
        self.sender = None
        for ticket in tickets:
            ticket.fail(error())
