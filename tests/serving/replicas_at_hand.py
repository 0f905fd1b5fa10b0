"""Replicas without processes: what they are sent is kept, and the test says what they answer."""

from __future__ import annotations

from weft.ipc.limits import Sampling
from weft.ipc.messages import Cancel, EngineEvents, EngineStatus, Submit, ToEngine, TokenEvent
from weft.serving.dispatcher import Dispatcher
from weft.serving.in_flight import EngineClient, Subscription

GREEDY = Sampling(temperature=0.0, seed=1)


class AtHand:
    """A replica whose engine is the test."""

    def __init__(self, name: str, max_rows: int = 4) -> None:
        self.name = name
        self.client = EngineClient()
        self.status = EngineStatus()
        self.answer_seconds = 0.0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.max_rows = max_rows
        self.kind = "cpu"
        self.is_sick = self.is_lost = self.is_given_up = False
        self.heard: list[ToEngine] = []
        self.counted: list[tuple[int, int]] = []
        self.come()

    @property
    def is_open(self) -> bool:
        return self.client.send is not None and not self.is_sick and not self.is_given_up

    @property
    def is_gone(self) -> bool:
        return self.client.send is None or self.is_lost

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.counted.append((num_tokens, num_cached))

    def come(self) -> None:
        """Be there, with nothing in it."""
        self.heard = []
        self.client.attach(self.heard.append, self.max_rows)

    def crash(self) -> None:
        self.client.detach(is_crash=True)

    def be_killed(self) -> None:
        self.client.detach(is_crash=False)

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.heard if isinstance(message, Submit)]

    @property
    def cancelled(self) -> list[int]:
        return [number for message in self.heard if isinstance(message, Cancel) for number in message.numbers]

    @property
    def numbers(self) -> list[int]:
        """Of the sequences that are here and not ended."""
        return sorted(self.client.live.inside)


def dispatcher_of(*replicas: AtHand) -> Dispatcher:
    return Dispatcher(replicas, clock=lambda: 0.0)


def ask(dispatcher: Dispatcher, prompt: list[int], n: int = 1, client: str = "", priority: int = 0) -> Subscription:
    numbers = dispatcher.new_numbers(n)
    return dispatcher.submit([Submit(numbers, prompt, (GREEDY,) * n, client=client, priority=priority)])


def say(dispatcher: Dispatcher, replica: AtHand, number: int, *tokens: int, is_last: bool = False) -> None:
    """Have a replica emit tokens of a sequence, and end it."""
    events = [TokenEvent(number, token) for token in tokens]
    if is_last:
        events.append(TokenEvent(number, None, finish="length"))
    message = EngineEvents(tokens=events)
    replica.client.receive(message)
    dispatcher.receive(replica, message)
