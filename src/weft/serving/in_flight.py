"""Requests in flight: which request waits for which sequence, what each has emitted, and when an engine is sent it.

When an engine dies, the next one is sent its unfinished sequences with the tokens emitted so far, and continues them.
Every subscription ends: with the last event of each sequence, or with an error. There is a table for each replica of a model;
sequences may move to another replica's (`serving/dispatcher.py`), but for those that are confined to theirs.

A single request may be the cause that engines die, and would make every further engine die with all requests in it. So a
sequence that was in two engines that died, without `PROOF_TOKENS` new tokens in either, is a suspect. Suspects enter the next
engine before all other sequences and one at a time: each is on trial until it has emitted that many tokens or has ended.
Suspects are confined to the replica where they became such. Where a model has several replicas, whoever had not proved itself
in an engine that crashed, and was not killed from outside, is a suspect at once.
A suspect with three such engines, alone in two of them, is the culprit, and it alone fails: something else may kill engines too.
Among several replicas, an engine that was killed from outside counts half: there a restart costs the others nothing.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from weft.errors import EngineDied, EngineError, GrammarRejected, WeftError
from weft.ipc.messages import AskPrefixes, Cancel, EngineEvents, Prefixes, PromptEvent, Submit, Timings, ToEngine, TokenEvent
from weft.text.types import Placement

SUSPECT_DEATHS = 2
DEATHS_ALONE = 2  # of engines that had nothing but the suspect, to blame it
KILLED_SHARE = 0.5  # of such a death, where the engine was one of several and others may have killed it
PROOF_TOKENS = 16  # what kills an engine does so at its first step, or soon; a trial holds all others up
ANSWER_SECONDS = 5.0  # for an engine to list its prefixes; a long step may be under way

Event = PromptEvent | TokenEvent


class Subscription:
    """The prompts of one request, and a queue of its sequences' events with their choice index; read by one task."""

    def __init__(self, submits: Sequence[Submit], cancel: Callable[[tuple[int, ...]], None]) -> None:
        numbers = [number for submit in submits for number in submit.numbers]
        self.submits = list(submits)  # one for each prompt, as an engine would get it to begin anew
        self.open = {number: index for index, number in enumerate(numbers)}  # choices of the sequences that have not ended
        self.unaccepted = {index for index, submit in enumerate(submits) if submit.constraint is not None}  # prompts to be judged
        self.num_resumed = 0  # engines that died under it, or that it was moved away from
        self.placements: dict[int, Placement] = {}  # by prompt, where it was sent first; empty while the model has one replica
        self._cancel = cancel
        self._pending: list[tuple[int, Event]] = []
        self._error: WeftError | None = None
        self._news = asyncio.Event()

    async def take(self, seconds: float) -> list[tuple[int, Event]]:
        """Return all new events, waiting up to `seconds` for the first; empty if none came. Raises the request's error."""
        if not self._pending and self._error is None:
            self._news.clear()
            alarm = asyncio.get_running_loop().call_later(seconds, self._news.set)
            try:
                await self._news.wait()
            finally:
                alarm.cancel()
        if self._error is not None and not self._pending:
            raise self._error
        events, self._pending = self._pending, []
        return events

    async def until_accepted(self) -> None:
        """Wait until the engine has accepted every prompt with a constraint; raise the error if one is refused."""
        while self.unaccepted:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    def renumber(self, before: int, after: int) -> None:
        self.open = {after if number == before else number: index for number, index in self.open.items()}

    def accept(self, prompt_index: int) -> None:
        self.unaccepted.discard(prompt_index)
        self._news.set()

    def cancel(self, index: int | None = None) -> None:
        """Cancel the choice with this index, or all choices if it is None; choices that have ended are not affected."""
        self._cancel(tuple(number for number, at in self.open.items() if index in (None, at)))

    def put(self, number: int, event: Event) -> None:
        self._pending.append((self.open[number], event))
        if isinstance(event, TokenEvent) and event.finish is not None:
            del self.open[number]
        self._news.set()

    def fail(self, error: WeftError) -> None:
        """End the request with an error, which `take` raises once the pending events are read."""
        self.open.clear()
        self._error = error
        self._news.set()


