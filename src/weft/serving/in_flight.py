"""Requests in flight: who waits for which sequence, what it has emitted, and when an engine may have it.

Engines come and go: what one has not ended the next one gets again, with the tokens emitted so far, and goes on from there.
Every subscription gets its end: the last event of each sequence, or an error. Knows ids and messages, nothing of text.

One request may be what kills the engines, and would kill every next one and with it all others again and again. So a
sequence that was in two engines that died, without `PROOF_TOKENS` new tokens in either, is a suspect. Suspects enter the next
engine before all others and one at a time, each when the one before has proved itself by that many tokens or by its end.
Whoever is in such a trial when an engine dies is the culprit: it alone fails.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from weft.errors import EngineDied, EngineError, GrammarRejected, WeftError
from weft.ipc.limits import Sampling
from weft.ipc.messages import (
    AskPrefixes,
    Cancel,
    EngineEvents,
    Prefixes,
    PromptEvent,
    Submit,
    SubmitOutcome,
    ToEngine,
    TokenEvent,
)

SUSPECT_DEATHS = 2
PROOF_TOKENS = 16  # what kills an engine does so at its first step, or soon; a trial holds all others up
ANSWER_SECONDS = 5.0  # for an engine to list its prefixes; a long step may be under way

Event = PromptEvent | TokenEvent


class Subscription:
    """The events of one request's sequences, each with its choice index; read by one task."""

    def __init__(self, num_prompts: int, cancel: Callable[[tuple[int, ...]], None]) -> None:
        self.num_prompts = num_prompts
        self.open: dict[int, int] = {}  # sequence number → choice index, of the sequences that have not ended
        self.num_accepted = 0  # prompts that the engine has accepted for certain
        self.num_resumed = 0  # engines that died under it
        self._cancel = cancel
        self._pending: deque[tuple[int, Event]] = deque()
        self._error: WeftError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """All new events, waiting for the first; none after `seconds` of silence. Raises what ended the request."""
        if not self._pending and self._error is None:
            loop = asyncio.get_running_loop()
            alarm = loop.call_later(seconds, self._wake) if seconds is not None else None
            try:
                await self._wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
        if self._pending:
            events = list(self._pending)
            self._pending.clear()
            return events
        if self._error is not None:
            raise self._error
        return []

    async def until_accepted(self) -> None:
        """Return when the engine has accepted every prompt. Raises the refusal."""
        while self.num_accepted < self.num_prompts:
            if self._error is not None:
                raise self._error
            await self._wait()

    def accept(self) -> None:
        self.num_accepted += 1
        self._wake()

    def cancel(self, index: int | None = None) -> None:
        """Cancel one choice, or all of them; does nothing for those that have ended."""
        self._cancel(tuple(number for number, at in self.open.items() if index in (None, at)))

    def put(self, number: int, event: Event) -> None:
        self._pending.append((self.open[number], event))
        if isinstance(event, TokenEvent) and event.finish is not None:
            del self.open[number]
        self._wake()

    def fail(self, error: WeftError) -> None:
        """End it: whoever takes gets this error once the pending events are read."""
        self.open.clear()
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(eq=False)
class InFlightRequest:
    """A prompt as it was first submitted, with all its answers."""

    submit: Submit
    subscription: Subscription
    is_accepted: bool  # no outcome is waited for any more
    is_read: bool = False  # the prompt's log-probabilities have come


@dataclass(eq=False)
class InFlightSequence:
    """One sequence that has not ended."""

    number: int
    sampling: Sampling
    request: InFlightRequest
    emitted: list[int] = field(default_factory=list)
    num_before: int = 0  # tokens emitted by engines before the last one that had it
    deaths: int = 0  # of engines that had it, since it last proved itself

    @property
    def has_proved(self) -> bool:
        """Whether the engine that has it has emitted a good number of its tokens."""
        return len(self.emitted) - self.num_before >= PROOF_TOKENS

    def take_token(self, event: TokenEvent) -> TokenEvent:
        """Note an emitted token. Timings of a later engine are dropped: they are of another clock and another start."""
        if event.token is not None:
            self.emitted.append(event.token)
        if event.timings is not None and self.num_before:
            return msgspec.structs.replace(event, timings=None)
        return event

    def take_prompt(self, event: PromptEvent) -> bool:
        """Note a prompt's progress; whether that is news to the client, which it is not for a resumed answer."""
        self.request.is_read |= event.logprobs is not None
        return not self.emitted

    def note_death(self) -> None:
        """Count the death of the engine that had it."""
        self.deaths = 1 if self.has_proved else self.deaths + 1
        self.num_before = len(self.emitted)


