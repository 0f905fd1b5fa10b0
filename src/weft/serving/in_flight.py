"""Every sequence without an end: what was asked, what was given so far, and when an engine may have it.

Knows numbers, tokens and deaths, neither channels nor processes; the client drives it. An engine that dies costs its
sequences a pause: the next one gets them again, with the tokens they were given, and goes on from there.

But one of them may be what killed it, and would kill every engine, and with it all the others again and again. So a
sequence that was in two engines that died, and had not given `PROOF_TOKENS` new tokens in either, is a suspect. Suspects
enter the next engine before all others and one at a time, each when the one before has proved itself by that many new
tokens or by its end. Whoever is on trial when an engine dies is the culprit, that being its third death: it alone fails.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from weft.ipc.messages import PromptEvent, Sampling, Submit, TokenEvent
from weft.serving.subscription import Subscription

SUSPECT_DEATHS = 2
PROOF_TOKENS = 16  # what kills an engine does so at its first step, or soon; a trial holds all others up


@dataclass(eq=False)
class InFlightRequest:
    """A prompt as it was asked for first, with all its answers."""

    submit: Submit
    subscription: Subscription
    is_taken: bool  # no verdict is waited for any more
    is_read: bool = False  # the log-probabilities of the prompt have come


@dataclass(eq=False)
class InFlightSequence:
    """One sequence that has no end yet."""

    number: int
    sampling: Sampling
    request: InFlightRequest
    given: list[int] = field(default_factory=list)
    num_before: int = 0  # of these, given by engines before the last one that had it
    deaths: int = 0  # of engines that had it, since it last proved itself

    @property
    def has_proved(self) -> bool:
        """Whether the engine that has it got a good part of its answer from it."""
        return len(self.given) - self.num_before >= PROOF_TOKENS

    def take(self, event: TokenEvent) -> TokenEvent:
        """Note a token. The first engine's timings stay: those of a later one are of another clock and another start."""
        if event.token is not None:
            self.given.append(event.token)
        if event.timings is not None and self.num_before:
            return msgspec.structs.replace(event, timings=None)
        return event

    def take_prompt(self, event: PromptEvent) -> bool:
        """Note how far a prompt is; whether that is news. Of an answer that goes on it is none."""
        self.request.is_read |= event.logprobs is not None
        return not self.given

    def struck(self) -> None:
        """Its engine died."""
        self.deaths = 1 if self.has_proved else self.deaths + 1
        self.num_before = len(self.given)


class InFlight:
    """Owns all sequences of one model that have no end yet."""

    def __init__(self) -> None:
        self.inside: dict[int, InFlightSequence] = {}  # an engine has them
        self.waiting: dict[int, InFlightSequence] = {}  # no engine has them
        self.suspect: InFlightSequence | None = None

    def __len__(self) -> int:
        return len(self.inside) + len(self.waiting)

    def add(self, submit: Submit, subscription: Subscription) -> None:
        """Somebody asks."""
        request = InFlightRequest(submit, subscription, is_taken=submit.constraint is None)
        for number, sampling in zip(submit.numbers, submit.samplings, strict=True):
            self.waiting[number] = InFlightSequence(number, sampling, request)

    def drop(self, number: int) -> InFlightSequence | None:
        """It has its end, or nobody waits for it any more."""
        return self.inside.pop(number, None) or self.waiting.pop(number, None)

    def take_due(self, max_rows: int) -> list[Submit]:
        """What an engine with so many rows is to be sent now."""
        if not self.waiting or self._is_trial_open:
            return []
        suspect = next((live for live in self.waiting.values() if live.deaths >= SUSPECT_DEATHS), None)
        if suspect is None:
            due = list(self.waiting.values())
        elif len(self.inside) < max_rows:  # else it would wait in there, and be blamed for what it had no part in
            due = [suspect]
        else:
            return []
        self.suspect = suspect
        for live in due:
            self.inside[live.number] = self.waiting.pop(live.number)
        return [_submit(list(group)) for _, group in itertools.groupby(due, lambda live: id(live.request))]

    def died(self) -> InFlightSequence | None:
        """The engine is gone: all wait for the next one, but for the culprit where there is one; that is handed out."""
        culprit = self.suspect if self._is_trial_open else None
        self.suspect = None
        for subscription in {live.request.subscription for live in self.inside.values()}:
            subscription.num_resumed += 1
        for live in self.inside.values():
            live.struck()
        self.waiting = dict(sorted((self.inside | self.waiting).items()))
        self.inside = {}
        if culprit is not None:
            del self.waiting[culprit.number]
        return culprit

    def take_all(self) -> list[InFlightSequence]:
        """Everybody; nobody is left."""
        everybody = [*self.inside.values(), *self.waiting.values()]
        self.inside, self.waiting, self.suspect = {}, {}, None
        return everybody

    @property
    def _is_trial_open(self) -> bool:
        suspect = self.suspect
        return suspect is not None and suspect.number in self.inside and not suspect.has_proved


def _submit(siblings: list[InFlightSequence]) -> Submit:
    """What was asked, for these answers of it, with what each was given."""
    request, given = siblings[0].request, tuple(tuple(live.given) for live in siblings)
    return msgspec.structs.replace(
        request.submit,
        numbers=tuple(live.number for live in siblings),
        samplings=tuple(_unread(live.sampling) if request.is_read or live.given else live.sampling for live in siblings),
        given=given if any(given) else (),
    )


def _unread(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, prompt_logprobs=None)