@dataclass(eq=False)
class InFlightSequence:
    """One unfinished sequence: its request, the tokens emitted so far, and the engines that died while they ran it."""

    number: int
    subscription: Subscription
    prompt_index: int  # among the request's prompts
    sampling_index: int  # among the samplings for that prompt
    emitted: list[int] = field(default_factory=list)
    num_before: int = 0  # tokens emitted by engines before the last one that had it
    deaths: int = 0  # of engines that had it, since it last proved itself
    deaths_alone: float = 0  # those of engines that had nothing else
    timings: Timings | None = None  # from the first engine that emitted a token
    is_confined: bool = False  # it may be the cause of its last engine's death, and stays where it is
    num_uncached: int = 0  # prompt tokens that its replica had to compute, as it was thought when it was sent there
    num_computed: int = 0  # prompt tokens that its replica has
    sent_at: float = 0.0  # to its replica
    kind: str = ""  # of the replica's device and versions

    @property
    def submit(self) -> Submit:
        """The Submit of its prompt, as an engine would get it to begin anew."""
        return self.subscription.submits[self.prompt_index]

    @property
    def has_begun(self) -> bool:
        """Whether its current engine has emitted a token of it, so that its prompt is computed there."""
        return len(self.emitted) > self.num_before

    @property
    def has_proved(self) -> bool:
        """Whether the current engine has emitted at least PROOF_TOKENS tokens of the sequence."""
        return len(self.emitted) - self.num_before >= PROOF_TOKENS

    def take_token(self, event: TokenEvent) -> TokenEvent:
        """Record an emitted token and return its event; times of a later engine are replaced by those of the first one."""
        if event.token is not None:
            self.emitted.append(event.token)
        if event.timings is None or not self.num_before:
            self.timings = event.timings or self.timings
            return event
        drafts, timings = event.timings.drafts, None
        if drafts is not None and self.timings is not None:  # drafts are all that a later engine adds
            timings = msgspec.structs.replace(self.timings, drafts=drafts)
        return msgspec.structs.replace(event, timings=timings)

    def take_prompt(self, event: PromptEvent) -> bool:
        """Drop the request for prompt logprobs once they come; return whether to forward the event: False after a first token."""
        self.num_computed = event.computed
        if event.logprobs is not None:  # no later engine need compute them again
            submit = self.submit
            samplings = tuple(msgspec.structs.replace(sampling, prompt_logprobs=None) for sampling in submit.samplings)
            self.subscription.submits[self.prompt_index] = msgspec.structs.replace(submit, samplings=samplings)
        return not self.emitted

    @property
    def is_almost_suspect(self) -> bool:
        """Whether it becomes a suspect if its engine dies now."""
        return not self.has_proved and self.deaths + 1 >= SUSPECT_DEATHS

    @property
    def suspicion(self) -> tuple[float, int, int, int]:
        """How much speaks for its being the cause: deaths alone, deaths, how few tokens it has emitted, how new it is."""
        return self.deaths_alone, self.deaths, -len(self.emitted), self.number

    def note_death(self, *, is_crash: bool, is_alone: bool, confines: bool) -> None:
        """Note that its engine died. Where that `confines`, it stays if it may be the cause: after a crash, or a second time."""
        self.is_confined = confines and (self.is_almost_suspect or (is_crash and not self.has_proved))
        alone = is_alone * (1 if is_crash else KILLED_SHARE)
        self.deaths, self.deaths_alone = (1, 0) if self.has_proved else (self.deaths + 1, self.deaths_alone + alone)
        self.leave_engine()

    def leave_engine(self) -> None:
        """Note that its engine does not have it any more, and that the next one begins with its prompt."""
        self.num_before, self.num_computed = len(self.emitted), 0

    def renumber(self, number: int) -> None:
        """Take a new number, so that nothing which a former engine still says of the old one is taken for its own."""
        self.subscription.renumber(self.number, number)
        self.number = number


