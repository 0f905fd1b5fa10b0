"""One model's requests over its replicas: which waits, which replica gets it, and where it goes on when that one is gone.

A replica gets as many sequences as it has rows and a few more; the others wait here, so that each can still go where it is
cheapest. A client that has nothing in any replica does not wait for a place: engines take a row from others for it. With a
single replica nothing waits here: its engine has the whole queue, as the fairest place for it.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from weft.errors import WeftError
from weft.ipc.messages import EngineEvents, Submit
from weft.serving.in_flight import InFlightSequence, Subscription, sequences_of
from weft.serving.router import RoutedReplica, Router

SPARE_PLACES = 2  # sequences that a replica has beside those in its rows, so that none of these is ever empty
OUTPUT_WEIGHT = 2  # as the engine's scheduler weighs a token of an answer against one of a prompt
ANSWER_SHARE = 0.1  # of the newest answer in the running mean of how long answers hold their rows

Party = tuple[str, ...]  # a tenant, or a tenant and its client
Group = list[InFlightSequence]  # sequences of one prompt, which share its computation


class DispatchTarget(RoutedReplica, Protocol):
    """A replica as the dispatcher sees it."""

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count the prompt of an answer that has ended, and how many of its tokens were cached."""
        ...

    @property
    def kind(self) -> str:
        """What its engine computes with: equal kinds compute equal bits."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether new requests may be sent there: it is ready, heard, and does not leave."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether there is no engine, or one that is silent for so long that others continue its requests."""
        ...

    @property
    def is_given_up(self) -> bool:
        """Whether no engine will ever be there again, or it leaves and has had its time."""
        ...


class ServedTokens:
    """Weighted tokens that tenants and their clients have had from all replicas.

    As in an engine (`engine/fairness.py`), whoever returns is owed nothing for the absence.
    """

    def __init__(self) -> None:
        self._ended: defaultdict[Party, float] = defaultdict(float)  # of sequences that have ended

    def arrive(self, submit: Submit, live: Collection[InFlightSequence]) -> None:
        """Raise an absent party's count to that of the least served one present beside it; drop those of other absent ones."""
        present = {party for one in live for party in parties_of(one.submit)}
        tenant, client = parties_of(submit)
        for party, beside in ((tenant, [one for one in present if len(one) == 1]), (client, self._clients(tenant, present))):
            if party not in present:
                level = min((self._ended[one] for one in beside), default=0.0)
                self._ended[party] = max(self._ended[party], level)
        kept = {party: count for party, count in self._ended.items() if party in {*present, tenant, client}}
        self._ended = defaultdict(float, kept)

    def end(self, one: InFlightSequence) -> None:
        for party in parties_of(one.submit):
            self._ended[party] += _weight(one)

    def now(self, live: Collection[InFlightSequence]) -> dict[Party, float]:
        """Return the counts by party, those of unfinished sequences included."""
        counts = defaultdict(float, self._ended)
        for one in live:
            for party in parties_of(one.submit):
                counts[party] += _weight(one)
        return counts

    @staticmethod
    def _clients(tenant: Party, present: Collection[Party]) -> list[Party]:
        return [one for one in present if len(one) == 2 and one[:1] == tenant]