class InFlight:
    """Owns all sequences of one model that have not ended, and decides when an engine gets them."""

    def __init__(self) -> None:
        self.inside: dict[int, InFlightSequence] = {}  # an engine has them
        self.waiting: dict[int, InFlightSequence] = {}  # no engine has them
        self.suspect: InFlightSequence | None = None  # whose trial was begun last

    def __len__(self) -> int:
        return len(self.inside) + len(self.waiting)

    def add(self, submit: Submit, subscription: Subscription) -> None:
        request = InFlightRequest(submit, subscription, is_accepted=submit.constraint is None)
        for number, sampling in zip(submit.numbers, submit.samplings, strict=True):
            self.waiting[number] = InFlightSequence(number, sampling, request)

    def drop(self, number: int) -> InFlightSequence | None:
        """Remove a sequence that has ended or that nobody waits for."""
        return self.inside.pop(number, None) or self.waiting.pop(number, None)

    def take_due(self, max_rows: int) -> list[Submit]:
        """The messages that an engine with so many rows is to be sent now."""
        if not self.waiting or self._is_trial_open:
            return []
        suspect = next((one for one in self.waiting.values() if one.deaths >= SUSPECT_DEATHS), None)
        if suspect is None:
            due = list(self.waiting.values())
        elif len(self.inside) < max_rows:  # else it would wait in there, and be blamed for what it had no part in
            due = [suspect]
        else:
            return []
        self.suspect = suspect
        for one in due:
            self.inside[one.number] = self.waiting.pop(one.number)
        return [_resubmit(list(group)) for _, group in itertools.groupby(due, lambda one: id(one.request))]

    def take_dead(self) -> InFlightSequence | None:
        """Let all sequences wait for the next engine after a death; removes and returns the culprit, if there is one."""
        culprit = self.suspect if self._is_trial_open else None
        self.suspect = None
        for subscription in {one.request.subscription for one in self.inside.values()}:
            subscription.num_resumed += 1
        for one in self.inside.values():
            one.note_death()
        self.waiting = dict(sorted((self.inside | self.waiting).items()))
        self.inside = {}
        if culprit is not None:
            del self.waiting[culprit.number]
        return culprit

    def take_all(self) -> list[InFlightSequence]:
        everybody = [*self.inside.values(), *self.waiting.values()]
        self.inside, self.waiting, self.suspect = {}, {}, None
        return everybody

    @property
    def _is_trial_open(self) -> bool:
        suspect = self.suspect
        return suspect is not None and suspect.number in self.inside and not suspect.has_proved


def _resubmit(siblings: list[InFlightSequence]) -> Submit:
    """The message for these answers to one prompt: the original one, or for a resume with what each has emitted."""
    request, emitted = siblings[0].request, tuple(tuple(one.emitted) for one in siblings)
    if not any(emitted) and not request.is_read and len(siblings) == len(request.submit.numbers):
        return request.submit
    return msgspec.structs.replace(
        request.submit,
        numbers=tuple(one.number for one in siblings),
        samplings=tuple(_without_prompt(one.sampling) if request.is_read or one.emitted else one.sampling for one in siblings),
        emitted=emitted if any(emitted) else (),
    )


def _without_prompt(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, prompt_logprobs=None)


class Sender(Protocol):
    """Takes messages to an engine."""

    def send(self, message: ToEngine) -> None: ...


