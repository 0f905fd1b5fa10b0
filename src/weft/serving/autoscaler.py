"""How many replicas a model should have, between a least and a most number: what waits to be computed decides.

One more as soon as the queue is long for a few seconds, since whoever waits feels it; one less only after minutes in which the
others would have sufficed, since a replica takes its cached prompts with it. It is told the load and the time, and starts
nothing: the pool does (`serving/pool.py`).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.serving.in_flight import InFlightSequence
from weft.serving.router import FIRST_ANSWER_SECONDS, RoutedReplica, remaining_tokens, seconds_per_token

MAX_QUEUE_SECONDS = 2.0  # of work that waits for each replica, before another one is worth its start
MORE_SECONDS = 3.0  # for so long the queue must be long, before each further replica: a burst of short prompts is gone by then
LESS_SECONDS = 300.0  # for so long one replica less must have sufficed
FULL_SHARE = 0.6  # of the replicas that stay, which may be in use if one is to go
USE_SECONDS = 60.0  # over which the use of replicas is averaged


@dataclass(frozen=True)
class PoolLoad:
    """What a model's replicas have to do: `queued_seconds` of one replica's work that waits, and how many replicas are in use."""

    queued_seconds: float = 0.0
    num_used: float = 0.0


class Autoscaler:
    """Decides the number of replicas, one step at a time; `target` is its last decision."""

    def __init__(self, least: int, most: int) -> None:
        assert 1 <= least <= most
        self.least, self.most = least, most
        self.target = least
        self.load = PoolLoad()  # the last one that it was told; its use is the average
        self._told_at: float | None = None
        self._long_since: float | None = None  # when the queue became too long; None: it is not
        self._idle_since: float | None = None  # when one replica less began to suffice; None: it does not

    def decide(self, load: PoolLoad, now: float) -> int:
        """Return how many replicas there should be; it differs from the last decision by one at the most."""
        self.load = PoolLoad(load.queued_seconds, self._averaged(load.num_used, now))
        self._told_at = now
        self._long_since = _since(self._long_since, now, is_so=self._is_queue_long)
        self._idle_since = _since(self._idle_since, now, is_so=self._would_fewer_do)
        if self._long_since is not None and now - self._long_since >= MORE_SECONDS and self.target < self.most:
            self._change(1)
        elif self._idle_since is not None and now - self._idle_since >= LESS_SECONDS and self.target > self.least:
            self._change(-1)
        return self.target

    @property
    def _is_queue_long(self) -> bool:
        """Whether too much waits for all replicas that are wanted; those that are not ready yet will have their share."""
        return self.load.queued_seconds > MAX_QUEUE_SECONDS * self.target

    @property
    def _would_fewer_do(self) -> bool:
        return not self._is_queue_long and self.load.num_used <= FULL_SHARE * (self.target - 1)

    def _change(self, step: int) -> None:
        self.target += step
        self._long_since = self._idle_since = None  # what comes next is judged with the new number

    def _averaged(self, num_used: float, now: float) -> float:
        if self._told_at is None:
            return num_used
        share = 1 - math.exp(-max(0.0, now - self._told_at) / USE_SECONDS)
        return self.load.num_used + share * (num_used - self.load.num_used)


def _since(before: float | None, now: float, *, is_so: bool) -> float | None:
    if not is_so:
        return None
    return now if before is None else before


class CountedReplica(RoutedReplica, Protocol):
    """A replica as its load is measured."""

    num_prompt_tokens: int  # of answers that have ended there
    num_cached_tokens: int


def measure_load(replicas: Sequence[CountedReplica], queue: Collection[Sequence[InFlightSequence]]) -> PoolLoad:
    """Return the load of replicas that are ready, at least one, and of the front's queue: sequences by prompt."""
    queued = sum(_queued_tokens(one) * seconds_per_token(one, replicas) for one in replicas)
    per_token = sum(seconds_per_token(one, replicas) for one in replicas) / len(replicas)
    num_prompt, num_cached = sum(one.num_prompt_tokens for one in replicas), sum(one.num_cached_tokens for one in replicas)
    uncached_share = 1 - num_cached / max(1, num_prompt)
    queued += sum(len(group[0].submit.prompt) for group in queue) * per_token * uncached_share
    queued += sum(max(0, len(one.client.live) - one.max_rows) * _row_seconds(one) for one in replicas)
    queued += sum(map(len, queue)) * sum(map(_row_seconds, replicas)) / len(replicas)
    return PoolLoad(queued, sum(map(_use, replicas)))


def _queued_tokens(replica: RoutedReplica) -> int:
    """Return how many prompt tokens wait behind another prompt; one that is being computed waits for nothing."""
    own = [remaining_tokens(one) for one in replica.client.live.inside.values()]
    if replica.status.queued_tokens > sum(own) and len(replica.status.prefilling) <= 1:
        return sum(own) - max(own, default=0)  # the rest is of one prompt that another front has sent
    return max(sum(own), replica.status.queued_tokens) - max(own, default=0)


def _row_seconds(replica: RoutedReplica) -> float:
    """Return by how much an answer that waits for a row prolongs the queue of a replica."""
    return (replica.answer_seconds or FIRST_ANSWER_SECONDS) / max(1, replica.max_rows)


def _use(replica: RoutedReplica) -> float:
    """Return the share of a replica that is in use: all of it while it computes prompts, else its rows' share."""
    inside = replica.client.live.inside
    if replica.status.queued_tokens or any(map(remaining_tokens, inside.values())):
        return 1.0
    return min(1.0, max(len(inside), replica.status.running) / max(1, replica.max_rows))