class Dispatcher:
    """Distributes a model's sequences over its replicas, and moves them when a replica dies, falls silent or leaves."""

    def __init__(
        self, replicas: Sequence[DispatchTarget], clock: Callable[[], float] = time.monotonic, *, is_elastic: bool = False
    ) -> None:
        self.replicas = replicas
        self.is_elastic = is_elastic  # replicas may join and leave
        self.router = Router()
        self.clock = clock
        self.queue: list[Group] = []
        self.num_moved = 0  # sequences so far that went on in another replica
        self.served = ServedTokens()
        self._numbers = itertools.count()
        for replica in replicas:
            self.follow(replica)

    def follow(self, replica: DispatchTarget) -> None:
        """Count what ends in a replica that is one of `replicas` now."""

        def end(one: InFlightSequence) -> None:
            self.served.end(one)
            if one.timings is not None and not one.sampling_index:
                replica.count_prompt(len(one.submit.prompt), one.timings.cached_tokens)
            if one.has_begun and not self.is_lone:
                seconds, mean = self.clock() - one.sent_at, replica.answer_seconds
                replica.answer_seconds = seconds if not mean else mean + ANSWER_SHARE * (seconds - mean)

        replica.client.on_end, replica.client.is_lone = end, self.is_lone

    def forget(self, replica: DispatchTarget) -> None:
        """Forget what a replica had cached that is none of `replicas` any more."""
        self.router.index.forget(replica.name)

    def __len__(self) -> int:
        return sum(len(one.client.live) for one in self.replicas) + self.num_queued

    def num_of(self, tenant: str) -> int:
        """Return how many of the sequences are a tenant's."""
        queued = sum(one.submit.tenant == tenant for group in self.queue for one in group)
        return queued + sum(replica.client.live.num_of(tenant) for replica in self.replicas)

    @property
    def is_lone(self) -> bool:
        """Whether there is one replica, and never another."""
        return len(self.replicas) == 1 and not self.is_elastic

    @property
    def num_queued(self) -> int:
        return sum(map(len, self.queue))

    def new_numbers(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._numbers, count))

    def submit(self, submits: Sequence[Submit]) -> Subscription:
        """Submit the prompts of one request, which wait while no replica can take them; return the subscription to its events."""
        subscription = Subscription(submits, self.cancel)
        self.served.arrive(submits[0], self._live())
        self.queue += _groups(sequences_of(subscription))
        self.settle()
        return subscription

    def cancel(self, numbers: tuple[int, ...]) -> None:
        """Drop these sequences, wherever they are, because nobody waits for them."""
        for replica in self.replicas:
            live = replica.client.live
            replica.client.cancel(tuple(one for one in numbers if one in live.inside or one in live.waiting))
        for one in [one for group in self.queue for one in group if one.number in numbers]:
            one.subscription.open.pop(one.number, None)
        self.queue = [kept for group in self.queue if (kept := [one for one in group if one.number not in numbers])]
        self.settle()

    def receive(self, replica: DispatchTarget, events: EngineEvents) -> None:
        """Take note of what an engine reports of itself, and send what now has a place; its client has the events already."""
        if not self.is_lone:
            self.router.report(replica.name, events)
        if self.queue:
            self.settle()

    def is_resuming(self, besides: DispatchTarget) -> bool:
        """Whether other replicas have answers that they have not continued yet."""
        others = (one for one in self.replicas if one is not besides and not one.is_gone)
        return any(one.emitted and not one.has_begun for replica in others for one in replica.client.live.inside.values())

    def settle(self) -> None:
        """Take sequences from replicas that are gone, and send what waits where it is cheapest, as long as there are places."""
        if not self.is_lone:
            for replica in self.replicas:
                self._evacuate(replica)
        if not self.queue or not (any(map(self._has_place, self.replicas)) or self._newcomers()):
            return
        served = self.served.now(self._live())
        self.queue.sort(key=lambda group: _order(group, served))
        while self.queue and (open_ones := [one for one in self.replicas if self._has_place(one)]):
            self._send(self.queue.pop(0), open_ones, served)
        for group in self._newcomers():
            self.queue.remove(group)
            self._send(group, [one for one in self.replicas if self._is_open(one)], served)

    def _newcomers(self) -> list[Group]:
        """Return the first waiting prompt of each client that has nothing in a replica: engines preempt others for it."""
        if not any(map(self._is_open, self.replicas)):
            return []
        inside = {parties_of(one.submit)[1] for replica in self.replicas for one in replica.client.live.inside.values()}
        first: dict[Party, Group] = {}
        for group in self.queue:
            if (client := parties_of(group[0].submit)[1]) not in inside:
                first.setdefault(client, group)
        return list(first.values())

    def _send(self, group: Group, open_ones: Sequence[DispatchTarget], served: dict[Party, float]) -> None:
        chosen = open_ones[0] if self.is_lone else self._route(group, open_ones, served)
        chosen.client.take_over(group)

    def fail_all(self, error: Callable[[], WeftError]) -> None:
        """End every request of the model with an error, because no engine will continue them."""
        waiting, self.queue = self.queue, []
        for subscription in {one.subscription for group in waiting for one in group}:
            subscription.fail(error())
        for replica in self.replicas:
            replica.client.fail_all(error)

    def _evacuate(self, replica: DispatchTarget) -> None:
        """Queue the sequences of a replica that is gone, but for those that may have killed it and wait for its next engine."""
        if replica.is_given_up:
            moved = replica.client.give_up_all()
        elif not replica.is_gone:
            return
        elif replica.client.send is None:
            moved = replica.client.give_up_free()
            self.router.index.forget(replica.name)
        else:
            moved = replica.client.give_up_silenced()
        for one, number in zip(moved, self.new_numbers(len(moved)), strict=True):
            one.renumber(number)
        self.num_moved += len(moved)
        self.queue += _groups(moved)

    def _is_open(self, replica: DispatchTarget) -> bool:
        return self.is_lone or (replica.is_open and not replica.client.live.is_confined)

    def _has_place(self, replica: DispatchTarget) -> bool:
        return self.is_lone or (self._is_open(replica) and len(replica.client.live) < replica.max_rows + SPARE_PLACES)

    def _route(self, group: Group, open_ones: Sequence[DispatchTarget], served: dict[Party, float]) -> DispatchTarget:
        """Choose the replica of a prompt among those with a place, and note where and why."""
        subscription, index, submit = group[0].subscription, group[0].prompt_index, group[0].submit
        everywhere = [one for one in self.replicas if not one.is_gone]
        if any(one.emitted for one in group):  # the same bits come from the same kind of device; if there is none, from another
            open_ones = [one for one in open_ones if one.kind == group[0].kind] or open_ones
        chosen, placement = self.router.choose(submit, open_ones, everywhere)
        subscription.placements.setdefault(index, placement)
        subscription.submits[index] = msgspec.structs.replace(submit, served=_levels(submit, served))
        for one in group:
            one.num_uncached, one.sent_at, one.kind = len(submit.prompt) - placement.matched, self.clock(), chosen.kind
        return chosen

    def _live(self) -> list[InFlightSequence]:
        inside = [one for replica in self.replicas for one in replica.client.live.inside.values()]
        return inside + [one for group in self.queue for one in group]


def _weight(one: InFlightSequence) -> float:
    return (0 if one.sampling_index else one.num_uncached) + OUTPUT_WEIGHT * len(one.emitted)


def parties_of(submit: Submit) -> tuple[Party, Party]:
    """Return the two that take turns for a request: its tenant, and within that its client."""
    return (submit.tenant,), (submit.tenant, submit.client)


def _levels(submit: Submit, served: dict[Party, float]) -> tuple[float, float]:
    tenant, client = parties_of(submit)
    return served.get(tenant, 0.0), served.get(client, 0.0)


def _order(group: Group, served: dict[Party, float]) -> tuple[bool, int, float, int, float]:
    """Answers that have begun come first; the others in the order of an engine, then the first come."""
    submit = group[0].submit
    tenant, client = _levels(submit, served)
    return not any(one.emitted for one in group), -submit.rank, tenant, -submit.priority, client


def _groups(sequences: Sequence[InFlightSequence]) -> list[Group]:
    found: dict[tuple[int, int], Group] = {}
    for one in sequences:
        found.setdefault((id(one.subscription), one.prompt_index), []).append(one)
    return list(found.values())