class EngineClient:
    """One model's requests over the channel to whichever engine serves it now."""

    def __init__(self) -> None:
        self.live = InFlight()
        self.sender: Sender | None = None  # none while no engine is ready
        self._max_rows = 0
        self._num_ended = 0  # sequences that ended in this engine
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Prefixes]] = {}

    def new_numbers(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._numbers, count))

    def submit(self, prompts: Sequence[Submit]) -> Subscription:
        """Submit the prompts of one request; their answers are counted through as its choices."""
        subscription = Subscription(len(prompts), self.cancel)
        for prompt in prompts:
            for number in prompt.numbers:
                subscription.open[number] = len(subscription.open)
            subscription.num_accepted += prompt.constraint is None
            self.live.add(prompt, subscription)
        self._send_due()
        return subscription

    def attach(self, sender: Sender, max_rows: int) -> None:
        """Send an engine that is ready what waits for one."""
        self.sender, self._max_rows = sender, max_rows
        self._send_due()

    def detach(self) -> bool:
        """Take all but the culprit back from an engine that is gone, after all its messages were received.

        Returns whether the engine was of use: a sequence ended or got much further in it, or is now known as the culprit.
        """
        was_of_use = self._num_ended > 0 or any(one.has_proved for one in self.live.inside.values())
        self.sender, self._num_ended = None, 0
        culprit = self.live.take_dead()
        self._fail_asked(lambda: EngineDied("the engine's process ended before it said what it keeps; try again in a moment"))
        if culprit is not None:
            message = f"the engine died {culprit.deaths} times with this request in it; it is not tried again"
            self._end(culprit.request.subscription, EngineDied(message))
        return was_of_use or culprit is not None

    def cancel(self, numbers: tuple[int, ...]) -> None:
        """Drop sequences that nobody waits for, here and in the engine."""
        for number in numbers:
            if (one := self.live.drop(number)) is not None:
                one.request.subscription.open.pop(number, None)
        if numbers and self.sender is not None:
            self.sender.send(Cancel(numbers))
            self._send_due()  # others may have waited for one of them to prove itself

    async def prefixes(self, *, clear: bool = False) -> Prefixes:
        """The engine's cached prefixes, after it has evicted what it can where `clear` says so."""
        if self.sender is None:
            raise EngineDied("the engine is not there to say what it keeps; try again in a moment")
        (number,) = self.new_numbers(1)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.sender.send(AskPrefixes(number, clear))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            message = f"the engine did not say within {ANSWER_SECONDS:g} seconds what it keeps; try again when it is less busy"
            raise EngineError(message) from None
        finally:
            del self._asked[number]

    def receive_prefixes(self, prefixes: Prefixes) -> None:
        """Give an answer to the task that asked for it, if it still waits."""
        answer = self._asked.get(prefixes.number)
        if answer is not None and not answer.done():
            answer.set_result(prefixes)

    def receive(self, events: EngineEvents) -> None:
        """Give events to their subscriptions; those of sequences that nobody waits for are dropped."""
        for outcome in events.outcomes:
            if (one := self.live.inside.get(outcome.sequence)) is not None:
                self._take_outcome(one.request, outcome)
        for prompt in events.prompts:
            if (one := self.live.inside.get(prompt.sequence)) is not None and one.take_prompt(prompt):
                one.request.subscription.put(one.number, prompt)
        for token in events.tokens:
            if (one := self.live.inside.get(token.sequence)) is None:
                continue
            one.request.subscription.put(one.number, one.take_token(token))
            if token.finish is not None:
                self.live.drop(one.number)
                self._num_ended += 1
        self._send_due()

    def fail_all(self, error: Callable[[], WeftError]) -> None:
        """End every request with an error of its own: there will be no engine."""
        self.sender = None
        for subscription in {one.request.subscription for one in self.live.take_all()}:
            subscription.fail(error())
        self._fail_asked(error)

    def _take_outcome(self, request: InFlightRequest, outcome: SubmitOutcome) -> None:
        if outcome.refusal is not None:
            self._end(request.subscription, GrammarRejected(outcome.refusal, outcome.param))
        elif not request.is_accepted:  # a resumed one was accepted by the first engine
            request.is_accepted = True
            request.subscription.accept()

    def _end(self, subscription: Subscription, error: WeftError) -> None:
        self.cancel(tuple(subscription.open))
        subscription.fail(error)

    def _send_due(self) -> None:
        if self.sender is not None:
            for submit in self.live.take_due(self._max_rows):
                self.sender.send(submit)

    def _fail_asked(self, error: Callable[[], WeftError]) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error())
