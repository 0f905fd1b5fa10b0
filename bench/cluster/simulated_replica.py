"""Simulated machines: an engine each, seen by every front as a replica of its own, with its own numbers of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from bench.cluster.simulated import SimulatedEngine
from weft.ipc.messages import Cancel, EngineEvents, EngineStatus, PromptEvent, Submit, ToEngine, TokenEvent
from weft.serving.in_flight import EngineClient

Event = TypeVar("Event", PromptEvent, TokenEvent)


class SimulatedReplica:
    """A machine's engine as one front's dispatcher sees it."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.name = machine.name
        self.kind = "simulated"
        self.client = EngineClient()
        self.answer_seconds = 0.0
        self.status = EngineStatus()
        self.is_given_up = False
        self.num_prompt_tokens = self.num_cached_tokens = 0

    @property
    def max_rows(self) -> int:
        engine = self.machine.engine
        return 0 if engine is None else engine.scheduler.config.max_rows

    @property
    def is_open(self) -> bool:
        return self.machine.engine is not None

    @property
    def is_gone(self) -> bool:
        return self.machine.engine is None

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached


class SimulatedMachine:
    """One engine, killed and started by the simulation, and how each front sees it."""

    def __init__(
        self, name: str, make: Callable[[], SimulatedEngine], num_fronts: int, wake: Callable[[SimulatedMachine], None]
    ) -> None:
        self.name = name
        self.make = make
        self.wake = wake  # called when it has something to do
        self.engine: SimulatedEngine | None = None
        self.inbox: list[ToEngine] = []
        self.views = [SimulatedReplica(self) for _ in range(num_fronts)]

    def begin(self, now: float) -> None:
        self.engine = self.make()
        self.engine.now = now
        for place, view in enumerate(self.views):
            view.client.attach(self._sender(place), self.engine.scheduler.config.max_rows)

    def die(self) -> None:
        self.engine, self.inbox = None, []
        for view in self.views:
            view.status = EngineStatus()
            view.client.detach(is_crash=False)

    def take_inbox(self, now: float) -> None:
        """Hand messages to the engine, which was idle until now or is between two turns."""
        assert self.engine is not None
        self.engine.now = max(self.engine.now, now)
        messages, self.inbox[:] = list(self.inbox), []
        for message in messages:
            self.engine.take(message)

    def shares(self, events: EngineEvents) -> Iterator[EngineEvents]:
        """Yield each front's part of what the engine says, in that front's numbers; what is cached is told to all."""
        count = len(self.views)
        for place in range(count):
            prompts = [_renumbered(one, count) for one in events.prompts if one.sequence % count == place]
            tokens = [_renumbered(one, count) for one in events.tokens if one.sequence % count == place]
            yield EngineEvents([], prompts, tokens, events.status, events.kept, events.gone)

    def _sender(self, place: int) -> Callable[[ToEngine], None]:
        count = len(self.views)

        def send(message: ToEngine) -> None:
            assert isinstance(message, Submit | Cancel)
            numbers = tuple(number * count + place for number in message.numbers)
            self.inbox.append(msgspec.structs.replace(message, numbers=numbers))
            self.wake(self)

        return send


def _renumbered(event: Event, num_fronts: int) -> Event:
    return msgspec.structs.replace(event, sequence=event.sequence // num_fronts)