def sequences_of(subscription: Subscription) -> list[InFlightSequence]:
    """Make the sequences of a request that was not sent yet, one for each of its answers."""
    places = ((place, submit) for place, submit in enumerate(subscription.submits))
    return [
        InFlightSequence(number, subscription, prompt_index, sampling_index)
        for prompt_index, submit in places
        for sampling_index, number in enumerate(submit.numbers)
    ]


class InFlight:
    """All unfinished sequences of one replica; decides when an engine is sent each, and which one to blame if engines die."""

    def __init__(self) -> None:
        self.inside: dict[int, InFlightSequence] = {}  # an engine has them
        self.waiting: dict[int, InFlightSequence] = {}  # no engine has them
        self.suspect: InFlightSequence | None = None  # whose trial was begun last

    def __len__(self) -> int:
        return len(self.inside) + len(self.waiting)

    def num_of(self, tenant: str) -> int:
        """Return how many of the sequences are a tenant's."""
        everything = (*self.inside.values(), *self.waiting.values())
        return sum(one.subscription.submits[one.prompt_index].tenant == tenant for one in everything)

    def add(self, subscription: Subscription) -> None:
        self.waiting |= {one.number: one for one in sequences_of(subscription)}

    def drop(self, number: int) -> InFlightSequence | None:
        return self.inside.pop(number, None) or self.waiting.pop(number, None)

    def take_due(self, max_rows: int) -> list[Submit]:
        """Move all waiting sequences, or one crash suspect alone, to the engine; return their Submits; [] during a trial."""
        if not self.waiting or self._is_trial_open:
            return []
        suspects = [one for one in self.waiting.values() if one.is_confined or one.deaths >= SUSPECT_DEATHS]
        suspect = max(suspects, key=lambda one: one.suspicion, default=None)  # the first one is alone in there
        if suspect is not None and len(self.inside) >= max_rows:
            return []  # it would wait in there, and be blamed for what it had no part in
        self.suspect, due = suspect, list(self.waiting.values()) if suspect is None else [suspect]
        for one in due:
            self.inside[one.number] = self.waiting.pop(one.number)
        groups = itertools.groupby(due, lambda one: (id(one.subscription), one.prompt_index))
        return [_submit_of(list(group)) for _, group in groups]

    def take_dead(self, *, is_crash: bool = True, confines: bool = False) -> InFlightSequence | None:
        """After an engine died, make its sequences wait for the next one; remove and return the one to blame, or None."""
        self.suspect, is_alone = None, len(self.inside) == 1
        for subscription in {one.subscription for one in self.inside.values()}:
            subscription.num_resumed += 1
        for one in self.inside.values():
            one.note_death(is_crash=is_crash, is_alone=is_alone, confines=confines)
        blamed = (one for one in self.inside.values() if is_alone and one.deaths_alone >= DEATHS_ALONE)
        culprit = next((one for one in blamed if one.deaths > SUSPECT_DEATHS), None)
        self.waiting, self.inside = dict(sorted((self.inside | self.waiting).items())), {}
        if culprit is not None:
            del self.waiting[culprit.number]
        return culprit

    def take_free(self) -> list[InFlightSequence]:
        """Remove and return the sequences that wait, but those that may be the cause of an engine's death."""
        free = [one for one in self.waiting.values() if not one.is_confined]
        self.waiting = {one.number: one for one in self.waiting.values() if one.is_confined}
        return free

    def take_silenced(self) -> list[InFlightSequence]:
        """Remove and return the sequences of an engine that has become silent, but those that would be suspects then."""
        moved = [one for one in self.inside.values() if not one.is_almost_suspect]
        for one in moved:
            del self.inside[one.number]
            one.note_death(is_crash=False, is_alone=False, confines=True)
        return moved

    def take_all(self) -> list[InFlightSequence]:
        """Remove and return all sequences, because the replica leaves."""
        everyone = sorted((self.inside | self.waiting).items())
        self.inside, self.waiting = {}, {}
        return [one for _, one in everyone]

    @property
    def is_confined(self) -> bool:
        """Whether sequences that may be the cause of an engine's death wait here, or have not proved themselves yet."""
        return any(one.is_confined and not one.has_proved for one in (*self.waiting.values(), *self.inside.values()))

    @property
    def is_trial_of_one(self) -> bool:
        """Whether the engine has nothing but a suspect that has not proved itself yet: if it dies, that is evidence."""
        return self._is_trial_open and len(self.inside) == 1

    @property
    def _is_trial_open(self) -> bool:
        suspect = self.suspect
        return suspect is not None and suspect.number in self.inside and not suspect.has_proved


