"""A run of a trace over simulated replicas: arrivals, turns, deaths and joins in the order of a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bench.cluster.policies import POLICIES
from bench.cluster.simulated import Costs, SimulatedEngine
from bench.cluster.simulated_replica import SimulatedMachine, SimulatedReplica
from bench.cluster.trace import TracedRequest
from weft.config import EngineConfig
from weft.ipc.limits import Sampling
from weft.ipc.messages import EngineEvents, Submit, TokenEvent
from weft.serving.dispatcher import Dispatcher
from weft.serving.in_flight import Subscription


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
    """How many replicas, what each can do, and the policy between them; fronts get requests by turns."""

    num_replicas: int
    policy: str = "weft"
    costs: Costs = field(default_factory=Costs)
    max_rows: int = 32
    cached_tokens: int = 1_000_000
    num_fronts: int = 1
    chunk_tokens: int = 1024
    delay_seconds: float = 0.0  # until fronts hear what an engine says
    row_cost: float = 0.0  # of one more row in a step, as the scheduler is told
    has_checkpoints: bool = False  # the model has layers without keys and values: prompts go on from where a chunk ended

    @property
    def config(self) -> EngineConfig:
        grain = self.costs.grain
        return EngineConfig(
            max_rows=self.max_rows, slab_tokens=8192, chunk_tokens=self.chunk_tokens // grain,
            cache_bytes=self.cached_tokens // grain, row_cost=self.row_cost,
        )  # fmt: skip


class Simulation:
    """Runs one trace on one cluster. Nothing waits: the clock jumps to the next arrival, turn, death or return."""

    def __init__(self, cluster: Cluster, deaths: Collection[Death] = ()) -> None:
        self.cluster = cluster
        self.now = 0.0

        def make() -> SimulatedEngine:
            return SimulatedEngine(cluster.costs, cluster.config, has_checkpoints=cluster.has_checkpoints)

        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._is_due: set[str] = set()  # machines whose next turn is on the agenda
        names = map(str, range(cluster.num_replicas))
        self.machines = [SimulatedMachine(name, make, cluster.num_fronts, self._wake) for name in names]
        self.fronts = [self._front(place) for place in range(cluster.num_fronts)]
        self.outcome = Outcome()
        self._asked: dict[Subscription, TracedRequest] = {}
        self._turn_of_fronts = itertools.cycle(self.fronts)
        for death in deaths:
            machine = self.machines[death.replica]
            self._at(death.at, lambda one=machine: self._kill(one))  # type: ignore[misc]
            self._at(death.at + death.away_seconds, lambda one=machine: self._begin(one))  # type: ignore[misc]
        for machine in self.machines:
            machine.begin(0.0)

    def _front(self, place: int) -> Dispatcher:
        dispatcher = Dispatcher([machine.views[place] for machine in self.machines], clock=lambda: self.now)
        dispatcher.router = POLICIES[self.cluster.policy]()
        return dispatcher

    def run(self, trace: list[TracedRequest]) -> Outcome:
        for request in trace:
            self._at(request.at, lambda one=request: self._ask(one))  # type: ignore[misc]
        while self._agenda:
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        self._count()
        return self.outcome

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), act))

    def _ask(self, request: TracedRequest) -> None:
        grain = self.cluster.costs.grain
        sampling = Sampling(max_tokens=max(1, request.num_output // grain), seed=1, ignore_eos=True)
        front = next(self._turn_of_fronts)
        submit = Submit(front.new_numbers(1), request.prompt(grain), (sampling,), client=request.client)
        self._asked[front.submit([submit])] = request

    def _wake(self, machine: SimulatedMachine) -> None:
        """Put the next turn of a machine on the agenda, if it has something to do."""
        if machine.engine is None or machine.name in self._is_due:
            return
        if machine.inbox or not machine.engine.is_idle:
            self._is_due.add(machine.name)
            self._at(max(self.now, machine.engine.now), lambda: self._turn(machine))

    def _turn(self, machine: SimulatedMachine) -> None:
        """Let a machine compute one turn; what it says is heard when the turn is over."""
        engine = machine.engine
        if engine is None:
            self._is_due.discard(machine.name)
            return
        machine.take_inbox(self.now)
        events = engine.turn()

        def hear() -> None:
            if machine.engine is not engine:
                return  # it has died with it
            for front, view, own in zip(self.fronts, machine.views, machine.shares(events), strict=True):
                self._hear(front, view, own)

        self._at(engine.now + self.cluster.delay_seconds, hear)
        self._at(engine.now, lambda: self._end_turn(machine))

    def _end_turn(self, machine: SimulatedMachine) -> None:
        self._is_due.discard(machine.name)
        self._wake(machine)

    def _hear(self, front: Dispatcher, view: SimulatedReplica, events: EngineEvents) -> None:
        view.status = events.status or view.status
        for event in events.tokens:
            self._note(view, event)
        view.client.receive(events)
        front.receive(view, events)

    def _note(self, view: SimulatedReplica, event: TokenEvent) -> None:
        one = view.client.live.inside.get(event.sequence)
        if one is not None and not one.emitted and event.timings is not None and event.timings.first_token is not None:
            request = self._asked[one.subscription]
            self.outcome.first_tokens.append((request.client, event.timings.first_token - request.at))

    def _kill(self, machine: SimulatedMachine) -> None:
        if machine.engine is not None:
            self.outcome.busy_seconds.append(machine.engine.busy_seconds)
            machine.die()
            self._settle()

    def _begin(self, machine: SimulatedMachine) -> None:
        machine.begin(self.now)
        self._settle()

    def _settle(self) -> None:
        for front in self.fronts:
            front.settle()

    def _count(self) -> None:
        outcome, grain = self.outcome, self.cluster.costs.grain
        views = [view for machine in self.machines for view in machine.views]
        outcome.busy_seconds += [one.engine.busy_seconds for one in self.machines if one.engine is not None]
        outcome.num_prompt_tokens = grain * sum(one.num_prompt_tokens for one in views)
        outcome.num_cached_tokens = grain * sum(one.num_cached_tokens for one in views)
        outcome.num_moved = sum(front.num_moved for front in self.fronts)
        outcome.num_unfinished = sum(bool(subscription.open) for subscription in self._asked)
