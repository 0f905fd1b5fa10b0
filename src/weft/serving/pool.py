"""The engines of one model as one: replicas that are started, watched and drained; their common condition and status."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from weft.config import EngineSettings
from weft.errors import EngineDied, InvalidRequest
from weft.ipc.messages import DraftCounts, EngineEvents, EngineStatus, Leaving, Prefixes, Ready, ToFront
from weft.serving.autoscaler import Autoscaler, measure_load
from weft.serving.dispatcher import Dispatcher
from weft.serving.lifeline import DraftTotals, EngineCondition
from weft.serving.replica import LeftTotals, Replica
from weft.serving.starters import EnginePlacement, Starter

log = logging.getLogger("weft.serving")

DRAIN_TICK_SECONDS = 0.05
SCALE_SECONDS = 1.0  # between two looks at how many replicas there should be


class EnginePool:
    """Runs a model's replicas and gives requests to them; with one replica it is as if there were only that.

    With an autoscaler the first starters are used, as many as it wants; answers of a replica that is not wanted any more end
    within `drain_seconds`, or move.
    """

    def __init__(
        self,
        starters: Sequence[Starter],
        hang_seconds: float,
        placement: EnginePlacement | None = None,
        autoscaler: Autoscaler | None = None,
        drain_seconds: float = 0.0,
    ) -> None:
        self.starters, self.hang_seconds, self.drain_seconds = starters, hang_seconds, drain_seconds
        self.placement = placement  # None: engines are started here, or by others
        self.autoscaler = autoscaler  # None: there is a replica for each starter
        self.replicas: list[Replica] = []
        self.dispatcher = Dispatcher(self.replicas, is_elastic=autoscaler is not None)
        self.changed = asyncio.Event()  # set at the next change of condition, and then replaced
        self._left = LeftTotals()
        self._scaling: asyncio.Task[None] | None = None
        self.replicas += map(self._replica, starters if autoscaler is None else starters[: autoscaler.target])
        for replica in self.replicas:
            self.dispatcher.follow(replica)
        self.condition = self._condition()

    def _replica(self, starter: Starter) -> Replica:
        replica = Replica(starter, self.hang_seconds)
        replica.on_change = partial(self._update, replica)
        replica.on_message = partial(self._receive, replica)
        replica.why_not = partial(self._why_not, replica)
        replica.are_others_resuming = partial(self.dispatcher.is_resuming, replica)
        return replica

    def start(self) -> None:
        if self.placement is not None:
            self.placement.start()
        for replica in self.replicas:
            replica.start()
        if self.autoscaler is not None:
            self._scaling = asyncio.create_task(self._scale(self.autoscaler))

    async def stop(self) -> None:
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        if self.placement is not None:
            await self.placement.stop()
        why = self.condition.failed or "the server is being stopped"
        self._fail_all(why)

    @property
    def settings(self) -> EngineSettings:
        return self.replicas[0].starter.settings

    @property
    def pid(self) -> int | None:
        return next((replica.pid for replica in self.replicas if replica.pid is not None), None)

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas) + self._left.restarts

    @property
    def drafts(self) -> DraftTotals:
        return sum((replica.drafts for replica in self.replicas), self._left.drafts)

    @property
    def max_rows(self) -> int:
        return sum(replica.max_rows for replica in self.replicas)

    @property
    def status(self) -> EngineStatus:
        """The status of the only replica, or the sum of all, with what waits for a replica among the waiting rows."""
        if self.dispatcher.is_lone:
            return self.replicas[0].status
        return sum_statuses([replica.status for replica in self.replicas], self.dispatcher.num_queued)

    def replica(self, name: str) -> Replica:
        """Return the replica of this name; raise InvalidRequest if there is none."""
        found = next((replica for replica in self.replicas if replica.name == name), None)
        if found is None:
            names = ", ".join(replica.name for replica in self.replicas)
            raise InvalidRequest(f"replica {name!r} is none of this model's; there are {names}", "replica")
        return found

    async def renew(self, name: str, drain_seconds: float) -> None:
        """Replace a replica's engine: it takes nothing new, short answers end within `drain_seconds`, the others move."""
        replica = self.replica(name)
        if replica.is_retired:
            raise InvalidRequest(f"replica {name!r} is not renewed: it leaves, because the others suffice", "replica")
        replica.is_leaving = True
        try:
            await self._drain(replica, drain_seconds)
            replica.renew()
        finally:
            replica.is_leaving = replica.has_left = False

    async def _drain(self, replica: Replica, seconds: float) -> None:
        """Let the answers of a replica that takes nothing new end within `seconds`, and move the others."""
        deadline = time.monotonic() + seconds
        while len(replica.client.live) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_TICK_SECONDS)
        replica.has_left = True
        self.dispatcher.settle()

    async def _scale(self, autoscaler: Autoscaler) -> None:
        """Have as many replicas as the autoscaler wants, until cancelled; while none is ready, nothing is to be learnt."""
        while True:
            await asyncio.sleep(SCALE_SECONDS)
            if ready := [replica for replica in self.replicas if replica.max_rows]:
                await self.resize(autoscaler.decide(measure_load(ready, self.dispatcher.queue), time.monotonic()))

    async def resize(self, number: int) -> None:
        """Add or retire replicas, the last ones first, until there are so many; return when those that leave are gone.

        Names are taken in order, so that several fronts want the same engines without talking.
        """
        while len(self.replicas) < number:
            self._add(self.starters[len(self.replicas)])
        while len(self.replicas) > number and not self.replicas[-1].is_leaving:
            await self._retire(self.replicas[-1])

    def _add(self, starter: Starter) -> None:
        replica = self._replica(starter)
        self.replicas.append(replica)
        self.dispatcher.follow(replica)
        self._place()
        log.info("replica %s is added: there are %d now", replica.name, len(self.replicas))
        replica.start()

    async def _retire(self, replica: Replica) -> None:
        replica.is_retired = True
        await self._drain(replica, self.drain_seconds)
        await replica.stop()
        self.replicas.remove(replica)
        self.dispatcher.forget(replica)
        self._left += replica
        self._place()
        log.info("replica %s has left: there are %d now", replica.name, len(self.replicas))
        self._refresh()

    def _place(self) -> None:
        if self.placement is not None:
            self.placement.place([replica.name for replica in self.replicas])

    async def prefixes(self, *, clear: bool = False, scope: str | None = None) -> list[tuple[str, Prefixes]]:
        """Return what each ready replica has cached (of one scope), by its name; raise EngineError if one does not answer."""
        asked = [replica for replica in self.replicas if replica.client.send is not None] or self.replicas[:1]
        answers = await asyncio.gather(*(replica.client.prefixes(clear=clear, scope=scope) for replica in asked))
        return [(replica.name, answer) for replica, answer in zip(asked, answers, strict=True)]

    def _receive(self, replica: Replica, message: ToFront) -> None:
        match message:
            case EngineEvents():
                self.dispatcher.receive(replica, message)
            case Leaving():
                replica.is_leaving, replica.has_left = True, message.is_over
                self.dispatcher.settle()
            case Ready():
                replica.is_leaving = replica.has_left = False
                self.dispatcher.settle()

    def _update(self, replica: Replica) -> None:
        condition = self._condition()
        if condition.failed is not None:
            self._fail_all(condition.failed)
        elif replica.condition.failed is not None:
            log.error("replica %s is given up, the others go on: %s", replica.name, replica.condition.failed)
        self.dispatcher.settle()
        self._refresh()

    def _refresh(self) -> None:
        if (condition := self._condition()) != self.condition:
            self.condition = condition
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    def _fail_all(self, why: str) -> None:
        self.dispatcher.fail_all(lambda: EngineDied(f"the engine ended and no other goes on with this request: {why}"))

    def _why_not(self, replica: Replica, ready: Ready) -> str | None:
        """Return why an engine may not join the others: it serves another model, or other weights under the same name."""
        others = (one.condition.ready for one in self.replicas if one is not replica)
        other = next((one for one in others if one is not None), None)
        if other is None:
            return None
        if ready.weights and other.weights and ready.weights != other.weights:
            return f"{replica.name} has other weights or another config under the name {ready.model} than the other engines"
        if (ready.model, ready.weights or ready.folder) == (other.model, other.weights or other.folder):
            return None
        return f"replica {replica.name} serves {ready.model} of {ready.folder}, the others {other.model} of {other.folder}"

    def _condition(self) -> EngineCondition:
        """The best of the replicas' conditions: ready before silent, that before loading; failed only if all have failed."""
        conditions = [replica.condition for replica in self.replicas]

        def rank(condition: EngineCondition) -> int:
            if condition.ready is not None:
                return 1 if condition.is_sick else 0
            return 2 if condition.failed is None else 3

        return min(conditions, key=rank)


def sum_statuses(statuses: Sequence[EngineStatus], num_queued: int = 0) -> EngineStatus:
    """Return the sum of several engines' statuses; `num_queued` sequences wait for any of them."""

    def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
        total: Counter[str] = Counter()
        for one in counts:
            total.update(one)
        return dict(total)

    places = max((len(one.accepted_at) for one in statuses), default=0)
    images = [one.images for one in statuses]
    return EngineStatus(
        running=sum(one.running for one in statuses),
        waiting=sum(one.waiting for one in statuses) + num_queued,
        memory=added(one.memory for one in statuses),
        prefixes=added(one.prefixes for one in statuses),
        prefilling=tuple(number for one in statuses for number in one.prefilling),
        following=tuple(number for one in statuses for number in one.following),
        alone=added(one.alone for one in statuses),
        drafts=sum((one.drafts for one in statuses), DraftCounts()),
        num_drafts=sum(one.num_drafts for one in statuses),
        accepted_at=tuple(sum(one.accepted_at[at] for one in statuses if at < len(one.accepted_at)) for at in range(places)),
        images={kind: sum(one.get(kind, 0.0) for one in images) for kind in {kind for one in images for kind in one}},
        queued_tokens=sum(one.queued_tokens for one in statuses),
    )
