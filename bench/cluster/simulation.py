"""A run of a trace over simulated replicas: arrivals, turns, deaths and joins in the order of a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bench.cluster.simulated import Costs, SimulatedEngine, SimulatedReplica
from bench.cluster.trace import TracedRequest
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit, TokenEvent
from weft.serving.dispatcher import Dispatcher
from weft.serving.in_flight import Subscription
from weft.serving.router import Routed, RoutedReplica, Router, remaining_tokens
from weft.text.types import Placement


class RoundRobin(Router):
    """Sends prompts to one replica after the other, whatever they have to do."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = itertools.count()

    def choose(
        self,
        submit: Submit,  # noqa: ARG002
        replicas: Collection[Routed],
        everywhere: Collection[RoutedReplica],  # noqa: ARG002
    ) -> tuple[Routed, Placement]:
        chosen = list(replicas)[next(self._turn) % len(replicas)]
        return chosen, Placement(chosen.name, 0, 0)


class LeastLoaded(Router):
    """Sends a prompt where the fewest prompt tokens are to be computed, whatever is cached there."""

    def choose(
        self,
        submit: Submit,
        replicas: Collection[Routed],
        everywhere: Collection[RoutedReplica],  # noqa: ARG002
    ) -> tuple[Routed, Placement]:
        def work(one: Routed) -> tuple[float, int]:
            inside = one.client.live.inside.values()
            return max(sum(map(remaining_tokens, inside)), one.status.queued_tokens), len(inside)

        chosen = min(replicas, key=work)
        return chosen, Placement(chosen.name, self.index.matches(submit.prompt, submit.salt).get(chosen.name, 0), 0)


POLICIES: dict[str, Callable[[], Router]] = {"weft": Router, "least-loaded": LeastLoaded, "round-robin": RoundRobin}


@dataclass
class Outcome:
    """What came of a run: seconds to first tokens, hits, work by replica, and what was lost."""

    first_tokens: list[tuple[str, float]] = field(default_factory=list)  # by client, in seconds since the arrival
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    busy_seconds: list[float] = field(default_factory=list)
    num_moved: int = 0
    num_unfinished: int = 0

    @property
    def first_token_seconds(self) -> list[float]:
        return [seconds for _, seconds in self.first_tokens]

    @property
    def hits(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def mean(self) -> float:
        return statistics.mean(self.first_token_seconds)

    def percentile(self, percent: float) -> float:
        ordered = sorted(self.first_token_seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    @property
    def imbalance(self) -> float:
        return max(self.busy_seconds) / max(1e-9, statistics.mean(self.busy_seconds))


@dataclass(frozen=True)
class Death:
    """A replica that dies at a time, and is there again some seconds later."""

    at: float
    replica: int
    away_seconds: float


@dataclass(frozen=True)
class Cluster:
    """How many replicas, what each can do, and the policy between them."""

    num_replicas: int
    policy: str = "weft"
    costs: Costs = field(default_factory=Costs)
    max_rows: int = 32
    cached_tokens: int = 1_000_000


class Simulation:
    """Runs one trace on one cluster. Nothing waits: the clock jumps to the next arrival, turn, death or return."""

    def __init__(self, cluster: Cluster, deaths: Collection[Death] = ()) -> None:
        self.cluster = cluster
        self.now = 0.0

        def make() -> SimulatedEngine:
            return SimulatedEngine(cluster.costs, cluster.max_rows, cluster.cached_tokens)

        self.replicas = [SimulatedReplica(str(number), make) for number in range(cluster.num_replicas)]
        self.dispatcher = Dispatcher(self.replicas, clock=lambda: self.now)
        self.dispatcher.router = POLICIES[cluster.policy]()
        self.outcome = Outcome()
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._is_due: set[str] = set()  # replicas whose next turn is on the agenda
        self._asked: dict[Subscription, TracedRequest] = {}
        for replica in self.replicas:
            replica.begin(0.0)
        for death in deaths:
            replica = self.replicas[death.replica]
            self._at(death.at, lambda one=replica: self._kill(one))  # type: ignore[misc]
            self._at(death.at + death.away_seconds, lambda one=replica: self._begin(one))  # type: ignore[misc]

    def run(self, trace: list[TracedRequest]) -> Outcome:
        for request in trace:
            self._at(request.at, lambda one=request: self._ask(one))  # type: ignore[misc]
        while self._agenda:
            self.now, _, act = heapq.heappop(self._agenda)
            act()
            self._wake()
        self._count()
        return self.outcome

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), act))

    def _ask(self, request: TracedRequest) -> None:
        grain = self.cluster.costs.grain
        sampling = Sampling(max_tokens=max(1, request.num_output // grain), seed=1, ignore_eos=True)
        submit = Submit(self.dispatcher.new_numbers(1), request.prompt(grain), (sampling,), client=request.client)
        self._asked[self.dispatcher.submit([submit])] = request

    def _wake(self) -> None:
        """Put the next turn of every replica that has something to do on the agenda."""
        for replica in self.replicas:
            if replica.engine is None or replica.name in self._is_due:
                continue
            if replica.inbox or not replica.engine.is_idle:
                self._is_due.add(replica.name)
                self._at(max(self.now, replica.engine.now), lambda one=replica: self._turn(one))  # type: ignore[misc]

    def _turn(self, replica: SimulatedReplica) -> None:
        """Let a replica compute one turn; what it says is heard when the turn is over."""
        engine = replica.engine
        if engine is None:
            self._is_due.discard(replica.name)
            return
        replica.take_inbox(self.now)
        events = engine.turn()

        def hear() -> None:
            self._is_due.discard(replica.name)
            if replica.engine is not engine:
                return  # it has died with it
            replica.status = events.status or replica.status
            for event in events.tokens:
                self._note(replica, event)
            replica.client.receive(events)
            self.dispatcher.receive(replica, events)

        self._at(engine.now, hear)

    def _note(self, replica: SimulatedReplica, event: TokenEvent) -> None:
        one = replica.client.live.inside.get(event.sequence)
        if one is not None and not one.emitted and event.timings is not None and event.timings.first_token is not None:
            request = self._asked[one.subscription]
            self.outcome.first_tokens.append((request.client, event.timings.first_token - request.at))

    def _kill(self, replica: SimulatedReplica) -> None:
        if replica.engine is not None:
            self.outcome.busy_seconds.append(replica.engine.busy_seconds)
            replica.die()
            self.dispatcher.settle()

    def _begin(self, replica: SimulatedReplica) -> None:
        replica.begin(self.now)
        self.dispatcher.settle()

    def _count(self) -> None:
        outcome, grain = self.outcome, self.cluster.costs.grain
        outcome.busy_seconds += [one.engine.busy_seconds for one in self.replicas if one.engine is not None]
        outcome.num_prompt_tokens = grain * sum(one.num_prompt_tokens for one in self.replicas)
        outcome.num_cached_tokens = grain * sum(one.num_cached_tokens for one in self.replicas)
        outcome.num_moved = self.dispatcher.num_moved
        outcome.num_unfinished = sum(bool(subscription.open) for subscription in self._asked)
