"""Chooses the replica for a prompt: the one with the least cost of its first token, in seconds.

cost = wait + uncached tokens · seconds per token + copied tokens · seconds per token · weight. The wait is for prompts that the
replica has not computed yet and for a free row; both are counted by the front, which knows what it has just sent, and engines add
what other fronts have sent. Beside answers computing takes longer, since their steps go on meanwhile. Copied tokens are those
that another replica has cached: computing them again delays those behind and evicts what is cached, for nothing new. They
weigh less the more prompts under way share them.
"""

import hashlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from weft.config import EngineConfig
from weft.ipc.messages import EngineEvents, EngineStatus, Submit
from weft.serving.in_flight import EngineClient, InFlightSequence
from weft.serving.prefix_index import PrefixIndex, num_common
from weft.text.types import Placement

IDLE_WEIGHT, BUSY_WEIGHT = 0.25, 6.0  # of tokens computed again, in waiting: while nothing waits anywhere, and when all are busy
BUSY_SECONDS = 1.0  # a replica is busy when a new prompt would wait there for so long; below that it is so in proportion
BESIDE_ANSWERS = 1 + 1 / EngineConfig.gap_factor  # times as long a prompt takes where rows decode: a step after each slice
UNKNOWN_SECONDS_PER_TOKEN = 1e-3  # until an engine has computed a prompt
NEAR = 1.1  # replicas with up to so many times the least cost are equally good for a prompt that nobody knows
SMALL_SECONDS = 0.005  # where the choice costs no more, a prompt goes where fewer rows are: their steps are shorter
HEAD_TOKENS = 128  # prompts with these first tokens in common go to one replica, as long as nobody knows them
MIN_COMING = 32  # tokens in common with a prompt under way that make it worth to follow it
FIRST_ANSWER_SECONDS = 1.0  # a guess at how long an answer holds its row


class RoutedReplica(Protocol):
    """A replica as the router sees it."""

    client: EngineClient
    status: EngineStatus
    answer_seconds: float  # how long an answer holds its row here, a running mean; 0: not known

    @property
    def name(self) -> str: ...

    @property
    def max_rows(self) -> int: ...


Routed = TypeVar("Routed", bound=RoutedReplica)


class Router:
    """Knows what replicas have cached and chooses one for each prompt."""

    def __init__(self) -> None:
        self.index = PrefixIndex()

    def report(self, replica: str, events: EngineEvents) -> None:
        if events.kept or events.gone:
            self.index.report(replica, events.kept, events.gone)

    def choose(
        self, submit: Submit, replicas: Collection[Routed], everywhere: Collection[RoutedReplica]
    ) -> tuple[Routed, Placement]:
        """Return the replica with the least cost, with how much it has cached and the most that any of `everywhere` has."""
        prompt = submit.keyed_prompt
        cached = self.index.matches(prompt, submit.salt, submit.scope)
        coming = {one.name: _coming(submit, prompt, one) for one in everywhere}
        matched = {one.name: max(cached.get(one.name, 0), *coming[one.name], 0) for one in everywhere}
        waits = {one.name: wait_seconds(one, everywhere) for one in everywhere}
        best = max(matched.values())
        weight = _copy_weight(waits.values(), sum(common >= best for found in coming.values() for common in found))

        def cost(one: RoutedReplica) -> float:
            is_beside = one.client.live.inside or one.status.running  # what is before it answers by then
            uncached = (len(prompt) - matched[one.name]) * (BESIDE_ANSWERS if is_beside else 1.0)
            return waits[one.name] + (uncached + weight * (best - matched[one.name])) * seconds_per_token(one, everywhere)

        costs = {one.name: cost(one) for one in replicas}
        least = min(costs.values())
        if best:
            near = [one for one in replicas if costs[one.name] <= least + SMALL_SECONDS]
            chosen = min(near, key=lambda one: (_num_rows(one), costs[one.name]))
        else:  # several fronts agree on a prompt's replica without talking
            near = [one for one in replicas if costs[one.name] <= least * NEAR]
            chosen = max(near, key=lambda one: _rank(one.name, prompt[:HEAD_TOKENS]))
        return chosen, Placement(chosen.name, matched[chosen.name], best)


def wait_seconds(replica: RoutedReplica, everywhere: Iterable[RoutedReplica]) -> float:
    """Return how long a new prompt waits at a replica: for the prompts that are not computed there, and for a free row."""
    inside = replica.client.live.inside.values()
    own = sum(remaining_tokens(one) for one in inside)
    num_over = len(inside) + 1 - replica.max_rows
    rows = max(0, num_over) / max(1, replica.max_rows) * (replica.answer_seconds or FIRST_ANSWER_SECONDS)
    is_beside = any(one.has_begun for one in inside) or replica.status.running > len(inside)  # or answers of other fronts
    slowdown = BESIDE_ANSWERS if is_beside else 1.0
    return max(own, replica.status.queued_tokens) * slowdown * seconds_per_token(replica, everywhere) + rows


def remaining_tokens(one: InFlightSequence) -> int:
    """Return how many tokens of a sequence's prompt its replica has yet to compute; answers to one prompt compute it once."""
    if one.has_begun or one.sampling_index:
        return 0
    return max(0, min(one.num_uncached, len(one.submit.prompt) - one.num_computed))


def seconds_per_token(replica: RoutedReplica, everywhere: Iterable[RoutedReplica]) -> float:
    """Return what a replica has measured, or the mean of the others until it has measured anything."""
    if replica.status.seconds_per_token:
        return replica.status.seconds_per_token
    known = [one.status.seconds_per_token for one in everywhere if one.status.seconds_per_token]
    return sum(known) / len(known) if known else UNKNOWN_SECONDS_PER_TOKEN


def _copy_weight(waits: Collection[float], num_sharing: int) -> float:
    """Return what a token that is computed again costs beside its time; little where many under way will use the copy."""
    share = sum(min(1.0, wait / BUSY_SECONDS) for wait in waits) / len(waits)
    return (IDLE_WEIGHT + (BUSY_WEIGHT - IDLE_WEIGHT) * share) / (1 + num_sharing)


def _num_rows(replica: RoutedReplica) -> int:
    return max(len(replica.client.live.inside), replica.status.running)


def _coming(submit: Submit, prompt: Sequence[int], replica: RoutedReplica) -> list[int]:
    """Return how much of a prompt a replica will have cached once it has computed each of the prompts under way there."""
    whose = submit.scope, submit.salt
    under_way = (one.submit for one in replica.client.live.inside.values() if not one.has_begun and not one.sampling_index)
    common = (num_common(prompt, other.keyed_prompt) for other in under_way if (other.scope, other.salt) == whose)
    return [min(one, len(prompt) - 1) for one in common if one >= MIN_COMING]


def _rank(replica: str, head: Sequence[int]) -> bytes:
    """Return a replica's rank for a prompt's head: of the same replicas every front prefers the same one."""
    return hashlib.blake2b(array("I", head).tobytes(), key=replica.encode()[:64], digest_size=8).digest()