def _submit_of(siblings: list[InFlightSequence]) -> Submit:
    """Build the Submit of one prompt's waiting sequences, first sent or resent, with the tokens that each has emitted."""
    submit, emitted = siblings[0].submit, tuple(tuple(one.emitted) for one in siblings)
    return msgspec.structs.replace(
        submit,
        numbers=tuple(one.number for one in siblings),
        samplings=tuple(submit.samplings[one.sampling_index] for one in siblings),
        emitted=emitted if any(emitted) else (),
    )


class EngineClient:
    """Sends one replica's requests to its current engine, again to the next if that dies, and distributes the events."""

    def __init__(self) -> None:
        self.live = InFlight()
        self.is_lone = True  # there is no other replica
        self.send: Callable[[ToEngine], None] | None = None  # none while no engine is ready
        self.on_end: Callable[[InFlightSequence], None] = lambda _: None  # called with each sequence that has ended
        self._max_rows = 0
        self._num_ended = 0  # sequences that ended in this engine
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Prefixes]] = {}

    def new_numbers(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._numbers, count))

    def submit(self, submits: Sequence[Submit]) -> Subscription:
        """Submit the prompts of one request, which wait while no engine is ready; return the subscription to its events."""
        subscription = Subscription(submits, self.cancel)
        self.take_over(sequences_of(subscription))
        return subscription

    def take_over(self, sequences: Sequence[InFlightSequence]) -> None:
        """Send sequences to the engine, or keep them for the next one; they are new, or come from another replica."""
        self.live.waiting |= {one.number: one for one in sequences}
        self._send_due()

    def give_up_free(self) -> list[InFlightSequence]:
        """Remove and return what waits for the next engine and may go elsewhere: all but suspects of the last one's death."""
        return self.live.take_free()

    def give_up_silenced(self) -> list[InFlightSequence]:
        """Remove and return the sequences of a silent engine, but for suspects, and cancel them in it."""
        return self._give_up(self.live.take_silenced())

    def give_up_all(self) -> list[InFlightSequence]:
        """Remove and return all sequences, and cancel them in the engine if there is one: the replica leaves or is given up."""
        return self._give_up(self.live.take_all())

    def _give_up(self, sequences: list[InFlightSequence]) -> list[InFlightSequence]:
        """Forget sequences here before the engine hears of it: what it still says of them is dropped, so nothing comes twice."""
        for subscription in {one.subscription for one in sequences}:
            subscription.num_resumed += 1
        for one in sequences:
            one.leave_engine()
        if sequences and self.send is not None:
            self.send(Cancel(tuple(one.number for one in sequences)))
        return sequences

    def attach(self, send: Callable[[ToEngine], None], max_rows: int) -> None:
        """Connect an engine that is ready, and send it the waiting sequences."""
        self.send, self._max_rows = send, max_rows
        self._send_due()

    def detach(self, *, is_crash: bool = True) -> bool:
        """Disconnect a dead engine after its last message: its sequences wait for the next one; one found to blame fails.

        With several replicas, whoever had not proved itself in an engine that crashed is a suspect, too, and stays here.
        Returns whether the engine was of use: a sequence ended or emitted PROOF_TOKENS tokens in it, or it tried one suspect.
        """
        was_of_use = self._num_ended > 0 or any(one.has_proved for one in self.live.inside.values()) or self.live.is_trial_of_one
        self.send, self._num_ended = None, 0
        culprit = self.live.take_dead(is_crash=is_crash or self.is_lone, confines=not self.is_lone)
        self._fail_asked(lambda: EngineDied("the engine's process ended before it said what it keeps; try again in a moment"))
        if culprit is not None:
            message = f"the engine died {culprit.deaths} times with this request in it; it is not tried again"
            self._end(culprit.subscription, EngineDied(message))
        return was_of_use

    def cancel(self, numbers: tuple[int, ...]) -> None:
        """Drop these sequences here and cancel them in the engine, because nobody waits for them."""
        for number in numbers:
            if (one := self.live.drop(number)) is not None:
                one.subscription.open.pop(number, None)
                self.on_end(one)
        if numbers and self.send is not None:
            self.send(Cancel(numbers))
            self._send_due()  # others may have waited for one of them to prove itself

    async def prefixes(self, *, clear: bool = False, scope: str | None = None) -> Prefixes:
        """Return the engine's cached prefixes (of one scope), after evicting unused ones if `clear`.

        Raises EngineError if the engine does not answer.
        """
        if self.send is None:
            raise EngineDied("the engine is not there to say what it keeps; try again in a moment")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(AskPrefixes(number, clear, scope))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            message = f"the engine did not say within {ANSWER_SECONDS:g} seconds what it keeps; try again when it is less busy"
            raise EngineError(message) from None
        finally:
            del self._asked[number]

    def receive_prefixes(self, prefixes: Prefixes) -> None:
        """Deliver the engine's list of prefixes to the task that asked for it, if that task still waits."""
        answer = self._asked.get(prefixes.number)
        if answer is not None and not answer.done():
            answer.set_result(prefixes)

    def receive(self, events: EngineEvents) -> None:
        """Deliver an engine's events to their subscriptions, drop those of cancelled sequences, and send sequences now due."""
        for outcome in events.outcomes:
            if (one := self.live.inside.get(outcome.sequence)) is None:
                continue
            if outcome.refusal is None:
                one.subscription.accept(one.prompt_index)
            else:
                self._end(one.subscription, GrammarRejected(outcome.refusal, outcome.param))
        for prompt in events.prompts:
            if (one := self.live.inside.get(prompt.sequence)) is not None and one.take_prompt(prompt):
                one.subscription.put(one.number, prompt)
        for token in events.tokens:
            if (one := self.live.inside.get(token.sequence)) is None:
                continue
            one.subscription.put(one.number, one.take_token(token))
            if token.finish is not None:
                self.live.drop(one.number)
                self.on_end(one)
                self._num_ended += 1
        self._send_due()

    def fail_all(self, error: Callable[[], WeftError]) -> None:
        """End every request of the model with an error, because no engine will continue them."""
        given_up, self.live, self.send = self.live.inside | self.live.waiting, InFlight(), None
        for subscription in {one.subscription for one in given_up.values()}:
            subscription.fail(error())
        self._fail_asked(error)

    def _end(self, subscription: Subscription, error: WeftError) -> None:
        subscription.cancel()  # other prompts of it may be elsewhere
        subscription.fail(error)

    def _send_due(self) -> None:
        if self.send is not None:
            for submit in self.live.take_due(self._max_rows):
                self.send(submit)

    def _fail_asked(self, error: Callable[[], WeftError]) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error())
