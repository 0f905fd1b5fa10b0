"""Many requests over one channel: numbers go out, events come back to whoever waits for them.

Knows tickets and messages, nothing of text. Engines come and go under it: what one has not ended the next one gets. A
ticket always gets its end: the last event of each sequence, or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from weft.errors import EngineDied, EngineError, GrammarRejected, WeftError
from weft.ipc.messages import (
    AskPrefixes,
    Cancel,
    ConstraintSpec,
    EngineEvents,
    Prefixes,
    Sampling,
    Submit,
    SubmitOutcome,
    ToEngine,
    TokenEvent,
)
from weft.serving.in_flight import InFlight, InFlightRequest
from weft.serving.subscription import Subscription

ANSWER_SECONDS = 5.0  # for an engine to say what it keeps; a long step may be under way


class Sender(Protocol):
    """Takes messages to an engine."""

    def send(self, message: ToEngine) -> None:
        """Send and return at once."""


class EngineClient:
    """Owns who is waiting."""

    def __init__(self) -> None:
        self.live = InFlight()
        self.sender: Sender | None = None  # none while no engine is ready
        self._max_rows = 0
        self._num_ended = 0  # sequences that came to their end in this engine
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Prefixes]] = {}

    def submit(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[tuple[Sampling, ...]],
        constraints: Sequence[ConstraintSpec | None],
        boundaries: Sequence[tuple[int, ...]],
        salt: str = "",
        client: str = "",
        priority: int = 0,
        is_retained: bool = False,
    ) -> Subscription:
        """Ask for the answers of prompts, several to each; their places are counted through."""
        subscription = Subscription(sum(map(len, samplings)), self.cancel)
        for prompt, chosen, constraint, places in zip(prompts, samplings, constraints, boundaries, strict=True):
            numbers = tuple(itertools.islice(self._numbers, len(chosen)))
            for number in numbers:
                subscription.open[number] = len(subscription.open)
            subscription.num_judged += constraint is None
            seeded = tuple(map(_seeded, chosen))
            self.live.add(Submit(numbers, prompt, seeded, constraint, places, salt, client, priority, is_retained), subscription)
        self._send_due()
        return subscription

    def attach(self, sender: Sender, max_rows: int) -> None:
        """An engine is ready: it gets what waits for one."""
        self.sender, self._max_rows = sender, max_rows
        self._send_due()

    def detach(self) -> bool:
        """The engine is gone, and all that it had to say is heard: the next one goes on, with all but the culprit.

        Whether it was of use: some sequence came to its end, or much further, or is known now to be the culprit.
        """
        was_of_use = self._num_ended > 0 or any(live.has_proved for live in self.live.inside.values())
        self.sender, self._num_ended = None, 0
        culprit = self.live.died()
        self._fail_asked(lambda: EngineDied("the engine's process ended before it said what it keeps; try again in a moment"))
        if culprit is not None:
            message = f"the engine died {culprit.deaths} times with this request in it; it is not tried again"
            self._end(culprit.request.subscription, EngineDied(message))
        return was_of_use or culprit is not None

    def cancel(self, numbers: tuple[int, ...]) -> None:
        """Forget sequences, and tell the engine."""
        for number in numbers:
            if (live := self.live.drop(number)) is not None:
                live.request.subscription.open.pop(number, None)
        if numbers and self.sender is not None:
            self.sender.send(Cancel(numbers))
            self._send_due()  # others may have waited for one of them to prove itself

    async def prefixes(self, *, clear: bool = False) -> Prefixes:
        """What the engine keeps of computed prompts, after it has forgotten what it can where `clear` says so."""
        if self.sender is None:
            raise EngineDied("the engine is not there to say what it keeps; try again in a moment")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.sender.send(AskPrefixes(number, clear))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            message = f"the engine did not say within {ANSWER_SECONDS:g} seconds what it keeps; try again when it is less busy"
            raise EngineError(message) from None
        finally:
            del self._asked[number]

    def hear_prefixes(self, prefixes: Prefixes) -> None:
        """Give an answer to the one who asked, if he still waits."""
        answer = self._asked.get(prefixes.number)
        if answer is not None and not answer.done():
            answer.set_result(prefixes)

    def hear(self, events: EngineEvents) -> None:
        """Give events to those who wait for them; what nobody waits for is dropped."""
        for verdict in events.verdicts:
            if (live := self.live.inside.get(verdict.sequence)) is not None:
                self._judge(live.request, verdict)
        for prompt in events.prompts:
            if (live := self.live.inside.get(prompt.sequence)) is not None and live.take_prompt(prompt):
                live.request.subscription.put(live.number, prompt)
        for token in events.tokens:
            self._hand_out(token)
        self._send_due()

    def _hand_out(self, token: TokenEvent) -> None:
        if (live := self.live.inside.get(token.sequence)) is None:
            return
        live.request.subscription.put(live.number, live.take(token))
        if token.finish is not None:
            self.live.drop(live.number)
            self._num_ended += 1

    def _judge(self, request: InFlightRequest, verdict: SubmitOutcome) -> None:
        if verdict.refusal is not None:
            self._end(request.subscription, GrammarRejected(verdict.refusal, verdict.param))
        elif not request.is_taken:  # one that goes on in another engine was taken by the first
            request.is_taken = True
            request.subscription.accept()

    def _end(self, subscription: Subscription, error: WeftError) -> None:
        self.cancel(tuple(subscription.open))
        subscription.fail(error)

    def _send_due(self) -> None:
        if self.sender is not None:
            for submit in self.live.take_due(self._max_rows):
                self.sender.send(submit)

    def fail_all(self, error: Callable[[], WeftError]) -> None:
        """There will be no engine: everybody gets an error of their own."""
        self.sender = None
        for subscription in {live.request.subscription for live in self.live.take_all()}:
            subscription.fail(error())
        self._fail_asked(error)

    def _fail_asked(self, error: Callable[[], WeftError]) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error())


def _seeded(sampling: Sampling) -> Sampling:
    """With a seed of its own where none was asked for: an answer that goes on in another engine draws the same numbers."""
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=int.from_bytes(os.urandom(8), "little") >> 1)
